"""An answer, its wording and its layout."""

import textwrap
from collections.abc import Sequence
from typing import Literal

import msgspec
import polars as pl

from stepscope.explain.commands import fit_command
from stepscope.explain.experiments.cases import describe_case
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Column, Table
from stepscope.recording.store import Manifest
from stepscope.units import say_share

Status = Literal["answered", "not in this recording"]
_INDENT = "   "


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`figure` is the number with its unit, `sentence` a sentence about it. An unanswered question has no figure: its
    sentence is the reason, and `command` makes a recording that answers it."""

    key: str  # stable, for programs
    question: str
    figure: str = ""
    sentence: str
    evidence: Table | None = None
    status: Status = "answered"
    command: str = ""


def missing(key: str, question: str, reason: str, command: str) -> Answer:
    """An unanswered question. `reason` is a clause without a capital and a period."""
    sentence = f"{reason[0].upper()}{reason[1:]}."
    return Answer(key=key, question=question, sentence=sentence, status="not in this recording", command=command)


def fit_commands(answers: Sequence[Answer], manifest: Manifest) -> tuple[Answer, ...]:
    """The answers with commands for the model that was recorded."""
    return tuple(msgspec.structs.replace(one, command=fit_command(one.command, manifest)) for one in answers)


def answers_table(answers: Sequence[Answer]) -> Table:
    return Table(
        title="Questions",
        columns=(
            Column(key="key", label="key", detail=True),
            Column(key="question", label="question"),
            Column(key="figure", label="figure"),
            Column(key="answer", label="answer"),
            Column(key="status", label="status", detail=True),
            Column(key="command", label="command", detail=True),
        ),
        rows=tuple(
            (one.key, one.question, one.figure or None, one.sentence, one.status, one.command or None)
            for one in answers
        ),
    )


def evidence_tables(answers: Sequence[Answer]) -> tuple[Table, ...]:
    """The evidence of each answer, numbered like its question."""
    return tuple(
        msgspec.structs.replace(one.evidence, title=f"{number}. {one.evidence.title}")
        for number, one in enumerate(answers, start=1)
        if one.evidence is not None
    )


def answers_text(answers: Sequence[Answer], width: int | None) -> str:
    """One paragraph per question. Without a terminal, lines have 100 characters."""
    room = max(40, min(width or 100, 100))
    return "\n".join(_paragraph(number, one, room) for number, one in enumerate(answers, start=1))


def _paragraph(number: int, one: Answer, room: int) -> str:
    head = textwrap.fill(f"{number}. {one.question}", room, subsequent_indent=_INDENT)
    said = one.sentence if one.status == "answered" else f"Unknown. {one.sentence}"
    body = [f"[{one.figure}] {said}" if one.figure else said]
    if one.command:
        body.append(f"{'For more' if one.status == 'answered' else 'To find out'}: {one.command}")
    lines = [
        textwrap.fill(
            part,
            room,
            initial_indent=_INDENT,
            subsequent_indent=_INDENT,
            break_on_hyphens=False,
            break_long_words=False,
        )
        for part in body
    ]
    return "\n".join([head, *lines]) + "\n"


# --- What the questions share ---------------------------------------------------------------------------------------


def name_profile(profile: Profile) -> str:
    """The case in a few words, or the file."""
    manifest = profile.recording.manifest
    return describe_case(manifest.case) if manifest.case else manifest.file or "the recording"


def stepped(profile: Profile) -> pl.DataFrame:
    """The kernels of the marked steps, or all kernels if no steps are marked: `num_steps` whole steps, to count what a
    step launches."""
    inside = profile.kernels.filter(pl.col("step").is_not_null())
    return inside if inside.height else profile.kernels


def in_phases(profile: Profile, *phases: str) -> pl.DataFrame:
    """The kernels of these phases in the whole recording: `clock.num_steps` steps, as in all tables."""
    return profile.kernels.filter(pl.col("phase").is_in(phases))


def why_unknown(profile: Profile, *phases: str) -> str:
    """Why a question about these phases has no answer; empty if it has one. Kernels of unknown phase could belong to
    them, and if they took longer than the known ones, anything said about these phases could be wrong."""
    known, unknown = time_of(in_phases(profile, *phases)), time_of(profile.kernels.filter(pl.col("phase").is_null()))
    if known >= max(1, unknown):
        return ""
    if not unknown:
        return f"this recording has no {phases[0]} pass"
    share, known_share = (say_share(time / max(1, profile.gpu_time_ns)) for time in (unknown, known))
    if not known:
        return f"the phase of {share} of kernel time is unknown"
    return f"the phase of {share} of kernel time is unknown, and only {known_share} is known to be {phases[0]}"


def time_of(kernels: pl.DataFrame) -> int:
    return int(kernels["time_ns"].sum())


def share_by(kernels: pl.DataFrame, *columns: str) -> pl.DataFrame:
    """Time, count and share of the kernel time for each value of `columns`, the largest first."""
    total = max(1, time_of(kernels))
    return (
        kernels.group_by(*columns, maintain_order=True)
        .agg(time_ns=pl.col("time_ns").sum(), count=pl.len().cast(pl.Int64))
        .with_columns(share=pl.col("time_ns") / total)
        .sort("time_ns", *columns, descending=[True, *([False] * len(columns))], nulls_last=True)
    )

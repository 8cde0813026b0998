"""`stepscope verify`: compare evidence files with a claim."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from stepscope.errors import Exit, StepscopeError
from stepscope.explain.kernel_names import decode
from stepscope.findings import Column, Table
from stepscope.jobs.recover import read_evidence
from stepscope.recording.store import Recording
from stepscope.recover.claims.claim import Claim, read_claim
from stepscope.recover.claims.verdict import ClaimVerdict, Verification, describe_interval, undecided
from stepscope.recover.claims.verification import verify
from stepscope.recover.evidence.order import NoTransformerError
from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.replay.outcome import ReplayResult, ReplayVerdict
from stepscope.recover.replay.tables import replay_tables
from stepscope.recover.reports.challenge import Challenge, count_passing
from stepscope.units import count_noun

if TYPE_CHECKING:  # loads what runs a model, which few calls need
    from stepscope.jobs.replay import Replayer

_EXITS = {
    ClaimVerdict.CONSISTENT: Exit.OK,
    ClaimVerdict.REFUTED: Exit.GATE_FAILED,
    ClaimVerdict.UNDECIDED: Exit.UNDECIDED,
}
_MOST_ROWS = 10
_MULTIPLYING = ("GEMM", "attention")


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """The result, and the GPU's name according to the evidence. With `challenge`, the claimed batch and context follow
    from it. `replays` are part of the verdict."""

    verification: Verification
    device: str = ""
    challenge: Challenge | None = None
    replays: tuple[ReplayResult, ...] = ()


def verify_files(
    paths: Sequence[Path],
    claim: Path,
    *,
    batch: int | None = None,
    context: int | None = None,
    dtype: str | None = None,
    challenge: Challenge | None = None,
    replayer: "Replayer | None" = None,
) -> Verified:
    """Raises StepscopeError for an invalid claim, and for evidence that cannot be read or has no GPU kernels."""
    claimed = read_claim(claim, batch=batch, context=context, dtype=dtype)
    if challenge is not None:
        claimed = _set_task(claimed, challenge)
    if replayer is not None:
        replayer.check(claimed)
    expected = "expected a profiler trace of a GPU run, or Nsight Compute counters"
    recordings, evidence, device = read_evidence(paths, expected=expected)
    try:
        answer = verify(evidence, claimed, unseen=_unseen_share(recordings, evidence))
    except NoTransformerError as error:
        answer = undecided(claimed, str(error), evidence, known=error.known)
    replays: tuple[ReplayResult, ...] = ()
    if replayer is not None and (answer.verdict is ClaimVerdict.REFUTED or not answer.kernels_compared):
        answer = msgspec.structs.replace(answer, notes=(*answer.notes, "not replayed: it would not change the verdict"))
    elif replayer is not None:
        replays = replayer.run(claimed, claim, recordings, evidence)
    return Verified(verification=_combine(answer, replays), device=device, challenge=challenge, replays=replays)


def _set_task(claim: Claim, challenge: Challenge) -> Claim:
    """Return the claim with the batch and context that follow from the nonce."""
    for name in ("batch", "context"):
        value, asked = getattr(claim, name), getattr(challenge, name)
        if value not in (None, asked):
            raise StepscopeError(
                f"the claim has {name} `{value}`, and the nonce asks for `{asked}`",
                detail="with a challenge, batch and context follow from the nonce",
                hint="remove batch and context from the claim",
            )
    return msgspec.structs.replace(claim, batch=challenge.batch, context=challenge.context)


def _combine(answer: Verification, replays: Sequence[ReplayResult]) -> Verification:
    """Return the answer with what the replays add to it: a refutation counts most, then a doubt."""
    refuted = [f"replay: {one.why}" for one in replays if one.verdict is ReplayVerdict.REFUTED]
    if refuted:
        return msgspec.structs.replace(answer, verdict=ClaimVerdict.REFUTED, why=refuted[0], missing=())
    unclear = [f"replay: {one.why}" for one in replays if one.verdict is ReplayVerdict.UNDECIDED]
    if not unclear:
        return answer
    missing = (*answer.missing, *unclear)
    return msgspec.structs.replace(answer, verdict=ClaimVerdict.UNDECIDED, why="; ".join(missing), missing=missing)


def _unseen_share(recordings: Sequence[Recording], evidence: Sequence[KernelEvidence]) -> float:
    """Return the share of GPU time in kernels that were skipped: those on other streams, and those past the limit. Or
    the share of GEMMs and attention calls, if that is larger: times can be missing or wrong."""
    whole = multiplying = 0
    for one in recordings:
        kernels = one.kernels.filter(pl.col("kind") == "kernel")
        whole += int((kernels["end_ns"] - kernels["start_ns"]).sum() or 0)
        launches = kernels.group_by("name").len().iter_rows()
        multiplying += sum(number for name, number in launches if decode(name or "").kernel_class in _MULTIPLYING)
    looked_at = [sighting for one in evidence for sighting in one.sightings]
    spent = sum(one.duration_ns for one in looked_at)
    compared = sum(one.name.kernel_class in _MULTIPLYING for one in looked_at)
    shares = [1 - part / total for part, total in ((spent, whole), (compared, multiplying)) if total]
    return max(0.0, *shares) if shares else 0.0


def state(verified: Verified) -> dict[str, object]:
    """Return the result as JSON-compatible values, as printed and signed."""
    plain: dict[str, object] = msgspec.to_builtins(verified.verification)
    if verified.challenge is not None:
        plain["challenge"] = msgspec.to_builtins(verified.challenge)
    if verified.replays:
        plain["replays"] = msgspec.to_builtins(verified.replays)
    return plain


def encode(verified: Verified) -> str:
    return msgspec.json.format(msgspec.json.encode(state(verified)), indent=2).decode() + "\n"


def exit_code(verified: Verified) -> Exit:
    return _EXITS[verified.verification.verdict]


def describe(verified: Verified, paths: Sequence[Path]) -> Iterator[str | Table]:
    """Yield text and tables in the order to print them."""
    answer = verified.verification
    yield f"{', '.join(path.name for path in paths)}: {answer.verdict.value}\n  {answer.why}\n"
    yield f"  {_list_fields(answer)}\n"
    yield (
        f"  {count_noun(answer.kernels, 'kernel')}: {answer.kernels_compared:,} compared with exact predictions, "
        f"{answer.kernels_counted:,} compared by element count\n"
    )
    if verified.challenge is not None:
        yield f"  {_describe_challenge(verified.challenge, answer)}\n"
    for one in verified.replays:
        yield f"  replay: {one.verdict.value}: {one.why}\n" if one.verdict is ReplayVerdict.AGREES else ""
    yield "\n"
    tables = [_fields_table(answer), _comparison_table(answer)]
    if answer.refuted_by:
        tables.append(_refutation_table(answer))
    if answer.unexplained:
        tables.append(_work_table(answer))
    tables += [table for one in verified.replays for table in replay_tables(one)]
    for number, table in enumerate(tables):
        if number:
            yield "\n"
        is_last = number == len(tables) - 1
        yield msgspec.structs.replace(table, notes=(*table.notes, *answer.notes)) if is_last else table


def _list_fields(answer: Verification) -> str:
    """Return what the verdict is about: the claimed fields by how they were tested."""
    order = ("refuted", "follows", "not refuted", "tested", "narrowed", "not tested")
    verdicts: dict[str, list[str]] = {one: [] for one in order}
    for name, result in answer.fields.items():
        if result.verdict in verdicts:
            verdicts[result.verdict].append(f"{name} (implied)" if result.implied else name)
    return "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in verdicts.items() if names)


def _describe_challenge(challenge: Challenge, answer: Verification) -> str:
    task = f"challenge {challenge.nonce}: batch {challenge.batch}, context {challenge.context}"
    if answer.verdict is ClaimVerdict.REFUTED:
        return f"{task}, one of {challenge.shapes:,} shapes"
    batches, contexts = (answer.fields[name].passes_too for name in ("batch", "context"))
    others = count_passing(challenge, batches=batches, contexts=contexts)
    return f"{task}, one of {challenge.shapes:,} shapes, of which {others:,} others would pass"


def _fields_table(answer: Verification) -> Table:
    columns = (
        Column(key="field", label="field"),
        Column(key="claimed", label="claimed"),
        Column(key="verdict", label="verdict"),
        Column(key="passes_too", label="other values that pass"),
    )
    rows = []
    for name, result in answer.fields.items():
        claimed = "" if result.claimed is None else _say(result.claimed)
        others = ", ".join(describe_interval(one) for one in result.passes_too)
        rows.append((name, f"{claimed} (implied)" if result.implied else claimed, result.verdict, others))
    return Table(title="Claimed fields", columns=columns, rows=tuple(rows))


def _say(value: int | str | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else f"{value:,}"


def _comparison_table(answer: Verification) -> Table:
    columns = (
        Column(key="what", label="kernels"),
        Column(key="expected", label="expected"),
        Column(key="launches", label="launches", kind="count"),
        Column(key="agree", label="agree", kind="count"),
    )
    rows = tuple((one.what, one.expected, one.launches, one.agree) for one in answer.comparisons)
    return Table(title="Kernels compared with the claim", columns=columns, rows=rows)


def _refutation_table(answer: Verification) -> Table:
    columns = (
        Column(key="index", label="#", kind="count"),
        Column(key="kernel", label="kernel"),
        Column(key="where", label="where"),
        Column(key="what", label="check"),
        Column(key="expected", label="expected"),
        Column(key="seen", label="got"),
        Column(key="file", label="file", detail=True),
    )
    shown = answer.refuted_by[:_MOST_ROWS]
    rows = tuple((one.index, one.kernel, one.where, one.what, one.expected, one.seen, one.file) for one in shown)
    more = len(answer.refuted_by) - len(shown)
    notes = (f"{more:,} more in --format json",) if more else ()
    return Table(title="Kernels that refute the claim", columns=columns, rows=rows, notes=notes)


def _work_table(answer: Verification) -> Table:
    columns = (
        Column(key="kernel", label="kernel"),
        Column(key="launches", label="launches", kind="count"),
        Column(key="time_us", label="time", kind="us"),
        Column(key="operations", label="operations", kind="count"),
        Column(key="first", label="first #", kind="count"),
        Column(key="why", label="reason"),
    )
    shown = answer.unexplained[:_MOST_ROWS]
    rows = tuple(
        (one.name, one.launches, one.duration_ns / 1e3, one.operations, one.first_index, one.why) for one in shown
    )
    more = len(answer.unexplained) - len(shown)
    notes = [f"{answer.unexplained_share:.2%} of the GPU time"]
    notes += [f"{more:,} more in --format json"] if more else []
    return Table(title="Work that the claim does not explain", columns=columns, rows=rows, notes=tuple(notes))

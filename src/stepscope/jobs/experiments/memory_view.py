"""What `stepscope memory` and `stepscope explain` show of memory: a page, one part of it, answers, a picture."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError
from stepscope.explain.memory import MemoryProfile, make_memory_profile
from stepscope.explain.memory.grid import grid_table, is_study, precision_table, study_table
from stepscope.explain.memory.timeline import By, memory_timeline
from stepscope.findings import Table, Timeline
from stepscope.jobs.experiments.memory_sweep import recording_folder
from stepscope.recording import store
from stepscope.recording.rows.memory_summary import MemoryRow


def answer_profile(
    profile: MemoryProfile, width: int | None, *, words: bool, evidence: bool
) -> tuple[str, list[Table]]:
    """The answers in words, or as a table where another format is asked for, and what they rest on."""
    from stepscope.explain.memory.answers import answer_memory
    from stepscope.explain.questions.answers import answers_table, answers_text, evidence_tables

    answers = answer_memory(profile)
    tables = [] if words else [answers_table(answers)]
    if evidence:
        tables += evidence_tables(answers)
    return answers_text(answers, width) if words else "", tables


def encode_profile(profile: MemoryProfile) -> str:
    content = msgspec.json.encode(profile.summary)
    return msgspec.json.format(content, indent=1).decode() + "\n"


def draw_profile(profile: MemoryProfile, *, by: By, step: str) -> Timeline:
    """`step` is `last`, `all`, or a step's number as people count, from one."""
    chosen = _choose_step(profile, step)
    return memory_timeline(profile, by=by, step=chosen)


def _choose_step(profile: MemoryProfile, step: str) -> int | None:
    if step == "all" or (step == "last" and not profile.steps):
        return None
    if not profile.steps:
        raise StepscopeError(f"no steps are marked in this recording, so there is no step `{step}`", hint="--step all")
    if step == "last":
        return profile.last_plain_step
    if step.isdecimal() and int(step) - 1 in profile.steps:
        return int(step) - 1
    raise StepscopeError(
        f"there is no step `{step}` in this recording",
        detail=f"it has steps {profile.steps[0] + 1} to {profile.steps[-1] + 1}",
        hint="--step last, or --step all",
    )


# --- Rows of a grid ---------------------------------------------------------------------------------------------------


def load_profile(folder: Path, row: MemoryRow) -> MemoryProfile:
    """The recording behind a row."""
    path = recording_folder(folder, row.key)
    if not store.is_recording(path):
        raise StepscopeError(
            f"the recording of this case is gone: `{path}`",
            detail="its row is there, and says what the table shows",
            hint="the same command with --fresh",
        )
    try:
        return make_memory_profile(store.load(path))
    except StepscopeError as error:
        raise StepscopeError(
            error.message, detail=error.detail, hint="the same command with --fresh records it again"
        ) from None


def show_rows(rows: Sequence[MemoryRow], *, study: bool) -> list[Table]:
    if study or is_study(rows):
        return [study_table(rows)]
    compared = precision_table(rows)
    return [grid_table(rows), *([compared] if compared else [])]


def show_saved(folder: Path, rows: Sequence[MemoryRow]) -> list[Table]:
    """What autograd keeps, eager beside compiled, of two cases that differ in nothing else."""
    from stepscope.explain.memory.saved import compare_saved

    pair = {row.case.workload.compile: row for row in rows if row.status == "ok"}
    if len(rows) != 2 or len(pair) != 2:
        raise StepscopeError(
            "`--table` is of one case, or `--table saved` of one both eager and compiled",
            hint="--table saved --compile no,yes",
        )
    eager, compiled = (load_profile(folder, pair[value]).recording.saved for value in (False, True))
    return list(compare_saved(eager, compiled))

"""Which clock a page goes by. A step is timed by itself, timed again around the recording, and timed while recorded;
the three differ, by a third for a step that waits for its host. A share of one beside a time of another cannot be
checked by a reader, so a page has one step: the bench's where it is of the same run, else the profile's.
"""

from collections.abc import Sequence

import msgspec

from stepscope.explain.experiments.bench_tables import step_ms
from stepscope.explain.trace.profile import Profile
from stepscope.recording.rows.bench import BenchRow
from stepscope.spec import Case, Workload

NOISE = 0.05  # so much longer than the step its kernels may be: the two were not measured at once


def has_steps(profile: Profile) -> bool:
    """Whether a step's time means anything: not under Nsight Compute, which runs one kernel at a time."""
    return bool(profile.steps.height) and profile.recording.manifest.source != "nsight compute"


def is_same_run(case: Case, other: Case) -> bool:
    """Whether two cases are one, without what makes no other run of it."""
    return _plain(case) == _plain(other)


def _plain(case: Case) -> Workload:
    return msgspec.structs.replace(case.workload, device="auto", seed=0)


def find_timed(rows: Sequence[BenchRow]) -> BenchRow | None:
    """The row of the run itself, where it came to an end."""
    return rows[0] if rows and rows[0].measurement is not None else None


def median_ns(row: BenchRow) -> float:
    timed = step_ms(row)
    assert timed is not None, "only a row that came to an end is asked"
    return timed.median * 1e6


def is_of_row(profile: Profile, row: BenchRow) -> bool:
    """Whether the steps of a profile are those that a row timed, as far as the profile says what it is of."""
    case = profile.recording.manifest.case
    return has_steps(profile) and (case is None or is_same_run(case, row.case))


def is_too_short(row: BenchRow, profile: Profile | None) -> bool:
    """Whether the kernels of a step alone take longer than the step was timed at: one of the two is not what it seems.
    Not on a CPU, where the recorder slows the operators themselves."""
    if profile is None or profile.on_cpu or not is_of_row(profile, row):
        return False
    return profile.busy_step_ns > (1 + NOISE) * median_ns(row)

"""Many checks in one start of ranks, each a separate test: starting ranks costs more than most checks.

A check is a function of rank and world that asserts, on every rank. They run in order; after one fails the ranks are
out of step, so the remaining ones count as not run.
"""

import traceback
from collections.abc import Callable, Sequence

from tests.cpu.parallel.ranks import run_ranks

Check = Callable[[int, int], None]


class Outcome:
    """Return which checks every rank passed, and the error of the first that failed."""

    def __init__(self, answers: list[tuple[list[str], str]]) -> None:
        self._passed = set.intersection(*(set(names) for names, _ in answers))
        self._failures = [f"rank {rank}: {failure}" for rank, (_, failure) in enumerate(answers) if failure]

    def require(self, check: Check) -> None:
        assert check.__name__ in self._passed, "\n".join(self._failures)


def run_checks(checks: Sequence[Check], world: int) -> Outcome:
    return Outcome(run_ranks(_run, world, list(checks)))


def _run(rank: int, world: int, checks: list[Check]) -> tuple[list[str], str]:
    passed: list[str] = []
    for check in checks:
        try:
            check(rank, world)
        except Exception:  # noqa: BLE001  # the process boundary: the test of that check raises it again
            return passed, f"{check.__name__} raised\n{traceback.format_exc()}"
        passed.append(check.__name__)
    return passed, ""

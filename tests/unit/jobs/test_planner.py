"""The processes that simulate steps for `stepscope plan`."""

import threading
from typing import Any

import pytest

from stepscope.errors import StepscopeError
from stepscope.jobs.plan import Planner
from stepscope.jobs.plan_target import choose_gpu
from stepscope.jobs.workers.process import Died, Ended
from tests.unit.plans import workload


class DeadWorkers:
    """Their process was killed. Remembers the thread that started them."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()

    def run(self, *_: Any, **__: Any) -> Ended:
        return Ended(answer=Died(status="killed", reason="killed by SIGKILL while starting"), log=b"")

    def __exit__(self, *_: object) -> None: ...


def make_planner(monkeypatch: pytest.MonkeyPatch, started: list[DeadWorkers]) -> Planner:
    def start(_self: Planner, _workload: object) -> DeadWorkers:
        started.append(DeadWorkers())
        return started[-1]

    monkeypatch.setattr(Planner, "_start", start)
    return Planner(choose_gpu("H200", None), at_once=2)


def test_a_process_that_died_says_nothing_about_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_planner(monkeypatch, []) as planner, pytest.raises(StepscopeError, match="killed"):
        planner.predict_all([workload(batch=1)])


def test_threads_that_started_processes_live_as_long_as_they(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux kills a process when the thread that started it ends."""
    started: list[DeadWorkers] = []
    with make_planner(monkeypatch, started) as planner:
        with pytest.raises(StepscopeError):
            planner.predict_all([workload(batch=1), workload(batch=2)])
        assert started
        assert all(one.thread.is_alive() for one in started)

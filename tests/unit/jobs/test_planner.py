"""The processes that simulate steps for `stepscope plan`."""

import os
import signal
import threading
from typing import Any

import pytest

from stepscope.errors import StepscopeError
from stepscope.hardware import chip_of
from stepscope.jobs.plan import Planner
from stepscope.jobs.plan_target import choose_gpu, find_card, look_up_card
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


class SlowWorkers(DeadWorkers):
    """Their process simulates until it is killed."""

    def __init__(self) -> None:
        super().__init__()
        self.killed = threading.Event()
        self.ends: list[bool] = []  # of requests: whether they were killed

    def run(self, *_: Any, **__: Any) -> Ended:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        self.ends.append(self.killed.wait(10))
        return super().run()

    def kill(self) -> None:
        self.killed.set()


def test_an_interrupt_ends_what_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if system calls go on after a signal, as they do with polars."""
    slow = SlowWorkers()
    monkeypatch.setattr("stepscope.jobs.plan.Workers", lambda *_, **__: slow)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.siginterrupt(signal.SIGINT, False)  # noqa: FBT003
    try:
        with pytest.raises(KeyboardInterrupt), Planner(choose_gpu("H200", None)) as planner:
            planner.predict_all([workload(batch=1), workload(batch=2)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert slow.ends == [True]


def test_gpus_of_desktops_need_no_rtx_in_their_name() -> None:
    """Also as the value of `--fit`, where `4090` could be an amount of memory."""
    assert look_up_card("4090") == look_up_card("RTX 4090") is not None
    assert look_up_card("24") is None


def test_gpus_that_are_proposed_can_be_planned_for() -> None:
    with pytest.raises(StepscopeError, match="unknown GPU") as error:
        find_card("H2000")
    proposed = error.value.detail.partition("expected one of ")[2].partition(";")[0].split(", ")
    assert "H200 SXM" in proposed
    assert all(chip_of(find_card(name)) for name in proposed)

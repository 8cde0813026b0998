"""Unprofiled steps and their parts."""

import itertools

import pytest
import torch

from stepscope.loop.loop_clock import PARTS, REST, LoopClock

CPU = torch.device("cpu")


def run_step(clock: LoopClock, **parts_ns: int) -> None:
    clock.start()
    for part, spent_ns in parts_ns.items():
        clock.add(part, spent_ns)
    clock.stop()


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which every step takes 1000 ns."""
    now = iter(range(0, 10**6, 1000))
    monkeypatch.setattr("stepscope.loop.loop_clock.time.perf_counter_ns", lambda: next(now))


@pytest.mark.usefixtures("ticks")
def test_parts_and_the_rest_add_up_to_the_step() -> None:
    clock = LoopClock()
    with clock.timing(CPU):
        run_step(clock, input=300, backward=400)
        run_step(clock, input=100, backward=200, optimizer=50)
    phases = clock.phases_ns()
    assert phases == {"input": (300, 100), "backward": (400, 200), "optimizer": (0, 50), "other": (300, 650)}
    assert tuple(phases) == (*PARTS, REST)
    assert clock.kind == "host"


@pytest.mark.usefixtures("ticks")
def test_micro_batches_are_summed() -> None:
    clock = LoopClock()
    with clock.timing(CPU):
        clock.start()
        for _ in range(4):
            clock.add("backward", 100)
        clock.stop()
    assert clock.phases_ns()["backward"] == (400,)


@pytest.mark.usefixtures("ticks")
def test_a_part_is_never_longer_than_its_step() -> None:
    """Clocks are read one after the other, so a part may seem longer than the step around it."""
    clock = LoopClock()
    with clock.timing(CPU):
        run_step(clock, input=1500)
    assert clock.phases_ns() == {"input": (1000,), "backward": (0,), "optimizer": (0,), "other": (0,)}


def test_nothing_is_timed_outside_the_context() -> None:
    clock = LoopClock()
    run_step(clock, input=100)
    with clock.timing(CPU):
        clock.start()
        clock.stop()
    run_step(clock, input=100)
    clock.stop()  # nothing was started
    clock.add("input", 100)
    assert len(clock.phases_ns()["input"]) == 1
    assert LoopClock().phases_ns() == {}


def test_uneven_steps_are_unreliable(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.accumulate(itertools.cycle([0, 1000, 0, 9000]))
    monkeypatch.setattr("stepscope.loop.loop_clock.time.perf_counter_ns", lambda: next(now))
    clock = LoopClock()
    with clock.timing(CPU):
        for _ in range(8):
            run_step(clock)
    assert any("spread" in doubt.text for doubt in clock.doubts())

"""Where the steps of a loop begin, from the events of many kinds of loops."""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.loop.finder import StepFinder

# Events: an optimizer's step, a batch of a loader, a backward pass and a call of zero_grad.
FIRST, SECOND = "optimizer 1", "optimizer 2"
BATCH, EVALUATION = "loader 1", "loader 2"
BACKWARD, ZERO_GRAD = "backward", "zero_grad"
SKIP = 10  # steps before the search ends
MOST_STEPS = 6  # of an optimizer in one period


def send(finder: StepFinder, event: str) -> bool:
    kind, _, number = event.partition(" ")
    match kind:
        case "optimizer":
            return finder.optimizer_stepped(int(number))
        case "loader":
            return finder.batch_requested(int(number))
        case "backward":
            return finder.backward_ran()
        case _:
            return finder.gradients_cleared()


def settle(finder: StepFinder, period: Sequence[str], skip: int = SKIP) -> int:
    """Repeat a period until the search ends, as the recorder ends it, and return how many it took. The last one is run
    to its end."""
    for number in range(1, 2000):
        for place, event in enumerate(period):
            send(finder, event)
            if finder.steps_seen >= skip and not finder.is_waiting:
                finder.settle()
                for rest in period[place + 1 :]:
                    send(finder, rest)
                return number
    raise AssertionError("the search did not end")


def boundaries(finder: StepFinder, events: Iterable[str]) -> list[int]:
    """The places of the events at which a step begins."""
    return [place for place, event in enumerate(events) if send(finder, event)]


def search(period: Sequence[str], skip: int = SKIP) -> StepFinder:
    finder = StepFinder()
    settle(finder, period, skip)
    return finder


def test_without_a_loader_a_step_ends_with_the_optimizer() -> None:
    finder = search([ZERO_GRAD, BACKWARD, FIRST])
    assert finder.found_by == "optimizer steps"
    assert boundaries(finder, [ZERO_GRAD, BACKWARD, FIRST] * 3) == [2, 5, 8]


def test_the_search_takes_as_many_steps_as_are_skipped() -> None:
    finder = StepFinder()
    assert settle(finder, [BACKWARD, FIRST], skip=7) == 7
    assert (finder.steps_seen, finder.optimizer_steps, finder.backwards) == (7, 7, 7)


def test_while_the_search_lasts_steps_are_found_from_the_second_on() -> None:
    """Warm-up steps are counted this way."""
    assert boundaries(StepFinder(), [BACKWARD, FIRST] * 4) == [3, 5, 7]


def test_with_a_loader_a_step_begins_with_its_first_batch() -> None:
    """Logging and the scheduler, after the optimizer, belong to the step before."""
    period = [BATCH, BACKWARD, FIRST, ZERO_GRAD]
    assert boundaries(search(period), period * 3) == [0, 4, 8]


@pytest.mark.parametrize("micro_batches", [2, 4, 64])
def test_accumulated_micro_batches_are_one_step(micro_batches: int) -> None:
    """Many backward passes before the first optimizer step are not steps, either."""
    period = [BATCH, BACKWARD] * micro_batches + [FIRST, ZERO_GRAD]
    finder = search(period)
    assert finder.found_by == "optimizer steps"
    assert boundaries(finder, period * 3) == [0, len(period), 2 * len(period)]
    assert finder.backwards == micro_batches * finder.steps_seen
    assert finder.batches_of(1) == finder.backwards
    without_loader = [BACKWARD] * micro_batches + [FIRST]
    assert boundaries(search(without_loader), without_loader * 2) == [micro_batches, 2 * micro_batches + 1]


@pytest.mark.parametrize(("critic_steps", "skip"), [(1, 2), (1, 10), (2, 3), (5, 6), (5, 10), (5, 100), (20, 25)])
def test_a_gan_has_one_step_per_generator_step(critic_steps: int, skip: int) -> None:
    """If the search lasts until the generator has stepped once."""
    period = [ZERO_GRAD, BACKWARD, FIRST] * critic_steps + [ZERO_GRAD, BACKWARD, SECOND]
    finder = search(period, skip)
    assert boundaries(finder, period * 2) == [len(period) - 1, 2 * len(period) - 1]


def test_optimizers_of_single_parameters_make_one_step_together() -> None:
    """They step inside the backward pass, before it is reported."""
    period = [*(f"optimizer {number}" for number in range(4)), BACKWARD]
    assert boundaries(search(period), period * 3) == [3, 8, 13]


def test_an_optimizer_that_stepped_once_is_not_waited_for_forever() -> None:
    """A trial step of another optimizer, before the loop."""
    finder = StepFinder()
    send(finder, SECOND)
    settle(finder, [BACKWARD, FIRST])
    assert boundaries(finder, [BACKWARD, FIRST] * 2) == [1, 3]


def test_a_loader_that_is_no_longer_used_does_not_hide_steps() -> None:
    """One step is lost: its end waits for a batch, until the next optimizer step shows that none comes."""
    finder = search([BATCH, BACKWARD, FIRST])
    assert boundaries(finder, [BATCH, BACKWARD, FIRST]) == [0]
    assert boundaries(finder, [BACKWARD, FIRST] * 3) == [1, 3, 5]


def test_batches_of_an_evaluation_are_in_the_step_before() -> None:
    period = [BATCH, BACKWARD, FIRST]
    finder = search([*period * 5, EVALUATION, EVALUATION])
    assert boundaries(finder, [*period, EVALUATION, EVALUATION, *period]) == [0, 5]


def test_a_loader_of_few_steps_marks_none() -> None:
    """An evaluation every few steps, in a loop whose own batches do not come from a loader."""
    period = [BACKWARD, FIRST]
    finder = search([*period * 3, EVALUATION])
    assert boundaries(finder, [*period, EVALUATION, *period]) == [1, 4]


def test_without_an_optimizer_zero_grad_separates_steps() -> None:
    period = [BACKWARD, BACKWARD, ZERO_GRAD]
    finder = search(period)
    assert finder.found_by == "calls of zero_grad"
    assert boundaries(finder, period * 2) == [2, 5]
    assert boundaries(finder, [ZERO_GRAD, ZERO_GRAD]) == []  # nothing to clear


def test_clearing_gradients_twice_is_one_step() -> None:
    finder = StepFinder()
    assert settle(finder, [BACKWARD, ZERO_GRAD, ZERO_GRAD]) == SKIP
    assert finder.steps_seen == SKIP


def test_backward_passes_alone_are_steps_only_after_many() -> None:
    """The first few may be the micro-batches of one step, whose optimizer has yet to come."""
    finder = StepFinder()
    assert boundaries(finder, [BACKWARD] * 40) == []
    assert finder.steps_seen == 0
    settle(finder, [BACKWARD])
    assert finder.found_by == "backward passes"
    assert boundaries(finder, [BACKWARD] * 3) == [0, 1, 2]


@st.composite
def periods(draw: st.DrawFn) -> list[str]:
    """One period of a loop, in any order: optimizers of which one steps once, batches, backward passes, zero_grad."""
    events = ["optimizer 0"]
    for number, steps in enumerate(draw(st.lists(st.integers(1, MOST_STEPS), max_size=3)), start=1):
        events += [f"optimizer {number}"] * steps
    for number, batches in enumerate(draw(st.lists(st.integers(0, 4), max_size=2)), start=1):
        events += [f"loader {number}"] * batches
    events += [BACKWARD] * draw(st.integers(0, 8)) + [ZERO_GRAD] * draw(st.integers(0, 3))
    return draw(st.permutations(events))


@given(period=periods(), skip=st.integers(MOST_STEPS + 1, 30), count=st.integers(1, 10))
def test_a_periodic_loop_has_one_step_per_period(period: list[str], skip: int, count: int) -> None:
    finder = search(period, skip)
    send_all = [len(boundaries(finder, period)) for _ in range(count + 1)]
    assert send_all[1:] == [1] * count

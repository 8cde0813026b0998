"""The order of collectives: the same on ranks that use different layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import StepscopeError
from stepscope.parallel.fsdp.schedule import (
    OperationKind,
    ScheduleRound,
    UnitOperation,
    Use,
    agree,
    backward_operations,
    forward_operations,
    without_repeats,
)

NAMES = ["a", "b", "c", "d"]


def _uses(letters: str) -> list[Use]:
    return [Use(NAMES.index(letter), 0) for letter in letters]


def _written(operations: list[UnitOperation]) -> str:
    """Gathers in lower case, sent gradients in upper case."""
    return "".join(NAMES[unit] if kind is OperationKind.GATHER else NAMES[unit].upper() for kind, unit in operations)


def _run(operations: list[UnitOperation], opened: str) -> str:
    """What a rank does that opens these units, each followed by a prefetch, and then ends the round."""
    done: list[UnitOperation] = []
    track = ScheduleRound(operations, done.append)
    for use in _uses(opened):
        if UnitOperation(OperationKind.GATHER, use.unit) not in done:
            track.reach(use.unit)
        track.prefetch()
    track.finish()
    return _written(done)


def test_gradients_are_sent_after_the_gather_that_follows_the_last_use() -> None:
    assert _written(backward_operations(_uses("dcba"), set(), 4)) == "dcDbCaBA"
    assert _written(backward_operations(_uses("acba"), set(), 4)) == "acbCaBAD"


def test_use_without_weights_gathers_nothing() -> None:
    tied = [Use(0, 1), *_uses("cba")]
    assert _written(backward_operations(tied, {Use(0, 0)}, 3)) == "acbCBA"


@given(st.lists(st.sets(st.sampled_from("abcd")), min_size=2, max_size=4))
def test_ranks_that_skip_different_layers_do_the_same_in_the_same_order(skipped: list[set[str]]) -> None:
    for operations in (forward_operations(_uses("abcd")), backward_operations(_uses("abcd"), set(), 4)):
        opened = ["".join(letter for letter in "abcd" if letter not in each) for each in skipped]
        assert {_run(operations, each) for each in opened} == {_written(operations)}


def test_layer_out_of_order_begins_another_round() -> None:
    done: list[UnitOperation] = []
    track = ScheduleRound(forward_operations(_uses("abc")), done.append)
    assert track.reach(1)
    assert track.reach(0)
    track.finish()
    assert _written(done) == "abcabc"
    assert not track.reach(3)


def test_assumed_order_is_kept_unless_all_ranks_did_something_else() -> None:
    assert agree([_uses("ac"), _uses("bc")], _uses("abc"), NAMES) == _uses("abc")
    assert agree([_uses("cab"), _uses("cab")], _uses("abc"), NAMES) == _uses("cab")
    with pytest.raises(StepscopeError, match="rank `1` runs the layers"):
        agree([_uses("abc"), _uses("cab")], _uses("abc"), NAMES)


def test_unit_used_twice_in_a_row_is_gathered_once() -> None:
    assert without_repeats(_uses("aabba")) == _uses("aba")

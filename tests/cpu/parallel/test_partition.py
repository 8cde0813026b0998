"""Parameter ownership: balanced by bytes, and the same on every rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.parallel.sharded_optimizer import assign_owners

SIZES = st.lists(st.integers(0, 10**9), max_size=60)


def _loads(sizes: list[int], owners: list[int], world: int) -> list[int]:
    loads = [0] * world
    for size, owner in zip(sizes, owners, strict=True):
        loads[owner] += size
    return loads


@given(SIZES, st.integers(1, 9))
def test_no_rank_exceeds_an_even_share_plus_the_largest_parameter(sizes: list[int], world: int) -> None:
    loads = _loads(sizes, assign_owners(sizes, [0] * world), world)
    assert max(loads) <= sum(sizes) / world + max(sizes, default=0)


@given(SIZES, SIZES, st.integers(1, 9))
def test_later_parameters_keep_the_balance(first: list[int], second: list[int], world: int) -> None:
    loads = _loads(first, assign_owners(first, [0] * world), world)
    added = _loads(second, assign_owners(second, loads), world)
    largest = max([*first, *second], default=0)
    assert max(map(sum, zip(loads, added, strict=True))) <= (sum(first) + sum(second)) / world + largest


def test_the_largest_go_first_and_ties_to_the_lower_rank() -> None:
    assert assign_owners([1, 1, 1, 3], [0, 0]) == [1, 1, 1, 0]
    assert assign_owners([5, 5, 5, 5], [0, 0, 0]) == [0, 1, 2, 0]
    assert assign_owners([1], [2, 0]) == [1]


def test_parameters_need_an_owner() -> None:
    with pytest.raises(ValueError, match="`loads_bytes`"):
        assign_owners([1], [])

"""The model of PyTorch's caching allocator: what it takes from CUDA, and which blocks it gives."""

import random
from itertools import pairwise

import pytest

from stepscope.recording.memory.allocator_model import (
    GRAPH,
    PLACEMENTS,
    RELEASE,
    AllocatorModel,
    MemoryEvent,
    OutOfSpaceError,
    Placement,
)

MIB = 1 << 20


def test_sizes_are_rounded_and_segments_have_steps() -> None:
    model = AllocatorModel()
    model.follow([MemoryEvent(0, 1), MemoryEvent(1, 3 * MIB), MemoryEvent(2, 19 * MIB)])
    assert model.allocated_bytes == 512 + 3 * MIB + 20 * MIB  # a rest of 1 MiB is not split off a large block
    assert model.requested_bytes == 1 + 22 * MIB
    assert model.reserved_bytes == (2 + 20 + 20) * MIB


def test_the_best_fitting_block_is_reused_and_split() -> None:
    model = AllocatorModel()
    model.follow([MemoryEvent(0, 30 * MIB), MemoryEvent(1, 60 * MIB), MemoryEvent(0, 0), MemoryEvent(1, 0)])
    model.follow([MemoryEvent(2, 20 * MIB), MemoryEvent(3, 9 * MIB)])
    assert model.reserved_bytes == 90 * MIB
    assert model.blocks[3][0] == model.blocks[2][0] + 20 * MIB


def test_free_neighbors_merge_but_not_across_segments() -> None:
    model = AllocatorModel("rising")
    model.follow([MemoryEvent(number, 10 * MIB - 512) for number in range(2)])  # both in a segment of 20 MiB
    model.follow([MemoryEvent(0, 0), MemoryEvent(1, 0), MemoryEvent(2, 20 * MIB)])
    assert model.reserved_bytes == 20 * MIB
    model.follow([MemoryEvent(3, 20 * MIB), MemoryEvent(2, 0), MemoryEvent(3, 0), MemoryEvent(4, 40 * MIB)])
    assert model.reserved_bytes == 80 * MIB


def test_without_room_cached_segments_are_released_first() -> None:
    model = AllocatorModel(capacity=100 * MIB)
    model.follow([MemoryEvent(0, 60 * MIB), MemoryEvent(0, 0), MemoryEvent(1, 80 * MIB)])
    assert model.reserved_bytes == 80 * MIB
    assert model.peak_reserved_bytes == 80 * MIB
    with pytest.raises(OutOfSpaceError):
        model.request(2, 30 * MIB)


@pytest.mark.parametrize(("capacity", "reserved"), [(160, 160), (159, 100), (100, 100)])
def test_cached_segments_are_released_only_if_there_is_no_room(capacity: int, reserved: int) -> None:
    model = AllocatorModel(capacity=capacity * MIB)
    model.follow([MemoryEvent(0, 60 * MIB), MemoryEvent(0, 0), MemoryEvent(1, 100 * MIB)])
    assert model.reserved_bytes == reserved * MIB


def test_a_stream_does_not_use_what_another_freed() -> None:
    model = AllocatorModel(pools={1: "other"})
    model.follow([MemoryEvent(0, 30 * MIB), MemoryEvent(0, 0), MemoryEvent(1, 30 * MIB)])
    assert model.reserved_bytes == 60 * MIB


def test_releasing_returns_what_is_free_except_that_of_graphs() -> None:
    model = AllocatorModel(pools={0: GRAPH, 1: "other"})
    sizes = {0: 30, 1: 40, 2: 50, 3: 60}
    model.follow(MemoryEvent(number, size * MIB) for number, size in sizes.items())
    model.follow([*(MemoryEvent(number, 0) for number in range(3)), MemoryEvent(RELEASE, 0)])
    assert model.reserved_bytes == (30 + 60) * MIB


def test_a_segment_in_use_is_not_released_and_addresses_serve_again() -> None:
    model = AllocatorModel()
    model.follow([MemoryEvent(0, 9 * MIB), MemoryEvent(1, 9 * MIB), MemoryEvent(2, 30 * MIB), MemoryEvent(0, 0)])
    before = model.blocks[2][0]
    model.follow([MemoryEvent(2, 0), MemoryEvent(RELEASE, 0)])
    assert model.reserved_bytes == 20 * MIB  # of which one half is used
    model.request(3, 30 * MIB)
    assert model.blocks[3][0] == before


def test_segments_share_pieces_of_addresses() -> None:
    """As seen on an H200: 20 MiB at the start of a piece of 32 MiB, and a later segment of 10 MiB behind it."""
    model = AllocatorModel("pieces")
    model.follow([MemoryEvent(0, 19 * MIB), MemoryEvent(1, 48 * MIB), MemoryEvent(2, 10 * MIB)])
    first, second, third = (model.blocks[number][0] for number in range(3))
    assert second == first - 64 * MIB
    assert third == second + 48 * MIB


def test_addresses_of_segments_rise_fall_or_do_neither() -> None:
    found = {}
    for placement in PLACEMENTS[1:]:
        model = AllocatorModel(placement)
        model.follow(MemoryEvent(number, 30 * MIB) for number in range(9))
        found[placement] = [model.blocks[number][0] for number in range(9)]
    assert found["rising"] == sorted(found["rising"])
    assert found["falling"] == sorted(found["falling"], reverse=True)
    assert found["scattered"] not in (sorted(found["scattered"]), sorted(found["scattered"], reverse=True))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_everything_freed_is_one_free_block_per_segment(placement: Placement) -> None:
    model, chance = AllocatorModel(placement), random.Random(0)
    live: list[int] = []
    for number in range(2000):
        size = chance.choice((100, 5000, MIB, 3 * MIB, 40 * MIB)) + chance.randrange(1000)
        model.request(number, size)
        assert model.blocks[number][1] >= size
        live.append(number)
        if chance.random() < 0.6:
            model.free(live.pop(chance.randrange(len(live))))
    assert sum(size for _, size, _ in model.blocks.values()) == model.allocated_bytes <= model.reserved_bytes
    ranges = sorted((address, address + size) for address, size, _ in model.blocks.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    for number in live:
        model.free(number)
    assert model.allocated_bytes == model.requested_bytes == 0
    model.release_cached()
    assert model.reserved_bytes == 0

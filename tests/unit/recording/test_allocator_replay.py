"""Replaying the allocator from its trace gives the allocator's byte counts at every event."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.recording.memory import allocator
from stepscope.recording.memory.allocator import Replayed, replay
from stepscope.recording.memory.allocator_start import round_sizes
from stepscope.recording.memory.snapshot import AllocatorSettings, Trace, take_apart
from tests.unit.snapshot_files import MIB, Entry, Model, empty, event, frame

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "expandable": {"expandable": True},
    "limited": {"max_split": 24 * MIB},
    "divided": {"divisions": 8},
}


def trace_of(content: Entry) -> Trace:
    content = {**content, "device_traces": [list(entries) for entries in content["device_traces"]]}
    return take_apart(content, Path("snapshot.pickle")).traces[0]


def exercise(model: Model, seed: int, count: int) -> None:
    """Random requests: small and large, on two streams, frees that wait for another stream, and emptied caches."""
    rng = random.Random(seed)
    sizes = [300, 512, 5000, 300_000, MIB, MIB + 1, 3 * MIB + 700, 9 * MIB, 11 * MIB + 5, 19 * MIB + 300_000, 30 * MIB]
    for _ in range(count):
        kind, live, pending = rng.random(), model.live(), model.pending()
        if kind < 0.5 or not live:
            model.malloc(max(1, rng.choice(sizes) - rng.choice([0, 0, 1, 4000, 700_000])), rng.choice([0, 0, 0, 77]))
        elif kind < 0.93:
            model.free(rng.choice(live), complete=rng.random() < 0.8)
        elif kind < 0.97 and pending:
            model.complete(rng.choice(pending))
        elif kind < 0.98:
            model.run_out(10**12)
        else:
            model.empty_cache()


def agree(replayed: Replayed, model: Model, first: int = 0) -> bool:
    return bool(
        np.array_equal(replayed.allocated_bytes, model.allocated[first:])
        and np.array_equal(replayed.reserved_bytes, model.reserved[first:])
    )


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10**6), count=st.integers(0, 120))
@settings(max_examples=15, deadline=None)
def test_whole_trace_is_replayed_to_the_byte(kind: str, seed: int, count: int) -> None:
    model = Model(**KINDS[kind])
    exercise(model, seed, count)
    if model.entries:
        replayed = replay(trace_of(model.snapshot()))
        assert replayed.notes == ()
        assert replayed.exact
        assert agree(replayed, model)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10**6), before=st.integers(1, 100), after=st.integers(1, 100))
@settings(max_examples=15, deadline=None)
def test_recorded_start_state_makes_the_replay_exact(kind: str, seed: int, before: int, after: int) -> None:
    model = Model(**KINDS[kind])
    exercise(model, seed, before)
    start = trace_of(model.snapshot()).segments_at_end
    first = len(model.entries)
    exercise(model, seed + 1, after)
    replayed = replay(trace_of(model.snapshot(first)), start)
    assert replayed.notes == ()
    assert replayed.exact
    assert agree(replayed, model, first)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 200), share=st.floats(0.05, 0.95))
@settings(max_examples=25, deadline=None)
def test_trace_without_its_beginning_reports_estimated_bytes(kind: str, seed: int, count: int, share: float) -> None:
    model = Model(**KINDS[kind])
    exercise(model, seed, count)
    first = int(len(model.entries) * share)
    replayed = replay(trace_of(model.snapshot(first)))
    assert replayed.notes == ()
    assert replayed.allocated_bytes[-1] == model.allocated[-1]
    assert np.array_equal(replayed.reserved_bytes, model.reserved[first:])
    short = np.array(model.allocated[first:]) - replayed.allocated_bytes
    assert (short >= 0).all()
    if replayed.exact:
        assert not short.any()
    else:
        assert short.max() <= replayed.estimated_bytes


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10**6), share=st.floats(0.0, 0.5))
@settings(max_examples=15, deadline=None)
def test_missing_events_are_noted_and_the_end_is_right(kind: str, seed: int, share: float) -> None:
    model = Model(**KINDS[kind])
    exercise(model, seed, 80)
    rng = random.Random(seed)
    content = model.snapshot()
    content["device_traces"] = [[entry for entry in model.entries if rng.random() >= share]]
    lost = len(model.entries) - len(content["device_traces"][0])
    trace = trace_of(content)
    replayed = replay(trace)
    assert replayed.allocated_bytes[-1] == model.allocated[-1]
    assert replayed.reserved_bytes[-1] == model.reserved[-1]
    assert lost or replayed.exact
    assert (replayed.allocations["bytes"] > 0).all()


@pytest.mark.parametrize("left_out", ["free_requested", "free_completed"])
def test_recording_with_only_one_event_per_free(left_out: str) -> None:
    model = Model()
    rng = random.Random(3)
    for _ in range(300):
        if rng.random() < 0.55 or not model.live():
            model.malloc(rng.choice([400, 70_000, 3 * MIB, 19 * MIB + 5]))
        else:
            model.free(rng.choice(model.live()))
    content = model.snapshot()
    kept = [at for at, entry in enumerate(model.entries) if entry["action"] != left_out]
    content["device_traces"] = [[model.entries[at] for at in kept]]
    replayed = replay(trace_of(content))
    assert replayed.exact
    assert replayed.allocated_bytes.tolist() == [model.allocated[at] for at in kept]
    cut = {**content, "device_traces": [content["device_traces"][0][200:]]}
    assert replay(trace_of(cut)).allocated_bytes.tolist() == [model.allocated[at] for at in kept[200:]]


def test_pending_free_keeps_its_memory() -> None:
    model = Model()
    waits = model.malloc(100)
    model.free(waits, complete=False)
    model.malloc(5000)
    assert replay(trace_of(model.snapshot())).exact
    assert agree(replay(trace_of(model.snapshot())), model)
    first = len(model.entries)
    model.complete(waits)
    model.malloc(100)
    replayed = replay(trace_of(model.snapshot(first)))  # the free was requested before the trace
    assert replayed.exact
    assert agree(replayed, model, first)
    assert replayed.allocations.height == 2


def test_remainder_that_is_not_split_off_belongs_to_the_block() -> None:
    model = Model()
    model.malloc(19 * MIB + 5)  # in a segment of 20 MiB
    model.malloc(100)
    replayed = replay(trace_of(model.snapshot()))
    assert replayed.allocations["bytes"].to_list() == [20 * MIB, 512]
    assert replayed.allocations["requested_bytes"].to_list() == [19 * MIB + 5, 100]


def test_block_above_the_split_limit_is_not_split() -> None:
    size = 28 * MIB + 400_000  # in a segment of 30 MiB
    for limit, taken in ((None, 28 * MIB + 400_384), (24 * MIB, 30 * MIB)):
        model = Model(max_split=limit)
        block = model.malloc(size)
        replayed = replay(trace_of(model.snapshot()))
        assert replayed.allocations["bytes"].to_list() == [taken]
        assert replayed.exact
        first = len(model.entries)
        model.free(block)
        assert replay(trace_of(model.snapshot(first))).allocations["bytes"].to_list() == [taken]


def before_a_gap(size: int) -> tuple[Model, int, int]:
    """A block of `size` in a gap of 5 MiB, followed by free memory, and the event at which a trace would start."""
    model = Model()
    _, hole, behind = (model.malloc(5 * MIB) for _ in range(3))
    model.free(hole)
    block = model.malloc(size)
    assert block == hole
    model.free(behind)
    return model, block, len(model.entries)


def test_large_block_before_free_memory_is_an_estimate() -> None:
    model, block, first = before_a_gap(4 * MIB + MIB // 2)
    model.free(block)
    replayed = replay(trace_of(model.snapshot(first)))
    assert not replayed.exact
    assert replayed.notes == ()
    assert replayed.estimated_bytes == 4 * MIB + MIB // 2
    assert replayed.allocated_bytes[-1] == model.allocated[-1]


@pytest.mark.parametrize("size", [4 * MIB + MIB // 2, 5 * MIB])
def test_next_block_behind_it_confirms_the_estimate(size: int) -> None:
    model, block, first = before_a_gap(size)
    model.malloc(3 * MIB)
    model.free(block)
    replayed = replay(trace_of(model.snapshot(first)))
    assert replayed.exact
    assert replayed.estimated_bytes == 0
    assert agree(replayed, model, first)


def test_tables_have_times_addresses_and_stacks() -> None:
    model = Model(frames=[frame("train.py")])
    early = model.malloc(100)
    gone = model.malloc(600)
    start, first = trace_of(model.snapshot()).segments_at_end, len(model.entries)
    model.free(gone)
    model.malloc(3 * MIB, stream=7, metadata="late")
    trace = trace_of(model.snapshot(first))
    times = trace.events["time_ns"].to_list()
    for given_start in (None, start):
        table = replay(trace, given_start).allocations
        assert table.columns == [
            *("start_event", "end_event", "start_ns", "end_ns", "device", "stream", "address", "bytes"),
            *("requested_bytes", "stack", "metadata"),
        ]
        stack = 0 if given_start else None  # a free has the stack of the caller
        assert table.rows() == [
            (None, None, None, None, 0, 0, early, 512, 100, 0, None),
            (None, 0, None, times[0], 0, 0, gone, 1024, 600, stack, None),
            (3, None, times[3], None, 0, 7, model.live()[-1], 3 * MIB, 3 * MIB, 0, 0),
        ]
        segments = replay(trace, given_start).segments.select("start_event", "end_event", "bytes", "stream")
        assert segments.rows() == [(None, None, 2 * MIB, 0), (2, None, 20 * MIB, 7)]


def test_expandable_segment_grows_and_shrinks() -> None:
    model = Model(expandable=True)
    kept = model.malloc(30 * MIB)
    model.free(model.malloc(30 * MIB))
    model.empty_cache()
    table = replay(trace_of(model.snapshot())).segments
    assert table.select("start_event", "end_event", pl.col("address") - kept, "bytes").rows() == [
        (0, None, 0, 40 * MIB),
        (2, 6, 40 * MIB, 20 * MIB),
    ]


def test_impossible_frees_and_blocks_are_counted() -> None:
    twice = (event("alloc", 0x1000), event("alloc", 0x1000), event("free_requested", 0x9000), event("defragment"))
    replayed = replay(trace_of(empty(*twice, event("free_completed", 0x9000), event("free_completed", 0x9000))))
    assert not replayed.exact
    notes = "\n".join(replayed.notes)
    for said in (
        "1 block allocated where no free memory",
        "1 block allocated over a live block",
        "1 free of memory that was not allocated",
        "1 event of unknown kind",
    ):
        assert said in notes
    assert replayed.allocated_bytes[-1] == 0


def test_empty_segment_is_ignored() -> None:
    model = Model()
    model.malloc(3 * MIB)
    model.entries[1:1] = [event(action, model.entries[0]["addr"], 0) for action in ("segment_alloc", "segment_free")]
    replayed = replay(trace_of(model.snapshot()))
    assert replayed.exact
    assert replayed.reserved_bytes.tolist() == [20 * MIB] * 4


def test_device_without_events_has_its_live_memory() -> None:
    model = Model()
    model.malloc(3 * MIB)
    replayed = replay(trace_of({**model.snapshot(), "device_traces": []}))
    assert replayed.allocations.select("start_event", "end_event", "bytes").rows() == [(None, None, 3 * MIB)]
    assert replayed.segments["bytes"].to_list() == [20 * MIB]
    assert replayed.allocated_bytes.size == replayed.reserved_bytes.size == 0
    assert replayed.exact


def test_replay_continues_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    exercise(model, 5, 100)
    monkeypatch.setattr(allocator, "_CHUNK", 7)
    assert agree(replay(trace_of(model.snapshot())), model)


@given(st.lists(st.integers(1, 2**40), min_size=1), st.sampled_from([0, 1, 2, 4, 8, 16]))
def test_sizes_are_rounded_like_the_allocator(sizes: list[int], divisions: int) -> None:
    model = Model(divisions=divisions)
    chosen = AllocatorSettings(roundup_divisions=(divisions,) * 16)
    assert round_sizes(np.array(sizes), chosen).tolist() == [model.round(size) for size in sizes]

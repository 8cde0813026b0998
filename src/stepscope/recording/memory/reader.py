"""Convert a memory snapshot to a recording: every allocation, where it was made, and when it was freed.

Every snapshot has sizes, times and stacks. Snapshots from stepscope also have labels (`labels.py`), which give each
allocation its step, phase, module, operator and category. Live recordings are read by the same code, so a run and its
snapshot always print the same numbers.
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
from msgspec.structs import astuple

from stepscope.errors import StepscopeError
from stepscope.recording import tables
from stepscope.recording.memory.allocator import Replayed, replay
from stepscope.recording.memory.free_blocks import SMALL
from stepscope.recording.memory.labels import NOBODY, SCHEMA, MemoryLabels, OutOfMemoryFacts
from stepscope.recording.memory.snapshot import (
    EVENT_SCHEMA,
    AllocatorSettings,
    Snapshot,
    Trace,
    read_segments,
    read_snapshot,
)
from stepscope.recording.store import Manifest, MemoryFacts, Recording
from stepscope.recording.validation import Repairs, repair
from stepscope.units import count_noun

# If several facts apply to an allocation, the first category in this list wins.
RANKED = (
    "parameters",
    "gradients",
    "optimizer state",
    "autocast copies",
    "communication",
    "activations",
    "workspaces",
    "temporaries",
    "other",
)
_COMMUNICATION = ("c10d::", "_c10d_functional::", "c10d_functional::", "symm_mem::")
# The libraries behind these operators keep workspaces from the first step on.
_KEEPERS = r"mm|matmul|linear|conv|attention"
_TOLD = ("category", "name", "shape", "dtype")
_LENT = ("module", "op", "category", "name", "shape", "dtype", "stack")
_PIECE = 20 << 20  # bytes of an expandable segment of large blocks that are mapped at once
_EMPTY = Trace(device=0, events=pl.DataFrame(schema=EVENT_SCHEMA), segments_at_end=(), settings=AllocatorSettings())
_DIGITS = 10  # the number of a step, mark or operator has fewer digits
# Frames of the recorder and of PyTorch's module calls, which appear between the frames of the user's code.
_OUR_FRAMES = (
    "stepscope/measure/",
    "stepscope/loop/",
    "stepscope/jobs/",
    "stepscope/annotate.py",
    "stepscope/step/annotation.py",
    "torch/nn/modules/module.py",
    "torch/_ops.py",
)


def read(path: Path) -> Recording:
    """Return the recording of a snapshot. Raise StepscopeError if it is not one, or is damaged."""
    snapshot = read_snapshot(path)
    labels = _decode_labels(path, snapshot)
    if labels is None:
        return _read_foreign(path, snapshot)
    return _read_ours(path, snapshot, labels)


def _decode_labels(path: Path, snapshot: Snapshot) -> MemoryLabels | None:
    if snapshot.labels is None:
        return None
    try:
        labels = msgspec.convert(snapshot.labels, MemoryLabels)
        msgspec.json.encode(labels)  # fails for invalid text and for numbers that do not fit a table
    except (msgspec.ValidationError, UnicodeEncodeError, OverflowError) as error:
        raise StepscopeError(f"damaged labels in `{path}`", detail=str(error)) from None
    if labels.schema != SCHEMA:
        raise StepscopeError(
            f"unsupported label version in `{path}`: `{labels.schema[:60]}`", detail=f"expected `{SCHEMA}`"
        )
    if not _all_fit(labels):
        raise StepscopeError(f"damaged labels in `{path}`", detail="a number is out of range, or a step has no number")
    if len(snapshot.traces) > 1:
        raise StepscopeError(f"damaged labels in `{path}`", detail=f"expected 1 device, got {len(snapshot.traces)}")
    return labels


def _all_fit(labels: MemoryLabels) -> bool:
    """Whether every number fits the tables, and every step has a number."""
    rows = [astuple(row) for row in (*labels.marks, *labels.facts, *labels.saved)]
    values = chain(*rows, *(segment.values() for segment in labels.segments_at_start or ()))
    steps = (mark.value for mark in labels.marks if mark.kind == "step")
    return all(-(2**63) <= value < 2**63 for value in values if isinstance(value, int)) and all(
        step.isdecimal() and len(step) < _DIGITS for step in steps
    )


def _read_foreign(path: Path, snapshot: Snapshot) -> Recording:
    """Read a snapshot from another tool. Each device has its own sequence of events."""
    repairs = Repairs()
    replayed = [replay(trace) for trace in snapshot.traces]
    events = sum(trace.events.height for trace in snapshot.traces)
    estimated = sum(one.estimated_bytes for one in replayed)
    allocations, segments = (_stack(replayed, table, repairs) for table in ("allocations", "segments"))
    return Recording(
        manifest=Manifest(
            source="memory snapshot",
            file=path.name,
            notes=(*(note for one in replayed for note in one.notes), *repairs.notes()),
            memory=MemoryFacts(events=events, estimated_bytes=estimated, oom=_find_failure(snapshot)),
        ),
        allocations=allocations,
        segments=segments,
        stacks=_stacks_table(snapshot.stacks),
    )


def _stack(replayed: list[Replayed], table: str, repairs: Repairs) -> pl.DataFrame:
    frames = [getattr(one, table) for one in replayed]
    return _to_table(table, pl.concat(frames) if frames else pl.DataFrame(), repairs)


def _to_table(name: str, frame: pl.DataFrame, repairs: Repairs) -> pl.DataFrame:
    """Convert to a table, without the columns that only the reader needs."""
    known = frame.select([column for column in frame.columns if column in tables.SCHEMAS[name]])
    return tables.conform(name, repair(name, known, repairs))


def _stacks_table(stacks: tuple[str, ...]) -> pl.DataFrame:
    frame = pl.DataFrame({"stack": range(len(stacks)), "frames": list(stacks)}, schema_overrides={"frames": pl.String})
    return tables.conform("stacks", frame)


def _read_ours(path: Path, snapshot: Snapshot, labels: MemoryLabels) -> Recording:
    trace = snapshot.traces[0] if snapshot.traces else _EMPTY
    # Out of memory, the state at that moment is enough.
    if not trace.events.height and labels.oom is None:
        raise StepscopeError(f"`{path}` has stepscope labels but no events", hint="stepscope memory")
    replayed = None
    if labels.device != "cpu":
        start = labels.segments_at_start
        replayed = replay(trace, None if start is None else read_segments(path, start))
    timeline = _Timeline.make(trace, labels, snapshot.metadata)
    allocations = _label(replayed.allocations if replayed else _pair(trace, labels), timeline, labels)
    allocations, unmatched = _lend(allocations, timeline, labels, trace.events)
    origin_ns = labels.marks[0].time_ns if labels.marks else 0
    notes, repairs = list(replayed.notes) if replayed else [], Repairs()
    if unmatched:
        many = count_noun(len(unmatched), "step differs", "steps differ")
        notes.append(f"{many} from the profiled step: modules and operators of their allocations are unknown")
    by_name = {
        "allocations": _shift(allocations, origin_ns),
        "segments": _shift(replayed.segments, origin_ns) if replayed else pl.DataFrame(),
        "spans": _shift(timeline.spans, origin_ns),
        "saved": pl.DataFrame([msgspec.structs.asdict(row) for row in labels.saved]),
    }
    made = {name: _to_table(name, frame, repairs) for name, frame in by_name.items()}
    return Recording(
        manifest=Manifest(
            source="memory snapshot",
            file=path.name,
            device=labels.oom.device_name if labels.oom else "",
            versions={"torch": labels.oom.torch} if labels.oom and labels.oom.torch else {},
            notes=(*notes, *repairs.notes()),
            memory=MemoryFacts(
                events=trace.events.height,
                estimated_bytes=replayed.estimated_bytes if replayed else 0,
                device=labels.device,
                allocator_peak_bytes=labels.allocator_peak_bytes,
                allocator_peak_reserved_bytes=labels.allocator_peak_reserved_bytes,
                watched_steps=labels.watched_steps,
                unmatched_steps=tuple(unmatched),
                oom=_complete(labels.oom, trace) if labels.oom else None,
            ),
        ),
        stacks=_stacks_table(tuple(_without_our_frames(text) for text in snapshot.stacks)),
        **made,
    )


def _find_failure(snapshot: Snapshot) -> OutOfMemoryFacts | None:
    """The last request that failed, of the first device that has one, as the allocator's events show it."""
    for trace in snapshot.traces:
        if trace.oom is not None:
            stack = "" if trace.oom.stack is None else snapshot.stacks[trace.oom.stack]
            told = OutOfMemoryFacts(asked_bytes=trace.oom.bytes, free_bytes=trace.oom.free_bytes, stack=stack)
            return _complete(told, trace)
    return None


def _complete(facts: OutOfMemoryFacts, trace: Trace) -> OutOfMemoryFacts:
    """Add the event, and the free blocks unless memory changed between the failure and the end of the history."""
    event = trace.oom.event if trace.oom else trace.events.height - 1
    facts = msgspec.structs.replace(
        facts, device=trace.device, event=event, has_expandable_segments=trace.settings.expandable_segments
    )
    later = trace.events["action"].slice(event + 1)
    if not later.is_in(["snapshot", "oom"]).all():
        return facts
    is_small = facts.asked_bytes <= SMALL
    segments = [segment for segment in trace.segments_at_end if segment.small == is_small]
    free = [block.bytes for segment in segments for block in segment.blocks if block.state == "free"]
    # Expandable segments return memory to the device in these pieces.
    movable = sum(size - size % _PIECE for size in free)
    return msgspec.structs.replace(facts, largest_free_bytes=max(free, default=0), movable_bytes=movable)


def _without_our_frames(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith(_OUR_FRAMES))


def _shift(frame: pl.DataFrame, origin_ns: int) -> pl.DataFrame:
    return frame.with_columns(pl.col("start_ns", "end_ns") - origin_ns)


# --- Location of events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timeline:
    """The mark and operator of each event, and the spans of steps and phases in events."""

    marks: np.ndarray[Any, np.dtype[np.int64]]
    operators: np.ndarray[Any, np.dtype[np.int64]]
    states: pl.DataFrame  # mark, step, phase
    spans: pl.DataFrame

    @classmethod
    def make(cls, trace: Trace, labels: MemoryLabels, texts: tuple[str, ...]) -> "_Timeline":
        marks, operators = _places(trace.events, texts, len(labels.marks), len(labels.operators))
        return cls(marks=marks, operators=operators, states=_states(labels), spans=_spans(labels, marks))

    def position(self, mark: int) -> int:
        """Return the number of events before the mark."""
        return int(np.searchsorted(self.marks, mark, side="left"))


def _places(
    events: pl.DataFrame, texts: tuple[str, ...], num_marks: int, num_operators: int
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the mark and operator of each event. The allocator keeps metadata per thread, so events on autograd's
    thread have an old mark or none until it is set there: they happened after the latest mark of any earlier event."""
    parsed = [_parse_place(text, num_marks, num_operators) for text in texts]
    table = np.array([*parsed, (NOBODY, NOBODY)], dtype=np.int64).reshape(-1, 2)
    noted = table[events["metadata"].fill_null(-1).to_numpy()]  # -1 selects the last row
    marks = np.maximum.accumulate(noted[:, 0])
    return marks, np.where(noted[:, 0] == marks, noted[:, 1], NOBODY)


def _parse_place(text: str, num_marks: int, num_operators: int) -> tuple[int, int]:
    # Cut to a sensible length: Python does not parse numbers with thousands of digits.
    mark, operator = (one[:_DIGITS] for one in (text.partition(":")[0], text.partition(":")[2]))
    numbers = (int(mark) if mark.isdecimal() else NOBODY, int(operator) if operator.isdecimal() else NOBODY)
    if not (NOBODY <= numbers[0] < num_marks and NOBODY <= numbers[1] < num_operators):
        raise StepscopeError(f"the labels do not match the events: `{text[:40]}`", hint="stepscope memory")
    return numbers


def _states(labels: MemoryLabels) -> pl.DataFrame:
    """The step and the innermost phase after each mark."""
    step: int | None = None
    phases: list[str] = []
    rows = []
    for number, mark in enumerate(labels.marks):
        if mark.kind == "step":
            step = int(mark.value) if mark.opens and mark.value.isdecimal() else None
        elif mark.opens:
            phases.append(mark.value)
        elif phases:
            phases.pop()
        rows.append((number, step, phases[-1] if phases else None))
    return pl.DataFrame(rows, schema={"mark": pl.Int64, "step": pl.Int32, "phase": pl.String}, orient="row")


def _spans(labels: MemoryLabels, marks: np.ndarray[Any, np.dtype[np.int64]]) -> pl.DataFrame:
    rows: list[tuple[int | None, str | None, int, int, int, int]] = []
    opened: list[int] = []
    step: int | None = None
    for number, mark in enumerate(labels.marks):
        if mark.opens:
            opened.append(number)
            if mark.kind == "step" and mark.value.isdecimal():
                step = int(mark.value)
        elif opened:
            first = opened.pop()
            phase = mark.value if mark.kind == "phase" else None
            start, end = np.searchsorted(marks, [first, number], side="left")
            rows.append((step, phase, int(start), int(end), labels.marks[first].time_ns, mark.time_ns))
    frame = pl.DataFrame(rows, schema=tables.SCHEMAS["spans"], orient="row")
    return frame.sort("start_ns", "end_ns", descending=[False, True])


# --- Labels ---------------------------------------------------------------------------------------------------------


def _pair(trace: Trace, labels: MemoryLabels) -> pl.DataFrame:
    """Pair allocations and frees on a CPU, where sizes are not rounded and nothing is cached."""
    addresses = trace.events["address"].to_list()
    takes = (trace.events["action"].cast(pl.String) == "alloc").to_list()
    rows: list[tuple[int | None, int | None, int, int]] = []
    living: dict[int, tuple[int | None, int]] = {}
    for segment in labels.segments_at_start or ():
        match segment:
            case {"address": int(address), "total_size": int(size)}:
                living[address] = (None, size)
    for event, (address, size, is_taking) in enumerate(zip(addresses, trace.events["bytes"], takes, strict=True)):
        if is_taking:
            if address in living:  # the free was not recorded
                start, taken = living.pop(address)
                rows.append((start, event, address, taken))
            living[address] = (event, size)
        elif address in living:
            start, taken = living.pop(address)
            rows.append((start, event, address, taken))
    rows += [(start, None, address, size) for address, (start, size) in living.items()]
    schema = dict.fromkeys(("start_event", "end_event", "address", "bytes"), pl.Int64)
    frame = pl.DataFrame(rows, schema=schema, orient="row").sort("start_event", "address", nulls_last=False)
    events = trace.events.with_row_index("event").select(pl.col("event").cast(pl.Int64), "time_ns", "stack")
    began = events.rename({"event": "start_event", "time_ns": "start_ns"})
    ended = events.select(end_event="event", end_ns="time_ns")
    frame = frame.join(began, on="start_event", how="left", maintain_order="left")
    return frame.join(ended, on="end_event", how="left", maintain_order="left")


def _label(allocations: pl.DataFrame, timeline: _Timeline, labels: MemoryLabels) -> pl.DataFrame:
    started = allocations["start_event"]
    at = started.fill_null(-1).to_numpy()  # -1 selects what is appended
    known = started.is_not_null()
    marks = pl.Series("mark", np.append(timeline.marks, NOBODY)[at]).set(~known, None)
    operators = pl.Series("operator", np.append(timeline.operators, NOBODY)[at])
    frame = allocations.with_row_index("row").with_columns(marks, operators)
    frame = frame.join(timeline.states, on="mark", how="left", maintain_order="left")
    named = pl.DataFrame(
        [(number, one.name, one.module or None) for number, one in enumerate(labels.operators)],
        schema={"operator": pl.Int64, "op": pl.String, "module": pl.String},
        orient="row",
    )
    frame = frame.join(named, on="operator", how="left", maintain_order="left")
    frame = frame.join(_fact_table(frame, timeline, labels), on="row", how="left", maintain_order="left")
    frame = frame.with_columns(module=pl.coalesce("module", "owner")).drop("owner")
    is_communication = pl.any_horizontal(*(pl.col("op").str.starts_with(prefix) for prefix in _COMMUNICATION))
    is_kept = pl.col("end_event").is_null() & (pl.col("step") == 0) & pl.col("op").str.contains(_KEEPERS)
    # No known owner, but still alive after its step.
    last_step = pl.lit(timeline.states["step"].max(), dtype=pl.Int32)
    stays = pl.col("end_event").is_null() & (pl.col("step") < last_step)
    otherwise = (
        pl.when(pl.col("start_event").is_null())
        .then(pl.lit("other"))
        .when(is_communication)
        .then(pl.lit("communication"))
        .when(is_kept)
        .then(pl.lit("workspaces"))
        .when(stays)
        .then(pl.lit("other"))
        .otherwise(pl.lit("temporaries"))
    )
    return frame.with_columns(category=pl.coalesce("category", otherwise))


def _fact_table(frame: pl.DataFrame, timeline: _Timeline, labels: MemoryLabels) -> pl.DataFrame:
    """Return category and name by row; if several facts apply, the first in rank."""
    rows = [
        (
            one.operator,
            one.address,
            one.category,
            one.name,
            None if one.shape is None else msgspec.json.encode(one.shape).decode(),
            one.dtype,
            one.module,
            timeline.position(one.mark) if one.operator < 0 else 0,
        )
        for one in labels.facts
    ]
    whole, text = pl.Int64, pl.String
    schema = {"operator": whole, "address": whole, **dict.fromkeys((*_TOLD, "owner"), text), "position": whole}
    facts = pl.DataFrame(rows, schema=schema, orient="row").with_columns(
        rank=pl.col("category").replace_strict({name: i for i, name in enumerate(RANKED)}, default=len(RANKED))
    )
    lives = frame.select("row", "operator", "address", "start_event", "end_event")
    by_operator = facts.filter(pl.col("operator") >= 0).join(lives, on=["operator", "address"])
    by_address = facts.filter(pl.col("operator") < 0).drop("operator").join(lives, on="address")
    by_address = by_address.filter(
        (pl.col("start_event").fill_null(-1) < pl.col("position"))
        & (pl.col("end_event").is_null() | (pl.col("end_event") >= pl.col("position")))
        # Autograd also saves inputs and buffers, which stay allocated anyway. Out of memory, the history may be shorter
        # than the step, and the facts tell them apart.
        & (pl.col("start_event").is_not_null() | (pl.col("category") != "activations") | (labels.oom is not None))
    )
    columns = ["row", *_TOLD, "owner", "rank"]
    found = pl.concat([by_operator.select(columns), by_address.select(columns)])
    return found.sort("rank", maintain_order=True).unique("row", keep="first").drop("rank")


# --- Steps without operator labels -----------------------------------------------------------------------------------


def _lend(
    allocations: pl.DataFrame, timeline: _Timeline, labels: MemoryLabels, events: pl.DataFrame
) -> tuple[pl.DataFrame, list[int]]:
    """Copy labels from the last profiled step to steps with the same events. Also return the steps that differ."""
    steps = timeline.spans.filter(pl.col("phase").is_null()).sort("step")
    others = [step for step in steps["step"] if step not in labels.watched_steps]
    if not labels.watched_steps or not others:
        return allocations, []
    acts = events.select(
        takes=pl.col("action").cast(pl.String) == "alloc",
        counts=pl.col("action").cast(pl.String).is_in(["alloc", "free_requested"]),
        bytes="bytes",
    )
    bounds = {row["step"]: (row["start_event"], row["end_event"]) for row in steps.iter_rows(named=True)}
    lender = labels.watched_steps[-1]
    if lender not in bounds:
        return allocations, others
    known = _numbered(acts, *bounds[lender])
    by_event = allocations.filter(pl.col("start_event").is_not_null())
    lent = (
        known.filter("takes")
        .select("place", "event")
        .join(by_event.select("start_event", *_LENT), left_on="event", right_on="start_event", how="left")
    )
    pieces, unmatched = [], []
    for step in others:
        mine = _numbered(acts, *bounds[step])
        if mine.select("takes", "bytes").equals(known.select("takes", "bytes")):
            pieces.append(mine.filter("takes").select("place", "event").join(lent.drop("event"), on="place"))
        else:
            unmatched.append(step)
    if not pieces:
        return allocations, unmatched
    borrowed = pl.concat(pieces).drop("place").rename({name: f"{name}_lent" for name in _LENT})
    frame = allocations.join(borrowed, left_on="start_event", right_on="event", how="left", maintain_order="left")
    # A fact about the allocation itself, such as a gradient, overrides a copied label; a guess does not.
    guessed = pl.col("category").is_in(["temporaries", "workspaces"])
    chosen = pl.when(guessed).then(pl.coalesce("category_lent", "category")).otherwise(pl.col("category"))
    columns = [pl.coalesce(name, f"{name}_lent").alias(name) for name in _LENT if name != "category"]
    frame = frame.with_columns(chosen.alias("category"), *columns)
    return frame.drop([f"{name}_lent" for name in _LENT]), unmatched


def _numbered(acts: pl.DataFrame, start: int, end: int) -> pl.DataFrame:
    """The allocations and frees between two events, numbered by position."""
    stretch = acts.with_row_index("event").slice(start, end - start).filter("counts")
    return stretch.with_row_index("place").with_columns(pl.col("event").cast(pl.Int64))

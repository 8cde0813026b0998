"""Read traces of the PyTorch profiler (Kineto) into recordings.

Reading is exact to the nanosecond and bounded in memory. The file is split into blocks (`json_blocks`), blocks become
columns (`kineto_events`), in several processes if the file is large (`kineto_workers`), and columns become tables in
file order (`kineto_stream`). This module converts them to the tables of a recording: all at once (`read`), or block by
block for a file that is larger than memory (`TraceReader`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import numpy as np
import polars as pl

from stepscope.errors import StepscopeError
from stepscope.recording.readers.kineto_events import Ints
from stepscope.recording.readers.kineto_stream import TraceStream
from stepscope.recording.store import Manifest, Recording
from stepscope.recording.tables import KERNEL_LAUNCHES, conform
from stepscope.recording.validation import Repairs, repair
from stepscope.units import count_noun

_MODULE_FRAME = "nn.Module: "
# Wrappers of autograd and of the compiler around operators: their time is dispatch, not work.
_MACHINERY = (
    r"^autograd::engine|^torch::autograd|Backward\d*$|^detach$"
    r"|^Torch-Compiled Region|^TorchDynamo|^AOTDispatcher|^AOTAutograd|^Pregraph bytecode"
)
# Compiled code, whose time is work unless its loops are operators themselves.
_COMPILED, _LOOP = r"^CompiledFunction|^## Call CompiledFxGraph", "cpp_fused_"
# Operators that queue a collective: one each, whatever they call and however long that takes.
_QUEUEING = "c10d::"
_FEW_PRESENT = 0.1  # of the launches after a cut: kernels of other streams end later
_REST_OF_STEP = 0.05  # after its last launch
_LOST_NOTE = "kernels were launched, but the profiler recorded none: it may lack access to the GPU's activity (CUPTI)"
_HOST_NOTE = "no GPU activity: CPU operators count as kernels, and idle time is the time between them"
_UNKNOWN = Manifest(source="pytorch profiler")  # until the whole file is read
_FLOW = {"id": pl.Int64, "ns": pl.Int64, "process": pl.Int64, "thread": pl.Int64, "kind": pl.String}
T = TypeVar("T")


def read(path: Path) -> Recording:
    """Return a trace as a recording; `manifest.notes` say what is missing, damaged or left out."""
    reader = TraceReader(path, is_bounded=False)
    ((recording, flows),) = reader
    manifest = reader.finish()
    if reader.is_on_host:
        kernels = _host_kernels(recording.ops)
    else:
        kernels = reader.place_kernels(recording.kernels).sort("start_ns", "end_ns", maintain_order=True)
    whole = replace(recording, manifest=manifest, kernels=kernels, links=join_flows(flows, flows))
    return whole if reader.is_on_host or not ends_early(manifest.notes) else _end_with_kernels(whole)


def _end_with_kernels(recording: Recording) -> Recording:
    """Return a truncated file up to the last step whose kernels it has, or up to the last launch with a kernel. The
    profiler writes operators first, so the file still has those whose kernels were cut off, and the absence of these
    kernels would look like idle time."""
    end_ns = _find_last_launch(recording)
    if end_ns is None:
        return recording
    steps = recording.ranges.filter(pl.col("name").str.starts_with("ProfilerStep#"))
    almost_ns = pl.col("end_ns") - _REST_OF_STEP * (pl.col("end_ns") - pl.col("start_ns"))
    complete = steps.filter(almost_ns <= end_ns)
    if complete.height:
        end_ns = int(complete.select(pl.col("end_ns").max()).item())
    dropped = steps.height - complete.height
    note = "only what came before the last known kernel is read" + (
        f", without {count_noun(dropped, 'incomplete step')}" if dropped else ""
    )
    later = recording.launches.filter(pl.col("start_ns") >= end_ns)["correlation"].implode()
    return replace(
        recording,
        manifest=msgspec.structs.replace(recording.manifest, notes=(*recording.manifest.notes, note)),
        kernels=recording.kernels.filter(~pl.col("correlation").is_in(later).fill_null(value=False)),
        launches=recording.launches.filter(pl.col("start_ns") < end_ns),
        ops=recording.ops.filter(pl.col("end_ns") <= end_ns),
        ranges=recording.ranges.filter(pl.col("end_ns") <= end_ns),
        links=recording.links.filter(pl.col("backward_ns") < end_ns),
    )


def _find_last_launch(recording: Recording) -> int | None:
    """Return when the last kernel was launched before they begin to be missing; None if no launch has a kernel."""
    launches = recording.launches.filter(pl.col("name").str.contains(KERNEL_LAUNCHES)).sort("start_ns")
    present = (
        launches["correlation"].is_in(recording.kernels["correlation"].implode()).fill_null(value=False).to_numpy()
    )
    if not present.any():
        return None
    present_from_here = np.cumsum(present[::-1])[::-1] / np.arange(len(present), 0, -1)
    missing = np.flatnonzero(~present & (present_from_here < _FEW_PRESENT))
    last = int(missing[0]) - 1 if len(missing) else len(present) - 1
    return int(launches["start_ns"][max(0, last)])


class TraceReader:
    """Iterate over the blocks of a file: each gives a recording and the ends of flow arrows, which become links once
    both ends are known (`join_flows`). Kernels get their process from `place_kernels`. Call `finish` at the end."""

    def __init__(self, path: Path, *, is_bounded: bool) -> None:
        self.stream = TraceStream(path, is_bounded=is_bounded)
        self.is_on_host = False  # operators count as kernels
        self._path = path
        self._repairs = Repairs()
        self._num_ops = 0
        self._num_ranges = 0
        self._launch_processes: Counter[int] = Counter()
        self._devices: Counter[int] = Counter()
        self._has_work = False  # operators that could count as kernels
        self._launches_kernels = False
        self._has_shapes = False
        self._has_modules = False

    def __iter__(self) -> Iterator[tuple[Recording, pl.DataFrame]]:
        for block in self.stream:
            yield self.conform(block)

    def conform(self, block: Mapping[str, pl.DataFrame]) -> tuple[Recording, pl.DataFrame]:
        """Convert a block to tables of a recording and update the counts for the manifest."""
        found = {
            name: repair(name, block.get(name, pl.DataFrame()), self._repairs)
            for name in ("ops", "launches", "kernels", "ranges")
        }
        frames = repair("ranges", block.get("frames", pl.DataFrame()), Repairs())
        recording = Recording(
            manifest=_UNKNOWN,
            ops=_add_sources(_ops(found["ops"]), frames),
            launches=conform("launches", found["launches"].drop("kind", strict=False)),
            kernels=_kernels(found["kernels"]),
            ranges=_ranges(found["ranges"]),
        )
        self._count(recording)
        return recording, _flows(block.get("flows", pl.DataFrame()), self._repairs)

    def _count(self, recording: Recording) -> None:
        ops, ranges = recording.ops, recording.ranges
        self._num_ops += ops.height
        self._num_ranges += ranges.height
        self._launch_processes.update(_count(recording.launches["process"]))
        self._devices.update(_count(recording.kernels["device"]))
        if not (self._launches_kernels or self._devices):
            self._launches_kernels = bool(recording.launches["name"].str.contains(KERNEL_LAUNCHES).any())
        if not (self._has_work or self._devices):
            self._has_work = bool((~ops["name"].str.contains(_MACHINERY)).any())
        self._has_shapes |= bool(ops["shapes"].is_not_null().any())
        is_module = (ranges["source"] == "module").any() or ranges["name"].str.starts_with("module:").any()
        self._has_modules |= bool(is_module)

    def finish(self) -> Manifest:
        """Return the manifest. Raise StepscopeError if the file has no readable events."""
        notes = self.stream.notes()
        properties = self.stream.blocks.properties
        device = _find_device(properties, _most_common(self._devices))
        no_kernels = not (self._devices or self._repairs.lost_rows["kernels"])
        self.is_on_host = no_kernels and not (self._launches_kernels or _device_is_cut_off(device.name, notes))
        if self.is_on_host and self._has_work:
            notes.append(_HOST_NOTE)
        elif no_kernels and self._launches_kernels:
            notes.append(_LOST_NOTE)
        notes += self._repairs.notes()
        if not (self._devices or self._num_ops or self._num_ranges):
            raise StepscopeError(
                f"no readable events in `{self._path}`",
                detail="; ".join(notes) or "the list of events is empty",
                hint="make sure that the profiler's schedule reaches an active step before it stops",
            )
        distributed = _as_kind(properties.get("distributedInfo"), _Distributed) or _Distributed()
        return Manifest(
            source="pytorch profiler",
            file=self._path.name,
            device=device.name[:100],
            device_sms=device.num_sms,
            rank=distributed.rank,
            world_size=distributed.world_size,
            versions=_versions_of(properties),
            shapes_recorded=self._has_shapes,
            modules_recorded=self._has_modules,
            notes=tuple(notes),
        )

    def place_kernels(self, kernels: pl.DataFrame) -> pl.DataFrame:
        """Assign all kernels to the process with the most launches."""
        return kernels.with_columns(process=pl.lit(_most_common(self._launch_processes), dtype=pl.Int64))


def _count(values: pl.Series) -> dict[int, int]:
    return dict(values.drop_nulls().value_counts().iter_rows())


def _most_common(counts: Counter[int]) -> int | None:
    """Return the most common value, the smallest in a tie."""
    return min(counts, key=lambda one: (-counts[one], one), default=None)


def _device_is_cut_off(device: str, notes: Sequence[str]) -> bool:
    """Whether the kernels may be in the missing part of a truncated file that names a device: the profiler writes them
    after the operators."""
    return bool(device) and (ends_early(notes) or any("damaged" in note for note in notes))


def ends_early(notes: Sequence[str]) -> bool:
    """Whether a file with these notes is truncated."""
    return any("ends early" in note for note in notes)


def _ops(frame: pl.DataFrame) -> pl.DataFrame:
    ops = conform("ops", frame.drop("kind", strict=False))
    # `Fwd thread id` is 0 on operators of the forward pass itself.
    return ops.with_columns(forward_thread=pl.when(pl.col("forward_thread") > 0).then(pl.col("forward_thread")))


def _add_sources(ops: pl.DataFrame, frames: pl.DataFrame) -> pl.DataFrame:
    """Return operators with the innermost frame of the user's code around them. Those that run the backward of a node
    have that of the operator that created it."""
    if not frames.height or not ops.height:
        return ops
    thread = ["process", "thread"]
    calls = frames.sort("start_ns", -pl.col("end_ns")).partition_by(thread, as_dict=True)
    source = np.full(ops.height, -1, np.int64)
    names = pl.concat([pl.Series([], dtype=pl.String), *(one["name"] for one in calls.values())])
    first = 0
    asking = ops.with_row_index("row").select("row", "start_ns", *thread).partition_by(thread, as_dict=True)
    for key, group in calls.items():
        asked = asking.get(key)
        if asked is not None:
            moments, rows = _follow_stack(group["start_ns"].to_list(), group["end_ns"].to_list())
            open_then = rows[np.searchsorted(moments, asked["start_ns"].to_numpy(), side="right")]
            source[asked["row"].to_numpy()] = np.where(open_then < 0, -1, open_then + first)
        first += group.height
    own = names.gather(pl.Series(source).replace(-1, None))
    made = ops.with_columns(source=own).filter(
        pl.col("sequence").is_not_null() & pl.col("forward_thread").is_null() & pl.col("source").is_not_null()
    )
    made = made.unique(["process", "sequence"], keep="last", maintain_order=True)
    forward = made.select("process", "sequence", made_at="source")
    joined = ops.select("process", "sequence", "forward_thread").join(
        forward, on=["process", "sequence"], how="left", maintain_order="left"
    )
    runs_backward = pl.col("forward_thread").is_not_null()
    return ops.with_columns(
        source=joined.select(pl.coalesce(own, pl.when(runs_backward).then("made_at")).alias("source"))["source"]
    )


def _follow_stack(starts: Sequence[int], ends: Sequence[int]) -> tuple[Ints, Ints]:
    """Return the moments at which another frame becomes the innermost one, and which one that is: the first before
    all moments, the others from each moment on; -1 if none is open."""
    moments: list[int] = []
    rows = [-1]
    opened: list[int] = []

    def close_until(now: int | None) -> None:
        while opened and (now is None or ends[opened[-1]] <= now):
            moments.append(ends[opened.pop()])
            rows.append(opened[-1] if opened else -1)

    for row, start in enumerate(starts):
        close_until(start)
        opened.append(row)
        moments.append(start)
        rows.append(row)
    close_until(None)
    return np.array(moments, np.int64), np.array(rows, np.int64)


def _kernels(frame: pl.DataFrame) -> pl.DataFrame:
    if not frame.height:
        return conform("kernels", frame)
    graph = pl.col("graph_node").fill_null(0) > 0
    return conform("kernels", frame.with_columns(graph=graph, graph_node=pl.when(graph).then("graph_node")))


def _host_kernels(ops: pl.DataFrame) -> pl.DataFrame:
    found = HostKernels()
    found.learn(ops)
    return found.take(ops).sort("start_ns", maintain_order=True)


class HostKernels:
    """Finds the operators that count as kernels on a CPU: the outermost ones that spend at least half of their time in
    themselves rather than in operators they call. (The innermost would be wrong: a GEMM calls operators that only
    inspect its arguments.) All calls of an operator count in the same way; decided call by call, the number of GEMMs
    depended on interruptions. An operator works in itself if this holds for the majority of its calls (an interruption
    can be longer than all of them together) or for the sum of its calls (most parameters may be small, and their time
    is in casts of scalars).

    `learn` from all operators first, then `take` the kernels from them. Operators may arrive in batches, each later
    than the one before."""

    def __init__(self) -> None:
        self._threads: dict[tuple[int | None, int | None], list[tuple[int, _Call]]] = defaultdict(list)
        # By name: what is above 0 if operators work in themselves, as numbers of calls and as time.
        self._calls: Counter[str] = Counter()
        self._time_ns: Counter[str] = Counter()
        self._has_loops = False
        self._ends = pl.DataFrame(schema={"process": pl.Int64, "thread": pl.Int64, "end_ns": pl.Int64})

    def learn(self, ops: pl.DataFrame) -> None:
        self._has_loops |= bool(ops["name"].str.contains(_LOOP, literal=True).any())
        for (process, thread), calls in _outer_first(ops).partition_by("process", "thread", as_dict=True).items():
            opened = self._threads[process, thread]
            for name, start, end in calls.select("name", "start_ns", "end_ns").iter_rows():
                self._close(opened, start)
                caller = opened[-1][1] if opened else None
                # An operator that calls itself, with an `out` argument, is one call.
                if caller is None or caller.name != name:
                    if caller is not None:
                        caller.own_ns -= end - start
                    caller = _Call(name=name, duration_ns=end - start, own_ns=end - start)
                opened.append((end, caller))

    def _close(self, opened: list[tuple[int, "_Call"]], now: int | None = None) -> None:
        """Close the calls that ended by `now`, or all of them. `opened` has the end of each."""
        while opened and (now is None or opened[-1][0] <= now):
            _, call = opened.pop()
            is_whole = not opened or opened[-1][1] is not call
            if is_whole and call.duration_ns:
                margin_ns = 2 * call.own_ns - call.duration_ns
                self._calls[call.name] += 1 if margin_ns >= 0 else -1
                self._time_ns[call.name] += margin_ns

    def take(self, ops: pl.DataFrame) -> pl.DataFrame:
        """Return the operators that count as kernels."""
        for opened in self._threads.values():
            self._close(opened)
        delegating = [
            name
            for name, calls in self._calls.items()
            if calls < 0 and self._time_ns[name] < 0 and not name.startswith(_QUEUEING)
        ]
        is_wrapper = pl.col("name").is_in(delegating)
        if self._has_loops:
            is_wrapper |= pl.col("name").str.contains(_COMPILED)
        calls = _outer_first(ops.filter(~is_wrapper)).select("name", "start_ns", *self._ends.columns)
        of_thread = ("process", "thread")
        before = self._ends.rename({"end_ns": "before_ns"})
        known = calls.join(before, on=of_thread, how="left", nulls_equal=True, maintain_order="left")
        busy_until = pl.max_horizontal(pl.col("end_ns").cum_max().shift(1).over(of_thread), "before_ns")
        outermost = known.filter((pl.col("start_ns") >= busy_until).fill_null(value=True)).drop("before_ns")
        ends = pl.concat([self._ends, calls.select(self._ends.columns)])
        self._ends = ends.group_by(of_thread).agg(pl.col("end_ns").max())
        on_host = {"device": pl.lit(-1), "kind": pl.lit("cpu"), "graph": pl.lit(value=False)}
        return conform("kernels", outermost.rename({"thread": "stream"}).with_columns(**on_host))


@dataclass(slots=True, kw_only=True)
class _Call:
    name: str
    duration_ns: int
    own_ns: int  # without the operators it calls


def _outer_first(ops: pl.DataFrame) -> pl.DataFrame:
    """Return the operators that may do work, by thread and time, each before those that it calls."""
    ordered = ops.sort("process", "thread", "start_ns", "end_ns", descending=[False] * 3 + [True], maintain_order=True)
    return ordered.filter(~pl.col("name").str.contains(_MACHINERY))


def _ranges(frame: pl.DataFrame) -> pl.DataFrame:
    if not frame.height:
        return conform("ranges", frame)
    is_module = (pl.col("kind") == "python") & pl.col("name").str.starts_with(_MODULE_FRAME)
    source = pl.when(is_module).then(pl.lit("module")).otherwise(pl.col("kind"))
    return conform("ranges", frame.with_columns(source=source).drop("kind"))


def _flows(frame: pl.DataFrame, repairs: Repairs) -> pl.DataFrame:
    """Return the starts and ends of flow arrows."""
    if not frame.height:
        return pl.DataFrame(schema=_FLOW)
    flows = repair("links", frame.rename({"ns": "forward_ns"}), repairs).rename({"forward_ns": "ns"})
    return flows.select(*_FLOW)


def join_flows(starts: pl.DataFrame, ends: pl.DataFrame) -> pl.DataFrame:
    """Join the starts and ends of the profiler's flow arrows to links."""
    forward = starts.filter(pl.col("kind") == "flow s").unique("id", keep="first", maintain_order=True)
    backward = ends.filter(pl.col("kind") == "flow f")
    joined = backward.join(forward, on=["process", "id"], how="inner", suffix="_forward", maintain_order="left")
    return conform(
        "links",
        joined.select(
            "process",
            forward_ns="ns_forward",
            forward_thread="thread_forward",
            backward_ns="ns",
            backward_thread="thread",
        ),
    )


_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _DeviceProperties(msgspec.Struct):
    id: _Count = 0
    name: str = ""
    num_sms: _Count | None = msgspec.field(default=None, name="numSms")


class _Distributed(msgspec.Struct):
    rank: _Count | None = None
    world_size: _Count | None = None


def _find_device(properties: dict[str, object], used: int | None) -> _DeviceProperties:
    """Return the properties of the most used device."""
    listed = _as_kind(properties.get("deviceProperties"), list[_DeviceProperties]) or [_DeviceProperties()]
    return next((one for one in listed if one.id == used), listed[0])


def _versions_of(properties: dict[str, object]) -> dict[str, str]:
    names = ("schemaVersion", "cuda_runtime_version", "cuda_driver_version", "hip_runtime_version", "cupti_version")
    return {name: str(properties[name])[:40] for name in names if isinstance(properties.get(name), int | float)}


def _as_kind(value: object, kind: type[T]) -> T | None:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return None

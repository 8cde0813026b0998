"""Traces of PyTorch's profiler (Kineto), from JSON to a recording.

Reading is exact to the nanosecond and bounded in memory: the file is cut into blocks (`json_blocks`), blocks become
columns (`kineto_events`), in several processes where the file is large (`kineto_workers`), and columns become tables
here.
"""

import itertools
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import polars as pl

from stepscope.errors import StepscopeError
from stepscope.recording.readers.json_blocks import Blocks
from stepscope.recording.readers.kineto_events import NONE, Columns, Decoded, EventDecoder
from stepscope.recording.readers.kineto_workers import decode_block, decode_in_processes
from stepscope.recording.store import Manifest, Recording
from stepscope.recording.tables import conform
from stepscope.recording.validation import Repairs, repair

# Starting processes costs as much as decoding this many blocks.
_INLINE_BLOCKS = 3
_MOST_PROCESSES = 4
_TEXT_COLUMNS = ("name", "shapes", "dtypes", "strides", "arguments")
_GPU_KINDS = ("kernel", "memcpy", "memset")
_MODULE_FRAME = "nn.Module: "
# What autograd wraps around operators: its time is dispatch, not work.
MACHINERY = r"^autograd::engine|^torch::autograd|Backward\d*$|^detach$"
HOST_NOTE = "no device activity: operators on the host stand for kernels, idle is the time between them"
T = TypeVar("T")


def read(path: Path) -> Recording:
    """A trace as a recording; `manifest.notes` say what was missing, damaged or set aside."""
    blocks = Blocks(path)
    parts = _Parts()
    numbered = enumerate(blocks)
    own = EventDecoder()
    for index, block in itertools.islice(numbered, _INLINE_BLOCKS):
        parts.add(index, NONE, decode_block(own, block))
    rest = next(numbered, None)
    if rest is not None:
        processes = max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0))))
        for index, process, decoded in decode_in_processes(itertools.chain([rest], numbered), processes):
            parts.add(index, process, decoded)
    parts.mend(own)
    recording = _assemble(parts, path, blocks)
    if not any(getattr(recording, name).height for name in ("kernels", "ops", "ranges")):
        raise StepscopeError(
            f"`{path}` holds no events that can be read",
            detail="; ".join(recording.manifest.notes) or "its list of events is empty",
            hint="was the profiler stopped before its schedule reached an active step?",
        )
    return recording


class _Parts:
    """The decoded blocks, with the texts of the process that decoded each."""

    def __init__(self) -> None:
        self.decoded: list[tuple[float, int, Decoded]] = []
        self.texts: dict[int, list[str]] = defaultdict(list)
        self.lost_events = 0
        self.lost_bytes = 0
        self.set_aside = 0

    def add(self, index: float, process: int, decoded: Decoded) -> None:
        self.texts[process].extend(decoded.new_texts)
        self.decoded.append((index, process, decoded))
        self.lost_events += decoded.lost_events
        self.lost_bytes += decoded.lost_bytes
        self.set_aside += decoded.set_aside

    def mend(self, decoder: EventDecoder) -> None:
        """Where a cut went through an event, its halves lie at the edges of two blocks."""
        self.decoded.sort(key=lambda part: part[0])
        edges = [(index, decoded.head, decoded.tail) for index, _, decoded in self.decoded]
        carried = b""
        for index, head, tail in edges:
            fragment = b",".join(piece for piece in (carried, head) if piece)
            carried = tail
            if fragment:
                mended = decoder.salvage(fragment)
                for rest in (mended.head, mended.tail):
                    mended.lost_events += bool(rest)
                    mended.lost_bytes += len(rest)
                self.add(index - 0.5, NONE, mended)
        if carried:
            self.lost_events += 1
            self.lost_bytes += len(carried)
        # A mended event stands between the blocks it was cut by.
        self.decoded.sort(key=lambda part: part[0])

    def table(self, kinds: Sequence[str]) -> pl.DataFrame:
        """All rows of the given kinds, with `kind` as a column and texts in place of their numbers."""
        texts = {process: pl.Series(values, dtype=pl.String) for process, values in self.texts.items()}
        frames = []
        for _, process, decoded in self.decoded:
            for kind in kinds:
                if kind in decoded.tables:
                    frame = _frame(decoded.tables[kind], texts[process])
                    frames.append(frame.with_columns(kind=pl.lit(kind)))
        return pl.concat(frames, how="diagonal") if frames else pl.DataFrame()


def _frame(columns: Columns, texts: pl.Series) -> pl.DataFrame:
    made = {}
    for name, values in columns.items():
        if name in _TEXT_COLUMNS:
            made[name] = texts.gather(pl.Series(values, dtype=pl.UInt32))
        else:
            made[name] = pl.Series(values, dtype=pl.Int64)
    frame = pl.DataFrame(made)
    nullable = [name for name in columns if name not in ("start_ns", "end_ns", "ns", *_TEXT_COLUMNS)]
    optional_texts = [name for name in columns if name in _TEXT_COLUMNS and name != "name"]
    return frame.with_columns(
        *(pl.when(pl.col(name) != NONE).then(pl.col(name)).alias(name) for name in nullable),
        *(pl.when(pl.col(name) != "").then(pl.col(name)).alias(name) for name in optional_texts),
    )


def _assemble(parts: _Parts, path: Path, blocks: Blocks) -> Recording:
    notes = left_out_notes(blocks, parts.lost_events, parts.lost_bytes, parts.set_aside)
    repairs = Repairs()
    ops = repair("ops", parts.table(["op"]), repairs)
    ops = conform("ops", ops.drop("kind", strict=False))
    # `Fwd thread id` is 0 on operators of the forward pass itself.
    ops = ops.with_columns(forward_thread=pl.when(pl.col("forward_thread") > 0).then(pl.col("forward_thread")))
    launches = repair("launches", parts.table(["launch"]), repairs)
    launches = conform("launches", launches.drop("kind", strict=False))
    kernels = _kernels(repair("kernels", parts.table(_GPU_KINDS), repairs), launches)
    ranges = _ranges(repair("ranges", parts.table(["user", "python"]), repairs))
    links = _links(repair_flows(parts.table(["flow s", "flow f"]), repairs))
    device = find_device(blocks.properties, kernels)
    if not (kernels.height or repairs.lost_rows["kernels"] or device_is_cut_off(device.name, notes)):
        kernels = _host_kernels(ops)
        if kernels.height:
            notes.append(HOST_NOTE)
    names = ranges["name"]
    distributed = as_kind(blocks.properties.get("distributedInfo"), Distributed) or Distributed()
    manifest = Manifest(
        source="pytorch profiler",
        file=path.name,
        device=device.name[:100],
        device_sms=device.num_sms,
        rank=distributed.rank,
        world_size=distributed.world_size,
        versions=versions_of(blocks.properties),
        shapes_recorded=bool(ops["shapes"].is_not_null().any()),
        modules_recorded=bool((ranges["source"] == "module").any() or names.str.starts_with("module:").any()),
        notes=(*notes, *repairs.notes()),
    )
    return Recording(
        manifest=manifest,
        kernels=kernels,
        launches=launches,
        ops=ops,
        ranges=ranges,
        links=links,
    )


def left_out_notes(blocks: Blocks, lost_events: int, lost_bytes: int, set_aside: int) -> list[str]:
    notes = list(blocks.notes)
    if lost_events:
        notes.append(f"{lost_events} events ({lost_bytes} bytes) could not be read and are left out")
    if set_aside:
        notes.append(f"{set_aside} events of kinds that are not known are left out")
    return notes


def device_is_cut_off(device: str, notes: Sequence[str]) -> bool:
    """A file that names a device and ends early may have had its kernels in the part that is missing: the profiler
    writes them after the operators."""
    return bool(device) and any("ends early" in note or "damaged" in note for note in notes)


def _kernels(frame: pl.DataFrame, launches: pl.DataFrame) -> pl.DataFrame:
    if not frame.height:
        return conform("kernels", frame)
    processes = launches["process"].drop_nulls().mode() if launches.height else pl.Series([], dtype=pl.Int64)
    graph = pl.col("graph_node").fill_null(0) > 0
    frame = frame.with_columns(process=pl.lit(processes.min(), dtype=pl.Int64), graph=graph).drop("graph_node")
    return conform("kernels", frame).sort("start_ns", "end_ns", maintain_order=True)


def _host_kernels(ops: pl.DataFrame) -> pl.DataFrame:
    """On a CPU the operator that does the work is what a kernel is on a GPU: the outermost one that spends at least
    half of its time by itself rather than in operators it calls. (The innermost would not do: a matrix product calls
    operators that only look at its arguments.)"""
    machinery = pl.col("name").str.contains(MACHINERY)
    keys = ("process", "thread", "start_ns", "end_ns")
    ordered = ops.filter(~machinery).sort(keys, descending=[False, False, False, True])
    columns = [ordered[name].to_list() for name in keys]
    own = [end - start for start, end in zip(columns[2], columns[3], strict=True)]
    parents = [NONE] * len(own)
    open_rows: list[int] = []
    key: tuple[int, int] | None = None
    for row, (process, thread, start, end) in enumerate(zip(*columns, strict=True)):
        if key != (process, thread):
            key, open_rows = (process, thread), []
        while open_rows and columns[3][open_rows[-1]] <= start:
            open_rows.pop()
        if open_rows:
            parents[row] = open_rows[-1]
            own[open_rows[-1]] -= end - start
        open_rows.append(row)
    inside = [False] * len(own)  # of an operator that counts as a kernel
    taken = []
    for row, parent in enumerate(parents):
        length = columns[3][row] - columns[2][row]
        inside[row] = parent != NONE and inside[parent]
        if not inside[row] and 2 * own[row] >= length:
            inside[row] = True
            taken.append(row)
    kernels = ordered[taken].select("name", "start_ns", "end_ns", "process", stream="thread", kind=pl.lit("cpu"))
    return conform("kernels", kernels.with_columns(device=pl.lit(-1), graph=pl.lit(value=False))).sort("start_ns")


def _ranges(frame: pl.DataFrame) -> pl.DataFrame:
    if not frame.height:
        return conform("ranges", frame)
    is_module = (pl.col("kind") == "python") & pl.col("name").str.starts_with(_MODULE_FRAME)
    source = pl.when(is_module).then(pl.lit("module")).otherwise(pl.col("kind"))
    return conform("ranges", frame.with_columns(source=source).drop("kind"))


def repair_flows(flows: pl.DataFrame, repairs: Repairs) -> pl.DataFrame:
    """Either end of an arrow."""
    if not flows.height:
        return flows
    return repair("links", flows.rename({"ns": "forward_ns"}), repairs).rename({"forward_ns": "ns"})


def _links(frame: pl.DataFrame) -> pl.DataFrame:
    if not frame.height:
        return conform("links", frame)
    forward = frame.filter(pl.col("kind") == "flow s").unique("id", keep="first", maintain_order=True)
    backward = frame.filter(pl.col("kind") == "flow f")
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


class Distributed(msgspec.Struct):
    rank: _Count | None = None
    world_size: _Count | None = None


def find_device(properties: dict[str, object], kernels: pl.DataFrame) -> _DeviceProperties:
    """The device that was used most. Nothing else of the file's own properties is kept."""
    listed = as_kind(properties.get("deviceProperties"), list[_DeviceProperties]) or [_DeviceProperties()]
    used = kernels["device"].drop_nulls().mode()
    return next((one for one in listed if used.len() and one.id == used[0]), listed[0])


def versions_of(properties: dict[str, object]) -> dict[str, str]:
    names = ("schemaVersion", "cuda_runtime_version", "cuda_driver_version", "hip_runtime_version", "cupti_version")
    return {name: str(properties[name])[:40] for name in names if isinstance(properties.get(name), int | float)}


def as_kind(value: object, kind: type[T]) -> T | None:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return None

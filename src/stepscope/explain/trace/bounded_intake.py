"""The first pass over a trace larger than memory: rows to disk, in the order in which later passes want them, and the
few facts that are about the file as a whole."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from stepscope.errors import StepscopeError
from stepscope.explain.trace.attribution import EVALUATE
from stepscope.explain.trace.phases import named_ranges, step_ranges
from stepscope.recording.readers import kineto
from stepscope.recording.readers.kineto_stream import Names, TraceStream
from stepscope.recording.readers.spill import Spill
from stepscope.recording.store import Manifest, Recording
from stepscope.recording.validation import Repairs, repair

_OURS, _FRAME = "module:", "nn.Module: "
_TIMED = {"start_ns": pl.Int64, "end_ns": pl.Int64, "process": pl.Int64, "thread": pl.Int64, "name": pl.UInt32}
_FLOW = {"id": pl.Int64, "process": pl.Int64, "thread": pl.Int64, "ns": pl.Int64}
_GPU_KINDS = ("kernel", "memcpy", "memset")

Thread = tuple[int | None, int | None]  # with its process


class Spills:
    """The tables on disk. Those from `points` on are made by later passes of those before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ops = self._make("ops", "start_ns", {**_TIMED, "sequence": pl.Int64, "forward_thread": pl.Int64})
        self.modules = self._make("modules", "start_ns", {**_TIMED, "source": pl.String})
        self.named = self._make("named", "start_ns", {**_TIMED, "source": pl.String})
        self.forward = self._make(
            "forward", "sequence", {"sequence": pl.Int64, "process": pl.Int64, "thread": pl.Int64, "start_ns": pl.Int64}
        )
        self.launches = self._make(
            "launches",
            "correlation",
            {"correlation": pl.Int64, "process": pl.Int64, "thread": pl.Int64, "ns": pl.Int64, "name": pl.UInt32},
        )
        self.kernels = self._make(
            "kernels",
            "correlation",
            {
                "correlation": pl.Int64,
                "start_ns": pl.Int64,
                "end_ns": pl.Int64,
                "device": pl.Int64,
                "stream": pl.Int64,
                "name": pl.UInt32,
                "graph": pl.Boolean,
            },
        )
        self.flow_starts = self._make("flow_starts", "id", _FLOW)
        self.flow_ends = self._make("flow_ends", "id", _FLOW)
        # Kernels as the moments at which the host asked for them.
        self.points = self._make(
            "points",
            "ns",
            {
                "ns": pl.Int64,
                "process": pl.Int64,
                "thread": pl.Int64,
                "name": pl.UInt32,
                "launched": pl.String,
                "time_ns": pl.Int64,
            },
        )
        # Kernels as stretches of a device's time.
        self.swept = self._make(
            "swept",
            "start_ns",
            {
                "start_ns": pl.Int64,
                "end_ns": pl.Int64,
                "process": pl.Int64,
                "device": pl.Int64,
                "stream": pl.Int64,
                "name": pl.UInt32,
            },
        )
        self.links = self._make(
            "links",
            "ns",
            {"ns": pl.Int64, "process": pl.Int64, "thread": pl.Int64, "forward_thread": pl.Int64},
        )
        # Autograd's nodes, numbered in the order in which the windows over `ops` bring them.
        self.nodes = self._make(
            "nodes",
            "sequence",
            {"sequence": pl.Int64, "process": pl.Int64, "forward_thread": pl.Int64, "node": pl.Int64},
        )
        self.made = self._make(
            "made", "ns", {"ns": pl.Int64, "process": pl.Int64, "thread": pl.Int64, "node": pl.Int64}
        )
        self.node_modules = self._make("node_modules", "node", {"node": pl.Int64, "module": pl.UInt32})

    def _make(self, name: str, key: str, schema: Mapping[str, type[pl.DataType]]) -> Spill:
        return Spill(self._folder, name, key, pl.Schema(schema))


@dataclass(kw_only=True)
class Facts:
    """About the file as a whole."""

    names: Names = field(default_factory=Names)
    manifest: Manifest = field(default_factory=lambda: Manifest(source="pytorch profiler"))
    num_ops: int = 0
    num_ranges: int = 0
    repairs: Repairs = field(default_factory=Repairs)
    launch_processes: Counter[int] = field(default_factory=Counter)
    devices: Counter[int] = field(default_factory=Counter)
    forward_threads: Counter[Thread] = field(default_factory=Counter)  # by operators that could make a node
    steps: list[pl.DataFrame] = field(default_factory=list)
    names_modules_itself: bool = False  # by our annotation, which wins over the profiler's stacks
    has_frames: bool = False
    says_backward: bool = False  # in a range's name

    @property
    def launch_process(self) -> int | None:
        """The process that is taken to have launched all kernels: the one with most calls."""
        most = max(self.launch_processes.values(), default=0)
        return min((one for one, count in self.launch_processes.items() if count == most), default=None)


def take_in(path: Path, spills: Spills) -> Facts:
    """Reads the file once. Raises StepscopeError for what holds nothing to read."""
    facts = Facts()
    stream = TraceStream(path, facts.names)
    for tables in stream:
        if "op" in tables:
            _take_ops(facts, spills, repair("ops", tables["op"], facts.repairs))
        if "launch" in tables:
            _take_launches(facts, spills, repair("launches", tables["launch"], facts.repairs))
        for kind in _GPU_KINDS:
            if kind in tables:
                _take_kernels(facts, spills, repair("kernels", tables[kind], facts.repairs))
        for kind in ("user", "python"):
            if kind in tables:
                _take_ranges(facts, spills, repair("ranges", tables[kind], facts.repairs), kind)
        for kind, spill in (("flow s", spills.flow_starts), ("flow f", spills.flow_ends)):
            if kind in tables:
                flows = kineto.repair_flows(tables[kind], facts.repairs)
                spill.add(flows.filter(pl.col("id").is_not_null()))
    on_host = not (spills.kernels.num_rows or facts.repairs.lost_rows["kernels"]) and facts.num_ops > 0
    facts.manifest = _manifest(path, stream, facts, on_host=on_host)
    if not (spills.kernels.num_rows or facts.num_ops or facts.num_ranges):
        raise StepscopeError(
            f"`{path}` holds no events that can be read",
            detail="; ".join(facts.manifest.notes) or "its list of events is empty",
            hint="was the profiler stopped before its schedule reached an active step?",
        )
    return facts


def _take_ops(facts: Facts, spills: Spills, ops: pl.DataFrame) -> None:
    # `Fwd thread id` is 0 on operators of the forward pass itself.
    ops = ops.with_columns(forward_thread=pl.when(pl.col("forward_thread") > 0).then(pl.col("forward_thread")))
    facts.num_ops += ops.height
    spills.ops.add(ops)
    evaluates = facts.names.spell(ops["name"]).str.starts_with(EVALUATE)
    forward = ops.filter(pl.col("sequence").is_not_null() & pl.col("forward_thread").is_null() & ~evaluates)
    spills.forward.add(forward)
    for process, thread, count in forward.group_by("process", "thread").len().iter_rows():
        facts.forward_threads[process, thread] += count


def _take_launches(facts: Facts, spills: Spills, launches: pl.DataFrame) -> None:
    facts.launch_processes.update(_count(launches["process"]))
    spills.launches.add(launches.filter(pl.col("correlation").is_not_null()).with_columns(ns="start_ns"))


def _take_kernels(facts: Facts, spills: Spills, kernels: pl.DataFrame) -> None:
    facts.devices.update(_count(kernels["device"]))
    # No call has the number that stands for none.
    number = pl.col("correlation").fill_null(-1)
    spills.kernels.add(kernels.with_columns(correlation=number, graph=pl.col("graph_node").fill_null(0) > 0))


def _take_ranges(facts: Facts, spills: Spills, ranges: pl.DataFrame, kind: str) -> None:
    facts.num_ranges += ranges.height
    spelled = ranges.with_columns(name=facts.names.spell(ranges["name"]), number="name")
    is_frame = pl.lit(kind == "python") & pl.col("name").str.starts_with(_FRAME)
    spelled = spelled.with_columns(source=pl.when(is_frame).then(pl.lit("module")).otherwise(pl.lit(kind)))
    ours = pl.col("name").str.starts_with(_OURS)
    modules = spelled.filter(ours | (pl.col("source") == "module"))
    spills.modules.add(modules.with_columns(name="number"))
    facts.names_modules_itself |= bool(modules.select(ours.any()).item())
    facts.has_frames |= bool((modules["source"] == "module").any())
    named = named_ranges(spelled)
    spills.named.add(named.with_columns(name="number"))
    facts.says_backward |= bool((named["phase"] == "backward").any())
    steps = step_ranges(Recording(manifest=facts.manifest, ranges=spelled))
    if steps.height:
        facts.steps.append(steps.select("step", "start_ns", "end_ns"))


def _count(values: pl.Series) -> dict[int, int]:
    return dict(values.drop_nulls().value_counts().iter_rows())


def _manifest(path: Path, stream: TraceStream, facts: Facts, *, on_host: bool) -> Manifest:
    properties = stream.blocks.properties
    most = [device for device, _ in sorted(facts.devices.items(), key=lambda item: (-item[1], item[0]))[:1]]
    device = kineto.find_device(properties, pl.DataFrame({"device": most}, schema={"device": pl.Int64}))
    distributed = kineto.as_kind(properties.get("distributedInfo"), kineto.Distributed) or kineto.Distributed()
    return Manifest(
        source="pytorch profiler",
        file=path.name,
        device=device.name[:100],
        device_sms=device.num_sms,
        rank=distributed.rank,
        world_size=distributed.world_size,
        versions=kineto.versions_of(properties),
        modules_recorded=facts.names_modules_itself or facts.has_frames,
        notes=_notes(stream, facts, on_host=on_host),
    )


def _notes(stream: TraceStream, facts: Facts, *, on_host: bool) -> tuple[str, ...]:
    """In the order in which `kineto.read` finds them."""
    notes = kineto.left_out_notes(stream.blocks, stream.lost_events, stream.lost_bytes, stream.set_aside)
    return (*notes, *([kineto.HOST_NOTE] if on_host else []), *facts.repairs.notes())

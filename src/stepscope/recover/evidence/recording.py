"""Evidence: what a recording of a black box shows.

Only what the device reports is used: kernel names, grids, blocks, durations and counters, in order. Shapes, modules and
stacks that a profiler recorded are ignored.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
import polars as pl

from stepscope.cost import product_dims
from stepscope.explain.kernel_names import decode
from stepscope.explain.trace.attribution import attribute_kernels
from stepscope.recording.readers.counter_metrics import (
    CounterKey,
    canonical_counters,
    choose_noisy,
    find_exact,
    tensor_dtype_of,
)
from stepscope.recording.readers.ncu import has_lost_rows
from stepscope.recording.store import Recording
from stepscope.recording.tables import KERNEL_LAUNCHES
from stepscope.recover.evidence.redundancy import Flaw, find_flaws
from stepscope.recover.facts import Sighting, Triple
from stepscope.units import count_noun

Sizes = tuple[int, int, int, int]
# Its rows have consecutive IDs, which the reader checks, but no times: kernels are placed end to end.
_NSIGHT_COMPUTE = "nsight compute"
_BARE_TEMPLATE = re.compile(r"\b(\w*elementwise_kernel|reduce_kernel|Kernel2|flash_fwd_kernel)(\([^()]*\))?$")
_MOST_KERNELS = 200_000
# A larger count is an overflow in the file. Other values, and text such as `n/a`, were not measured.
_IS_MEASURED = pl.col("value").is_between(0, 2.0**100)
_MOST_UNTIMED = 0.01  # share of kernels without a duration
_MOST_UNLAUNCHED = 0.01  # share of kernels without a launch, which profilers may lose


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEvidence:
    """The kernels of one file. `allocations` are the requested sizes in bytes, `held` those of the whole time."""

    source: str
    file: str
    sightings: tuple[Sighting, ...] = ()
    allocations: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    exchanges: tuple[int, ...] = ()  # indices of the kernels before which collectives ran, on any stream
    device: str = ""  # the driver's name for it
    device_sms: int | None = None
    is_portable: bool = False  # read only what the kernels show on any GPU
    is_incomplete: bool = False  # some kernels of the run are known to be missing
    notes: tuple[str, ...] = ()
    flaws: tuple[Flaw, ...] = ()  # their rows are indices of sightings
    gaps: tuple[str, ...] = ()  # what is missing from the file, besides kernels

    @property
    def has_counters(self) -> bool:
        return any(sighting.counters for sighting in self.sightings)

    @property
    def has_history(self) -> bool:
        """Whether a memory snapshot recorded what the run allocated, and not only what it held at one moment."""
        return len(self.held) < len(self.allocations)

    @property
    def is_numbered(self) -> bool:
        """Whether a kernel that is missing between others leaves a gap: Nsight Compute and profilers number them."""
        return all(one.launch is not None for one in self.sightings)

    def exchanges_within(self, passes: Iterable[Sequence[int]]) -> bool:
        """Whether collectives ran between the attention calls of a pass, given by their indices. Models split over GPUs
        communicate there; gradients are reduced later."""
        spans = [(min(indices), max(indices)) for indices in passes]
        return any(first < index <= last for index in self.exchanges for first, last in spans)


def gather(recording: Recording, *, file: str = "", use_shapes: bool = False) -> KernelEvidence:
    """Return the kernels of the busiest stream in launch order. With `use_shapes`, trust the GEMM shapes that the
    profiler recorded."""
    manifest = recording.manifest
    notes = list(manifest.notes)
    kernels = everything = recording.kernels.with_row_index("row").filter(pl.col("kind") == "kernel")
    streams = Counter(zip(kernels["process"], kernels["device"], kernels["stream"], strict=True))
    if len(streams) > 1:
        kernels = _main_stream(kernels, streams)
        notes.append(
            f"{len(streams)} streams: only the busiest was used ({kernels.height:,} of {streams.total():,} kernels)"
        )
    if canonical_counters(recording.counters).height > canonical_counters(find_exact(recording.counters)).height:
        notes.append("counters in units such as Kbyte are rounded, and were not used: add --print-units base to ncu")
    lost = _count_lost(recording)
    if lost:
        notes.append(f"{count_noun(lost, 'kernel')} missing: launched, but not in the file")
    if kernels.height > _MOST_KERNELS:
        notes.append(f"only the first {_MOST_KERNELS:,} of {kernels.height:,} kernels were used")
    kernels = kernels.sort("start_ns", "row", maintain_order=True).head(_MOST_KERNELS)
    told = _told(recording) if use_shapes else {}
    allocations = recording.allocations.filter(pl.col("requested_bytes").is_not_null())
    indices = {row: index for index, row in enumerate(kernels["row"])}
    return KernelEvidence(
        source=manifest.source,
        file=file or manifest.file,
        sightings=tuple(_sightings(kernels, recording.counters, told, has_timeline=manifest.source != _NSIGHT_COMPUTE)),
        exchanges=_find_exchanges(everything, kernels),
        allocations=tuple(allocations["requested_bytes"]),
        held=tuple(
            allocations.filter(pl.col("start_event").is_null(), pl.col("end_event").is_null())["requested_bytes"]
        ),
        device=manifest.device,
        device_sms=manifest.device_sms,
        is_incomplete=lost > 0 or has_lost_rows(manifest.notes),
        notes=tuple(notes),
        flaws=tuple(replace(flaw, row=indices[flaw.row]) for flaw in find_flaws(kernels, recording.counters)),
        gaps=tuple(_find_gaps(recording, kernels)),
    )


def count_cut_names(sightings: Iterable[Sighting]) -> int:
    """Return how many kernels have a name without all of its template arguments, which say what the kernel does."""
    names = (one.name.name for one in sightings)
    return sum(
        name.count("<") != name.count(">") or "<...>" in name or bool(_BARE_TEMPLATE.search(name)) for name in names
    )


def _find_gaps(recording: Recording, kernels: pl.DataFrame) -> Iterable[str]:
    """Yield what is missing: durations, counters, and the launches of kernels."""
    timeless = kernels.filter(pl.col("end_ns") <= pl.col("start_ns")).height
    if timeless > _MOST_UNTIMED * kernels.height:
        yield f"{timeless:,} of {kernels.height:,} kernels have no duration, so the share of any work is unknown"
    counted = recording.counters.filter(pl.col("kernel").is_in(kernels["row"].implode()), _IS_MEASURED)
    metrics = counted.group_by("kernel").agg(pl.col("metric").n_unique())["metric"]
    if counted.height and (metrics.max() != metrics.min() or len(metrics) < kernels.height):
        fewer = kernels.height - (metrics == metrics.max()).sum()
        yield f"{fewer:,} of {kernels.height:,} kernels lack counters that the others have"
    launches = recording.launches.filter(pl.col("correlation").is_not_null())
    if launches.height:
        since = kernels.filter(pl.col("start_ns") >= launches["start_ns"].min())
        made = since.join(launches, on=["process", "correlation"], how="semi", nulls_equal=True)
        if since.height - made.height > _MOST_UNLAUNCHED * since.height:
            yield f"{since.height - made.height:,} of {since.height:,} kernels were not launched in the recording"


def _main_stream(kernels: pl.DataFrame, streams: Counter[tuple[int, int, int]]) -> pl.DataFrame:
    process, device, stream = streams.most_common(1)[0][0]
    return kernels.filter(
        pl.col("process").eq_missing(process), pl.col("device").eq_missing(device), pl.col("stream").eq_missing(stream)
    )


def _count_lost(recording: Recording) -> int:
    """Return how many kernels were launched between others but are not in the file. A CUDA graph is captured with
    launches that run nothing, so they are not counted then."""
    launches = recording.launches.filter(pl.col("name").str.contains(KERNEL_LAUNCHES)).sort("start_ns")
    known = launches["correlation"].is_in(recording.kernels["correlation"].implode()).fill_null(value=True)
    found = known.arg_true()
    if recording.kernels["graph"].any() or not len(found):
        return 0
    return int((~known[found[0] : found[-1]]).sum())


def _find_exchanges(everything: pl.DataFrame, kernels: pl.DataFrame) -> tuple[int, ...]:
    names = everything.get_column("name").fill_null("")
    collective = {name for name in names.unique() if decode(name).kernel_class == "communication"}
    if not collective:
        return ()
    starts = everything.filter(names.is_in(list(collective))).get_column("start_ns")
    return tuple(kernels.get_column("start_ns").search_sorted(starts.sort()).to_list())


def _counters(table: pl.DataFrame) -> dict[int, dict[CounterKey, int]]:
    """Return counters by row of the kernel."""
    counters: dict[int, dict[CounterKey, int]] = {}
    measured = canonical_counters(table).filter(_IS_MEASURED)
    for kernel, key, value in measured.select("kernel", "key", "value").iter_rows():
        counters.setdefault(kernel, {})[key] = round(value)
    return counters


def _told(recording: Recording) -> dict[int, Sizes]:
    """Return GEMM sizes by row of the kernel, from the operator that launched it."""
    launched_by = attribute_kernels(recording)["op_row"] if recording.ops.height else ()
    described = recording.ops.select("name", "shapes").rows()
    told = {}
    for kernel, op_row in enumerate(launched_by):
        sizes = product_dims(*described[op_row]) if op_row is not None else None
        if sizes is not None:
            batch, rows, columns, inner = sizes
            told[kernel] = (rows, columns, inner, batch)
    return told


def _tensor_dtypes(table: pl.DataFrame) -> dict[int, dict[str, int]]:
    """Return tensor core operations by row of the kernel and dtype. Metrics of one dtype overlap, so the largest
    counts."""
    dtypes = {metric: dtype for metric in table["metric"].unique() if (dtype := tensor_dtype_of(metric)) is not None}
    counted: dict[int, dict[str, int]] = {}
    for kernel, metric, value in _values(table, dtypes):
        known = counted.setdefault(kernel, {})
        known[dtypes[metric]] = max(round(value), known.get(dtypes[metric], 0))
    return counted


def _noise(table: pl.DataFrame) -> dict[int, dict[str, float]]:
    noise: dict[int, dict[str, float]] = {}
    for kernel, metric, value in _values(table, choose_noisy(table["metric"].unique())):
        noise.setdefault(kernel, {})[metric] = value
    return noise


def _values(table: pl.DataFrame, metrics: Iterable[str]) -> Iterable[tuple[int, str, float]]:
    wanted = table.filter(pl.col("metric").is_in(list(metrics)), _IS_MEASURED)
    return wanted.select("kernel", "metric", "value").iter_rows()


def _sightings(
    kernels: pl.DataFrame, table: pl.DataFrame, told: dict[int, Sizes], *, has_timeline: bool
) -> Iterable[Sighting]:
    exact = find_exact(table)
    counters, dtypes, noise = _counters(exact), _tensor_dtypes(table), _noise(exact)
    for index, row in enumerate(kernels.iter_rows(named=True)):
        sighting = Sighting(
            index=index,
            name=decode(row["name"] or ""),
            grid=_triple(row, "grid"),
            block=_triple(row, "block"),
            duration_ns=row["end_ns"] - row["start_ns"],
            registers=row["registers"],
            shared_bytes=row["shared_bytes"],
            counters=counters.get(row["row"], {}),
            tensor_dtypes=dtypes.get(row["row"], {}),
            noise=noise.get(row["row"], {}),
            launch=row["correlation"],
            start_ns=row["start_ns"] if has_timeline else None,
            in_graph=bool(row["graph"]),
            told=told.get(row["row"]),
        )
        operations = count_operations(sighting)
        if operations is not None:
            sighting = msgspec.structs.replace(sighting, counters={**sighting.counters, "tensor_ops": operations})
        yield sighting


def _triple(row: dict[str, int | None], what: str) -> Triple:
    x, y, z = (row[f"{what}_{axis}"] or 0 for axis in "xyz")
    return x, y, z


# --- Tensor core operations from instructions, for files that count only those
#
# An instruction multiplies a tile whose size is in the kernel's name. Ampere's `mma` computes 16×8×8 or 16×8×16.
# Hopper's `wgmma` computes 64×N×16 (×8 in tf32), and counts once for each of the four warps that issue it together. N
# is the side of the tile that the layout assigns to it, halved if two warpgroups share it, or if it exceeds the limit
# of an instruction.

_WARPS = 4
_LONGEST = 256
_NVJET = re.compile(r"nvjet_sm90_\w+_[NT]{2}(?P<layout>[NT])$")
_HOPPER_XMMA = re.compile(r"sm90_xmma_gemm_\w*tf32")
_MMA = re.compile(r"_(?:s|h|bf16_s|f16_s)?(?P<shape>1688|16816)gemm")
_CUDNN = re.compile(r"_flash_fprop_wgmma_\w+?_\d+x(?P<keys>[1-9]\d{1,3})x(?P<width>[1-9]\d{1,3})_")
_FLASH = "flash_fwd_kernel"
_MMA_OPS = {"1688": 2 * 16 * 8 * 8, "16816": 2 * 16 * 8 * 16}


def operations_each(sighting: Sighting) -> float | None:
    """Return the average operations per warp instruction, or None if the name does not show it."""
    text, tile = sighting.name.name.partition("(")[0], sighting.name.tile
    if (found := _NVJET.match(text)) and tile:
        side = tile[0] if found["layout"] == "N" else tile[1]
        is_shared = "_coopB_" in text or side > _LONGEST
        return _wgmma(side // 2 if is_shared else side, 16)
    if _HOPPER_XMMA.match(text) and tile:
        return _wgmma(tile[1], 8)
    if found := _CUDNN.search(text):
        return _attention(int(found["keys"]), int(found["width"]))
    if found := _MMA.search(text):
        return _MMA_OPS[found["shape"]]
    return _MMA_OPS["16816"] if _FLASH in text else None


def _wgmma(side: int, depth: int) -> float:
    return 2 * 64 * side * depth / _WARPS


def _attention(keys: int, width: int) -> float:
    """Scores take width / 16 instructions of that many keys, values take keys / 16 of that width."""
    instructions = width // 16 + keys // 16
    return (width // 16 * _wgmma(keys, 16) + keys // 16 * _wgmma(width, 16)) / instructions


def count_operations(sighting: Sighting) -> int | None:
    """Return the operations, or None if they were counted directly or cannot be derived."""
    instructions = sighting.counters.get("tensor_instructions")
    if instructions is None or "tensor_ops" in sighting.counters:
        return None
    each = operations_each(sighting) if instructions else 0.0
    return None if each is None else round(instructions * each)

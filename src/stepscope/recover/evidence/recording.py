"""Evidence: what a recording shows of a run that is otherwise a black box.

Only what the device itself shows is taken: names of kernels, grids, blocks, durations and counters, in the order in
which they ran. Shapes, modules and stacks, which a friendly recorder wrote beside them, stay where they are.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import polars as pl

from stepscope.cost import product_dims
from stepscope.explain.kernel_names import decode
from stepscope.explain.trace.attribution import attribute_kernels
from stepscope.recording.readers.counter_metrics import CounterKey, canonical_counters
from stepscope.recording.store import Recording
from stepscope.recover.facts import Sighting, Triple
from stepscope.recover.families.tensor_cores import count_operations

Sizes = tuple[int, int, int, int]
_MOST_KERNELS = 200_000
_MOST = 2.0**100  # beyond any count; an overflow in the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The kernels of one file. `allocations` are sizes in bytes, as they were asked for."""

    source: str
    file: str
    sightings: tuple[Sighting, ...] = ()
    allocations: tuple[int, ...] = ()
    exchanges: tuple[int, ...] = ()  # indices of the kernels before which collectives ran, on whichever stream
    device: str = ""  # as its driver calls it
    device_sms: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def has_counters(self) -> bool:
        return any(sighting.counters for sighting in self.sightings)

    def exchanges_within(self, passes: Iterable[Sequence[int]]) -> bool:
        """Whether collectives ran between the attentions of a pass, which stand at these indices: there models exchange
        that are split over GPUs. Gradients are exchanged later."""
        spans = [(min(indices), max(indices)) for indices in passes]
        return any(first < index <= last for index in self.exchanges for first, last in spans)


def gather(recording: Recording, *, file: str = "", use_shapes: bool = False) -> Evidence:
    """The kernels of the stream that holds most of them, in the order in which they began. `use_shapes` believes what a
    profiler wrote down of products."""
    manifest = recording.manifest
    notes = list(manifest.notes)
    kernels = everything = recording.kernels.with_row_index("row").filter(pl.col("kind") == "kernel")
    streams = Counter(zip(kernels["process"], kernels["device"], kernels["stream"], strict=True))
    if len(streams) > 1:
        kernels = _main_stream(kernels, streams)
        notes.append(
            f"{len(streams)} streams: kernels of the busiest were taken, {kernels.height:,} of {streams.total():,}"
        )
    if kernels.height > _MOST_KERNELS:
        notes.append(f"the first {_MOST_KERNELS:,} of {kernels.height:,} kernels were looked at")
    kernels = kernels.sort("start_ns", "row", maintain_order=True).head(_MOST_KERNELS)
    return Evidence(
        source=manifest.source,
        file=file or manifest.file,
        sightings=tuple(_sightings(kernels, _counters(recording.counters), _told(recording) if use_shapes else {})),
        exchanges=_find_exchanges(everything, kernels),
        allocations=tuple(recording.allocations["requested_bytes"].drop_nulls().to_list()),
        device=manifest.device,
        device_sms=manifest.device_sms,
        notes=tuple(notes),
    )


def _main_stream(kernels: pl.DataFrame, streams: Counter[tuple[int, int, int]]) -> pl.DataFrame:
    process, device, stream = streams.most_common(1)[0][0]
    return kernels.filter(
        pl.col("process").eq_missing(process), pl.col("device").eq_missing(device), pl.col("stream").eq_missing(stream)
    )


def _find_exchanges(everything: pl.DataFrame, kernels: pl.DataFrame) -> tuple[int, ...]:
    names = everything.get_column("name").fill_null("")
    collective = {name for name in names.unique() if decode(name).kernel_class == "communication"}
    if not collective:
        return ()
    starts = everything.filter(names.is_in(list(collective))).get_column("start_ns")
    return tuple(kernels.get_column("start_ns").search_sorted(starts.sort()).to_list())


def _counters(table: pl.DataFrame) -> dict[int, dict[CounterKey, int]]:
    """By row of the kernel; what no counter of a kernel can reach was not counted."""
    counters: dict[int, dict[CounterKey, int]] = {}
    sane = pl.col("value").is_finite() & pl.col("value").is_between(0, _MOST)
    for kernel, key, value in canonical_counters(table).filter(sane).select("kernel", "key", "value").iter_rows():
        counters.setdefault(kernel, {})[key] = round(value)
    return counters


def _told(recording: Recording) -> dict[int, Sizes]:
    """Sizes of products by row of the kernel, from the operator that launched it."""
    launched_by = attribute_kernels(recording)["op_row"] if recording.ops.height else ()
    described = recording.ops.select("name", "shapes").rows()
    told = {}
    for kernel, op_row in enumerate(launched_by):
        sizes = product_dims(*described[op_row]) if op_row is not None else None
        if sizes is not None:
            batch, rows, columns, inner = sizes
            told[kernel] = (rows, columns, inner, batch)
    return told


def _sightings(
    kernels: pl.DataFrame, counters: dict[int, dict[CounterKey, int]], told: dict[int, Sizes]
) -> Iterable[Sighting]:
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
            told=told.get(row["row"]),
        )
        operations = count_operations(sighting)
        if operations is not None:
            sighting = msgspec.structs.replace(sighting, counters={**sighting.counters, "tensor_ops": operations})
        yield sighting


def _triple(row: dict[str, int | None], what: str) -> Triple:
    x, y, z = (row[f"{what}_{axis}"] or 0 for axis in "xyz")
    return x, y, z

"""What `stepscope plan` predicts for: a GPU, its memory, and the table of times that fits it best."""

import shlex
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.errors import StepscopeError, nearest
from stepscope.hardware import Hardware, find, known
from stepscope.jobs.workers.messages import Inspect, Inspected
from stepscope.jobs.workers.process import Workers, require_torch
from stepscope.plan.assumptions import Accelerator, accelerator_of
from stepscope.recording.rows.calibration import Calibration, Series, read_calibration
from stepscope.recording.rows.plan_result import PlannedGpu
from stepscope.units import say_factor

USUAL_GPU = "H200"  # if none is named and this machine has none: the one whose table comes with the package
_COMPUTED = ("mm", "addmm", "bmm", "attention")  # the rest of a table is bound by memory
_LEAST_NS = 1500  # of a kernel on any GPU


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU to predict for: what a simulation needs to know about it, its peaks, its times, and what the result says.
    Times are `is_rough` if they come from another GPU, scaled by the data sheets of both."""

    accelerator: Accelerator
    hardware: Hardware
    planned: PlannedGpu
    calibration: Calibration | None = None
    is_rough: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def flags(self) -> str:
        """The flags that name this GPU."""
        memory = self.planned.memory_bytes
        given = "" if memory == self.hardware.memory_bytes else f" --memory {memory}"
        return f"--gpu {shlex.quote(self.planned.name)}{given}"


class Times(NamedTuple):
    """A table, whether it was scaled from another GPU, and what to say about it."""

    calibration: Calibration | None
    is_rough: bool
    remarks: tuple[str, ...]


def open_target(gpu: str | None, memory_bytes: int | None, calibration: Path | None = None) -> Target:
    """The GPU to predict for: the one that is named, or that of the table, or that of this machine, or the usual one.
    Without a name and a table, a process looks for one here. `memory_bytes` replaces its memory."""
    table = read_calibration(calibration) if calibration is not None else None
    if gpu is not None or table is not None:
        return choose_gpu(gpu or str(table.gpu if table else ""), memory_bytes, table)
    require_torch()
    with Workers() as workers:
        here = find_here(workers)
    if here is not None:
        return make_target(here, memory_bytes, is_here=True)
    said = f"no GPU was named and none was found here: {USUAL_GPU}; name another with --gpu"
    target = choose_gpu(USUAL_GPU, memory_bytes)
    return msgspec.structs.replace(target, remarks=(said, *target.remarks))


def choose_gpu(name: str, memory_bytes: int | None, table: Calibration | None = None) -> Target:
    """The GPU with this name; StepscopeError if it is unknown."""
    return make_target(_find_card(name), memory_bytes, table)


def find_here(workers: Workers) -> Hardware | None:
    """The GPU of this machine, with the memory that its driver reports; None if it has none that is known."""
    answer = workers.run(Inspect()).answer
    devices = answer.inspection.devices if isinstance(answer, Inspected) else ()
    if not devices or (card := find(devices[0].name)) is None:
        return None
    return msgspec.structs.replace(card, memory_bytes=devices[0].total_bytes)


def make_target(
    card: Hardware, memory_bytes: int | None, table: Calibration | None = None, *, is_here: bool = False
) -> Target:
    accelerator = accelerator_of(card)
    memory = memory_bytes or accelerator.memory_bytes
    times = choose_times(card, table)
    return Target(
        accelerator=msgspec.structs.replace(accelerator, memory_bytes=memory),
        hardware=card,
        planned=PlannedGpu(name=card.name, memory_bytes=memory, source="this machine" if is_here else "data sheet"),
        calibration=times.calibration,
        is_rough=times.is_rough,
        remarks=times.remarks,
    )


def _find_card(name: str) -> Hardware:
    card = find(name) or find(f"RTX {name}")
    if card is None:
        names = [one.name for one in known()]
        close = nearest(name.upper(), [*names, *(one.split()[0] for one in names)])
        raise StepscopeError(
            f"unknown GPU: `{name}`",
            detail=f"expected one of {', '.join(names)}; for another with the same kernels, add --memory",
            hint=f"--gpu '{close}'" if close else f"--gpu {USUAL_GPU} --memory 80GB",
        )
    return card


# --- Tables of times --------------------------------------------------------------------------------------------------


def choose_times(card: Hardware, table: Calibration | None = None) -> Times:
    """The given table, or the one that comes with the package for this GPU, or else the usual GPU's, scaled."""
    shipped = {one.hardware.name: one for one in read_shipped()}
    found = table or shipped.get(card.name)
    if found is not None and found.hardware.name == card.name:
        said = (
            f"times were measured on {found.gpu} with {found.host} and torch {found.torch}; another host may be slower"
        )
        return Times(found, is_rough=False, remarks=(said,))
    found = found or next(iter(shipped.values()), None)
    if found is None:
        return Times(None, is_rough=False, remarks=())
    scaled, slower = scale_times(found, card)
    said = (
        f"times are rough: those of {found.hardware.name} with {found.host}, scaled by data sheets "
        f"(GEMMs {say_factor(slower[0])}, memory {say_factor(slower[1])}); `stepscope calibrate` measures {card.name}"
    )
    return Times(scaled, is_rough=True, remarks=(said,))


def read_shipped() -> tuple[Calibration, ...]:
    """The tables that come with the package."""
    folder = resources.files("stepscope") / "calibrations"
    if not folder.is_dir():
        return ()
    with resources.as_file(folder) as path:
        return tuple(read_calibration(one) for one in sorted(path.glob("*.json")))


def scale_times(table: Calibration, card: Hardware) -> tuple[Calibration, tuple[float, float]]:
    """A table for a GPU that was not measured, and how many times slower its GEMMs and its memory are. The host stays
    the same."""
    memory = (table.hardware.bandwidth or 1.0) / (card.bandwidth or 1.0)
    products = {name: _peak(table.hardware, name) / _peak(card, name) for name in ("fp32", "tf32", "bf16", "fp16")}

    def scale(series: Series) -> Series:
        is_computed = series.operation.startswith(_COMPUTED) or "attention" in series.operation
        factor = products.get(series.dtype, memory) if is_computed else memory
        rows = tuple((*row[:-1], max(1, round(_LEAST_NS + (row[-1] - _LEAST_NS) * factor))) for row in series.rows)
        return msgspec.structs.replace(series, rows=rows)

    scaled = msgspec.structs.replace(
        table, gpu=card.name, hardware=card, series=tuple(scale(one) for one in table.series)
    )
    return scaled, (products["bf16"], memory)


def _peak(hardware: Hardware, precision: str) -> float:
    """The peak in a precision; for one that the GPU does not have, that of fp32."""
    return float(hardware.peak_flops.get(precision) or hardware.peak_flops["fp32"])

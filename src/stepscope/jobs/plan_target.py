"""What `stepscope plan` predicts for: a GPU, its memory, and the table of times that fits it best."""

import shlex
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from stepscope.errors import StepscopeError, nearest
from stepscope.hardware import Hardware, chip_of, find, known
from stepscope.jobs.workers.messages import Inspect, Inspected
from stepscope.jobs.workers.process import Workers, require_torch
from stepscope.planner.assumptions import Accelerator, accelerator_of
from stepscope.planner.step_time.data_sheets import SHIPPED, find_calibration, scale_calibration
from stepscope.recording.rows.calibration import Calibration, read_calibration
from stepscope.recording.rows.plan_result import PlannedGpu

USUAL_GPU = "H200"  # if none is named and this machine has none: the one whose table comes with the package


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU to predict for: what a simulation needs to know about it, its peaks, its times, and what the result
    says."""

    accelerator: Accelerator
    hardware: Hardware
    planned: PlannedGpu
    calibration: Calibration | None = None
    remarks: tuple[str, ...] = ()

    @property
    def flags(self) -> str:
        """The flags that name this GPU."""
        memory = self.planned.memory_bytes
        given = "" if memory == self.hardware.memory_bytes else f" --memory {memory}"
        return f"--gpu {shlex.quote(self.planned.name)}{given}"


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
    return msgspec.structs.replace(target, remarks=(said,))


def choose_gpu(name: str, memory_bytes: int | None, table: Calibration | None = None) -> Target:
    """The GPU with this name; StepscopeError if it is unknown."""
    return make_target(find_card(name), memory_bytes, table)


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
    memory = accelerator.memory_bytes if memory_bytes is None else memory_bytes
    times = choose_times(card, table)
    version = times.torch if times and not is_here else metadata.version("torch")
    return Target(
        accelerator=msgspec.structs.replace(accelerator, memory_bytes=memory, torch=_release(version)),
        hardware=card,
        planned=PlannedGpu(name=card.name, memory_bytes=memory, source="this machine" if is_here else "data sheet"),
        calibration=times,
    )


def _release(version: str) -> tuple[int, int]:
    """`2.11.0+cu130` as 2 and 11."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def look_up_card(name: str) -> Hardware | None:
    """The GPU of this name, with or without `RTX`."""
    return find(name) or find(f"RTX {name}")


def find_card(name: str, *, flag: Literal["--gpu", "--fit"] = "--gpu") -> Hardware:
    """The GPU that the value of `flag` names. Raise StepscopeError if it is unknown."""
    card = look_up_card(name)
    if card is None:
        names = [one.name for one in known() if chip_of(one)]
        families = (one.split()[0] for one in names)
        close = nearest(name.upper(), [*names, *(one for one in families if find(one))])
        other = "give its memory" if flag == "--fit" else "add --memory"
        example = "--fit 24GB" if flag == "--fit" else f"--gpu {USUAL_GPU} --memory 80GB"
        raise StepscopeError(
            f"unknown GPU: `{name}`",
            detail=f"expected one of {', '.join(names)}; for another with the same kernels, {other}",
            hint=f"{flag} '{close}'" if close else example,
        )
    return card


def choose_times(card: Hardware, table: Calibration | None) -> Calibration | None:
    """The given table or the one that comes with the package, scaled by data sheets if it is another GPU's."""
    if table is None:
        return find_calibration(card.name) if SHIPPED.is_file() else None
    return table if table.hardware.name == card.name else scale_calibration(table, card)

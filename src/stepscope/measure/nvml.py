"""What NVIDIA's management library reports about a GPU: driver, clocks, throttling, and other processes.

Every function returns None without an NVIDIA driver: a CPU or an AMD GPU is not an error here. Values that the driver
withholds inside a container or virtual machine are None as well.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import pynvml
import torch

T = TypeVar("T")

# Reasons that slow a GPU down. Idle and an application's own clock setting are not among them.
_THROTTLES = {
    "SwPowerCap": "power cap",
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "heat",
    "HwThermalSlowdown": "heat",
    "HwPowerBrakeSlowdown": "power brake",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    sm_mhz: int
    max_sm_mhz: int
    memory_mhz: int


@cache
def _library() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def _ask(question: Callable[[], T]) -> T | None:
    if not _library():
        return None
    try:
        return question()
    except pynvml.NVMLError:
        return None


def driver_version() -> str | None:
    return _ask(lambda: str(pynvml.nvmlSystemGetDriverVersion()))


def clocks(device: torch.device) -> Clocks | None:
    def ask() -> Clocks:
        handle = _handle(device)
        return Clocks(
            sm_mhz=pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            max_sm_mhz=pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
            memory_mhz=pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        )

    return _ask(ask)


def throttle_reasons(device: torch.device) -> frozenset[str] | None:
    """Return why the GPU is throttled at this moment; empty if it is not."""

    def ask() -> frozenset[str]:
        mask = pynvml.nvmlDeviceGetCurrentClocksEventReasons(_handle(device))
        return frozenset(text for name, text in _THROTTLES.items() if mask & _reason_bit(name))

    return _ask(ask)


def other_processes(device: torch.device) -> tuple[int, ...] | None:
    """Return the ids of other processes that hold a context on the GPU.

    In a container the driver may report process ids of the host, so that our own appears under a foreign id: with one
    foreign id and none of our own, that one is us.
    """

    def ask() -> tuple[int, ...]:
        found = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(_handle(device))]
        others = tuple(pid for pid in found if pid != os.getpid())
        return others if os.getpid() in found else others[1:]

    return _ask(ask)


def _handle(device: torch.device) -> Any:
    uuid = torch.cuda.get_device_properties(device).uuid
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


def _reason_bit(name: str) -> int:
    """The constants were renamed from throttle to event reasons; some libraries have only one set."""
    for prefix in ("nvmlClocksEventReason", "nvmlClocksThrottleReason"):
        if hasattr(pynvml, prefix + name):
            return int(getattr(pynvml, prefix + name))
    raise AssertionError(f"pynvml has no constant for {name}")

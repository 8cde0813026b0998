"""Where a measurement runs: the device, its limits, and the relevant versions."""

import os
import platform
import subprocess
import time
from collections.abc import Callable, Collection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import stepscope
from stepscope.errors import StepscopeError
from stepscope.hardware import Hardware, available_bytes, find
from stepscope.measure import nvml
from stepscope.measure.instructions import read_limits, say_limits
from stepscope.measure.soundness import MachineWatch
from stepscope.recording.rows.bench import DeviceState, Environment, Inspection
from stepscope.spec import Precision
from stepscope.units import count_noun

# Differences between the versions in this range are handled here and nowhere else. So far there are none.
TORCH_RANGE = ((2, 11), (2, 14))
# tf32 GEMMs take fp32 inputs and round them.
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Large enough to hide the library's fixed costs, small enough for a second or two on two cores.
_WIDTH = {"cpu": 1024, "cuda": 8192}
_BUDGET_S = 0.5
_COPIED_BYTES = 2**28  # larger than the last cache of most CPUs
_LEAST_RUNS = 3


def check_torch() -> None:
    """A version outside the range may work, but is untested, and a silent difference would be a wrong number."""
    low, high = TORCH_RANGE
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not low <= found < high:
        raise StepscopeError(
            f"unsupported torch version: `{torch.__version__}`",
            detail=f"expected at least {low[0]}.{low[1]} and below {high[0]}.{high[1]}",
            hint="pip install 'stepscope[train]'",
        )


def resolve_device(name: str) -> torch.device:
    """`auto` is the first GPU, or the CPU if there is none; a named device must exist."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda" if name == "auto" else name)
    index = device.index or 0
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        found = count_noun(count, "CUDA device") if count else "no CUDA device"
        raise StepscopeError(f"device not found: `{name}`", detail=f"torch sees {found}", hint="stepscope doctor")
    return torch.device("cuda", index)


def describe(device: torch.device, precisions: Collection[Precision], *, known: Hardware | None = None) -> Environment:
    """Return the environment of `device`. Peaks for `precisions` are measured if neither a data sheet nor `known`,
    earlier measurements of this device, has them.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    hardware = find(name) if device.type == "cuda" else None
    if known is not None and known.name == name and set(precisions) <= set(known.peak_flops):
        hardware = hardware or known
    return Environment(
        device=str(device),
        hardware=hardware or _measure_peaks(name, device, precisions),
        driver_name=name,
        python=platform.python_version(),
        torch=str(torch.__version__),
        triton=installed_version("triton"),
        cuda=torch.version.cuda or torch.version.hip,
        driver=nvml.driver_version(),
        threads=torch.get_num_threads(),
        stepscope=stepscope.__version__,
        commit=_commit(),
        cpu_limits=say_limits(read_limits(os.environ)) if device.type == "cpu" else "",
    )


def describe_unmeasured(device: torch.device) -> Environment:
    """Return the environment of `device` without measuring peaks, which would disturb a program that is training."""
    return describe(device, (), known=Hardware(name=cpu_name(), peak_flops={}, bandwidth=None, source="measured"))


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model\t")):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str | None:
    """Return the commit of the checkout that stepscope runs from, with `-dirty` if files differ. STEPSCOPE_COMMIT names
    it for a copy of the tree without its history.
    """
    if named := os.environ.get("STEPSCOPE_COMMIT"):
        return named
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:  # installed inside an unrelated checkout
        return None
    return _git("describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", os.fspath(Path(stepscope.__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


# --- Peaks without a data sheet ---


def _measure_peaks(name: str, device: torch.device, precisions: Collection[Precision]) -> Hardware:
    """Return the measured GEMM peak and memory bandwidth of a device without a data sheet, marked as measured.

    It is what the installed library reaches on a large square GEMM, a ceiling for the GEMMs of a model; it is lower
    than a data sheet's peak, so a utilization against it reads higher. The best of several runs counts, because
    interference from another process only lowers a run.
    """
    return Hardware(
        name=name,
        peak_flops={precision: _matmul_peak(device, precision) for precision in sorted(set(precisions))},
        bandwidth=_copy_bandwidth(device),
        source="measured",
    )


def _copy_bandwidth(device: torch.device) -> float | None:
    """Return the bytes per second of a large copy, read and written, as STREAM counts them. None if other processes
    used the machine meanwhile, or if memory is short: bandwidth is shared, and a low one would make every operator look
    fast."""
    free = available_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if free < 4 * _COPIED_BYTES:
        return None
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def copy() -> None:
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    watch = MachineWatch(device)
    watch.look()
    seconds = _best_seconds(copy)
    return None if watch.doubts() else 2 * _COPIED_BYTES / seconds


def _matmul_peak(device: torch.device, precision: Precision) -> float:
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    width = _WIDTH[device.type]
    left = torch.randn(width, width, device=device).to(DTYPES[precision])
    right = torch.randn(width, width, device=device).to(DTYPES[precision])

    def multiply() -> None:
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return 2 * width**3 / _best_seconds(multiply)


def _best_seconds(run: Callable[[], None]) -> float:
    run()
    best = float("inf")
    deadline = time.perf_counter() + _BUDGET_S
    runs = 0
    while runs < _LEAST_RUNS or time.perf_counter() < deadline:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
        runs += 1
    return best


# --- For `stepscope doctor` ---


def inspect_torch() -> Inspection:
    """Return what torch sees of this machine. Runs in a worker: a broken torch only breaks that."""
    available = torch.cuda.is_available()
    return Inspection(
        torch=str(torch.__version__),
        torch_problem=_torch_problem(),
        triton=installed_version("triton"),
        cuda=torch.version.cuda or torch.version.hip,
        driver=nvml.driver_version(),
        threads=torch.get_num_threads(),
        devices=tuple(_inspect_device(torch.device("cuda", i)) for i in range(torch.cuda.device_count()))
        if available
        else (),
    )


def _torch_problem() -> str:
    try:
        check_torch()
    except StepscopeError as error:
        return f"{error.message}: {error.detail}"
    return ""


def _inspect_device(device: torch.device) -> DeviceState:
    free, total = torch.cuda.mem_get_info(device)
    major, minor = torch.cuda.get_device_capability(device)
    clocks = nvml.clocks(device)
    reasons = nvml.throttle_reasons(device)
    return DeviceState(
        name=torch.cuda.get_device_name(device),
        capability=f"{major}.{minor}",
        free_bytes=free,
        total_bytes=total,
        sm_mhz=clocks.sm_mhz if clocks else None,
        max_sm_mhz=clocks.max_sm_mhz if clocks else None,
        throttled_by=tuple(sorted(reasons)) if reasons is not None else None,
        other_processes=nvml.other_processes(device),
    )

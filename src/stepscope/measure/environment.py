"""Where a measurement runs: the device, its limits, and the versions of everything that matters."""

import os
import platform
import subprocess
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import stepscope
from stepscope.errors import StepscopeError
from stepscope.hardware import Hardware, find
from stepscope.measure.instructions import read_limits, say_limits
from stepscope.measure.nvml import driver_version
from stepscope.measure.peak import measure_peaks
from stepscope.recording.rows.bench import Environment
from stepscope.spec import Precision

# Where something differs between the versions in this range, it is guarded here and nowhere else. So far nothing does.
TORCH_RANGE = ((2, 11), (2, 14))


def check_torch() -> None:
    """A version outside of the range may work; it has not been tested, and a silent difference would be a wrong
    figure."""
    low, high = TORCH_RANGE
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not low <= found < high:
        raise StepscopeError(
            f"torch `{torch.__version__}` is out of range",
            detail=f"expected at least {low[0]}.{low[1]} and below {high[0]}.{high[1]}",
            hint="pip install 'stepscope[train]'",
        )


def resolve_device(name: str) -> torch.device:
    """`auto` is the first GPU, or the CPU where there is none; a device asked for by name is there or is an error."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda" if name == "auto" else name)
    index = device.index or 0
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        found = f"{count} CUDA device{'s' if count != 1 else ''}" if count else "no CUDA device"
        raise StepscopeError(f"no device `{name}`", detail=f"torch sees {found}", hint="stepscope doctor")
    return torch.device("cuda", index)


def describe(device: torch.device, precisions: Collection[Precision], *, known: Hardware | None = None) -> Environment:
    """The environment of `device`; peaks for `precisions` are measured when no data sheet has them, nor `known`, what
    was measured of this device before."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    hardware = find(name) if device.type == "cuda" else None
    if known is not None and known.name == name and set(precisions) <= set(known.peak_flops):
        hardware = hardware or known
    return Environment(
        device=str(device),
        hardware=hardware or measure_peaks(name, device, precisions),
        driver_name=name,
        python=platform.python_version(),
        torch=str(torch.__version__),
        triton=installed_version("triton"),
        cuda=torch.version.cuda or torch.version.hip,
        driver=driver_version(),
        threads=torch.get_num_threads(),
        stepscope=stepscope.__version__,
        commit=_commit(),
        cpu_limits=say_limits(read_limits(os.environ)) if device.type == "cpu" else "",
    )


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
    """Of the checkout that stepscope runs from, with `-dirty` when files differ from it. A copy of the tree without its
    history can be told by STEPSCOPE_COMMIT what it is a copy of."""
    if named := os.environ.get("STEPSCOPE_COMMIT"):
        return named
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:  # installed inside somebody else's checkout
        return None
    return _git("describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", os.fspath(Path(stepscope.__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None

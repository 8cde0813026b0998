"""What torch sees of this machine, for `stepscope doctor`. Runs in a worker: a broken torch breaks it alone."""

import torch

from stepscope.errors import StepscopeError
from stepscope.measure import nvml
from stepscope.measure.environment import check_torch, installed_version
from stepscope.recording.rows.bench import DeviceState, Inspection


def inspect_torch() -> Inspection:
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

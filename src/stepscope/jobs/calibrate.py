"""Measure the table of this GPU and host that predictions use. Like `tune`, it runs in the current process."""

from collections.abc import Callable
from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.jobs.workers.cpu_limits import limit_instructions
from stepscope.jobs.workers.process import require_torch
from stepscope.recording.rows.calibration import Calibration, write_calibration


def calibrate(*, device: str, out: Path, seconds: float, on_stage: Callable[[str], None]) -> Calibration:
    """Measure, and write the table to `out`."""
    require_torch()
    limit_instructions()
    import torch

    from stepscope.measure.calibration import measure_calibration
    from stepscope.measure.environment import check_torch, resolve_device

    check_torch()
    if device == "auto" and not torch.cuda.is_available():
        raise StepscopeError(
            "no CUDA GPU found",
            detail="calibration measures the GPU of this machine",
            hint="stepscope doctor",
        )
    calibration = measure_calibration(resolve_device(device), seconds=seconds, on_stage=on_stage)
    write_calibration(calibration, out)
    return calibration

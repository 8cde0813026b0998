"""Measure the table of this GPU and host that predictions use. Like `tune`, it runs in the current process."""

from collections.abc import Callable
from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.findings import Cell, Column, Table
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


def summarize(calibration: Calibration) -> Table:
    """What was measured, operation by operation: how many sizes, and the fastest and slowest time."""
    groups: dict[tuple[str, str], list[int]] = {}
    for one in calibration.series:
        groups.setdefault((one.operation, one.dtype), []).extend(row[-1] for row in one.rows)
    rows: list[tuple[Cell, ...]] = [
        (operation, dtype, len(times_ns), min(times_ns) / 1e6, max(times_ns) / 1e6)
        for (operation, dtype), times_ns in groups.items()
    ]
    return Table(
        title=f"calibration of {calibration.gpu}, {calibration.wall_s:.0f} s",
        columns=(
            Column(key="operation", label="operation"),
            Column(key="dtype", label="dtype"),
            Column(key="sizes", label="sizes", kind="count"),
            Column(key="fastest_ms", label="fastest", kind="ms"),
            Column(key="slowest_ms", label="slowest", kind="ms"),
        ),
        rows=tuple(rows),
        notes=tuple(f"not measured: {reason}" for reason in calibration.skipped),
    )

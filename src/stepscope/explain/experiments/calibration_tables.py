"""What `stepscope calibrate` measured, as a table."""

from stepscope.findings import Cell, Column, Table
from stepscope.recording.rows.calibration import Calibration


def calibration_table(calibration: Calibration) -> Table:
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

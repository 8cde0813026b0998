"""`Calibration`: how long the operations of a training step take on one GPU, and on its host to launch them.

`stepscope calibrate` measures it once, and `stepscope plan` predicts steps from it. It has measurements rather than
fitted constants, so that a better model of the same GPU needs no new measurement.
"""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import decode_as, read_plain, write_atomically, writing
from stepscope.hardware import Hardware

CALIBRATION_SCHEMA = "stepscope.calibration/1"
CALIBRATION_NAME = "calibration.json"

HostVariant = Literal["plain", "grad", "backward"]
Positive = Annotated[int, msgspec.Meta(gt=0)]


class Series(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The GPU time of one operation at many sizes. A row has the sizes that `columns` names, and then the nanoseconds
    per call in a full queue, which include the gap to the next kernel.

    `variant` says how the operation was called: `nt` for a product with a transposed right side, `cold` for inputs that
    are not in the L2 cache, `causal` for attention.
    """

    operation: str
    dtype: str
    variant: str = ""
    columns: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) + 1 or min(row) <= 0 for row in self.rows):
            raise ValueError(f"invalid rows of `{self.operation}`: expected {len(self.columns)} sizes and a time")


class HostCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The CPU time of a call on small tensors: without a graph, while recording one, or in its backward pass."""

    operation: str
    variant: HostVariant
    ns: float


class HostTrial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One phase whose time is that of the host: what it called, and how long it took. Of a small model, unless
    `is_full_size`."""

    model: str
    precision: str
    optimizer: str
    phase: str
    ns: Positive
    modules: int  # calls of `nn.Module`
    parameters: int
    operations: dict[str, int]  # calls below autograd, by name without `aten.` and `.default`
    is_full_size: bool = False


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table of one GPU and its host. `constants` are single numbers, named with their unit."""

    schema: str = CALIBRATION_SCHEMA
    command: str = "stepscope calibrate"
    gpu: str  # as the driver calls it
    hardware: Hardware
    multiprocessors: Positive
    l2_bytes: Positive
    host: str
    python: str
    torch: str
    cuda: str | None = None
    driver: str | None = None
    commit: str | None = None
    measured: str = ""  # timestamp
    wall_s: float = 0.0
    constants: dict[str, Annotated[float, msgspec.Meta(ge=0)]]
    series: tuple[Series, ...]
    host_costs: tuple[HostCost, ...]
    trials: tuple[HostTrial, ...]
    scaled_from: str = ""  # the GPU that was measured, if this table is its times scaled by data sheets
    skipped: tuple[str, ...] = ()  # what could not be measured, and why

    def __post_init__(self) -> None:
        if self.measured:
            datetime.fromisoformat(self.measured)

    def find(self, operation: str) -> Iterator[Series]:
        return (one for one in self.series if one.operation == operation)


def read_calibration(path: Path) -> Calibration:
    try:
        return decode_as(read_plain(path), Calibration, CALIBRATION_SCHEMA)
    except (OSError, msgspec.DecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else str(problem)
        if path.is_dir():
            raise StepscopeError(
                f"`{path}` is a directory",
                detail="expected a file that `stepscope calibrate` wrote",
                hint="--calibration FILE",
            ) from None
        raise StepscopeError(
            f"cannot read the calibration: `{path}`", detail=reason or "", hint=f"stepscope calibrate --out {path}"
        ) from None


def write_calibration(calibration: Calibration, path: Path) -> None:
    with writing(path, if_full="nothing was written"):
        write_atomically(path, msgspec.json.encode(calibration) + b"\n")

"""The result of `stepscope plan`: the predicted memory and time of a step, and what would make it fit.

One document is what `--format json` prints. `peak_allocated_bytes` is PyTorch's `max_memory_allocated`. Reserved memory
depends on the addresses that the driver returns, so it is a range. The CUDA context is neither; it is added to decide
whether a step fits.
"""

from pathlib import Path
from typing import Literal

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import decode_as, read_plain, write_atomically, writing
from stepscope.recording.rows.memory_summary import CategoryBytes, ModuleBytes
from stepscope.spec import Strategy, Workload

SCHEMA = "stepscope.plan/1"
FIT_SCHEMA = "stepscope.plan-fit/1"

Bound = Literal["compute", "memory", "launch", "communication"]
_KEPT = ("parameters", "gradients", "optimizer state")
Verdict = Literal["fits", "may fit", "does not fit"]
Range = tuple[int, int]


class PlannedGpu(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU that a prediction is for. `memory_bytes` is all of its memory, or the limit that was given."""

    name: str
    memory_bytes: int
    source: Literal["data sheet", "this machine"] = "data sheet"


class PlannedRanks(msgspec.Struct, frozen=True, kw_only=True):
    """How many GPUs share a step, and how. The batch of the workload is that of all of them; memory is that of one."""

    count: int = 1
    strategy: Strategy = "single"
    shard_optimizer: bool = False

    @property
    def flags(self) -> str:
        """The flags of `plan` and `train`; empty for one GPU."""
        if self.count == 1:
            return ""
        return f" --ranks {self.count} --strategy {self.strategy}" + " --shard-optimizer" * self.shard_optimizer


ALONE = PlannedRanks()
NO_TIME = "No step time: "  # how an assumption starts that says why there is none


class PlannedPhase(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of a step. If a step runs it several times, its time is their sum, and its memory the highest. Times need
    a table of the GPU."""

    phase: str
    peak_bytes: int
    step_ns: int | None = None
    bound: Bound | None = None
    kernels: int | None = None


class PlannedStretch(msgspec.Struct, frozen=True, kw_only=True):
    """A phase in the timeline, from slice `start` to slice `end` (exclusive)."""

    phase: str
    start: int
    end: int


class PlannedTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """Allocated memory during one step by category, in slices of its allocations. Each slice has its highest point."""

    areas: dict[str, tuple[int, ...]]
    stretches: tuple[PlannedStretch, ...] = ()

    def __post_init__(self) -> None:
        if len({len(values) for values in self.areas.values()}) > 1:
            raise ValueError("expected one value per slice in every area")

    @property
    def slices(self) -> int:
        return max(map(len, self.areas.values()), default=0)


class PlannedTime(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted time of a step. `host` is the CPU whose cost per operator it assumes. `is_rough`: from a data sheet
    instead of measurements of the GPU."""

    step_ns: int
    interval_ns: Range
    bound: Bound
    kernels: int
    table: str  # the GPU whose measurements it uses
    host: str
    is_rough: bool = False
    communication_ns: int = 0
    exposed_ns: int = 0  # the part of it that computation does not hide


class StepPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """What simulated steps say. Categories add up to the allocated peak, and so do modules. `fits`: a replay with no
    more memory than the GPU has does not fail, in whatever order the driver returns addresses."""

    workload: Workload
    parameters: int
    fits: bool
    peak_allocated_bytes: int
    peak_requested_bytes: int
    reserved_bytes: Range
    context_bytes: int
    workspace_bytes: int
    categories: tuple[CategoryBytes, ...]
    phases: tuple[PlannedPhase, ...]
    modules: tuple[ModuleBytes, ...]
    timeline: PlannedTimeline | None
    time: PlannedTime | None
    assumptions: tuple[str, ...]
    ranks: PlannedRanks = ALONE
    peak_phase: str | None = None
    has_tokens: bool = True
    forward_flops: int | None = None
    versions: dict[str, str] = {}
    simulated_s: float = 0.0

    def __post_init__(self) -> None:
        low, high = self.reserved_bytes
        if not 0 <= low <= high:
            raise ValueError("expected a range of reserved memory")


class PlanResult(msgspec.Struct, frozen=True, kw_only=True):
    """The document of one workload on one GPU. `margin_bytes` is what is left of its memory if as much is reserved as
    can be. It is negative if that is too much; a step with a small negative margin fits if PyTorch can return cached
    memory."""

    schema: str = SCHEMA
    workload: Workload
    gpu: PlannedGpu
    command: str
    fits: bool
    verdict: Verdict
    margin_bytes: int
    peak_allocated_bytes: int
    peak_requested_bytes: int
    reserved_bytes: Range
    context_bytes: int
    workspace_bytes: int
    peak_phase: str | None
    step_ns: int | None
    step_ns_interval: Range | None
    bound: Bound | None
    mfu: float | None
    tokens_per_s: float | None
    parameters: int
    categories: tuple[CategoryBytes, ...]
    phases: tuple[PlannedPhase, ...]
    modules: tuple[ModuleBytes, ...]
    assumptions: tuple[str, ...]
    ranks: PlannedRanks = ALONE
    time: PlannedTime | None = None
    timeline: PlannedTimeline | None = None
    versions: dict[str, str] = {}

    @property
    def needed_bytes(self) -> Range:
        """Reserved memory and the CUDA context."""
        low, high = self.reserved_bytes
        return low + self.context_bytes, high + self.context_bytes

    @property
    def kept_bytes(self) -> int:
        """Parameters, gradients and optimizer state. They exist together when the optimizer runs, so the step needs at
        least this much with any batch, context, attention or checkpoints."""
        return sum(one.bytes for one in self.categories if one.category in _KEPT)

    @property
    def can_fit(self) -> bool:
        """Whether there is memory left for anything else."""
        return self.kept_bytes + self.context_bytes <= self.gpu.memory_bytes


def judge_fit(prediction: StepPrediction, memory_bytes: int) -> Verdict:
    """Whether a step fits. One that fits only if the driver returns addresses in a good order may fit."""
    if prediction.fits:
        return "fits"
    least = prediction.reserved_bytes[0] + prediction.context_bytes
    return "may fit" if least <= memory_bytes else "does not fit"


# --- `--fit` ----------------------------------------------------------------------------------------------------------


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """A change to the workload with its prediction. All numbers come from a simulation of exactly this workload;
    `refused` says why there is none. `on_front`: no other proposal for one GPU needs less memory and less time."""

    title: str
    changes: dict[str, str | int | float | bool]
    command: str
    fits: bool = False
    verdict: Verdict = "does not fit"
    peak_allocated_bytes: int | None = None
    reserved_bytes: Range | None = None
    margin_bytes: int | None = None
    step_ns: int | None = None
    step_ns_interval: Range | None = None
    tokens_per_s: float | None = None
    on_front: bool = False
    refused: str = ""

    @property
    def num_gpus(self) -> int:
        return int(self.changes.get("ranks", 1))


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """The largest value of a setting that fits, and the next one that was simulated and does not. `value` is None if
    even the smallest does not fit, and `beyond` as well if not even the parameters and their state do; `is_cap` if the
    model does not allow a larger one."""

    setting: Literal["batch", "context"]
    value: int | None
    beyond: int | None
    command: str
    peak_allocated_bytes: int | None = None
    reserved_bytes: Range | None = None
    step_ns: int | None = None
    tokens_per_s: float | None = None
    is_cap: bool = False


class FitResult(msgspec.Struct, frozen=True, kw_only=True):
    """The document of `--fit`. The first proposal is the workload as it is; the others are ranked: what fits first, the
    fastest first."""

    schema: str = FIT_SCHEMA
    gpu: PlannedGpu
    command: str
    start: PlanResult
    limits: tuple[Limit, ...]
    proposals: tuple[Proposal, ...]
    simulations: int
    notes: tuple[str, ...] = ()

    @property
    def fitting(self) -> tuple[Proposal, ...]:
        return tuple(one for one in self.proposals if one.fits)


def read_fit(path: Path) -> FitResult:
    try:
        return decode_as(read_plain(path), FitResult, FIT_SCHEMA)
    except OSError as error:
        raise StepscopeError(f"cannot read `{path}`", detail=error.strerror or "", hint="stepscope plan") from None
    except msgspec.DecodeError as error:
        raise StepscopeError(
            f"not a `stepscope plan --fit` result: `{path}`", detail=str(error), hint="stepscope plan"
        ) from None


def write_fit(found: FitResult, path: Path) -> None:
    """Write the file atomically."""
    with writing(path):
        write_atomically(path, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")

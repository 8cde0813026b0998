"""A row of `stepscope bench`: the raw samples, the environment, and quality warnings.

Samples are saved raw, in nanoseconds, and statistics are computed when they are shown, so that better statistics also
work on old files. A case that failed is a row too, with its status and reason.
"""

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Generic, Literal, TypeVar

import msgspec

from stepscope.errors import nearest
from stepscope.hardware import Hardware
from stepscope.spec import SETTINGS, Case, SpecError

M = TypeVar("M", bound=msgspec.Struct)

SCHEMA = "stepscope.bench/1"

# `skipped`: not run, because a prediction says that it runs out of memory.
Status = Literal["ok", "oom", "unsupported", "wrong", "error", "crash", "killed", "timeout", "skipped"]
Clock = Literal["cuda events", "host"]
PeakKind = Literal["cuda allocator", "rss above start"]


class Retry(StrEnum):
    """Which finished cases a sweep runs again: those that failed, or those with a quality warning that may not occur
    again."""

    FAILED = "failed"
    DOUBTFUL = "doubtful"


# Warnings about the circumstances of a measurement. The others are about the case and would occur again.
_PASSING_DOUBTS = frozenset(("spread", "shared", "throttled", "cold", "clocks"))
# Warnings that describe the step; all others make its timings unreliable.
STEP_DOUBTS = ("host-bound", "uncounted", "denormal", "uncaptured", "own-optimizer")


class Environment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a case ran."""

    device: str
    hardware: Hardware
    driver_name: str  # name of the device from the driver, or of a CPU from the kernel
    python: str
    torch: str
    triton: str | None
    cuda: str | None
    driver: str | None
    threads: int
    stepscope: str
    commit: str | None
    # On a CPU: the variables that keep libraries from using its newest instructions, as a shell would set them. Not
    # written if empty, so that rows and keys of earlier versions stay the same.
    cpu_limits: str = ""

    @property
    def identity(self) -> tuple[str, ...]:
        """Identifies the environment: two runs of a case with the same identity are the same measurement. Measured
        peaks are not part of it."""
        device = (self.device, self.driver_name, self.driver, self.threads)
        software = (self.python, self.torch, self.triton, self.cuda, self.stepscope)
        limits = (self.cpu_limits,) if self.cpu_limits else ()
        return tuple(str(part) for part in (*device, *software, *limits))


class DeviceState(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a GPU. None: the driver does not report it."""

    name: str
    capability: str
    free_bytes: int
    total_bytes: int
    sm_mhz: int | None
    max_sm_mhz: int | None
    throttled_by: tuple[str, ...] | None
    other_processes: tuple[int, ...] | None


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the GPUs and the software of a machine, reported by a worker."""

    torch: str
    torch_problem: str  # empty if the version is supported
    triton: str | None
    cuda: str | None
    driver: str | None
    threads: int
    devices: tuple[DeviceState, ...]


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """A quality warning: a reason why a measurement may be unreliable. The code is stable; the text has details."""

    code: str
    text: str


def require_samples(*samples_ns: tuple[int, ...]) -> None:
    """Raise ValueError if samples are missing or not positive: rates and shares would be undefined."""
    if not all(samples_ns) or min(map(min, samples_ns), default=0) <= 0:
        raise ValueError("expected positive durations")


def require_known(name: str, value: str, known: Sequence[str]) -> None:
    """Raise SpecError, with the nearest known value, if `value` is unknown."""
    if value not in known:
        close = nearest(value, known)
        raise SpecError(
            f"unknown {name}: `{value}`",
            detail=f"expected one of {', '.join(known)}",
            hint=f"--{name} {close}" if close else "",
        )


def require_timing(case: Any, *counts: str) -> None:
    """Raise SpecError unless each of `counts` that is set is positive, and `seconds` is positive and finite."""
    for name in counts:
        value = getattr(case, name)
        if value is not None and value < 1:
            raise SpecError(f"{name} must be at least 1, got `{value}`")
    if not 0 < case.seconds < float("inf"):
        raise SpecError(f"seconds must be positive and finite, got `{case.seconds}`", hint="--seconds 1")


class ConfigSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes by which people know a model, from its own config. Models without one have none."""

    num_layers: int | None = None
    d_model: int | None = None


NO_SIZES = ConfigSizes()


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of one case, one entry per step. Phases add up to the step on the same clock."""

    clock: Clock
    phases_ns: dict[str, tuple[int, ...]]
    step_ns: tuple[int, ...]
    host_step_ns: tuple[int, ...]
    # CPU time to launch the work of the step, before waiting for the device. On a CPU, the step time.
    enqueue_ns: tuple[int, ...]
    warmup_ns: tuple[int, ...]
    parameters: int
    forward_flops: int | None
    flops_source: Literal["closed form", "counted"]
    peak_bytes: int
    peak_kind: PeakKind
    reserved_bytes: int | None = None
    has_tokens: bool = True  # False if batch × context is not the number of tokens of a step
    has_samples: bool = False  # without tokens: whether the batch is the number of samples
    optimizer: str | None = None  # what ran: the setting, or the class that a factory created
    attention_kernels: tuple[str, ...] = ()  # the kernels that `--attention flash` used
    sizes: ConfigSizes = NO_SIZES

    def __post_init__(self) -> None:
        require_samples(self.step_ns)


class CaseOutcome(msgspec.Struct, Generic[M], frozen=True, kw_only=True):
    """How a case ended, reported by a process that runs several cases."""

    status: Status
    reason: str = ""
    measurement: M | None = None
    doubts: tuple[Doubt, ...] = ()


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one case of a sweep, for any kind of case and measurement. Each kind of row sets the default of
    `schema`, which identifies files of that kind."""

    schema: str
    key: str
    case: Any
    environment: Environment
    status: Status
    reason: str = ""
    started: str
    wall_s: float
    command: str
    doubts: tuple[Doubt, ...] = ()

    def is_settled(self, retry: Retry | None) -> bool:
        """Whether the case does not have to run again with `retry`. One that did not run is never settled."""
        if self.status == "skipped":
            return False
        match retry:
            case Retry.FAILED:
                return self.status == "ok"
            case Retry.DOUBTFUL:
                return not any(doubt.code in _PASSING_DOUBTS for doubt in self.doubts)
            case None:
                return True


class CaseRow(Row, frozen=True, kw_only=True):
    """The result of a workload."""

    case: Case
    # Digest of the file of a custom model: editing the model makes new cases.
    source: str | None = None

    @property
    def optimizer(self) -> str | None:
        """The optimizer. None if a factory brings its own and the case did not run."""
        return self.case.workload.optimizer


class PredictedCase(msgspec.Struct, frozen=True, kw_only=True):
    """What `stepscope plan` says about a case. The time needs a table of the GPU."""

    peak_allocated_bytes: int
    reserved_bytes: tuple[int, int]
    step_ns: int | None = None
    step_ns_interval: tuple[int, int] | None = None


class BenchRow(CaseRow, frozen=True, kw_only=True):
    """The result of a timed case. `predicted` if a prediction was asked for."""

    schema: str = SCHEMA
    measurement: Measurement | None = None
    predicted: PredictedCase | None = None

    @property
    def optimizer(self) -> str | None:
        return self.case.workload.optimizer or (self.measurement.optimizer if self.measurement else None)


RAW_TRACE_NAME = "raw.json.gz"  # the PyTorch profiler trace, in the directory of a worker
UNCAPTURED_TRACE_NAME = "uncaptured.json.gz"  # that of one step without its CUDA graphs


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's report about a run that it recorded; the trace is a separate file. Samples are in nanoseconds, one
    entry per step, on one clock: unprofiled steps, profiled steps, and profiled and annotated steps. The steps in the
    trace are others."""

    clock: Clock
    phases_ns: dict[str, tuple[int, ...]]
    step_ns: tuple[int, ...]
    recorded_step_ns: tuple[int, ...]
    annotated_step_ns: tuple[int, ...]
    parameters: int
    optimizer: str | None = None  # what ran: the setting, or the class that a factory created
    doubts: tuple[Doubt, ...] = ()
    # For the user: what is missing from the trace.
    notes: tuple[str, ...] = ()
    sizes: ConfigSizes = NO_SIZES
    # Of a step after the recording: the tokens of each expert, by the module that computes them.
    expert_tokens: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)


def case_key(case: msgspec.Struct, environment: Environment, source: str | None) -> str:
    """Return the key of a case: a digest of the case, its environment, and the source of a custom model. Changes to
    stepscope itself between two releases do not change the key; use `--fresh` after making some."""
    content = msgspec.json.encode([_key_fields(case), environment.identity, source], order="sorted")
    return hashlib.sha256(content).hexdigest()[:16]


# The settings of the first release, all of which are part of the keys.
_FIRST_SETTINGS = frozenset(
    (
        *("vocab", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "tie_embeddings"),
        *("batch", "context", "precision", "mode", "attention", "compile", "checkpoint", "optimizer", "device", "seed"),
        *("steps", "warmup", "memory_limit"),
    )
)


def _key_fields(case: msgspec.Struct) -> object:
    """The fields of a case for its key. A setting that was added later is left out if it has its default, so that older
    results are still found."""
    if not isinstance(case, Case):
        return case
    fields = msgspec.to_builtins(case)
    for part in (fields["workload"], fields["workload"]["model"], fields["timing"]):
        for name in [name for name in part if name in SETTINGS and name not in _FIRST_SETTINGS]:
            if part[name] == SETTINGS[name].default:
                del part[name]
    return fields

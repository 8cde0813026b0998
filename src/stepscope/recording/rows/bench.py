"""One timed case as it is kept: the raw samples, what ran where, and what to doubt about it.

Samples are kept raw, in nanoseconds, and statistics are made from them when they are shown: a better statistic next
year works on last year's file. A case that failed is a row as well, with its status and reason.
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

Status = Literal["ok", "oom", "unsupported", "wrong", "error", "crash", "killed", "timeout"]
Clock = Literal["cuda events", "host"]
PeakKind = Literal["cuda allocator", "rss above start"]


class Retry(StrEnum):
    """Which cases a sweep runs again though they have a row: those that failed, or those that something disturbed
    which may be gone by now."""

    FAILED = "failed"
    DOUBTFUL = "doubtful"


# Doubts about the circumstances of a measurement. The others are about the case, and would be the same a second time.
_PASSING_DOUBTS = frozenset(("spread", "shared", "throttled", "cold", "clocks"))


class Environment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a case ran."""

    device: str
    hardware: Hardware
    driver_name: str  # what the driver, or the kernel for a CPU, calls the device
    python: str
    torch: str
    triton: str | None
    cuda: str | None
    driver: str | None
    threads: int
    stepscope: str
    commit: str | None
    # On a CPU: the variables that keep libraries from its newest instructions, as a shell would set them. Left out of
    # what is written where nothing is limited, so that rows and keys from before this was kept are what they were.
    cpu_limits: str = ""

    @property
    def identity(self) -> tuple[str, ...]:
        """What makes two runs of one case the same measurement. A peak that was measured is not part of it."""
        device = (self.device, self.driver_name, self.driver, self.threads)
        software = (self.python, self.torch, self.triton, self.cuda, self.stepscope)
        limits = (self.cpu_limits,) if self.cpu_limits else ()
        return tuple(str(part) for part in (*device, *software, *limits))


class DeviceState(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU now. None is what the driver does not tell."""

    name: str
    capability: str
    free_bytes: int
    total_bytes: int
    sm_mhz: int | None
    max_sm_mhz: int | None
    throttled_by: tuple[str, ...] | None
    other_processes: tuple[int, ...] | None


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a machine's GPUs and software, as a worker finds it."""

    torch: str
    torch_problem: str  # empty when its version is in range
    triton: str | None
    cuda: str | None
    driver: str | None
    threads: int
    devices: tuple[DeviceState, ...]


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """A reason not to trust a figure too far. The code is stable; the text says what was seen."""

    code: str
    text: str


def require_samples(*samples_ns: tuple[int, ...]) -> None:
    """Raises a ValueError where there are none, or some that took no time: a rate or a share could not be made."""
    if not all(samples_ns) or min(map(min, samples_ns), default=0) <= 0:
        raise ValueError("expected positive durations")


def require_known(name: str, value: str, known: Sequence[str]) -> None:
    """Raises a SpecError, with the nearest word that is known, where `value` is none of them."""
    if value not in known:
        close = nearest(value, known)
        raise SpecError(
            f"unknown {name}: `{value}`",
            detail=f"expected one of {', '.join(known)}",
            hint=f"--{name} {close}" if close else "",
        )


def require_timing(case: Any, *counts: str) -> None:
    """Raises a SpecError unless each of `counts` that is given is positive, and the time limit is a span of time."""
    for name in counts:
        value = getattr(case, name)
        if value is not None and value < 1:
            raise SpecError(f"{name} `{value}` is not positive", detail="expected 1 or more")
    if not 0 < case.seconds < float("inf"):
        raise SpecError(f"seconds `{case.seconds}` is no span of time", hint="--seconds 1")


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of one case, one entry a step. Phases add up to the step on the same clock."""

    clock: Clock
    phases_ns: dict[str, tuple[int, ...]]
    step_ns: tuple[int, ...]
    host_step_ns: tuple[int, ...]
    # How long the host needed to issue the step's work, before it waited for the device. On a CPU it is the step.
    enqueue_ns: tuple[int, ...]
    warmup_ns: tuple[int, ...]
    parameters: int
    forward_flops: int | None
    flops_source: Literal["closed form", "counted"]
    peak_bytes: int
    peak_kind: PeakKind
    reserved_bytes: int | None = None
    has_tokens: bool = True  # False where batch times context says nothing about the step
    has_samples: bool = False  # where it has no tokens: the batch counts what a step works on
    optimizer: str | None = None  # what ran: the setting, or the class of a factory's own
    attention_kernels: tuple[str, ...] = ()  # what `--attention flash` took

    def __post_init__(self) -> None:
        require_samples(self.step_ns)


class CaseOutcome(msgspec.Struct, Generic[M], frozen=True, kw_only=True):
    """How a case ended, as the process that ran several of them tells it."""

    status: Status
    reason: str = ""
    measurement: M | None = None
    doubts: tuple[Doubt, ...] = ()


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One case of a sweep, done, whatever a case is and whatever was measured of it. A kind of row gives `schema` its
    default, which is how a file of another kind is told apart."""

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
        """Whether the case need not run again under `retry`."""
        match retry:
            case Retry.FAILED:
                return self.status == "ok"
            case Retry.DOUBTFUL:
                return not any(doubt.code in _PASSING_DOUBTS for doubt in self.doubts)
            case None:
                return True


class CaseRow(Row, frozen=True, kw_only=True):
    """A workload, done."""

    case: Case
    # Digest of the file behind a model of the user's own: edit the model and its cases are new ones.
    source: str | None = None

    @property
    def optimizer(self) -> str | None:
        """What updates the weights. A factory may bring its own: then only a case that ran knows, and here is None."""
        return self.case.workload.optimizer


class BenchRow(CaseRow, frozen=True, kw_only=True):
    """One case, timed."""

    schema: str = SCHEMA
    measurement: Measurement | None = None

    @property
    def optimizer(self) -> str | None:
        return self.case.workload.optimizer or (self.measurement.optimizer if self.measurement else None)


RAW_TRACE_NAME = "raw.json.gz"  # the trace of PyTorch's profiler, in the folder that a worker was given


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says about a run that it recorded; the trace itself is a file beside it. Samples in nanoseconds,
    one entry a step, all on one clock: steps alone, steps with the recorder, and steps with the recorder and
    annotation. Those in the trace are others still."""

    clock: Clock
    phases_ns: dict[str, tuple[int, ...]]
    step_ns: tuple[int, ...]
    recorded_step_ns: tuple[int, ...]
    annotated_step_ns: tuple[int, ...]
    parameters: int
    optimizer: str | None = None  # what ran: the setting, or the class of a factory's own
    doubts: tuple[Doubt, ...] = ()
    # What is not in the trace, in words for the user.
    notes: tuple[str, ...] = ()


def case_key(case: msgspec.Struct, environment: Environment, source: str | None) -> str:
    """The name under which a case is done or not: the case, where it runs, and the source of a model of the user's own.
    Changes to stepscope itself between two releases are not seen; `--fresh` is for those who make them."""
    content = msgspec.json.encode([_key_fields(case), environment.identity, source], order="sorted")
    return hashlib.sha256(content).hexdigest()[:16]


# The settings that cases had when the first results were kept, all of which are part of their keys.
_FIRST_SETTINGS = frozenset(
    (
        *("vocab", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "tie_embeddings"),
        *("batch", "context", "precision", "mode", "attention", "compile", "checkpoint", "optimizer", "device", "seed"),
        *("steps", "warmup", "memory_limit"),
    )
)


def _key_fields(case: msgspec.Struct) -> object:
    """A case as its key has it. A setting that was added later is left out at its default, so that what was measured
    before is still found."""
    if not isinstance(case, Case):
        return case
    fields = msgspec.to_builtins(case)
    for part in (fields["workload"], fields["workload"]["model"], fields["timing"]):
        for name in [name for name in part if name in SETTINGS and name not in _FIRST_SETTINGS]:
            if part[name] == SETTINGS[name].default:
                del part[name]
    return fields

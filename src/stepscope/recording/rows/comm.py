"""One case of `stepscope comm` as it is kept: a collective, a message, how many ranks, and the raw samples of each.

A case that did not fit, or whose ranks failed, is a row as well, with its status and reason.
"""

from datetime import datetime

import msgspec

from stepscope.errors import nearest
from stepscope.recording.rows.bench import Clock, Doubt, Row, Status, require_samples
from stepscope.recording.rows.links import BACKENDS, COLLECTIVES, DTYPES, Backend, Collective, Dtype, Place
from stepscope.spec import SpecError

SCHEMA = "stepscope.comm/1"
ELEMENT_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


class CommCase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One collective over one message. Timing is part of it, because it changes the figures: `repetitions` or `seconds`
    of them, whichever comes first."""

    collective: Collective
    message_bytes: int
    ranks: int
    backend: Backend
    device: str  # `cpu` or `cuda`; rank r on CUDA takes GPU r
    dtype: Dtype = "fp32"
    hosts: int = 1
    interface: str | None = None
    repetitions: int = 20
    seconds: float = 0.5

    def __post_init__(self) -> None:
        _require_known("collective", self.collective, COLLECTIVES)
        _require_known("backend", self.backend, BACKENDS)
        _require_known("dtype", self.dtype, DTYPES)
        for name in ("ranks", "repetitions"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} `{getattr(self, name)}` is not positive", detail="expected 1 or more")
        if not 0 < self.seconds < float("inf"):
            raise SpecError(f"seconds `{self.seconds}` is no span of time", hint="--seconds 1")
        if self.elements < 1:
            raise SpecError(
                f"a message of `{self.message_bytes}` bytes has no element for each of {self.ranks} ranks",
                detail=f"an element of {self.dtype} has {self.element_bytes} bytes",
                hint="--sizes 1MB,10MB",
            )
        if self.backend == "nccl" and self.device == "cpu":
            raise SpecError("backend `nccl` on device `cpu`", detail="it moves CUDA tensors", hint="--backend gloo")

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def elements(self) -> int:
        """Of the whole message, cut down to what every rank has an equal part of."""
        return self.message_bytes // self.element_bytes // self.ranks * self.ranks

    @property
    def moved_bytes(self) -> int:
        """The message that is really sent: up to an element a rank less than was asked for."""
        return self.elements * self.element_bytes

    @property
    def needed_bytes(self) -> int:
        """On each rank: the message, and where a collective has a part of it as a second tensor, that."""
        part = self.moved_bytes // self.ranks if self.collective in ("all-gather", "reduce-scatter") else 0
        return self.moved_bytes + part


def _require_known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        close = nearest(value, known)
        raise SpecError(
            f"unknown {name}: `{value}`",
            detail=f"expected one of {', '.join(known)}",
            hint=f"--{name} {close}" if close else "",
        )


class CommMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """Nanoseconds of each repetition on each rank: `samples_ns[rank][repetition]`, from the end of a barrier to the end
    of the collective on that rank. `processor_ns` is the time on a CPU that each rank's process used for all of them,
    on all of its threads: while it computes something else, that time is missing there."""

    clock: Clock
    samples_ns: tuple[tuple[int, ...], ...]
    processor_ns: tuple[int, ...]

    def __post_init__(self) -> None:
        if len({len(of_rank) for of_rank in self.samples_ns}) != 1:
            raise ValueError("expected the same number of samples from each rank")
        require_samples(*self.samples_ns)

    @property
    def slowest_ns(self) -> tuple[int, ...]:
        """A collective is done when its last rank is."""
        return tuple(max(of_ranks) for of_ranks in zip(*self.samples_ns, strict=True))

    @property
    def processor_share(self) -> float:
        """Of a rank's time in the collective, how much one core was busy with it."""
        return sum(self.processor_ns) / sum(sum(of_rank) for of_rank in self.samples_ns)


class CommOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a case ended."""

    status: Status
    reason: str = ""
    measurement: CommMeasurement | None = None
    doubts: tuple[Doubt, ...] = ()


class CommRow(Row, frozen=True, kw_only=True):
    """One case, done."""

    schema: str = SCHEMA
    case: CommCase
    measurement: CommMeasurement | None = None

    def __post_init__(self) -> None:
        datetime.fromisoformat(self.started)  # of two measurements the newer counts

    @property
    def place(self) -> Place:
        case = self.case
        return Place(
            backend=case.backend,
            device_name=self.environment.driver_name,
            ranks=case.ranks,
            hosts=case.hosts,
            interface=case.interface,
            dtype=case.dtype,
        )

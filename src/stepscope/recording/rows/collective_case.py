"""One case of `stepscope comm` as it is kept: a collective, a message, how many ranks, and the raw samples of each.

A case that did not fit, or whose ranks failed, is a row as well, with its status and reason.
"""

from datetime import datetime

import msgspec

from stepscope.recording.rows.bench import CaseOutcome, Clock, Row, require_known, require_samples, require_timing
from stepscope.recording.rows.links import BACKENDS, COLLECTIVES, DTYPES, Backend, Collective, Dtype, LinkPlace
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
        require_known("collective", self.collective, COLLECTIVES)
        require_known("backend", self.backend, BACKENDS)
        require_known("dtype", self.dtype, DTYPES)
        require_timing(self, "ranks", "repetitions")
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


CommOutcome = CaseOutcome[CommMeasurement]


class CommRow(Row, frozen=True, kw_only=True):
    """One case, done."""

    schema: str = SCHEMA
    case: CommCase
    measurement: CommMeasurement | None = None

    def __post_init__(self) -> None:
        datetime.fromisoformat(self.started)  # of two measurements the newer counts

    @property
    def place(self) -> LinkPlace:
        case = self.case
        return LinkPlace(
            backend=case.backend,
            device_name=self.environment.driver_name,
            ranks=case.ranks,
            hosts=case.hosts,
            interface=case.interface,
            dtype=case.dtype,
        )

"""A row of `stepscope comm`: the collective, the message, the number of ranks, and the raw samples of each rank.

A case that ran out of memory or whose ranks failed is a row too, with its status and reason.
"""

from datetime import datetime

import msgspec

from stepscope.recording.rows.bench import CaseOutcome, Clock, Row, require_known, require_samples, require_timing
from stepscope.recording.rows.links import BACKENDS, COLLECTIVES, DTYPES, Backend, Collective, Dtype, LinkPlace
from stepscope.spec import SpecError

SCHEMA = "stepscope.comm/1"
ELEMENT_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


class CommCase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One collective with one message size. Timing settings are part of the case because they affect the result: it
    runs for `repetitions` or `seconds`, whichever is reached first."""

    collective: Collective
    message_bytes: int
    ranks: int
    backend: Backend
    device: str  # `cpu` or `cuda`; on CUDA, rank r uses GPU r
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
                f"message of `{self.message_bytes}` bytes is too small for {self.ranks} ranks",
                detail=f"each rank needs one {self.dtype} element of {self.element_bytes} bytes",
                hint="--sizes 1MB,10MB",
            )
        if self.backend == "nccl" and self.device == "cpu":
            raise SpecError(
                "backend `nccl` does not support device `cpu`",
                detail="NCCL requires CUDA tensors",
                hint="--backend gloo",
            )

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def elements(self) -> int:
        """Elements of the whole message, rounded down to a multiple of the number of ranks."""
        return self.message_bytes // self.element_bytes // self.ranks * self.ranks

    @property
    def moved_bytes(self) -> int:
        """The bytes that are really sent: up to one element per rank less than requested."""
        return self.elements * self.element_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes that each rank needs: the message, and a part of it for collectives with a second tensor."""
        part = self.moved_bytes // self.ranks if self.collective in ("all-gather", "reduce-scatter") else 0
        return self.moved_bytes + part


class CommMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """Nanoseconds of each repetition on each rank, `samples_ns[rank][repetition]`, from the end of a barrier to the end
    of the collective on that rank. `processor_ns` is the CPU time of each rank's process for all repetitions, over all
    threads: CPU time that computation cannot use."""

    clock: Clock
    samples_ns: tuple[tuple[int, ...], ...]
    processor_ns: tuple[int, ...]

    def __post_init__(self) -> None:
        if len({len(of_rank) for of_rank in self.samples_ns}) != 1:
            raise ValueError("expected the same number of samples from each rank")
        require_samples(*self.samples_ns)

    @property
    def slowest_ns(self) -> tuple[int, ...]:
        """A collective ends when its last rank ends."""
        return tuple(max(of_ranks) for of_ranks in zip(*self.samples_ns, strict=True))

    @property
    def processor_share(self) -> float:
        """CPU time of a rank as a share of its time in the collective."""
        return sum(self.processor_ns) / sum(sum(of_rank) for of_rank in self.samples_ns)


CommOutcome = CaseOutcome[CommMeasurement]


class CommRow(Row, frozen=True, kw_only=True):
    """The result of one case."""

    schema: str = SCHEMA
    case: CommCase
    measurement: CommMeasurement | None = None

    def __post_init__(self) -> None:
        datetime.fromisoformat(self.started)  # must parse: of two measurements the newer one is used

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

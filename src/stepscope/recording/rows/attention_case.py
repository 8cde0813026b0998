"""A row of `stepscope attention`: the case, the raw samples, the memory, and the errors.

A case that ran out of memory or that an implementation does not support is a row too, with its status and reason.
"""

from typing import Literal, get_args

import msgspec

from stepscope.recording.rows.bench import CaseOutcome, Clock, Row, require_known, require_samples, require_timing
from stepscope.spec import Precision, SpecError
from stepscope.spec.backends import Implementation

SCHEMA = "stepscope.attention/1"
NOT_TRIED = "not tried"  # start of the reason if the predicted memory was too large

IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Counter = Literal["cuda allocator", "profiler"]


class AttentionCase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One implementation at one shape: q, k and v are (batch, heads, length, head_dim). Timing settings are part of the
    case because they affect the result: it runs for `repetitions` or `seconds`, whichever is reached first."""

    implementation: Implementation
    batch: int = 8
    heads: int = 1
    length: int
    head_dim: int
    causal: bool = True
    precision: Precision
    device: str
    seed: int = 0
    repetitions: int = 100
    seconds: float = 1.0
    memory_limit: int | None = None  # bytes

    def __post_init__(self) -> None:
        require_known("implementation", self.implementation, IMPLEMENTATIONS)
        require_known("precision", self.precision, PRECISIONS)
        require_timing(self, "batch", "heads", "length", "head_dim", "repetitions", "memory_limit")
        if not -(2**63) <= self.seed < 2**63:
            raise SpecError(f"seed `{self.seed}` is too large", detail="expected a 64-bit integer", hint="--seed 0")
        if self.precision == "tf32" and self.device == "cpu":
            raise SpecError(
                "precision `tf32` is unsupported on device `cpu`",
                detail="tf32 is a mode of NVIDIA tensor cores",
                hint="--precision fp32,bf16",
            )

    @property
    def element_bytes(self) -> int:
        return 4 if self.precision in ("fp32", "tf32") else 2

    @property
    def tensor_bytes(self) -> int:
        """Bytes of q; k, v and the gradient of the output have the same size."""
        return self.batch * self.heads * self.length * self.head_dim * self.element_bytes


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """The largest difference of one result from float64, relative to the largest float64 value. `plain_error` is the
    error of the reference in the dtype of the case; the `limit` is derived from it."""

    result: str
    error: float
    plain_error: float
    limit: float


class AttentionMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes without the inputs (q, k, v and the gradient of the output), which take `input_bytes` all the time.

    On CUDA these come from the caching allocator, in whole blocks. The `allocated` and `reserved` fields are its totals
    for the process, including inputs and library workspaces. On a CPU the profiler counts what operators request.
    """

    counter: Counter
    input_bytes: int
    before_backward_bytes: int
    forward_peak_bytes: int
    peak_bytes: int
    before_backward_allocated_bytes: int | None = None
    before_backward_reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None


class AttentionMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of three separate measurements; `both_ns` times forward and backward together, it is not a sum."""

    clock: Clock
    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    both_ns: tuple[int, ...]
    memory: AttentionMemory
    accuracies: tuple[Accuracy, ...]

    def __post_init__(self) -> None:
        require_samples(self.forward_ns, self.backward_ns, self.both_ns)


AttentionOutcome = CaseOutcome[AttentionMeasurement]


class AttentionRow(Row, frozen=True, kw_only=True):
    """The result of one case."""

    schema: str = SCHEMA
    case: AttentionCase
    measurement: AttentionMeasurement | None = None

"""One case of attention alone, as it is kept: what ran, the raw samples, the memory, and how far it was from the truth.

A case that did not fit, or that an implementation cannot do, is a row as well, with its status and reason.
"""

from typing import Literal, get_args

import msgspec

from stepscope.recording.rows.bench import CaseOutcome, Clock, Row, require_known, require_samples, require_timing
from stepscope.spec import Precision, SpecError
from stepscope.spec.backends import Implementation

SCHEMA = "stepscope.attention/1"
NOT_TRIED = "not tried"  # how the reason begins where a closed form said enough

IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Counter = Literal["cuda allocator", "profiler"]


class AttentionCase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One implementation at one shape: q, k and v are (batch, heads, length, head_dim). Timing is part of it, because
    it changes the figures: `repetitions` or `seconds` of them, whichever comes first."""

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
            raise SpecError(f"seed `{self.seed}` is too large", detail="expected 64 bits", hint="--seed 0")
        if self.precision == "tf32" and self.device == "cpu":
            raise SpecError(
                "precision `tf32` on device `cpu`",
                detail="tf32 is a mode of NVIDIA's matrix units; a CPU has none",
                hint="--precision fp32,bf16",
            )

    @property
    def element_bytes(self) -> int:
        return 4 if self.precision in ("fp32", "tf32") else 2

    @property
    def tensor_bytes(self) -> int:
        """Of q, and as much of k, of v and of the output's gradient."""
        return self.batch * self.heads * self.length * self.head_dim * self.element_bytes


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """The largest difference of one result from float64, over the largest value there. `plain_error` is that of the
    reference in the case's own dtype, from which the `limit` is made."""

    result: str
    error: float
    plain_error: float
    limit: float


class AttentionMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on top of the inputs: q, k, v and the gradient of the output, which are `input_bytes` and there throughout.

    On CUDA the caching allocator counted, in whole blocks, and its totals stand beside: everything in the process, the
    inputs and the workspaces of libraries included. On a CPU the profiler counted what operators asked for.
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
    """Samples of three separate timings; `both_ns` is forward and backward in one, not their sum."""

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
    """One case, done."""

    schema: str = SCHEMA
    case: AttentionCase
    measurement: AttentionMeasurement | None = None

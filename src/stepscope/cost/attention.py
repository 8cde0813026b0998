"""Cost of attention: the FLOPs of forward and backward, and the memory of each implementation in addition to its inputs
(q, k, v and the gradient of the output).

Two moments are counted: between forward and backward, with the tensors saved for backward, and the peak. The output
counts in both, as in a model, where the next layer holds it.

| symbol | | symbol | |
| --- | --- | --- | --- |
| B | batch | L | length |
| H | heads | D | head dimension |
| | | P | length rounded up to full tiles |

Exact values: both moments of `naive` on any device, because the reference consists of PyTorch operators that allocate
only their results; the tensors that `tiled`, `triton` and `hopper` save (the output and one number per query); and the
peaks of `triton` and `hopper`, whose launchers allocate what is listed here and whose kernels allocate nothing. CUDA's
allocator rounds up, by up to 512 bytes per tensor and 1 MiB per large one.

Everything else is a lower bound. The tiles of `tiled` come on top. PyTorch's kernels behind `sdpa` save at least as
much as ours, and their backward passes use workspaces that depend on the version. A compiler may save either the
softmax's result or its input, because GEMMs are not recomputed.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from stepscope.cost.activations import Term, join_formulas, make_term, total_bytes
from stepscope.cost.operators import attention_flops
from stepscope.cost.products import BACKWARD_PRODUCTS
from stepscope.recording.rows.attention_case import AttentionCase
from stepscope.spec.backends import BACKENDS, Workspace

Bound = Literal["exact", "at least"]
EXACT_BEFORE_BACKWARD = tuple(name for name, backend in BACKENDS.items() if "before backward" in backend.exact)
EXACT_PEAK = tuple(name for name, backend in BACKENDS.items() if "peak" in backend.exact)
ATTENTION_CONVENTION = "2 operations per multiply-add, GEMMs only, causal as half; backward has five GEMMs, forward two"


class AttentionFlops(msgspec.Struct, frozen=True, kw_only=True):
    forward: int
    backward: int

    @property
    def both(self) -> int:
        return self.forward + self.backward


class AttentionNeed(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors at both moments, and whether they are exact or a lower bound."""

    before_backward: tuple[Term, ...]
    before_backward_bound: Bound
    peak: tuple[Term, ...]
    peak_bound: Bound

    @property
    def before_backward_bytes(self) -> int:
        return total_bytes(self.before_backward)

    @property
    def peak_bytes(self) -> int:
        return total_bytes(self.peak)

    @property
    def before_backward_formula(self) -> str:
        return join_formulas(self.before_backward)

    @property
    def peak_formula(self) -> str:
        return join_formulas(self.peak)


def flops_of_attention(case: AttentionCase) -> AttentionFlops:
    forward = attention_flops(
        batch=case.batch,
        heads=case.heads,
        queries=case.length,
        keys=case.length,
        head_dim=case.head_dim,
        causal=case.causal,
    )
    return AttentionFlops(forward=forward, backward=int(forward * BACKWARD_PRODUCTS))


def need_of_attention(case: AttentionCase) -> AttentionNeed:
    """Return the memory that an implementation needs in addition to its inputs."""
    backend = BACKENDS[case.implementation]
    count = _TermMaker(case, rounded_to=backend.rounded_to)
    match backend.keeps:
        case "scores":
            kept, peak = _written_out(count)
        case "weights":
            kept, peak = _keeping_weights(count)
        case "log-sum-exp":
            kept, peak = _recomputing(count, backend.workspaces)
    return AttentionNeed(
        before_backward=tuple(kept),
        before_backward_bound="exact" if backend.name in EXACT_BEFORE_BACKWARD else "at least",
        peak=tuple(peak),
        peak_bound="exact" if backend.name in EXACT_PEAK else "at least",
    )


class _TermMaker:
    """Makes terms. `w` in a formula is the width of an element of q."""

    def __init__(self, case: AttentionCase, *, rounded_to: int) -> None:
        padded = -(-case.length // rounded_to) * rounded_to
        self._symbols = {"B": case.batch, "H": case.heads, "L": case.length, "D": case.head_dim, "P": padded}
        self._width = case.element_bytes
        self.causal = case.causal

    def term(self, tensor: str, formula: str, why: str, count: int = 1) -> Term:
        return make_term("attention", tensor, formula, why, symbols=self._symbols, width=self._width, count=count)

    def output(self) -> Term:
        return self.term("output", "B·H·L·D·w", "the result")


def _written_out(count: _TermMaker) -> tuple[Sequence[Term], Sequence[Term]]:
    """Unfused attention as in `nn.functional.attention`, with softmax in fp32. The peak is in the backward of the
    softmax's division: its gradient, the exponentials, and four temporary tensors of the same size. By then the weights
    are freed, and the gradient of v exists."""
    shared = [
        count.output(),
        count.term("scaled queries", "B·H·L·D·w", "input of a GEMM"),
        *([count.term("causal mask", "L·L", "masks the gradient")] if count.causal else []),
        count.term("scale", "8", "a scalar is saved as a tensor"),
        count.term("sums of the exponentials", "B·H·L·4", "division"),
    ]
    exponentials = count.term("exponentials", "B·H·L·L·4", "exp saves its result, and the division reads it too")
    kept = [*shared, exponentials, count.term("attention weights", "B·H·L·L·w", "input of a GEMM")]
    peak = [
        *shared,
        exponentials,
        count.term("gradients in the division's backward", "B·H·L·L·4", "the softmax is computed in fp32", 5),
        count.term("gradient of v", "B·H·L·D·w", "its backward ran before"),
    ]
    return kept, peak


def _keeping_weights(count: _TermMaker) -> tuple[Sequence[Term], Sequence[Term]]:
    weights = count.term("attention weights", "B·H·L·L·w", "input of a GEMM")
    gradient = count.term("gradient of the weights", "B·H·L·L·w", "result of a GEMM")
    return [count.output(), weights], [count.output(), weights, gradient]


def _recomputing(count: _TermMaker, workspaces: Sequence[Workspace]) -> tuple[Sequence[Term], Sequence[Term]]:
    """Flash attention: weights are recomputed from the log-sum-exp, tile by tile."""
    kept = [count.output(), count.term("log-sum-exp", "B·H·L·4", "recomputes the weights from the scores")]
    peak = [*kept, count.term("gradients of q, k and v", "B·H·L·D·w", "the result of backward", 3)]
    peak += [count.term(one.tensor, one.bytes_formula, one.why, one.count) for one in workspaces]
    return kept, peak

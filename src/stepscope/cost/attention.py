"""Attention alone: the operations of forward and backward, and the memory each way of computing it takes on top of its
inputs, q, k, v and the gradient of the output.

Two moments are counted: between forward and backward, when what autograd keeps is there, and the highest one. The
output counts at both, as in a model, where the next layer holds it.

| symbol | | symbol | |
| --- | --- | --- | --- |
| B | batch | L | length |
| H | heads | D | width of a head |
| | | P | length rounded up to whole tiles of rows |

What is exact: for `naive`, both moments, on any device, as the reference is written out in PyTorch's operators and each
of them takes what its result takes. For `tiled`, `triton` and `hopper`, what they keep, the output and a number a
query; and the peaks of `triton` and `hopper`, whose launchers take what is listed here and whose kernels take nothing.
CUDA's allocator adds its rounding, 512 bytes a tensor and up to 1 MiB a large one.

What is a lower bound: everything else. The tiles of `tiled` come on top. PyTorch's kernels behind `sdpa` keep at least
what ours do, and their backwards take workspaces that depend on their versions. A compiler may keep the softmax's
result or its input, but one of them: products are not computed again.
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
ATTENTION_CONVENTION = (
    "2 operations a multiply-add, matrix products only, causal as half; backward is five products where forward is two"
)


class AttentionFlops(msgspec.Struct, frozen=True, kw_only=True):
    forward: int
    backward: int

    @property
    def both(self) -> int:
        return self.forward + self.backward


class AttentionNeed(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors at both moments, with whether there can be more."""

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
    """What the case's implementation takes on top of its inputs."""
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
    """As `nn.functional.attention` does it, softmax in fp32. The peak is in the backward of the softmax's division: its
    gradient and the exponentials, and on the way to the two gradients of the division four more of their size. The
    weights are gone by then, and the gradient of v is there."""
    shared = [
        count.output(),
        count.term("scaled queries", "B·H·L·D·w", "product"),
        *([count.term("causal mask", "L·L", "where no gradient goes")] if count.causal else []),
        count.term("scale", "8", "a number is kept as a tensor of its own"),
        count.term("sums of the exponentials", "B·H·L·4", "division"),
    ]
    exponentials = count.term("exponentials", "B·H·L·L·4", "exp keeps its result, and the division reads the same")
    kept = [*shared, exponentials, count.term("attention weights", "B·H·L·L·w", "product")]
    peak = [
        *shared,
        exponentials,
        count.term("gradients in the division's backward", "B·H·L·L·4", "the softmax is computed in fp32", 5),
        count.term("gradient of v", "B·H·L·D·w", "the product's backward came first"),
    ]
    return kept, peak


def _keeping_weights(count: _TermMaker) -> tuple[Sequence[Term], Sequence[Term]]:
    weights = count.term("attention weights", "B·H·L·L·w", "product")
    gradient = count.term("gradient of the weights", "B·H·L·L·w", "a product's result")
    return [count.output(), weights], [count.output(), weights, gradient]


def _recomputing(count: _TermMaker, workspaces: Sequence[Workspace]) -> tuple[Sequence[Term], Sequence[Term]]:
    """Flash attention: weights are made again from the log-sum-exp, tile by tile."""
    kept = [count.output(), count.term("log-sum-exp", "B·H·L·4", "scores and these give the weights again")]
    peak = [*kept, count.term("gradients of q, k and v", "B·H·L·D·w", "the result of backward", 3)]
    peak += [count.term(one.tensor, one.bytes_formula, one.why, one.count) for one in workspaces]
    return kept, peak

"""Every operation of the reference Transformer, once, from tensor primitives.

The model, the tests and the benchmarks import these, so that "the reference" means one thing. They are written to be
read: a faster kernel has to give the same numbers, and this is where a reader can check what they are. Nothing comes
from `torch.nn.functional`.

Precision is part of the definition. Sums over many terms (the norm's mean square, the softmax, the loss) are computed
in fp32 even when the tensors are bf16 or fp16, and the result is cast back to the input's dtype; matmuls stay in the
dtype of their inputs, or the one that `torch.autocast` chooses. float64 stays float64 throughout, which makes the same
code the truth that tests compare against. Autocast treats exp and sum differently on CPU and CUDA; because the widening
is explicit here, both devices compute the same thing.

A maximum subtracted for stability is detached: the result does not depend on it, so its gradient is exactly zero and
autograd need not save anything for it.
"""

# B batch, H query heads, G key/value heads (G divides H), L length, Q queries, K keys,
# S = Q * H/G the queries of a group, D head dim, P = D/2 rotated pairs, V vocabulary, N all targets.
# A tensor without a suffix may have any leading dimensions; its docstring says what the last ones are.

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor


def _widen(x: Tensor) -> Tensor:
    """Return x in the dtype that sums are computed in: at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply (..., in) by a weight of shape (out, in), without a bias: (..., out)."""
    return x @ weight.T


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Return the rows of weight (vocabulary, width) selected by ids (...): (..., width)."""
    # Not `weight[ids]`: a negative id would count from the end instead of raising.
    return weight.index_select(0, ids.flatten()).view(*ids.shape, weight.shape[1])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale (..., width) to a root mean square of one, then each feature by weight (width)."""
    wide = _widen(x)
    inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse_rms * weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Shift and scale (..., width) to mean zero and variance one, then each feature by weight and bias (width)."""
    wide = _widen(x)
    centered = wide - wide.mean(dim=-1, keepdim=True)
    inverse_std = torch.rsqrt(centered.square().mean(dim=-1, keepdim=True) + eps)
    scaled = centered * inverse_std * weight
    return (scaled if bias is None else scaled + bias).to(x.dtype)


def rope_tables(
    head_dim: int,
    context: int,
    theta: float,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """cos and sin (context, head_dim / 2) of the angle position * theta ** (-2i / head_dim) of pair i."""
    if head_dim % 2:
        raise ValueError(f"`head_dim` must be even because RoPE rotates pairs, but got {head_dim}")
    # float64 until the end: an fp32 angle of thousands of radians is already wrong in its fourth decimal.
    pair_P = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device)
    position_L = torch.arange(context, dtype=torch.float64, device=device)
    angle_LP = torch.outer(position_L, theta ** (-pair_P / head_dim))
    return angle_LP.cos().to(dtype), angle_LP.sin().to(dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each interleaved pair (2i, 2i+1) of x (..., length, head_dim) by its position's angle.

    cos and sin are (length, head_dim / 2), from `rope_tables`. They are fp32, so a bf16 x is rotated in fp32.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def rope_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + head_dim/2) of x (..., length, head_dim): the convention of `transformers`.

    The same as `rope` of reordered features. cos and sin are those of `rope`.
    """
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return rotated.to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), elementwise."""
    return x * torch.sigmoid(x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up: the gated activation between the feed-forward layer's matrices."""
    return silu(gate) * up


def gelu(x: Tensor) -> Tensor:
    """x times the probability that a standard normal number is below x, elementwise."""
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


GELU_CUBIC = 0.044715


def gelu_tanh(x: Tensor) -> Tensor:
    """`gelu` as GPT-2 approximated it, within 0.0005 of it."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + GELU_CUBIC * x**3)))


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """gelu(gate) * up, or gelu_tanh(gate) * up with approximate="tanh"."""
    return (gelu_tanh(gate) if approximate == "tanh" else gelu(gate)) * up


def softmax(x: Tensor, dim: int) -> Tensor:
    """exp(x) / sum(exp(x)) along dim. A row of only -inf has no softmax and returns NaN."""
    # A wide maximum widens the difference without a wide copy of x. exp works in place because the difference is used
    # nowhere else: autograd saves one tensor of x's size here, the exponentials.
    exponential = (x - _widen(x.detach().amax(dim, keepdim=True))).exp_()
    return (exponential / exponential.sum(dim, keepdim=True)).to(x.dtype)


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """True (queries, keys) for future keys. The last query is aligned with the last key."""
    mask_QK = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return mask_QK.triu(1 + num_keys - num_queries)


def attention(q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    """softmax(q k^T * scale) v per head: (B, H, queries, D). scale defaults to 1/sqrt(D).

    Each key/value head serves the H/G consecutive query heads of its group. Query and key lengths may differ; a causal
    mask is then aligned at the end (bottom-right), as in decoding: the last query sees every key, the one before it all
    but the last key. With more queries than keys the first queries see no key, and their output is zero.

    Its three parts are separate functions, so that a profiler can distinguish them (`step/annotation.py`).
    """
    num_heads, num_queries, head_dim = q_BHLD.shape[1:]
    num_groups, num_keys = k_BGLD.shape[1:3]
    if num_heads % num_groups:
        raise ValueError(
            f"the number of query heads ({num_heads}) must be divisible by the number of key/value heads ({num_groups})"
        )
    num_blind = max(0, num_queries - num_keys) if causal else 0
    if num_blind:
        # Left out rather than masked: a row of only -inf would be NaN, and so would every gradient.
        seeing = attention(q_BHLD[:, :, num_blind:], k_BGLD, v_BGLD, causal=True, scale=scale)
        blind = seeing.new_zeros(*seeing.shape[:2], num_blind, seeing.shape[3])
        return torch.cat((blind, seeing), dim=2)

    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    scores_BGSK = attention_scores(q_BHLD, k_BGLD, causal=causal, scale=scale)
    out_BGSD = attention_values(softmax(scores_BGSK, dim=-1), v_BGLD)
    return out_BGSD.reshape(q_BHLD.shape[0], num_heads, num_queries, v_BGLD.shape[-1])


def attention_scores(q_BHLD: Tensor, k_BGLD: Tensor, *, causal: bool, scale: float) -> Tensor:
    """q k^T * scale, with -inf for future keys: (B, G, S, K), the heads of a group in a row."""
    num_heads, num_queries, head_dim = q_BHLD.shape[1:]
    num_groups, num_keys = k_BGLD.shape[1:3]
    # A group's query heads are stacked along the length: one matmul serves them all, and no key is copied. The queries
    # are scaled rather than the scores: fewer elements, and fp16 scores overflow later.
    heads_per_group = num_heads // num_groups
    q_BGSD = (q_BHLD * scale).reshape(q_BHLD.shape[0], num_groups, heads_per_group * num_queries, head_dim)
    scores_BGSK = q_BGSD @ k_BGLD.transpose(-2, -1)
    if causal:
        mask_SK = causal_mask(num_queries, num_keys, q_BHLD.device).repeat(heads_per_group, 1)
        scores_BGSK.masked_fill_(mask_SK, -math.inf)
    return scores_BGSK


def attention_values(weights_BGSK: Tensor, v_BGLD: Tensor) -> Tensor:
    """Each query's weighted sum of the values: (B, G, S, D)."""
    return weights_BGSK @ v_BGLD


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Mean of logsumexp(logits) - logits[target] over all targets (...), from logits (..., vocabulary).

    A scalar in fp32, even from bf16 or fp16 logits: bf16 losses are too coarse to show learning.

    Targets equal to `ignore_index` do not count. `softcap` bounds the logits to softcap · tanh(logits / softcap) first.
    With `label_smoothing` ε, a target's share is 1 - ε, and all entries of the vocabulary share ε equally. `z_loss`
    times logsumexp² is added to each loss, which keeps logits from drifting.
    """
    if logits.shape[:-1] != targets.shape:
        # Some mismatches would broadcast into a plausible loss.
        raise ValueError(
            f"expected one target per row of logits, but got targets {tuple(targets.shape)} for logits "
            f"{tuple(logits.shape)}"
        )
    logits_NV, targets_N1 = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1, 1)
    if softcap is not None:
        logits_NV = softcap * torch.tanh(_widen(logits_NV) / softcap)
    is_ignored_N1 = None if ignore_index is None else targets_N1 == ignore_index
    if is_ignored_N1 is not None:
        targets_N1 = targets_N1.masked_fill(is_ignored_N1, 0)
    max_N1 = _widen(logits_NV.detach().amax(dim=-1, keepdim=True))
    log_sum_N1 = (logits_NV - max_N1).exp_().sum(dim=-1, keepdim=True).log()
    target_logit_N1 = logits_NV.gather(-1, targets_N1)
    # Subtract the two large numbers first: their difference is small, and the logarithm then keeps its digits.
    losses_N1 = log_sum_N1 + (max_N1 - target_logit_N1)
    if label_smoothing:
        mean_N1 = _widen(logits_NV).mean(dim=-1, keepdim=True)
        losses_N1 = (1 - label_smoothing) * losses_N1 + label_smoothing * (log_sum_N1 + (max_N1 - mean_N1))
    if z_loss:
        losses_N1 = losses_N1 + z_loss * (log_sum_N1 + max_N1).square()
    if is_ignored_N1 is not None:
        losses_N1 = losses_N1.masked_fill(is_ignored_N1, 0.0)
    if reduction == "sum":
        return losses_N1.sum()
    return losses_N1.mean() if is_ignored_N1 is None else losses_N1.sum() / is_ignored_N1.logical_not().sum()


# --- The table of operations ---
#
# This is where faster kernels are plugged in. The model calls `ops.attention(...)` and never `attention(...)`. To run
# it with another kernel, pass it another table; the model's code, its parameters and its state dict stay the same:
#
#    ops = dataclasses.replace(REFERENCE, attention=flash_attention)
#    model = TransformerLM(..., ops=ops)
#
# An entry must return what the reference of the same name returns, gradients included, for every input of the model. It
# may differ in speed, and in how much is saved for backward.


class RMSNormOp(Protocol):
    """(x, weight, eps) -> x normalized, in x's dtype."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor: ...


class AttentionOp(Protocol):
    """(q, k, v) -> one output per query; grouped heads, and a causal mask aligned at the end."""

    def __call__(
        self, q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, /, *, causal: bool, scale: float | None = None
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """One callable per replaceable operation, each with the contract of its namesake above."""

    linear: Callable[[Tensor, Tensor], Tensor]  # (x, weight)
    embedding: Callable[[Tensor, Tensor], Tensor]  # (ids, weight)
    rms_norm: RMSNormOp
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, cos, sin)
    swiglu: Callable[[Tensor, Tensor], Tensor]  # (gate, up)
    attention: AttentionOp
    cross_entropy: Callable[[Tensor, Tensor], Tensor]  # (logits, targets)


REFERENCE = Operations(
    linear=linear,
    embedding=embedding,
    rms_norm=rms_norm,
    rope=rope,
    swiglu=swiglu,
    attention=attention,
    cross_entropy=cross_entropy,
)

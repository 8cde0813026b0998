"""The reference Transformer language model: pre-norm blocks, RoPE, grouped heads, SwiGLU.

The modules hold parameters and define how the operations are wired; the `Operations` table they are given defines what
an operation computes, and with which kernel. Swapping a kernel therefore changes no line here.

Parameters are created directly on their device: pass `device`, or build inside `with torch.device("cuda")`. On "meta"
nothing is allocated, which is how the parameters of a model too large for this machine are counted. Random values come
from the global generator, so `torch.manual_seed` reproduces a model.
"""

# B batch, L length, M model width, F feed-forward width, H query heads, G key/value heads, D head dim,
# P = D/2 rotated pairs, C the longest context, V vocabulary.

import math

import torch
from torch import Tensor, nn

from stepscope.nn import functional
from stepscope.nn.functional import REFERENCE, Operations

Device = torch.device | str | None


def _check_positive(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be positive, but got {count}")


def _split_width(d_model: int, num_heads: int, num_kv_heads: int) -> int:
    """Return the head dimension, after checking that the heads fit."""
    _check_positive(d_model=d_model, num_heads=num_heads, num_kv_heads=num_kv_heads)
    if d_model % num_heads:
        raise ValueError(f"d_model ({d_model}) must be divisible by num_heads ({num_heads})")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads ({num_heads}) must be divisible by num_kv_heads ({num_kv_heads})")
    head_dim = d_model // num_heads
    if head_dim % 2:
        raise ValueError(f"d_model / num_heads must be even because RoPE rotates pairs, but got {head_dim}")
    return head_dim


def _normal_parameter(rows: int, columns: int, std: float, device: Device, dtype: torch.dtype | None) -> nn.Parameter:
    """A matrix of normal values truncated at three standard deviations: no weight starts out extreme."""
    weight = nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype))
    nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)
    return weight


class Linear(nn.Module):
    """y = x W^T. `weight` is an existing parameter to share, as for a tied head; by default, a new one is created."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        weight: nn.Parameter | None = None,
        ops: Operations = REFERENCE,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_positive(in_features=in_features, out_features=out_features)
        if weight is None:
            # Between 1/in, which keeps the activations' variance, and 1/out, which keeps the gradients'.
            std = math.sqrt(2 / (in_features + out_features))
            weight = _normal_parameter(out_features, in_features, std, device, dtype)
        elif weight.shape != (out_features, in_features):
            raise ValueError(f"expected weight of shape {(out_features, in_features)}, but got {tuple(weight.shape)}")
        self.ops = ops
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight)


class Embedding(nn.Module):
    """One learned row of the model's width per token of the vocabulary."""

    def __init__(
        self,
        vocab: int,
        d_model: int,
        *,
        ops: Operations = REFERENCE,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_positive(vocab=vocab, d_model=d_model)
        self.ops = ops
        self.weight = _normal_parameter(vocab, d_model, 1.0, device, dtype)

    def forward(self, ids_BL: Tensor) -> Tensor:
        return self.ops.embedding(ids_BL, self.weight)


class RMSNorm(nn.Module):
    """Normalize the last dimension by its root mean square, with one learned gain per feature."""

    def __init__(
        self,
        d_model: int,
        *,
        eps: float = 1e-5,
        ops: Operations = REFERENCE,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_positive(d_model=d_model)
        self.ops = ops
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


class SwiGLU(nn.Module):
    """The feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        ops: Operations = REFERENCE,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.gate = Linear(d_model, d_ff, ops=ops, device=device, dtype=dtype)
        self.up = Linear(d_model, d_ff, ops=ops, device=device, dtype=dtype)
        self.down = Linear(d_ff, d_model, ops=ops, device=device, dtype=dtype)

    def forward(self, x_BLM: Tensor) -> Tensor:
        hidden_BLF = self.ops.swiglu(self.gate(x_BLM), self.up(x_BLM))
        out_BLM: Tensor = self.down(hidden_BLF)
        return out_BLM


class CausalAttention(nn.Module):
    """Multi-head attention in which a token sees itself and its past; RoPE encodes the distance."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        ops: Operations = REFERENCE,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = _split_width(d_model, num_heads, num_kv_heads)
        kv_width = num_kv_heads * self.head_dim
        self.ops = ops
        self.q_proj = Linear(d_model, d_model, ops=ops, device=device, dtype=dtype)
        self.k_proj = Linear(d_model, kv_width, ops=ops, device=device, dtype=dtype)
        self.v_proj = Linear(d_model, kv_width, ops=ops, device=device, dtype=dtype)
        self.output_proj = Linear(d_model, d_model, ops=ops, device=device, dtype=dtype)

    def _split_heads(self, x_BLM: Tensor) -> Tensor:
        return x_BLM.view(*x_BLM.shape[:2], -1, self.head_dim).transpose(1, 2)

    def forward(self, x_BLM: Tensor, cos_LP: Tensor, sin_LP: Tensor) -> Tensor:
        q_BHLD = self.ops.rope(self._split_heads(self.q_proj(x_BLM)), cos_LP, sin_LP)
        k_BGLD = self.ops.rope(self._split_heads(self.k_proj(x_BLM)), cos_LP, sin_LP)
        v_BGLD = self._split_heads(self.v_proj(x_BLM))
        mixed_BHLD = self.ops.attention(q_BHLD, k_BGLD, v_BGLD, causal=True)
        out_BLM: Tensor = self.output_proj(mixed_BHLD.transpose(1, 2).flatten(2))
        return out_BLM


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)): the residual stream is never normalized."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        ops: Operations = REFERENCE,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(d_model, ops=ops, device=device, dtype=dtype)
        self.attention = CausalAttention(d_model, num_heads, num_kv_heads, ops=ops, device=device, dtype=dtype)
        self.ffn_norm = RMSNorm(d_model, ops=ops, device=device, dtype=dtype)
        self.ffn = SwiGLU(d_model, d_ff, ops=ops, device=device, dtype=dtype)

    def forward(self, x_BLM: Tensor, cos_LP: Tensor, sin_LP: Tensor) -> Tensor:
        x_BLM = x_BLM + self.attention(self.attention_norm(x_BLM), cos_LP, sin_LP)
        out_BLM: Tensor = x_BLM + self.ffn(self.ffn_norm(x_BLM))
        return out_BLM


class TransformerLM(nn.Module):
    """Maps token ids to the logits of each next token.

    `dtype` is that of the parameters; pass it here rather than calling `.to(dtype)` afterwards, which would also round
    the RoPE tables: they stay in fp32 or better, because a rounded angle shifts a token's position.
    """

    # One pair for all blocks, not in the state dict: they follow from the arguments.
    rope_cos: Tensor  # (C, P)
    rope_sin: Tensor  # (C, P)

    def __init__(
        self,
        *,
        vocab: int,
        d_model: int,
        d_ff: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        max_context: int,
        rope_theta: float = 10000.0,
        tie_embeddings: bool = False,
        ops: Operations = REFERENCE,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        # Check before anything is allocated: a large model takes seconds to build.
        _check_positive(vocab=vocab, d_ff=d_ff, num_layers=num_layers, max_context=max_context)
        if not rope_theta > 0:
            raise ValueError(f"rope_theta must be positive, but got {rope_theta}")
        head_dim = _split_width(d_model, num_heads, num_heads if num_kv_heads is None else num_kv_heads)
        self.ops = ops
        self.max_context = max_context
        self.embedding = Embedding(vocab, d_model, ops=ops, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(
            Block(d_model, d_ff, num_heads, num_kv_heads, ops=ops, device=device, dtype=dtype)
            for _ in range(num_layers)
        )
        self.final_norm = RMSNorm(d_model, ops=ops, device=device, dtype=dtype)
        tied = self.embedding.weight if tie_embeddings else None
        self.lm_head = Linear(d_model, vocab, weight=tied, ops=ops, device=device, dtype=dtype)
        table_dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        cos_CP, sin_CP = functional.rope_tables(head_dim, max_context, rope_theta, device, table_dtype)
        self.register_buffer("rope_cos", cos_CP, persistent=False)
        self.register_buffer("rope_sin", sin_CP, persistent=False)

    def forward(self, ids_BL: Tensor) -> Tensor:
        """Return logits (B, L, V); position l sees the ids up to and including l."""
        length = ids_BL.shape[1]
        if length > self.max_context:
            raise ValueError(f"got {length} tokens, but max_context is {self.max_context}")
        cos_LP, sin_LP = self.rope_cos[:length], self.rope_sin[:length]
        x_BLM = self.embedding(ids_BL)
        for block in self.blocks:
            x_BLM = block(x_BLM, cos_LP, sin_LP)
        logits_BLV: Tensor = self.lm_head(self.final_norm(x_BLM))
        return logits_BLV

    def loss(self, ids_BL: Tensor, targets_BL: Tensor) -> Tensor:
        """Return the mean cross entropy of the targets, which are the ids shifted by one position."""
        return self.ops.cross_entropy(self(ids_BL), targets_BL)

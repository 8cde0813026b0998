"""Kernels that read merged products: SwiGLU, and RoPE with the heads of q, k and v."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.cpu.fast.tiny import ALL, Function, check_gradients, make_program, normal, rewritten_nodes

PACKED = replace(ALL, rewrites=replace(ALL.rewrites, attention=False))
GEMMS = "GEMMs: 2 products that share their input are merged"
SWIGLU = "activations: 1 SwiGLU read gate and up as one tensor"
ROPE = "RoPE: 1 layers rotate q and k, and split q, k and v, in one kernel"
linear, silu = nn.functional.linear, nn.functional.silu
GATED = {"gate": (12, 8), "up": (12, 8), "down": (8, 12)}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


def gate_used_twice(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gated = linear(x, gate)
    return linear(silu(gated) * linear(x, up) + gated, down)


def up_first(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    second = linear(x, up)
    return linear(silu(linear(x, gate)) * second, down)


def shared_down(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The last weight is not only multiplied, so it has no working weight."""
    return linear(silu(linear(x, gate)) * linear(x, up), down) + down.sum()


Gated = Callable[..., Tensor]
SWIGLUS: dict[str, tuple[Gated, bool]] = {
    "silu": (lambda x, gate, up, down: linear(silu(linear(x, gate)) * linear(x, up), down), True),
    "up on the left": (lambda x, gate, up, down: linear(linear(x, up) * silu(linear(x, gate)), down), False),
    "sigmoid": (
        lambda x, gate, up, down: linear((g := linear(x, gate)) * torch.sigmoid(g) * linear(x, up), down),
        True,
    ),
    "no product after it": (lambda x, gate, up, down: (silu(linear(x, gate)) * linear(x, up)) @ down.T + 1, True),
    "shared down": (shared_down, True),
    "gelu": (lambda x, gate, up, down: linear(nn.functional.gelu(linear(x, gate)) * linear(x, up), down), False),
    "gate used twice": (gate_used_twice, False),
    "up first": (up_first, False),
    "up used twice": (
        lambda x, gate, up, down: linear(silu(linear(x, gate)) * (u := linear(x, up)) + u, down),
        False,
    ),
}


@pytest.mark.parametrize("name", SWIGLUS)
def test_swiglu(name: str) -> None:
    function, is_fused = SWIGLUS[name]
    done, _ = check_gradients(Function(function, **GATED), normal(2, 6, 8), PACKED)
    assert done == [GEMMS, *([SWIGLU] if is_fused else [])]


def test_a_tensor_that_is_split_along_another_dimension() -> None:
    def compute(x: Tensor, w: Tensor) -> Tensor:
        gate, up = torch.split(linear(x, w), 3, dim=1)
        return silu(gate) * up

    done, _ = check_gradients(Function(compute, w=(8, 8)), normal(2, 6, 8), PACKED)
    assert done == []


# --- RoPE ---

# B batch, H query heads, G key/value heads, L length, D head dim.
B, H, G, L, D = 2, 4, 2, 6, 4


def tables() -> tuple[Tensor, Tensor]:
    angles = torch.arange(L)[:, None] / 10.0 ** torch.arange(D // 2)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def turn(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + turn(x) * sin


def rotate_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x[..., :2], x[..., 2:]
    return torch.cat((rotate(first, cos[..., ::2], sin[..., ::2]), second), dim=-1)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


def heads(x: Tensor) -> Tensor:
    return x.view(B, L, -1, D).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def attention(rotation: Callable[..., Tensor]) -> nn.Module:
    columns = D // 2 if rotation is rotate_interleaved else D

    def compute(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cos, sin = (table[:, :columns].to(torch.bfloat16) for table in tables())
        parts = [heads(linear(x, weight)) for weight in (q, k, v)]
        return attend(rotation(parts[0], cos, sin), rotation(parts[1], cos, sin), parts[2])

    return Function(compute, q=(H * D, 8), k=(G * D, 8), v=(G * D, 8))


MERGED_THREE = "GEMMs: 3 products that share their input are merged"


@pytest.mark.parametrize(
    ("rotation", "is_fused"),
    [
        (rotate, True),
        (rotate_interleaved, True),
        (rotate_part, False),
        (lambda x, cos, sin: x * cos - turn(x) * sin, False),
        (lambda x, cos, sin: torch.add(x * cos, turn(x) * sin, alpha=2), False),
        (lambda x, cos, sin: x * cos + torch.cat((x[..., 2:], x[..., :2]), dim=-1) * sin, False),
        (lambda x, cos, sin: x * cos + torch.cat((-x[..., 2:], x[..., :1], x[..., 1:2]), dim=-1) * sin, False),
    ],
    ids=["half", "interleaved", "partial", "subtracted", "alpha", "not negated", "three parts"],
)
def test_rope(rotation: Callable[..., Tensor], is_fused: bool) -> None:
    done, _ = check_gradients(attention(rotation), normal(B, L, 8), PACKED)
    assert done == [MERGED_THREE, *([ROPE] if is_fused else [])]


def test_rope_with_learned_angles_keeps_their_gradient() -> None:
    def compute(x: Tensor, q: Tensor, k: Tensor, v: Tensor, angles: Tensor) -> Tensor:
        cos, sin = angles.cos(), angles.sin()
        parts = [heads(linear(x, weight)) for weight in (q, k, v)]
        return attend(rotate(parts[0], cos, sin), rotate(parts[1], cos, sin), parts[2])

    model = Function(compute, q=(H * D, 8), k=(G * D, 8), v=(G * D, 8), angles=(L, D))
    done, _ = check_gradients(model, normal(B, L, 8), PACKED)
    assert done == [MERGED_THREE]


def test_rope_with_tokens_in_one_row() -> None:
    """The packed kernel needs (B, L, W)."""

    def compute(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cos, sin = tables()
        x = x.flatten(0, 1)
        parts = [heads(linear(x, weight)) for weight in (q, k, v)]
        return attend(rotate(parts[0], cos, sin), rotate(parts[1], cos, sin), parts[2])

    model = Function(compute, q=(H * D, 8), k=(G * D, 8), v=(G * D, 8))
    done, _ = check_gradients(model, normal(B, L, 8), PACKED)
    assert done == [MERGED_THREE]


def test_operations_that_write_into_a_tensor_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their results have no use, as in `scores.masked_fill_(mask, -inf)`."""

    def compute(x: Tensor, w: Tensor) -> Tensor:
        scores = linear(x, w)
        scores.masked_fill_(torch.ones(6, 8, dtype=torch.bool).triu(1), 3.0)
        scores[:, 0] = 2.0
        return scores

    model = Function(compute, w=(8, 8))
    nodes = rewritten_nodes(make_program(model, normal(2, 6, 8), PACKED), monkeypatch)
    assert "masked_fill_" in [node.target for node in nodes]
    check_gradients(model, normal(2, 6, 8), PACKED)

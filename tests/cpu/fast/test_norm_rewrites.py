"""Norms in traced graphs: found in the ways models write them, left alone where they are something else, and right."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stepscope.fast.program import Changes
from stepscope.fast.rewrites import Rewrites
from stepscope.kernels import rms_norm
from tests.cpu.fast.tiny import Function, check_gradients, make_program, normal, rewritten_nodes

NORMS = Changes(rewrites=Rewrites(norms=True))
EPS = 1e-5
linear = nn.functional.linear


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


def rms(x: Tensor, w: Tensor) -> Tensor:
    """As Llama of `transformers` writes it."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return w * wide.to(x.dtype)


def in_low_precision(x: Tensor, w: Tensor) -> Tensor:
    x = linear(x, torch.eye(8))
    return rms(x, w)


def layer(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, (8,), w)


def summary(norms: int, added: int) -> list[str]:
    return [f"norms: {norms} are fused kernels, {added} with the addition in front of them"] if norms else []


def residual(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """An fp32 residual stream with a bf16 branch."""
    total = x + linear(x, v)
    return total + linear(rms(total, w), v)


def narrow_residual(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """A bf16 residual stream with an fp32 branch."""
    narrow = linear(x, v)
    return rms(narrow + x.sin(), w) + narrow


def two_readers(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Norms of the same sum, as in parallel layers."""
    total = x + x.sin()
    return layer(total, w) + layer(total, v) + rms(total, w) + total


def chained(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return layer(layer(x + x.cos(), w), v) + rms(rms(x, w), v)


def late_weight(x: Tensor, w: Tensor) -> Tensor:
    """The weight is computed after the sum."""
    total = x + x.sin()
    return layer(total, 1 + w)


def written_into(x: Tensor, w: Tensor) -> Tensor:
    """The norm reads the sum after it was changed."""
    total = x + x.sin()
    total.mul_(2.0).add_(1.0)
    return layer(total, w) + rms(total, w)


VECTORS: dict[str, tuple[int, ...]] = {"w": (8,), "v": (8,)}
MIXED: dict[str, tuple[int, ...]] = {"w": (8,), "v": (8, 8)}
Case = tuple[Callable[..., Tensor], dict[str, tuple[int, ...]], list[str]]
CASES: dict[str, Case] = {
    "rms": (rms, {"w": (8,)}, summary(1, 0)),
    "rms of bf16": (in_low_precision, {"w": (8,)}, summary(1, 0)),
    "layer": (layer, {"w": (8,)}, summary(1, 0)),
    "square": (
        lambda x, w: x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS) * w,
        {"w": (8,)},
        summary(1, 0),
    ),
    "product": (lambda x, w: x * (w * torch.rsqrt((x * x).mean([-1], keepdim=True) + EPS)), {"w": (8,)}, summary(1, 0)),
    "fp32 residual": (residual, MIXED, summary(1, 1)),
    "bf16 residual": (narrow_residual, MIXED, summary(1, 1)),
    "two readers": (two_readers, VECTORS, summary(3, 1)),
    "chained": (chained, VECTORS, summary(4, 1)),
    "late weight": (late_weight, {"w": (8,)}, summary(1, 0)),
    "written into": (written_into, {"w": (8,)}, []),
    "broadcast addition": (lambda x, w: layer(x + x[:, :1], w), {"w": (8,)}, summary(1, 0)),
    "addition with alpha": (lambda x, w: layer(torch.add(x, x.sin(), alpha=3), w), {"w": (8,)}, summary(1, 0)),
    "eps with alpha": (
        lambda x, w: x * torch.rsqrt(torch.add(x.square().mean(-1, keepdim=True), 0.5, alpha=2)) * w,
        {"w": (8,)},
        [],
    ),
    "1 + weight": (lambda x, w: rms(x, 1 + w), {"w": (8,)}, []),
    "another dim": (lambda x, w: x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS) * w, {"w": (8,)}, []),
    "positive dim": (lambda x, w: x * torch.rsqrt(x.square().mean(0, keepdim=True) + EPS) * w, {"w": (8,)}, []),
    "one weight": (lambda x, w: rms(x, w), {"w": (1,)}, []),
    "cubed": (lambda x, w: x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + EPS) * w, {"w": (8,)}, []),
    "another tensor": (
        lambda x, w: x.sin() * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w,
        {"w": (8,)},
        [],
    ),
    "scale used twice": (
        lambda x, w: (root := torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)) * x * w + root,
        {"w": (8,)},
        [],
    ),
    "two dims": (lambda x, w: nn.functional.layer_norm(x, (6, 8), w), {"w": (6, 8)}, []),
    "no weight": (lambda x, w: nn.functional.layer_norm(x, (8,)) * w, {"w": (8,)}, []),
}


@pytest.mark.parametrize("autocast", [torch.bfloat16, None], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", CASES)
def test_norms_are_found_and_right(name: str, autocast: torch.dtype | None) -> None:
    function, shapes, expected = CASES[name]
    done, _ = check_gradients(Function(function, **shapes), normal(2, 6, 8), NORMS, autocast=autocast)
    assert done == expected


Uses = Callable[[Tensor, Tensor], Tensor]


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        (linear, torch.bfloat16),
        (lambda y, v: linear(y.view(12, 8), v), torch.bfloat16),
        (lambda y, v: linear(y, v) + y, torch.float32),
        (lambda y, v: y * v.sum(), torch.float32),
        (lambda y, v: without_autocast(y, v), torch.float32),
    ],
    ids=["a product", "a product of a view", "a product and a sum", "no product", "a product in fp32"],
)
def test_a_norm_for_products_alone_has_their_precision(
    uses: Uses, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A use in fp32 would see the rounding."""
    model = Function(lambda x, w, v: uses(rms(x, w), v), w=(8,), v=(8, 8))
    program = make_program(model, normal(2, 6, 8), NORMS)
    (norm,) = [node for node in rewritten_nodes(program, monkeypatch) if node.target is rms_norm]
    assert norm.kwargs["out_dtype"] == expected
    check_gradients(model, normal(2, 6, 8), NORMS)


def without_autocast(y: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return linear(y, v)

"""The integer sums of a deterministic dQ, in Triton's interpreter. The kernels around the main one run as they are; the
main one's part, rounding and adding, is repeated here in PyTorch.

`test_triton_attention.py` runs this file in its own process, with TRITON_INTERPRET in the environment.
"""

# B batch, H query heads, G key/value heads, L queries and keys, D head dim.

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stepscope.kernels.attention.hopper import backward_kernel as kernels
from stepscope.nn import functional
from tests.cpu.accuracy import normal
from tests.cpu.kernels.interpreter import prepare

prepare()

B, H, G, L, D = 1, 4, 2, 200, 40
TILE, WIDTH, PADDED, KEY_TILES = 128, 64, 256, 2
SCALE = 1 / math.sqrt(D)


@pytest.fixture(autouse=True)
def quiet_nan() -> Iterator[None]:
    """NaN is silent on a GPU."""
    with np.errstate(invalid="ignore"):
        yield


def make_inputs() -> list[Tensor]:
    return [normal(B, heads, L, D, seed=seed).float() for seed, heads in enumerate((H, G, G, H))]


def differentiate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    reverse: bool = False,
    window: int = L,
    documents: int | None = None,
) -> tuple[Tensor, float]:
    """Return dq as a deterministic backward pass computes it, and the largest number of units in any part of it.
    `documents`: the position where a second one starts.
    """
    k_all, v_all = (x.repeat_interleave(H // G, 1).double() for x in (k, v))
    hidden = torch.ones(L, L, dtype=torch.bool)
    hidden = hidden.triu(1) | hidden.tril(-window)
    borders: tuple[Tensor | None, Tensor | None] = (None, None)
    if documents is not None:
        second = torch.arange(L) >= documents
        hidden |= second[:, None] != second
        borders = torch.where(second, documents, 0).int(), torch.where(second, L, documents).int()
    scores = (q.double() @ k_all.mT * SCALE).masked_fill(hidden, -math.inf)
    p, lse = scores.softmax(-1), scores.logsumexp(-1).float()
    o = (p @ v_all.nan_to_num(0.0)).float()  # an unseen value does not matter
    ds = p * (do.double() @ v_all.mT - (do * o).double().sum(-1, keepdim=True))

    heads, groups = B * H, B * G
    bounds = torch.empty(2, groups * KEY_TILES)
    grid = (groups * KEY_TILES,)
    strides = (*k.stride()[:3], *v.stride()[:3])
    kernels.attention_hopper_bound[grid](k, v, bounds, G, L, D, *strides, BLOCK_D=WIDTH)
    rows = torch.empty(3 * heads, PADDED)
    sums = torch.empty(B, H, L, D, dtype=torch.int32)
    kernels.attention_hopper_prepare[(PADDED // TILE * heads,)](
        o, do, lse, rows, sums, bounds, *borders, H, G, L, PADDED, heads, D, *o.stride()[:3], *do.stride(), groups, L,
        window - 1, 0, ROWS=TILE, BLOCK_D=WIDTH, MOST_KEY_TILES=2, CAUSAL=True, WINDOW=window < L,
        DOCUMENTS=documents is not None, EXACT_SUMS=True,
    )  # fmt: skip
    assert not sums.any()
    units = rows[2 * heads :, :L].view(B, H, L, 1).double()
    most = 0.0
    for start in sorted(range(0, L, TILE), reverse=reverse):
        keys = slice(start, start + TILE)
        part = ds[..., keys] @ k_all[:, :, keys] * units
        most = max(most, part.nan_to_num(0.0).abs().max().item())
        sums += part.nan_to_num(0.0).round().to(torch.int32)
    dq = torch.empty_like(q)
    kernels.attention_hopper_finish[(-(-L // 64) * heads,)](
        sums, rows, dq, SCALE, H, L, PADDED, heads, D, *dq.stride()[:3], ROWS=64, BLOCK_D=WIDTH, EXACT_SUMS=True
    )
    return dq, most


def expected(*inputs: Tensor) -> Tensor:
    q, k, v, do = (x.double() for x in inputs)
    q.requires_grad_()
    return torch.autograd.grad(functional.attention(q, k, v, causal=True), q, do)[0]


def test_sums_are_accurate_and_the_same_in_any_order() -> None:
    inputs = make_inputs()
    dq, most = differentiate(*inputs)
    truth = expected(*inputs)
    assert 2**10 < most < 2**31
    assert (dq - truth).norm() < 1e-5 * truth.norm()
    assert torch.equal(dq, differentiate(*inputs, reverse=True)[0])


@pytest.mark.parametrize(("which", "factor"), [(1, 300.0), (2, 300.0), (3, 1e-20), (3, 1e20), (2, 0.0)])
def test_no_part_of_a_sum_overflows_and_few_bits_are_lost_with_outliers(which: int, factor: float) -> None:
    inputs = make_inputs()
    if factor > 1 and which < 3:
        inputs[which][:, :, 17] *= factor  # one key
    else:
        inputs[which] *= factor
    dq, most = differentiate(*inputs)
    truth = expected(*inputs)
    assert most < 2**31
    assert (dq - truth).norm() <= 1e-3 * truth.norm()


def test_what_is_not_finite_stays_visible() -> None:
    clean = make_inputs()
    for which, value in ((1, math.nan), (2, math.nan), (2, math.inf), (3, math.nan)):
        inputs = [x.clone() for x in clean]
        inputs[which][0, 0, 150, 3] = value
        dq, _ = differentiate(*inputs)
        assert dq[0, 0, 150:].isnan().any()
        assert not dq[0, -1].isnan().any()  # of another head


@pytest.mark.parametrize("value", [1e4, math.nan], ids=str)
@pytest.mark.parametrize(
    ("key", "rows", "masks"),
    [
        (L - 1, slice(0, TILE), {}),
        (3, slice(TILE, L), {"window": 1}),
        (3, slice(TILE, L), {"documents": TILE}),
    ],
    ids=["causal", "window", "documents"],
)
def test_keys_of_unseen_tiles_do_not_matter(key: int, rows: slice, masks: dict[str, Any], value: float) -> None:
    clean = make_inputs()
    expected_dq, _ = differentiate(*clean, **masks)
    inputs = [x.clone() for x in clean]
    for x in inputs[1:3]:
        x[:, :, key] = value
    dq, _ = differentiate(*inputs, **masks)
    assert torch.equal(dq[:, :, rows], expected_dq[:, :, rows])

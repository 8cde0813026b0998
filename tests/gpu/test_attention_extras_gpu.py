"""Windows, packed documents, softcaps, biases, ALiBi and sinks on a GPU: our kernels against float64, three ways."""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim.

from typing import Any

import pytest
import torch
from torch import Tensor

from stepscope.kernels import document_bounds, flash_attention
from tests.cpu.accuracy import Op, assert_three_way, normal
from tests.gpu.test_attention_gpu import CUDA, make_inputs, needs_hopper

kernels = pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=needs_hopper)])
# B, H, G, L, K, D: whole tiles; odd lengths and groups; more keys than queries.
SHAPES = [(1, 2, 2, 512, 512, 128), (2, 4, 2, 517, 517, 64), (1, 2, 1, 300, 711, 128), (1, 2, 1, 300, 711, 64)]
# Not one key: its weight is constant, so the true gradient is zero, and any rounding is too much.
WINDOWS = [(True, 2), (True, 100), (True, 128), (True, 5000), (False, (60, 70)), (False, (None, 30)), (False, (200, 0))]
# Lengths of documents: of one position, across tiles, and ending with a tile.
PACKED = [(1, 127, 128, 300, 1, 155), (512,), (40,) * 12, (700, 5, 7)]


def on_gpu(backend: str, **settings: Any) -> Op:
    """Attention on the GPU for tensors on the CPU. `naive` is the reference."""

    def run(*inputs: Tensor) -> Tensor:
        moved: dict[str, Any] = {
            name: value.to(CUDA) if isinstance(value, Tensor) else value for name, value in settings.items()
        }
        return flash_attention(
            inputs[0].to(CUDA), inputs[1].to(CUDA), inputs[2].to(CUDA), backend=backend, **moved
        ).cpu()

    return run


def check(backend: str, inputs: list[Tensor], *, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> None:
    assert_three_way(on_gpu(backend, **settings), on_gpu("naive", **settings), inputs, dtype=dtype)


@kernels
@pytest.mark.parametrize(("causal", "window"), WINDOWS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_windows(backend: str, shape: tuple[int, ...], causal: bool, window: Any) -> None:
    check(backend, make_inputs(shape), causal=causal, window=window)


@kernels
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", PACKED, ids=len)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_documents(backend: str, causal: bool, lengths: tuple[int, ...], head_dim: int, window: Any) -> None:
    if window and not causal:
        window = (window, window)
    total = sum(lengths)
    ends = torch.tensor((0, *lengths)).cumsum(0).int()
    inputs = make_inputs((1, 4, 2, total, total, head_dim))
    check(backend, inputs, causal=causal, window=window, cu_seqlens=ends)


@kernels
def test_rows_of_a_batch_have_documents_of_their_own(backend: str) -> None:
    length = 384
    tables = [document_bounds(torch.tensor(ends), length) for ends in ((0, 100, 384), (0, 128, 256, 384), (0, 384))]
    documents = torch.cat(tables, 1)
    inputs = make_inputs((3, 2, 2, length, length, 64))
    together = on_gpu(backend, causal=True, documents=documents)(*(x.bfloat16() for x in inputs))
    for row, table in enumerate(tables):
        alone = on_gpu(backend, causal=True, documents=table)(*(x[row : row + 1].bfloat16() for x in inputs))
        assert torch.equal(together[row : row + 1], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
@pytest.mark.parametrize("extra", ["softcap", "bias", "alibi", "sinks", "all"])
def test_triton_changes_scores(extra: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _, num_heads, _, num_queries, num_keys, _ = shape
    every: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 5.0},
        "bias": {"bias": normal(1, num_heads, num_queries, num_keys, seed=5).float()},
        "alibi": {"alibi_slopes": torch.tensor([0.5**i for i in range(num_heads)])},
        "sinks": {"sinks": normal(num_heads, seed=6).float()},
    }
    wanted = {name: value for one in every.values() for name, value in one.items()} if extra == "all" else every[extra]
    check("triton", make_inputs(shape), dtype=dtype, causal=True, **wanted)


@needs_hopper
def test_hopper_refuses_what_only_triton_has() -> None:
    q, k, v = (x.to(CUDA, torch.bfloat16) for x in make_inputs(SHAPES[0]))
    with pytest.raises(ValueError, match="softcap"):
        flash_attention(q, k, v, causal=True, softcap=5.0, backend="hopper")
    with pytest.warns(UserWarning, match="softcap"):
        flash_attention(q, k, v, causal=True, softcap=5.0)


@pytest.mark.parametrize("head_dims", [(192, 128), (40, 24)], ids=str)
@pytest.mark.parametrize(
    "extras", [{"window": 100}, {"softcap": 5.0}, {"documents": True}, {"sinks": True, "bias": True}], ids=str
)
def test_head_dim_of_v_may_differ(extras: dict[str, Any], head_dims: tuple[int, int]) -> None:
    made = {
        "documents": document_bounds(torch.tensor([0, 60, 61, 333]), 333),
        "sinks": normal(4, seed=5).float(),
        "bias": normal(1, 4, 333, 333, seed=6).float(),
    }
    options = {name: made.get(name, value) for name, value in extras.items()}
    check("triton", make_inputs((1, 4, 2, 333, 333, head_dims[0]), head_dims[1]), causal=True, **options)

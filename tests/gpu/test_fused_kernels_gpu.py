"""Norms, gated activations and rotary embeddings on a GPU: every result and gradient at real shapes against float64,
captured graphs, compiled graphs, and the same bits every time.
"""

# B batch, H query heads, G key/value heads, L length, D head dim, M width, F width of the feed-forward layer.

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from stepscope.fast.capture import refusing_waits
from stepscope.kernels import (
    add_layer_norm,
    add_rms_norm,
    geglu,
    geglu_packed,
    layer_norm,
    rms_norm,
    rope,
    rope_packed,
    swiglu,
    swiglu_packed,
)
from stepscope.nn import functional
from tests.cpu.accuracy import normal
from tests.cpu.kernels.mixed_dtypes import Operation, assert_results_as_accurate, run_with_gradients

CUDA = torch.device("cuda", 0)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
EPS = 1e-5
COS, SIN = (table.to(CUDA) if torch.cuda.is_available() else table for table in functional.rope_tables(80, 300, 1e4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An operation, its reference, and the shape and dtype of each input."""

    ours: Operation
    plain: Operation
    inputs: Sequence[tuple[tuple[int, ...], torch.dtype]]

    def make_inputs(self, seed: int = 0) -> list[Tensor]:
        return [normal(*shape, seed=seed + place).to(CUDA, dtype) for place, (shape, dtype) in enumerate(self.inputs)]


def add_norm(kind: str, width: int, *, x: torch.dtype, branch: torch.dtype, y: torch.dtype) -> Problem:
    rows, weight = (2, 1021, width), ((width,), FP32)

    def ours(x: Tensor, branch: Tensor, weight: Tensor, *bias: Tensor) -> Sequence[Tensor]:
        if kind == "rms":
            return add_rms_norm(x, branch, weight, EPS, out_dtype=y)
        return add_layer_norm(x, branch, weight, bias[0], EPS, out_dtype=y)

    def plain(x: Tensor, branch: Tensor, weight: Tensor, *bias: Tensor) -> Sequence[Tensor]:
        total = x + branch
        return total, _plain_norm(total, weight, bias, y)

    return Problem(ours=ours, plain=plain, inputs=[(rows, x), (rows, branch), *[weight] * (1 + (kind == "layer"))])


def norm(kind: str, width: int, *, x: torch.dtype, y: torch.dtype) -> Problem:
    def ours(x: Tensor, weight: Tensor, *bias: Tensor) -> Sequence[Tensor]:
        if kind == "rms":
            return (rms_norm(x, weight, EPS, out_dtype=y),)
        return (layer_norm(x, weight, bias[0], EPS, out_dtype=y),)

    def plain(x: Tensor, weight: Tensor, *bias: Tensor) -> Sequence[Tensor]:
        return (_plain_norm(x, weight, bias, y),)

    rows, weight = (2, 1021, width), ((width,), FP32)
    return Problem(ours=ours, plain=plain, inputs=[(rows, x), *[weight] * (1 + (kind == "layer"))])


def _plain_norm(x: Tensor, weight: Tensor, bias: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, FP32))
    y = functional.layer_norm(wide, weight, bias[0], EPS) if bias else functional.rms_norm(wide, weight, EPS)
    return y if x.dtype == torch.float64 else y.to(dtype)


def gated(ours: Callable[..., Tensor], plain: Callable[..., Tensor], width: int, *dtypes: torch.dtype) -> Problem:
    return Problem(
        ours=lambda *x: (ours(*x),),
        plain=lambda *x: (plain(*x),),
        inputs=[((2, 511, width), dtype) for dtype in dtypes],
    )


def packed(activation: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda gate_up: activation(*gate_up.chunk(2, dim=-1))


def rotate(heads: int, groups: int, dtype: torch.dtype, *, interleaved: bool, is_packed: bool = False) -> Problem:
    reference = functional.rope if interleaved else functional.rope_half

    def plain(q: Tensor, k: Tensor) -> Sequence[Tensor]:
        wide = torch.promote_types(q.dtype, FP32)
        return tuple(reference(x.to(wide), COS.to(wide), SIN.to(wide)).to(x.dtype) for x in (q, k))

    def plain_packed(qkv: Tensor) -> Sequence[Tensor]:
        q, k, v = qkv.view(2, 300, -1, 80).transpose(1, 2).split_with_sizes((heads, groups, groups), dim=1)
        return *plain(q, k), v

    if is_packed:
        return Problem(
            ours=lambda qkv: rope_packed(qkv, COS, SIN, num_heads=heads, num_groups=groups, interleaved=interleaved),
            plain=plain_packed,
            inputs=[((2, 300, (heads + 2 * groups) * 80), dtype)],
        )
    return Problem(
        ours=lambda q, k: rope(q, k, COS, SIN, interleaved=interleaved),
        plain=plain,
        inputs=[((2, heads, 300, 80), dtype), ((2, groups, 300, 80), dtype)],
    )


PROBLEMS = {
    **{
        f"add_{kind}_norm {width} fp32 bf16": add_norm(kind, width, x=FP32, branch=BF16, y=BF16)
        for kind in ("rms", "layer")
        for width in (128, 768, 1024, 1600, 2560, 4096, 8192)
    },
    "add_rms_norm 1280 bf16": add_norm("rms", 1280, x=BF16, branch=BF16, y=BF16),
    "add_rms_norm 1000 fp32": add_norm("rms", 1000, x=FP32, branch=FP32, y=FP32),
    "add_layer_norm 777 fp16": add_norm("layer", 777, x=FP16, branch=FP16, y=FP32),
    "add_rms_norm 20000 fp32 bf16": add_norm("rms", 20000, x=FP32, branch=BF16, y=BF16),
    "rms_norm 1024 fp32 bf16": norm("rms", 1024, x=FP32, y=BF16),
    "rms_norm 5120 bf16": norm("rms", 5120, x=BF16, y=BF16),
    "layer_norm 1024 bf16": norm("layer", 1024, x=BF16, y=BF16),
    "swiglu 3072 bf16": gated(swiglu, functional.swiglu, 3072, BF16, BF16),
    "swiglu 1001 fp32": gated(swiglu, functional.swiglu, 1001, FP32, FP32),
    "geglu 4096 fp16": gated(geglu, functional.geglu, 4096, FP16, FP16),
    "geglu tanh 4096 bf16": gated(
        lambda gate, up: geglu(gate, up, "tanh"), lambda gate, up: functional.geglu(gate, up, "tanh"), 4096, BF16, BF16
    ),
    "swiglu_packed 2048 bf16": gated(swiglu_packed, packed(functional.swiglu), 4096, BF16),
    "geglu_packed 2048 bf16": gated(geglu_packed, packed(functional.geglu), 4096, BF16),
    "rope half bf16": rotate(32, 8, BF16, interleaved=False),
    "rope interleaved bf16": rotate(16, 16, BF16, interleaved=True),
    "rope half fp32": rotate(5, 5, FP32, interleaved=False),
    "rope_packed half bf16": rotate(32, 8, BF16, interleaved=False, is_packed=True),
    "rope_packed interleaved fp16": rotate(12, 12, FP16, interleaved=True, is_packed=True),
}
every_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))
A_FEW = (
    "add_rms_norm 1024 fp32 bf16",
    "add_layer_norm 1600 fp32 bf16",
    "rms_norm 5120 bf16",
    "swiglu_packed 2048 bf16",
    "geglu 4096 fp16",
    "rope half bf16",
    "rope_packed half bf16",
)
some_problems = pytest.mark.parametrize("problem", [PROBLEMS[name] for name in A_FEW], ids=A_FEW)


def make_upstream(problem: Problem, seed: int = 50) -> list[Tensor]:
    results = problem.ours(*problem.make_inputs())
    return [normal(*x.shape, seed=seed + place).to(x) for place, x in enumerate(results)]


@every_problem
def test_results_and_gradients_match_the_reference(problem: Problem) -> None:
    assert_results_as_accurate(problem.ours, problem.plain, problem.make_inputs())


@pytest.mark.parametrize("name", ["add_rms_norm 1024 fp32 bf16", "add_layer_norm 2560 fp32 bf16"])
def test_sum_that_is_not_used_has_no_gradient(name: str) -> None:
    problem = PROBLEMS[name]
    assert_results_as_accurate(problem.ours, problem.plain, problem.make_inputs(), num_used=1)


@every_problem
def test_same_input_gives_the_same_bits(problem: Problem) -> None:
    inputs, upstream = problem.make_inputs(), make_upstream(problem)
    expected = run_with_gradients(problem.ours, inputs, upstream)
    for _ in range(20):
        found = run_with_gradients(problem.ours, inputs, upstream)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@every_problem
def test_a_cuda_graph_replays_forward_and_backward_with_new_data(problem: Problem) -> None:
    inputs, upstream = [x.requires_grad_() for x in problem.make_inputs()], make_upstream(problem)

    def step() -> list[Tensor]:
        results = problem.ours(*inputs)
        return [*results, *torch.autograd.grad(list(results), inputs, upstream)]

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    fresh = problem.make_inputs(seed=7)
    with torch.no_grad():
        for x, value in zip(inputs, fresh, strict=True):
            x.copy_(value)
    graph.replay()
    expected = run_with_gradients(problem.ours, fresh, upstream)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@some_problems
def test_compiled_graph_gives_the_same_bits(problem: Problem) -> None:
    torch._dynamo.reset()
    inputs, upstream = problem.make_inputs(), make_upstream(problem)
    compiled = torch.compile(problem.ours, fullgraph=True)
    expected = run_with_gradients(problem.ours, inputs, upstream)
    found = run_with_gradients(compiled, inputs, upstream)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@some_problems
def test_host_never_waits_for_the_gpu(problem: Problem) -> None:
    inputs, upstream = problem.make_inputs(), make_upstream(problem)
    run_with_gradients(problem.ours, inputs, upstream)
    with refusing_waits():
        run_with_gradients(problem.ours, inputs, upstream)


def test_offsets_beyond_the_range_of_32_bits() -> None:
    """More than 2³¹ elements; the last rows are compared with the same rows alone."""
    x = torch.randn(2**31 // 4096 + 3, 4096, device=CUDA, dtype=BF16)
    weight = torch.randn(4096, device=CUDA)
    assert torch.equal(rms_norm(x, weight)[-5:], rms_norm(x[-5:].clone(), weight))
    assert torch.equal(swiglu_packed(x)[-5:], swiglu_packed(x[-5:].clone()))


def test_float64_is_computed_by_the_reference() -> None:
    x, weight = normal(3, 40).to(CUDA), normal(40, seed=1).to(CUDA)
    torch.testing.assert_close(rms_norm(x, weight, EPS), functional.rms_norm(x, weight, EPS))
    torch.testing.assert_close(swiglu(x, x), functional.swiglu(x, x))

"""`linear_cross_entropy` without a GPU: the same chunks in plain PyTorch, the operators, and the arguments."""

# N tokens, D width, V vocabulary.

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stepscope.kernels import linear_cross_entropy
from stepscope.kernels.linear_cross_entropy import FEWEST_TOKENS, MOST_LOGIT_BYTES, choose_chunk
from stepscope.nn import functional
from tests.cpu.accuracy import assert_three_way, normal

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def make_targets(*shape: int, vocab: int) -> Tensor:
    targets = torch.randint(vocab, shape, generator=torch.Generator().manual_seed(3))
    targets.view(-1)[1] = -100
    return targets


def make_inputs(vocab: int, *, bias: bool) -> list[Tensor]:
    tensors = [normal(2, 5, 16), normal(vocab, 16, seed=2, std=0.5)]
    return [*tensors, normal(vocab, seed=4)] if bias else tensors


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, targets: Tensor, **settings: Any) -> Tensor:
    logits = functional.linear(x, weight)
    logits = logits if bias is None else logits + bias
    return functional.cross_entropy(logits, targets, ignore_index=-100, **settings)


@pytest.mark.parametrize("settings", [{}, {"reduction": "sum"}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("chunk", [None, 4, 10])
@pytest.mark.parametrize(("vocab", "bias"), [(40, False), (37, True)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loss_and_gradients_match_the_reference(
    dtype: torch.dtype, vocab: int, bias: bool, chunk: int | None, settings: dict[str, Any]
) -> None:
    targets = make_targets(2, 5, vocab=vocab)

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_cross_entropy(x, weight, targets, bias=bias, chunk=chunk, **settings)

    def plain(*tensors: Tensor) -> Tensor:
        return reference(*tensors, targets=targets, **settings)

    assert_three_way(ours, plain, make_inputs(vocab, bias=bias), dtype=dtype)


def test_many_chunks_are_summed_in_fp32() -> None:
    """In bf16 a sum of 256 terms would lose most of the last ones."""
    x, weight, targets = normal(256, 16), normal(40, 16, seed=2, std=0.5), make_targets(256, vocab=40)
    assert_three_way(
        lambda x, weight: linear_cross_entropy(x, weight, targets, chunk=1, reduction="sum"),
        lambda x, weight: reference(x, weight, targets=targets, reduction="sum"),
        [x, weight],
        dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("wanted", [(False, False), (True, False), (False, True)], ids=str)
def test_only_wanted_gradients_are_computed(wanted: tuple[bool, bool]) -> None:
    x, weight = (
        tensor.float().requires_grad_(w) for tensor, w in zip(make_inputs(40, bias=False), wanted, strict=True)
    )
    targets = make_targets(2, 5, vocab=40)
    with FlopCounterMode(display=False) as counter:
        loss = linear_cross_entropy(x, weight, targets)
    assert counter.get_total_flops() == 2 * 10 * 16 * 40 * (1 + sum(wanted))
    assert loss.requires_grad == any(wanted)
    inputs = [tensor for tensor in (x, weight) if tensor.requires_grad]
    if inputs:
        expected = torch.autograd.grad(reference(x, weight, targets=targets), inputs)
        torch.testing.assert_close(torch.autograd.grad(loss, inputs), expected)


def test_nothing_is_computed_for_gradients_under_no_grad() -> None:
    x, weight = (tensor.float().requires_grad_() for tensor in make_inputs(40, bias=False))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        linear_cross_entropy(x, weight, make_targets(2, 5, vocab=40))
    assert counter.get_total_flops() == 2 * 10 * 16 * 40


def test_backward_may_run_twice() -> None:
    x, weight = (tensor.float().requires_grad_() for tensor in make_inputs(40, bias=False))
    loss = linear_cross_entropy(x, weight, make_targets(2, 5, vocab=40), chunk=4)
    first, second = (torch.autograd.grad(3 * loss, (x, weight), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_tensor_of_all_logits_is_saved() -> None:
    """x and the weight are not even needed for the backward pass: their gradients are."""
    vocab, tokens = 4000, 64
    x = normal(tokens, 16).float().requires_grad_()
    weight = normal(vocab, 16, seed=2).float().requires_grad_()
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        linear_cross_entropy(x, weight, make_targets(tokens, vocab=vocab), chunk=16)
    assert sorted(sizes)[-2:] == [tokens * 16, vocab * 16]


def test_layer_under_autocast_computes_in_bf16() -> None:
    layer = nn.Linear(16, 40)
    x, targets = normal(2, 5, 16).float(), make_targets(2, 5, vocab=40)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, layer.weight, targets, bias=layer.bias)
        expected = functional.cross_entropy(layer(x), targets, ignore_index=-100)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    parameters = list(layer.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, parameters), rtol=5e-2, atol=5e-3)


@pytest.mark.parametrize("chunk", [4, 10])
@pytest.mark.parametrize("bias", [False, True])
def test_operators_pass_opcheck(bias: bool, chunk: int) -> None:
    tensors = [tensor.bfloat16().requires_grad_() for tensor in make_inputs(37, bias=bias)]
    x, weight, *rest = tensors
    added = rest[0] if rest else None
    arguments = (x.view(10, 16), weight, added, make_targets(10, vocab=37), -100, True, 0.0, chunk)
    # Gradients are not compared: in bf16 a compiled graph rounds at other places.
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.stepscope.linear_cross_entropy.default, (*arguments, True, True, bias), test_utils=utilities
    )
    one = torch.ones(())
    torch.library.opcheck(torch.ops.stepscope.scale_gradient.default, (normal(7, 3), one, one, torch.bfloat16))


def test_compiles_without_a_graph_break_and_matches() -> None:
    targets = make_targets(2, 5, vocab=37)
    tensors = [tensor.float().requires_grad_() for tensor in make_inputs(37, bias=False)]

    def step(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x * 2, weight, targets, chunk=4)

    expected = torch.autograd.grad(step(*tensors), tensors)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*tensors), tensors), expected)


def test_chunks_are_equal_and_bounded() -> None:
    assert choose_chunk(4096, 2 * 10_000) == 4096
    assert choose_chunk(4096, 2 * 50_304) == 4096
    for tokens, vocab in ((4096, 151_936), (65_536, 50_304), (100_001, 262_144)):
        chunk = choose_chunk(tokens, 2 * vocab)
        assert chunk % 128 == 0
        assert chunk * 2 * vocab <= max(MOST_LOGIT_BYTES, FEWEST_TOKENS * 2 * vocab) + 128 * 2 * vocab
        num_chunks = -(-tokens // chunk)
        assert tokens > (num_chunks - 1) * chunk + chunk // 2, "the last chunk is nearly empty"
    assert choose_chunk(0, 100) == 1


def test_no_tokens_have_no_loss() -> None:
    x, weight = torch.zeros(0, 16, requires_grad=True), torch.zeros(37, 16, requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.zeros(0, dtype=torch.int64), reduction="sum")
    assert loss == 0
    dx, dweight = torch.autograd.grad(loss, (x, weight))
    assert dx.shape == x.shape
    assert not dweight.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.zeros(20, 9)}, "expected x"),
        ({"weight": torch.zeros(20, 8).double()}, "one floating-point dtype"),
        ({"bias": torch.zeros(8)}, "expected bias"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "expected targets"),
        ({"chunk": 0}, "chunk"),
        ({"softcap": -1.0}, "softcap"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(4, 8), "weight": torch.zeros(20, 8)}
    arguments |= {"targets": torch.zeros(4, dtype=torch.int64)} | changes
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments)

"""Cross entropy, and linear + cross entropy, on a GPU: against float64, in CUDA graphs, repeated bit for bit."""

# N tokens, D width, V vocabulary.

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stepscope.fast.capture import refusing_waits
from stepscope.kernels import cross_entropy, linear_cross_entropy
from stepscope.kernels.linear_cross_entropy import MOST_LOGIT_BYTES
from stepscope.nn import functional
from tests.cpu.accuracy import Op, assert_three_way, normal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# In registers, odd, aligned, longest; and small ones.
VOCABULARIES = (10_000, 50_257, 151_936, 262_144, 16_384, 4096, 4097, 37)
EXTRAS: list[dict[str, Any]] = [
    {"reduction": "sum"},
    {"softcap": 20.0},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-3},
    {"softcap": 30.0, "label_smoothing": 0.1, "z_loss": 1e-3},
]


def make_targets(num_rows: int, vocab: int) -> Tensor:
    targets = torch.randint(vocab, (num_rows,), generator=torch.Generator().manual_seed(3))
    targets[0], targets[-1] = vocab - 1, 0
    targets[1 : num_rows // 8] = -100
    return targets.cuda()


def on_gpu(op: Callable[..., Tensor]) -> Op:
    """Run on the GPU for tensors on the CPU."""
    return lambda *tensors: op(*(tensor.cuda() for tensor in tensors)).cpu()


def check_rows(num_rows: int, vocab: int, dtype: torch.dtype, **settings: Any) -> None:
    targets = make_targets(num_rows, vocab)
    assert_three_way(
        on_gpu(lambda x: cross_entropy(x, targets, **settings)),
        on_gpu(lambda x: functional.cross_entropy(x, targets, ignore_index=-100, **settings)),
        [normal(num_rows, vocab, std=3.0)],
        dtype=dtype,
    )


@every_dtype
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_loss_and_gradient_match_the_reference(vocab: int, dtype: torch.dtype) -> None:
    check_rows(37, vocab, dtype)


@every_dtype
@pytest.mark.parametrize("settings", EXTRAS, ids=str)
@pytest.mark.parametrize("vocab", [10_000, 50_257])
def test_extras_match_the_reference(vocab: int, settings: dict[str, Any], dtype: torch.dtype) -> None:
    check_rows(20, vocab, dtype, **settings)


@pytest.mark.parametrize("vocab", [10_000, 50_257])
def test_many_rows_match_the_reference(vocab: int) -> None:
    check_rows(1024, vocab, torch.bfloat16)


@pytest.mark.parametrize("shift", [0, 3])
def test_padded_rows_match_contiguous_ones(shift: int) -> None:
    targets = make_targets(64, 50_257)
    values = normal(64, 50_257).to("cuda", torch.bfloat16)
    wide = torch.full((64, 50_304), torch.nan, dtype=torch.bfloat16, device="cuda")
    part = wide[:, shift : shift + 50_257].copy_(values).requires_grad_()
    losses = [cross_entropy(logits, targets) for logits in (values.requires_grad_(), part)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(loss, x)[0] for loss, x in zip(losses, (values, part), strict=True)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-2, atol=0)


def test_more_than_two_billion_logits() -> None:
    num_rows, vocab = 8200, 262_144
    if torch.cuda.mem_get_info()[0] < 3 * 2 * num_rows * vocab:
        pytest.skip("needs 13 GB of free GPU memory")
    logits = torch.zeros(num_rows, vocab, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    targets = torch.arange(num_rows, device="cuda")
    loss = cross_entropy(logits, targets, reduction="sum")
    torch.testing.assert_close(loss.item(), num_rows * torch.tensor(float(vocab)).log().item(), rtol=1e-5, atol=0)
    gradient = torch.autograd.grad(loss, logits)[0]
    assert (gradient[-1, num_rows - 1] + 1).abs() < 0.01
    assert gradient[-1, 0] == gradient[0, 1]


def check_linear(
    tokens: int, width: int, vocab: int, dtype: torch.dtype, *, bias: bool = False, **settings: Any
) -> None:
    targets = make_targets(tokens, vocab)
    chunk = settings.pop("chunk", None)

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_cross_entropy(x, weight, targets, bias=bias, chunk=chunk, **settings)

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        logits = functional.linear(x, weight)
        return functional.cross_entropy(
            logits if bias is None else logits + bias, targets, ignore_index=-100, **settings
        )

    inputs = [normal(tokens, width), normal(vocab, width, seed=2, std=width**-0.5)]
    inputs += [normal(vocab, seed=4)] if bias else []
    assert_three_way(on_gpu(ours), on_gpu(plain), inputs, dtype=dtype)


@every_dtype
@pytest.mark.parametrize("chunk", [None, 128])
@pytest.mark.parametrize("vocab", [10_000, 10_007])
def test_linear_matches_the_reference(vocab: int, chunk: int | None, dtype: torch.dtype) -> None:
    check_linear(300, 256, vocab, dtype, chunk=chunk)


@pytest.mark.parametrize("settings", [{"reduction": "sum"}, {"softcap": 5.0}, {"bias": True}], ids=str)
def test_settings_of_linear_match_the_reference(settings: dict[str, Any]) -> None:
    check_linear(300, 256, 10_007, torch.bfloat16, chunk=128, **settings)


def test_linear_matches_the_reference_at_a_real_shape() -> None:
    check_linear(2048, 768, 50_257, torch.bfloat16, chunk=1024)


def test_linear_stays_within_its_memory() -> None:
    """Next to the buffer: the gradients of x and, in fp32, of the weight, and the padded weight."""
    tokens, width, vocab = 16_384, 768, 50_257
    x = normal(tokens, width).to("cuda", torch.bfloat16).requires_grad_()
    weight = normal(vocab, width, std=0.03).to("cuda", torch.bfloat16).requires_grad_()
    targets = make_targets(tokens, vocab)
    linear_cross_entropy(x, weight, targets)  # cuBLAS allocates its workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(x, weight, targets)
    used = torch.cuda.max_memory_allocated() - before
    assert loss.isfinite()
    workspace = 2**25  # cuBLAS takes another one for products of another kind
    assert used < MOST_LOGIT_BYTES + 2 * tokens * width + (4 + 2) * (vocab + 64) * width + 2**24 + workspace
    assert used < 2 * tokens * vocab


def losses_of(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(x @ weight.T, targets) + 2 * linear_cross_entropy(x, weight, targets, chunk=128)


def make_step(vocab: int = 10_007) -> tuple[list[Tensor], Tensor]:
    tensors = [normal(300, 256), normal(vocab, 256, seed=2, std=0.06)]
    return [tensor.to("cuda", torch.bfloat16).requires_grad_() for tensor in tensors], make_targets(300, vocab)


def run_step(tensors: list[Tensor], targets: Tensor) -> list[Tensor]:
    loss = losses_of(tensors[0], tensors[1], targets)
    return [loss.detach(), *torch.autograd.grad(loss, tensors)]


def test_results_repeat_bit_for_bit_without_waiting_for_the_gpu() -> None:
    tensors, targets = make_step()
    expected = run_step(tensors, targets)
    with refusing_waits():
        again = [run_step(tensors, targets) for _ in range(20)]
    assert all(torch.equal(a, b) for results in again for a, b in zip(results, expected, strict=True))


def test_captured_steps_see_new_values() -> None:
    tensors, targets = make_step()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run_step(tensors, targets)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_step(tensors, targets)
    with torch.no_grad():
        tensors[0].copy_(normal(300, 256, seed=9))
        targets.copy_(make_targets(300, 10_007).roll(5))
    graph.replay()
    expected = run_step(tensors, targets)
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # the compiler captures a part without kernels
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_steps_match(mode: str) -> None:
    tensors, targets = make_step()
    expected = run_step(tensors, targets)
    compiled = torch.compile(losses_of, fullgraph=True, mode=mode)
    for _ in range(3):
        loss = compiled(tensors[0], tensors[1], targets)
        gradients = torch.autograd.grad(loss, tensors)
    for ours, theirs in zip([loss.detach(), *gradients], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-4)


def test_what_is_not_finite_or_out_of_range_is_visible() -> None:
    logits, targets = normal(64, 50_257).float().cuda(), make_targets(64, 50_257)
    for value in (torch.nan, torch.inf):
        broken = logits.clone()
        broken[40, 7] = value
        assert cross_entropy(broken, targets).isnan()
    for target in (50_257, -1):
        wrong = targets.clone()
        wrong[40] = target
        x = logits.clone().requires_grad_()
        loss = cross_entropy(x, wrong)
        assert loss.isnan()
        gradient = torch.autograd.grad(loss, x)[0]
        assert gradient[40].isnan().all()
        assert gradient[:40].isfinite().all()


def test_only_ignored_targets_have_no_gradient() -> None:
    tensors, targets = make_step()
    targets.fill_(-100)
    loss = linear_cross_entropy(tensors[0], tensors[1], targets)
    assert loss.isnan()  # as PyTorch
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, tensors))

"""Steps in CUDA graphs: they compute what the uncaptured step computes, with new batches, rates and random numbers."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepscope.fast.capture import CannotCapture
from stepscope.fast.ladder import OptimiseJob
from stepscope.fast.optimised_step import OptimisedStep
from stepscope.fast.program import Changes, Program
from stepscope.fast.rewrites import Rewrites

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
PLAIN = Changes()
FAST = Changes(
    rewrites=Rewrites(attention=True, norms=True, working_weights=True, merge=True, packed=True), one_launch=True
)
STEPS = 5


def tokens(seed: int, length: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(128, (4, length), generator=generator).to(CUDA)


def llama(**settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        use_cache=False,
        **settings,
    )
    module: nn.Module = transformers.LlamaForCausalLM(config).to(CUDA)
    return module


def own_loss(module: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = module(input_ids=batch, labels=batch).loss
    return loss


def mean_square(module: nn.Module, batch: Tensor) -> Tensor:
    output: Tensor = module(batch)
    return output.float().square().mean()


def job_of(
    module: nn.Module, batches: Sequence[Tensor], *, loss: Any = own_loss, max_norm: float | None = None, **hyper: Any
) -> OptimiseJob:
    optimizer = torch.optim.AdamW(module.parameters(), **({"lr": 1e-3} | hyper))
    return OptimiseJob(
        module=module,
        optimizer=optimizer,
        loss_of=loss,
        batches=tuple(batches),
        autocast=BF16,
        device=CUDA,
        max_norm=max_norm,
    )


def train(program: Program, fixed: Sequence[Tensor], batches: Sequence[Tensor]) -> Tensor:
    """Run a step for every group of batches, and return the losses of each."""
    losses = []
    for start in range(0, len(batches), len(fixed)):
        for own, batch in zip(fixed, batches[start:], strict=False):
            own.copy_(batch)
        program.run()
        losses.append(torch.stack([loss.detach().clone() for loss in program.losses]))
    return torch.stack(losses)


def train_new(
    changes: Changes, *, captured: bool, passes: int = 1, max_norm: float | None = None
) -> tuple[Tensor, nn.Module]:
    """The losses of a new model that sees other tokens in every step, and the model."""
    module = llama()
    fixed = [tokens(0) for _ in range(passes)]
    program = job_of(module, fixed, max_norm=max_norm).build(changes)
    if captured:
        program.capture()
    return train(program, fixed, [tokens(seed) for seed in range(STEPS * passes)]), module


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # noqa: FBT003
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)  # noqa: FBT003


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.cuda.synchronize()


@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
@pytest.mark.parametrize("changes", [PLAIN, FAST], ids=["plain", "fast"])
def test_replays_equal_the_uncaptured_steps_bit_for_bit(changes: Changes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with deterministic(), sdpa_kernel(SDPBackend.MATH):  # the others repeat themselves only if asked for by an error
        losses, module = train_new(changes, captured=False)
        replayed, twin = train_new(changes, captured=True)
    assert torch.equal(losses, replayed)
    assert same_weights(module, twin)


def test_replays_train_like_the_plain_step() -> None:
    """Within the error of bf16, with different tokens in every step."""
    plain, _ = train_new(PLAIN, captured=False)
    fast, _ = train_new(FAST, captured=True)
    torch.testing.assert_close(fast, plain, rtol=1e-2, atol=0)
    assert len(set(plain.flatten().tolist())) == STEPS, "every batch has a loss of its own"


def test_replays_with_clipping_and_accumulation() -> None:
    plain, _ = train_new(PLAIN, captured=False, passes=2, max_norm=0.1)
    fast, _ = train_new(FAST, captured=True, passes=2, max_norm=0.1)
    torch.testing.assert_close(fast, plain, rtol=1e-2, atol=0)


def test_replays_see_new_learning_rates() -> None:
    module = llama()
    fixed = [tokens(0)]
    job = job_of(module, fixed)
    program = job.build(FAST)
    program.capture()
    program.run()
    assert job.optimizer is not None
    before = copy.deepcopy(module)
    job.optimizer.param_groups[0]["lr"] = 0.0
    program.run()
    assert same_weights(before, module)
    job.optimizer.param_groups[0]["lr"] = 1e-3
    program.run()
    assert not same_weights(before, module)


def test_capturing_does_not_change_weights_state_or_random_numbers() -> None:
    module = llama()
    before, random = copy.deepcopy(module), torch.cuda.get_rng_state()
    job = job_of(module, [tokens(0)])
    program = job.build(FAST)
    program.capture()
    assert same_weights(before, module)
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert job.optimizer is not None
    assert all(not state["exp_avg"].any() for state in job.optimizer.state.values())
    program.run()
    program.run()
    counts = {int(state["step"]) for state in job.optimizer.state_dict()["state"].values()}
    assert counts == {2}


def test_a_loaded_optimizer_state_reaches_the_graph() -> None:
    module = llama()
    job = job_of(module, [tokens(0)])
    program = job.build(FAST)
    program.capture()
    program.run()
    assert job.optimizer is not None
    weights, state = copy.deepcopy(module.state_dict()), copy.deepcopy(job.optimizer.state_dict())
    program.run()
    first = copy.deepcopy(module)
    for _ in range(3):
        program.run()
    module.load_state_dict(weights)
    job.optimizer.load_state_dict(state)
    program.run()
    for one, other in zip(first.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_dropout_differs_between_replays() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).to(CUDA)
    program = job_of(module, [torch.randn(32, 64, device=CUDA)], loss=mean_square, lr=0.0).build(PLAIN)
    program.capture()
    random = torch.cuda.get_rng_state()
    found = set()
    for _ in range(4):
        program.run()
        found.add(float(program.losses[0]))
    assert len(found) == 4
    assert not torch.equal(torch.cuda.get_rng_state(), random)


class Waiting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * (2.0 if y.sum().item() > 0 else 1.0)  # the line that an error names


def test_a_model_that_waits_for_the_gpu_is_refused_with_its_line() -> None:
    module = Waiting().to(CUDA)
    program = job_of(module, [torch.randn(4, 8, device=CUDA)], loss=mean_square).build(PLAIN)
    with pytest.raises(CannotCapture) as caught:
        program.capture()
    assert caught.value.line is not None
    assert caught.value.line.startswith("test_fast_gpu.py:")
    assert "the line that an error names" in caught.value.line
    program.run()  # without a graph
    assert program.losses[0].isfinite()


def test_two_shapes_of_a_llama() -> None:
    module, twin = llama(), llama()
    step = OptimisedStep(job_of(module, [tokens(0)]), replace(FAST, graph=True), ())
    batches = [tokens(seed, 64 if seed % 2 else 32) for seed in range(6)]
    losses = torch.stack([step(batch) for batch in batches])
    plain = job_of(twin, [tokens(0)])
    assert plain.optimizer is not None
    expected = []
    for batch in batches:
        plain.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=BF16):
            loss = own_loss(twin, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        plain.optimizer.step()
        expected.append(loss.detach())
    torch.testing.assert_close(losses, torch.stack(expected), rtol=1e-2, atol=0)


def test_shapes_with_an_optimizer_outside_use_their_own_gradients() -> None:
    module = nn.Linear(8, 8).to(CUDA)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    job = job_of(module, [torch.randn(4, 8, device=CUDA)], loss=mean_square)._replace(optimizer=optimizer)
    step = OptimisedStep(job, replace(PLAIN, graph=True), ())
    twin = copy.deepcopy(module)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    for number in range(6):
        torch.manual_seed(number)
        batch = torch.randn(4 if number % 2 else 16, 8, device=CUDA)
        step(batch)
        other.zero_grad()
        with torch.autocast("cuda", dtype=BF16):
            loss = mean_square(twin, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        other.step()
    for one, expected in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-3)


def test_memory_does_not_grow() -> None:
    module = llama()
    step = OptimisedStep(job_of(module, [tokens(0)]), replace(FAST, graph=True), ())
    for seed in range(3):
        step(tokens(seed))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for seed in range(20):
        step(tokens(seed))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before

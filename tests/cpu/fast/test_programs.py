"""Steps of a program train as the loop that people write: autocast, `torch.optim`, `clip_grad_norm_`."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from stepscope.fast.ladder import OptimiseJob
from stepscope.fast.program import Changes
from stepscope.nn.model import TransformerLM
from tests.cpu.fast.tiny import (
    ALL,
    MERGED,
    WEIGHTS,
    Loss,
    TwoLinears,
    check_gradients,
    distance,
    make_job,
    make_program,
    mean_square,
    next_tokens,
    normal,
    own_loss,
    tokens,
    train_plainly,
    train_program,
    twins,
)

LLAMA: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**LLAMA))  # type: ignore[no-untyped-call]


def qwen2() -> nn.Module:
    return Qwen2ForCausalLM(Qwen2Config(**LLAMA))  # type: ignore[no-untyped-call]


def gpt2() -> nn.Module:
    drops: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(  # type: ignore[no-untyped-call]
        GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False, **drops)
    )


def built_in() -> nn.Module:
    return TransformerLM(vocab=50, d_model=32, d_ff=48, num_layers=2, num_heads=4, num_kv_heads=2, max_context=16)


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 4))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv1d(5, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14, 4))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(16), TwoLinears(width=16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.layer(self.norm(x))[..., :16]
        return x


Case = tuple[Callable[[], nn.Module], Callable[[int], Tensor], Loss]


def rows(seed: int) -> Tensor:
    return normal(2, 5, 16, seed=seed)


CASES: dict[str, Case] = {
    "llama": (llama, tokens, own_loss),
    "qwen2": (qwen2, tokens, own_loss),
    "gpt2": (gpt2, tokens, own_loss),
    "built-in": (built_in, tokens, next_tokens),
    "sequential": (sequential, rows, mean_square),
    "encoder": (encoder, rows, mean_square),
    "convolutions": (convolutions, rows, mean_square),
    "twice": (Twice, rows, mean_square),
}
DONE = {
    "llama": (
        "attention: 2 calls of scaled_dot_product_attention replaced with flash_attention",
        "norms: 5 fused, 4 with the addition in front of them",
        "loss: cross entropy reads the logits in the precision of the product",
        "GEMMs: 10 products that share their input are merged",
        "activations: 2 SwiGLU read gate and up as one tensor",
        "RoPE: 2 layers rotate q and k, and split q, k and v, in one kernel",
    ),
    "gpt2": (
        "attention: 2 calls of scaled_dot_product_attention replaced with flash_attention",
        "norms: 5 fused, 4 with the addition in front of them",
        "loss: cross entropy reads the logits in the precision of the product",
    ),
    "sequential": ("norms: 1 fused, 0 with the addition in front of them",),
    "convolutions": (),
}
DONE["qwen2"] = DONE["llama"]


# The first call of GPT-2 logs a remark about its loss, which breaks the graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.compiler.reset()


@pytest.mark.parametrize("name", CASES)
def test_all_changes_keep_loss_and_gradients(name: str) -> None:
    build, batch_of, loss = CASES[name]
    done, _ = check_gradients(build(), batch_of(0), ALL, loss=loss)
    if name in DONE:
        assert tuple(done) == DONE[name]


@pytest.mark.parametrize("name", CASES)
def test_working_weights_train_as_autocast_does(name: str) -> None:
    """Bit for bit, except that products of other sizes add in another order."""
    build, batch_of, loss = CASES[name]
    model, twin = twins(build())
    fixed, batches = batch_of(0), [batch_of(step) for step in range(4)]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3, weight_decay=0.1) for one in (model, twin)]
    program = make_program(model, fixed, MERGED, loss=loss, optimizer=optimizers[0])
    losses = train_program(program, fixed, batches)
    expected = train_plainly(twin, optimizers[1], batches, loss=loss)
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=1e-4)
    assert program.weights.count > 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "encoder"])
def test_programs_in_fp32(name: str) -> None:
    build, batch_of, loss = CASES[name]
    done, _ = check_gradients(build(), batch_of(0), ALL, loss=loss, autocast=None)
    assert any("norms" in sentence for sentence in done)
    assert not any("GEMM" in sentence for sentence in done), "there are no working weights in fp32"


def train_both(
    changes: Changes,
    build: Callable[..., torch.optim.Optimizer],
    *,
    autocast: torch.dtype | None = torch.bfloat16,
    max_norm: float | None = None,
) -> tuple[Tensor, Tensor, float]:
    model, twin = twins(TwoLinears(bias=True))
    fixed, batches = normal(3, 8), [normal(3, 8, seed=step) for step in range(5)]
    program = make_program(
        model, fixed, changes, optimizer=build(model.parameters()), autocast=autocast, max_norm=max_norm
    )
    losses = train_program(program, fixed, batches)
    expected = train_plainly(twin, build(twin.parameters()), batches, autocast=autocast, max_norm=max_norm)
    return losses, expected, distance(model, twin)


def adam_with_l2(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)


def test_adam_with_l2() -> None:
    losses, expected, off = train_both(MERGED, adam_with_l2)
    assert torch.equal(losses, expected)
    assert off < 1e-6


@pytest.mark.parametrize("autocast", [torch.bfloat16, None], ids=["bf16", "fp32"])
@pytest.mark.parametrize("one_launch", [True, False])
def test_clipping(autocast: torch.dtype | None, one_launch: bool) -> None:
    def build(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01, eps=0.1)  # so that the scale of gradients matters

    changes = MERGED if one_launch else Changes()
    losses, expected, off = train_both(changes, build, autocast=autocast, max_norm=0.05)
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=0)
    assert off < 1e-5
    assert train_both(changes, build, autocast=autocast)[2] < 1e-5
    unclipped = train_both(changes, build, autocast=autocast)[0]
    assert not torch.allclose(losses, unclipped, rtol=1e-3)


class Steady(torch.optim.Optimizer):
    """An optimizer of someone's own, whose groups have no `lr`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"speed": 0.01})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["speed"] * parameter.grad.sign())


@pytest.mark.parametrize("build", [Steady, lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9)])
def test_other_optimizers_run_as_they_are(build: Callable[..., torch.optim.Optimizer]) -> None:
    changes = replace(ALL, one_launch=False, rewrites=replace(ALL.rewrites, working_weights=False))
    losses, expected, off = train_both(changes, build)
    torch.testing.assert_close(losses, expected, rtol=1e-2, atol=0)
    assert off < 0.03


@pytest.mark.parametrize("changes", [Changes(), WEIGHTS], ids=["plain", "one launch"])
def test_accumulation_is_the_whole_batch(changes: Changes) -> None:
    model, twin = twins(TwoLinears(bias=True))
    parts = [normal(3, 8, seed=step) for step in range(4)]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01, eps=0.1) for one in (model, twin)]
    program = make_job(model, parts, optimizer=optimizers[0], autocast=None).build(changes)
    for _ in range(3):
        program.run()
    expected = train_plainly(twin, optimizers[1], [torch.cat(parts)] * 3, autocast=None)
    torch.testing.assert_close(torch.stack(program.losses).mean(), expected[-1])
    assert distance(model, twin) < 1e-6


def test_gradients_stay_at_the_parameters_without_an_optimizer() -> None:
    model, twin = twins(TwoLinears())
    x = normal(3, 8)
    program = make_job(model, (x,), autocast=None).build(Changes())
    program.run()
    program.run()
    mean_square(twin, x).backward()  # type: ignore[no-untyped-call]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))  # type: ignore[arg-type]


def test_parameters_outside_the_model_are_trained_too() -> None:
    """Some losses have parameters."""
    model, scale = TwoLinears(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW([*model.parameters(), scale], lr=0.1)

    def loss_of(module: nn.Module, batch: Tensor) -> Tensor:
        return mean_square(module, batch) * scale

    job = OptimiseJob(
        module=model,
        optimizer=optimizer,
        loss_of=loss_of,
        batches=(normal(3, 8),),
        autocast=torch.bfloat16,
        device=torch.device("cpu"),
    )
    program = job.build(WEIGHTS)
    program.run()
    program.run()
    assert scale.item() == pytest.approx(0.8, abs=0.03)


def test_a_parameter_that_misses_a_step_is_left_out_of_it() -> None:
    class Skips(TwoLinears):
        skips = False

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) if self.skips else super().forward(x)

    model = Skips()
    program = make_program(model, normal(3, 8), WEIGHTS, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
    program.run()
    before = [one.detach().clone() for one in (model.first.weight, model.second.weight)]
    model.skips = True
    program.run()
    assert not torch.equal(model.first.weight, before[0])
    assert torch.equal(model.second.weight, before[1])
    model.skips = False
    program.run()
    assert not torch.equal(model.second.weight, before[1])


def test_llama_through_inductor() -> None:
    _, accuracy = check_gradients(llama(), tokens(), replace(ALL, compiler="inductor"), loss=own_loss)
    assert math.isfinite(accuracy.loss)

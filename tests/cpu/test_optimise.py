"""`stepscope.optimise`: a step that trains as a plain loop does, whatever was changed about it, and says what was."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stepscope
from stepscope.fast.ladder import Rung
from stepscope.fast.optimised_step import OptimisedStep, optimise

VOCAB, WIDTH = 64, 32
COMPILER = "aot_eager"  # traces and rewrites like Inductor, and compiles nothing


class Plain(nn.Module):
    """A user's model: attention, a norm and a gated layer, without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        normed = self.norm(x)
        q, k, v = (one(normed).unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits: Tensor = self.head(x + mixed.transpose(1, 2).flatten(2))
        return logits


class Waiting(Plain):
    """Reads a value on the CPU during forward, so it cannot be one graph."""

    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        return logits * 1.0 if logits.float().mean().item() > 0 else logits + 0.0


def own_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def make_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def own_batch(seed: int, *, batch: int = 2, length: int = 16) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def llama_batch(seed: int, **shape: int) -> dict[str, Tensor]:
    ids = own_batch(seed, **shape)
    return {"input_ids": ids, "labels": ids}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss if isinstance(batch, dict) else own_loss(model, batch)
    return loss


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[float]:
    losses = []
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer | None, example: Any, **more: Any) -> OptimisedStep:
    loss = None if isinstance(example, dict) else own_loss
    options: dict[str, Any] = {"loss": loss, "measure": False, "compiler": COMPILER, **more}
    return optimise(model, optimizer, example=example, **options)


KINDS = [pytest.param(make_llama, llama_batch, id="llama"), pytest.param(Plain, own_batch, id="own")]


@pytest.fixture(autouse=True)
def _same_weights() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Dynamo, about graph breaks
        yield
    torch.compiler.reset()


@pytest.mark.parametrize(("make", "batch"), KINDS)
def test_an_optimised_step_trains_like_the_plain_loop(make: Callable[[], nn.Module], batch: Callable[..., Any]) -> None:
    plain = make()
    model = copy.deepcopy(plain)
    batches = [batch(seed) for seed in (1, 2, 3, 4, 5)]
    expected = train_plainly(plain, adamw(plain), batches)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    step = make_step(model, adamw(model), batch(0))
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items()), "measuring has no effect"
    assert [float(step(one)) for one in batches] == pytest.approx(expected, rel=0.01)
    for name, one in plain.state_dict().items():
        moved = (one - before[name]).norm()
        assert (model.state_dict()[name] - one).norm() <= 0.15 * moved + 1e-6, name
    assert model.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize(("make", "batch"), KINDS)
def test_every_change_is_applied_and_checked(make: Callable[[], nn.Module], batch: Callable[..., Any]) -> None:
    model = make()
    step = make_step(model, adamw(model), batch(0))
    status = {rung.name: rung.status for rung in step.rungs}
    assert status.pop("graph") == "not applied"
    assert set(status.values()) == {"kept"}
    last = step.rungs[-1]
    assert last.accuracy is not None
    assert last.accuracy.passes
    assert last.accuracy.truth == "float64"
    assert any("flash_attention" in note for note in last.notes)


def test_changes_are_measured_one_by_one() -> None:
    model = Plain()
    seen: list[Rung] = []
    step = make_step(model, adamw(model), own_batch(0), measure=True, on_rung=seen.append)
    assert [rung.name for rung in step.rungs] == [rung.name for rung in seen]
    assert step.rungs[0].status == "start"
    measured = [rung for rung in step.rungs if rung.step_ms is not None]
    assert len(measured) > 3
    assert all(rung.accuracy is not None and rung.accuracy.passes for rung in measured)
    text = str(step)
    assert "the step as it is" in text
    assert "graph: CUDA graphs need a GPU" in text
    assert "against float64" in text
    assert repr(step).startswith("<OptimisedStep of Plain: ")


def test_another_shape_continues_the_same_training() -> None:
    plain = Plain()
    model = copy.deepcopy(plain)
    batches = [own_batch(1), own_batch(2, length=24), own_batch(3), own_batch(4, batch=1)]
    expected = train_plainly(plain, adamw(plain), batches)
    optimizer = adamw(model)
    step = make_step(model, optimizer, own_batch(0))
    assert [float(step(one)) for one in batches] == pytest.approx(expected, rel=0.01)
    state = optimizer.state_dict()["state"]
    assert {float(one["step"]) for one in state.values()} == {4.0}


def test_schedules_and_checkpoints_see_the_optimizer() -> None:
    plain = Plain()
    model = copy.deepcopy(plain)
    plain_optimizer, optimizer = adamw(plain), adamw(model)
    step = make_step(model, optimizer, own_batch(0))
    schedules = [torch.optim.lr_scheduler.StepLR(one, step_size=1, gamma=0.5) for one in (plain_optimizer, optimizer)]
    for seed in range(5):
        train_plainly(plain, plain_optimizer, [own_batch(seed)])
        step(own_batch(seed))
        for schedule in schedules:
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == plain_optimizer.param_groups[0]["lr"] < 1e-3
    saved, expected = optimizer.state_dict(), plain_optimizer.state_dict()
    assert {float(one["step"]) for one in saved["state"].values()} == {5.0}
    for number, one in expected["state"].items():
        error = (saved["state"][number]["exp_avg"] - one["exp_avg"]).norm()
        assert error <= 0.1 * one["exp_avg"].norm() + 1e-6
    fresh = adamw(model)
    fresh.load_state_dict(saved)  # as after a restart, with PyTorch's own loop
    train_plainly(model, fresh, [own_batch(9)])


def test_a_model_that_waits_for_a_value_still_works_on_a_cpu() -> None:
    plain = Waiting()
    model = copy.deepcopy(plain)
    batches = [own_batch(seed) for seed in (1, 2, 3)]
    expected = train_plainly(plain, adamw(plain), batches)
    step = make_step(model, adamw(model), own_batch(0))
    assert [float(step(one)) for one in batches] == pytest.approx(expected, rel=0.01)


def test_micro_batches_accumulate_and_clip() -> None:
    model = Plain()
    step = make_step(model, adamw(model), own_batch(0), micro_batches=2, max_norm=1.0)
    assert float(step(own_batch(1), own_batch(2))) == pytest.approx(4.2, abs=0.5)
    assert step.gradient_norm is not None
    with pytest.raises(ValueError, match="expected 2 batches, but got 1"):
        step(own_batch(1))


def test_without_an_optimizer_gradients_stay() -> None:
    model = Plain()
    step = make_step(model, None, own_batch(0))
    step(own_batch(1))
    assert model.head.weight.grad is not None


def test_a_model_without_a_loss_is_refused() -> None:
    model = Plain()
    with pytest.raises(ValueError, match=r"expected the model to return its loss.*pass loss=lambda"):
        optimise(model, adamw(model), example=own_batch(0), measure=False, compiler=COMPILER)


def test_a_wrapped_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = nn.DataParallel(Plain())
    with pytest.raises(ValueError, match="got a DataParallel, which communicates"):
        optimise(wrapped, None, example=own_batch(0))


@pytest.mark.parametrize(
    ("options", "message"), [({"precision": "fp8"}, "unknown precision"), ({"micro_batches": 0}, "at least 1")]
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimise(Plain(), None, example=own_batch(0), loss=own_loss, **options)


def test_the_public_name_is_the_function() -> None:
    assert stepscope.optimise is optimise
    assert stepscope.OptimisedStep is OptimisedStep

"""AdamW in one launch on a GPU: against float64, in CUDA graphs, and bitwise equal when repeated."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepscope.fast.capture import refusing_waits
from stepscope.kernels import Accumulator, AdamWUpdates, Hyper, OneLaunchAdamW, ParameterUpdate
from tests.cpu.accuracy import assert_as_accurate, normal
from tests.cpu.kernels.parameter_lists import (
    HYPERS,
    MAX_NORM,
    MIXED,
    Parameter,
    check_list,
    gradient_of,
    make_list,
    take_steps,
)

# A Transformer block of width 1024 with a vocabulary that no chunk divides, and vectors.
REAL = (
    Parameter(shape=(10007, 1024), gradient=torch.bfloat16, working=torch.bfloat16),
    *(Parameter(shape=(1024, 1024), gradient=torch.bfloat16, working=torch.bfloat16) for _ in range(4)),
    Parameter(shape=(4096, 1024), gradient=torch.bfloat16, working=torch.bfloat16, group=1),
    *(Parameter(shape=(1024,), group=1) for _ in range(3)),
)
SETTINGS: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.2}


@pytest.mark.parametrize("parameters", [MIXED, REAL], ids=["mixed", "real"])
@pytest.mark.parametrize("clip", [False, True], ids=["unclipped", "clipped"])
def test_steps_match_torch(clip: bool, parameters: tuple[Parameter, ...]) -> None:
    check_list(AdamWUpdates.launch, clip=clip, parameters=parameters, device="cuda")


def run_steps(*, graph: bool) -> list[Tensor]:
    """All results of a few steps with new gradients and learning rates, launched or replayed."""
    made = make_list(MIXED, "cuda")
    updates = AdamWUpdates(made.updates, HYPERS, max_norm=MAX_NORM)
    captured = torch.cuda.CUDAGraph()
    if graph:
        updates.bind(made.gradients)
        before = [x.clone() for update in made.updates for x in (update.master, update.exp_avg, update.exp_avg_sq)]
        updates.launch()
        with torch.cuda.graph(captured):
            updates.launch()
        after = [x for update in made.updates for x in (update.master, update.exp_avg, update.exp_avg_sq)]
        for x, value in zip(after, before, strict=True):
            x.copy_(value)
        updates.set_step(0)
    norms = take_steps(made, (lambda _: captured.replay()) if graph else AdamWUpdates.launch, updates)
    states = [x for update in made.updates for x in (update.master, update.exp_avg, update.exp_avg_sq)]
    working = [update.working for update in made.updates if update.working is not None]
    return [*states, *working, torch.tensor(norms), updates.steps]


def test_steps_repeat_bit_for_bit_in_a_graph_too() -> None:
    launched, again, replayed = run_steps(graph=False), run_steps(graph=False), run_steps(graph=True)
    assert all(torch.equal(a, b) for a, b in zip(launched, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(launched, replayed, strict=True))


def test_a_captured_step_sees_gradients_bound_later() -> None:
    made, other = make_list(MIXED[:2], "cuda"), make_list(MIXED[:2], "cuda")
    updates = AdamWUpdates(made.updates, HYPERS, max_norm=MAX_NORM)
    updates.bind(made.gradients)
    updates.launch()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        updates.launch()
    for index, (gradient, parameter) in enumerate(zip(other.gradients, other.parameters, strict=True)):
        gradient.copy_(gradient_of(index, 7, parameter))
    updates.bind(other.gradients)
    captured.replay()
    expected = torch.stack([gradient.double().square().sum() for gradient in other.gradients]).sum().sqrt()
    torch.testing.assert_close(updates.grad_norm.double(), expected, rtol=1e-6, atol=0)


def test_new_gradients_and_learning_rates_do_not_wait_for_the_gpu() -> None:
    made, other = make_list(MIXED, "cuda"), make_list(MIXED, "cuda")
    updates = AdamWUpdates(made.updates, HYPERS, max_norm=MAX_NORM)
    updates.bind(made.gradients)
    updates.launch()
    with refusing_waits():
        for step in range(5):
            updates.set_hypers([hyper._replace(lr=0.01 * step) for hyper in HYPERS])
            updates.bind((other if step % 2 else made).gradients)
            updates.launch()
    assert updates.steps.tolist() == [6, 6]


def test_tables_cannot_change_during_capture() -> None:
    made = make_list(MIXED[:2], "cuda")
    updates = AdamWUpdates(made.updates, HYPERS)
    updates.bind(made.gradients)
    updates.launch()
    moved = [gradient.clone() for gradient in made.gradients]
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        updates.launch()
        with pytest.raises(RuntimeError, match="bind gradients at new addresses"):
            updates.bind(moved)
        with pytest.raises(RuntimeError, match="change hyperparameters"):
            updates.set_hypers([Hyper(lr=0.5), Hyper(lr=0.5)])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_reaches_every_clipped_parameter(value: float) -> None:
    made = make_list(MIXED[:2], "cuda")
    made.gradients[1][7] = value
    updates = AdamWUpdates(made.updates, HYPERS, max_norm=1.0)
    updates.bind(made.gradients)
    updates.launch()
    assert not updates.grad_norm.isfinite()
    assert made.updates[1].master[7].isnan()
    if value != value:
        assert made.updates[0].master.isnan().all()


def test_more_than_two_billion_elements() -> None:
    """bf16 states: offsets must not wrap around in 32 bits."""
    count = 2**31 + 5000
    if torch.cuda.mem_get_info()[0] < 5 * 2 * count:
        pytest.skip("needs 22 GB of free GPU memory")
    tensors = [torch.zeros(count, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    tensors[3][-1], tensors[3][3] = 1.0, -1.0
    update = ParameterUpdate(master=tensors[0], exp_avg=tensors[1], exp_avg_sq=tensors[2])
    updates = AdamWUpdates([update], [Hyper(lr=0.5)], max_norm=100.0)
    updates.bind(tensors[3:])
    updates.launch()
    assert (tensors[0][-1].item(), tensors[0][3].item(), tensors[0][-2].item()) == (-0.5, 0.5, 0.0)
    assert updates.grad_norm.item() == pytest.approx(2**0.5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(normal(8, 64, seed=step).to(next(model.parameters()))).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        optimizer.step()


def make_model(dtype: torch.dtype, device: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 3)).to(device, dtype)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=index, std=0.3))
    return model


def values(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])


def test_optimizer_matches_torch_and_skips_missing_gradients() -> None:
    truth, plain, ours = (
        make_model(dtype, device)
        for dtype, device in ((torch.float64, "cpu"), (torch.float32, "cuda"), (torch.float32, "cuda"))
    )
    for model, build in ((truth, torch.optim.AdamW), (plain, torch.optim.AdamW), (ours, OneLaunchAdamW)):
        optimizer = build(model.parameters(), **SETTINGS)
        frozen = model[0].weight  # type: ignore[index]
        for steps, is_trained in ((range(2), True), (range(2, 5), False), (range(5, 7), True)):
            frozen.requires_grad = is_trained
            train(model, optimizer, steps)
        assert [optimizer.state[x]["step"].item() for x in model.parameters()] == [4, 7, 7, 7]
    assert_as_accurate(values(ours), values(plain), values(truth), name="parameters")


def test_optimizer_can_be_captured_and_its_state_loaded_by_torch() -> None:
    model, twin = make_model(torch.float32, "cuda"), make_model(torch.float32, "cuda")
    optimizer, other = OneLaunchAdamW(model.parameters(), **SETTINGS), torch.optim.AdamW(twin.parameters(), **SETTINGS)
    train(model, optimizer, range(2))
    train(twin, other, range(2))
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        optimizer.step()
    for _ in range(3):
        captured.replay()
        other.step()
    torch.testing.assert_close(values(model), values(twin), rtol=1e-4, atol=1e-5)
    continued = torch.optim.AdamW(model.parameters(), lr=1.0)
    continued.load_state_dict(optimizer.state_dict())
    assert {state["step"].item() for state in continued.state.values()} == {5}
    train(model, continued, range(2, 4))
    train(twin, other, range(2, 4))
    torch.testing.assert_close(values(model), values(twin), rtol=1e-4, atol=1e-5)


def test_gradient_sums_can_be_captured() -> None:
    shapes = [(1000, 77), (7,)]
    totals = Accumulator(shapes, device="cuda")
    gradients = [normal(*shape, seed=1).to("cuda", torch.bfloat16) for shape in shapes]
    for overwrite in (True, False):
        totals.add(gradients, overwrite=overwrite)
    first, later = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        totals.add(gradients, overwrite=True)
    with torch.cuda.graph(later):
        totals.add(gradients, overwrite=False)
    expected = [torch.zeros(shape, device="cuda") for shape in shapes]
    for micro_batch in range(3):
        for index, gradient in enumerate(gradients):
            gradient.copy_(normal(*gradient.shape, seed=10 + 2 * micro_batch + index))
            expected[index] += gradient.float()
        (first if micro_batch == 0 else later).replay()
    assert all(torch.equal(a, b) for a, b in zip(totals.sums, expected, strict=True))

"""Working weights: copies of parameters in low precision, and gradients that come back to the right ones."""

import copy

import pytest
import torch
from torch import Tensor, nn

from stepscope.fast.weights import WorkingWeights
from tests.cpu.fast.tiny import (
    ALL,
    BF16,
    MERGED,
    WEIGHTS,
    Function,
    TwoLinears,
    check_gradients,
    distance,
    make_program,
    normal,
    tokens,
    train_plainly,
    train_program,
    twins,
)

# Dynamo looks at the gradients of what one graph gives to the next.
graph_breaks = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_copies_are_the_rounded_parameters_and_the_state_dict_does_not_change() -> None:
    model = TwoLinears()
    before = copy.deepcopy(model.state_dict())
    program = make_program(model, normal(3, 8), MERGED)
    program.differentiate()
    assert program.weights.merged == [("first.weight", "second.weight")]
    for parameter in model.parameters():
        working = program.weights.copy_of(parameter)
        assert working is not None
        assert torch.equal(working, parameter.detach().to(BF16))
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_gradients_of_a_merged_product_belong_to_the_right_parameters() -> None:
    model, twin = twins(TwoLinears(bias=True))
    x = normal(3, 8)
    found = make_program(model, x, MERGED).differentiate()
    train_plainly(twin, torch.optim.SGD(twin.parameters(), lr=0.0), [x])
    for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert plain.grad is not None
        assert torch.equal(found[ours].float(), plain.grad)


@pytest.mark.parametrize("how", ["load_state_dict", "in place"])
def test_changed_parameters_are_copied_again(how: str) -> None:
    model, other = TwoLinears(), TwoLinears()
    x = normal(3, 8)
    program = make_program(model, x, MERGED)
    program.run()
    if how == "load_state_dict":
        model.load_state_dict(other.state_dict())
    else:
        with torch.no_grad():
            for one, value in zip(model.parameters(), other.parameters(), strict=True):
                one.copy_(value)
    program.run()
    with torch.autocast("cpu", dtype=BF16), torch.no_grad():
        expected = other(x).float().square().mean()
    assert torch.equal(program.losses[0], expected)


class Tied(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.breaks = breaks

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.breaks:
            torch._dynamo.graph_break()
        logits: Tensor = self.head(x)
        return logits


def test_tied_weights_stay_whole() -> None:
    model = Tied()
    program = make_program(model, tokens(), WEIGHTS)
    program.differentiate()
    assert program.weights.count == 0
    check_gradients(model, tokens(), WEIGHTS)


@graph_breaks
def test_a_weight_that_is_tied_across_a_graph_break_gets_both_gradients() -> None:
    """The head reads a working weight, the embedding the parameter."""
    check_gradients(Tied(breaks=True), tokens(), WEIGHTS)


@graph_breaks
def test_layers_that_two_graphs_merge_differently() -> None:
    class Model(TwoLinears):
        def forward(self, x: Tensor) -> Tensor:
            both = super().forward(x)[..., :8]
            torch._dynamo.graph_break()
            result: Tensor = both + self.first(both)
            return result

    check_gradients(Model(), normal(3, 8), MERGED)


def test_a_parameter_that_is_not_only_multiplied_is_not_cast() -> None:
    model = Function(lambda x, w: nn.functional.linear(x, w) + w.sum(), w=(8, 8))
    program = make_program(model, normal(3, 8), WEIGHTS)
    program.differentiate()
    assert program.weights.count == 0
    check_gradients(model, normal(3, 8), WEIGHTS)


def test_a_parameter_in_a_region_without_autocast_is_not_cast() -> None:
    def compute(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            wide = nn.functional.linear(x, w)
        return wide + nn.functional.linear(x, v)

    model = Function(compute, w=(8, 8), v=(8, 8))
    program = make_program(model, normal(3, 8), MERGED)
    program.differentiate()
    assert program.weights.count == 1
    check_gradients(model, normal(3, 8), MERGED)


def test_frozen_parameters_do_not_change() -> None:
    model, twin = twins(TwoLinears(bias=True))
    for one in (model, twin):
        one.first.weight.requires_grad = False  # type: ignore[union-attr]
        one.second.bias.requires_grad = False  # type: ignore[union-attr]
    fixed = normal(3, 8)
    batches = [normal(3, 8, seed=step) for step in range(3)]
    trained = [one for one in model.parameters() if one.requires_grad]
    program = make_program(model, fixed, MERGED, optimizer=torch.optim.AdamW(trained, lr=0.1))
    losses = train_program(program, fixed, batches)
    expected = train_plainly(twin, torch.optim.AdamW(twin.parameters(), lr=0.1), batches)
    assert torch.equal(losses, expected)
    assert distance(model, twin) == 0


def test_groups_of_the_optimizer_within_one_merged_product() -> None:
    model, twin = twins(TwoLinears())
    optimizers = [
        torch.optim.AdamW(
            [
                {"params": [one.first.weight], "lr": 0.1, "weight_decay": 0.0},  # type: ignore[union-attr]
                {"params": [one.second.weight], "lr": 0.01, "weight_decay": 0.5},  # type: ignore[union-attr]
            ]
        )
        for one in (model, twin)
    ]
    fixed, batches = normal(3, 8), [normal(3, 8, seed=step) for step in range(4)]
    program = make_program(model, fixed, MERGED, optimizer=optimizers[0])
    losses = train_program(program, fixed, batches)
    assert program.weights.merged
    assert torch.equal(losses, train_plainly(twin, optimizers[1], batches))
    assert distance(model, twin) < 1e-6


def test_results_that_are_changed_in_place_are_not_merged() -> None:
    def compute(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        q = nn.functional.linear(x, w)
        q *= 0.5
        return q + nn.functional.relu(nn.functional.linear(x, v), inplace=True)

    done, _ = check_gradients(Function(compute, w=(8, 8), v=(8, 8)), normal(3, 8), ALL)
    assert done == []


def test_products_are_not_merged_across_no_grad() -> None:
    def compute(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            scale = nn.functional.linear(x, w)
        return scale * nn.functional.linear(x, v) + w.new_ones(())

    model = Function(compute, w=(8, 8), v=(8, 8))
    model.w.requires_grad = True
    program = make_program(model, normal(3, 8), MERGED)
    found = program.differentiate()
    assert program.backend.done == []
    assert {program.weights.names[one] for one in found} == {"v"}


def test_a_leaf_follows_a_parameter_that_is_frozen_later() -> None:
    parameter = nn.Parameter(normal(4, 4))
    weights = WorkingWeights({"w": parameter})
    assert weights.leaf((parameter,), BF16).requires_grad
    parameter.requires_grad = False
    assert not weights.leaf((parameter,), BF16).requires_grad

"""Which rank is reported as different, and the first difference."""

import pytest
import torch
from torch import nn

from stepscope.errors import StepscopeError
from stepscope.parallel.agreement import describe_inputs, describe_model, require_agreement
from stepscope.parallel.communicator import Communicator


class FakeRanks(Communicator):
    """The answers of all ranks, known in advance."""

    def __init__(self, descriptions: list[list[str]]) -> None:
        self._descriptions = descriptions

    def share_objects(self, value: object, name: str) -> list[object]:  # type: ignore[override]  # noqa: ARG002
        if isinstance(value, str):
            return [hash(tuple(lines)) for lines in self._descriptions]
        return list(self._descriptions)


@pytest.mark.parametrize(
    ("descriptions", "odd", "right", "lines"),
    [
        ([["a"], ["b"]], 1, 0, ("a", "b")),
        ([["b"], ["a"], ["a"]], 0, 1, ("a", "b")),
        ([["a", "x"], ["a", "x"], ["a", "y"], ["a", "x"]], 2, 0, ("x", "y")),
        ([["a"], ["a", "x"]], 1, 0, ("nothing", "x")),
    ],
)
def test_rank_that_differs_from_most_is_named(
    descriptions: list[list[str]], odd: int, right: int, lines: tuple[str, str]
) -> None:
    with pytest.raises(StepscopeError, match=f"thing mismatch: rank `{odd}` differs from rank `{right}`") as caught:
        require_agreement(FakeRanks(descriptions), descriptions[0], "thing", hint="look")
    assert caught.value.detail.splitlines()[1:] == [f"rank {right}: {lines[0]}", f"rank {odd}: {lines[1]}"]


def test_ranks_that_agree_do_not_raise() -> None:
    require_agreement(FakeRanks([["a"], ["a"]]), ["a"], "thing", hint="look")


def test_model_is_described_under_each_of_its_names() -> None:
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(2, 3).t())
    module.b = module.a
    module.c = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16), requires_grad=False)
    module.register_buffer("d", torch.zeros(4, dtype=torch.bool), persistent=False)
    assert describe_model(module) == [
        "parameter `a`: float32 (3, 2), strides (1, 3), trained",
        "parameter `b`: the same as `a`",
        "parameter `c`: bfloat16 (1,), frozen",
        "buffer `d`: bool (4,)",
    ]


def test_inputs_are_found_in_any_container() -> None:
    x = torch.zeros(2)
    assert describe_inputs((x, 3, [x, {"k": x}]), {"mask": None, "y": (x,)}) == [
        "argument `0`: float32 (2,)",
        "argument `2[0]`: float32 (2,)",
        "argument `2[1]['k']`: float32 (2,)",
        "argument `y[0]`: float32 (2,)",
    ]

"""Tokens per expert, counted in a step of a real model."""

import torch
from torch import nn
from torch.nn.modules import module

from stepscope.step.expert_routing import counting_tokens, find_experts


class TinyExperts(nn.Module):
    """Experts as transformers calls them: with the chosen ones of every token."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, _weights: torch.Tensor) -> torch.Tensor:
        return hidden + chosen.sum()


class TinyMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = TinyExperts(5)
        self.other = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.experts(self.other(hidden), chosen, chosen)
        return mixed


def test_tokens_are_counted_by_expert() -> None:
    model = TinyMixture()
    experts = find_experts(model.named_modules())
    assert list(experts.values()) == ["experts"]
    with counting_tokens(experts) as tokens:
        for chosen in ([[0, 1], [1, 3]], [[1, 0], [1, 5]]):  # 5 stands for an expert elsewhere
            model(torch.zeros(2, 4), torch.tensor(chosen))
    assert tokens.count() == {"experts": (2, 4, 0, 1, 0)}


def test_the_hook_is_gone_afterwards() -> None:
    model = TinyMixture()
    with counting_tokens(find_experts(model.named_modules())) as tokens:
        pass
    model(torch.zeros(2, 4), torch.tensor([[0, 1], [1, 3]]))
    assert tokens.count() == {}
    assert not model.experts._forward_pre_hooks


def test_a_compiled_model_is_left_alone() -> None:
    model = TinyMixture()
    model.other.compile()
    assert find_experts(model.named_modules()) == {}


def test_a_model_without_experts_gets_no_hook() -> None:
    with counting_tokens({}) as tokens:
        assert not module._global_forward_pre_hooks
    assert tokens.count() == {}

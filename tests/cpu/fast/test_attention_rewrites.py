"""Calls of `scaled_dot_product_attention` become `flash_attention` where they say the same, and nowhere else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stepscope.fast.program import Changes
from stepscope.fast.rewrites import Rewrites
from tests.cpu.fast.tiny import Function, check_gradients, make_program, normal, rewritten_nodes

ATTENTION = Changes(rewrites=Rewrites(attention=True))
REPLACED = ["attention: 1 call of scaled_dot_product_attention replaced with flash_attention"]
SDPA = nn.functional.scaled_dot_product_attention
LENGTH = 6


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


def heads(x: Tensor, count: int) -> Tensor:
    return x.reshape(*x.shape[:-1], count, 4).transpose(1, 2)


def attending(attend: Callable[..., Tensor], *, groups: int = 2) -> nn.Module:
    """A model with four query heads of size four, and `attend` for q, k and v."""

    def compute(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(heads(x @ q, 4), heads(x @ k, groups), heads(x @ v, groups))

    return Function(compute, q=(8, 16), k=(8, 4 * groups), v=(8, 4 * groups))


def repeat(x: Tensor, times: int) -> Tensor:
    """As `repeat_kv` of `transformers`."""
    batch, groups, length, size = x.shape
    return x[:, :, None, :, :].expand(batch, groups, times, length, size).reshape(batch, groups * times, length, size)


def causal_mask(dtype: torch.dtype) -> Tensor:
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    hidden = torch.zeros(LENGTH, LENGTH, dtype=torch.float32).masked_fill(~visible, -torch.inf)
    return visible if dtype == torch.bool else hidden.to(dtype)


def with_keywords(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(query=q, key=repeat(k, 2), value=repeat(v, 2), is_causal=True, scale=0.3)


ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "repeated heads": lambda q, k, v: SDPA(q, repeat(k, 2), repeat(v, 2), is_causal=True),
    "grouped heads": lambda q, k, v: SDPA(q, k, v, is_causal=True, enable_gqa=True),
    "keywords and scale": with_keywords,
    "boolean mask": lambda q, k, v: SDPA(q, k, v, attn_mask=causal_mask(torch.bool), enable_gqa=True),
    "float mask": lambda q, k, v: SDPA(q, k, v, attn_mask=causal_mask(torch.float32).to(q.dtype), enable_gqa=True),
    "empty mask": lambda q, k, v: SDPA(q, k, v, attn_mask=torch.zeros(1, 1, dtype=q.dtype), enable_gqa=True),
    "fewer queries": lambda q, k, v: SDPA(q[:, :, :3], k, v, enable_gqa=True),
}
KEPT: dict[str, Callable[..., Tensor]] = {
    "fewer causal queries": lambda q, k, v: SDPA(q[:, :, :3], k, v, is_causal=True, enable_gqa=True),
    "sliding window": lambda q, k, v: SDPA(q, k, v, attn_mask=causal_mask(torch.bool).triu(-2), enable_gqa=True),
    "a bias": lambda q, k, v: SDPA(
        q, k, v, attn_mask=-torch.ones(LENGTH, LENGTH, dtype=q.dtype).triu(1), enable_gqa=True
    ),
    "one mask per head": lambda q, k, v: SDPA(
        q,
        k,
        v,
        attn_mask=torch.stack([causal_mask(torch.bool)] * 3 + [torch.ones(LENGTH, LENGTH, dtype=torch.bool)]),
        enable_gqa=True,
    ),
    "padding": lambda q, k, v: SDPA(q, k, v, attn_mask=(q[:, :1, :, :1] > -9).transpose(2, 3), enable_gqa=True),
    "one key for the whole batch": lambda q, k, v: SDPA(q, repeat(k, 2)[:1], repeat(v, 2)[:1]),
    "a negative scale": lambda q, k, v: SDPA(q, k, v, scale=-0.5, enable_gqa=True),
}


@pytest.mark.parametrize("autocast", [torch.bfloat16, None], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_is_replaced(name: str, autocast: torch.dtype | None) -> None:
    done, _ = check_gradients(attending(ATTENTIONS[name]), normal(2, LENGTH, 8), ATTENTION, autocast=autocast)
    assert done == REPLACED


@pytest.mark.parametrize("name", KEPT)
def test_attention_is_kept(name: str) -> None:
    done, _ = check_gradients(attending(KEPT[name]), normal(2, LENGTH, 8), ATTENTION)
    assert len(done) == 1
    assert done[0].startswith("attention: kept as it is, because")


def test_repetitions_that_also_repeat_the_batch_stay() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x[:1][:, :, None, :, :].expand(2, 2, 2, LENGTH, 4).reshape(2, 4, LENGTH, 4) for x in (k, v))
        return SDPA(q, k, v)

    done, _ = check_gradients(attending(attend), normal(2, LENGTH, 8), ATTENTION)
    assert done == REPLACED


def test_dropout_keeps_attention_but_not_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask that is a tensor, PyTorch can choose a fused kernel."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(q, k, v, attn_mask=causal_mask(torch.bool), dropout_p=0.5, enable_gqa=True)

    program = make_program(attending(attend), normal(2, LENGTH, 8), ATTENTION)
    (call,) = [node for node in rewritten_nodes(program, monkeypatch) if node.target is SDPA]
    assert program.backend.done == ["attention: kept as it is, because it has dropout"]
    assert call.kwargs["is_causal"] is True
    assert call.kwargs["attn_mask"] is None
    assert call.kwargs["dropout_p"] == 0.5

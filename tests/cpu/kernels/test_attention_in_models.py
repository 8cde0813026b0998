"""Our attention inside models: the built-in one through `--attention`, and those of `transformers` by name."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from stepscope import cost
from stepscope.explain.memory.saved import saved_and_predicted
from stepscope.kernels.attention import chosen_backends
from stepscope.kernels.attention.transformers import register
from stepscope.measure.flops import count_forward_flops
from stepscope.spec import Attention, build_case
from stepscope.step import Step, build
from tests.cpu.saved import saved_by

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"batch": 2, "context": 24, "device": "cpu", "mode": "forward-backward"}
BUILT_IN: dict[str, Any] = {
    **SMALL,
    "vocab": 50,
    "d_model": 32,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
ON_CPU = ("sdpa", "flash", "tiled")


def make(attention: str, **settings: Any) -> Step:
    return build(build_case({**settings, "attention": attention}).workload, CPU)


def gradients(step: Step) -> list[Tensor]:
    step.run()
    return [p.grad for p in step.module.parameters() if p.grad is not None]


def assert_close(ours: list[Tensor], theirs: list[Tensor], limit: float) -> None:
    assert len(ours) == len(theirs) > 0
    assert all((a - b).abs().max() <= limit * b.abs().max() for a, b in zip(ours, theirs, strict=True))


# --- The built-in model ---


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ON_CPU)
def test_built_in_model_trains_the_same_with_any_attention(attention: str, precision: str) -> None:
    ours = gradients(make(attention, **BUILT_IN, precision=precision))
    theirs = gradients(make("naive", **BUILT_IN, precision=precision))
    assert_close(ours, theirs, 1e-4 if precision == "fp32" else 0.1)


def test_flash_records_the_chosen_backend() -> None:
    before = chosen_backends().get(("sdpa", ""), 0)
    make("flash", **BUILT_IN).run()
    assert chosen_backends()["sdpa", ""] == before + 2


@pytest.mark.parametrize("attention", ["triton", "hopper"])
def test_kernel_that_cannot_run_here_raises(attention: str) -> None:
    with pytest.raises(ValueError, match=f"`{attention}` cannot run this: it requires .* but the tensors are on cpu"):
        make(attention, **BUILT_IN).run()


@pytest.mark.parametrize("attention", ["tiled", "flash"])
def test_flops_are_counted_as_for_sdpa(attention: str) -> None:
    assert count_forward_flops(make(attention, **BUILT_IN)) == count_forward_flops(make("sdpa", **BUILT_IN))


@pytest.mark.parametrize("attention", ["tiled", "flash"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_saved_bytes_match_the_formula(attention: str, precision: str) -> None:
    chosen = build_case({**BUILT_IN, "attention": attention, "precision": precision})
    table = saved_and_predicted(saved_by(chosen.workload), cost.activations_of(chosen.workload))
    assert [row[0] for row in table.rows if row[-1] != 0] == []


@pytest.mark.parametrize("attention", get_args(Attention))
def test_every_attention_has_a_name_in_transformers(attention: str) -> None:
    step = make(attention, **SMALL, hf="llama", set=LLAMA)
    name = step.module.config._attn_implementation  # type: ignore[union-attr]
    assert name == {"naive": "eager", "sdpa": "sdpa", "flash": "stepscope"}.get(attention, f"stepscope-{attention}")


# --- transformers ---


IDS_BL = torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(0))


def model_of(kind: str, attention: str, **fields: Any) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **fields)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("backend", ["auto", "tiled"])
def test_llama_trains_as_with_sdpa(backend: str) -> None:
    name = register(backend)
    losses = []
    for attention in ("sdpa", name):
        model = model_of("llama", attention, **LLAMA)
        output = model(input_ids=IDS_BL, labels=IDS_BL, use_cache=False)
        output.loss.backward()
        losses.append([output.logits, *(p.grad for p in model.parameters())])
    assert_close(losses[1], losses[0], 1e-4)


def test_llama_decodes_as_with_sdpa() -> None:
    """One token at a time, and several at once with a cache: the mask is aligned with the last key."""
    whole = model_of("llama", "sdpa", **LLAMA)(input_ids=IDS_BL).logits
    model = model_of("llama", register("tiled"), **LLAMA)
    cache, parts = None, []
    for part in (IDS_BL[:, :9], IDS_BL[:, 9:10], IDS_BL[:, 10:]):
        output = model(input_ids=part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    assert_close([torch.cat(parts, dim=1)], [whole], 1e-4)


def test_scale_of_the_model_is_kept() -> None:
    fields = {**LLAMA, "attention_multiplier": 8.0}  # 1/sqrt(D) is 0.35
    ours, theirs = (
        model_of("granite", name, **fields)(input_ids=IDS_BL).logits for name in (register("tiled"), "sdpa")
    )
    assert_close([ours], [theirs], 1e-4)


def test_mask_that_hides_nothing_is_ignored() -> None:
    model = model_of("llama", register("tiled"), **LLAMA)
    plain = model(input_ids=IDS_BL).logits
    assert torch.equal(model(input_ids=IDS_BL, attention_mask=torch.ones_like(IDS_BL)).logits, plain)


def padded() -> dict[str, Tensor]:
    mask_BL = torch.ones_like(IDS_BL)
    mask_BL[0, :3] = 0
    return {"attention_mask": mask_BL}


def packed() -> dict[str, Any]:
    places_L = torch.cat((torch.arange(9), torch.arange(IDS_BL.shape[1] - 9)))
    return {"position_ids": places_L.expand_as(IDS_BL), "use_cache": False}


def written_out() -> dict[str, Tensor]:
    length = IDS_BL.shape[1]
    return {"attention_mask": torch.ones(2, 1, length, length, dtype=torch.bool).tril()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (padded, "not support padding, but `attention_mask` has some; use `attn_implementation='sdpa'`"),
        (packed, "not support masks, but the model creates one for packed sequences"),
        (written_out, "not support `attention_mask`"),
    ],
)
def test_masks_raise_and_are_never_dropped(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_of("llama", register(), **LLAMA)(input_ids=IDS_BL, **arguments())


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("mistral", {**LLAMA, "sliding_window": 8}, "not support sliding windows or chunks, but the model uses 8"),
        ("gemma2", {**LLAMA, "head_dim": 8}, "not support `softcap` .softcapping of scores."),
        ("llama", {**LLAMA, "attention_dropout": 0.1}, "not support dropout, but the model requires 0.1"),
    ],
)
def test_unsupported_features_raise(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_of(kind, register(), **fields)(input_ids=IDS_BL)


def test_compiled_llama_checks_positions_at_run_time() -> None:
    torch._dynamo.reset()
    model = model_of("llama", register("tiled"), **{**LLAMA, "num_hidden_layers": 1})
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    plain = model(input_ids=IDS_BL, use_cache=False).logits
    assert_close([compiled(input_ids=IDS_BL, use_cache=False).logits], [plain], 1e-5)
    with pytest.raises(RuntimeError, match="not support packed sequences"):
        compiled(input_ids=IDS_BL, **packed())

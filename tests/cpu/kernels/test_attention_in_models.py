"""Our attention inside models: the built-in one through `--attention`, and those of `transformers` by name."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask

from stepscope import cost
from stepscope.explain.memory.saved import saved_and_predicted
from stepscope.kernels.attention import chosen_backends
from stepscope.kernels.attention.transformers import _attend, register
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
    length = IDS_BL.shape[1]
    rows = [torch.cat((torch.arange(split), torch.arange(length - split))) for split in (9, 4)]
    return {"position_ids": torch.stack(rows), "use_cache": False}


def written_out() -> dict[str, Tensor]:
    length = IDS_BL.shape[1]
    return {"attention_mask": torch.ones(2, 1, length, length, dtype=torch.bool).tril()}


# --- What models add to plain attention ---

WINDOW = 6
LIMIT = 1e-4
GEMMA = {**LLAMA, "head_dim": 8, "query_pre_attn_scalar": 16, "sliding_window": WINDOW, "initializer_range": 0.2}
# q and k have 8 + 4 columns, v has 6. Only the first layer has no experts.
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {**LLAMA, "sliding_window": WINDOW}),
    "gemma 2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 0.5}),
    "gemma 3": ("gemma3_text", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt-oss": ("gpt_oss", {**LLAMA, **EXPERTS, "head_dim": 8, "sliding_window": WINDOW}),
    "phimoe": ("phimoe", {**LLAMA, **EXPERTS, "sliding_window": WINDOW}),  # tells its window to the mask only
    "llama": ("llama", LLAMA),
    "deepseek v2": ("deepseek_v2", {**LLAMA, **LATENT}),
    "deepseek v3": ("deepseek_v3", {**LLAMA, **LATENT}),
}


def logits_and_gradients(name: str, attention: str, **arguments: Any) -> list[Tensor]:
    """Of a model with sinks that are not all zero."""
    kind, fields = TINY[name]
    model = model_of(kind, attention, **fields)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "sinks" in parameter_name:
                parameter.add_(torch.arange(len(parameter)) - 1)
    output = model(**{"input_ids": IDS_BL, "use_cache": False, **arguments})
    upstream = torch.randn(output.logits.shape, generator=torch.Generator().manual_seed(1))
    output.logits.backward(upstream)
    return [output.logits, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("backend", ["tiled", "naive"])
@pytest.mark.parametrize("name", TINY)
def test_model_trains_as_with_eager(name: str, backend: str) -> None:
    ours, theirs = (logits_and_gradients(name, attention) for attention in (register(backend), "eager"))
    assert_close(ours, theirs, LIMIT)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("mistral", "sliding_window", None),
        ("gemma 2", "attn_logit_softcapping", None),
        ("gemma 3", "sliding_window", 40),
        ("gpt-oss", "sliding_window", 40),
        ("phimoe", "sliding_window", None),
    ],
)
def test_extras_matter_in_these_models(
    name: str, field: str, value: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the comparison above can fail."""
    ours = logits_and_gradients(name, register("tiled"))[0]
    kind, fields = TINY[name]
    monkeypatch.setitem(TINY, name, (kind, {**fields, field: value}))
    without = logits_and_gradients(name, register("tiled"))[0]
    assert (ours - without).abs().max() > 10 * LIMIT * ours.abs().max()


@pytest.mark.parametrize("name", TINY)
def test_packed_batch_trains_as_with_eager(name: str) -> None:
    """Each row packed in its own way, recognized by positions that restart."""
    ours, theirs = (logits_and_gradients(name, attention, **packed()) for attention in (register("tiled"), "eager"))
    assert_close(ours, theirs, LIMIT)


def cu_seq_lens(*starts: int) -> dict[str, Any]:
    """As `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` passes them."""
    cu = torch.tensor(starts, dtype=torch.int32)
    longest = int(cu.diff().max())
    return {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu.clone(), "max_length_q": longest, "max_length_k": longest}


def test_cu_seq_lens_separate_documents() -> None:
    packed_row = {"input_ids": IDS_BL[:1], "position_ids": packed()["position_ids"][:1]}
    theirs = logits_and_gradients("llama", "eager", **packed_row)
    ours = logits_and_gradients("llama", register("tiled"), **packed_row, **cu_seq_lens(0, 9, 17))
    assert_close(ours, theirs, LIMIT)
    others = logits_and_gradients("llama", register("tiled"), **packed_row, **cu_seq_lens(0, 8, 17))
    assert (others[0] - theirs[0]).abs().max() > 10 * LIMIT * theirs[0].abs().max()


def test_refilled_cu_seq_lens_are_read_again() -> None:
    model = model_of("llama", register("tiled"), **LLAMA)
    arguments = cu_seq_lens(0, 9, 17)
    before = model(input_ids=IDS_BL[:1], **arguments).logits
    assert torch.equal(model(input_ids=IDS_BL[:1], **arguments).logits, before)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        arguments[name][1] = 4
    assert not torch.equal(model(input_ids=IDS_BL[:1], **arguments).logits, before)


def test_keys_that_are_packed_in_another_way_are_refused() -> None:
    model = model_of("llama", register("tiled"), **LLAMA)
    arguments = cu_seq_lens(0, 9, 17) | {"cu_seq_lens_k": torch.tensor([0, 4, 17], dtype=torch.int32)}
    with pytest.raises(RuntimeError, match="requires `cu_seq_lens_k` to be the same"):
        model(input_ids=IDS_BL[:1], **arguments)


def test_encoder_with_windows_on_both_sides() -> None:
    fields = {**LLAMA, "local_attention": 4, "global_attn_every_n_layers": 2, "attention_dropout": 0.0}
    theirs, ours = (
        AutoModel.from_config(AutoConfig.for_model("modernbert", **fields, pad_token_id=0), attn_implementation=name)  # type: ignore[no-untyped-call]
        for name in ("eager", register("tiled"))
    )
    ours.load_state_dict(theirs.state_dict())
    results = [model.eval()(input_ids=IDS_BL).last_hidden_state for model in (ours, theirs)]
    assert_close(results[:1], results[1:], 1e-4)


@pytest.mark.parametrize("name", ["mistral", "gpt-oss", "gemma 2"])
def test_windows_in_decoding(name: str) -> None:
    """With a cache that keeps only the keys of the window."""
    kind, fields = TINY[name]
    whole = model_of(kind, "eager", **fields)(input_ids=IDS_BL).logits
    model = model_of(kind, register("tiled"), **fields)
    cache, parts = None, []
    for part in (IDS_BL[:, :9], IDS_BL[:, 9:10], IDS_BL[:, 10:11], IDS_BL[:, 11:]):
        output = model(input_ids=part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    assert_close([torch.cat(parts, dim=1)], [whole], 1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (padded, "not support padding, but `attention_mask` has some; use `attn_implementation='sdpa'`"),
        (written_out, "not support `attention_mask` with four dimensions"),
        (lambda: {**cu_seq_lens(0, 17), "cu_seq_lens_k": None}, "requires `cu_seq_lens_k` to be the same"),
        (lambda: cu_seq_lens(0, 9, 17), "`documents` to have shape .2, 2, 17."),
    ],
    ids=["padded", "written out", "keys of their own", "two rows"],
)
def test_masks_raise_and_are_never_dropped(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_of("llama", register(), **LLAMA)(input_ids=IDS_BL, **arguments())


CHUNKED = {**LLAMA, **EXPERTS, "head_dim": 8, "attention_chunk_size": 6, "intermediate_size_mlp": 48}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("llama4_text", CHUNKED, "but the model uses another mask"),
        ("gemma3_text", {**GEMMA, "use_bidirectional_attention": True}, "but the model uses another mask"),
        ("llama", {**LLAMA, "attention_dropout": 0.1}, "not support dropout, but the model requires 0.1"),
    ],
    ids=["chunks", "both sides", "dropout"],
)
def test_unsupported_features_raise(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_of(kind, register(), **fields)(input_ids=IDS_BL)


def test_block_of_an_image_raises() -> None:
    """Its tokens see each other, before and after."""
    arguments: dict[str, Any] = {
        "config": model_of("llama", register(), **LLAMA).config,
        "inputs_embeds": torch.zeros(1, 8, 32),
        "attention_mask": None,
        "past_key_values": None,
    }
    create_causal_mask(**arguments, block_sequence_ids=torch.full((1, 8), -1))
    with pytest.raises(ValueError, match="but the model uses another mask"):
        create_causal_mask(**arguments, block_sequence_ids=torch.tensor([[-1, -1, 0, 0, 0, -1, -1, -1]]))


def test_window_that_only_the_layer_knows_raises() -> None:
    q = torch.zeros(1, 2, 8, 4)
    with pytest.raises(ValueError, match="a `sliding_window` of 4, but the mask of the model has none"):
        _attend(nn.Identity(), q, q, q, None, backend="tiled", sliding_window=4)


def compiled_logits(model: nn.Module, **arguments: Any) -> list[Tensor]:
    torch._dynamo.reset()
    return [
        torch.compile(model, fullgraph=True, backend="eager")(input_ids=IDS_BL[:1], use_cache=False, **arguments).logits
    ]


def test_compiled_llama_checks_positions_at_run_time() -> None:
    model = model_of("llama", register("tiled"), **{**LLAMA, "num_hidden_layers": 1})
    plain = model(input_ids=IDS_BL[:1], use_cache=False).logits
    assert_close(compiled_logits(model), [plain], 1e-5)
    with pytest.raises(RuntimeError, match="cannot recognize packed sequences by their `position_ids`"):
        compiled_logits(model, position_ids=packed()["position_ids"][:1])


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiled_model_with_cu_seq_lens(name: str) -> None:
    kind, fields = TINY[name]
    model = model_of(kind, register("tiled"), **{**fields, "num_hidden_layers": 1})
    arguments = {**cu_seq_lens(0, 9, 17), "position_ids": packed()["position_ids"][:1]}
    plain = model(input_ids=IDS_BL[:1], use_cache=False, **arguments).logits
    assert_close(compiled_logits(model, **arguments), [plain], 1e-5)


def test_compiled_gpt_oss() -> None:
    kind, fields = TINY["gpt-oss"]
    model = model_of(kind, register("tiled"), **fields)
    assert_close(compiled_logits(model), [model(input_ids=IDS_BL[:1], use_cache=False).logits], 1e-5)


def test_compiled_model_checks_padding_at_run_time() -> None:
    model = model_of("llama", register("tiled"), **{**LLAMA, "num_hidden_layers": 1})
    ones = torch.ones_like(IDS_BL[:1])
    assert_close(compiled_logits(model, attention_mask=ones), [model(input_ids=IDS_BL[:1]).logits], 1e-5)
    with pytest.raises(RuntimeError, match="not support padding"):
        compiled_logits(model, attention_mask=padded()["attention_mask"][:1])

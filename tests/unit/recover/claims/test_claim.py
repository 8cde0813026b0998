"""Claims are read strictly, or rejected."""

import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import StepscopeError
from stepscope.recover.claims.claim import make_claim, read_claim

GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_inner": None, "vocab_size": 50257}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
}


def write(folder: Path, content: object, name: str = "claim.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_toml_and_json_give_the_same_claim(tmp_path: Path) -> None:
    toml = write(tmp_path, '# a model\nnum_layers = 2\nd_ff = 2_560\ndtype = "bf16"\ngated = true\n', "claim.toml")
    plain = write(tmp_path, {"num_layers": 2, "d_ff": 2560, "dtype": "bf16", "gated": True})
    assert read_claim(toml) == read_claim(plain)
    assert read_claim(toml).fields == {"num_layers": 2, "d_ff": 2560, "dtype": "bf16", "gated": True}


def test_num_kv_heads_and_d_head_have_defaults() -> None:
    claim = make_claim({"d_model": 768, "num_heads": 12})
    assert (claim.num_kv_heads, claim.d_head) == (12, 64)
    assert claim.implied == ("num_kv_heads", "d_head")
    claim = make_claim({"d_model": 1024, "num_heads": 16, "num_kv_heads": 8, "d_head": 128})
    assert (claim.num_kv_heads, claim.d_head, claim.implied) == (8, 128, ())
    assert make_claim({"num_heads": 12}).d_head is None


def test_transformers_configs_are_claims(tmp_path: Path) -> None:
    gpt2 = read_claim(write(tmp_path, GPT2), batch=3, context=200, dtype="bf16")
    assert (gpt2.num_layers, gpt2.d_model, gpt2.d_ff, gpt2.gated, gpt2.tied) == (12, 768, 3072, False, True)
    assert (gpt2.batch, gpt2.context, gpt2.dtype) == (3, 200, "bf16")
    llama = read_claim(write(tmp_path, LLAMA))
    assert (llama.num_kv_heads, llama.d_head, llama.d_ff, llama.gated, llama.tied) == (8, 64, 8192, True, True)
    assert llama.dtype is None  # the dtype of stored weights is not that of the run
    assert llama.model_type == "llama"


def test_d_head_of_a_config_depends_on_its_model_type(tmp_path: Path) -> None:
    plain = {name: value for name, value in LLAMA.items() if name != "head_dim"}
    assert read_claim(write(tmp_path, {**plain, "model_type": "mistral"})).d_head == 64
    assert read_claim(write(tmp_path, {**plain, "model_type": "qwen3"})).d_head == 128
    del plain["num_key_value_heads"]
    neox = read_claim(write(tmp_path, {**plain, "model_type": "gpt_neox", "tie_word_embeddings": False}))
    assert (neox.gated, neox.tied, neox.num_kv_heads) == (False, False, 32)


def test_two_names_for_the_same_size_of_a_config_must_agree(tmp_path: Path) -> None:
    assert read_claim(write(tmp_path, {**GPT2, "hidden_size": 768, "num_hidden_layers": 12})).d_model == 768
    renamed = {"model_type": "gpt2", "num_hidden_layers": 12, "hidden_size": 768, "n_head": 12, "vocab_size": 50257}
    assert read_claim(write(tmp_path, renamed)).fields == read_claim(write(tmp_path, GPT2)).fields


def test_certain_fields_of_a_recovery_are_a_claim(tmp_path: Path) -> None:
    fields = {
        "num_layers": {"value": 3, "certain": True, "evidence": []},
        "num_heads": {"value": 16, "certain": True, "evidence": []},
        "num_kv_heads": {"value": 4, "certain": False, "alternatives": [2]},
        "vocab_size": {"value": None, "certain": False, "low": 4097, "high": 1048576},
        "dtype": {"value": "bf16", "certain": True},
    }
    path = write(tmp_path, {"verdict": "recovered", "candidates": [{}], "fields": fields})
    claim = read_claim(path, context=512)
    assert claim.fields == {"num_layers": 3, "num_heads": 16, "context": 512, "dtype": "bf16"}
    assert claim.implied == ()  # the recovery does not know num_kv_heads, so it is not num_heads by default


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"num_layer": 2}, "did you mean num_layers?"),
        ({"hidden_size": 768}, "did you mean d_model?"),
        ({"seq_len": 768}, "did you mean context?"),
        ({"zebra": 1}, "expected num_layers, d_model"),
        ({"num_layers": 0}, "invalid num_layers: `0`"),
        ({"num_layers": -3}, "expected a positive integer"),
        ({"num_layers": 2.0}, "expected a positive integer"),
        ({"num_layers": True}, "expected a positive integer"),
        ({"num_layers": "2"}, "expected a positive integer"),
        ({"num_layers": 2**60}, "expected a positive integer"),
        ({"dtype": "fp12"}, "unsupported dtype `fp12`"),
        ({"gated": 1}, "invalid gated: `1`"),
        ({"num_heads": 10, "num_kv_heads": 4}, "`10` is not divisible by num_kv_heads `4`"),
        ({"d_model": 100, "num_heads": 12}, "d_model `100` is not divisible by num_heads `12`"),
        ({}, "the claim is empty"),
        ({"model_type": "bert"}, "expected one of gpt2, llama"),
        ({"model_type": "gpt2", "n_layer": 2}, "`n_embd` is missing"),
        ({**GPT2, "n_layer": "12"}, "invalid num_layers: `12`"),
        ({**GPT2, "n_embd": None}, "`n_embd` is missing"),
        ({**GPT2, "num_hidden_layers": 24}, "contradicts itself: n_layer `12` and num_hidden_layers `24`"),
        ({**LLAMA, "intermediate_size": None}, "`intermediate_size` is missing"),
        ({**LLAMA, "head_dim": 0}, "invalid d_head: `0`"),
        ({**LLAMA, "head_dim": False}, "invalid d_head: `False`"),
        (
            {**{name: LLAMA[name] for name in LLAMA if name != "num_key_value_heads"}, "model_type": "mistral"},
            "`num_key_value_heads` is missing",
        ),
        ({"verdict": "cannot tell", "reason": "", "candidates": [], "notes": []}, "no certain fields"),
        (
            {"verdict": "recovered", "candidates": [], "fields": {"d_ff": {"value": 1, "certain": 1}}},
            "no certain fields",
        ),
        ({"verdict": "recovered", "candidates": [], "fields": {"d_ff": 2}}, "no certain fields"),
        ({"verdict": "recovered", "candidates": [], "fields": [3]}, "no certain fields"),
        ("num_layers = ", "neither TOML nor JSON"),
        ('{"num_layers": 2, "num_layers": 3}', "duplicate key"),
        ("[1, 2]", "neither TOML nor JSON"),
        ("{" * 100_000, "neither TOML nor JSON"),
    ],
)
def test_an_invalid_claim_is_rejected_with_what_was_expected(tmp_path: Path, content: Any, says: str) -> None:
    with pytest.raises(StepscopeError) as caught:
        read_claim(write(tmp_path, content))
    assert says in str(caught.value)


def test_parameters_must_include_the_claimed_matrices() -> None:
    sizes = {"num_layers": 12, "d_model": 768, "num_heads": 12, "d_ff": 3072, "vocab_size": 50257}
    claim = make_claim({**sizes, "parameters": 124_439_808})
    assert claim.fewest_parameters == 12 * (4 * 768 * 768 + 2 * 768 * 3072) + 50257 * 768
    assert make_claim({**sizes, "gated": True}).fewest_parameters == claim.fewest_parameters + 12 * 768 * 3072
    assert make_claim({**sizes, "tied": False}).fewest_parameters == claim.fewest_parameters + 50257 * 768
    with pytest.raises(StepscopeError, match="contradicts itself"):
        make_claim({**sizes, "parameters": 100_000_000})
    assert make_claim({"num_layers": 12, "parameters": 5}).fewest_parameters is None


def test_flags_add_to_a_claim_but_cannot_change_it(tmp_path: Path) -> None:
    path = write(tmp_path, {"num_layers": 2, "batch": 3})
    assert read_claim(path, batch=3, context=8).context == 8
    with pytest.raises(StepscopeError, match="the claim and `--batch` disagree: `3` and `4`"):
        read_claim(path, batch=4)


def test_a_claim_is_a_regular_file_of_limited_size(tmp_path: Path) -> None:
    with pytest.raises(StepscopeError, match="cannot read the claim"):
        read_claim(tmp_path / "none.toml")
    with pytest.raises(StepscopeError, match="Is a directory"):
        read_claim(tmp_path)
    with pytest.raises(StepscopeError, match="larger than"):
        read_claim(write(tmp_path, "#" * (1 << 20) + "\nnum_layers = 2"))

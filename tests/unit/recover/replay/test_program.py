"""The claimed model as workloads: what the claim has to say, and what the evidence shows."""

from pathlib import Path

import pytest

from stepscope.errors import StepscopeError
from stepscope.recover.claims.claim import Claim, make_claim
from stepscope.recover.replay.program import CAST_MODEL, check_claim, cut_config, describe_program, list_programs
from stepscope.spec import Factory, HuggingFace, ModelShape, Workload
from tests.unit.recover.evidence_runs import read_evidence

SIZES = {"num_layers": 3, "d_model": 768, "num_heads": 12, "d_ff": 3072, "vocab_size": 10000}
RUN = {"batch": 4, "context": 256, "dtype": "bf16"}
CONFIG = Path("config.json")


def claim(**changes: object) -> Claim:
    return make_claim({name: value for name, value in {**SIZES, **RUN, **changes}.items() if value is not None})


def programs_of(file: str, claimed: Claim, **more: object) -> list[Workload]:
    given = {"layers": 2, "config": None, "stated": None} | more
    return list_programs(claimed, read_evidence(file).sightings, **given)  # type: ignore[arg-type]


def test_claimed_sizes_are_the_built_in_decoder() -> None:
    (only,) = programs_of("builtin_autocast.forward.json.gz", claim(gated=True))
    assert isinstance(only.model, ModelShape)
    assert (only.model.num_layers, only.model.d_ff, only.model.vocab) == (2, 3072, 10000)
    assert (only.batch, only.context, only.precision) == (4, 256, "bf16")
    assert (only.mode, only.attention, only.compile) == ("inference", "naive", False)
    assert describe_program(only) == "the built-in decoder, bf16, naive attention, mode inference, batch 4, context 256"


@pytest.mark.parametrize(
    ("file", "mode", "attention", "compiled"),
    [
        ("gpt2_bf16_odd.forward.json.gz", "inference", "sdpa", False),
        ("gpt2_bf16_odd.train.json.gz", "train", "sdpa", False),
        ("gpt2_fp16_naive.csv.gz", "inference", "naive", False),
        ("llama_compiled.train.json.gz", "train", "sdpa", True),
    ],
)
def test_kernels_show_how_the_model_ran(file: str, mode: str, attention: str, compiled: bool) -> None:
    cast, autocast = programs_of(file, claim(), config=CONFIG)
    for one in (cast, autocast):
        assert (one.mode, one.attention, one.compile) == (mode, attention, compiled)
    assert isinstance(cast.model, Factory)
    assert (cast.model.target, cast.precision) == (CAST_MODEL, "fp32")
    assert dict(cast.model.arguments) == {"config": "config.json", "dtype": "bf16", "with_loss": mode == "train"}
    assert (autocast.model, autocast.precision) == (HuggingFace(config="config.json"), "bf16")
    assert len(programs_of(file, claim(dtype="tf32"), config=CONFIG)) == 1


def test_stated_settings_are_used_with_the_claimed_model() -> None:
    stated = Workload(
        model=HuggingFace(config="theirs.json"), batch=1, context=8, mode="train", precision="fp16", optimizer="sgd"
    )
    (only,) = programs_of("gpt2_bf16_odd.forward.json.gz", claim(), config=CONFIG, stated=stated)
    assert only.model == HuggingFace(config="config.json")
    assert (only.batch, only.context, only.precision) == (4, 256, "bf16")
    assert (only.mode, only.optimizer) == ("train", "sgd")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Factory(target="theirs:build"), "the prover's own `theirs:build`"),
        (ModelShape(d_model=64, d_ff=64, num_layers=1, num_heads=2, num_kv_heads=2), "the built-in decoder"),
    ],
)
def test_code_of_the_prover_never_runs(model: Factory | ModelShape, says: str) -> None:
    with pytest.raises(StepscopeError, match=says):
        programs_of("gpt2_bf16_odd.forward.json.gz", claim(), config=CONFIG, stated=Workload(model=model))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch": None, "context": None}, "requires batch, context in the claim"),
        ({"d_ff": None}, "requires d_ff in the claim"),
        ({"dtype": None}, "requires dtype in the claim"),
        ({"gated": False}, "cannot be built"),
        ({"d_head": 32}, "cannot be built"),
    ],
)
def test_an_incomplete_claim_is_rejected(changes: dict[str, object], says: str) -> None:
    with pytest.raises(StepscopeError, match=says):
        check_claim(claim(**changes))
    check_claim(claim())


def test_a_config_is_cut_to_fewer_layers() -> None:
    assert cut_config({"n_layer": 12, "n_embd": 768}, 2) == {"n_layer": 2, "n_embd": 768}
    qwen = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    assert cut_config(qwen, 2) == {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    mixed = {"num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] * 2}
    with pytest.raises(StepscopeError, match="layers of this config differ") as raised:
        cut_config(mixed, 2)
    assert raised.value.hint == "--replay 4"
    assert cut_config(mixed, 4) == mixed

"""The sizes of variants with any sizes: nothing but the data type is certain, and the alternatives have the truth."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.errors import Exit
from stepscope.jobs.recover import describe, exit_code, recover_files, state
from stepscope.jobs.verify import exit_code as verify_exit
from stepscope.jobs.verify import verify_files
from stepscope.recover.claims.claim import make_claim
from stepscope.recover.claims.verification import verify
from stepscope.recover.evidence.order import NoTransformerError
from stepscope.recover.solve.recovery import Field, Recovery
from stepscope.recover.solve.variants import recover_any
from tests.unit.kineto_files import kernel, write_trace
from tests.unit.recover.evidence.test_variants import LOOP, MIXTRAL, MODEL, SHARED
from tests.unit.recover.evidence_runs import read_evidence, with_kernels
from tests.unit.recover.synthetic_runs import Model, launch
from tests.unit.recover.test_synthetic_runs import PHASES, models
from tests.unit.recover.variant_runs import LLAMA, Experts, adapted, encoder_decoder, mixture

CORE = ("d_model", "num_heads", "num_kv_heads", "d_head", "batch", "context")
SIZES = ("num_layers", *CORE, "d_ff", "vocab_size")


@st.composite
def mixtures(draw: st.DrawFn) -> Experts:
    number = draw(st.integers(2, 160))
    return Experts(
        num_experts=number,
        per_token=draw(st.integers(2, min(8, number))),
        d_ff=8 * draw(st.integers(16, 400)),
        shared=draw(st.sampled_from((0, 0, 512, 1408))),
        is_grouped=draw(st.booleans()),
    )


def _holds(field: Field, truth: int) -> bool:
    if field.value in (None, truth) or truth in field.alternatives:
        return True
    return field.low is not None and field.low <= truth and (field.high is None or truth <= field.high)


def _check(answer: Recovery, truth: dict[str, int]) -> None:
    assert [name for name, field in answer.fields.items() if field.certain] in ([], ["dtype"])
    assert [name for name, value in truth.items() if not _holds(answer.fields[name], value)] == []


def _sizes_of(model: Model) -> dict[str, int]:
    return {name: getattr(model, name) for name in SIZES}


def _truth_of(model: Model, experts: Experts) -> dict[str, int]:
    shared = {"shared_d_ff": experts.shared} if experts.shared else {}
    sizes = {**_sizes_of(model), "d_ff": experts.d_ff, **shared}
    return {**sizes, "num_experts": experts.num_experts, "num_experts_per_tok": experts.per_token}


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("experts", [MIXTRAL, LOOP, SHARED])
def test_the_sizes_of_a_mixture(experts: Experts, *, counted: bool) -> None:
    answer = recover_any([mixture(MODEL, experts, counted=counted)])
    truth = _truth_of(MODEL, experts)
    left_open = () if counted else ("vocab_size",)
    assert {name: answer.fields[name].value for name in truth if name not in left_open} == {
        name: value for name, value in truth.items() if name not in left_open
    }
    _check(answer, truth)
    assert answer.candidates[0].d_ff == experts.d_ff
    assert answer.variant in answer.notes


@settings(max_examples=10, deadline=None, derandomize=True, phases=PHASES)
@given(model=models(grouped=True, dtype="bf16", tokens=4096), experts=mixtures(), seed=st.integers(0, 99))
def test_counters_of_any_mixture(model: Model, experts: Experts, seed: int) -> None:
    answer = recover_any([mixture(model, experts, seed=seed)])
    _check(answer, _truth_of(model, experts))
    assert answer.fields["num_experts_per_tok"].value == experts.per_token


@settings(max_examples=4, deadline=None, derandomize=True, phases=PHASES)
@given(model=models(grouped=True, dtype="bf16", tokens=512), experts=mixtures(), seed=st.integers(0, 99))
def test_a_trace_alone_of_any_mixture(model: Model, experts: Experts, seed: int) -> None:
    _check(recover_any([mixture(model, experts, seed=seed, counted=False)]), _truth_of(model, experts))


def test_some_layers_without_experts_leave_the_dense_width_open() -> None:
    answer = recover_any([mixture(MODEL, SHARED, dense_layers=1)])
    _check(answer, {**_sizes_of(MODEL), "d_ff": SHARED.d_ff, "num_experts": 16, "num_experts_per_tok": 4})
    assert answer.fields["num_layers"].value == MODEL.num_layers
    assert "shared_d_ff" not in answer.fields


def test_the_rank_of_adapters_is_known_to_within_a_tile() -> None:
    notes = recover_any([adapted(MODEL, 16, ("query", "value"))]).notes
    assert "rank of the adapters: 1 to 256" in notes
    assert not any("rank" in note for note in recover_any([adapted(MODEL, 16, ("up",))]).notes[1:])


@settings(max_examples=6, deadline=None, derandomize=True, phases=PHASES)
@given(
    model=models(grouped=True, dtype="bf16", tokens=4096),
    rank=st.sampled_from((1, 4, 8, 16, 64)),
    roles=st.sets(st.sampled_from(("query", "key", "value", "output", "gate", "up", "down")), min_size=1),
)
def test_counters_of_any_adapters(model: Model, rank: int, roles: set[str]) -> None:
    answer = recover_any([adapted(model, rank, roles)])
    _check(answer, _sizes_of(model))
    assert answer.variant.startswith("low-rank adapters")


@settings(max_examples=6, deadline=None, derandomize=True, phases=PHASES)
@given(model=models(grouped=True, dtype="bf16", tokens=4096), layers=st.integers(1, 4), context=st.integers(8, 200))
def test_counters_of_any_encoder_and_decoder(model: Model, layers: int, context: int) -> None:
    answer = recover_any([encoder_decoder(model, decoder_layers=layers, decoder_context=context)])
    truth = _sizes_of(model)
    _check(answer, {name: truth[name] for name in (*CORE, "d_ff")})
    assert answer.fields["num_layers"].value is None
    assert f"a decoder of {layers} layer" in answer.fields["num_layers"].evidence[0]
    assert exit_code(answer) is Exit.UNDECIDED


def _claim_everything(model: Model, **changes: object) -> dict[str, object]:
    return {**_sizes_of(model), "dtype": model.dtype, "gated": True, **changes}


VARIANTS = {
    "grouped GEMMs: a mixture of experts": mixture(MODEL, MIXTRAL),
    "GEMMs after a top-k: a mixture of experts": mixture(MODEL, LOOP),
    "low-rank adapters next to the projections": adapted(MODEL, 8, ("query",)),
    "an encoder and a decoder": encoder_decoder(MODEL, decoder_layers=3, decoder_context=64),
}


@pytest.mark.parametrize("seen", VARIANTS)
@pytest.mark.parametrize("changes", [{}, {"gated": False}, {"d_ff": 1024}])
def test_an_honest_claim_about_a_variant_is_not_refuted(seen: str, changes: dict[str, object]) -> None:
    with pytest.raises(NoTransformerError, match=seen) as raised:
        verify([VARIANTS[seen]], make_claim(_claim_everything(MODEL, **changes)))
    assert f"d_model {MODEL.d_model}" in raised.value.known[0]


def test_latent_attention_leaves_only_the_experts() -> None:
    """Projections into a smaller space, as in DeepSeek, are not those of a plain decoder."""
    evidence = mixture(MODEL, MIXTRAL)
    extra = next(one for one in evidence.sightings if "nvjet" in one.name.name)
    doubled = [
        again
        for one in evidence.sightings
        for again in ((extra, extra, extra, one) if one.name.kernel_class == "attention" else (one,))
    ]
    with pytest.raises(NoTransformerError) as raised:
        recover_any([with_kernels(evidence, doubled)])
    assert str(raised.value) == "grouped GEMMs: a mixture of experts"
    assert "num_experts: 8" in raised.value.known
    assert "data types of the GEMMs: bf16" in raised.value.known


def test_a_variant_and_a_plain_decoder_are_different_models() -> None:
    with pytest.raises(NoTransformerError, match="different models"):
        recover_any([mixture(MODEL, MIXTRAL), launch(MODEL, LLAMA)])


def test_a_plain_decoder_has_no_variant() -> None:
    answer = recover_any([read_evidence(LLAMA)])
    assert answer.variant == ""
    assert "num_experts" not in answer.fields


def test_the_result_names_what_was_seen() -> None:
    answer = recover_any([mixture(MODEL, MIXTRAL)])
    said = "".join(str(part) for part in describe(answer, []))
    assert "grouped GEMMs: a mixture of experts" in said
    assert "1 of 13 fields certain" in said
    plain = json.loads(json.dumps(state(answer)))
    assert plain["variant"] == "grouped GEMMs: a mixture of experts"
    assert plain["fields"]["num_experts"]["value"] == 8
    assert plain["verdict"] == "recovered"


def test_a_file_of_a_mixture_exits_with_three_for_a_claim(tmp_path: Path) -> None:
    events = [
        kernel(one.name.name, f"{place}.000", "0.900", place, grid=list(one.grid), block=list(one.block))
        for place, one in enumerate(VARIANTS["grouped GEMMs: a mixture of experts"].sightings)
    ]
    trace = write_trace(tmp_path / "mixture.json", events)
    (tmp_path / "claim.json").write_text(json.dumps(_claim_everything(MODEL)))
    verified = verify_files([trace], tmp_path / "claim.json")
    assert verify_exit(verified) is Exit.UNDECIDED
    assert verified.verification.why == "grouped GEMMs: a mixture of experts"
    assert "num_experts 8" in verified.verification.notes[0]
    found, _ = recover_files([trace])
    assert exit_code(found) is Exit.OK

"""Sizes that were not recorded: for any model, no certain value is wrong, and the alternatives include the truth."""

from collections.abc import Iterable
from time import process_time

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from stepscope.recover.facts import Sighting
from stepscope.recover.solve.recovery import Field, recover
from tests.unit.recover.evidence_runs import read_evidence
from tests.unit.recover.synthetic_runs import Model, launch, model_of

GPT2, GPT2_FP32, LLAMA = "gpt2_bf16_odd.csv.gz", "gpt2_fp32_efficient.csv.gz", "llama_bf16.csv.gz"
FIELDS = ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_head", "d_ff", "vocab_size", "batch", "context")
PHASES = (Phase.explicit, Phase.generate)  # failures are not shrunk: that takes minutes
_LONGEST_S = 10.0
_WIDEST = 4096


@st.composite
def models(draw: st.DrawFn, *, grouped: bool, dtype: str, tokens: int) -> Model:
    d_head = draw(st.sampled_from((16, 24, 32, 40, 64, 72, 80, 96, 112, 128, 192, 256)))
    num_heads = draw(st.integers(1, 40))
    query = num_heads * d_head
    assume(128 <= query <= _WIDEST)
    kv_heads = (
        draw(st.sampled_from([n for n in range(1, num_heads + 1) if num_heads % n == 0])) if grouped else num_heads
    )
    batch = draw(st.integers(2, 33))
    return Model(
        num_layers=draw(st.integers(1, 6)),
        d_model=8 * draw(st.integers(max(16, query // 16), query // 4)) if grouped else query,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        d_head=d_head,
        d_ff=8 * draw(st.integers(32, 1200)),
        vocab_size=draw(st.one_of(st.integers(500, 60_000), st.sampled_from((32_000, 50_257, 128_256)))),
        batch=batch,
        context=draw(st.integers(8, max(8, tokens // batch))),
        dtype=dtype,
    )


def _holds(field: Field, truth: int) -> bool:
    if field.value == truth or truth in field.alternatives:
        return True
    return field.low is not None and field.low <= truth and (field.high is None or truth <= field.high)


def _check(model: Model, file: str, *, seed: int, counted: bool) -> None:
    start = process_time()
    fields = recover([launch(model, file, seed=seed, counted=counted)]).fields
    assert process_time() - start < _LONGEST_S
    told = [name for name in FIELDS if fields[name].value is not None or fields[name].low is not None]
    assert {name: fields[name].value for name in told if fields[name].certain} == {
        name: getattr(model, name) for name in told if fields[name].certain
    }
    assert [name for name in told if not _holds(fields[name], getattr(model, name))] == []
    if counted:
        assert {"num_layers", "d_model", "num_heads", "batch", "context"} <= set(told)


@pytest.mark.parametrize("file", [GPT2, LLAMA])
def test_synthetic_runs_match_recordings_at_recorded_sizes(file: str) -> None:
    """Kernels without a model are left out; the others have the recorded names, grids and bytes."""

    def described(sightings: Iterable[Sighting]) -> list[object]:
        return [(one.name.name, one.grid, one.block, one.counters.get("store_bytes")) for one in sightings]

    recorded = iter(described(read_evidence(file).sightings))
    made = described(launch(model_of(file), file, seed=None).sightings)
    assert all(one in recorded for one in made)
    assert len(made) > 0.9 * len(read_evidence(file).sightings)


@settings(max_examples=12, deadline=None, derandomize=True, phases=PHASES)
@given(model=models(grouped=False, dtype="bf16", tokens=8192), seed=st.integers(0, 99))
def test_counters_of_any_gpt2(model: Model, seed: int) -> None:
    _check(model, GPT2, seed=seed, counted=True)


@settings(max_examples=12, deadline=None, derandomize=True, phases=PHASES)
@given(model=models(grouped=True, dtype="bf16", tokens=8192), seed=st.integers(0, 99))
def test_counters_of_any_llama(model: Model, seed: int) -> None:
    _check(model, LLAMA, seed=seed, counted=True)


@settings(max_examples=12, deadline=None, derandomize=True, phases=PHASES)
@given(model=models(grouped=False, dtype="fp32", tokens=8192), seed=st.integers(0, 99), counted=st.booleans())
def test_fp32_of_any_gpt2(model: Model, seed: int, counted: bool) -> None:
    _check(model, GPT2_FP32, seed=seed, counted=counted)


@settings(max_examples=4, deadline=None, derandomize=True, phases=PHASES)
@given(model=models(grouped=False, dtype="bf16", tokens=512), seed=st.integers(0, 99))
def test_a_trace_alone_of_any_gpt2(model: Model, seed: int) -> None:
    _check(model, GPT2, seed=seed, counted=False)


@settings(max_examples=4, deadline=None, derandomize=True, phases=PHASES)
@given(model=models(grouped=True, dtype="bf16", tokens=512), seed=st.integers(0, 99))
def test_a_trace_alone_of_any_llama(model: Model, seed: int) -> None:
    _check(model, LLAMA, seed=seed, counted=False)

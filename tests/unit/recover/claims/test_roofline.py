"""Durations and the claimed work: what a GPU cannot do faster, and what is only worth a remark."""

from dataclasses import replace

import msgspec
import pytest

from stepscope.hardware import Hardware
from stepscope.recover.claims.claimed_run import open_all
from stepscope.recover.claims.prediction import ShapeCheck
from stepscope.recover.claims.roofline import WorkLimits, find_idle_share
from stepscope.recover.claims.verdict import ClaimVerdict
from stepscope.recover.claims.verification import verify
from stepscope.recover.evidence.order import is_product
from stepscope.recover.facts import Sighting
from stepscope.recover.shape import ClaimedShape
from tests.unit.recover.claimed_runs import rename, spoil, time, true_claim, verified
from tests.unit.recover.evidence_runs import COUNTERS, TRACES, read_evidence

TRACE = "gpt2_tf32.forward.json.gz"
SLOW = Hardware(name="slow", peak_flops={"bf16": 1e12, "tf32": 1e12, "fp32": 1e12}, bandwidth=1e9)


def checks_of(file: str, hardware: Hardware) -> tuple[dict[str, ShapeCheck], ClaimedShape]:
    runs = open_all([read_evidence(file)], true_claim(file))
    return {one.what: one for one in WorkLimits(hardware).predict(runs.files[0].placement)}, runs.shape


@pytest.mark.parametrize("file", [*COUNTERS, *TRACES])
def test_fifty_times_as_fast_is_refuted(file: str) -> None:
    answer = spoil(file, lambda kernels: [time(one, 0.02) for one in kernels])
    assert answer.verdict is ClaimVerdict.REFUTED


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": None, "d_ff": 1 << 20},
        {"context": 1 << 16, "batch": 1 << 10},
        {"d_model": 1 << 17, "num_heads": 1 << 11, "num_kv_heads": 1 << 11},
    ],
    ids=["d_ff", "tokens", "width"],
)
def test_work_that_no_gpu_can_do_in_this_time_is_refuted(changes: dict[str, object]) -> None:
    answer = verify([read_evidence(TRACE)], true_claim(TRACE, **changes))
    assert answer.verdict is ClaimVerdict.REFUTED
    assert any(one.what.endswith("duration") or one.what == "duration of a pass" for one in answer.refuted_by)


def test_every_kind_of_work_has_a_lower_limit() -> None:
    """On a slow GPU, the recorded durations are too short for the claim."""
    found, shape = checks_of("llama_bf16.forward.json.gz", SLOW)
    assert {"attention duration", "norm duration", "duration of a pass", "LM head duration"} <= set(found)
    assert found["attention duration"].test(shape) is False
    assert found["duration of a pass"].test(shape) is False
    # A norm moves less than a cache holds.
    assert found["norm duration"].test(shape) is True
    assert found["norm duration"].test(msgspec.structs.replace(shape, batch=1 << 20)) is False


def test_unfused_attention_is_checked_by_its_gemms() -> None:
    found, shape = checks_of("gpt2_fp16_naive.forward.json.gz", replace_peaks(SLOW, "fp16"))
    assert "attention duration" not in found
    assert found["attention scores duration"].test(shape) is False


def replace_peaks(hardware: Hardware, dtype: str) -> Hardware:
    return msgspec.structs.replace(hardware, peak_flops={dtype: 1e9})


def test_an_unknown_size_leaves_the_time_open() -> None:
    found, shape = checks_of(TRACE, SLOW)
    opened = msgspec.structs.replace(shape, batch=None)
    assert {one.test(opened) for one in found.values()} == {None}


def test_tf32_is_too_fast_for_fp32() -> None:
    """The name of a GEMM on the tensor cores can be edited, its speed cannot."""

    def rename_tf32(kernels: list[Sighting]) -> list[Sighting]:
        return [rename(one, one.name.name.replace("_tf32f32_", "_f32f32_")) for one in kernels]

    answer = spoil(TRACE, rename_tf32, dtype="fp32")
    assert answer.verdict is ClaimVerdict.REFUTED
    assert {one.what for one in answer.refuted_by} >= {"feed-forward up projection duration"}


def test_one_fast_gemm_of_several_steps_is_refuted() -> None:
    """The same GEMM has a normal duration in the other step."""
    file = "gpt2_fp32_efficient.train.json.gz"
    head = next(one.index for one in read_evidence(file).sightings if is_product(one) and one.duration_ns > 50_000)
    answer = spoil(file, lambda kernels: [time(one, 0.01) if one.index == head else one for one in kernels])
    assert answer.verdict is ClaimVerdict.REFUTED


def test_a_slow_run_is_only_worth_a_remark() -> None:
    answer = spoil(TRACE, lambda kernels: [time(one, 1000) for one in kernels])
    assert answer.verdict is verified(TRACE).verdict
    assert any("usually takes about" in note for note in answer.notes)


@pytest.mark.parametrize("file", [*COUNTERS, *TRACES])
def test_a_genuine_run_is_as_fast_as_usual(file: str) -> None:
    assert not any("usually takes about" in note for note in verified(file).notes)


def test_idle_time_is_worth_a_remark() -> None:
    sightings = read_evidence(TRACE).sightings
    assert find_idle_share(sightings) is None
    apart = [msgspec.structs.replace(one, start_ns=one.index * 10**7) for one in sightings]
    idle = find_idle_share(apart)
    assert idle is not None
    assert idle > 0.99
    assert find_idle_share(read_evidence("gpt2_tf32.csv.gz").sightings) is None
    answer = verify([replace(read_evidence(TRACE), sightings=tuple(apart))], true_claim(TRACE))
    assert any("no kernel of this stream ran" in note for note in answer.notes)

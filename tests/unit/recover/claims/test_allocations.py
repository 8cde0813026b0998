"""Memory snapshots and other files that belong to another run than the kernels."""

from dataclasses import replace

import pytest

from stepscope.recover.claims.verdict import ClaimVerdict, Verification
from stepscope.recover.claims.verification import verify
from stepscope.recover.evidence.recording import KernelEvidence
from tests.unit.recover.claimed_runs import true_claim, verified
from tests.unit.recover.evidence_runs import COUNTERS, TRACES, read_evidence

RUNS = ("gpt2_fp32_efficient", "llama_bf16")
OTHER = "may be of another run"


def snapshot(run: str) -> KernelEvidence:
    return read_evidence(f"{run}.snapshot.pickle.gz")


def verify_with(file: str, *more: KernelEvidence, **changes: object) -> Verification:
    return verify([read_evidence(file), *more], true_claim(file, **changes))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("file", [*COUNTERS, *TRACES])
def test_a_snapshot_of_another_run_supports_nothing(file: str, run: str) -> None:
    answer = verify_with(file, snapshot(run))
    # Counters were recorded with fewer layers than the snapshot.
    if file.startswith(f"{run}.") and ".csv." not in file:
        assert answer.verdict is verified(file).verdict, answer.why
        assert OTHER not in answer.why
    else:
        assert answer.verdict is ClaimVerdict.UNDECIDED
        assert OTHER in answer.why


def resize(one: KernelEvidence, sizes: dict[int, int]) -> KernelEvidence:
    allocations = tuple(sizes.get(size, size) for size in one.allocations)
    return replace(one, allocations=allocations, held=tuple(sizes.get(size, size) for size in one.held))


TRAIN = "gpt2_fp32_efficient.train.json.gz"


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({4 * 128 * 768: 4 * 256 * 768}, "hidden states of the claimed batch and context"),
        ({4 * 128 * 50257: 4 * 256 * 50257, 4 * 127 * 50257: 4 * 255 * 50257}, "logits for 256 positions"),
        ({4 * 768 * 3072: 2 * 768 * 3072}, "no feed-forward matrix of the claimed size and dtype"),
        ({4 * 768 * 50257: 4 * 768 * 50304}, "no embedding matrix"),
    ],
    ids=["tokens", "logits", "dtype", "vocabulary"],
)
def test_a_size_of_another_run_is_named(sizes: dict[int, int], why: str) -> None:
    one = snapshot("gpt2_fp32_efficient")
    assert set(sizes) & set(one.allocations), "the sizes occur in the genuine snapshot"
    answer = verify_with(TRAIN, resize(one, sizes))
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert why in answer.why


def test_a_snapshot_without_history_has_no_activations() -> None:
    one = snapshot("gpt2_fp32_efficient")
    assert verify_with(TRAIN, replace(one, allocations=one.held)).verdict is ClaimVerdict.CONSISTENT


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "NVIDIA A100-SXM4-80GB", "device_sms": None}, "GPU NVIDIA A100-SXM4-80GB and NVIDIA H200"),
        ({"device_sms": 66}, "number of multiprocessors 132 and 66"),
    ],
    ids=["name", "size"],
)
def test_files_from_different_gpus_are_not_of_one_run(changes: dict[str, object], why: str) -> None:
    trace = read_evidence("gpt2_fp32_efficient.forward.json.gz")
    assert verify_with(TRAIN, trace).verdict is ClaimVerdict.CONSISTENT
    answer = verify_with(TRAIN, replace(trace, **changes))  # type: ignore[arg-type]
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert "different runs" in answer.why
    assert set(why.split()) <= set(answer.why.replace(";", " ").split())


def test_files_of_models_with_other_depths_are_not_of_one_run() -> None:
    answer = verify_with("gpt2_bf16_odd.csv.gz", read_evidence("gpt2_bf16_odd.forward.json.gz"), num_layers=None)
    assert answer.verdict is not ClaimVerdict.CONSISTENT
    assert "num_layers 2 and 4" in answer.why


def test_files_in_other_dtypes_are_not_of_one_run() -> None:
    first, second = "gpt2_fp32_efficient.forward.json.gz", "gpt2_tf32.forward.json.gz"
    answer = verify([read_evidence(first), read_evidence(second)], true_claim(first, dtype=None))
    assert answer.verdict is not ClaimVerdict.CONSISTENT

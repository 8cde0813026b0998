"""Values that no GPU can have reported: numbers and times of launches, names, resources, and the GPU itself."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from stepscope.recover.claims.plausibility import find_contradictions, find_overlap_ns
from stepscope.recover.claims.verdict import ClaimVerdict
from stepscope.recover.claims.verification import verify
from stepscope.recover.evidence.layout import Complaint
from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.facts import Sighting
from stepscope.recover.solve.recovery import recover
from tests.unit.recover.claimed_runs import find, true_claim
from tests.unit.recover.evidence_runs import COUNTERS, TRUTHS, read_evidence

GPT2 = "gpt2_bf16_odd.csv.gz"
TRACE = "gpt2_fp32_efficient.forward.json.gz"
HALF = {"bf16": "fp16", "fp16": "bf16", "tf32": "bf16"}
ON_TENSOR_CORES = [
    file for file in COUNTERS if TRUTHS[file.partition(".")[0]]["dtype"] != "fp32" and not file.startswith("builtin")
]


def change(file: str, edit: Callable[[Sighting], dict[str, object]]) -> KernelEvidence:
    evidence = read_evidence(file)
    changed = [msgspec.structs.replace(one, **edit(one)) for one in evidence.sightings]
    return replace(evidence, sightings=tuple(changed))


def complaints(evidence: KernelEvidence) -> list[Complaint]:
    return list(find_contradictions(evidence))


# --- Numbers and times of launches


@pytest.mark.parametrize("file", [GPT2, TRACE])
def test_two_launches_cannot_have_the_same_number(file: str) -> None:
    number = read_evidence(file).sightings[20].launch
    found, *_ = complaints(change(file, lambda one: {"launch": number} if one.index == 22 else {}))
    assert (found.sighting.index, found.seen) == (22, f"{number:,}, as #20")


def test_kernels_of_a_cuda_graph_have_one_number() -> None:
    assert not complaints(change(TRACE, lambda one: {"launch": 7, "in_graph": True} if one.index > 30 else {}))
    # Some profilers do not mark them. Then only they are in a row.
    assert not complaints(change(TRACE, lambda one: {"launch": 90_000} if one.index > 30 else {}))


def test_rows_must_be_in_the_order_of_their_ids() -> None:
    numbers = {20: 21, 21: 20}
    first = read_evidence(GPT2).sightings[0].launch or 0
    [found] = complaints(change(GPT2, lambda one: {"launch": first + numbers.get(one.index, one.index)}))
    assert found.expected == "launches in the order of their numbers"


def test_threads_may_launch_at_the_same_moment() -> None:
    file = "builtin_fp32.train.json.gz"
    first, second = read_evidence(file).sightings[20:22]
    swapped = {20: second.launch, 21: first.launch}
    assert not complaints(change(file, lambda one: {"launch": swapped.get(one.index, one.launch)}))
    backwards = change(file, lambda one: {"launch": -(one.launch or 0)})
    assert [one.expected for one in complaints(backwards)] == ["launches in the order of their numbers"]


def test_a_kernel_cannot_end_before_the_one_ahead_of_it() -> None:
    head = read_evidence(TRACE).sightings[65]

    def cover(one: Sighting) -> dict[str, object]:
        assert one.start_ns is not None
        return {"start_ns": (head.start_ns or 0) + 2_000} if one.index == 64 else {}

    evidence = change(TRACE, cover)
    ordered = tuple(sorted(evidence.sightings, key=lambda one: one.start_ns or 0))
    numbered = tuple(msgspec.structs.replace(one, index=index, launch=index) for index, one in enumerate(ordered))
    [found] = complaints(replace(evidence, sightings=numbered))
    assert found.sighting.index == 65
    assert "on the same stream" in found.expected


def test_a_kernel_may_start_before_the_end_of_the_one_ahead_of_it() -> None:
    before = read_evidence(TRACE).sightings[64]
    early = (before.start_ns or 0) + before.duration_ns - 2_000
    evidence = change(TRACE, lambda one: {"start_ns": early} if one.index == 65 else {})
    assert not complaints(evidence)
    assert find_overlap_ns(evidence.sightings) == 2_000
    assert find_overlap_ns(read_evidence(TRACE).sightings) == 0


def test_marks_of_a_graph_do_not_hide_an_overlap() -> None:
    evidence = change(TRACE, lambda one: {"start_ns": one.index, "in_graph": True})
    assert find_overlap_ns(evidence.sightings) > 0.5 * sum(one.duration_ns for one in evidence.sightings)


# --- Names and counters


@pytest.mark.parametrize("file", ON_TENSOR_CORES)
def test_a_false_name_does_not_change_the_dtype(file: str) -> None:
    truth = true_claim(file).dtype or ""
    other = HALF[truth]

    def rename(one: Sighting) -> dict[str, object]:
        is_named = one.name.dtype == truth and one.name.kernel_class in ("GEMM", "attention")
        return {"name": msgspec.structs.replace(one.name, dtype=other)} if is_named else {}

    evidence = change(file, rename)
    answer = verify([evidence], true_claim(file, dtype=other))
    assert answer.verdict is ClaimVerdict.REFUTED
    assert answer.fields["dtype"].verdict == "refuted"
    assert f"operations in {other}, according to its name" in {one.expected for one in answer.refuted_by}
    # The true dtype does not pass either: the evidence contradicts itself.
    assert verify([evidence], true_claim(file)).verdict is ClaimVerdict.REFUTED
    found = recover([evidence]).fields["dtype"]
    assert (found.value, found.certain) == (truth, False)
    assert "the evidence contradicts itself" in found.evidence[-1]


def test_a_gemm_multiplies_in_one_dtype() -> None:
    def share(one: Sighting) -> dict[str, object]:
        whole = one.tensor_dtypes.get("bf16", 0)
        return {"tensor_dtypes": {"bf16": whole - whole // 4, "fp16": whole // 4}} if one.index == 19 else {}

    [found] = complaints(change(GPT2, share))
    assert found.sighting.index == 19
    assert found.seen == "1,533,542,400 in bf16 and 511,180,800 in fp16, by the counters"


def test_recover_says_that_counters_decided_the_dtype() -> None:
    found = recover([read_evidence(GPT2)]).fields["dtype"]
    assert (found.value, found.certain) == ("bf16", True)
    assert "operations of the tensor cores" in found.evidence[0]


def test_a_gemm_that_is_named_after_tensor_cores_uses_them() -> None:
    file = "llama_fp32.csv.gz"

    def rename(one: Sighting) -> dict[str, object]:
        named = msgspec.structs.replace(one.name, dtype="bf16", tensor_cores=True)
        return {"name": named} if one.name.kernel_class == "GEMM" else {}

    found = complaints(change(file, rename))
    assert {one.expected for one in found} == {"a GEMM in bf16, according to its name"}


# --- Resources, durations, and the GPU


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ({"registers": 96}, "registers"),
        ({"block": (512, 1, 1)}, "block"),
        ({"shared_bytes": 1024}, "shared memory"),
        ({"duration_ns": 32}, "at least 250 ns"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("file", [GPT2, TRACE])
def test_launches_of_a_kernel_need_the_same_resources(file: str, edit: dict[str, object], expected: str) -> None:
    evidence = read_evidence(file)
    gemms = [evidence.sightings[index] for index in find(evidence, "GEMM")]
    launches = Counter((one.name.name, one.grid) for one in gemms)
    last = [one for one in gemms if launches[one.name.name, one.grid] > 1][-1].index
    found = complaints(change(file, lambda one: edit if one.index == last else {}))
    assert any(one.sighting.index == last and expected in one.expected for one in found), found


@pytest.mark.parametrize("first", [False, True])
def test_a_resource_that_was_not_measured_contradicts_nothing(first: bool) -> None:
    sightings = read_evidence(GPT2).sightings
    repeated = Counter(one.name.name for one in sightings if one.name.kernel_class == "GEMM").most_common(1)[0][0]
    launches = [one.index for one in sightings if one.name.name == repeated]
    gone = launches[0 if first else -1]
    assert len(launches) > 1
    assert not complaints(change(GPT2, lambda seen: {"registers": None} if seen.index == gone else {}))


def test_shared_memory_is_compared_among_launches_with_the_same_grid() -> None:
    """The first launch of this kernel has another grid."""
    evidence = read_evidence("held_neox.csv.gz")
    gemms = [evidence.sightings[index] for index in find(evidence, "GEMM")]
    last = next(one for one in reversed(gemms) if next(a for a in gemms if a.name == one.name).grid != one.grid)
    edited = change("held_neox.csv.gz", lambda one: {"shared_bytes": 1024} if one.index == last.index else {})
    assert [one.sighting.index for one in complaints(edited)] == [last.index]


def test_a_block_has_a_limited_number_of_registers() -> None:
    found = complaints(change(GPT2, lambda one: {"block": (1024, 1, 1), "registers": 168} if one.index == 48 else {}))
    assert "at most 65,536 registers per block, on any GPU" in {one.expected for one in found}


def test_kernels_do_not_all_take_the_same_time() -> None:
    found = complaints(change(GPT2, lambda _: {"duration_ns": 40_000}))
    assert found[0].seen == "40,000 ns for all"


@pytest.mark.parametrize(
    ("device", "multiprocessors", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 108, "code for compute capability 8.0 or lower"),
        ("NVIDIA H200", 200, "at most 132 multiprocessors"),
        ("NVIDIA H100 PCIe", 132, "at most 114 multiprocessors"),
    ],
)
def test_a_gpu_runs_what_it_can(device: str, multiprocessors: int, expected: str) -> None:
    evidence = replace(read_evidence(GPT2), device=device, device_sms=multiprocessors)
    assert any(expected in one.expected for one in complaints(evidence))


@pytest.mark.parametrize(("device", "multiprocessors"), [("NVIDIA H200", 66), ("NVIDIA Unheard Of", 500)])
def test_a_shared_or_an_unknown_gpu_does_not_refute(device: str, multiprocessors: int) -> None:
    assert not complaints(replace(read_evidence(GPT2), device=device, device_sms=multiprocessors))

"""Which differences refute a claim, and which leave it open."""

from collections.abc import Callable

import msgspec
import pytest

from stepscope.recover.facts import Sighting
from stepscope.recover.replay.comparison import ReplayComparison, compare
from stepscope.recover.replay.outcome import ReplayVerdict, Surroundings, judge
from tests.unit.recover.claimed_runs import edit, rename, time
from tests.unit.recover.evidence_runs import read_evidence, with_kernels

TRACE, COUNTED = "held_gpt2.forward.json.gz", "held_gpt2.csv.gz"
VERSIONS = {"torch": "2.11.0", "transformers": "5.0", "cuda": "13.0"}
HERE = Surroundings(device="NVIDIA H200", evidence_device="NVIDIA H200", versions=VERSIONS)
STATED = msgspec.structs.replace(HERE, evidence_versions=VERSIONS, is_stated=True)


def spoil(file: str, how: Callable[[Sighting], Sighting], *, first: int = 0) -> ReplayComparison:
    evidence = read_evidence(file)
    changed = [how(one) if one.index >= first else one for one in evidence.sightings]
    return compare(with_kernels(evidence, changed), evidence, 5)


def wider(one: Sighting) -> Sighting:
    return msgspec.structs.replace(one, grid=(one.grid[0] + 1, *one.grid[1:]))


def renamed(one: Sighting) -> Sighting:
    return rename(one, "mine") if one.name.operation == "tanh" else one


def decide(comparison: ReplayComparison, where: Surroundings) -> tuple[ReplayVerdict, str]:
    return judge(comparison, where, layers="5 of 5 layers")


def test_equal_kernels_agree() -> None:
    verdict, why = decide(spoil(COUNTED, lambda one: one), HERE)
    assert verdict is ReplayVerdict.AGREES
    assert "all 100 compared kernels" in why
    assert "tensor_ops and store_bytes as 5 of 5 layers that ran here on NVIDIA H200" in why


@pytest.mark.parametrize("where", [HERE, STATED])
@pytest.mark.parametrize(
    ("file", "how", "seen"),
    [
        (TRACE, wider, "got grid"),
        (COUNTED, lambda one: edit(one, store_bytes=one.counters["store_bytes"] + 64), "got store_bytes"),
    ],
)
def test_the_same_kernels_with_other_work_refute(
    file: str, how: Callable[[Sighting], Sighting], seen: str, where: Surroundings
) -> None:
    verdict, why = decide(spoil(file, how), where)
    assert verdict is ReplayVerdict.REFUTED
    assert seen in why


def test_other_kernels_refute_only_the_same_program_and_versions() -> None:
    comparison = spoil(TRACE, renamed)
    assert decide(comparison, STATED)[0] is ReplayVerdict.REFUTED
    verdict, why = decide(comparison, HERE)
    assert verdict is ReplayVerdict.UNDECIDED
    assert "another implementation of the claimed model" in why
    unsure = msgspec.structs.replace(STATED, evidence_versions={"torch": "2.11.0"})  # transformers may differ
    assert decide(comparison, unsure)[0] is ReplayVerdict.UNDECIDED


def test_differences_outside_the_layers_refute_only_the_same_program() -> None:
    """An LM head that runs on the last token only is not a smaller model."""
    comparison = spoil(TRACE, wider, first=99)
    assert [one.in_layers for one in comparison.differences] == [False]
    assert decide(comparison, HERE)[0] is ReplayVerdict.UNDECIDED
    assert decide(comparison, STATED)[0] is ReplayVerdict.REFUTED


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "NVIDIA A100"}, "the evidence was recorded on NVIDIA H200, and this is NVIDIA A100"),
        ({"evidence_device": ""}, "the evidence was recorded on an unknown GPU"),
        ({"evidence_versions": VERSIONS | {"torch": "2.10.0"}}, "torch 2.10.0 in the evidence, 2.11.0 here"),
    ],
)
def test_another_gpu_or_version_explains_any_difference(changes: dict[str, object], reason: str) -> None:
    where = msgspec.structs.replace(STATED, **changes)
    verdict, why = decide(spoil(TRACE, wider), where)
    assert verdict is ReplayVerdict.UNDECIDED
    assert reason in why
    assert decide(spoil(TRACE, lambda one: one), where)[0] is ReplayVerdict.AGREES


def test_another_build_of_a_kernel_is_another_version() -> None:
    comparison = spoil(TRACE, lambda one: msgspec.structs.replace(one, registers=(one.registers or 0) + 1))
    verdict, why = decide(comparison, HERE)
    assert verdict is ReplayVerdict.UNDECIDED
    assert "built differently" in why


def test_durations_leave_a_claim_open() -> None:
    verdict, why = decide(spoil(TRACE, lambda one: time(one, 0.5)), HERE)
    assert verdict is ReplayVerdict.UNDECIDED
    assert "kernels take 0.50 times as long as here" in why
    uneven = spoil(TRACE, lambda one: time(one, 1.6 if one.name.kernel_class == "GEMM" else 1))
    verdict, why = decide(uneven, HERE)
    assert verdict is ReplayVerdict.UNDECIDED
    assert "outside their bands" in why


def test_nothing_compared_is_not_agreement() -> None:
    assert decide(ReplayComparison(kernels=5), HERE)[0] is ReplayVerdict.UNDECIDED
    missing = ReplayComparison(kernels=5, compared=5, equal=5, missing=["the replay has no kernels"])
    assert decide(missing, HERE)[0] is ReplayVerdict.UNDECIDED

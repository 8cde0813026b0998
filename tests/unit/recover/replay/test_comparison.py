"""Two recordings of the same run have the same kernels, and changed ones differ.

The recorded runs have counters of two layers and traces of up to five, from separate processes: this is what a replay
compares.
"""

from collections.abc import Callable

import msgspec
import pytest

from stepscope.recover.evidence.order import NoTransformerError
from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.facts import Sighting
from stepscope.recover.replay.comparison import DifferenceKind, ReplayComparison, compare
from stepscope.recover.replay.sections import cut_replay
from tests.unit.recover.claimed_runs import edit, rename, time
from tests.unit.recover.evidence_runs import COUNTERS, FOLDER, TRUTHS, read_evidence, truth_of, with_kernels

COMPILED = {name for name, truth in TRUTHS.items() if truth["compile"]}
BOTH = [name for name in TRUTHS if (FOLDER / f"{name}.csv.gz").exists() and name not in COMPILED]
TRAINED = [name for name in TRUTHS if (FOLDER / f"{name}.train.json.gz").exists() and name not in COMPILED]
TRACE, COUNTED = "held_gpt2.forward.json.gz", "held_gpt2.csv.gz"


def compare_files(evidence: str, replayed: str) -> ReplayComparison:
    return compare(read_evidence(evidence), read_evidence(replayed), truth_of(evidence)["num_layers"])


def change(file: str, index: int, how: Callable[[Sighting], Sighting]) -> KernelEvidence:
    sightings = list(read_evidence(file).sightings)
    sightings[index] = how(sightings[index])
    return with_kernels(read_evidence(file), sightings)


def layers_of(file: str, count: int) -> KernelEvidence:
    """Return the run with fewer layers: those in the middle are left out."""
    evidence = read_evidence(file)
    kept: list[Sighting] = []
    for section in cut_replay(evidence.sightings).sections:
        if section.kind not in ("layer", "backward") or section.number < count:
            kept += section.kernels
    return with_kernels(evidence, kept)


@pytest.mark.parametrize("name", BOTH)
def test_a_replay_of_two_layers_has_the_kernels_of_the_whole_run(name: str) -> None:
    found = compare_files(f"{name}.forward.json.gz", f"{name}.csv.gz")
    assert (found.differences, found.missing) == ([], [])
    assert found.equal == found.compared == found.kernels


@pytest.mark.parametrize("name", TRAINED)
def test_forward_layers_of_a_training_step_are_those_of_a_forward_pass(name: str) -> None:
    """Durations of two recordings are within their bands."""
    trained, forward = f"{name}.train.json.gz", f"{name}.forward.json.gz"
    found = compare_files(trained, forward)
    assert found.differences == []
    assert found.equal == found.compared > 0
    assert found.missing
    assert found.time_ratio == pytest.approx(1, abs=0.02)
    assert found.outside_share < 0.01


@pytest.mark.parametrize("name", TRAINED)
def test_a_training_step_is_compared_up_to_its_optimizer(name: str) -> None:
    file = f"{name}.train.json.gz"
    whole = compare(read_evidence(file), layers_of(file, 9), truth_of(file)["num_layers"])
    assert whole.equal == whole.compared == whole.kernels
    part = compare(read_evidence(file), layers_of(file, 2), truth_of(file)["num_layers"])
    assert part.differences == []
    if truth_of(file)["num_layers"] > 2:
        assert "optimizer" in part.notes[0]
        assert part.compared < part.kernels


@pytest.mark.parametrize("file", COUNTERS)
def test_counters_of_layers_that_were_not_replayed_are_equal(file: str) -> None:
    found = compare(read_evidence(file), layers_of(file, 2), truth_of(file)["num_layers"])
    if not found.missing:  # of compiled runs with more layers, only a whole replay is compared
        assert found.differences == []
        assert {"tensor_ops", "store_bytes", "write_sectors"} <= set(found.counters)


def test_compiled_layers_are_compared_only_as_a_whole() -> None:
    whole = compare_files("held_qwen2.forward.json.gz", "held_qwen2.csv.gz")
    assert whole.equal == whole.compared == whole.kernels
    part = compare_files("gpt2_compiled.forward.json.gz", "gpt2_compiled.csv.gz")
    assert "replay all layers" in part.missing[0]


@pytest.mark.parametrize(
    ("file", "index", "how", "kind", "seen"),
    [
        (TRACE, 40, lambda one: msgspec.structs.replace(one, grid=(7, 1, 1)), "launch", "grid (7, 1, 1)"),
        (TRACE, 40, lambda one: msgspec.structs.replace(one, block=(96, 1, 1)), "launch", "block (96, 1, 1)"),
        (TRACE, 40, lambda one: msgspec.structs.replace(one, registers=17), "build", "17 registers"),
        (TRACE, 40, lambda one: rename(one, "void mine()"), "kernel", "mine"),
        (COUNTED, 53, lambda one: edit(one, tensor_ops=one.counters["tensor_ops"] + 1), "work", "tensor_ops"),
        (COUNTED, 40, lambda one: edit(one, store_bytes=one.counters["store_bytes"] + 2), "work", "store_bytes"),
        (COUNTED, 40, lambda one: edit(one, write_sectors=2 * one.counters["write_sectors"]), "band", "write_sectors"),
    ],
)
def test_one_changed_kernel_is_found(
    file: str, index: int, how: Callable[[Sighting], Sighting], kind: DifferenceKind, seen: str
) -> None:
    found = compare(change(file, index, how), layers_of(file, 3), truth_of(file)["num_layers"])
    (difference,) = found.differences
    assert (difference.kind, difference.index, difference.launches) == (kind, index, 1)
    assert seen in difference.seen
    assert difference.in_layers
    assert "pass 1, layers " in difference.where
    assert found.equal == found.compared - (kind != "band")


def test_the_same_difference_in_every_layer_is_one() -> None:
    evidence = read_evidence(TRACE)
    wider = [
        msgspec.structs.replace(one, grid=(2 * one.grid[0], *one.grid[1:])) if one.name.operation == "tanh" else one
        for one in evidence.sightings
    ]
    assert wider != list(evidence.sightings)
    found = compare(with_kernels(evidence, wider), layers_of(TRACE, 2), 5)
    assert [one.launches for one in found.differences if one.in_layers] == [4]


def test_added_and_missing_kernels_are_found() -> None:
    kernels = list(read_evidence(TRACE).sightings)
    added = compare(
        with_kernels(read_evidence(TRACE), [*kernels[:41], kernels[40], *kernels[41:]]), layers_of(TRACE, 2), 5
    )
    (difference,) = added.differences
    assert (difference.kind, difference.expected) == ("kernel", "no kernel")
    missing = compare(with_kernels(read_evidence(TRACE), [*kernels[:40], *kernels[41:]]), layers_of(TRACE, 2), 5)
    (difference,) = missing.differences
    assert (difference.kind, difference.seen) == ("kernel", "no kernel")


def test_a_slower_clock_is_a_ratio_and_slow_kernels_are_outside_their_band() -> None:
    evidence = read_evidence(TRACE)
    slower = with_kernels(evidence, [time(one, 1.2) for one in evidence.sightings])
    found = compare(slower, layers_of(TRACE, 3), 5)
    assert found.time_ratio == pytest.approx(1.2, abs=0.03)
    assert found.outside_share < 0.02
    products = {one.index for one in evidence.sightings if one.name.kernel_class == "GEMM"}
    uneven = with_kernels(evidence, [time(one, 1.6 if one.index in products else 1) for one in evidence.sightings])
    assert compare(uneven, layers_of(TRACE, 3), 5).outside_share > 0.3


def test_traffic_to_memory_is_not_compared() -> None:
    """Caches decide it: layers of the same run differ by 99%."""
    evidence = read_evidence(COUNTED)
    hot = with_kernels(evidence, [edit(one, dram_read_bytes=0, dram_write_bytes=0) for one in evidence.sightings])
    assert compare(hot, layers_of(COUNTED, 2), 5).differences == []


def test_kernels_around_a_pass_are_not_compared() -> None:
    evidence = read_evidence(TRACE)
    copy = evidence.sightings[4]
    found = compare(with_kernels(evidence, [copy] * 3 + list(evidence.sightings) + [copy]), layers_of(TRACE, 2), 5)
    assert (found.differences, found.kernels - found.compared) == ([], 4)


def test_the_softmax_of_a_loss_is_not_a_layer() -> None:
    """A loss made of single operations begins with a row maximum, as unfused attention does."""
    evidence = read_evidence("builtin_fp32.train.json.gz")
    maximum = next(one for one in evidence.sightings if "maximum" in one.name.operation)
    kernels: list[Sighting] = []
    for one in evidence.sightings:
        kernels += [maximum, one] if "log-softmax fwd" in one.name.short else [one]
    changed = with_kernels(evidence, kernels)
    assert len(changed.sightings) == len(evidence.sightings) + 2
    assert cut_replay(changed.sightings).calls == 5
    found = compare(changed, changed, 4)
    assert found.equal == found.compared == found.kernels


def test_another_number_of_layers_is_not_compared() -> None:
    with pytest.raises(NoTransformerError, match="no whole pass of 6 layers"):
        compare(read_evidence(TRACE), layers_of(TRACE, 2), 6)
    with pytest.raises(NoTransformerError, match="a pass with 5 attention calls, expected 4"):
        compare(read_evidence(TRACE), layers_of(TRACE, 2), 4)
    with pytest.raises(NoTransformerError, match="no GEMM"):
        compare(with_kernels(read_evidence(TRACE), []), layers_of(TRACE, 2), 5)


def test_a_recording_that_begins_within_a_pass_is_compared_from_the_next_pass_on() -> None:
    evidence = read_evidence(TRACE)
    cut = with_kernels(evidence, [*evidence.sightings[40:], *evidence.sightings, *evidence.sightings[:50]])
    found = compare(cut, layers_of(TRACE, 2), 5)
    assert found.differences == []
    assert len(evidence.sightings) <= found.compared < len(cut.sightings)

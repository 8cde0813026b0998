"""Copied kernels: which copies show in the noise of the measurements, and that chance does not."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from stepscope.recording.readers.formats import open_recording
from stepscope.recover.claims.plausibility import find_contradictions
from stepscope.recover.claims.repetition import find_copies, has_noise
from stepscope.recover.evidence.order import is_attention, is_softmax
from stepscope.recover.evidence.recording import gather
from stepscope.recover.facts import Sighting
from tests.unit.recover.claimed_runs import run_again
from tests.unit.recover.evidence_runs import COUNTERS, TRACES, read_evidence, with_kernels

RESULTS = Path(__file__).parents[4] / "bench" / "results"
FORWARD = [file for file in TRACES if ".forward." in file]
GPT2 = "gpt2_bf16_odd.csv.gz"
# Eight kernels per layer, and durations only: not enough to rule out chance if the copy has other gaps.
SHORT = ("gpt2_compiled.train.json.gz", "gpt2_compiled.forward.json.gz", "gpt2_compiled.csv.gz")

Layer = tuple[int, int]


def find_layers(sightings: Sequence[Sighting]) -> list[Layer]:
    """Return the kernels from one attention to the next, in the first pass."""
    is_fused = any(is_attention(one, backward=False) for one in sightings)
    starts = [one.index for one in sightings if (is_attention(one, backward=False) if is_fused else is_softmax(one))]
    kernels = [one.name.name for one in sightings]
    length = starts[1] - starts[0]
    layers = [(start, start + length) for start in starts]
    same = [layer for layer in layers if kernels[slice(*layer)] == kernels[slice(*layers[0])]]
    return [layer for place, layer in enumerate(same) if layer[0] == same[0][0] + place * length]


def arrange(sightings: Sequence[Sighting], order: str) -> list[Sighting]:
    """Return the kernels with copies of the layers of the first pass."""
    layers = find_layers(sightings)
    parts = [list(sightings[slice(*layer)]) for layer in layers]
    before, after = list(sightings[: layers[0][0]]), list(sightings[layers[-1][1] :])
    match order:
        case "pairs":
            inside = [one for part in parts for one in (*part, *part)]
        case "whole":
            inside = [one for part in (*parts, *parts) for one in part]
        case "reversed":
            inside = [one for part in (*parts, *parts[::-1]) for one in part]
        case "one":
            inside = [one for part in (*parts, parts[0]) for one in part]
        case _:
            raise AssertionError(order)
    return [*before, *inside, *after]


@pytest.mark.parametrize("order", ["pairs", "whole", "reversed", "one"])
@pytest.mark.parametrize("file", [file for file in (*COUNTERS, *FORWARD) if file not in SHORT])
def test_copied_layers_show_in_their_noise(file: str, order: str) -> None:
    evidence = read_evidence(file)
    found = list(find_copies(with_kernels(evidence, arrange(evidence.sightings, order)).sightings))
    assert found
    assert "that vary between launches" in found[0].expected


@pytest.mark.parametrize("file", [file for file in TRACES if ".train." in file and file not in SHORT])
def test_layers_copied_in_a_training_step_show_in_their_noise(file: str) -> None:
    evidence = read_evidence(file)
    assert list(find_copies(with_kernels(evidence, arrange(evidence.sightings, "pairs")).sightings))


@pytest.mark.parametrize("file", ["gpt2_bf16_odd.csv.gz", "held_llama.csv.gz", "llama_fp32.csv.gz"])
def test_layers_that_run_again_do_not_look_like_copies(file: str) -> None:
    evidence = read_evidence(file)
    kernels = arrange(evidence.sightings, "pairs")
    places = {one.index: place for place, one in reversed(list(enumerate(kernels)))}
    again = [one if place == places[one.index] else run_again(one) for place, one in enumerate(kernels)]
    assert not list(find_copies(with_kernels(evidence, again).sightings))


@pytest.mark.parametrize("file", [*COUNTERS, *TRACES])
def test_a_genuine_file_does_not_contradict_itself(file: str) -> None:
    assert not list(find_contradictions(read_evidence(file)))


@pytest.mark.parametrize("folder", sorted(path.name for path in (RESULTS / "profile_h200").iterdir() if path.is_dir()))
def test_no_stretch_of_a_long_recording_looks_copied(folder: str) -> None:
    sightings = gather(open_recording(RESULTS / "profile_h200" / folder)).sightings
    for start, size in ((0, 60), (len(sightings) // 3, 200), (len(sightings) // 2, 700)):
        stretch = sightings[start : start + size]
        assert not list(find_copies([msgspec.structs.replace(one, index=i) for i, one in enumerate(stretch)]))


@pytest.mark.parametrize(
    "file", ["builtin_fp32.train.json.gz", "llama_bf16.train.json.gz", "held_smol.forward.json.gz"]
)
def test_a_coarse_clock_shows_no_copies(file: str) -> None:
    def round_down(time_ns: int) -> int:
        return time_ns // 1000 * 1000

    coarse = []
    for one in read_evidence(file).sightings:
        assert one.start_ns is not None
        start, end = round_down(one.start_ns), round_down(one.start_ns + one.duration_ns)
        coarse.append(msgspec.structs.replace(one, start_ns=start, duration_ns=end - start))
    assert not list(find_copies(coarse))
    assert not has_noise(coarse)


@pytest.mark.parametrize("file", ["held_gpt2.csv.gz", "held_gpt2_fp16.csv.gz", "held_neox.csv.gz"])
@pytest.mark.parametrize("keep_durations", [True, False])
def test_layers_put_together_from_several_show_as_twins(file: str, keep_durations: bool) -> None:
    """Neighbours never come from the same layer, so runs do not show it."""
    evidence = read_evidence(file)
    sightings = evidence.sightings
    layers = find_layers(sightings)[:2]
    mixed = [sightings[layers[place % 2][0] + place] for place in range(layers[0][1] - layers[0][0])]
    if not keep_durations:
        mixed = [msgspec.structs.replace(one, duration_ns=run_again(one).duration_ns) for one in mixed]
    end = layers[1][1]
    kernels = [*sightings[:end], *mixed, *sightings[end:]]
    [found] = find_copies(with_kernels(evidence, kernels).sightings)
    assert "of an earlier launch of the same kernel" in found.seen


@pytest.mark.parametrize(
    "file", ["held_qwen2.forward.json.gz", "llama_compiled.forward.json.gz", "gpt2_compiled.forward.json.gz"]
)
def test_repeated_durations_of_compiled_layers_show(file: str) -> None:
    """Some kernels differ between the layers, and few durations are left to estimate the clock from."""
    kernels = list(read_evidence(file).sightings)
    first, second, *_, last = (one.index for one in kernels if is_attention(one, backward=False))
    period = second - first
    for index in range(second, last):
        kernels[index] = msgspec.structs.replace(kernels[index], duration_ns=kernels[index - period].duration_ns)
    assert {one.expected for one in find_copies(kernels)} == {"durations that vary between launches, as on every GPU"}


def test_other_durations_do_not_hide_the_same_traffic() -> None:
    evidence = read_evidence(GPT2)
    kernels = [
        msgspec.structs.replace(one, duration_ns=one.duration_ns + 32 * place)
        for place, one in enumerate(arrange(evidence.sightings, "pairs"))
    ]
    found = list(find_copies(with_kernels(evidence, kernels).sightings))
    assert "traffic" in found[0].expected


def test_a_copied_kernel_may_be_a_coincidence() -> None:
    """The file has two launches with the same values by chance."""
    sightings = read_evidence("held_llama.csv.gz").sightings
    assert sightings[86].noise == sightings[138].noise
    assert sightings[86].duration_ns == sightings[138].duration_ns
    assert not list(find_copies(sightings))

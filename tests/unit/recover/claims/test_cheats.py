"""Cheats on recorded evidence, and whether they are caught. The table in docs/verify.md lists these tests."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from stepscope.recover.claims.verdict import ClaimVerdict, Verification
from stepscope.recover.claims.verification import verify
from stepscope.recover.evidence.order import NoTransformerError, is_product
from stepscope.recover.facts import Sighting
from tests.unit.recover.claimed_runs import edit, find, rename, run_again, spoil, time, true_claim, verified
from tests.unit.recover.evidence_runs import read_evidence

GPT2 = "gpt2_bf16_odd.csv.gz"  # two layers: projection, attention, output, up, down; attention is #15 and #32
TRACE = "gpt2_fp32_efficient.forward.json.gz"  # three layers
TRAIN = "gpt2_fp32_efficient.train.json.gz"
LAYER = slice(15, 32)  # of GPT2, from one attention to the next
UP = 36  # in the second layer
PAGE = Path(__file__).parents[4] / "docs" / "verify.md"


def first(answer: Verification) -> tuple[ClaimVerdict, int, str]:
    return answer.verdict, answer.refuted_by[0].index, answer.refuted_by[0].what


@pytest.mark.parametrize("file", [GPT2, TRACE, TRAIN, "llama_bf16.csv.gz", "neox_fp16.csv.gz"])
def test_a_genuine_run_passes(file: str) -> None:
    answer = verified(file)
    assert answer.verdict is ClaimVerdict.CONSISTENT, answer.why
    assert not answer.unexplained


def test_fewer_layers_are_refuted() -> None:
    assert first(spoil(GPT2, lambda all_: all_, num_layers=3)) == (ClaimVerdict.REFUTED, 15, "num_layers")
    answer = spoil(TRACE, lambda all_: all_[:32] + all_[49:])
    assert first(answer)[::2] == (ClaimVerdict.REFUTED, "num_layers")
    assert answer.fields["num_layers"].verdict == "refuted"


def test_a_narrower_layer_is_named() -> None:
    def thin(kernels: list[Sighting]) -> list[Sighting]:
        half = {key: kernels[UP].counters[key] // 2 for key in ("tensor_ops", "tensor_instructions", "fadd")}
        return [*kernels[:UP], edit(kernels[UP], **half), *kernels[UP + 1 :]]

    answer = spoil(GPT2, thin)
    assert first(answer) == (ClaimVerdict.REFUTED, UP, "feed-forward up projection")
    assert answer.refuted_by[0].where == "pass 1, layer 2"
    assert "N 2,560" in answer.refuted_by[0].expected


def test_zero_padding_is_not_caught_and_documented() -> None:
    # No counter depends on the values of weights: this evidence is the same whatever the matrices contain.
    assert verified(GPT2).verdict is ClaimVerdict.CONSISTENT
    row = next(line for line in PAGE.read_text().splitlines() if "padded with zeros" in line)
    assert "**consistent**" in row


@pytest.mark.parametrize("place", [17, 30])
def test_an_extra_gemm_in_a_layer_is_unclaimed_work(place: int) -> None:
    answer = spoil(GPT2, lambda all_: [*all_[:place], all_[14], *all_[place:]])
    assert answer.verdict is ClaimVerdict.REFUTED
    assert "unclaimed work" in {one.what for one in answer.refuted_by}
    assert answer.unexplained[0].operations == read_evidence(GPT2).sightings[14].counters["tensor_ops"] + 1167360


def test_gemms_after_the_lm_head_are_unclaimed_work() -> None:
    answer = spoil(GPT2, lambda all_: [*all_, all_[28], all_[28]])
    assert first(answer)[::2] == (ClaimVerdict.REFUTED, "unclaimed work")
    assert answer.unexplained[0].launches == 2


@pytest.mark.parametrize("slow", [0, 48])
def test_a_slow_kernel_does_not_hide_gemms(slow: int) -> None:
    """The first lookup, or the LM head, takes 99.9% of the time."""

    def hide(kernels: list[Sighting]) -> list[Sighting]:
        long = msgspec.structs.replace(kernels[slow], duration_ns=1_000 * sum(one.duration_ns for one in kernels))
        return [*kernels[:slow], long, *kernels[slow + 1 :], kernels[28], run_again(kernels[28])]

    answer = spoil(GPT2, hide)
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert "other kernels take unusually long" in answer.why


def test_slow_layers_do_not_hide_operations() -> None:
    def hide(kernels: list[Sighting]) -> list[Sighting]:
        return [*(time(one, 100) for one in kernels), kernels[28], run_again(kernels[28])]

    assert "more than 1% of the operations" in spoil(GPT2, hide).why


def test_a_slow_kernel_does_not_hide_other_streams() -> None:
    evidence = read_evidence(GPT2)
    slow = msgspec.structs.replace(evidence.sightings[0], duration_ns=10**10)
    hidden = replace(evidence, sightings=(slow, *evidence.sightings[1:]))
    assert verify([hidden], true_claim(GPT2), unseen=1e-4).verdict is ClaimVerdict.UNDECIDED
    assert verify([evidence], true_claim(GPT2), unseen=1e-4).verdict is ClaimVerdict.CONSISTENT


def test_busy_work_in_a_layer_is_listed_and_cannot_tell() -> None:
    def idle(kernels: list[Sighting]) -> list[Sighting]:
        odd = msgspec.structs.replace(edit(kernels[20], store_bytes=1000 * 1000 * 2), grid=(977, 1, 1))
        return [*kernels[:21], odd, *kernels[21:]]

    answer = spoil(GPT2, idle)
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert answer.unexplained[0].first_index == 21
    assert "inside the layers" in answer.why


def test_copied_layers_are_detected() -> None:
    answer = spoil(GPT2, lambda all_: [*all_[:32], *all_[LAYER], *all_[32:]], num_layers=3)
    assert first(answer)[::2] == (ClaimVerdict.REFUTED, "inconsistent evidence")
    assert "kernels in a row with exactly the values of those starting at #1" in answer.refuted_by[0].seen


def test_a_layer_copied_in_a_trace_is_detected_by_its_durations() -> None:
    answer = spoil(TRACE, lambda all_: [*all_[:32], *all_[15:32], *all_[32:]], num_layers=4)
    assert "inconsistent evidence" in {one.what for one in answer.refuted_by}


@pytest.mark.parametrize(
    "file", ["builtin_fp32.train.json.gz", "gpt2_compiled.forward.json.gz", "held_gpt2_fp16.forward.json.gz"]
)
def test_equal_durations_of_a_coarse_clock_do_not_refute(file: str) -> None:
    def measure_coarsely(kernels: list[Sighting]) -> list[Sighting]:
        return [
            msgspec.structs.replace(one, duration_ns=1000 * max(1, round(one.duration_ns / 1000))) for one in kernels
        ]

    answer = spoil(file, measure_coarsely)
    assert answer.verdict is not ClaimVerdict.REFUTED, answer.why
    assert any("resolution of 1,000 ns" in note for note in answer.notes)


def test_a_repeated_layer_is_not_caught_in_a_forward_pass() -> None:
    def repeat(kernels: list[Sighting]) -> list[Sighting]:
        return [*kernels[:32], *map(run_again, kernels[LAYER]), *kernels[32:]]

    assert spoil(GPT2, repeat, num_layers=3).verdict is ClaimVerdict.CONSISTENT


def test_a_repeated_layer_is_caught_by_the_optimizer() -> None:
    def share(kernels: list[Sighting]) -> list[Sighting]:
        """Update the weights of one layer of three: 2 · 7,087,872 fewer elements, in blocks of 65,536."""
        return [
            msgspec.structs.replace(one, grid=(one.grid[0] - 216, 1, 1))
            if one.name.kernel_class == "optimizer" and one.grid[0] < 320
            else one
            for one in kernels
        ]

    answer = spoil(TRAIN, share, parameters=60_219_648)
    assert first(answer)[::2] == (ClaimVerdict.REFUTED, "optimizer")
    assert "share weights" in answer.refuted_by[0].seen
    answer = spoil(TRAIN, share)  # parameters are not claimed
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert "share weights" in answer.why


def test_a_repeated_layer_cannot_tell_with_its_allocations() -> None:
    evidence = read_evidence(TRACE)
    matrix, embedding = 4 * 768 * 3072, 4 * 768 * 50257
    for count, verdict in ((6, ClaimVerdict.CONSISTENT), (2, ClaimVerdict.UNDECIDED)):
        sizes = (embedding, *(matrix,) * count)
        answer = verify([replace(evidence, allocations=sizes, held=sizes)], true_claim(TRACE))
        assert answer.verdict is verdict, answer.why


def test_swapped_names_contradict_the_work() -> None:
    def swap(kernels: list[Sighting]) -> list[Sighting]:
        add, down = kernels[29], kernels[28]
        swapped = [rename(down, add.name.name), rename(add, down.name.name)]
        return [*kernels[:28], *swapped, *kernels[30:]]

    answer = spoil(GPT2, swap)
    assert answer.verdict is ClaimVerdict.REFUTED
    against = {one.index: one.seen for one in answer.refuted_by if one.what == "inconsistent evidence"}
    assert against[28] == "tensor_ops 2,516,582,400"
    assert against[29] == "tensor_ops 0"


@pytest.mark.parametrize("kind", ["GEMM", "norm", "elementwise"])
def test_unknown_names_never_pass(kind: str) -> None:
    chosen = find(read_evidence(TRACE), kind)[{"GEMM": 6, "norm": 3, "elementwise": 20}[kind]]
    answer = spoil(TRACE, lambda all_: [rename(one, "kernel_7f") if one.index == chosen else one for one in all_])
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert "unknown name" in answer.why


def test_a_run_without_attention_or_gemms_is_not_a_decoder() -> None:
    for kind in ("attention", "GEMM"):
        hidden = set(find(read_evidence(GPT2), kind))
        with pytest.raises(NoTransformerError, match=r"no (attention|GEMM) kernels"):
            spoil(GPT2, lambda all_, hidden=hidden: [one for one in all_ if one.index not in hidden])  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"tensor_ops": 4_089_446_400}, "106,496"),
        ({"tensor_instructions": 0}, "none"),
        ({"write_sectors": 0, "store_bytes": 64}, "write_sectors 0"),
        ({"dram_read_bytes": 10**9}, "µs"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_single_edited_numbers_are_inconsistent(changes: dict[str, int], seen: str) -> None:
    answer = spoil(GPT2, lambda all_: [*all_[:UP], edit(all_[UP], **changes), *all_[UP + 1 :]])
    assert answer.verdict is ClaimVerdict.REFUTED
    against = [one for one in answer.refuted_by if one.what == "inconsistent evidence"]
    assert against[0].index == UP
    assert seen in against[0].seen


def test_work_faster_than_the_gpu_is_refuted() -> None:
    slow = read_evidence(GPT2).sightings[48]
    answer = spoil(GPT2, lambda all_: [*all_[:48], time(slow, 0.05)])
    assert "inconsistent evidence" in {one.what for one in answer.refuted_by}
    # Without counters, the work follows from the claim.
    trace = "gpt2_tf32.forward.json.gz"
    answer = spoil(trace, lambda all_: [time(one, 0.02) if is_product(one) else one for one in all_], gated=None)
    assert answer.verdict is ClaimVerdict.REFUTED
    assert answer.refuted_by[0].what.endswith("duration")


def test_a_consistent_forgery_is_not_caught() -> None:
    """Numbers that a GPU could have reported pass: only trust in who collected them helps."""

    def forge(kernels: list[Sighting]) -> list[Sighting]:
        return [time(one, 1.1) for one in kernels]

    assert spoil(GPT2, forge).verdict is ClaimVerdict.CONSISTENT


@pytest.mark.parametrize(("file", "dtype"), [(GPT2, "fp16"), (TRACE, "tf32"), ("neox_fp16.csv.gz", "bf16")])
def test_another_dtype_is_refuted_by_gemm_names(file: str, dtype: str) -> None:
    answer = spoil(file, lambda all_: all_, dtype=dtype)
    assert first(answer)[::2] == (ClaimVerdict.REFUTED, "dtype")
    assert answer.fields["dtype"].verdict == "refuted"


def test_an_extra_gemm_in_one_layer_is_named() -> None:
    answer = spoil(TRACE, lambda all_: [*all_[:40], all_[14], *all_[40:]])
    assert first(answer) == (ClaimVerdict.REFUTED, 40, "unclaimed work")
    assert answer.refuted_by[0].where == "pass 1, layer 2"


def test_a_renamed_gemm_is_detected_by_its_work() -> None:
    answer = spoil(GPT2, lambda all_: [*all_, rename(all_[28], "kernel_7f"), rename(all_[28], "kernel_7f")])
    assert first(answer)[::2] == (ClaimVerdict.REFUTED, "unclaimed work")
    assert "uses tensor cores" in answer.unexplained[0].why


def test_an_extra_gemm_in_the_backward_pass_is_unclaimed_work() -> None:
    def busy(kernels: list[Sighting]) -> list[Sighting]:
        place = find(read_evidence(TRAIN), "optimizer")[0]
        small = msgspec.structs.replace(kernels[14], grid=(1, 1, 1), duration_ns=10**6)
        return [*kernels[:place], small, *kernels[place:]]

    answer = spoil(TRAIN, busy)
    assert first(answer)[::2] == (ClaimVerdict.REFUTED, "unclaimed work")
    assert "not a gradient" in answer.unexplained[0].why


def test_long_unknown_kernels_outside_the_layers_cannot_tell() -> None:
    head = read_evidence(GPT2).sightings[48]
    unknown = msgspec.structs.replace(rename(head, "kernel_7f"), counters={}, duration_ns=30_000)
    assert "unknown names take more" in spoil(GPT2, lambda all_: [*all_, unknown]).why
    odd = read_evidence(GPT2).sightings[20]
    odd = msgspec.structs.replace(edit(odd, store_bytes=2_000_000), grid=(977, 1, 1), duration_ns=60_000)
    answer = spoil(GPT2, lambda all_: [*all_, odd])
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert "more than 5% of the GPU time" in answer.why


@pytest.mark.parametrize(("file", "kernels"), [("held_llama.csv.gz", 108), ("qwen3_cudnn.csv.gz", 84), (GPT2, 32)])
def test_a_file_that_ends_in_a_layer_is_not_refuted(file: str, kernels: int) -> None:
    """The first GEMM of the layer is not the LM head."""
    answer = spoil(file, lambda all_: all_[:kernels])
    assert answer.verdict is ClaimVerdict.UNDECIDED, answer.why
    assert "only part of pass 1" in answer.why

"""Verification: what refutes a claim, which fields are tested, and when it cannot tell."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from stepscope.jobs.recover import encode
from stepscope.recording.readers.formats import open_recording
from stepscope.recover.claims.claim import make_claim, read_claim
from stepscope.recover.claims.prediction import admits_attention
from stepscope.recover.claims.verdict import ClaimVerdict, describe_interval, is_narrowed, is_tested, undecided
from stepscope.recover.claims.verification import verify
from stepscope.recover.evidence.recording import gather
from stepscope.recover.facts import Attention, Rule, Sighting, exactly
from stepscope.recover.shape import ClaimedShape
from stepscope.recover.solve.recovery import recover
from tests.unit.recover.claimed_runs import find, rename, run_again, spoil, true_claim, verified
from tests.unit.recover.evidence_runs import COUNTERS, FOLDER, TRACES, read_evidence, truth_of, with_kernels

GPT2 = "gpt2_bf16_odd.csv.gz"
LLAMA = "llama_bf16.csv.gz"
# What Hopper's persistent kernels leave open even with counters.
AMBIGUOUS = ("llama_compiled.csv.gz",)
COMPILED = "neox_compiled.forward.json.gz"


@pytest.mark.parametrize("file", [file for file in COUNTERS if not file.startswith("held_")])
def test_a_true_claim_is_consistent_with_counters(file: str) -> None:
    answer = verified(file)
    assert answer.verdict is (ClaimVerdict.UNDECIDED if file in AMBIGUOUS else ClaimVerdict.CONSISTENT), answer.why
    assert answer.unexplained_share < 0.01


@pytest.mark.parametrize("file", [*COUNTERS, *TRACES])
def test_a_true_claim_is_never_refuted(file: str) -> None:
    answer = verified(file)
    assert answer.verdict is not ClaimVerdict.REFUTED, answer.why
    assert not answer.refuted_by


@pytest.mark.parametrize(
    "file", [GPT2, "llama_bf16.forward.json.gz", "held_llama.csv.gz", "gpt2_compiled.train.json.gz"]
)
def test_what_was_recovered_does_not_refute_its_own_evidence(file: str, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(encode(recover([read_evidence(file)])))
    answer = verify([read_evidence(file)], read_claim(tmp_path / "model.json"))
    assert answer.verdict is not ClaimVerdict.REFUTED, answer.why


@pytest.mark.parametrize("file", [GPT2, LLAMA, "gpt2_bf16_odd.train.json.gz", "qwen3_cudnn.forward.json.gz"])
def test_an_unknown_number_of_sms_does_not_refute_a_true_claim(file: str) -> None:
    answer = verify([replace(read_evidence(file), device_sms=None)], true_claim(file))
    assert answer.verdict is not ClaimVerdict.REFUTED, answer.why
    assert any("the number of SMs is unknown" in note for note in answer.notes)


def test_the_lm_head_does_not_determine_the_dtype() -> None:
    file = "gpt2_fp32_efficient.forward.json.gz"
    *inside, _ = find(read_evidence(file), "GEMM")

    def hide(kernels: list[Sighting]) -> list[Sighting]:
        nameless = [msgspec.structs.replace(one, name=msgspec.structs.replace(one.name, dtype=None)) for one in kernels]
        return [nameless[one.index] if one.index in inside else one for one in kernels]

    answer = spoil(file, hide, dtype="bf16")
    assert (answer.verdict, answer.fields["dtype"].verdict) == (ClaimVerdict.UNDECIDED, "not tested")


def test_sizes_of_a_sharded_rank_do_not_refute() -> None:
    file = "gpt2_fp32_efficient.forward.json.gz"
    whole = true_claim(file, num_heads=24, num_kv_heads=24, d_head=64, d_ff=6144)
    first, *_, last = find(read_evidence(file), "attention")
    for exchanges, verdict in (((first + 1,), ClaimVerdict.UNDECIDED), ((last + 1,), ClaimVerdict.REFUTED)):
        answer = verify([replace(read_evidence(file), exchanges=exchanges)], whole)
        assert answer.verdict is verdict, answer.why
    shared = verify([replace(read_evidence(file), exchanges=(first + 1,))], whole)
    assert "one rank's shard" in shared.why
    assert shared.fields["d_ff"].verdict == "not tested"


def test_a_partial_optimizer_step_cannot_tell() -> None:
    file = "gpt2_compiled.train.json.gz"
    kept = set(find(read_evidence(file), "optimizer")[::2])

    def shard(kernels: list[Sighting]) -> list[Sighting]:
        return [one for one in kernels if one.name.kernel_class != "optimizer" or one.index in kept]

    answer = spoil(file, shard)
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert "or other ranks have the rest" in answer.why
    assert spoil(file, shard, parameters=70_000_000).fields["parameters"].verdict == "refuted"
    shared = replace(read_evidence(file), sightings=with_kernels(
        read_evidence(file), shard(list(read_evidence(file).sightings))
    ).sightings, exchanges=(0,))  # fmt: skip
    assert verify([shared], true_claim(file, parameters=70_000_000)).verdict is ClaimVerdict.UNDECIDED


@pytest.mark.parametrize("file", [COMPILED, "gpt2_bf16_odd.forward.json.gz"])
@pytest.mark.parametrize("share", [0.1, 0.35, 0.6, 0.95])
def test_a_recording_can_begin_and_end_within_a_pass(file: str, share: float) -> None:
    def cut(kernels: list[Sighting]) -> list[Sighting]:
        at = round(share * len(kernels))
        passes = [*kernels[at:], *kernels, *kernels[:at]]
        # No two passes have the same durations.
        return [msgspec.structs.replace(one, duration_ns=one.duration_ns + i * i % 401) for i, one in enumerate(passes)]

    answer = spoil(file, cut)
    assert answer.verdict is not ClaimVerdict.REFUTED, answer.why
    layers = true_claim(file).num_layers or 0
    assert spoil(file, cut, num_layers=layers - 1).fields["num_layers"].verdict == "refuted"


@pytest.mark.parametrize(
    ("file", "kept"),
    [
        ("held_smol.forward.json.gz", slice(49)),  # one attention call, and the file ends inside that layer
        ("held_smol.forward.json.gz", slice(57)),  # in it, a gate could be mistaken for both projections
        ("held_smol.forward.json.gz", slice(73)),  # and a query projection for the LM head
        ("held_smol.forward.json.gz", slice(49, None)),
        ("held_llama.forward.json.gz", slice(89, None)),
        ("llama_compiled.csv.gz", slice(3, None)),  # between the query projection and the GEMM for rotary angles
        ("neox_compiled.csv.gz", slice(2, None)),
        ("gpt2_bf16_odd.csv.gz", slice(3, None)),  # between the lookups of tokens and positions
    ],
)
def test_a_file_that_ends_early_or_starts_late_does_not_refute(file: str, kept: slice) -> None:
    answer = spoil(file, lambda kernels: kernels[kept])
    assert answer.verdict is not ClaimVerdict.REFUTED, answer.why


def test_an_optimizer_that_the_file_cuts_does_not_refute_the_parameters() -> None:
    file = "held_gpt2.train.json.gz"
    parameters = truth_of(file)["parameters"]
    assert spoil(file, lambda kernels: kernels[:293], parameters=parameters).verdict is ClaimVerdict.UNDECIDED
    assert spoil(file, lambda kernels: kernels, parameters=2 * parameters).verdict is ClaimVerdict.REFUTED


def test_positions_can_be_looked_up_before_tokens() -> None:
    def swap(kernels: list[Sighting]) -> list[Sighting]:
        return [kernels[3], *kernels[1:3], kernels[0], *kernels[4:]]

    assert spoil(GPT2, swap).verdict is ClaimVerdict.CONSISTENT
    assert spoil(GPT2, swap, batch=None, context=None).verdict is ClaimVerdict.CONSISTENT


def test_a_partial_pass_does_not_refute_num_layers() -> None:
    answer = spoil("gpt2_fp32_efficient.forward.json.gz", lambda kernels: kernels[:40], d_ff=1024)
    assert answer.verdict is ClaimVerdict.REFUTED
    assert answer.fields["num_layers"].verdict == "not refuted"


@pytest.mark.parametrize("file", [GPT2, LLAMA, "qwen3_cudnn.csv.gz", "gpt2_fp16_naive.csv.gz"])
@pytest.mark.parametrize("name", ["d_model", "num_heads", "d_head", "d_ff", "vocab_size", "batch", "context"])
def test_doubling_a_size_is_refuted_and_named(file: str, name: str) -> None:
    claim = true_claim(file)
    answer = verify([read_evidence(file)], true_claim(file, **{name: 2 * getattr(claim, name)}))
    assert answer.verdict is ClaimVerdict.REFUTED
    assert answer.fields[name].verdict == "refuted"
    assert answer.refuted_by[0].expected
    assert answer.refuted_by[0].seen


def test_attention_separates_sizes_that_gemms_cannot() -> None:
    swapped = verify([read_evidence(GPT2)], true_claim(GPT2, num_heads=20, num_kv_heads=20, d_head=32))
    assert swapped.verdict is ClaimVerdict.REFUTED
    assert swapped.refuted_by[0].what == "attention"
    swapped = verify([read_evidence(GPT2)], true_claim(GPT2, batch=6, context=100))
    assert swapped.verdict is ClaimVerdict.REFUTED


def test_a_wrong_gated_is_refuted() -> None:
    assert verify([read_evidence(GPT2)], true_claim(GPT2, gated=True)).verdict is ClaimVerdict.REFUTED
    answer = verify([read_evidence(LLAMA)], true_claim(LLAMA, gated=False))
    assert answer.verdict is ClaimVerdict.REFUTED


def test_other_values_that_pass_are_listed() -> None:
    answer = verified("gpt2_compiled.csv.gz")
    low, high = answer.fields["d_ff"].passes_too[0]
    assert (low, high) == (3009, 3071)
    evidence = [read_evidence("gpt2_compiled.csv.gz")]
    for size, verdict in ((low, ClaimVerdict.CONSISTENT), (low - 1, ClaimVerdict.REFUTED)):
        claim = true_claim("gpt2_compiled.csv.gz", d_ff=size)
        assert verify(evidence, claim).verdict is verdict
    assert describe_interval((5, None)) == "5 or more"


def test_a_size_without_effect_is_not_tested() -> None:
    answer = verified("llama_bf16.forward.json.gz")  # a trace whose LM head fills the GPU whatever vocab_size is
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert answer.fields["vocab_size"].verdict == "not tested"
    assert answer.fields["d_model"].verdict == "tested"
    assert "vocab_size: 4,097 to 31,999" in answer.why
    assert any("no counters" in note for note in answer.notes)


def test_counters_and_a_trace_together_test_more() -> None:
    files = ["qwen3_cudnn.forward.json.gz", "qwen3_cudnn.csv.gz"]
    alone = verified(files[0])
    both = verify([read_evidence(file) for file in files], true_claim(files[1]))
    assert alone.verdict is ClaimVerdict.UNDECIDED
    assert both.verdict is ClaimVerdict.CONSISTENT
    assert both.kernels == 2 * alone.kernels


@pytest.mark.parametrize("file", [GPT2, LLAMA, "builtin_autocast.csv.gz"])
def test_a_claim_without_batch_and_context_uses_the_tokens_of_the_run(file: str) -> None:
    open_claim = {"batch": None, "context": None}
    answer = verify([read_evidence(file)], true_claim(file, **open_claim))
    assert answer.verdict is ClaimVerdict.CONSISTENT, answer.why
    truth = true_claim(file)
    assert any(f"batch {truth.batch:,}, context {truth.context:,}" in note for note in answer.notes)
    wrong = verify([read_evidence(file)], true_claim(file, d_ff=2 * (truth.d_ff or 0), **open_claim))
    assert wrong.verdict is ClaimVerdict.REFUTED


def test_a_partial_claim_is_completed_by_recovery() -> None:
    few = dict.fromkeys(("d_model", "num_heads", "num_kv_heads", "d_head", "vocab_size", "batch", "context"))
    answer = verify([read_evidence(GPT2)], true_claim(GPT2, **few))
    assert answer.verdict is ClaimVerdict.CONSISTENT, answer.why
    assert answer.fields["d_ff"].verdict == "tested"
    assert answer.fields["d_model"].verdict == "not claimed"
    assert (
        verify([read_evidence(GPT2)], true_claim(GPT2, **{**few, "d_ff": 640})).verdict is not ClaimVerdict.CONSISTENT
    )


def test_every_training_pass_is_compared() -> None:
    answer = verified("llama_bf16.train.json.gz")
    attention = next(one for one in answer.comparisons if one.what == "attention")
    assert (attention.launches, attention.agree) == (24, 24)  # two steps of three layers: one forward, three backward
    up = next(one for one in answer.comparisons if one.what.startswith("feed-forward up"))
    assert up.launches == 6


def test_the_optimizer_tests_the_parameters() -> None:
    file = "llama_bf16.train.json.gz"
    parameters = 99_359_744
    answer = verify([read_evidence(file)], true_claim(file, parameters=parameters))
    assert answer.fields["parameters"].verdict == "narrowed"
    assert answer.fields["parameters"].passes_too[1] == (parameters + 1, 99_811_328)
    assert verify([read_evidence(file)], true_claim(file, parameters=110_000_000)).verdict is ClaimVerdict.REFUTED


def test_evidence_that_ends_within_a_pass_cannot_tell_num_layers() -> None:
    file = "gpt2_fp32_efficient.forward.json.gz"

    def cut(kernels: list[Sighting]) -> list[Sighting]:
        return kernels[:40]  # of 66, in the second of three layers

    answer = spoil(file, cut)
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert "only part of pass 1 (2 layers)" in answer.why
    assert spoil(file, cut, num_layers=1).verdict is ClaimVerdict.REFUTED


def test_decode_steps_are_reported_as_skipped() -> None:
    file = "gpt2_fp32_efficient.forward.json.gz"

    def generate(kernels: list[Sighting]) -> list[Sighting]:
        """Repeat the pass with the grids of a single token."""
        single = {"index", "norm", "GEMM", "attention"}
        again = [
            msgspec.structs.replace(one, grid=(1, 1, 1)) if one.name.kernel_class in single else one
            for one in map(run_again, kernels)
        ]
        return [*kernels, *again]

    answer = spoil(file, generate)
    assert answer.verdict is ClaimVerdict.UNDECIDED, answer.why
    assert "skipped 1 pass with one token per sequence" in answer.why
    assert spoil(file, generate, num_layers=2).verdict is ClaimVerdict.REFUTED


def test_recomputed_attention_is_not_a_layer() -> None:
    recording = open_recording(FOLDER.parent / "h200_nano_checkpoint.json.gz")
    sizes = {"num_layers": 4, "d_model": 128, "num_heads": 4, "d_ff": 512, "vocab_size": 10000, "batch": 4}
    claim = make_claim({**sizes, "context": 64, "dtype": "fp32", "gated": True})
    answer = verify([gather(recording)], claim)
    assert answer.verdict is ClaimVerdict.CONSISTENT, answer.why
    softmax = next(one for one in answer.comparisons if one.what == "attention softmax")
    assert (softmax.launches, softmax.agree) == (16, 16)  # two steps of four layers, twice each


def test_kernels_on_other_streams_cannot_tell() -> None:
    evidence, claim = [read_evidence(GPT2)], true_claim(GPT2)
    assert verify(evidence, claim, unseen=0.005).verdict is ClaimVerdict.CONSISTENT
    answer = verify(evidence, claim, unseen=0.2)
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert "20.0% of the GPU time, or of the GEMMs and attention calls, is on other streams" in answer.why


def test_without_a_decoder_no_field_is_tested() -> None:
    answer = undecided(true_claim(GPT2), "there are no attention kernels", [read_evidence(GPT2)])
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert answer.fields["d_ff"].verdict == "not tested"
    assert answer.fields["tied"].verdict == "not claimed"


@pytest.mark.parametrize(("index", "what"), [(0, "token embedding lookup"), (18, "norm")])
def test_lookups_and_norms_have_one_row_per_token(index: int, what: str) -> None:
    def shorten(kernels: list[Sighting]) -> list[Sighting]:
        short = msgspec.structs.replace(kernels[index], grid=(599, 1, 1), counters={})
        return [*kernels[:index], short, *kernels[index + 1 :]]

    answer = spoil(GPT2, shorten)
    assert (answer.verdict, answer.refuted_by[0].index, answer.refuted_by[0].what) == (
        ClaimVerdict.REFUTED,
        index,
        what,
    )
    assert answer.refuted_by[0].expected.startswith("600 rows of 640")


def test_the_sum_of_a_split_gemm_is_compared() -> None:
    file = "llama_fp32.csv.gz"
    index = next(one.index for one in read_evidence(file).sightings if "splitKreduce" in one.name.name)

    def shorten(kernels: list[Sighting]) -> list[Sighting]:
        counters = {**kernels[index].counters, "store_bytes": kernels[index].counters["store_bytes"] // 2}
        short = msgspec.structs.replace(kernels[index], counters=counters)
        return [*kernels[:index], short, *kernels[index + 1 :]]

    answer = spoil(file, shorten)
    assert (answer.verdict, answer.refuted_by[0].index) == (ClaimVerdict.REFUTED, index)


def test_passes_without_lookups_are_separated_by_lm_heads() -> None:
    file = "gpt2_fp32_efficient.forward.json.gz"

    def repeat(kernels: list[Sighting]) -> list[Sighting]:
        return kernels[13:] + [msgspec.structs.replace(one, duration_ns=one.duration_ns + 7) for one in kernels[13:]]

    answer = spoil(file, repeat)
    assert answer.verdict is ClaimVerdict.CONSISTENT, answer.why
    assert any("2 forward passes" in note for note in answer.notes)


def test_heads_that_fit_no_batch_and_context_are_refuted() -> None:
    wrong = true_claim(GPT2, num_heads=20, num_kv_heads=20, d_head=32, batch=None, context=None)
    answer = verify([read_evidence(GPT2)], wrong)
    assert answer.verdict is ClaimVerdict.REFUTED
    assert "attention" in {one.what for one in answer.refuted_by}


def test_updating_more_parameters_than_claimed_is_refuted() -> None:
    file = "llama_bf16.train.json.gz"
    answer = verify([read_evidence(file)], make_claim({"num_layers": 3, "parameters": 50_000_000}))
    assert answer.verdict is ClaimVerdict.REFUTED
    assert answer.refuted_by[0].what == "optimizer"


def test_untested_fields_of_a_trace_are_listed() -> None:
    answer = verified("gpt2_bf16_odd.forward.json.gz")
    assert answer.fields["gated"].verdict == "not tested"  # a joint gate and up GEMM has the same grid
    assert "gated: nothing in the evidence depends on it" in answer.why
    recording = open_recording(FOLDER.parent / "h200_nano_sdpa_bf16.json.gz")
    sizes = {"num_layers": 4, "d_model": 128, "num_heads": 4, "d_ff": 512, "vocab_size": 10000, "batch": 4}
    answer = verify([gather(recording)], make_claim({**sizes, "context": 64, "dtype": "bf16"}))
    assert answer.fields["num_kv_heads"].passes_too == ((1, 1), (2, 2))


def test_tested_and_narrowed_have_limits() -> None:
    assert is_tested(100, ())
    assert is_tested(100, ((95, 99), (101, 105)))
    assert not is_tested(100, ((94, 99),))
    assert not is_tested(100, ((101, 106),))
    assert is_narrowed(100, ((51, 99), (101, 199)))
    assert not is_narrowed(100, ((50, 50),))
    assert not is_narrowed(100, ((200, 200),))
    assert not is_narrowed(100, ((101, None),))


def test_a_consistent_result_lists_other_values_that_pass() -> None:
    answer = verified("gpt2_compiled.csv.gz")
    assert "d_ff 3,009 to 3,071" in answer.why
    assert "changing any one size" not in answer.why


@pytest.mark.parametrize(
    "rule",
    [lambda problem: problem.kv_heads == problem.heads, lambda problem: not problem.causal],
    ids=["repeated heads", "no mask"],
)
def test_attention_can_have_repeated_heads_and_no_mask(rule: Rule) -> None:
    shape = ClaimedShape(d_model=64, num_heads=4, num_kv_heads=2, d_head=16, batch=2, context=8)
    assert admits_attention(Attention("forward", (rule,)), shape)
    assert not admits_attention(Attention("forward", (lambda _: False,)), shape)
    opened = msgspec.structs.replace(shape, d_head=None)
    assert admits_attention(Attention("forward", (rule,)), opened) is None
    assert admits_attention(Attention("forward", (rule,), batch=exactly(3)), opened) is False


@pytest.mark.parametrize("file", ["held_qwen2.csv.gz", "gpt2_compiled.csv.gz"])
def test_a_compiled_run_can_be_verified_without_batch_and_context(file: str) -> None:
    truth = truth_of(file)
    sizes = ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_head", "d_ff", "vocab_size")
    claim = {name: truth[name] for name in sizes}
    assert verify([read_evidence(file)], make_claim(claim)).verdict is ClaimVerdict.CONSISTENT
    assert (
        verify([read_evidence(file)], make_claim({**claim, "d_ff": 2 * truth["d_ff"]})).verdict is ClaimVerdict.REFUTED
    )


def test_a_vocab_size_that_fits_a_head_on_fewer_positions_is_not_tested() -> None:
    """An LM head on the last token of each sequence has more outputs for the same work."""
    file = "builtin_autocast.csv.gz"
    answer = verify([read_evidence(file)], true_claim(file, vocab_size=40_000))
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert answer.fields["vocab_size"].verdict == "not tested"
    assert (9_729, 10_032) in answer.fields["vocab_size"].passes_too
    assert "vocab_size" in verify([read_evidence(file)], true_claim(file)).tested


@pytest.mark.parametrize(("name", "value"), [("d_ff", 3072), ("batch", 6), ("context", 100)])
def test_fields_that_follow_from_a_wrong_one_are_named(name: str, value: int) -> None:
    file = "gpt2_bf16_odd.csv.gz"
    fields = verify([read_evidence(file)], true_claim(file, **{name: value})).fields
    assert [one for one, result in fields.items() if result.verdict == "refuted"] == [name]
    others = {result.verdict for one, result in fields.items() if one != name and result.claimed is not None}
    assert others <= {"follows", "not refuted"}


def test_several_wrong_fields_are_all_refuted() -> None:
    file = "gpt2_bf16_odd.csv.gz"
    fields = verify([read_evidence(file)], true_claim(file, num_heads=20, num_kv_heads=20, d_head=32, d_ff=3072)).fields
    assert {one for one, result in fields.items() if result.verdict == "refuted"} == {
        "num_heads",
        "num_kv_heads",
        "d_head",
        "d_ff",
    }


def test_files_of_two_runs_cannot_tell() -> None:
    """The number of layers is that of both, but no sizes fit both."""
    files = [read_evidence(file) for file in ("gpt2_bf16_odd.csv.gz", "gpt2_compiled.csv.gz")]
    answer = verify(files, make_claim({"num_layers": 2}))
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert any("different runs" in text for text in answer.missing)


@pytest.mark.parametrize("cut", [lambda name: name.partition("<")[0], lambda name: name[:60]])
def test_names_without_template_arguments_do_not_refute(cut: Callable[[str], str]) -> None:
    for file in ("gpt2_bf16_odd.csv.gz", "held_gpt2_fp16.train.json.gz"):
        answer = spoil(file, lambda kernels: [rename(one, cut(one.name.name)) for one in kernels])
        assert answer.verdict is ClaimVerdict.UNDECIDED

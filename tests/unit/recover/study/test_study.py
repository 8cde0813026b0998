"""Which counter depends on which field: known exponents are found, and nothing that the runs do not show."""

import math
from dataclasses import replace

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from notes_tables import NOTES
from stepscope.findings import Figure, Table
from stepscope.recording.readers import ncu
from stepscope.recover.study import study
from stepscope.recover.study.elasticity import CounterPoint, compare_groups
from stepscope.render.formats import Format
from stepscope.render.tables import render
from stepscope.spec import Case, Workload
from tests.unit.ncu_files import COUNTED
from tests.unit.recordings import ADD
from tests.unit.recover.counted_runs import (
    FFMA,
    GRID,
    HEAD,
    LAWS,
    QKV,
    STORED,
    TENSOR_OPS,
    Counters,
    case,
    find,
    follow,
    notes_of,
    product,
    record,
    run_all,
    shape_of,
)


def test_exponents_match_the_law_of_the_counter() -> None:
    found = run_all(GRID)
    row = follow(found, QKV, "tensor ops")
    powers = [row[field] for field in ("context", "batch", "d_model", "num_layers", "vocab_size")]
    assert powers == pytest.approx([1, 1, 2, 0, 0])
    assert row["context_shown"] == "1.00"
    assert row["d_model_shown"] == "2.00"
    assert follow(found, QKV, "ffma")["d_model"] == 0
    assert "the same in all runs: d_ff 1024, num_heads 4, num_kv_heads 4" in notes_of(found)
    assert "num_layers, d_model, vocab_size, batch, context: from runs that differ only in this field" in notes_of(
        found
    )


def test_attention_approaches_the_square_of_the_context() -> None:
    row = follow(run_all(GRID), "attention", "tensor ops")
    slopes = [math.log2((n * 2) * (n * 2 + 1) / (n * (n + 1))) for n in (2, 4)]
    assert (row["context_low"], row["context_high"]) == pytest.approx((slopes[0], slopes[1]))
    assert row["context_low"] < row["context"] < row["context_high"] < 2
    assert row["context_shown"] == f"{slopes[0]:.2f} to {slopes[1]:.2f}"


def test_num_layers_only_affects_the_number_of_launches() -> None:
    found = run_all(GRID)
    following = [row for row in find(found, "Sensitivity") if abs(row["num_layers"]) > 0.05]
    assert {row["part"] for row in following} == {"each layer kernel", "all kernels"}
    assert follow(found, "each layer kernel", "launches")["num_layers"] == pytest.approx(1)
    (revealed,) = (row for row in find(found, "Counters that reveal") if row["field"] == "num_layers")
    assert (revealed["part"], revealed["counter"]) == ("each layer kernel", "launches")
    assert (revealed["power"], revealed["others"]) == ("1.00", "nothing")


def test_counters_are_per_pass() -> None:
    found = run_all([case(context=128), case(context=256, passes=3)], {"query_key_value": product})
    assert "launches" not in "".join(row["counters"] for row in find(found, "Sensitivity"))
    assert follow(found, "all kernels", "tensor ops")["context"] == pytest.approx(1)


def test_durations_are_not_in_the_components() -> None:
    runs = [record(case(context=context), LAWS, duration_ns=context) for context in (128, 256, 512)]
    found = study(runs)
    assert follow(found, "attention", "duration")["context"] == pytest.approx(1)
    assert not [row for row in find(found, "Loadings") if "duration" in row["counters"]]


def test_padding_is_a_constant_range_not_a_small_exponent() -> None:
    row = follow(run_all([case(context=length) for length in (65, 96, 128, 192)]), "attention", "tensor ops")
    assert row["shape"] == "context 65 to 128: constant"
    assert row["context_low"] == 0
    assert row["context_shown"] == f"0.00 to {math.log(2) / math.log(1.5):.2f}"


def test_rising_and_falling_is_shown_as_a_range() -> None:
    def law(workload: Workload) -> Counters:
        return {TENSOR_OPS: 5000 if workload.context == 256 else 1000}

    row = follow(run_all(GRID[:3], {"query_key_value": law}), QKV, "tensor ops")
    assert row["context"] == pytest.approx(0)
    assert row["context_shown"] == f"-{math.log2(5):.2f} to {math.log2(5):.2f}"


def test_parts_follow_the_order_of_a_layer() -> None:
    rows = find(run_all(GRID), "Sensitivity")
    parts = list(dict.fromkeys(row["part"] for row in rows))
    assert parts[:6] == [QKV, "attention", "output projection", "up projection", "down projection", HEAD]
    assert {row["shape"] for row in rows} == {""}


def test_ambiguous_parts_are_left_out_with_a_note() -> None:
    # One layer, and no norm before the LM head: the LM head may be the last GEMM of a gated layer.
    runs = [record(case(num_layers=1, context=length), LAWS, kernels={"norm": ADD}) for length in (128, 256)]
    found = study(runs)
    (note,) = (line for line in notes_of(found).splitlines() if "more than one interpretation" in line)
    left_out = set(note.partition(": ")[2].partition(": ")[2].split(", "))
    assert left_out
    assert not left_out & {row["part"] for row in find(found, "Sensitivity")}


def test_a_counter_missing_from_some_kernels_is_not_summed() -> None:
    runs = [record(one, LAWS) for one in GRID[:2]]
    is_first_norm = (pl.col("kernel") == 1) & (pl.col("metric") == STORED)
    cut = replace(runs[1], counters=runs[1].counters.filter(~is_first_norm))
    shown = {(row["part"], row["counters"]) for row in find(study([runs[0], cut]), "Sensitivity")}
    assert ("norm between layers", "store bytes") in shown
    assert not [part for part, counters in shown if part == "all kernels" and "store bytes" in counters]


def test_a_kernel_change_is_reported_at_its_value() -> None:
    wide = {
        "attention": "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<int>::Params)"
    }
    runs = [record(case(d_model=width), LAWS, kernels=wide if width > 512 else None) for width in (256, 512, 1024)]
    assert "d_model 1024: different kernel" in follow(study(runs), "attention", "tensor ops")["shape"]
    assert follow(study(runs), QKV, "tensor ops")["shape"] == ""


SCATTERED = [
    case(context=context, batch=batch, d_model=width)
    for context, batch, width in (
        (64, 2, 256),
        (128, 3, 512),
        (256, 4, 320),
        (512, 5, 768),
        (96, 6, 384),
        (200, 7, 640),
    )
]


def test_without_pairs_a_regression_is_used() -> None:
    found = run_all(SCATTERED)
    row = follow(found, QKV, "tensor ops")
    assert [row[field] for field in ("context", "batch", "d_model")] == pytest.approx([1, 1, 2])
    assert "d_model, batch, context: from a regression over all runs" in notes_of(found)


def test_a_regression_shows_its_error_and_hides_large_ones() -> None:
    def bent(workload: Workload) -> Counters:
        return {TENSOR_OPS: workload.context + 200}

    def wild(workload: Workload) -> Counters:
        return {FFMA: 1000 * (1 + workload.context**5 % 97)}

    found = run_all(SCATTERED, {"query_key_value": bent, "head": wild})
    row = follow(found, QKV, "tensor ops")
    assert 0 < row["context_low"] < row["context"] < row["context_high"] < 1
    assert row["context_shown"] == f"{row['context']:.2f} ± {row['context_high'] - row['context']:.2f}"
    assert not [row for row in find(found, "Sensitivity") if row["part"] == HEAD and "ffma" in row["counters"]]


def test_a_regression_through_every_point_is_not_shown() -> None:
    found = run_all(SCATTERED[:4])
    assert find(found, "Sensitivity") == []
    assert "too few runs" in notes_of(found)


exponents = st.lists(st.integers(-4, 12).map(lambda quarters: quarters / 4), min_size=3, max_size=3)


@settings(max_examples=15, deadline=None)
@given(exponents, st.sampled_from([GRID[:5], SCATTERED]))
@example([2.75, 3.0, 3.0], SCATTERED)
def test_any_power_law_is_found(powers: list[float], cases: list[Case]) -> None:
    def law(workload: Workload) -> Counters:
        # Relative sizes: a counter has 64 bits.
        sizes = (workload.context / 256, workload.batch / 4, shape_of(workload).d_model / 512)
        return {TENSOR_OPS: 1e12 * math.prod(size**power for size, power in zip(sizes, powers, strict=True))}

    found = run_all(cases, {"query_key_value": law})
    rows = [row for row in find(found, "Sensitivity") if row["part"] == QKV and "tensor ops" in row["counters"]]
    assert bool(rows) == any(powers)
    for row in rows:  # counters are integers
        assert [row[field] for field in ("context", "batch", "d_model")] == pytest.approx(powers, abs=1e-3)


@settings(max_examples=50, deadline=None)
@given(st.integers(16, 256), st.lists(st.integers(1, 4096), min_size=2, max_size=6, unique=True).map(sorted))
def test_counters_are_constant_within_a_tile(tile: int, lengths: list[int]) -> None:
    found = compare_groups([[CounterPoint(length, 1e6 * -(-length // tile)) for length in lengths]])
    assert found is not None
    tiles: dict[int, list[int]] = {}
    for length in lengths:
        tiles.setdefault(-(-length // tile), []).append(length)
    flats = [(ones[0], ones[-1]) for ones in tiles.values() if len(ones) > 1]
    assert found.flats == (tuple(flats) if len(tiles) > 1 else ())
    assert found.low >= 0


def test_recorded_widths_are_constant_and_then_jump() -> None:
    widths = [note for note in NOTES if note.length == 128 and note.counter == "fp32 operations"][1:]
    found = compare_groups([[CounterPoint(note.width, note.measured) for note in widths]])
    assert found is not None
    assert found.flats == ((192, 384),)
    doubles = compare_groups(
        [
            [
                CounterPoint(note.width, note.measured)
                for note in NOTES
                if note.length == 128 and note.counter == "fp64 operations"
            ][1:]
        ]
    )
    assert doubles is not None
    assert doubles.flats == ((192, 768), (1536, 6144))


def test_repeated_runs_are_averaged() -> None:
    again = {**LAWS, "query_key_value": lambda workload: {TENSOR_OPS: 4 * workload.context}}
    runs = [record(case(), again), record(case(), {**again, "query_key_value": lambda _: {TENSOR_OPS: 128}})]
    row = follow(study([*runs, record(case(context=256), again)]), QKV, "tensor ops")
    assert row["context"] == pytest.approx(math.log2(1024 / math.sqrt(512 * 128)))


def test_counters_of_two_fields_have_two_components() -> None:
    def longer(workload: Workload) -> Counters:
        return {TENSOR_OPS: workload.context**2, FFMA: 3 * workload.context}

    def wider(workload: Workload) -> Counters:
        return {TENSOR_OPS: 100 * shape_of(workload).d_model}

    laws = dict.fromkeys(("query_key_value", "output", "norm", "add", "attention", "up"), longer)
    laws |= dict.fromkeys(("head", "down"), wider)
    cases = [case(context=context, d_model=width) for context in (128, 256, 512) for width in (256, 512, 1024)]
    found = run_all(cases, laws)
    components = find(found, "Principal")
    assert components[0]["context"] == pytest.approx(1, abs=0.02)
    assert components[1]["d_model"] == pytest.approx(1, abs=0.02)
    assert components[1]["cumulative"] > 0.99
    assert components[0]["share"] > components[1]["share"]
    loadings = {(row["part"], row["counters"]): row for row in find(found, "Loadings")}
    assert loadings[QKV, "tensor ops, ffma"]["component_1_shown"] != "0.00"
    assert abs(loadings[HEAD, "tensor ops"]["component_1"]) < 0.1 < loadings[HEAD, "tensor ops"]["component_2"]


def test_identical_runs_have_no_sensitivity() -> None:
    run = ncu.read(COUNTED).with_manifest(versions={})
    found = study([run, run], names=["a", "b"], truths={"a": {"context": 128}, "b": {"context": 256}})
    assert find(found, "Sensitivity") == []
    assert "counters that depend on none of these fields" in notes_of(found)
    assert find(found, "Counters that reveal")[0]["others"] == "no counter depends on it"
    assert [one.title for one in found] == [found[0].title, "Counters that reveal each field"]


def test_a_real_run_shows_its_gemms_and_attention() -> None:
    run = ncu.read(COUNTED)
    twice = run.counters.with_columns(pl.col("value") * 2)
    found = study([run, replace(run, counters=twice)], names=["a", "b"], truths={"a": {"batch": 1}, "b": {"batch": 2}})
    parts = {row["part"] for row in find(found, "Sensitivity") if "ffma" in row["counters"]}
    assert {
        QKV,
        "attention",
        "output projection",
        "up projection",
        "down projection",
        HEAD,
        "norm between layers",
    } <= parts
    assert follow(found, "attention", "tensor ops")["batch"] == pytest.approx(1)
    assert not [row for row in find(found, "Sensitivity") if "norm" in row["part"] and "tensor" in row["counters"]]


def test_runs_without_layers_are_compared_by_class() -> None:
    no_attention = {"attention": "ampere_sgemm_128x64_tn"}
    found = study([record(case(context=length), LAWS, kernels=no_attention) for length in (128, 256)])
    assert "no parts could be identified: there are no attention kernels" in notes_of(found)
    assert follow(found, "all norm", "store bytes")["context"] == pytest.approx(1)


def test_the_same_runs_give_the_same_text_in_every_format() -> None:
    for format_ in Format:
        texts = {tuple(render(one, format_) for one in run_all(GRID) if isinstance(one, Table)) for _ in range(2)}
        assert len(texts) == 1


def test_a_field_with_three_values_has_a_figure() -> None:
    (figure,) = (one for one in run_all(GRID) if isinstance(one, Figure))
    assert figure.title == "Counters over context"
    points = [(point.x, point.y) for point in figure.points if point.series == f"{QKV}: tensor ops"]
    assert points == [(128, 1), (256, 2), (512, 4)]

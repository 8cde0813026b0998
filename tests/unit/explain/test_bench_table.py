"""The table of a sweep: varying settings are columns, shared ones are in the title, and comparisons match."""

import msgspec
import pytest

from stepscope.explain.experiments.bench_tables import bench_figure, bench_table, sizes_table
from stepscope.explain.experiments.cases import describe_case
from stepscope.findings import Cell, Table
from stepscope.recording.rows.bench import BenchRow, Doubt
from stepscope.render.formats import Format
from stepscope.render.tables import render
from tests.unit.rows import row

MS = 1_000_000


def cells(table: Table, key: str) -> list[Cell]:
    index = [column.key for column in table.columns].index(key)
    return [one[index] for one in table.rows]


def shown(table: Table) -> list[str]:
    return [column.key for column in table.columns if not column.detail]


def test_varying_settings_are_columns_and_the_rest_is_in_the_title() -> None:
    table = bench_table([row(context=128, batch=8), row(context=256, batch=8)])
    assert "batch" not in shown(table)
    assert "batch 8" in table.title
    assert "Test GPU" in table.title
    table = bench_table([row(batch=4), row(batch=8)])
    assert "batch" in shown(table)


def test_kernels_that_flash_used_are_a_detail_column() -> None:
    chosen, none = row(attention="flash"), row(attention="naive")
    assert chosen.measurement is not None
    measurement = msgspec.structs.replace(chosen.measurement, attention_kernels=("hopper", "triton"))
    table = bench_table([none, msgspec.structs.replace(chosen, measurement=measurement), row("oom")])
    assert cells(table, "attention_kernels") == [None, "hopper, triton", None]
    assert "attention_kernels" not in shown(table)


def test_speedup_is_against_fp32_of_the_same_case() -> None:
    table = bench_table(
        [
            row(size="small", precision="fp32", step_ns=(100 * MS,) * 10),
            row(size="small", precision="bf16", step_ns=(50 * MS,) * 10),
            row(size="medium", precision="fp32", step_ns=(400 * MS,) * 10),
            row(size="medium", precision="bf16", step_ns=(100 * MS,) * 10),
            row("oom", size="large", precision="fp32"),
            row(size="large", precision="bf16"),
        ]
    )
    assert cells(table, "speedup_precision") == [1.0, 2.0, 1.0, 4.0, None, None]


def test_two_axes_have_a_speedup_column_each() -> None:
    table = bench_table(
        [
            row(attention=attention, compile=compile_, step_ns=(ms * MS,) * 10)
            for attention, compile_, ms in (
                ("naive", False, 80),
                ("naive", True, 40),
                ("sdpa", False, 40),
                ("sdpa", True, 10),
            )
        ]
    )
    assert cells(table, "speedup_attention") == [1.0, 1.0, 2.0, 4.0]
    assert cells(table, "speedup_compile") == [1.0, 2.0, 1.0, 4.0]


def test_mean_is_compared_with_the_longest_warm_up() -> None:
    cold = (910 * MS, *(100 * MS,) * 9)
    table = bench_table([row(warmup=0, step_ns=cold), row(warmup=5, step_ns=(100 * MS,) * 10)])
    assert cells(table, "mean_vs_warm") == [1.81, 1.0]
    assert {"warmup", "step_mean_ms", "step_sd_ms", "mean_vs_warm"} <= set(shown(table))


def test_rates_follow_from_the_median() -> None:
    table = bench_table([row(batch=2, context=500, step_ns=(100 * MS,) * 9 + (900 * MS,))])
    assert cells(table, "tokens_per_s") == [10_000]
    assert cells(table, "tflops") == [30.0]  # 3 × 1 TFLOP of the forward pass in 0.1 s
    assert cells(table, "mfu") == [30.0 / 50.0]


def test_a_precision_without_a_known_peak_has_no_mfu() -> None:
    assert cells(bench_table([row(precision="fp16")]), "mfu") == [None]


def test_failed_cases_are_rows_with_their_reason() -> None:
    table = bench_table([row(context=128), row("oom", context=256), row("killed", context=512)])
    assert cells(table, "remarks") == ["", "oom", "killed"]
    assert cells(table, "step_median_ms")[1:] == [None, None]
    assert "oom: the reason for oom" in table.notes


def test_quality_warnings_are_remarks_and_explained_in_notes() -> None:
    table = bench_table([row(doubts=(Doubt(code="spread", text="20 %"), Doubt(code="cold", text="first")))])
    assert cells(table, "remarks") == ["spread, cold"]
    assert cells(table, "reason") == ["20 %; first"]
    assert sum(note.startswith(("spread:", "cold:")) for note in table.notes) == 2


SPREAD = Doubt(code="spread", text="20 %")


def test_ratio_is_marked_if_either_case_is_unreliable() -> None:
    table = bench_table(
        [
            row(size="small", precision="fp32"),
            row(size="small", precision="bf16", doubts=(SPREAD,)),
            row(size="medium", precision="fp32", doubts=(Doubt(code="shared", text="others"),)),
            row(size="medium", precision="bf16", doubts=(SPREAD,)),
            row(size="large", precision="fp32", doubts=(Doubt(code="uncounted", text="no count"),)),
            row(size="large", precision="bf16"),
        ]
    )
    why = cells(table, "speedup_precision_doubts")
    assert why == [None, "spread", None, "shared, spread", None, None]
    assert "speedup_precision_doubts" not in shown(table)
    assert any(note.startswith("?") and "spread" in note and "shared" in note for note in table.notes)
    for format_ in (Format.TEXT, Format.MD, Format.LATEX):
        assert [line.count("?") for line in render(table, format_).splitlines() if "bf16" in line][:3] == [1, 1, 0]
    assert "?" not in render(table, Format.CSV)


def test_ratio_of_reliable_times_is_not_marked() -> None:
    table = bench_table([row(precision="fp32"), row(precision="bf16")])
    assert "?" not in render(table, Format.TEXT)
    assert not any(note.startswith("?") for note in table.notes)


def own(*, has_tokens: bool = True, optimizer: str | None = None, batch: int = 4) -> BenchRow:
    made = row(model="mine:build", batch=batch)
    assert made.measurement is not None
    measurement = msgspec.structs.replace(
        made.measurement, has_tokens=has_tokens, has_samples=True, optimizer=optimizer, flops_source="counted"
    )
    return msgspec.structs.replace(made, measurement=measurement)


def test_a_model_without_tokens_has_samples_and_no_context() -> None:
    table = bench_table([own(has_tokens=False, batch=8)])
    assert cells(table, "context") == [None]
    assert cells(table, "samples_per_s") == [80.0]
    assert cells(table, "tokens_per_s") == [None]
    assert "samples_per_s" in shown(table)
    assert "tokens_per_s" not in shown(table)
    assert "samples_per_s" not in shown(bench_table([row()]))


def test_the_table_names_the_optimizer_that_a_factory_brought() -> None:
    assert "Lion" in bench_table([own(optimizer="Lion")]).title
    both = bench_table([own(optimizer="Lion"), row("oom", model="mine:build")])
    assert "Lion" in both.title
    assert "optimizer" not in shown(both)
    assert "optimizer" in shown(bench_table([own(optimizer="Lion"), own(optimizer="SGD", batch=2)]))


def test_a_figure_over_contexts_leaves_out_models_that_have_none() -> None:
    figure = bench_figure([row(context=128), row(context=256), own(has_tokens=False)])
    assert sorted(point.x for point in figure.points) == [128, 256]


def test_every_quality_warning_is_explained() -> None:
    import re
    from pathlib import Path

    import stepscope
    from stepscope.explain.experiments import bench_tables as bench
    from stepscope.explain.experiments import comm_tables as comm

    sources = (Path(stepscope.__file__).parent / "measure").rglob("*.py")
    raised = {code for file in sources for code in re.findall(r'Doubt\(\s*code="([^"]+)"', file.read_text())}
    assert raised
    assert raised == set(bench.DOUBTS) | set(comm.DOUBTS)


def test_all_statistics_are_detail_columns() -> None:
    table = bench_table([row()])
    keys = {column.key for column in table.columns}
    for name in ("forward", "backward", "optimizer", "step"):
        assert {f"{name}_{s}_ms" for s in ("mean", "sd", "median", "p20", "p80", "min", "max")} <= keys


def test_an_empty_sweep_is_an_empty_table() -> None:
    assert bench_table([]).rows == ()


def test_figure_is_over_context_with_a_series_per_size() -> None:
    rows = [row(size=size, context=context) for size in ("small", "medium") for context in (128, 256)]
    figure = bench_figure([*rows, row("oom", size="large", context=128)])
    assert {(p.series, p.x) for p in figure.points} == {(s, c) for s in ("small", "medium") for c in (128, 256)}
    assert "1 oom" in figure.subtitle


def test_figure_is_over_parameters_when_the_context_is_fixed() -> None:
    figure = bench_figure([row(size="small"), row(size="medium")])
    assert figure.x.label == "parameters"


def test_sizes_are_listed_with_exact_counts() -> None:
    table = sizes_table()
    assert dict(zip(cells(table, "size"), cells(table, "parameters"), strict=True))["2.7B"] == 3_406_809_600


def test_setting_is_in_the_title_or_a_column_if_it_varies() -> None:
    one, two = row(batch=8), row(batch=8, grad_accumulation=2, step_ns=(200_000_000,) * 10)
    assert "micro-batch" not in bench_table([one]).title
    assert "2 micro-batches" in bench_table([two]).title
    assert ("2 micro-batches" in describe_case(two.case), "micro" in describe_case(one.case)) == (True, False)
    table = bench_table([one, two])
    assert cells(table, "grad_accumulation") == [1, 2]
    assert cells(table, "speedup_grad_accumulation") == [1.0, 0.5]


@pytest.mark.parametrize(
    ("compiled", "helps"),
    [
        ((False,), "fewer kernels do (--compile, or --preset fast)"),
        ((True,), "CUDA graphs (--graph) or a larger batch do"),
        (
            (False, True),
            "for eager steps fewer kernels do (--compile, or --preset fast), for compiled steps CUDA graphs",
        ),
    ],
)
def test_compilation_is_not_proposed_for_a_compiled_step(compiled: tuple[bool, ...], helps: str) -> None:
    doubts = (Doubt(code="host-bound", text="the GPU waited"),)
    notes = bench_table([row(compile=one, doubts=doubts) for one in compiled]).notes
    (note,) = [one for one in notes if one.startswith("host-bound")]
    assert f"a faster GPU does not help, {helps}" in note
    assert ("--compile" in note) is not all(compiled)


def test_settings_that_vary_together_have_one_ratio() -> None:
    """Each alone has no row to compare with."""
    fast = {"precision": "bf16", "optimizer": "adamw-onelaunch", "compile": True, "graph": True}
    rows = [
        row(context=context, **settings, step_ns=(ns,) * 10)  # type: ignore[arg-type]
        for context, ns in ((128, 100_000_000), (256, 200_000_000))
        for settings, ns in (({}, ns), (fast, ns // 4))
    ]
    table = bench_table(rows)
    assert cells(table, "speedup_all") == [1.0, 4.0, 1.0, 4.0]
    assert not {"speedup_precision", "speedup_graph"} & {column.key for column in table.columns}
    assert "vs baselines" in {column.label for column in table.columns}


def test_reason_why_a_step_was_not_captured_is_in_the_notes() -> None:
    text = "not captured: model.py:12 `x.item()`: it waits for the GPU"
    notes = bench_table([row(graph=True, doubts=(Doubt(code="uncaptured", text=text),))]).notes
    assert f"uncaptured: {text} (1 case)" in notes

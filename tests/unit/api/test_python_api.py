"""The public Python API on recordings."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

import stepscope
from stepscope.api.measure import make_grid, name_command
from stepscope.api.rank_files import Opened
from stepscope.findings import STAGES, Axis, Column, Figure, Point, Table
from tests.unit.rank_recordings import Rank, record_ranks

ROOT = Path(__file__).parents[3]
TRACE = ROOT / "docs/examples/trace.json.gz"
MEMORY = ROOT / "bench/results/memory_h200/small-train-fp32"


@pytest.fixture(scope="module")
def run() -> stepscope.Run:
    return stepscope.load(TRACE, cache=False)


@pytest.fixture(scope="module")
def memory() -> stepscope.Run:
    return stepscope.load(MEMORY)


def test_every_exported_name_exists_and_is_listed() -> None:
    for name in stepscope.__all__:
        assert getattr(stepscope, name) is not None
    assert set(stepscope.__all__) <= set(dir(stepscope))
    with pytest.raises(AttributeError):
        _ = stepscope.nothing  # type: ignore[attr-defined]


def test_import_is_light() -> None:
    heavy = ("torch", "polars", "numpy", "vl_convert", "typer", "rich", "msgspec")
    code = f"import sys, stepscope; stepscope.annotate; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("before", ["", "import stepscope.render.tables; ", "from stepscope.render import figures; "])
def test_report_is_always_the_function(before: str) -> None:
    code = (
        before + "import stepscope; from stepscope import report; print(callable(stepscope.report), report.__module__)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["True", "stepscope.api.report"]


def test_a_run_has_its_figures_and_frames(run: stepscope.Run) -> None:
    assert run.step_ms == pytest.approx(5.517447)
    assert run.idle_share is not None
    assert 0 < run.idle_share < 1
    assert run.files == (TRACE,)
    assert run.classes.columns == ["class", "kernel_ms", "share", "count", "alone_ms", "wall_share"]
    assert run.classes.filter(pl.col("class") == "wall")["alone_ms"].item() == pytest.approx(run.step_ms)
    assert run.kernels["share"].sum() == pytest.approx(1)
    assert run.kernels.schema["kernel_ms"] == pl.Float64
    saved = run.findings[0].saving_ms
    assert saved is not None
    assert 0 < saved < run.step_ms
    assert run.table("kernels", top=2).frame.height == 2


def test_document_equals_explain_json(run: stepscope.Run) -> None:
    assert run.to_dict()["schema"] == "stepscope.explain/2"
    assert run.to_json().endswith("}\n")
    assert msgspec.json.decode(run.to_json()) == run.to_dict()
    both = stepscope.load(TRACE, TRACE, cache=False)
    assert [one["step_ns"] for one in both.to_dict()["files"]] == [run.step_ms * 1e6] * 2


def test_ranks_are_runs(run: stepscope.Run) -> None:
    both = stepscope.load(TRACE, TRACE, cache=False)
    assert [rank.step_ms for rank in both.ranks] == [run.step_ms, run.step_ms]
    assert len(both.table("ranks").rows) == 2
    assert run.ranks == (run,)
    with pytest.raises(ValueError, match="save each rank"):
        both.save("nowhere")


def test_page_of_several_ranks_starts_with_a_summary_and_names_the_rank_below() -> None:
    late = Rank(compute_us=[100.0] * 12, idle_us=[302.0] * 12)
    recordings = [one.recording for one in record_ranks([Rank(compute_us=[100.0] * 12), late])]
    run = stepscope.Run([Opened.of(Path(one.manifest.file), one) for one in recordings])
    page = run.page()
    first, *_ = page.headline.splitlines()
    assert first.startswith("2 ranks: step")
    assert "\nrank 0 waits for rank 1 (late CPU): 1.2 ms per step\n" in page.headline
    assert "below: rank 0" in page.headline
    assert [table.title for table in page.tables[:3]] == [
        "Ranks",
        "Collectives by how late the last rank came",
        "Time of the training loop, rank 0",
    ]
    assert [table.title for table in run.tables("phases")] == ["Time by phase, rank 0", "Time by phase, rank 1"]
    assert run.table("collectives", top=1).frame["rank"].to_list() == [1]
    assert [one["rank"] for one in run.to_dict()["lateness"]] == [0, 1]
    for table in (run.table("findings"), run.tables("findings")[0]):
        assert table.frame["code"].to_list() == [one.code for one in run.findings]
        assert "SS030" in table.frame["code"]
    alone = run.ranks[0]
    assert "SS030" not in alone.table("findings").frame["code"]
    assert alone.table("collectives").frame["count"].to_list() == [4]
    assert "rank" not in alone.page().tables[0].title


def test_questions_have_keys_and_evidence(run: stepscope.Run) -> None:
    answers = run.questions()
    assert len({one.key for one in answers}) == len(answers) == len(answers.table.rows)
    assert answers.evidence
    assert answers[0].question in str(answers)
    assert repr(answers) == f"<Answers: {len(answers)} questions, {len(answers.evidence)} answered>"


def test_runs_are_compared(run: stepscope.Run) -> None:
    change = run.compare(run, by="kernel")
    assert not change.is_slower()
    assert change.table.frame["difference_ms"].abs().max() == 0
    assert "pass" in change.verdict(0.03)


def test_memory_snapshot_is_a_run_too(memory: stepscope.Run, tmp_path: Path) -> None:
    categories = memory.table("categories").frame
    assert categories.filter(pl.col("category") == "total")["bytes"].item() == memory.peak_bytes
    assert memory.to_dict()["peak_bytes"] == memory.peak_bytes
    assert memory.questions()
    saved = memory.figure().save(tmp_path / "memory.html")
    assert saved.stat().st_size > 1000


def test_traces_and_memory_snapshots_have_different_tables(run: stepscope.Run, memory: stepscope.Run) -> None:
    with pytest.raises(stepscope.StepscopeError, match="requires a memory snapshot"):
        _ = run.peak_bytes
    with pytest.raises(stepscope.StepscopeError, match="`leaks` requires a memory snapshot"):
        run.table("leaks")
    for ask in (lambda: memory.step_ms, lambda: memory.findings, lambda: memory.compare(run)):
        with pytest.raises(stepscope.StepscopeError, match="no kernel timeline"):
            ask()
    with pytest.raises(stepscope.StepscopeError, match="cannot be combined"):
        stepscope.load(TRACE, MEMORY)
    for one in (run, memory):
        with pytest.raises(ValueError, match="unknown table: 'nothing'"):
            one.table("nothing")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown by: 'nothing'; expected one of phase, class, module, kernel"):
        run.compare(run, by="nothing")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown by: 'nothing'; expected one of category, module"):
        memory.figure(by="nothing")  # type: ignore[arg-type]


def test_bounded_trace_has_the_same_breakdown(run: stepscope.Run, tmp_path: Path) -> None:
    bounded = stepscope.load(TRACE, bounded=True)
    assert bounded.step_ms == run.step_ms
    assert bounded.classes.equals(run.classes)
    for ask in (
        lambda: bounded.findings,
        bounded.questions,
        lambda: bounded.compare(run),
        lambda: bounded.save(tmp_path / "kept"),
        lambda: stepscope.report(bounded),
    ):
        with pytest.raises(stepscope.StepscopeError, match="in memory"):
            ask()
    assert not (tmp_path / "kept").exists()


def test_a_run_is_saved_and_read_again(run: stepscope.Run, tmp_path: Path) -> None:
    run.save(tmp_path / "kept")
    again = stepscope.load(tmp_path / "kept")
    assert again.classes.equals(run.classes)
    with pytest.raises(stepscope.StepscopeError):
        run.save(tmp_path / "kept")
    run.save(tmp_path / "kept", force=True)
    run.write_perfetto(tmp_path / "perfetto.json")
    assert msgspec.json.decode((tmp_path / "perfetto.json").read_bytes())


def test_nothing_to_load_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one file"):
        stepscope.load()
    with pytest.raises(ValueError, match="at least one run"):
        stepscope.report([])
    with pytest.raises(stepscope.StepscopeError):
        stepscope.load(tmp_path / "missing.json")


# --- Reports ----------------------------------------------------------------------------------------------------------


def test_report_of_a_run_equals_report_of_its_file(run: stepscope.Run, tmp_path: Path) -> None:
    page = stepscope.report(run, tmp_path / "a.html")
    assert page.path == tmp_path / "a.html"
    assert page.path.read_text() == page.html
    assert stepscope.report(TRACE, cache=False).report == page.report
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


def test_two_runs_make_one_report(run: stepscope.Run) -> None:
    assert stepscope.report([run, TRACE], cache=False).report.runs == ("before", "after")


def test_foreign_page_is_not_overwritten(run: stepscope.Run, tmp_path: Path) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    with pytest.raises(stepscope.StepscopeError):
        stepscope.report(run, mine)
    stepscope.report(run, mine, force=True)
    assert mine.read_text() != "mine"


def test_measuring_a_report_requires_a_file() -> None:
    with pytest.raises(ValueError, match="out is required"):
        stepscope.report(stepscope.workload(size="nano"))


# --- Workloads --------------------------------------------------------------------------------------------------------


def test_workloads_are_built_from_settings() -> None:
    made = stepscope.workload(size="small", context=1024, precision="bf16", compile=True, attention=None)
    assert (made.context, made.precision, made.compile) == (1024, "bf16", True)
    assert made == stepscope.Workload(model=made.model, context=1024, precision="bf16", compile=True)
    own = stepscope.workload(model="mine.py:build", set={"depth": 4})
    assert own.model.name == "mine.py:build(depth=4)"


def test_results_store_the_equivalent_command() -> None:
    one = stepscope.workload(size="small", context=1024, precision="bf16")
    assert name_command("bench", make_grid(one, steps=3, memory_limit="1KB")) == (
        "stepscope bench --size small --context 1024 --precision bf16 --steps 3 --memory-limit 1000"
    )
    assert "2 workloads" in name_command("bench", make_grid(stepscope.grid(context=[1, 2])))


def test_a_grid_is_the_product_of_its_lists() -> None:
    made = stepscope.grid(size=["nano", "small"], context=[128, 256], precision="bf16")
    assert [(one.model.name, one.context) for one in made] == [
        ("nano", 128),
        ("nano", 256),
        ("small", 128),
        ("small", 256),
    ]


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"sise": "small"}, "sise"), ({"size": "smal"}, "smal"), ({"steps": 3}, "steps"), ({"set": 3}, "set")],
)
def test_wrong_settings_are_user_errors(settings: dict[str, object], named: str) -> None:
    with pytest.raises(stepscope.StepscopeError, match=named):
        stepscope.workload(**settings)


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"num_heads": 5}, "num_heads=4"),
        ({"mode": "forward", "checkpoint": "block"}, "checkpoint='none', or mode='forward-backward'"),
        ({"set": {"depth": 2}}, "model='my_model:build' set={'depth': 4}"),
        ({"size": "smal"}, "stepscope bench --list"),
    ],
)
def test_errors_name_parameters_instead_of_flags(settings: dict[str, object], hint: str) -> None:
    with pytest.raises(stepscope.StepscopeError) as caught:
        stepscope.workload(**settings)
    assert caught.value.hint == hint
    assert "--" not in caught.value.message


def test_values_that_are_not_workloads_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"stepscope\.grid"):
        stepscope.workload(context=[128, 256])
    with pytest.raises(ValueError, match=r"stepscope\.Workload"):
        stepscope.bench("small")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one workload"):
        stepscope.memory([])
    several = stepscope.grid(context=[128, 256])
    for ask in (stepscope.profile, stepscope.precision):
        with pytest.raises(ValueError, match="expected one"):
            ask(several)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a run or a file"):
        stepscope.report(several)  # type: ignore[arg-type]


# --- Results and notebooks --------------------------------------------------------------------------------------------


def test_saved_results_are_read() -> None:
    timed = stepscope.BenchResults.read(ROOT / "bench/results/bench_h200.jsonl")
    assert len(timed) == timed.frame.height > 10
    assert timed.frame.schema["context"] == pl.Int64
    assert timed.frame.schema["step_median_ms"] == pl.Float64
    assert timed[0].case.workload == timed.rows[0].case.workload
    weighed = stepscope.MemoryResults.read(ROOT / "bench/results/memory_h200.jsonl")
    assert len(weighed) == weighed.frame.height
    errors = stepscope.PrecisionResult.read(ROOT / "bench/results/precision_h200_small.json")
    assert errors.to_dict()["schema"] == "stepscope.precision/1"
    assert errors.table("errors").rows
    for one in (timed, weighed, errors):
        assert repr(one).count("\n") == 0
        assert "<table>" in one._repr_html_()


def test_table_has_a_rich_display() -> None:
    columns = (Column(key="name", label="name"), Column(key="ms", label="ms", kind="ms"))
    table = stepscope.DataTable.of(Table(title="<b>", columns=columns, rows=(("<script>", 1.5), (None, None))))
    assert table.frame.rows() == [("<script>", 1.5), (None, None)]
    assert table.frame.schema == {"name": pl.String, "ms": pl.Float64}
    assert "<script>" not in table._repr_html_()
    assert "&lt;script&gt;" in table._repr_html_()
    assert repr(table) == "<DataTable '<b>': 2 rows, 2 columns>"
    assert table.render("csv").startswith("name,ms\n")
    empty = stepscope.DataTable.of(Table(title="", columns=columns, rows=()))
    assert empty.frame.schema == table.frame.schema


def test_picture_has_a_rich_display(memory: stepscope.Run) -> None:
    points = tuple(Point(panel="", series="a", x=x, y=x) for x in (1.0, 2.0))
    figure = Figure(title="", subtitle="", x=Axis(label="x"), y=Axis(label="y"), points=points)
    assert "<svg" in stepscope.Picture(figure)._repr_html_()
    assert memory.figure()._repr_html_().startswith("<iframe srcdoc=")


def test_run_displays_its_page_in_a_frame(run: stepscope.Run, memory: stepscope.Run) -> None:
    for one in (run, memory):
        shown = one._repr_html_()
        assert shown.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
        assert 'sandbox="allow-scripts' in shown
        assert "\n" not in repr(one)
    assert "5.517 ms in the trace" in repr(run)
    assert "<table>" in run.questions()._repr_html_()
    assert "<table>" in run.compare(run)._repr_html_()


WRONG: dict[str, Callable[[Any], object]] = {
    "no rows": lambda run: run.table("kernels", top=0),
    "a negative number of rows": lambda run: run.table("roofline", top=-1),
    "half a row": lambda run: run.table("kernels", top=1.5),
    "a limit that is no number": lambda run: run.compare(run).is_slower(float("nan")),
    "a limit without end": lambda run: run.compare(run).verdict(float("inf")),
    "a negative limit": lambda run: run.compare(run).is_slower(-0.1),
    "a file to compare with": lambda run: run.compare("other.json"),
    "a number to measure": lambda _: stepscope.bench(1),  # type: ignore[arg-type]
    "several numbers of steps": lambda _: stepscope.bench(stepscope.workload(size="nano"), steps=[1, 2]),  # type: ignore[arg-type]
    "no time": lambda _: stepscope.bench(stepscope.workload(size="nano"), timeout_s=0),
    "a folder without a name": lambda _: stepscope.memory(stepscope.workload(size="nano"), out=""),
    "no step to record": lambda _: stepscope.profile(stepscope.workload(size="nano"), record_steps=0),
    "a precision as a text": lambda _: stepscope.precision(stepscope.workload(size="nano"), precisions="bf16"),  # type: ignore[arg-type]
    "an unknown precision": lambda _: stepscope.precision(stepscope.workload(size="nano"), precisions=["fp4"]),  # type: ignore[list-item]
    "a stage as a text": lambda _: stepscope.report(stepscope.workload(size="nano"), "x.html", without="bench"),
    "an unknown stage": lambda _: stepscope.report(stepscope.workload(size="nano"), "x.html", without=["zzz"]),
    "no stage at all": lambda _: stepscope.report(stepscope.workload(size="nano"), "x.html", without=list(STAGES)),
    "a number to report on": lambda _: stepscope.report(1),  # type: ignore[arg-type]
    "no recordings": lambda _: stepscope.Run([]),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_argument_is_rejected_before_anything_runs(run: stepscope.Run, wrong: Callable[[Any], object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        wrong(run)


def test_used_run_can_be_pickled(run: stepscope.Run) -> None:
    assert run.step_ms == pickle.loads(pickle.dumps(run)).step_ms

"""Many runs as a table and a trend: each compared with the baseline, if it does the same work."""

import msgspec
import pytest

from stepscope.explain.story import Materials, RunSeries, tell_many
from stepscope.explain.story.comparison.run_charts import (
    draw_memory_trend,
    draw_step_trend,
    draw_throughput_trend,
    stack_parts,
)
from stepscope.explain.story.comparison.run_figures import RunFigures, reduce_run
from stepscope.explain.story.comparison.run_series import (
    TrendCase,
    find_slower,
    list_warnings,
    tabulate_cases,
    tabulate_parts,
    tabulate_runs,
    tabulate_settings,
)
from stepscope.findings import Bars, Cell, Table
from stepscope.recording.rows.bench import Doubt
from stepscope.render.site import write_site
from stepscope.render.terminal import summarize_report
from tests.unit.explain.story.story_materials import all_there, memory, product, record, record_ours, small_row, traced
from tests.unit.rows import ENVIRONMENT

MS = 1_000_000


def timed(name: str, step_ms: float, *, spread: float = 0.01, steps: int = 10, **settings: object) -> RunFigures:
    """A run of `bench` whose steps are evenly spread around a time."""
    around = [1 + spread * (place / max(1, steps - 1) - 0.5) for place in range(steps)]
    row = small_row(step_ns=tuple(round(step_ms * MS * one) for one in around), **settings)
    return reduce_run(Materials(name=name, bench=(row,)))


def column(table: Table, key: str) -> list[Cell]:
    place = [one.key for one in table.columns].index(key)
    return [row[place] for row in table.rows]


@pytest.fixture
def series() -> RunSeries:
    steps = {"runs/a": 100.0, "runs/b": 100.1, "runs/c": 120.0, "runs/d": 80.0}
    return RunSeries.of_runs([timed(name, step) for name, step in steps.items()])


def test_every_run_is_compared_with_the_baseline(series: RunSeries) -> None:
    table = tabulate_runs(series)
    assert column(table, "run") == ["a", "b", "c", "d"]
    assert column(table, "verdict") == ["baseline", "noise", "slower", "faster"]
    assert column(table, "ratio") == pytest.approx([1.0, 1.001, 1.2, 0.8], abs=1e-4)
    assert column(table, "step_ms") == pytest.approx([100.0, 100.1, 120.0, 80.0], abs=1e-3)
    assert column(table, "peak_bytes") == [2**30] * 4
    assert column(table, "tokens") == [10240, 10230, 8533, 12800]
    assert "recorded" in [one.label for one in table.columns if one.detail]  # all on one day
    last = RunSeries(labels=series.labels, cases=series.cases, baseline=3)
    assert column(tabulate_runs(last), "verdict") == ["slower", "slower", "slower", "baseline"]


def test_trend_has_the_values_and_verdicts_of_the_table(series: RunSeries) -> None:
    trend = draw_step_trend(series)
    assert trend is not None
    (line,) = trend.lines
    assert [point.value for point in line.points] == column(tabulate_runs(series), "step_ms")
    assert [point.verdict for point in line.points] == column(tabulate_runs(series), "verdict")
    for point in line.points:
        assert point.low is not None
        assert point.high is not None
        assert point.low < point.value < point.high
    assert draw_memory_trend(series) is None  # all peaks are equal
    assert draw_throughput_trend(series) is None  # all steps are the same work


def test_too_few_steps_cannot_be_judged() -> None:
    runs = RunSeries.of_runs([timed("a", 100), timed("b", 150, steps=1), timed("c", 150)])
    assert column(tabulate_runs(runs), "verdict") == ["baseline", "cannot tell", "slower"]
    assert any("too few steps" in note for note in tabulate_runs(runs).notes)
    # The gate then uses the limit alone, as with two runs.
    assert [point.run for point in find_slower(runs, 0.03)] == [1, 2]
    assert find_slower(runs, 0.6) == []


def test_only_the_same_work_is_compared() -> None:
    """Runs of two batches are two lines, each with its own baseline."""
    runs = [
        timed("a", 100, batch=4),
        timed("b", 60, batch=4, compile=True),
        timed("c", 200, batch=8),
        timed("d", 110, batch=8, compile=True),
    ]
    series = RunSeries.of_runs(runs)
    assert [case.name for case in series.cases] == ["batch 4", "batch 8"]
    assert column(tabulate_runs(series), "verdict") == ["baseline", "faster", "baseline", "faster"]
    trend, tokens = draw_step_trend(series), draw_throughput_trend(series)
    assert trend is not None
    assert [len(line.points) for line in trend.lines] == [2, 2]
    assert tokens is not None
    report = tell_many(series)
    assert report.sentence == "4 runs: 60 ms to 200 ms per step; the work of a step differs (batch)."
    said = "Faster than the first run of the same work: compile + batch 4 and compile + batch 8."
    assert report.sections[0].lead == said
    settings = tabulate_settings(series)
    assert settings is not None
    assert column(settings, "batch") == ["4", "4", "8", "8"]


def test_a_name_has_the_settings_that_tell_several_runs_apart() -> None:
    works = [(size, mode) for size in ("small", "large") for mode in ("inference", "train")]
    runs = [timed("run", 100, size=size, mode=mode, compile=size == "large", precision="bf16") for size, mode in works]
    runs += [timed("run", 100, size="small", mode="inference", precision="fp32", compile=True)]
    assert "small + fp32 + compile + inference" in RunSeries.of_runs(runs).labels


def test_runs_that_all_differ_in_work_have_no_verdict() -> None:
    series = RunSeries.of_runs([timed(f"run {batch}", 100, batch=batch) for batch in (1, 2, 4)])
    assert series.is_single
    assert "verdict" not in [one.key for one in tabulate_runs(series).columns]
    assert find_slower(series, 0.0) == []


def test_warnings_of_two_runs_are_warnings_of_many() -> None:
    doubt = Doubt(code="throttled", text="the clocks were held back")
    ours = reduce_run(Materials(name="ours", profile=record_ours(product, doubts=(doubt,))))
    foreign = reduce_run(Materials(name="foreign", profile=record_ours(product, source="nsight systems", case=None)))
    doubts = [f"warning: {name}: the clocks were held back (throttled)" for name in ("before", "after")]
    assert list(list_warnings(RunSeries.of_runs([ours, ours]))) == doubts
    said = list(list_warnings(RunSeries.of_runs([foreign, ours])))
    assert said[0] == ("warning: the profilers differ, and so does their overhead: nsight systems and pytorch profiler")
    assert said[1] == "workload unknown: check that all runs have the same model and settings"
    assert list(list_warnings(RunSeries.of_runs([timed("a", 1.0), timed("b", 2.0)]))) == []
    assert list(list_warnings(RunSeries.of_runs([ours, timed("b", 2.0)]))) == [
        "warning: ours: the clocks were held back (throttled)",
    ]


def test_parts_of_each_run_add_up_to_its_step() -> None:
    profiles = [record(product, *[product] * extra, steps=4) for extra in (0, 1, 2)]
    runs = [reduce_run(Materials(name=f"run {at}", profile=one, memory=memory())) for at, one in enumerate(profiles)]
    series = RunSeries.of_runs(runs)
    stacked = dict(stack_parts(series))
    assert set(stacked) == {"classes", "phases", "categories"}
    for key in ("classes", "phases"):
        for at, profile in enumerate(profiles):
            total = sum(one[at] or 0.0 for one in stacked[key].values)
            assert total == pytest.approx(profile.clock.step_ns / MS, rel=1e-9)
    for at in range(3):
        assert sum(one[at] or 0.0 for one in stacked["categories"].values) == memory().peak_bytes
    table = tabulate_parts(series, "class")
    assert table is not None
    assert [sum(float(str(cell)) for cell in row[1:]) for row in table.rows] == pytest.approx(
        [profile.clock.step_ns / MS for profile in profiles]
    )


def test_whole_traces_are_not_called_steps() -> None:
    runs = [reduce_run(Materials(name=f"run {at}", profile=traced())) for at in range(3)]
    series = RunSeries.of_runs(runs)
    assert not series.is_step
    assert next(one.label for one in tabulate_runs(series).columns if one.key == "step_ms") == "trace ms"
    assert "in the trace" in tell_many(series).sentence


def test_many_small_parts_become_one() -> None:
    stacked = dict(stack_parts(RunSeries.of_runs([_in_classes(f"run {at}", 14) for at in range(3)])))
    bars = stacked["classes"]
    assert isinstance(bars, Bars)
    assert len(bars.series) == 10
    assert bars.series[-2:] == ("idle", "the rest")
    assert [sum(one[at] or 0.0 for one in bars.values) for at in range(3)] == pytest.approx([sum(range(15))] * 3)


def _in_classes(name: str, count: int) -> RunFigures:
    figures = timed(name, 100)
    classes = {f"class {place}": place * MS for place in range(1, count)} | {"": float(count * MS)}
    return RunFigures(identity=figures.identity, step=figures.step, classes=classes, soundness=figures.soundness)


# --- Cases ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sweeps() -> RunSeries:
    """Three files of two cases; the second case is missing from the first file, and failed in the last."""
    first = TrendCase(name="small", figures=tuple(timed(f"f{at}", 100 + 20 * at) for at in range(3)))
    failed = reduce_run(Materials(name="f2", bench=(small_row(status="oom"),)))
    second = TrendCase(name="large", figures=(None, timed("f1", 300), failed))
    return RunSeries(labels=("f0", "f1", "f2"), cases=(first, second))


def test_cases_are_compared_one_by_one(sweeps: RunSeries) -> None:
    table = tabulate_cases(sweeps)
    assert table is not None
    assert column(table, "case") == ["small", "large"]
    assert column(table, "verdict") == ["slower", "oom"]
    assert column(table, "ratio") == [pytest.approx(1.4), None]
    assert list(table.rows[1][3:]) == [None, pytest.approx(300.0), None]
    assert column(tabulate_runs(sweeps), "verdict") == ["baseline", "slower", "slower", "baseline", "oom"]
    trend = draw_step_trend(sweeps)
    assert trend is not None
    assert trend.kind == "ratio"
    assert [line.name for line in trend.lines] == ["small"]
    assert [point.value for point in trend.lines[0].points] == pytest.approx([1.0, 1.2, 1.4])
    report = tell_many(sweeps)
    assert report.sentence == "3 runs, 2 cases: f2 vs f0: 1 slower."
    assert [point.run for point in find_slower(sweeps, 0.3)] == [2]


def test_the_cases_that_change_most_are_drawn() -> None:
    cases = tuple(
        TrendCase(name=f"case {at}", figures=tuple(timed(f"f{run}", 100 + at * run) for run in range(3)))
        for at in range(12)
    )
    series = RunSeries(labels=("f0", "f1", "f2"), cases=cases)
    trend = draw_step_trend(series)
    assert trend is not None
    assert [line.name for line in trend.lines] == [f"case {at}" for at in range(4, 12)]
    assert trend.notes == ("the 8 cases that change most; 4 more are in the table",)


# --- The report -------------------------------------------------------------------------------------------------------


def test_report_names_the_fastest_run(series: RunSeries) -> None:
    report = tell_many(series, "stepscope report a b c d")
    assert report.sentence == "4 runs: d is the fastest, 80 ms per step, 1.25× faster than a."
    assert report.sections[0].lead == "Faster than a: d; slower: c; within noise: b."
    facts = {fact.key: (fact.value, fact.note) for fact in report.facts}
    assert facts["runs"] == (4, "")
    assert list(facts["fastest"]) == [pytest.approx(80.0, abs=1e-3), "d"]
    assert facts["memory"] == (2**30, "in all of them")
    assert report.commands[1].text == "stepscope report runs/a runs/c --out both.html"
    smaller = [timed("e", 80.0), reduce_run(Materials(name="f", memory=memory()))]
    labels = [fact.label for fact in tell_many(RunSeries.of_runs([*smaller, timed("g", 90.0)])).facts]
    assert labels[-2:] == ["lowest peak memory", "highest peak memory"]
    lines = summarize_report(report)
    assert not any(line.startswith("findings") for line in lines)
    assert "No findings" not in write_site(report)


def test_devices_that_differ_make_a_comparison_unreliable(series: RunSeries) -> None:
    other = msgspec.structs.replace(ENVIRONMENT, driver_name="Other GPU")
    row = msgspec.structs.replace(small_row(), environment=other)
    moved = reduce_run(Materials(name="e", bench=(row,)))
    known = [point.figures for point in series.points]
    soundness = tell_many(RunSeries.of_runs([*known, moved])).soundness
    assert soundness.verdict == "doubtful"
    assert soundness.sentence == "The runs used different devices: Other GPU and Test GPU."


@pytest.mark.parametrize("count", [3, 50])
def test_pages_of_few_and_many_runs(count: int) -> None:
    series = RunSeries.of_runs([timed(f"runs/{number:02}", 100 + number) for number in range(count)])
    page = write_site(tell_many(series))
    # The trend and three phases of each bar, all of them wide and narrow.
    assert page.count('class="mark" data-mark') == 2 * (1 + 3) * count
    assert len(page) < 600_000


def test_a_whole_report_is_reduced() -> None:
    figures = reduce_run(all_there())
    assert figures.step is not None
    assert figures.peak_bytes == memory().peak_bytes
    assert figures.categories
    assert figures.classes
    assert figures.facts["busy"]

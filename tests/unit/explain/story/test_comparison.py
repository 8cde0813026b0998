"""Comparisons: changes come with their figures, and what cannot be decided says why."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from stepscope.explain.memory import MemoryProfile, make_memory_profile
from stepscope.explain.story.comparison.report import say_change, tell_both
from stepscope.explain.story.comparison.step_verdict import judge_steps
from stepscope.explain.story.opening import Opening
from stepscope.explain.story.run import SECTIONS
from stepscope.explain.story.sources import Materials
from stepscope.explain.trace.compare import compare
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.findings import Bars, Breakdown, Missing, Part, Report, Roofline, SideBySide, Table
from stepscope.findings.compared import AlignedMemory
from stepscope.recording.store import Overhead
from stepscope.spec import build_case
from tests.unit.explain.story.story_materials import (
    all_there,
    communicate,
    lacks,
    memory,
    not_measured,
    product,
    record,
    record_ours,
    section,
    small_row,
)
from tests.unit.rank_recordings import reduce_ranks
from tests.unit.recordings import GEMM_BF16, Timeline, add_unprofiled_steps
from tests.unit.rows import ENVIRONMENT

LABELS = ("small", "other")  # of `both`, whose settings are equal
AB = ("A", "B")


def part_of(report: Report, key: str) -> Part:
    return next(one.part for each in report.sections for one in each.exhibits if one.key == key)


def timed(*step_ns: int, name: str = "run", **settings: object) -> Materials:
    return Materials(name=name, bench=(small_row(step_ns=step_ns, **settings),))


def unmarked(profile: Profile) -> Profile:
    """The same kernels in a trace without steps, phases and modules."""
    return make_profile(replace(profile.recording, ranges=profile.recording.ranges.head(0)))


def steps_of(*durations_us: int) -> Materials:
    timeline = Timeline()
    for us in durations_us:
        with timeline.step():
            timeline.launch(GEMM_BF16, us)
            timeline.wait()
    return Materials(name="steps", profile=timeline.profile())


def half_of(profile: MemoryProfile) -> MemoryProfile:
    """The same with every allocation half as large."""
    halved = profile.recording.allocations.with_columns(bytes=profile.recording.allocations["bytes"] // 2)
    return make_memory_profile(replace(profile.recording, allocations=halved))


def with_clock(plain_ns: int, *work: Any, steps: int = 3, host_us: float = 4000) -> Profile:
    """A profile of a slow CPU, with faster unprofiled steps."""
    return add_unprofiled_steps(record(*work, steps=steps, host_us=host_us), *[plain_ns] * steps)


def judge(a: Materials, b: Materials) -> str:
    return judge_steps(a.step_times, b.step_times)


@pytest.fixture(scope="module")
def both() -> Report:
    """A whole run, and one whose GEMM takes half the time in another precision."""
    faster = record_ours(
        lambda timeline: product(timeline, 125),
        case=build_case({"size": "small", "context": 256, "precision": "fp32", "device": "cuda:0"}),
        steps=4,
    )
    return tell_both(all_there(), replace(all_there(), name="other", profile=faster, memory=half_of(memory())))


# --- The headline -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (
            (65_700_000,) * 5,
            (17_500_000,) * 5,
            "17.5 ms vs 65.7 ms per step, 3.75× faster, peak memory 1 GiB.",
        ),
        (
            (20_000_000,) * 5,
            (30_000_000,) * 5,
            "30 ms vs 20 ms per step, 1.5× slower, peak memory 1 GiB.",
        ),
        (
            (20_000_000,) * 5,
            (19_000_000,) * 5,
            "19 ms vs 20 ms per step, 5% less time, peak memory 1 GiB.",
        ),
        ((20_000_000,) * 5, (20_000_000,) * 5, "both take 20 ms per step, peak memory 1 GiB."),
        (
            (10_000_000, 20_000_000, 30_000_000),
            (11_000_000, 21_000_000, 31_000_000),
            "21 ms vs 20 ms per step, within noise, peak memory 1 GiB.",
        ),
        (
            (20_000_000,),
            (10_000_000,),
            "10 ms vs 20 ms per step, 2× faster (too few steps to rule out noise), peak memory 1 GiB.",
        ),
    ],
)
def test_headline_has_both_step_times_and_the_factor(a: tuple[int, ...], b: tuple[int, ...], said: str) -> None:
    assert tell_both(timed(*a), timed(*b)).sentence == f"after vs before: {said}"


def test_sides_are_named_by_what_differs() -> None:
    report = tell_both(
        timed(*(4 * 10**7,) * 5, precision="fp32"),
        timed(*(10**7,) * 5, attention="flash", compile=True),
    )
    assert report.runs == ("fp32 + naive", "bf16 + flash + compile")
    assert report.title == "Small Transformer: bf16 + flash + compile vs fp32 + naive"
    assert report.sentence.startswith("bf16 + flash + compile vs fp32 + naive: 10 ms vs 40 ms per step, 4× faster")
    batches = tell_both(timed(*(10**7,) * 5, batch=4), timed(*(2 * 10**7,) * 5, batch=8))
    assert batches.sentence.startswith("batch 8 vs batch 4: ")
    assert "also different" not in batches.sentence


def test_differing_work_that_labels_do_not_show_is_named() -> None:
    a, b = timed(*(10**7,) * 5, precision="fp32"), timed(*(2 * 10**7,) * 5)
    other = msgspec.structs.replace(ENVIRONMENT, driver_name="Another GPU")
    b = replace(b, bench=(msgspec.structs.replace(b.bench[0], environment=other),))
    assert tell_both(a, b).sentence.endswith("; also different: device Test GPU → Another GPU.")


def test_memory_only_comparison_has_a_headline() -> None:
    a, b = (Opening(Materials(name="a", memory=one)) for one in (memory(), half_of(memory())))
    assert "50% less; no step times" in say_change(a, b, AB)
    assert "2× as much" in say_change(b, a, AB)
    assert "in both" in say_change(a, a, AB)


def test_traces_without_steps_have_their_lengths_in_the_headline() -> None:
    long_names = ("a_trace_with_a_long_name.json.gz", "the_other_trace_of_two.json.gz")
    a, b = (Opening(Materials(name=name, profile=unmarked(record(product)))) for name in long_names)
    said = say_change(a, b, long_names)
    assert said == f"{long_names[1]} vs {long_names[0]}: 508 µs vs 508 µs in the trace, no steps marked."


def test_headline_of_two_runs_leaves_out_clauses_before_it_cuts_words() -> None:
    long_names = ("a_trace_with_a_long_name.json.gz", "the_other_trace_of_two.json.gz")
    a = Opening(Materials(name=long_names[0], profile=unmarked(record(product))))
    b = Opening(Materials(name=long_names[1], profile=record(product)))
    said = say_change(a, b, long_names)
    assert "…" not in said
    assert said == (f"{long_names[1]}: 258 µs per training step. {long_names[0]}: 2 kernels in 508 µs.")


def test_failed_run_is_not_compared() -> None:
    failed = Opening(Materials(name="a", bench=(small_row(status="oom"),), memory=memory()))
    said = say_change(failed, Opening(timed(*(10**7,) * 5)), AB)
    assert said.startswith("B: 10 ms per training step")
    assert " A: out of memory" in said
    only_memory = Opening(Materials(name="b", memory=half_of(memory())))
    assert " vs " not in say_change(failed, only_memory, AB) + say_change(only_memory, failed, AB)


def test_unprofiled_and_profiled_steps_are_not_judged() -> None:
    recorded = Materials(name="b", profile=record(product, steps=5))
    plain = Materials(name="a", profile=with_clock(2_000_000, product, steps=5))
    assert judge(plain, recorded) == "cannot tell"
    assert judge(timed(*(10**7,) * 5), recorded) == "cannot tell"
    assert judge(recorded, recorded) == "same"
    slower = Materials(name="b", profile=record(product, product, steps=5))
    assert judge(recorded, slower) == "slower"
    assert "noise" not in say_change(Opening(recorded), Opening(slower), AB)
    assert "(one timed under the profiler)" in say_change(Opening(plain), Opening(recorded), AB)


def test_clocks_of_profile_are_not_mixed() -> None:
    recorded = Opening(Materials(name="a", profile=record(product, steps=5)))
    plain = Opening(Materials(name="b", profile=with_clock(2_000_000, product, steps=5)))
    assert judge(recorded.materials, plain.materials) == judge(plain.materials, recorded.materials) == "cannot tell"
    assert "(one timed under the profiler)" in say_change(recorded, plain, AB)
    timed_alone = Opening(timed(*(10**7,) * 5))
    assert "(one timed by bench, one by profile)" in say_change(timed_alone, plain, AB)


def test_unprofiled_steps_are_judged_by_their_own_clock() -> None:
    """The profiled steps of both are equal to the nanosecond."""
    a, b = (Materials(name="a", profile=with_clock(ns, product, steps=5)) for ns in (2_000_000, 3_000_000))
    assert judge(a, b) == "slower"
    assert judge(b, a) == "faster"
    unkept = record(product, steps=5, host_us=4000, overhead=Overhead(plain_ns=3_000_000))
    assert judge(a, Materials(name="b", profile=unkept)) == "cannot tell"


def test_equal_figures_read_as_equal() -> None:
    """The figures are medians, which can differ although the means are equal."""
    said = tell_both(timed(10**7, 10**7, 40 * 10**6), timed(20 * 10**6, 20 * 10**6, 20 * 10**6)).sentence
    assert said.startswith("after vs before: 20 ms vs 10 ms per step, within noise")
    hardly = tell_both(timed(*(20_000_000,) * 5), timed(*(20_000_100,) * 5)).sentence
    assert hardly.startswith("after vs before: both take 20 ms per step")


# --- What changed -----------------------------------------------------------------------------------------------------


def test_changes_come_first_and_every_section_follows(both: Report) -> None:
    rare = ("oom", "ranks", "loop", "experts", "optimise")
    assert [one.key for one in both.sections] == ["changes", *(key for key in SECTIONS if key not in rare)]
    assert both.runs == LABELS
    keys = [exhibit.key for each in both.sections for exhibit in each.exhibits]
    assert len(set(keys)) == len(keys)


def test_only_differing_settings_are_listed() -> None:
    table = part_of(tell_both(timed(10**7, precision="fp32"), timed(10**7, batch=8)), "changes-settings")
    assert isinstance(table, Table)
    assert [row for row in table.rows if row[0] != "device"] == [("batch", "4", "8"), ("precision", "fp32", "bf16")]
    same = tell_both(timed(10**7), timed(2 * 10**7))
    assert "changes" not in [one.key for one in same.sections]


def test_bars_and_tables_of_time_add_up_to_the_steps() -> None:
    a, b = record(product, product, steps=3), record(product, communicate, steps=4)
    report = tell_both(Materials(name="a", profile=a), Materials(name="b", profile=b))
    bars = part_of(report, "changes-time")
    assert isinstance(bars, Bars)
    wall = compare(a, b).wall
    assert sum(value or 0 for value in bars.values[0]) == pytest.approx(wall.a_ns / 1e6, rel=1e-12)
    assert sum(value or 0 for value in bars.values[1]) == pytest.approx(wall.b_ns / 1e6, rel=1e-12)
    assert "communication" in bars.labels
    first, kernels = part_of(report, "changes-class"), part_of(report, "changes-kernel")
    assert isinstance(first, Table)
    assert isinstance(kernels, Table)
    parts = [row[1:] for row in first.rows if row[0] == "class"]
    assert len(parts) < len(first.rows), "the totals are in the first table"
    a_ns = [column.key for column in kernels.columns].index("a_ns")
    for rows in (parts, kernels.rows):
        assert sum(ns for row in rows if isinstance(ns := row[a_ns], int)) == wall.a_ns
    assert [column.key for column in kernels.columns] == [column.key for column in first.columns][1:]
    assert not set(first.notes) & set(kernels.notes)
    lead = section(report, "changes").lead
    assert "communication +900 µs" in lead
    assert "GEMMs −250 µs" in lead
    assert "idle" not in lead


def test_idle_time_excludes_profiler_overhead() -> None:
    """Idle time differs by 4 ms in the profiles, and by 0.5 ms without profiling."""
    a = with_clock(1_500_000, product)
    b = with_clock(2_250_000, product, product)
    report = tell_both(Materials(name="a", profile=a), Materials(name="b", profile=b))
    assert b.clock.profiled_ns - a.clock.profiled_ns == 4_000_000
    bars = part_of(report, "changes-time")
    assert isinstance(bars, Bars)
    assert [sum(value or 0 for value in column) for column in bars.values] == pytest.approx([1.5, 2.25], rel=1e-12)
    assert "Profiled" not in bars.title
    lead = section(report, "changes").lead
    assert lead == "The step goes from 1.5 ms to 2.25 ms: idle +500 µs, GEMMs +250 µs."
    taken_apart = part_of(report, "breakdown")
    assert isinstance(taken_apart, Breakdown)
    assert taken_apart.walls_ns == (1_500_000, 2_250_000)


def test_idle_time_of_two_profiled_runs_is_noted_and_in_the_lead() -> None:
    a, b = record(product, steps=3), record(product, steps=3, host_us=4000)
    report = tell_both(Materials(name="a", profile=a), Materials(name="b", profile=b))
    assert section(report, "changes").lead == "The profiled step goes from 258 µs to 4 ms: idle +3.74 ms."
    bars = part_of(report, "changes-time")
    assert isinstance(bars, Bars)
    assert "Profiled step" in bars.title
    assert any("profiler, which slows the CPU" in note for note in bars.notes)


def test_idle_time_is_not_in_the_lead_if_only_one_run_was_profiled() -> None:
    a, b = with_clock(1_500_000, product), record(product, steps=3, host_us=4000)
    report = tell_both(Materials(name="a", profile=a), Materials(name="b", profile=b))
    said = "No kernel class changed by more than noise and 2% of the profiled step."
    assert section(report, "changes").lead == said


def test_traces_without_steps_are_not_called_steps() -> None:
    a, b = (Materials(name=name, profile=unmarked(record(*[product] * count))) for name, count in (("a", 1), ("b", 3)))
    report = tell_both(a, b)
    bars, tables = part_of(report, "changes-time"), [part_of(report, f"changes-{by}") for by in ("class", "kernel")]
    assert isinstance(bars, Bars)
    assert "the bars of each run add up to its trace" in bars.notes[0]
    assert not any("step" in note for note in bars.notes)
    for table in tables:
        assert isinstance(table, Table)
        assert "in the trace" in [column.label for column in table.columns]
        assert table.title.endswith(", in ms")


def test_every_part_of_the_page_has_the_same_step_and_idle_time() -> None:
    """Headline, tiles, chart and table of changes, breakdown, questions and `compare`; bench says something else."""
    profiles = [
        add_unprofiled_steps(record_ours(*[product] * count, steps=3, host_us=us), *[ns * 1_000_000] * 5)
        for count, us, ns in ((4, 3000, 4), (2, 5000, 2))
    ]
    runs = [Materials(name="run", profile=one, bench=(small_row(),)) for one in profiles]
    report = tell_both(*runs)
    assert report.sentence.startswith("after vs before: 2 ms vs 4 ms per step, 2× faster")
    facts = {one.key: (one.before, one.value) for one in report.facts}
    assert facts["step"] == (4, 2)
    assert facts["busy"] == pytest.approx((0.25, 0.25))
    bars, table = part_of(report, "changes-time"), part_of(report, "changes-class")
    assert isinstance(bars, Bars)
    assert isinstance(table, Table)
    assert [sum(value or 0 for value in column) for column in bars.values] == pytest.approx([4, 2])
    rows = {row[1]: row[2:4] for row in table.rows}
    assert [rows[name] for name in ("wall", "idle", "(idle)")] == [(4, 2), (3, 1.5), (3, 1.5)]
    assert [bars.values[run][bars.labels.index("idle")] for run in (0, 1)] == [3, 1.5]
    taken_apart = part_of(report, "breakdown")
    assert isinstance(taken_apart, Breakdown)
    assert (taken_apart.walls_ns, taken_apart.idles_ns) == ((4e6, 2e6), (3e6, 1.5e6))
    wall = compare(*profiles).wall
    assert (wall.a_ns, wall.b_ns) == (4_000_000, 2_000_000)


def test_phases_have_the_times_of_the_picture() -> None:
    """Idle time is part of the phase that waits."""
    timelines = Timeline(host_us=5), Timeline(host_us=900)
    for timeline in timelines:
        with timeline.step():
            for name in ("forward", "backward"):
                with timeline.phase(name):
                    product(timeline)
                    product(timeline)
            timeline.wait()
    report = tell_both(*(Materials(name="run", profile=one.profile()) for one in timelines))
    table, picture = part_of(report, "changes-phase"), report.picture
    assert isinstance(table, Table)
    assert picture is not None
    for run, bar in enumerate(picture.bars):
        assert bar is not None
        times = {str(row[0]): (row[1 + run], row[6 + run]) for row in table.rows}
        for phase in bar.phases:
            assert times[phase.name] == pytest.approx(((phase.busy_ns + phase.idle_ns) / 1e6, phase.idle_ns / 1e6))
    assert "verdict" not in [column.key for column in table.columns]


def test_modules_of_one_run_are_not_compared_with_none() -> None:
    compiled = Timeline()
    for _ in range(3):
        with compiled.step(), compiled.phase("backward"), compiled.module("(Model)"):
            product(compiled)
            compiled.wait()
    ours = {"case": build_case({"size": "small", "compile": True, "device": "cuda:0"})}
    a = Materials(name="a", profile=record_ours(product, steps=3))
    b = Materials(name="b", profile=compiled.profile(**ours))
    report = tell_both(a, b)
    said = f"not recorded in {report.runs[1]}: compiled code has no modules"
    assert lacks(report, "changes by module").why == said
    assert "changes-module" not in [one.key for one in section(report, "changes").exhibits]
    shown = part_of(report, "breakdown")
    assert isinstance(shown, Breakdown)
    assert [one.key for one in shown.dimensions] == ["class", "phase", "op", "kernel"]
    assert f"modules: {said}" in shown.notes
    neither = tell_both(b, b)
    assert "changes by module" not in [one.what for one in not_measured(neither)]


def test_notes_on_changes_appear_once(both: Report) -> None:
    notes = {one.key: one.part.notes for one in section(both, "changes").exhibits if isinstance(one.part, Table)}
    assert sum("add up to `wall`" in note for each in notes.values() for note in each) == 1
    every = [note for each in notes.values() for note in each]
    assert len(set(every)) == len(every)


def test_memory_changes_add_up_to_the_peaks() -> None:
    a, b = memory(), half_of(memory())
    report = tell_both(Materials(name="a", memory=a), Materials(name="b", memory=b))
    chart, table = part_of(report, "changes-memory"), part_of(report, "changes-categories")
    assert isinstance(chart, AlignedMemory)
    assert isinstance(table, Table)
    assert [max(chart.totals(run)) for run in (0, 1)] == [a.peak_bytes, b.peak_bytes]
    assert table.rows[-1][:4] == ("all", a.peak_bytes, b.peak_bytes, b.peak_bytes - a.peak_bytes)
    changes = [size for row in table.rows[:-1] if isinstance(size := row[3], int)]
    assert sum(changes) == b.peak_bytes - a.peak_bytes
    assert [abs(size) for size in changes] == sorted(map(abs, changes), reverse=True)


def test_noise_is_not_a_change() -> None:
    said = section(tell_both(steps_of(100, 900, 500), steps_of(200, 1000, 500)), "changes").lead
    assert said.startswith("No kernel class changed")
    clear = section(tell_both(steps_of(500, 500, 500), steps_of(600, 600, 600)), "changes").lead
    assert "GEMMs +100 µs" in clear


def test_run_compared_with_itself_has_no_changes() -> None:
    run = Materials(name="a", profile=record(product, steps=4), memory=memory())
    changes = section(tell_both(run, run), "changes")
    assert "No kernel class changed" in changes.lead
    assert "Peak memory is about the same" in changes.lead


def test_missing_stage_of_one_run_names_the_run_and_a_command() -> None:
    a, b = Materials(name="a", profile=record_ours(product)), Materials(name="b", memory=memory())
    report = tell_both(a, b)
    assert lacks(report, "changes in step time").why.startswith(f"{report.runs[1]}: ")
    assert lacks(report, "changes in memory").why.startswith(f"{report.runs[0]}: ")
    assert lacks(report, "changes in memory").command.startswith("stepscope memory --size small")
    drawn = part_of(tell_both(a, b), "step-timeline")
    assert isinstance(drawn, SideBySide)
    assert drawn.parts[0] is not None
    assert drawn.parts[1] is None


def test_reason_that_both_runs_share_appears_once() -> None:
    run = Materials(name="a", bench=(small_row(),), absent={"profile": Missing(what="it", why="no GPU")})
    report = tell_both(run, run)
    assert [one.why for one in not_measured(report)].count("no GPU") == 1
    other = replace(run, absent={"profile": Missing(what="it", why="another reason")})
    report = tell_both(run, other)
    assert {"before: no GPU", "after: another reason"} <= {one.why for one in not_measured(report)}


# --- Facts, measurement quality, sections -----------------------------------------------------------------------------


def test_facts_have_both_values() -> None:
    report = tell_both(timed(*(2 * 10**7,) * 5, precision="fp32"), timed(*(10**7,) * 5))
    facts = {fact.key: fact for fact in report.facts}
    assert (facts["step"].before, facts["step"].value) == (20.0, 10.0)
    assert "fp32: of the fp32 peak" in facts["mfu"].note
    assert "bf16: of the bf16 peak" in facts["mfu"].note
    assert [fact.key for fact in report.facts][:2] == ["step", "memory"]
    assert [key for key, fact in facts.items() if not fact.is_comparable] == ["mfu"]
    same = tell_both(timed(*(2 * 10**7,) * 5), timed(*(10**7,) * 5))
    assert all(fact.is_comparable for fact in same.facts)


def test_process_memory_and_allocated_memory_are_not_compared() -> None:
    a, b = timed(*(10**7,) * 5), timed(*(2 * 10**7,) * 5)
    measured = b.bench[0].measurement
    assert measured is not None
    of_process = msgspec.structs.replace(measured, peak_kind="rss above start", peak_bytes=2**31)
    b = replace(b, bench=(msgspec.structs.replace(b.bench[0], measurement=of_process),))
    report = tell_both(a, b)
    (fact,) = [one for one in report.facts if one.key == "memory"]
    assert not fact.is_comparable
    assert (fact.before, fact.value) == (2**30, 2**31)
    assert "GiB" not in report.sentence
    assert "peak memory 2 GiB." in tell_both(b, b).sentence


def test_notes_of_facts_do_not_repeat() -> None:
    report = tell_both(timed(*(2 * 10**7,) * 5), timed(*(10**7,) * 5))
    notes = {fact.key: fact.note for fact in report.facts}
    assert notes["memory"] == "allocated"
    assert notes["step"].count("median of 5 steps") == 1
    spread = [(10**7 + 111_000 * n) * 10 for n in range(5)]
    report = tell_both(timed(*spread), timed(*(2 * ns for ns in spread), *spread[1:]))
    (step,) = [fact for fact in report.facts if fact.key == "step"]
    assert step.note == "before: median of 5 steps; after: median of 9 steps"  # the measurement quality has the spread


def test_fact_of_one_run_has_one_value() -> None:
    a, b = timed(*(2 * 10**7,) * 5), Materials(name="b", memory=memory())
    facts = {fact.key: fact for fact in tell_both(a, b).facts}
    assert (facts["step"].before, facts["step"].value) == (20.0, None)
    assert facts["step"].note.endswith("b: unknown")
    assert list(facts)[:2] == ["step", "memory"]
    facts = {fact.key: fact for fact in tell_both(b, a).facts}
    assert (facts["step"].before, facts["step"].value) == (None, 20.0)


def test_trace_length_is_not_compared_with_a_step() -> None:
    """One run marks steps and the other does not."""
    profile = record(product, steps=2)
    report = tell_both(Materials(name="a", profile=unmarked(profile)), Materials(name="b", profile=profile))
    (step,) = [fact for fact in report.facts if fact.key == "step"]
    assert step.label == "step time"
    assert step.before is None
    assert " vs " not in report.sentence


def test_different_devices_are_unreliable() -> None:
    other = msgspec.structs.replace(ENVIRONMENT, driver_name="Another GPU")
    a = timed(*(10**7,) * 5)
    b = replace(a, bench=(msgspec.structs.replace(a.bench[0], environment=other),))
    report = tell_both(a, b)
    assert report.soundness.verdict == "doubtful"
    assert "different devices: Test GPU and Another GPU" in report.soundness.sentence
    assert report.sentence.startswith("Another GPU vs Test GPU: ")
    assert tell_both(a, a).soundness.verdict == "sound"


def test_quality_is_that_of_the_worse_run() -> None:
    sound, foreign = timed(*(10**7,) * 5), Materials(name="b", profile=record(product))
    assert tell_both(sound, sound).soundness.verdict == "sound"
    assert tell_both(sound, foreign).soundness.verdict != "sound"
    assert tell_both(foreign, sound).soundness.verdict == tell_both(sound, foreign).soundness.verdict
    report = tell_both(sound, foreign)
    said = report.soundness.sentence
    assert said.index(f"{report.runs[1]}: ") < said.index(f"{report.runs[0]}: "), "the run that decides comes first"


def test_one_breakdown_and_one_roofline_hold_both_runs(both: Report) -> None:
    for key, kind in (("breakdown", Breakdown), ("roofline", Roofline)):
        part = part_of(both, key)
        assert isinstance(part, kind)
        assert part.runs == LABELS


def test_two_devices_have_two_rooflines() -> None:
    a, b = record(product), record(product, device="NVIDIA A100-SXM4-40GB")
    part = part_of(tell_both(Materials(name="a", profile=a), Materials(name="b", profile=b)), "roofline")
    assert isinstance(part, SideBySide)
    assert all(isinstance(one, Roofline) for one in part.parts)


def test_everything_else_is_side_by_side(both: Report) -> None:
    for key in ("step-timeline", "memory-timeline", "memory-categories"):
        part = part_of(both, key)
        assert isinstance(part, SideBySide)
        assert part.runs == LABELS
        assert None not in part.parts


def test_differing_step_numbers_are_both_named() -> None:
    a, b = steps_of(500), steps_of(900, 500, 100)
    assert part_of(tell_both(a, b), "step-timeline").title == "before: Step 1; after: Step 2"
    assert part_of(tell_both(a, a), "step-timeline").title == "Step 1"


def test_the_environment_is_one_table(both: Report) -> None:
    table = part_of(both, "environment-table")
    assert isinstance(table, Table)
    assert [column.key for column in table.columns] == ["what", "a", "b"]
    assert ("PyTorch", "2.13.0", "2.13.0") in table.rows


def test_rows_with_equal_names_keep_all_values() -> None:
    a = timed(10**7)
    measured = a.bench[0].measurement
    assert measured is not None
    two = msgspec.structs.replace(measured, attention_kernels=("one", "other"))
    b = replace(a, bench=(msgspec.structs.replace(a.bench[0], measurement=two),))
    table = part_of(tell_both(a, b), "environment-table")
    assert isinstance(table, Table)
    assert ("attention kernels", None, "one, other") in table.rows


def test_equal_leads_appear_once(both: Report) -> None:
    assert section(both, "environment").lead.count("Test GPU") == 1
    assert section(both, "timeline").lead.startswith("small: ")
    assert "\nother: " in section(both, "timeline").lead


def test_ranks_appear_if_either_run_has_them() -> None:
    ranks = tuple(record(product, communicate, rank=rank) for rank in (0, 1))
    a, b = (
        Materials(name="a", profile=ranks[0], ranks=reduce_ranks(ranks)),
        Materials(name="b", profile=record(product)),
    )
    report = tell_both(a, b)
    part = part_of(report, "ranks-time")
    assert isinstance(part, SideBySide)
    assert isinstance(part.parts[0], Bars)
    assert part.parts[1] is None
    assert "ranks" not in [one.key for one in tell_both(b, b).sections]


def test_advice_is_for_the_second_run_and_commands_for_both(both: Report) -> None:
    assert both.advice is not None
    assert both.commands[0].label == "this report"
    texts = [one.text for one in both.commands]
    assert len(set(texts)) == len(texts)
    a, b = timed(10**7), timed(10**7)
    b = replace(b, bench=(msgspec.structs.replace(b.bench[0], command="stepscope bench --batch 8"),))
    labels = [one.label for one in tell_both(a, b).commands]
    assert labels == ["before: timing", "after: timing"]
    slow = Materials(name="a", profile=record(product, host_us=2000))
    fine = Materials(name="b", profile=record(product))
    codes = [one.finding.code for one in tell_both(slow, fine).advice or ()]
    assert "SS019" in [one.finding.code for one in tell_both(fine, slow).advice or ()]
    assert "SS019" not in codes


def test_partial_run_makes_a_partial_report() -> None:
    run = timed(10**7)
    assert tell_both(replace(run, is_partial=True), run).is_partial
    assert not tell_both(run, run).is_partial

"""Every subset of the stages gives a complete page that lists what was not measured."""

import json
import re
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

from stepscope.explain.memory import make_memory_profile
from stepscope.explain.story import Materials, tell
from stepscope.explain.story.opening import MOST_HEADLINE
from stepscope.explain.story.run import SECTIONS
from stepscope.findings import Bars, Missing, Questions, Report, Section, Table, Timeline
from stepscope.recording.readers.formats import open_recording
from stepscope.recording.rows.attention_case import AttentionRow
from stepscope.spec import build_case
from stepscope.units import clip, say_size
from tests.unit.attention_rows import attend
from tests.unit.explain.story.story_materials import (
    all_there,
    counted,
    lacks,
    memory,
    not_measured,
    product,
    record,
    record_ours,
    section,
    small_row,
    traced,
)
from tests.unit.rank_recordings import reduce_ranks
from tests.unit.recordings import Timeline as Recorded
from tests.unit.snapshot_files import MIB, Model, write

STAGES = ("profile", "memory", "bench", "precision", "attention", "plan")
# The stage that each section needs; `time` also has the timed rows.
NEEDS = {
    "timeline": "profile",
    "time": "profile",
    "roofline": "profile",
    "memory": "memory",
    "autograd": "memory",
    "precision": "precision",
    "attention": "attention",
}
HOSTILE = "<script>alert(1)</script>\u202e\x00" + "A" * 1000


def without(stages: tuple[str, ...]) -> Materials:
    empty: dict[str, Any] = {field.name: field.default for field in fields(Materials)}
    return replace(all_there(), **{stage: empty[stage] for stage in stages})


def check(report: Report) -> None:
    """Invariants of every report."""
    assert json.loads(msgspec.json.encode(report))["sentence"] == report.sentence
    keys = [one.key for part in report.sections for one in part.exhibits]
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch(r"[a-z0-9-]+", key) for key in keys)
    assert report.sentence.endswith(".")
    assert report.soundness.sentence.endswith(".")
    assert len(report.sentence) <= MOST_HEADLINE
    for one in report.sections:
        assert one.exhibits or one.key in ("environment", "not-measured")
        assert bool(one.missing) == (one.key == "not-measured")
        assert all(missing.what and missing.why for missing in one.missing)


@pytest.mark.parametrize(
    "missing", [stages for size in range(len(STAGES) + 1) for stages in combinations(STAGES, size)]
)
def test_any_subset_of_the_stages_gives_a_report(missing: tuple[str, ...]) -> None:
    report = tell(without(missing))
    check(report)
    shown = [one.key for one in report.sections]
    assert shown == [key for key in (*list(SECTIONS)[:-1], "not-measured", "environment") if key in shown]
    for key, stage in NEEDS.items():
        is_timed = key == "time" and "bench" not in missing
        assert (key in shown) == (stage not in missing or is_timed), key
    commands = [one.command for one in not_measured(report)]
    assert len(set(commands)) == len(commands), "one line per command"
    assert bool(commands) == bool({*missing} - {"bench"})
    assert (report.advice is None) == ("profile" in missing)


@pytest.mark.parametrize("profile", [traced, counted], ids=["trace", "counters"])
def test_foreign_file_gives_a_report(profile: object) -> None:
    assert callable(profile)
    report = tell(Materials(name="a", profile=profile()))
    check(report)
    assert report.soundness.verdict == "unknown"
    assert lacks(report, "memory over time").why == "this file has no memory history"
    assert "_dump_snapshot" in lacks(report, "memory over time").command
    assert lacks(report, "saved activations").command == "stepscope memory --model my_model:build"
    assert lacks(report, "the roofline").why == "operator shapes were not recorded"


def test_counters_have_a_table_and_no_timeline() -> None:
    report = tell(Materials(name="a", profile=counted()))
    assert "one kernel at a time" in lacks(report, "the timeline").why
    assert "time-counters" in [one.key for one in section(report, "time").exhibits]


def test_snapshot_has_memory_and_lists_what_it_lacks() -> None:
    report = tell(Materials(name="a.pickle", memory=memory()))
    check(report)
    assert lacks(report, "time by kernel").why == "this file has no kernel trace"
    assert [one.key for one in section(report, "memory").exhibits] == [
        "memory-timeline",
        "memory-categories",
        "memory-phases",
        "memory-largest",
    ]


def test_given_reason_is_used() -> None:
    absent = {
        "precision": Missing(what="precision", why="it ran out of memory", command="stepscope precision --batch 1")
    }
    report = tell(replace(without(("precision",)), absent=absent))
    assert not_measured(report) == (absent["precision"],)
    both = tell(replace(without(("memory",)), absent={"memory": Missing(what="memory", why="because", command="c")}))
    assert not_measured(both) == (Missing(what="memory and saved activations", why="because", command="c"),)


def test_missing_stage_has_its_complete_command() -> None:
    report = tell(without(("memory", "precision", "attention")))
    assert [one.command for one in not_measured(report)] == [
        "stepscope memory --size small --context 256 --precision bf16",
        "stepscope precision --size small --context 256",
        "stepscope attention --head-dim 64 --length 256",
    ]


def test_interrupted_run_lists_everything_in_one_line() -> None:
    report = tell(Materials(name="a", command="stepscope report", is_partial=True))
    check(report)
    (line,) = not_measured(report)
    assert line.why == "the run was interrupted before this stage"
    assert line.command == "stepscope report"
    assert "the timeline" in line.what
    assert "saved activations" in line.what


def test_missing_bench_is_listed() -> None:
    absent = {"bench": Missing(what="the step's own time", why="the device was lost")}
    report = tell(replace(without(("bench",)), absent=absent))
    assert not_measured(report) == (absent["bench"],)
    assert "the step's own time: the device was lost" in report.soundness.details


def test_only_several_ranks_have_a_section() -> None:
    one = record(product)
    several = Materials(name="a", profile=one, ranks=reduce_ranks((one, record(product, product))))
    check(tell(several))
    assert section(tell(several), "ranks").exhibits
    alone = tell(Materials(name="a", profile=one, ranks=reduce_ranks((one,))))
    assert "ranks" not in [part.key for part in alone.sections]


def test_hostile_names_pass_through_as_text() -> None:
    def launch(timeline: Recorded) -> None:
        with timeline.module(f"blocks.0.{HOSTILE}"):
            timeline.launch(HOSTILE, 700, op=HOSTILE)

    materials = Materials(name=HOSTILE, profile=record(product, launch, file=HOSTILE, device=HOSTILE), memory=memory())
    report = tell(materials)
    check(report)
    assert report.title == clip(HOSTILE, 90)
    assert HOSTILE in report.subtitle


def test_long_tables_count_the_rows_left_out() -> None:
    rows = tuple(small_row(batch=batch) for batch in range(1, 61))
    table = section(tell(Materials(name="a", bench=rows)), "time").exhibits[0].part
    assert isinstance(table, Table)
    assert len(table.rows) == 50
    assert table.notes[-1] == "10 more rows"


def test_commands_appear_once() -> None:
    commands = tell(all_there()).commands
    assert commands[0].text == "stepscope report --size small"
    assert len({one.text for one in commands}) == len(commands)
    assert [one.label for one in commands] == [
        "this report",
        "timing",
        "profile",
        "precision",
        "attention",
    ]


def test_memory_timeline_covers_a_step() -> None:
    drawn = section(tell(all_there()), "memory").exhibits[0].part
    assert isinstance(drawn, Timeline)
    assert max(map(sum, zip(*(area.values for area in drawn.areas), strict=True))) > 0


def test_questions_are_answered_or_have_a_command() -> None:
    asked = [one.part for one in section(tell(all_there()), "questions").exhibits]
    assert [part.title for part in asked if isinstance(part, Questions)] == ["Time", "Memory"]
    for part in asked:
        assert isinstance(part, Questions)
        assert all(one.is_answered or one.command for one in part.questions)
        assert any(one.is_answered for one in part.questions)
    unanswered = [one for part in asked if isinstance(part, Questions) for one in part.questions if not one.is_answered]
    assert any("two recordings" in one.answer for one in unanswered)


def test_bars_of_saved_activations_add_up() -> None:
    autograd = section(tell(Materials(name="a", memory=memory())), "autograd")
    bars, modules = (one.part for one in autograd.exhibits if one.key in ("autograd-blocks", "autograd-modules"))
    assert isinstance(bars, Bars)
    assert isinstance(modules, Table)
    total = memory().summary.saved_bytes
    assert sum(size or 0 for part in bars.values for size in part) == total
    assert sum(row[2] for row in modules.rows if isinstance(row[2], int)) == total
    assert bars.labels == ("blocks.0", "blocks.1", "(outside blocks)")
    assert {"attention", "ffn"} <= set(bars.series)


def test_saved_activations_are_not_called_a_share_of_a_later_peak() -> None:
    """Backward has freed a part of them when memory peaks."""
    recording = memory().recording
    saved = recording.saved.with_columns(storage_bytes=2 * pl.col("storage_bytes"))
    profile = make_memory_profile(replace(recording, saved=saved))
    left = dict(profile.categories_at(profile.peak_event))["activations"]
    assert profile.summary.saved_bytes is not None
    assert left < profile.summary.saved_bytes
    lead = section(tell(Materials(name="a", memory=profile)), "autograd").lead
    size = say_size(profile.summary.saved_bytes)
    said = f"{size} of activations saved for backward after forward; {say_size(left)} is still allocated at the peak."
    assert lead.startswith(said)


def test_snapshot_without_history_shows_its_single_moment(tmp_path: Path) -> None:
    model = Model()
    model.malloc(3 * MIB)
    path = write(model.snapshot(first=len(model.entries)), tmp_path / "moment.pickle")
    report = tell(Materials(name="a", memory=make_memory_profile(open_recording(path))))
    shown = section(report, "memory")
    assert "memory-timeline" not in [one.key for one in shown.exhibits]
    assert "memory-categories" in [one.key for one in shown.exhibits]
    assert "no history" in lacks(report, "memory over time").why


def test_graph_without_activations_has_a_reason() -> None:
    recording = memory().recording
    saved = recording.saved.with_columns(kind=pl.lit("parameter"))
    bare = replace(memory(), recording=replace(recording, saved=saved))
    report = tell(Materials(name="a", memory=bare))
    assert "no activations" in lacks(report, "saved activations").why
    assert "autograd" not in [one.key for one in report.sections]


def test_only_the_built_in_model_is_compared_with_formulas() -> None:
    case = build_case({"size": "nano", "mode": "train"})
    ours = replace(memory(), recording=memory().recording.with_manifest(case=case))
    compiled = build_case({"size": "nano", "compile": True})
    other = replace(memory(), recording=memory().recording.with_manifest(case=compiled))

    def keys(profile: object) -> list[str]:
        report = tell(Materials(name="a", memory=profile))  # type: ignore[arg-type]
        return [one.key for one in section(report, "autograd").exhibits]

    assert "autograd-closed-form" in keys(ours)
    assert "autograd-closed-form" not in keys(other)
    assert "autograd-closed-form" not in keys(memory())


def test_speeds_come_from_the_timed_rows() -> None:
    keys = [one.key for one in section(tell(all_there()), "precision").exhibits]
    assert keys == ["precision-errors", "precision-dtypes", "precision-underflow", "precision-speed"]
    alone = section(tell(without(("bench",))), "precision").exhibits
    assert "precision-speed" not in [one.key for one in alone]


def attention_of(*rows: AttentionRow) -> Section:
    return section(tell(Materials(name="a", attention=rows)), "attention")


def test_attention_lead_uses_the_length_with_the_most_implementations() -> None:
    slow, fast = attend("naive", forward_ns=(30_000_000,) * 3, backward_ns=(30_000_000,) * 3), attend("triton")
    full = (slow, fast, attend("sdpa"))
    longer = (attend("triton", length=4096), attend("sdpa", length=4096), attend("naive", "oom", length=4096))
    lead = attention_of(*full, *longer).lead
    assert lead.startswith("Fastest at length 1,024, head_dim 64: ")
    assert ", 3 ms for forward and backward" in lead
    assert "Slowest: naive, 60 ms, " in lead
    assert "1 of 6 cases failed" in lead


def test_attention_table_keeps_the_longest_lengths() -> None:
    lengths = [2**power for power in range(4, 14)]
    rows = tuple(
        attend(name, length=length, head_dim=dim)
        for length in lengths
        for name in ("naive", "triton", "sdpa")
        for dim in (32, 64, 128)
    )
    table = attention_of(*rows).exhibits[2].part
    assert isinstance(table, Table)
    place = [column.key for column in table.columns].index("length")
    assert {row[place] for row in table.rows} == set(lengths[-5:])
    assert table.notes[-1].startswith("45 more rows for shorter lengths")


def test_unmeasured_attention_keeps_its_reasons() -> None:
    found = attention_of(attend("hopper", "unsupported"))
    assert [one.key for one in found.exhibits] == ["attention-times"]
    assert "1 of 1 cases failed" in found.lead


def test_environment_has_settings_and_versions() -> None:
    environment = section(tell(all_there()), "environment")
    assert [one.key for one in environment.exhibits] == ["environment-table"]
    table = environment.exhibits[0].part
    assert isinstance(table, Table)
    assert ("PyTorch", "2.13.0") in table.rows
    foreign = section(tell(Materials(name="a", profile=traced())), "environment")
    assert foreign.lead.startswith("NVIDIA H200. ")


def test_profile_without_bench_has_its_environment_too() -> None:
    assert section(tell(Materials(name="a", profile=record_ours(product))), "environment").exhibits

"""A report from whatever is there: every subset of the materials gives a whole page that names what is missing."""

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
from stepscope.explain.story.run import SECTIONS
from stepscope.findings import Bars, Missing, Questions, Report, Section, Table, Timeline
from stepscope.recording.readers.formats import open_recording
from stepscope.recording.rows.attention_case import AttentionRow
from stepscope.spec import build_case
from tests.unit.attention_rows import attend
from tests.unit.explain.story.story_materials import (
    all_there,
    counted,
    memory,
    product,
    record,
    record_ours,
    section,
    small_row,
    traced,
)
from tests.unit.recordings import Timeline as Recorded
from tests.unit.snapshot_files import MIB, Model, write

STAGES = ("profile", "memory", "bench", "precision", "attention")
# Which section stands and falls with which stage; `time` has the timed rows beside the profile.
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
    """What holds for every report."""
    assert json.loads(msgspec.json.encode(report))["sentence"] == report.sentence
    keys = [one.key for part in report.sections for one in part.exhibits]
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch(r"[a-z0-9-]+", key) for key in keys)
    assert report.sentence.endswith(".")
    assert report.soundness.sentence.endswith(".")
    for one in report.sections:
        assert one.exhibits or one.missing or one.key == "environment"
        assert bool(one.lead) or not one.exhibits or one.missing
        assert all(missing.what and missing.why for missing in one.missing)


@pytest.mark.parametrize("missing", [stages for size in range(6) for stages in combinations(STAGES, size)])
def test_any_subset_of_the_stages_gives_a_report(missing: tuple[str, ...]) -> None:
    report = tell(without(missing))
    check(report)
    assert [one.key for one in report.sections] == [key for key in SECTIONS if key != "ranks"]
    for key, stage in NEEDS.items():
        assert bool(section(report, key).missing) == (stage in missing), key
    assert (report.advice is None) == ("profile" in missing)


@pytest.mark.parametrize("profile", [traced, counted], ids=["trace", "counters"])
def test_somebody_else_s_file_alone_gives_a_report(profile: object) -> None:
    assert callable(profile)
    report = tell(Materials(name="a", profile=profile()))
    check(report)
    assert report.soundness.verdict == "unknown"
    assert section(report, "memory").missing[0].why == "the file holds no memory"
    assert "_dump_snapshot" in section(report, "memory").missing[0].command
    assert section(report, "autograd").missing[0].command == "stepscope memory --model my_model:build"
    assert section(report, "roofline").missing[0].why == "the operators' shapes were not recorded"


def test_counters_have_their_table_and_no_timeline() -> None:
    report = tell(Materials(name="a", profile=counted()))
    assert "one kernel at a time" in section(report, "timeline").missing[0].why
    assert "time-counters" in [one.key for one in section(report, "time").exhibits]


def test_a_snapshot_alone_has_memory_and_says_what_else_it_lacks() -> None:
    report = tell(Materials(name="a.pickle", memory=memory()))
    check(report)
    assert section(report, "time").missing[0].why == "the file holds memory and no kernels"
    assert [one.key for one in section(report, "memory").exhibits] == [
        "memory-timeline",
        "memory-categories",
        "memory-phases",
        "memory-largest",
    ]


def test_a_reason_that_is_given_is_used() -> None:
    absent = {
        "precision": Missing(what="precision", why="it ran out of memory", command="stepscope precision --batch 1")
    }
    report = tell(replace(without(("precision",)), absent=absent))
    assert section(report, "precision").missing == (absent["precision"],)
    both = tell(replace(without(("memory",)), absent={"memory": Missing(what="memory", why="because", command="c")}))
    assert section(both, "autograd").missing == (
        Missing(what="what autograd keeps for backward", why="because", command="c"),
    )


def test_a_missing_stage_of_ours_comes_with_its_whole_command() -> None:
    report = tell(without(("memory", "precision", "attention")))
    assert (
        section(report, "memory").missing[0].command == "stepscope memory --size small --context 256 --precision bf16"
    )
    assert section(report, "precision").missing[0].command == "stepscope precision --size small --context 256"
    assert section(report, "attention").missing[0].command == "stepscope attention --head-dim 64 --length 256"


def test_an_interrupted_run_says_so_where_a_stage_is_missing() -> None:
    report = tell(Materials(name="a", command="stepscope report", is_partial=True))
    check(report)
    assert {one.missing[0].why for one in report.sections if one.missing} == {
        "the run was interrupted before this stage"
    }
    assert section(report, "time").missing[0].command == "stepscope report"


def test_a_bench_that_is_missing_is_named() -> None:
    absent = {"bench": Missing(what="the step's own time", why="the device was lost")}
    report = tell(replace(without(("bench",)), absent=absent))
    assert section(report, "environment").missing == (absent["bench"],)
    assert "the step's own time: the device was lost" in report.soundness.details


def test_ranks_are_there_for_several_only() -> None:
    one = record(product)
    several = Materials(name="a", profile=one, ranks=(one, record(product, product)))
    check(tell(several))
    assert section(tell(several), "ranks").exhibits
    alone = tell(Materials(name="a", profile=one, ranks=(one,)))
    assert "ranks" not in [part.key for part in alone.sections]


def test_hostile_names_pass_through_as_text() -> None:
    def launch(timeline: Recorded) -> None:
        with timeline.module(f"blocks.0.{HOSTILE}"):
            timeline.launch(HOSTILE, 700, op=HOSTILE)

    materials = Materials(name=HOSTILE, profile=record(product, launch, file=HOSTILE, device=HOSTILE), memory=memory())
    report = tell(materials)
    check(report)
    assert report.title == HOSTILE
    assert HOSTILE in report.subtitle


def test_long_tables_say_what_is_left_out() -> None:
    rows = tuple(small_row(batch=batch) for batch in range(1, 61))
    table = section(tell(Materials(name="a", bench=rows)), "time").exhibits[0].part
    assert isinstance(table, Table)
    assert len(table.rows) == 50
    assert table.notes[-1] == "10 more rows"


def test_commands_are_there_once_each() -> None:
    commands = tell(all_there()).commands
    assert commands[0].text == "stepscope report --size small"
    assert len({one.text for one in commands}) == len(commands)
    assert [one.label for one in commands] == [
        "this report",
        "the timing",
        "the recording",
        "the precisions",
        "attention",
    ]


def test_the_memory_is_drawn_over_a_step() -> None:
    drawn = section(tell(all_there()), "memory").exhibits[0].part
    assert isinstance(drawn, Timeline)
    assert max(map(sum, zip(*(area.values for area in drawn.areas), strict=True))) > 0


def test_questions_are_answered_or_say_what_would_answer_them() -> None:
    asked = [one.part for one in section(tell(all_there()), "questions").exhibits]
    assert [part.title for part in asked if isinstance(part, Questions)] == ["About time", "About memory"]
    for part in asked:
        assert isinstance(part, Questions)
        assert all(one.is_answered or one.command for one in part.questions)
        assert any(one.is_answered for one in part.questions)
    unanswered = [one for part in asked if isinstance(part, Questions) for one in part.questions if not one.is_answered]
    assert any("two recordings" in one.answer for one in unanswered)


def test_the_bars_of_what_autograd_keeps_add_up() -> None:
    autograd = section(tell(Materials(name="a", memory=memory())), "autograd")
    bars, modules = (one.part for one in autograd.exhibits if one.key in ("autograd-blocks", "autograd-modules"))
    assert isinstance(bars, Bars)
    assert isinstance(modules, Table)
    total = memory().summary.saved_bytes
    assert sum(size or 0 for part in bars.values for size in part) == total
    assert sum(row[2] for row in modules.rows if isinstance(row[2], int)) == total
    assert bars.labels == ("blocks.0", "blocks.1", "(outside blocks)")
    assert {"attention", "ffn"} <= set(bars.series)


def test_a_snapshot_without_history_shows_its_one_moment(tmp_path: Path) -> None:
    model = Model()
    model.malloc(3 * MIB)
    path = write(model.snapshot(first=len(model.entries)), tmp_path / "moment.pickle")
    shown = section(tell(Materials(name="a", memory=make_memory_profile(open_recording(path)))), "memory")
    assert "memory-timeline" not in [one.key for one in shown.exhibits]
    assert "memory-categories" in [one.key for one in shown.exhibits]
    assert "no history" in shown.missing[0].why


def test_a_graph_without_activations_is_told_as_such() -> None:
    recording = memory().recording
    saved = recording.saved.with_columns(kind=pl.lit("parameter"))
    bare = replace(memory(), recording=replace(recording, saved=saved))
    shown = section(tell(Materials(name="a", memory=bare)), "autograd")
    assert "no activations" in shown.missing[0].why
    assert not shown.exhibits


def test_what_autograd_keeps_stands_beside_the_closed_form_of_our_model_only() -> None:
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


def test_attention_is_told_where_most_implementations_were_measured() -> None:
    slow, fast = attend("naive", forward_ns=(30_000_000,) * 3, backward_ns=(30_000_000,) * 3), attend("triton")
    full = (slow, fast, attend("sdpa"))
    longer = (attend("triton", length=4096), attend("sdpa", length=4096), attend("naive", "oom", length=4096))
    lead = attention_of(*full, *longer).lead
    assert lead.startswith("At length 1,024 with heads of 64, ")
    assert "takes 3 ms for forward and backward" in lead
    assert "; naive takes 60 ms and " in lead
    assert lead.endswith(" 1 of 6 cases could not be measured; the tables say why.")


def test_a_table_of_attention_keeps_the_longest_lengths() -> None:
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
    assert table.notes[-1].startswith("45 more rows, of shorter lengths")


def test_attention_that_nobody_could_measure_has_its_reasons() -> None:
    found = attention_of(attend("hopper", "unsupported"))
    assert [one.key for one in found.exhibits] == ["attention-times"]
    assert "1 of 1 cases could not be measured" in found.lead


def test_the_environment_holds_what_recording_cost() -> None:
    environment = section(tell(all_there()), "environment")
    assert [one.key for one in environment.exhibits] == ["environment-table", "environment-overhead"]
    table = environment.exhibits[0].part
    assert isinstance(table, Table)
    assert ("PyTorch", "2.13.0") in table.rows
    foreign = section(tell(Materials(name="a", profile=traced())), "environment")
    assert foreign.lead == "It ran on NVIDIA H200; the file says nothing else about where."


def test_a_recording_of_ours_without_its_timing_has_its_cost_too() -> None:
    assert section(tell(Materials(name="a", profile=record_ours(product))), "environment").exhibits

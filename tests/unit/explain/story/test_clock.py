"""One clock per page: every share refers to the step in the headline."""

import pytest

from stepscope.explain.story import Materials, tell
from stepscope.explain.story.run import list_advice
from stepscope.findings import Breakdown, Fact, Report, Table
from stepscope.recording.store import Overhead
from stepscope.spec import build_case
from stepscope.units import clip, count_noun, say_flops, say_parameters, say_percent, say_share, say_size, say_time
from tests.unit.explain.story.story_materials import addition, product, record_ours, section, small_row

MS = 1_000_000


def fact(report: Report, key: str) -> Fact:
    return next(one for one in report.facts if one.key == key)


def breakdown_of(report: Report) -> Breakdown:
    part = section(report, "time").exhibits[0].part
    assert isinstance(part, Breakdown)
    return part


def limits_of(report: Report) -> Table:
    part = next(one.part for one in section(report, "roofline").exhibits if one.key == "roofline-table")
    assert isinstance(part, Table)
    return part


def test_all_shares_refer_to_the_step_that_bench_timed() -> None:
    """100 ms by bench, 1 ms by the profile."""
    profile = record_ours(product, addition, overhead=Overhead(plain_ns=MS, recorded_ns=2 * MS))
    materials = Materials(name="a", bench=(small_row(),), profile=profile)
    report = tell(materials)
    assert materials.step_ns == materials.profile_step_ns == 100 * MS
    assert fact(report, "step").value == 100
    assert fact(report, "busy").value == pytest.approx(profile.busy_step_ns / (100 * MS))
    assert "100 ms per training step; the GPU is idle 100% " in report.sentence
    lead = section(report, "timeline").lead
    assert lead.startswith(f"2 kernels in 100 ms per step ({say_time(profile.recorded_step_ns)} in the profiled step")
    told = breakdown_of(report)
    assert told.walls_ns[0] == 100 * MS
    assert told.idles_ns[0] == pytest.approx(100 * MS - profile.busy_step_ns)
    for one in list_advice(materials) or ():
        if one.finding.saving_ns is not None:
            assert one.finding.share == pytest.approx(one.finding.saving_ns / (100 * MS))
    alone = tell(Materials(name="a", profile=profile))
    assert limits_of(report).notes != limits_of(alone).notes, "its MFU uses the page's step too"


def test_profile_wins_if_its_kernels_exceed_the_bench_step() -> None:
    profile = record_ours(*[product] * 8)
    materials = Materials(name="a", bench=(small_row(step_ns=(MS, MS, MS)),), profile=profile)
    assert profile.busy_step_ns > MS
    report = tell(materials)
    assert materials.step_ns == profile.step_ns
    assert fact(report, "step").value == pytest.approx(profile.step_ns / MS)
    assert report.soundness.verdict == "doubtful"
    assert "unprofiled step takes 1 ms, but its profiled kernels take 2 ms" in report.soundness.sentence


def test_profile_of_another_run_keeps_its_own_step() -> None:
    profile = record_ours(product, case=build_case({"size": "medium", "device": "cuda:0"}))
    materials = Materials(name="a", bench=(small_row(),), profile=profile)
    report = tell(materials)
    assert fact(report, "step").value == 100
    assert not {"bound", "busy"} & {one.key for one in report.facts}
    assert breakdown_of(report).walls_ns == (profile.step_ns,)


def test_units_are_chosen_after_rounding() -> None:
    assert [say_time(ns) for ns in (999.4e6, 999.6e6, 999_999, 1.5e12)] == ["999 ms", "1 s", "1 ms", "1,500 s"]
    assert [say_size(mib * 2**20) for mib in (999.4, 999.6, 1001, 1023.9)] == [
        "999 MiB",
        "1,000 MiB",
        "1,001 MiB",
        "1 GiB",
    ]
    assert say_flops(999.9e9) == "1 TFLOP"
    assert say_percent(1e-9) == say_share(1e-9) == "under 0.01%"
    assert say_percent(0) == say_share(0) == "0%"


def test_nouns_agree_with_their_count() -> None:
    assert [count_noun(count, "kernel") for count in (0, 1, 1.0, 2.5, 1265)] == [
        "0 kernels",
        "1 kernel",
        "1 kernel",
        "2.5 kernels",
        "1,265 kernels",
    ]
    assert count_noun(2, "matrix", "matrices") == "2 matrices"


def test_parameter_counts_read_like_model_names() -> None:
    assert [say_parameters(count) for count in (12, 950_000, 128_625_408, 999_999_999, 1_235_814_400)] == [
        "12",
        "950K",
        "129M",
        "1B",
        "1.24B",
    ]


def test_clipped_text_keeps_both_ends() -> None:
    assert clip("short", 5) == "short"
    long = clip("a-long-name-of-a-run-before", 14)
    assert len(long) <= 14
    assert long.startswith("a-long")
    assert long.endswith("before")

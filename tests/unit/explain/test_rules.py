"""Rules about the whole step, the order of findings, and the pages of rules."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from stepscope.errors import StepscopeError
from stepscope.explain.rules import RULES, describe_rule, find, find_rule, tabulate_rules
from stepscope.explain.trace.profile import make_profile
from stepscope.explain.trace.profile_tables import kernels_table
from stepscope.recording.rows.bench import Doubt
from stepscope.spec import build_case
from stepscope.units import say_percent
from tests.unit.explain.test_rules_host import found, saving_us
from tests.unit.recordings import ADD, ALL_REDUCE, BF16, COPY, FOREACH, GEMM_BF16, TO_DEVICE_PINNED, Timeline

ROOT = Path(__file__).parents[3]


def reduced(stream: int) -> Timeline:
    timeline = Timeline()
    with timeline.step():
        with timeline.phase("forward"):
            timeline.launch(GEMM_BF16, 300, op="aten::mm")
        with timeline.phase("backward"):
            timeline.launch(ALL_REDUCE, 200, op="c10d::allreduce_", stream=stream)
            timeline.launch(GEMM_BF16, 500, op="aten::mm", stream=7)
    return timeline


def test_exposed_communication() -> None:
    # On the same stream it is exposed, and 500 µs of backward could overlap with all of it.
    assert saving_us(reduced(stream=7).profile(), "SS011") == pytest.approx(200)
    assert found(reduced(stream=9).profile(), "SS011") is None


def test_more_communication_than_can_be_hidden() -> None:
    timeline = Timeline()
    with timeline.step(), timeline.phase("backward"):
        timeline.launch(ALL_REDUCE, 900, op="c10d::allreduce_")
        timeline.launch(GEMM_BF16, 100, op="aten::mm")
    finding = found(timeline.profile(), "SS011")
    assert finding is not None
    assert finding.saving_ns == 100_000
    assert "fewer bytes" in finding.evidence


@pytest.mark.parametrize(("stream", "expected"), [(7, 200), (9, None)])
def test_copies_over_the_bus(stream: int, expected: float | None) -> None:
    timeline = Timeline()
    with timeline.step():
        timeline.launch(GEMM_BF16, 100, op="aten::mm")
        timeline.launch(TO_DEVICE_PINNED, 200, op="aten::copy_", stream=stream)
        timeline.launch(GEMM_BF16, 500, op="aten::mm")
    if expected is None:
        assert found(timeline.profile(), "SS020") is None
    else:
        assert saving_us(timeline.profile(), "SS020") == pytest.approx(expected)


@pytest.mark.parametrize("again", [True, False])
def test_recomputation(again: bool) -> None:
    timeline = Timeline()
    with timeline.step():
        for _ in range(10):
            with timeline.module("block"):
                timeline.launch(GEMM_BF16, 100, op="aten::mm")
        with timeline.node():
            if again:
                with timeline.module("block"):
                    timeline.launch(GEMM_BF16, 100, op="aten::mm")
            timeline.launch(GEMM_BF16, 200, op="aten::mm")
    if again:
        assert saving_us(timeline.profile(), "SS013") == pytest.approx(100, rel=0.01)
    else:
        assert found(timeline.profile(), "SS013") is None


@pytest.mark.parametrize(("node", "hooks"), [("MmBackward0", 0.35), ("CheckpointFunctionBackward", 0.0)])
def test_checkpointing_costs_more_cpu_time_than_its_launches(node: str, hooks: float) -> None:
    """In a CPU-bound step: hooks around single launches, unless the variant without hooks runs."""
    timeline = Timeline(host_us=50)
    with timeline.step():
        with timeline.phase("forward"):
            timeline.launch(GEMM_BF16, 5, op="aten::mm")
            with timeline.module("block"):
                for _ in range(100):
                    timeline.launch(GEMM_BF16, 5, op="aten::mm")
            for _ in range(100):
                timeline.launch(GEMM_BF16, 5, op="aten::mm")
        with timeline.node(node), timeline.module("block"):
            for _ in range(100):
                timeline.launch(GEMM_BF16, 5, op="aten::mm")
    assert saving_us(timeline.profile(), "SS013") == pytest.approx(100 * 50 * (1 + hooks), rel=0.01)


@pytest.mark.parametrize(("rest", "fires"), [(10, True), (100, False)])
def test_few_kernels_take_most_of_the_time(rest: int, fires: bool) -> None:
    timeline = Timeline()
    for kernel in (GEMM_BF16, ADD, COPY):
        timeline.launch(kernel, 50)
    for tile in range(64, 128, 8):
        timeline.launch(f"ampere_sgemm_{tile}x64_tn", rest)
    finding = found(timeline.profile(), "SS014")
    assert (finding is not None) == fires
    assert finding is None or finding.saving_ns is None


def test_longest_kernels_are_the_first_rows_of_the_table() -> None:
    """Two names with one short name are two rows, and every device counts."""
    timeline = Timeline()
    for kernel, us in ((GEMM_BF16, 100), (ADD, 60), (ADD.replace("(int)", "(long)"), 40), (COPY, 50)):
        timeline.launch(kernel, us)
    timeline.launch(COPY, 45, stream=107, device=1)
    profile = timeline.profile()
    finding = found(profile, "SS014")
    assert finding is not None
    table = kernels_table(profile).rows[:3]
    assert finding.evidence == ", ".join(f"{row[0]} ({say_percent(row[3])})" for row in table)  # type: ignore[arg-type]


def test_unreliable_measurement_is_reported() -> None:
    timeline = Timeline()
    timeline.launch(GEMM_BF16, 100)
    assert found(timeline.profile(), "SS016") is None
    finding = found(timeline.profile(doubts=(Doubt(code="throttled", text="clocks held back"),)), "SS016")
    assert finding is not None
    assert finding.evidence == "clocks held back"


def busy_timeline() -> Timeline:
    timeline = Timeline()
    for _ in range(2):
        with timeline.step():
            with timeline.phase("forward"), timeline.module("blocks.0.ffn"):
                for _ in range(10):
                    timeline.launch(
                        GEMM_BF16, 100, op="aten::mm", shapes=[[8, 4096], [4096, 4096]], dtypes=[BF16, BF16]
                    )
                    timeline.launch(ADD, 30, op="aten::mul")
                    timeline.launch(ADD, 30, op="aten::mul")
            with timeline.phase("optimizer"):
                for _ in range(10):
                    timeline.launch(FOREACH, 100, op="aten::_foreach_addcdiv_")
    return timeline


def test_findings_are_sorted_by_saving() -> None:
    findings = find(busy_timeline().profile())
    savings = [finding.saving_ns for finding in findings if not finding.is_remark]
    known = [saving for saving in savings if saving is not None]
    assert len(known) >= 2
    assert savings == [*sorted(known, reverse=True), *[None] * (len(savings) - len(known))]
    assert None in savings
    for finding in findings:
        assert finding.share is None or 0 <= finding.share <= 1


def test_fix_is_a_command_for_the_built_in_model_and_code_for_others() -> None:
    builtin = found(busy_timeline().profile(case=build_case({"size": "small"})), "SS003")
    own = found(busy_timeline().profile(), "SS003")
    assert builtin is not None
    assert own is not None
    assert builtin.action == "Run with `--compile`"
    assert builtin.fix == "stepscope profile --size small --context 128 --compile"
    assert own.action
    assert own.fix == "model = torch.compile(model)"


def test_remarks_come_last_and_have_no_fix() -> None:
    """Findings that no code or setting fixes, in own code and in the built-in model."""
    doubts = (Doubt(code="throttled", text="clocks held back"),)
    findings = find(busy_timeline().profile(doubts=doubts))
    assert {one.code for one in findings if one.is_remark} == {"SS016"}
    assert len(findings) > 1
    assert [one.is_remark for one in findings] == sorted(one.is_remark for one in findings)
    assert all(one.action and not one.fix for one in findings if one.is_remark)

    compiled = build_case({"size": "small", "compile": True})
    copies = Timeline()
    for _ in range(10):
        copies.launch(GEMM_BF16, 100)
        copies.launch(COPY, 50, op="aten::copy_")
    layout = found(copies.profile(case=compiled), "SS006")
    assert layout is not None
    assert layout.is_remark
    assert layout.action == ""


def test_titles_have_the_numbers_of_the_recording() -> None:
    titles = {one.code: one.title for one in find(busy_timeline().profile())}
    assert titles["SS003"] == "20 small kernels per step could be fused"
    assert titles["SS007"] == "Optimizer launches 10 kernels per step"
    timeline = Timeline()
    with timeline.step():
        timeline.launch(GEMM_BF16, 100, op="aten::mm", shapes=[[320, 4096], [4096, 4096]], dtypes=[BF16, BF16])
    (odd,) = (one for one in find(timeline.profile()) if one.code == "SS009")
    assert odd.title.endswith(": 1 GEMM per step")


def test_a_recording_of_a_cpu_has_no_findings_about_gpus() -> None:
    timeline = busy_timeline()
    with timeline.step():
        with timeline.range("enumerate(DataLoader)"):
            timeline.host(5000)
        timeline.launch(GEMM_BF16, 100, op="aten::mm")
    recording = timeline.record()
    assert "SS012" in {finding.code for finding in find(make_profile(recording))}
    kernels = recording.kernels.with_columns(kind=pl.lit("cpu"), name=pl.lit("aten::mul"))
    findings = find(make_profile(replace(recording, kernels=kernels)))
    assert {finding.code for finding in findings} <= {"SS013", "SS014", "SS016"}
    assert not [finding.title for finding in findings if "GPU" in finding.title]


def test_findings_on_a_cpu_speak_of_operators() -> None:
    timeline = Timeline()
    for name, ns in (("aten::mm", 900), ("aten::mul", 50), ("aten::add", 40), ("aten::copy_", 10)):
        timeline.launch(name, ns)
    recording = timeline.record()
    on_cpu = replace(recording, kernels=recording.kernels.with_columns(kind=pl.lit("cpu")))
    assert "3 operators take 99% of the CPU time" in {finding.title for finding in find(make_profile(on_cpu))}


def test_recording_with_kernels_only_has_few_findings() -> None:
    """No operators, launches, ranges, shapes or known device: only kernel names."""
    recording = busy_timeline().record(device="", device_sms=None)
    bare = replace(recording, ops=recording.ops.head(0), launches=recording.launches.head(0))
    bare = replace(bare, ranges=recording.ranges.head(0))
    assert {finding.code for finding in find(make_profile(bare))} <= {"SS003", "SS014"}


def test_every_rule_has_a_page_with_everything_on_it() -> None:
    for code, rule in RULES.items():
        assert re.fullmatch(r"SS\d{3}", code)
        assert code == rule.code
        assert all((rule.title, rule.action, rule.meaning, rule.seen, rule.saving, rule.builtin, *rule.own))
        assert rule.own
        assert not rule.title.endswith(".")
        assert not rule.action.endswith(".")
        assert bool(rule.paste) != bool(rule.look_up)
        assert describe_rule(rule).columns[0].label == code
    assert len(tabulate_rules().rows) == len(RULES)


def test_codes_are_found_in_any_case_and_near_misses_named() -> None:
    assert [find_rule(code).code for code in ("SS007", "ss007", "ss7", "7")] == ["SS007"] * 4
    with pytest.raises(StepscopeError, match="stepscope rule SS0") as raised:
        find_rule("SS0007")
    assert max(RULES) in str(raised.value)
    with pytest.raises(StepscopeError, match="unknown rule: `nonsense`"):
        find_rule("nonsense")


def test_documentation_matches_the_rules() -> None:
    page = (ROOT / "docs/rule.md").read_text()
    fill_in = runpy.run_path(str(ROOT / "tools/rule_docs.py"))["fill_in"]
    assert page == fill_in(page), "out of date: python tools/rule_docs.py"
    listed = dict(re.findall(r"^\| \[(SS\d{3})\]\(#ss\d{3}\) \| (.+?) \|", page, re.MULTILINE))
    assert listed == {code: rule.title for code, rule in RULES.items()}

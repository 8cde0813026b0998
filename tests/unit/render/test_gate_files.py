"""The gate's result for a pull request: Markdown and JUnit."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from stepscope.errors import StepscopeError
from stepscope.explain.gate.verdict import GateResult, judge_runs
from stepscope.recording.baseline import Metric
from stepscope.render.gate_files import check_files, save_junit, save_summary, write_junit, write_markdown
from tests.unit.explain.gate_runs import H200, baseline_of, make_run

METRICS: tuple[Metric, ...] = ("step", "kernels", "idle")
# What the JUnit schema of Jenkins and the readers of GitLab and GitHub agree on: children and attributes per element.
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "testsuites": ({"testsuite"}, {"name", "tests", "failures", "errors", "skipped", "time"}),
    "testsuite": ({"testcase", "properties"}, {"name", "tests", "failures", "errors", "skipped", "time", "timestamp"}),
    "testcase": ({"failure", "error", "skipped", "system-out", "system-err"}, {"name", "classname", "time"}),
    "failure": (set(), {"message", "type"}),
    "error": (set(), {"message", "type"}),
    "system-out": (set(), set()),
}


@pytest.fixture
def failed() -> GateResult:
    base = [make_run(*[10_000_000 + one] * 5, kernels=10.0, classes={"a|b <c>": 1.0}) for one in range(3)]
    new = [make_run(*[11_000_000] * 5, kernels=10.0, classes={"a|b <c>": 2.0})]
    return judge_runs(baseline_of(*base), new, H200, name="main", limit=0.03, metrics=METRICS)


def read_junit(content: bytes) -> ElementTree.Element:
    root = ElementTree.fromstring(content)
    for element in root.iter():
        children, attributes = ALLOWED[element.tag]
        assert {child.tag for child in element} <= children
        assert set(element.attrib) <= attributes
    for suite in root.iter("testsuite"):
        assert int(suite.attrib["tests"]) == len(suite.findall("testcase"))
        assert int(suite.attrib["failures"]) == len(suite.findall("testcase/failure"))
        assert int(suite.attrib["errors"]) == len(suite.findall("testcase/error"))
    return root


def test_junit_has_a_case_per_metric_with_its_figures(failed: GateResult) -> None:
    root = read_junit(write_junit(failed))
    step, kernels, idle = root.iter("testcase")
    assert [one.attrib["name"] for one in (step, kernels, idle)] == list(METRICS)
    assert {one.attrib["classname"] for one in (step, kernels, idle)} == {"stepscope.main"}
    (failure,) = step.findall("failure")
    assert failure.attrib["message"].startswith("FAIL: step time +10.00% (10 ms → 11 ms), limit +3%")
    assert "repeated runs differ by" in (failure.text or "")
    assert not kernels.findall("failure")
    assert [one.tag for one in idle] == ["error", "system-out"]


def test_junit_of_a_refused_comparison_is_one_error(failed: GateResult) -> None:
    refused = judge_runs(baseline_of(make_run(1)), [make_run(1)], type(H200)(device="\x1b[31mA100\x00"), name="main")
    (case,) = read_junit(write_junit(refused)).iter("testcase")
    assert "was measured under other conditions: device NVIDIA H200 → " in case.findall("error")[0].attrib["message"]


def test_markdown_starts_with_the_verdict_and_renders_as_tables(failed: GateResult) -> None:
    text = write_markdown(failed)
    assert text.startswith("### ❌ stepscope: regression\n\n- FAIL: step time +10.00%")
    html = MarkdownIt("commonmark").enable("table").render(text)
    assert html.count("<table>") == 2
    assert "a|b &lt;c&gt;" in html
    assert re.search("repeated runs differ by", html)


@pytest.mark.parametrize(("step_ms", "headline"), [(10, "✅ stepscope: no regression"), (0, "⚠️ stepscope: cannot be")])
def test_markdown_says_what_else_can_happen(step_ms: int, headline: str) -> None:
    new = make_run(*[step_ms * 1_000_000] * 3) if step_ms else make_run()
    base = baseline_of(make_run(*[10_000_000] * 3))
    assert headline in write_markdown(judge_runs(base, [new], H200, name="main", limit=0.03))


def test_the_summary_of_a_github_job_is_appended(
    tmp_path: Path, failed: GateResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary"
    path.write_text("# Earlier\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    check_files([("--summary", path)])
    save_summary(failed, path)
    assert path.read_text() == "# Earlier\n" + write_markdown(failed)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    save_summary(failed, path)
    assert path.read_text() == write_markdown(failed)


def test_files_that_cannot_be_written_are_refused_before_anything_runs(tmp_path: Path, failed: GateResult) -> None:
    with pytest.raises(StepscopeError, match="directory not found"):
        check_files([("--junit", tmp_path / "none/report.xml")])
    save_junit(failed, tmp_path / "report.xml")
    check_files([("--junit", tmp_path / "report.xml"), ("--summary", None)])

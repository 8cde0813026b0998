"""`stepscope baseline` and `stepscope compare --baseline` as CI runs them, and the GitHub Action's own scripts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from stepscope.api.baselines import save_baseline
from stepscope.recording.baseline import STORE
from tests.cli.command import PATIENCE_S, stepscope
from tests.unit.api.test_baselines import bench_runs, write_rows
from tests.unit.rows import row

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / ".github/actions/stepscope-gate/action.yml").read_text())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with the baseline `main` of three runs of 10 ms."""
    save_baseline("main", bench_runs(tmp_path, 10, 10.02, 9.98), store=tmp_path / STORE)
    return tmp_path


def test_a_baseline_is_saved_listed_shown_and_removed(saved: Path) -> None:
    added = stepscope(saved, "baseline", "save", "main", *(f"bench{number}" for number in range(3)), "--force")
    assert added.returncode == 0, added.stderr
    assert "next: stepscope compare --baseline main RUN --fail-on 3%" in added.stderr
    listed = json.loads(stepscope(saved, "baseline", "list", "--format", "json").stdout)
    assert [(one["name"], one["runs"], one["device"]) for one in listed["rows"]] == [("main", 3, "Test GPU")]
    assert "must be equal: device Test GPU, torch 2.13.0" in stepscope(saved, "baseline", "show", "main").stdout
    assert stepscope(saved, "baseline", "remove", "main").returncode == 0
    assert not (saved / ".stepscope/baselines/main.json").exists()
    assert stepscope(saved, "baseline", "show", "main").returncode == 2


def test_exit_codes_and_files_of_the_gate(saved: Path) -> None:
    slow, fine = bench_runs(saved, 11, 10.01)
    files = ("--summary", "summary.md", "--junit", "report.xml")
    failed = stepscope(saved, "compare", "--baseline", "main", str(slow), "--fail-on", "3%", *files)
    assert failed.returncode == 1, failed.stderr
    assert "FAIL: step time +10.00% (10 ms → 11 ms), limit +3%" in failed.stderr
    assert "regression" in (saved / "summary.md").read_text()
    assert ElementTree.parse(saved / "report.xml").findall(".//failure")
    passed = stepscope(saved, "compare", "--baseline", "main", str(fine), "--fail-on", "3%", *files)
    assert passed.returncode == 0, passed.stderr
    assert not ElementTree.parse(saved / "report.xml").findall(".//failure")

    other = write_rows(saved / "other", row(batch=8))
    refused = stepscope(saved, "compare", "--baseline", "main", str(other), "--fail-on", "3%", *files)
    assert refused.returncode == 3, refused.stderr
    assert "under other conditions: batch 4 → 8" in refused.stderr
    assert "hint: --allow-different" in refused.stderr
    assert ElementTree.parse(saved / "report.xml").findall(".//error")
    allowed = stepscope(saved, "compare", "--baseline", "main", str(other), "--allow-different")
    assert allowed.returncode == 0, allowed.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "--baseline", "nightly", "bench0"],
        ["compare", "--baseline", "main", "bench0", "--metric", "speed"],
        ["compare", "--baseline", "main", "bench0", "--by", "kernel"],
        ["compare", "--baseline", "main", "nothing"],
        ["compare", "--baseline", "main", "bench0", "bench0"],
        ["compare", "bench0"],
        ["compare", "bench0", "bench1", "--junit", "x.xml"],
        ["compare", "bench0", "bench1", "--allow-different"],
        ["baseline", "save"],
        ["baseline", "save", "main"],
        ["baseline", "save", "main", "bench0"],
        ["baseline", "show", "main", "bench0"],
        ["baseline", "list", "main"],
    ],
    ids=" ".join,
)
def test_bad_calls_say_what_to_type(saved: Path, arguments: list[str]) -> None:
    done = stepscope(saved, *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


# --- The GitHub Action ------------------------------------------------------------------------------------------------


def run_step(folder: Path, name: str, inputs: dict[str, str], **outputs: str) -> "subprocess.CompletedProcess[str]":
    """Run a step's script as GitHub does, with `${{ … }}` in its environment filled in."""
    (step,) = (one for one in ACTION["runs"]["steps"] if one["name"] == name)
    given = {key: str(one.get("default", "")) for key, one in ACTION["inputs"].items()} | inputs
    texts = {f"${{{{ inputs.{key} }}}}": value for key, value in given.items()}
    texts |= {f"${{{{ steps.compare.outputs.{key.replace('_', '-')} }}}}": value for key, value in outputs.items()}
    environment = os.environ | {key: texts[text] for key, text in step["env"].items()}
    environment |= {"GITHUB_STEP_SUMMARY": str(folder / "summary"), "GITHUB_OUTPUT": str(folder / "output")}
    # `stepscope` is this checkout's, whatever is installed.
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    (programs / "stepscope").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m stepscope "$@"\n')
    (programs / "stepscope").chmod(0o755)
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    script = folder / "script.sh"
    script.write_text(step["run"])
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


def read_outputs(folder: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (folder / "output").read_text().splitlines())


@pytest.mark.parametrize(("step_ms", "code", "verdict"), [(11, "1", "fail"), (10.01, "0", "pass")])
def test_the_action_compares_reports_and_decides(saved: Path, step_ms: float, code: str, verdict: str) -> None:
    (run,) = bench_runs(saved, step_ms)
    inputs = {"baseline": "main", "runs": f"{run}\n", "metrics": "step peak-memory"}
    compared = run_step(saved, "Compare with the baseline", inputs)
    assert compared.returncode == 0, compared.stderr
    assert read_outputs(saved) == {"exit-code": code, "verdict": verdict}
    assert (saved / "summary").read_text().count("###") == 1
    assert len(ElementTree.parse(saved / "stepscope-junit.xml").findall(".//testcase")) == 2
    page = run_step(saved, "Write the page", inputs)
    assert page.returncode == 0, page.stderr
    assert (saved / "stepscope-report.html").read_text().startswith("<!DOCTYPE html>")
    assert run_step(saved, "Decide", inputs, exit_code=code).returncode == int(code)


def test_inputs_of_the_action_are_never_code(saved: Path) -> None:
    inputs = {"baseline": "main", "runs": "$(touch stolen); `touch stolen`\n--help\n", "fail-on": '"; touch stolen; "'}
    compared = run_step(saved, "Compare with the baseline", inputs)
    assert compared.returncode == 0, compared.stderr
    assert read_outputs(saved) == {"exit-code": "2", "verdict": "error"}
    assert not (saved / "stolen").exists()
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step.get("run", ""), step["name"]


def test_the_action_is_complete() -> None:
    steps: list[dict[str, Any]] = ACTION["runs"]["steps"]
    assert ACTION["runs"]["using"] == "composite"
    assert all(("uses" in step) != ("run" in step) for step in steps)
    assert all(step["shell"] == "bash" for step in steps if "run" in step)
    used = " ".join(str(step) for step in steps)
    assert all(f"inputs.{name}" in used for name in ACTION["inputs"])
    assert all(one["description"] for one in (*ACTION["inputs"].values(), *ACTION["outputs"].values()))

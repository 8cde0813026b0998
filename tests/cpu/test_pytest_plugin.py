"""The fixture `stepscope_step`, in a project of its own that treats warnings as errors."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cli.command import PATIENCE_S

ROOT = Path(__file__).parents[2]
PLUGIN = "stepscope.integrations.pytest_plugin"

STEP = """
import torch

weight = torch.ones(8, 8, requires_grad=True)

def train_step():
    (weight @ weight).sum().backward()

def test_step(stepscope_step):
    result = stepscope_step(train_step, warmup=1, steps=5, kernels=True)
    assert result.step_ms > 0
    assert len(result.samples_ms) == 5
    assert result.peak_bytes is None
    assert result.kernels > 2
    result.check("train_step", fail_on="100000%")
"""
COUNTED = """
def test_count(stepscope_step):
    import torch
    more = torch.ones(3)
    def train_step():
        for _ in range(COUNT):
            more.add(1)
    stepscope_step(train_step, warmup=1, steps=3, kernels=True).check("count", fail_on="0%", metric="kernels")
"""


def run_pytest(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "error", "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", *arguments]
    # The plugin is loaded by name, whether or not this environment knows its entry point.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=environment
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (tmp_path / "test_it.py").write_text(STEP)
    (tmp_path / "test_kernels.py").write_text(COUNTED.replace("COUNT)", "4)"))
    return tmp_path


def test_steps_are_saved_added_checked_and_refused(project: Path) -> None:
    """In as few runs as possible, because each imports torch."""
    missing = run_pytest(project)
    assert missing.returncode == 1
    assert "baseline `train_step` not found" in missing.stdout
    assert "hint: pytest --stepscope-save" in missing.stdout

    for flag, runs in (("--stepscope-save", 1), ("--stepscope-add", 2)):
        done = run_pytest(project, flag)
        assert done.returncode == 0, done.stdout + done.stderr
        saved = json.loads((project / ".stepscope/baselines/train_step.json").read_text())
        assert (saved["schema"], len(saved["runs"])) == ("stepscope.baseline/1", runs)

    passed = run_pytest(project, "--junitxml=report.xml")
    assert passed.returncode == 0, passed.stdout + passed.stderr
    (step,) = (
        one for one in ElementTree.parse(project / "report.xml").iter("testcase") if one.get("name") == "test_step"
    )
    assert [one.attrib["name"] for one in step.iter("property")] == ["stepscope_step_ms"]

    # Another directory, another torch, and another kernel.
    (project / ".stepscope/baselines").rename(project / "kept")
    saved["conditions"]["torch"] = "1.0.0"
    (project / "kept/train_step.json").write_text(json.dumps(saved))
    (project / "test_kernels.py").write_text(COUNTED.replace("COUNT)", "5)"))
    refused = run_pytest(project, "--stepscope-baselines", "kept")
    assert refused.returncode == 1
    assert "2 failed" in refused.stdout
    assert "cannot tell: baseline `train_step` was measured under other conditions: torch 1.0.0 → " in refused.stdout
    assert re.search(r"FAIL: kernels per step \+25\.00% \(4 → 5\), limit \+0%", refused.stdout), refused.stdout
    assert "Traceback" not in refused.stdout


def test_pytest_starts_without_torch_and_without_the_rest(project: Path) -> None:
    (project / "test_kernels.py").unlink()
    (project / "test_it.py").write_text("import sys\ndef test_light():\n    print(sorted(sys.modules))\n")
    done = run_pytest(project, "-s")
    assert done.returncode == 0, done.stdout
    loaded = set(re.findall(r"'([\w.]+)'", done.stdout))
    assert PLUGIN in loaded
    assert not loaded & {"torch", "polars", "numpy", "msgspec", "typer"}
    assert {name for name in loaded if name.startswith("stepscope")} == {
        "stepscope",
        "stepscope.annotate",
        "stepscope.integrations",
        PLUGIN,
    }


def test_the_entry_point_is_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (module,) = project["entry-points"]["pytest11"].values()
    assert module == PLUGIN
    assert callable(import_module(module).pytest_addoption)

"""`stepscope profile`: a whole recording or nothing, and every refusal before anything runs."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from stepscope.explain.trace.profile import make_profile
from stepscope.recording.store import load
from tests.cli.command import TINY, kill, start, stepscope, wait_until, workers

FACTORY = """
import os, time
import torch
from torch import nn

def scale(x):
    return 2 * x

class Own(nn.Linear):
    def forward(self, x):
        return super().forward(scale(x))

def build(batch, context):
    return Own(8, 8), torch.ones(batch, context, 8), lambda output: output.sum()

def greedy(batch, context):
    return nn.Linear(8, 10**13), torch.ones(batch, context, 8), lambda output: output.sum()

def dies(batch, context):
    os.abort()

def hangs(batch, context):
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FACTORY)
    return tmp_path


def left(folder: Path) -> set[str]:
    """What a run left behind, hidden files too."""
    return {path.name for path in folder.iterdir()} - {"mine.py", "__pycache__", "stderr.txt"}


def test_recording_has_workload_device_and_overhead(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "profile", *TINY, "--context", "8", "--record-steps", "2", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert "next: stepscope explain runs/profile" in done.stderr
    recording = load(tmp_path / "runs/profile")
    manifest = recording.manifest
    assert manifest.case is not None
    assert manifest.case.workload.context == 8
    assert manifest.environment is not None
    assert manifest.environment.device == "cpu"
    assert manifest.command.startswith("stepscope profile --d-model 16")
    assert manifest.overhead is not None
    assert manifest.overhead.recorded_ns
    assert manifest.overhead.annotated_ns
    assert manifest.parameters
    assert {"python", "torch", "stepscope"} <= set(manifest.versions)
    assert recording.steps.group_by("phase").len().sort("phase").rows() == [
        ("backward", 2),
        ("forward", 2),
        ("optimizer", 2),
    ]
    ranges = set(recording.ranges["name"])
    assert {"step:0", "step:1", "phase:loss", "module:blocks.0.attention.q_proj", "part:softmax"} <= ranges
    assert "step:2" not in ranges
    assert recording.kernels.height > 100
    assert (tmp_path / "runs/profile/raw.json.gz").is_file()
    found = json.loads(done.stdout)
    assert found["schema"] == "stepscope.explain/2"
    assert found["coverage"]["phase"] > 0.98
    assert found["coverage"]["module"] > 0
    # Counted: the few without a module may be the ones that a busy machine interrupts.
    modules = make_profile(recording).kernels["module"]
    assert modules.null_count() < 0.05 * modules.len()


def test_only_recordings_are_replaced_and_only_with_force(folder: Path) -> None:
    model = ["profile", "--model", "mine:build", "--device", "cpu", "--steps", "1", "--warmup", "0"]
    assert stepscope(folder, *model, "--annotate", "mine:scale", "--out", "a").returncode == 0
    assert "function:scale" in set(load(folder / "a").ranges["name"])
    refused = stepscope(folder, "profile", "--model", "mine:dies", "--out", "a")
    assert refused.returncode == 2
    assert "`a` already exists" in refused.stderr
    assert "function:scale" in set(load(folder / "a").ranges["name"])
    assert stepscope(folder, *model, "--out", "a", "--force").returncode == 0
    assert "function:scale" not in set(load(folder / "a").ranges["name"])
    precious = stepscope(folder, *model, "--out", ".", "--force")
    assert precious.returncode == 2
    assert "is not a recording" in precious.stderr
    assert left(folder) == {"a"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--context", "8,16"], ["one case to record, got 2", "`--context` has 2 values", "hint: --context 8"]),
        (["--annotate", "mine:scal"], ["cannot annotate `mine:scal`", "hint: --annotate mine:scale"]),
        (["--annotate", "mine"], ["cannot annotate `mine`", "expected package.module:function"]),
        (["--annotate", "mine:scale", "--compile"], ["with `--compile`", "hint: --compile no"]),
        (["--out", "mine.py/x", "--model", "mine:dies"], ["cannot write to"]),
        (["--record-steps", "0"], ["--record-steps"]),
        (["--model", "mine:greedy"], ["nothing was recorded: oom", "hint: --batch 2, --grad-accumulation 2"]),
        (["--model", "mine:dies"], ["nothing was recorded: crash", "SIGABRT while building"]),
    ],
)
def test_failures_have_a_reason_and_leave_nothing(folder: Path, arguments: list[str], said: list[str]) -> None:
    done = stepscope(folder, "profile", "--device", "cpu", *arguments)
    assert done.returncode == 2, done.stderr
    for part in said:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert left(folder) == set()


def test_interrupt_leaves_no_files_and_no_processes(folder: Path, monkeypatch: Any) -> None:
    (folder / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    process = start(folder, "profile", "--model", "mine:hangs", "--device", "cpu")
    wait_until(lambda: len(workers(folder)) == 2)  # the nursery and the worker
    assert kill(process, signal.SIGINT) == 130
    assert "interrupted" in (folder / "stderr.txt").read_text()
    assert workers(folder) == []
    assert left(folder) == {"tmp"}
    assert list((folder / "tmp").glob("stepscope-*")) == []

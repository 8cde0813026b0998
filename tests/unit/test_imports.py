"""The analysis half, and every help page, come up without torch."""

import subprocess
import sys

import pytest

LIGHT = ["spec", "hardware", "cost", "recording.bench", "recording.lines", "findings", "explain.bench", "report.tables"]
LIGHT += [
    "report.figures",
    "errors",
    "cli.main",
    "jobs.sweep",
    "jobs.doctor",
    "jobs.attention",
    "jobs.comm",
    "jobs.train",
    "jobs.slurm.bench",
    "explain.attention_figure",
    "recover.answer",
    "jobs.recover",
    "jobs.signing",
]


@pytest.mark.parametrize("module", LIGHT)
def test_no_torch_behind(module: str) -> None:
    code = f"import sys, stepscope.{module}; sys.exit('torch' in sys.modules or 'altair' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

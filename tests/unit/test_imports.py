"""The analysis half, and every help page, come up without torch."""

import subprocess
import sys

import pytest

LIGHT = [
    "spec",
    "hardware",
    "cost",
    "recording.rows.bench",
    "recording.rows.results_file",
    "findings",
    "explain.experiments.bench_tables",
    "report.tables",
]
LIGHT += [
    "report.figures",
    "errors",
    "cli.main",
    "jobs.experiments.sweep",
    "jobs.doctor",
    "jobs.experiments.attention_sweep",
    "jobs.experiments.comm_sweep",
    "jobs.train",
    "jobs.slurm.sweep_jobs",
    "explain.experiments.attention_tables",
    "recover.answer",
    "jobs.recover",
    "jobs.signing",
]


@pytest.mark.parametrize("module", LIGHT)
def test_no_torch_behind(module: str) -> None:
    code = f"import sys, stepscope.{module}; sys.exit('torch' in sys.modules or 'altair' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

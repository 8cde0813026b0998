"""The analysis code and every help page work without importing torch."""

import subprocess
import sys

import pytest

LIGHT = [
    "stepscope.spec",
    "stepscope.hardware",
    "stepscope.cost",
    "stepscope.recording.rows.bench",
    "stepscope.recording.rows.results_file",
    "stepscope.findings",
    "stepscope.explain.experiments.bench_tables",
    "stepscope.render.tables",
    "stepscope.render.figures",
    "stepscope.errors",
    "stepscope.api.measure",
    "stepscope.api.baselines",
    "stepscope.api.report",
    "stepscope.cli.main",
    "stepscope.jobs.experiments.sweep",
    "stepscope.jobs.doctor",
    "stepscope.jobs.experiments.attention_sweep",
    "stepscope.jobs.experiments.comm_sweep",
    "stepscope.jobs.train",
    "stepscope.jobs.slurm.sweep_jobs",
    "stepscope.explain.experiments.attention_tables",
    "stepscope.recover.solve.recovery",
    "stepscope.jobs.recover",
    "stepscope.jobs.signing",
    "stepscope.integrations.pytest_plugin",
    "stepscope.render.gate_files",
]


@pytest.mark.parametrize("module", LIGHT)
def test_module_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'vl_convert' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

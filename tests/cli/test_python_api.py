"""The Python API end to end: compared with the command line, and with real models."""

from pathlib import Path

import pytest

import stepscope
from tests.cli.command import stepscope as type_command

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "docs/examples/trace.json.gz"
MEMORY = ROOT / "bench/results/memory_h200/small-train-fp32"
TINY = stepscope.workload(d_model=16, d_ff=32, num_layers=1, num_heads=2, vocab=50, batch=1, context=16, device="cpu")


@pytest.mark.parametrize("file", [TRACE, MEMORY], ids=["time", "memory"])
def test_document_equals_explain_output(tmp_path: Path, file: Path) -> None:
    printed = type_command(tmp_path, "explain", str(file), "--format", "json")
    assert printed.returncode == 0
    assert stepscope.load(file).to_json() == printed.stdout


def test_every_name_is_in_the_script_that_is_type_checked() -> None:
    script = (ROOT / "tests/cli/user_script.py").read_text()
    for name in stepscope.__all__:
        assert f"stepscope.{name}" in script


@pytest.mark.timeout(600)
def test_a_workload_is_measured_and_reported(tmp_path: Path) -> None:
    told: list[str] = []
    page = stepscope.report(
        TINY,
        tmp_path / "report.html",
        data=tmp_path / "data",
        without=["memory", "attention", "bench"],
        progress=told.append,
    )
    assert page.num_done == 2
    assert page.path is not None
    assert page.path.read_text() == page.html
    assert any(line.startswith("profile: done") for line in told)
    assert stepscope.load(tmp_path / "data/profile").step_ms > 0
    assert stepscope.report(tmp_path / "data").report.facts == page.report.facts


@pytest.mark.timeout(600)
def test_a_case_that_fails_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def build(good=False):\n    raise SystemExit(3)\n")
    own = stepscope.workload(model=f"{tmp_path / 'broken.py'}:build", device="cpu")
    results = stepscope.bench([TINY, own], warmup=0, steps=1, out=tmp_path / "runs")
    assert [row.status for row in results] == ["ok", "error"]
    assert stepscope.BenchResults.read(tmp_path / "runs/results.jsonl").rows == results.rows

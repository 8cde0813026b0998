"""The Python API end to end: compared with the command line, under a type checker, and with real models."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stepscope
from tests.cli.command import PATIENCE_S
from tests.cli.command import stepscope as type_command

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "docs/examples/trace.json.gz"
MEMORY = ROOT / "bench/results/memory_h200/small-train-fp32"
TINY = stepscope.workload(d_model=16, d_ff=32, num_layers=1, num_heads=2, vocab=50, batch=1, context=16, device="cpu")

# A user's script under strict type checks. It uses every name of the API.
SCRIPT = """
import polars as pl
import torch

import stepscope


def summarise(run: stepscope.Run) -> list[str]:
    frame: pl.DataFrame = run.classes
    answers: stepscope.Answers = run.questions()
    table: stepscope.DataTable = run.table("roofline", top=3)
    change: stepscope.RunComparison = run.compare(run, by="module")
    picture: stepscope.Picture = run.figure(step=1)
    picture.save("memory.svg")
    saved: list[float | None] = [finding.saving_ms for finding in run.findings]
    document: dict[str, object] = run.to_dict()
    page: stepscope.ReportPage = stepscope.report([run, "other.json"], "report.html")
    assert not change.is_slower(0.03)
    sentences = [one.sentence for one in answers]
    return [*frame.columns, *sentences, table.render("md"), page.html, str(saved), str(document)]


def train(batches: list[float]) -> None:
    watch = stepscope.explain_oom("runs/oom")
    recorder: stepscope.Recorder
    with watch, stepscope.record("runs/today", steps=2) as recorder:
        recorder.step()
    total: float = sum(stepscope.steps(batches, out="runs/steps"))
    handler = stepscope.trace_handler("runs/trace")
    print(total, handler)


def train_faster(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> None:
    step: stepscope.OptimisedStep = stepscope.optimise(model, optimizer, example=batches[0], measure=False)
    losses: list[torch.Tensor] = [step(batch) for batch in batches]
    print(step.summary(), losses)


@stepscope.annotate("forward")
def measure(path: str) -> stepscope.Workload:
    shape = stepscope.ModelShape(d_model=64, d_ff=128, num_layers=2, num_heads=2, num_kv_heads=2)
    chosen = stepscope.Workload(model=shape, precision="bf16")
    timed: stepscope.BenchResults = stepscope.bench([chosen, *stepscope.grid(size=["nano"])], steps=3, progress=print)
    weighed: stepscope.MemoryResults = stepscope.memory(chosen, out=path)
    errors: stepscope.PrecisionResult = stepscope.precision(chosen, precisions=["fp32", "bf16"], bench=timed.rows)
    recorded: stepscope.Run = stepscope.profile(chosen)
    step_ms: float = recorded.step_ms + stepscope.load(path).step_ms
    peak: int = weighed.run().peak_bytes
    faster: stepscope.OptimiseResult = stepscope.optimise_workload(chosen, out=path)
    print(faster.changes[0].title)
    try:
        return stepscope.workload(size="small", context=1024)
    except stepscope.StepscopeError as error:
        raise SystemExit(error.hint or f"{step_ms} {peak} {errors.to_json()} {stepscope.__version__}") from error
"""


@pytest.mark.parametrize("file", [TRACE, MEMORY], ids=["time", "memory"])
def test_document_equals_explain_output(tmp_path: Path, file: Path) -> None:
    printed = type_command(tmp_path, "explain", str(file), "--format", "json")
    assert printed.returncode == 0
    assert stepscope.load(file).to_json() == printed.stdout


def check_types(folder: Path, script: str) -> "subprocess.CompletedProcess[str]":
    (folder / "script.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache/users"), "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * PATIENCE_S,
        env=os.environ | {"MYPYPATH": str(ROOT / "src")},
    )


@pytest.mark.timeout(600)
def test_user_script_passes_strict_type_checks(tmp_path: Path) -> None:
    for name in stepscope.__all__:
        assert f"stepscope.{name}" in SCRIPT
    done = check_types(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = check_types(tmp_path, 'import stepscope\nstepscope.load("a").step_ns\nstepscope.lode("a")\n')
    assert wrong.stdout.count("[attr-defined]") == 2, wrong.stdout


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

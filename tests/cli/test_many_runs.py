"""`stepscope report` and `stepscope compare` with more than two runs."""

import csv
import io
import shutil
from pathlib import Path

from tests.cli.command import stepscope

RESULTS = Path(__file__).parents[2] / "bench/results"
RUNS = [str(RESULTS / f"profile_h200/small-inference-{how}") for how in ("fp32", "bf16", "compiled")]


def test_three_runs_make_a_page_with_a_trend(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "report", *RUNS, "--out", "all.html")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all.html\n"
    said = done.stderr.splitlines()
    assert said[0] == "3 runs: bf16 + compile is the fastest, 3.79 ms per step, 3.74× faster than fp32."
    assert not any(line.startswith("findings") for line in said)
    assert said[-1] == f"next: stepscope report {RUNS[0]} {RUNS[2]} --out both.html"
    page = (tmp_path / "all.html").read_text()
    assert 'id="trend-step"' in page
    assert 'id="trend-classes"' in page


def test_baseline_and_order_are_options(tmp_path: Path) -> None:
    options = ("--baseline", RUNS[2], "--order", "time", "--out", "all.html")
    done = stepscope(tmp_path, "report", *RUNS, *options)
    assert done.returncode == 0, done.stderr
    assert "bf16 + compile is the fastest, 3.79 ms per step; 2 of 2 others are slower" in done.stderr
    one = stepscope(tmp_path, "report", RUNS[0], "--baseline", RUNS[0])
    assert one.returncode == 2
    assert "needs several runs" in one.stderr


def test_compare_prints_a_row_per_run(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "compare", *RUNS, "--format", "csv")
    assert done.returncode == 0, done.stderr
    runs, classes, settings = done.stdout.split("\n\n")
    rows = list(csv.DictReader(io.StringIO(runs)))
    assert [row["run"] for row in rows] == ["fp32", "bf16", "bf16 + compile"]
    assert [row["verdict"] for row in rows] == ["baseline", "noise", "faster"]
    parts = list(csv.DictReader(io.StringIO(classes)))
    assert [row["precision"] for row in csv.DictReader(io.StringIO(settings))] == ["fp32", "bf16", "bf16"]
    for row, part in zip(rows, parts, strict=True):
        total = sum(float(value) for name, value in part.items() if name != "run")
        assert abs(total - float(row["step_ms"])) < 1e-6


def test_compare_is_a_gate_for_every_run(tmp_path: Path) -> None:
    slower = stepscope(tmp_path, "compare", *reversed(RUNS), "--by", "phase", "--fail-on", "3%")
    assert slower.returncode == 1
    assert slower.stderr.count("FAIL: ") == 2
    fine = stepscope(tmp_path, "compare", *RUNS, "--fail-on", "3%")
    assert fine.returncode == 0
    assert fine.stderr.startswith("pass: no step is slower than that of fp32")
    by_kernel = stepscope(tmp_path, "compare", *RUNS, "--by", "kernel")
    assert by_kernel.returncode == 2
    assert "no times by kernel" in by_kernel.stderr


def test_results_of_bench_are_compared_case_by_case(tmp_path: Path) -> None:
    rows = (RESULTS / "bench_h200_faster.jsonl").read_text().splitlines(keepends=True)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.jsonl").write_text("".join(rows[:3]))
    done = stepscope(tmp_path, "report", "old", "new", "--out", "both.html")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("2 runs, 3 cases: new vs old: 3 the same.")
    assert stepscope(tmp_path, "compare", "old", "new/results.jsonl").returncode == 0
    shutil.copytree(tmp_path / "old", tmp_path / "older")
    three = ("report", "old", "new", "older", "--out", "all.html")
    ended = stepscope(tmp_path, *three).stderr.splitlines()[-1]
    assert ended == f"next: stepscope {' '.join(three)} --export figures", "no two of the runs can be shown in depth"
    mixed = stepscope(tmp_path, "report", "old", "new", "older", RUNS[0])
    assert mixed.returncode == 2
    assert "too many files" in mixed.stderr


def test_compare_warns_as_for_two_runs(tmp_path: Path) -> None:
    trace = Path(__file__).parents[1] / "fixtures/h200_nano_compiled.json.gz"
    names = [f"{number}.json.gz" for number in range(3)]
    for name in names:
        shutil.copy(trace, tmp_path / name)
    done = stepscope(tmp_path, "compare", *names)
    assert done.returncode == 0, done.stderr
    assert "workload unknown: check that all runs have the same model and settings" in done.stdout

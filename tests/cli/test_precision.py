"""`stepscope precision`: one run, kept only when asked, and shown again without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import stepscope

TOY = ["--model", "stepscope.step.toy:build", "--device", "cpu"]
SMALL = ["--d-model", "16", "--d-ff", "32", "--num-layers", "1", "--num-heads", "2", "--vocab", "50"]
SMALL += ["--batch", "1", "--context", "8", "--device", "cpu"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a result in `toy.json`."""
    folder = tmp_path_factory.mktemp("precision")
    done = stepscope(folder, "precision", *TOY, "--out", "toy.json")
    assert done.returncode == 0, done.stderr
    assert "next: stepscope precision --from toy.json" in done.stderr
    for part in ("`layer_norm` is on CUDA's fp32 list", "9.9531", "Gradient underflow", "all gradients", "rsqrt"):
        assert part in done.stdout
    return folder


def test_saved_result_is_the_document_and_needs_no_torch(kept: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None;"
        "sys.argv = ['stepscope', 'precision', '--from', 'toy.json', '--format', 'json'];"
        "from stepscope.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (kept / "toy.json").read_text()
    document = json.loads(done.stdout)
    assert document["schema"] == "stepscope.precision/1"
    assert [run["precision"] for run in document["comparison"]["runs"]] == ["fp32", "bf16", "fp16"]
    assert document["environment"]["device"] == "cpu"


@pytest.mark.parametrize("table", ["dtypes", "errors", "underflow", "accumulation", "norm"])
def test_each_table_is_available_as_csv(kept: Path, table: str) -> None:
    done = stepscope(kept, "precision", "--from", "toy.json", "--table", table, "--format", "csv")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 4


def test_saved_result_is_replaced_only_with_force(kept: Path) -> None:
    before = (kept / "toy.json").read_bytes()
    refused = stepscope(kept, "precision", *TOY, "--set", "loss=mean", "--out", "toy.json")
    assert refused.returncode == 2
    assert "`toy.json` already exists" in refused.stderr
    assert (kept / "toy.json").read_bytes() == before
    other = stepscope(kept, "precision", *TOY, "--set", "loss=mean", "--precision", "bf16", "--out", "b.json")
    assert other.returncode == 0, other.stderr
    again = stepscope(kept, "precision", *TOY, "--precision", "bf16", "--out", "b.json", "--force")
    assert again.returncode == 0, again.stderr
    assert json.loads((kept / "b.json").read_text())["comparison"]["runs"][0]["loss"]["dtype"] == "fp32"
    assert not list(kept.glob(".*"))


def test_speedups_of_bench_are_shown_with_errors(tmp_path: Path) -> None:
    timing = ["--warmup", "0", "--steps", "2", "--precision", "fp32,bf16"]
    assert stepscope(tmp_path, "bench", *SMALL, *timing).returncode == 0
    results = "runs/bench/results.jsonl"
    asked = [*SMALL, "--precision", "bf16", "--bench", results, "--table", "speed", "--format", "json"]
    done = stepscope(tmp_path, "precision", *asked)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["speedup"] == pytest.approx(row["fp32_step_ms"] / row["step_ms"])
    assert 1e-4 < row["gradient_error"] < 1e-1
    other = stepscope(tmp_path, "precision", *TOY, "--bench", results)
    assert other.returncode == 2
    assert "no case of `stepscope.step.toy:build` was timed" in other.stderr
    assert not (tmp_path / "precision.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*TOY, "--precision", "tf32"], ["`tf32` is unsupported on device `cpu`", "hint:"]),
        ([*TOY, "--precision", "fp8"], ["unknown precision: `fp8`"]),
        ([*TOY, "--batch", "1,2"], ["one case to record, got 2"]),
        ([*TOY, "--set", "loss=meen"], ["unknown loss: `meen`", "hint: --set loss=mean"]),
        ([*TOY, "--compile"], ["`--compile` has no effect", "hint: remove --compile"]),
        ([*TOY, "--steps", "3"], ["`--steps` has no effect"]),
        ([*TOY, "--format", "csv"], ["requires `--table`", "--table dtypes --format csv"]),
        ([*TOY, "--table", "speed"], ["`--table speed` requires `--bench`"]),
        ([*TOY, "--bench", "missing.jsonl"], ["cannot read the results file"]),
        ([*TOY, "--out", "no/such/a.json"], ["directory not found", "hint: mkdir -p"]),
        (["--from", "missing.json"], ["cannot read `missing.json`"]),
        (["--from", "missing.json", "--size", "nano"], ["`--size` has no effect"]),
        (["--from", "missing.json", "--out", "b.json"], ["`--out` cannot be used with `--from`"]),
    ],
)
def test_invalid_arguments_are_rejected(tmp_path: Path, arguments: list[str], said: list[str]) -> None:
    done = stepscope(tmp_path, "precision", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    for part in said:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []

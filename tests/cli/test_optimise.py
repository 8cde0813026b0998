"""`stepscope optimise`: changes are tried in a worker, kept as they arrive, and shown again without torch."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import kill, start, stepscope, wait_until, workers

# As in docs/optimise.md, whose command then finds most of its code in the compiler's cache.
SMALL = ["--d-model", "32", "--d-ff", "64", "--num-layers", "1", "--num-heads", "2", "--vocab", "50"]
SMALL += ["--batch", "2", "--context", "16", "--device", "cpu"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one result."""
    folder = tmp_path_factory.mktemp("optimise")
    done = stepscope(folder, "optimise", *SMALL, "--precision", "bf16")
    assert done.returncode == 0, done.stderr
    for part in ("per step", "the step as it is", "PyTorch's attention", "CUDA graphs need a GPU", "Check:"):
        assert part in done.stdout
    assert "operations: " in done.stderr
    assert "stepscope.optimise(model, optimizer, example=batch)" in done.stderr
    assert "next: stepscope bench --d-model 32" in done.stderr
    assert "--preset fast" in done.stderr
    return folder


def result_of(folder: Path) -> Path:
    (found,) = (folder / "runs/optimise").glob("*.json")
    return found


def test_the_result_has_every_change_with_its_check(kept: Path) -> None:
    document = json.loads(result_of(kept).read_text())
    assert document["schema"] == "stepscope.optimise/1"
    assert document["stopped"] == ""
    changes = {change["name"]: change for change in document["changes"]}
    assert list(changes)[:2] == ["start", "operations"]
    assert changes["graph"]["status"] == "not applied"
    for change in changes.values():
        if change["step_ns"] is not None:
            assert change["check"]["truth"] == "float64"
            assert change["check"]["share_of_limit"] <= 1


def test_saved_result_prints_the_document_without_torch(kept: Path) -> None:
    path = result_of(kept)
    code = (
        "import sys; sys.modules['torch'] = None;"
        f"sys.argv = ['stepscope', 'optimise', '--from', {str(path)!r}, '--format', 'json'];"
        "from stepscope.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == path.read_text()


@pytest.mark.parametrize("table", [[], ["--table", "check"]])
@pytest.mark.parametrize("format_", ["md", "latex", "csv"])
def test_tables_print_in_other_formats(kept: Path, table: list[str], format_: str) -> None:
    done = stepscope(kept, "optimise", "--from", str(result_of(kept)), *table, "--format", format_)
    assert done.returncode == 0, done.stderr
    assert "operations" in done.stdout


def test_bad_calls_are_refused_before_anything_runs(kept: Path) -> None:
    (kept / "foreign").mkdir()
    (kept / "foreign/notes.txt").write_text("mine")
    for arguments, said in (
        (["--precision", "fp16"], "precision `fp16` cannot be optimized"),
        (["--mode", "forward"], "mode `forward` cannot be optimized"),
        (["--checkpoint", "1"], "checkpoint `block` cannot be optimized"),
        (["--steps", "3"], "`--steps` has no effect here"),
        (["--context", "8,16"], "expected one case"),
        (["--out", "foreign"], "contains files that stepscope did not create"),
        (["--from", "missing.json"], "cannot read `missing.json`"),
    ):
        refused = stepscope(kept, "optimise", "--device", "cpu", *arguments)
        if "--from" in arguments:
            refused = stepscope(kept, "optimise", *arguments)
        assert refused.returncode == 2, refused.stderr
        assert said in refused.stderr
    assert [path.name for path in (kept / "foreign").iterdir()] == ["notes.txt"]


def test_interrupted_run_keeps_what_is_done(tmp_path: Path) -> None:
    running = start(tmp_path, "optimise", *SMALL, "--precision", "bf16")
    wait_until(lambda: bool(list((tmp_path / "runs/optimise").glob("*.json"))))
    assert kill(running, signal.SIGINT) == 130
    said = (tmp_path / "stderr.txt").read_text()
    assert "interrupted: " in said
    path = result_of(tmp_path)
    assert f"stepscope optimise --from {path.relative_to(tmp_path)}" in said
    shown = stepscope(tmp_path, "optimise", "--from", str(path))
    assert shown.returncode == 0, shown.stderr
    assert "Not all changes were tried: interrupted." in shown.stdout
    wait_until(lambda: not workers(tmp_path))


def test_own_model_and_optimizer(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def build(batch):\n"
        "    model, x = nn.Linear(8, 8), torch.randn(batch, 8)\n"
        "    return model, x, lambda y: y.square().mean(), torch.optim.SGD(model.parameters(), lr=0.1)\n"
    )
    done = stepscope(tmp_path, "optimise", "--model", "my_model.py:build", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "optimizer: not applied, the optimizer is SGD, not torch.optim.AdamW or Adam" in done.stdout
    assert "attention: not applied, nothing to replace was found" in done.stdout
    assert "PyTorch's" not in done.stdout


def test_a_report_shows_before_and_after(tmp_path: Path) -> None:
    flags = ["--precision", "bf16", "--optimise", "--without", "profile,memory,precision,attention"]
    done = stepscope(tmp_path, "report", *SMALL, "--warmup", "1", "--steps", "2", *flags, "--data", "data")
    assert done.returncode == 0, done.stderr
    assert "optimise: " in done.stderr
    page = (tmp_path / "report.html").read_text()
    assert "Before and after" in page
    assert "CUDA graphs need a GPU" in page
    shown = stepscope(tmp_path, "report", "data/optimise.json", "--out", "again.html")
    assert shown.returncode == 0, shown.stderr
    assert "CUDA graphs need a GPU" in (tmp_path / "again.html").read_text()

"""`stepscope run` on scripts as the documentation of their libraries shows them, and on two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from stepscope.files import is_ours
from stepscope.recording.store import Manifest
from tests.cli.command import PATIENCE_S, stepscope

LOOPS = Path(__file__).parents[3] / "bench/loops"
SMALL = {
    "hf_trainer.py": ["--hidden", "16", "--layers", "1", "--heads", "2", "--seq-len", "16", "--train-samples", "120"],
    "lightning_module.py": ["--d-model", "16", "--num-layers", "1", "--num-heads", "2", "--context", "16"],
    "ddp.py": ["--d-model", "16", "--num-layers", "1", "--num-heads", "2", "--context", "16", "--num-sequences", "480"],
}


def read_manifest(folder: Path, rank: int = 0) -> Manifest:
    return msgspec.json.decode((folder / f"run/rank-{rank}/manifest.json").read_bytes(), type=Manifest)


@pytest.mark.parametrize(
    ("script", "arguments", "optimizer"),
    [
        ("hf_trainer.py", ["--device", "cpu", "--epochs", "2", "--accumulation", "1"], "AdamW"),
        ("lightning_module.py", ["--device", "cpu", "--max-steps", "40", "--accumulate-grad-batches", "2"], "AdamW"),
    ],
)
def test_a_script_of_a_library_is_recorded(tmp_path: Path, script: str, arguments: list[str], optimizer: str) -> None:
    command = [str(LOOPS / script), *SMALL[script], *arguments]
    done = stepscope(tmp_path, "run", "--skip", "4", "--out", "run", *command)
    assert done.returncode == 0, done.stderr
    assert is_ours(tmp_path / "run/report.html")
    facts = read_manifest(tmp_path).loop
    assert facts is not None
    assert facts.found_by == "optimizer steps"
    assert any(optimizer in name for name in facts.optimizers)
    assert facts.backwards_per_step == pytest.approx(2 if "2" in arguments[-1] else 1, abs=0.2)
    assert facts.loaders


def test_two_ranks_make_one_page(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "stepscope", "run", "--skip", "4", "--out", "run", str(LOOPS / "ddp.py"), *SMALL["ddp.py"]]
    done = subprocess.run(
        [*launcher, *command, "--device", "cpu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["rank-0", "rank-1", "report.html", "run.json"]
    for rank in (0, 1):
        manifest = read_manifest(tmp_path, rank)
        assert (manifest.rank, manifest.world_size) == (rank, 2)
        assert manifest.loop is not None
        assert manifest.loop.wrappers == ("DistributedDataParallel",)
    assert done.stderr.count("found steps") == done.stderr.count("page: ") == 1  # only rank 0 speaks
    page = (tmp_path / "run/report.html").read_text()
    assert "rank 1" in page.lower()

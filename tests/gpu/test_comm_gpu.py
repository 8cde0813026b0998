"""`stepscope comm` on a GPU: NCCL with one rank, and gloo with tensors copied through CPU memory."""

from pathlib import Path

import pytest

from tests.cli.command import rows, stepscope

OUT = "runs/comm"


@pytest.mark.parametrize(("backend", "ranks", "clock"), [("nccl", 1, "cuda events"), ("gloo", 2, "host")])
def test_collectives_are_correct_and_timed(tmp_path: Path, backend: str, ranks: int, clock: str) -> None:
    command = ["comm", "--device", "cuda", "--backend", backend, "--ranks", str(ranks), "--sizes", "1MB,16MB"]
    done = stepscope(tmp_path, *command, STEPSCOPE_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path, OUT)
    assert [row["status"] for row in found] == ["ok"] * 8, [row["reason"] for row in found]
    assert {row["measurement"]["clock"] for row in found} == {clock}
    assert all(len(row["measurement"]["samples_ns"]) == ranks for row in found)
    assert (tmp_path / OUT / "links.json").exists() == (ranks > 1)


def test_nccl_with_more_ranks_than_gpus_raises_with_a_hint(tmp_path: Path) -> None:
    import torch

    many = torch.cuda.device_count() + 1
    done = stepscope(tmp_path, "comm", "--device", "cuda", "--ranks", str(many))
    assert done.returncode == 2
    assert f"`{many}` ranks with NCCL" in done.stderr
    assert "--backend gloo" in done.stderr
    assert not (tmp_path / "runs").exists()

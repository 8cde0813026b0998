"""Hardware counters with a real Nsight Compute, if it is installed and permitted."""

import shutil
from pathlib import Path

import pytest

from stepscope.explain.trace.counters import counted_kernels
from stepscope.recording.readers.counter_metrics import L1_HIT_RATE, L2_HIT_RATE
from stepscope.recording.store import load
from tests.cli.command import stepscope

TINY = ["--d-model", "128", "--d-ff", "256", "--num-layers", "1", "--num-heads", "2", "--vocab", "512", "--batch", "1"]


@pytest.mark.skipif(shutil.which("ncu") is None, reason="no ncu here")
@pytest.mark.timeout(300)
def test_grid_is_counted_and_resumes(tmp_path: Path) -> None:
    arguments = ["profile", "--counters", *TINY, "--attention", "sdpa", "--precision", "bf16", "--context", "64,128"]
    done = stepscope(tmp_path, *arguments, "--format", "csv")
    if "ERR_NVGPUCTRPERM" in done.stderr:
        pytest.skip("counters are not permitted here")
    assert done.returncode == 0, done.stderr
    short, long = (load(tmp_path / "runs/counters" / f"context-{length}") for length in (64, 128))
    kernels = counted_kernels(long)
    products = kernels.filter(kernels["class"] == "GEMM")
    assert products.height >= 7
    assert (products["tensor_ops"] + products["fp32_flops"] > 0).all()
    # Full tiles, so never fewer operations than the theoretical number.
    assert long.manifest.forward_flops is not None
    assert products["tensor_ops"].sum() >= long.manifest.forward_flops["GEMM"]
    assert {L1_HIT_RATE, L2_HIT_RATE} <= set(long.counters["metric"])
    assert (kernels["end_ns"] > kernels["start_ns"]).all()
    assert short.manifest.forward_flops != long.manifest.forward_flops
    again = stepscope(tmp_path, *arguments, "--format", "csv")
    assert again.stdout == done.stdout
    assert again.stderr.count("already counted") == 2

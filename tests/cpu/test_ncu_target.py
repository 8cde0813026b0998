"""The program that runs under Nsight Compute, on a machine without a GPU."""

from pathlib import Path

import pytest
import torch
from torch import nn

from stepscope.cost import forward_flops
from stepscope.errors import StepscopeError
from stepscope.jobs.recorders.nsight_compute import count_with_ncu
from stepscope.measure.flops import count_operations
from stepscope.measure.targets.ncu import check_layers
from stepscope.spec import ModelShape, Scalar, build_case
from stepscope.step import build
from tests.unit.ncu_files import StandIn


def test_program_reports_a_missing_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    StandIn(folder).set(run_target=True)
    case = build_case({"size": "nano", "device": "cpu", "mode": "inference"})
    with pytest.raises(StepscopeError, match="hardware counters require a GPU; device `cpu` is the CPU"):
        count_with_ncu(case, metrics=["dram__bytes_read.sum"], scratch=tmp_path)


@pytest.mark.parametrize("attention", ["naive", "sdpa", "flash"])
def test_flops_match_the_formula_with_full_attention(attention: str) -> None:
    shape: dict[str, Scalar] = {"size": "nano", "num_layers": 2, "num_kv_heads": 2, "context": 32}
    workload = build_case({**shape, "attention": attention, "mode": "inference", "device": "cpu"}).workload
    assert isinstance(workload.model, ModelShape)
    counted = count_operations(build(workload, torch.device("cpu")))
    half = workload.batch * 2 * 2 * 32 * 32 * workload.model.d_model  # of two layers' squares, which a mask leaves
    closed = forward_flops(workload.model, batch=workload.batch, context=32)
    assert sum(counted.values()) == closed + half
    assert counted.get("attention") == (None if attention == "naive" else 2 * half)


def test_model_with_too_many_layers_raises_once_built() -> None:
    def model(layers: int) -> nn.Module:
        return nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(layers)), "head": nn.Linear(2, 2)})

    check_layers(model(12))
    with pytest.raises(StepscopeError, match="too many layers for hardware counters: `13`") as raised:
        check_layers(model(13))
    assert "--set" in raised.value.hint

"""The program that runs under Nsight Systems, on a machine without a GPU."""

from pathlib import Path

import pytest

from stepscope.errors import StepscopeError
from stepscope.jobs.recorders.nsight_systems import record_with_nsys
from stepscope.spec import build_case
from tests.unit.nsys_files import StandIn, training_step


def test_program_reports_a_missing_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    StandIn(folder, training_step().write(tmp_path / "made before.sqlite")).set(run_target=True)
    case = build_case({"size": "nano", "device": "cpu"})
    with pytest.raises(StepscopeError, match="Nsight Systems requires CUDA; device `cpu` is the CPU") as raised:
        record_with_nsys(case, out_folder=tmp_path / "out")
    assert "stepscope profile" in raised.value.hint

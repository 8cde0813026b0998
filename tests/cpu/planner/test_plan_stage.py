"""The predictions of a report, simulated: on a machine without a GPU, for a report from an H200."""

from pathlib import Path

import msgspec
import pytest

from stepscope.explain.story import Materials, tell
from stepscope.jobs.experiments.sweep import Planned
from stepscope.jobs.report import plan_stage
from stepscope.jobs.report.plan_stage import PlanStage
from stepscope.jobs.report.stage import StageWork, UnavailableError
from stepscope.jobs.workers.process import Workers
from stepscope.spec import Scalar, build_case
from tests.unit.rows import ENVIRONMENT

TINY: dict[str, Scalar] = {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab": 50, "context": 64}
TINY |= {"precision": "bf16", "attention": "sdpa", "batch": 64, "device": "cuda:0"}
READS_A_VALUE = """
import torch

def build(batch):
    model = torch.nn.Linear(8, 8)
    return model, torch.randn(batch, 8), lambda y: y.sum() if y.sum().item() > 0 else -y.sum()
"""


def work_on(folder: Path, workers: Workers, settings: dict[str, Scalar], **timing: int) -> StageWork:
    case = build_case(settings)
    case = msgspec.structs.replace(case, timing=msgspec.structs.replace(case.timing, **timing))
    environment = msgspec.structs.replace(ENVIRONMENT, device="cuda:0", driver_name="NVIDIA H200")
    planned = Planned(case=case, environment=environment, source=None)
    return StageWork(
        folder=folder,
        command="stepscope report",
        planned=planned,
        other=planned,
        workers=workers,
        fresh=False,
        on_stage=lambda _: None,
    )


def test_predictions_are_kept_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_stage, "_LIMIT_S", 600.0)  # other tests may take all cores
    stage = PlanStage()
    with Workers() as workers:
        # Enough for the CUDA context, the workspaces of cuBLAS and a few hundred sequences.
        work = work_on(tmp_path, workers, TINY, memory_limit=910 * 2**20)
        made, keys = stage.run(work, Materials(name="tiny"))
    loaded = stage.load(tmp_path, keys, Materials(name="tiny"))
    assert loaded.plan == made.plan
    assert made.plan is not None
    (limit,) = made.plan.limits
    assert limit.value is not None
    assert limit.value > 64
    assert "largest batch that fits" in stage.tell(loaded)
    assert {one.title for one in made.plan.proposals} == {"as it is", "checkpoint every block", "2 micro-batches"}
    card = tell(loaded).memory_card
    assert card is not None
    assert card.lines[-1].title == f"Largest batch that fits: {limit.value:,}"
    assert "--fit 0.9542GB" in card.command


def test_model_that_reads_a_value_is_left_out_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reader.py").write_text(READS_A_VALUE)
    monkeypatch.chdir(tmp_path)
    with Workers() as workers, pytest.raises(UnavailableError, match="the step cannot be simulated: ") as raised:
        PlanStage().run(work_on(tmp_path, workers, {"model": "reader.py:build"}), Materials(name="reader"))
    assert raised.value.hint == "stepscope plan --model reader.py:build"
    assert not (tmp_path / "plan.json").exists()

"""The code of docs/trackers.md runs, with stand-ins for the trackers that keep what is logged."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Tracker:
    """Anything that is entered, and keeps the calls of its methods."""

    def __init__(self, *_: object, **__: object) -> None:
        self.logged: list[tuple[Any, ...]] = []
        KNOWN.append(self)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *values, **_: self.logged.append((name, *values))


KNOWN: list[Tracker] = []


def test_the_snippets_log_the_step_and_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    KNOWN.clear()
    wandb, board, mlflow = (ModuleType(name) for name in ("wandb", "torch.utils.tensorboard", "mlflow"))
    flow = Tracker()
    wandb.__dict__["init"] = Tracker
    board.__dict__["SummaryWriter"] = Tracker
    mlflow.__dict__.update(start_run=lambda: flow, log_metrics=flow.log_metrics, log_dict=flow.log_dict)
    for module in (wandb, board, mlflow):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("torch", "torch.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    snippets = FENCE.findall((ROOT / "docs/trackers.md").read_text())
    assert len(snippets) == 4
    exec("\n".join(snippets), {})
    _, run, writer = KNOWN
    scalars = {"stepscope/step", "stepscope/idle", "stepscope/class/GEMM"}
    assert scalars <= set(run.logged[0][1])
    assert scalars <= {one[1] for one in writer.logged}
    (metrics, document) = flow.logged
    assert scalars <= set(metrics[1])
    assert (document[1]["schema"], document[2]) == ("stepscope.explain/2", "stepscope.json")
    assert metrics[1]["stepscope/step"] == pytest.approx(5.517447)

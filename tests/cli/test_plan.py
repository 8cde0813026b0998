"""`stepscope plan`: predictions without a GPU, and bad input named with what to type."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.cli.command import stepscope

SMALL = ["--d-model", "16", "--d-ff", "32", "--num-layers", "2", "--num-heads", "2", "--vocab", "50"]
SMALL += ["--batch", "2", "--context", "16"]
FORGETS_THE_DEVICE = """
import torch
from torch import nn

class Model(nn.Embedding):
    def forward(self, x):
        return super().forward(x) + torch.arange(x.shape[1]).unsqueeze(1)

def build(batch, context):
    return Model(16, 8), torch.randint(16, (batch, context)), lambda output: output.sum()
"""
READS_A_VALUE = """
import torch

class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        if y.sum().item() > 0:
            y = -y
        return y

def build(batch):
    return Reader(), torch.randn(batch, 8), lambda y: y.sum()
"""


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plan")
    done = stepscope(folder, "plan", *SMALL, "--gpu", "H200", "--format", "json", "--plot", "memory.svg")
    assert done.returncode == 0, done.stderr
    assert "forward" in (folder / "memory.svg").read_text()
    assert "next: stepscope bench" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def validate(document: dict[str, Any], file: str) -> None:
    schema = json.loads((Path(__file__).parents[2] / "docs/schemas" / file).read_text())
    jsonschema.Draft202012Validator(schema).validate(document)


def test_document_has_the_promised_fields(document: dict[str, Any]) -> None:
    validate(document, "plan-1.schema.json")
    assert document["schema"] == "stepscope.plan/1"
    assert document["fits"] is True
    assert 0 < document["peak_allocated_bytes"] <= min(document["reserved_bytes"])
    assert len(document["reserved_bytes"]) == 2
    for name in ("step_ns", "step_ns_interval", "categories", "phases", "assumptions", "margin_bytes", "modules"):
        assert name in document


def test_categories_and_modules_add_up_to_the_peak(document: dict[str, Any]) -> None:
    for name in ("categories", "modules"):
        parts: list[dict[str, int]] = document[name]
        assert sum(one["bytes"] for one in parts) == document["peak_allocated_bytes"]


def test_phases_are_those_of_a_step(document: dict[str, Any]) -> None:
    phases: list[dict[str, Any]] = document["phases"]
    assert [one["phase"] for one in phases] == ["forward", "backward", "optimizer"]


def test_next_command_has_the_memory_that_was_given(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "plan", *SMALL, "--gpu", "H200", "--memory", "600MB")
    assert done.returncode == 0, done.stderr
    assert "--gpu 'H200 SXM' --fit 600MB" in done.stderr


def test_grid_is_one_table(tmp_path: Path) -> None:
    done = stepscope(
        tmp_path, "plan", *SMALL[:-4], "--context", "16", "--batch", "1,2", "--memory", "600MB", "--gpu", "T4"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("batch 1 ") + done.stdout.count("batch 2 ") == 2
    assert "T4 with 0.6 GB" in done.stdout


def test_search_ends_with_the_command_to_type(tmp_path: Path) -> None:
    settings = [*SMALL, "--precision", "bf16", "--attention", "sdpa", "--optimizer", "sgd", "--checkpoint", "1"]
    done = stepscope(
        tmp_path, "plan", *settings, "--mode", "train", "--fit", "2GB", "--gpu", "H200", "--format", "json"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    validate(found, "plan-fit-1.schema.json")
    assert found["schema"] == "stepscope.plan-fit/1"
    batch, context = found["limits"]
    assert batch["setting"] == "batch"
    assert batch["value"] < batch["beyond"] <= batch["value"] * 1.1 + 1
    assert context["value"] < context["beyond"]
    assert f"--batch {batch['value']}" in done.stderr


@pytest.mark.parametrize(
    ("flags", "said", "typed"),
    [
        (["--gpu", "H2000"], "unknown GPU: `H2000`", "--gpu"),
        (["--gpu", "RTX"], "unknown GPU: `RTX`", "--gpu H200 --memory 80GB"),
        (["--gpu", "MI300X"], "memory on `MI300X` cannot be predicted", "--gpu H200"),
        (["--memory", "much"], "not a memory size: `much`", "24GB"),
        (["--memory", "80"], "not the memory of a GPU: `80`", "24GB"),
        (["--memory", "0GB"], "less than any GPU has", "24GB"),
        (["--fit", "200KB"], "less than any GPU has", "24GB"),
        (["--fit", "RTX4O90"], "unknown GPU: `RTX4O90`", "--fit 'RTX 4090'"),
        (["--fit", "Foo"], "unknown GPU: `Foo`", "--fit 24GB"),
        (["--calibration", "."], "`.` is a directory", "--calibration FILE"),
        (["--context", "1000000000", "--gpu", "H200"], "a tensor is too large for PyTorch", "a smaller --batch"),
        (["--fit", "24"], "not the memory of a GPU: `24`", "24GB"),
        (["--fit", "H200", "--gpu", "A100"], "`--fit H200` and `--gpu A100` both name a GPU", "--gpu A100 --fit 24GB"),
        (["--fit", "24GB", "--memory", "24GB"], "mutually exclusive", "--fit 24GB"),
        (["--fit", "24GB", "--table", "phases"], "`--table` shows a part of one prediction", "leave out --table"),
        (["--steps", "3"], "`--steps` has no effect here", "remove --steps"),
        (["--memory-limit", "3GB"], "`--memory-limit` has no effect here", "remove --memory-limit"),
        (["--device", "cpu"], "device `cpu` cannot be planned for", "--gpu H200"),
        (["--batch", "1,2", "--plot", "a.png"], "`--plot` needs a single workload; got 2", "leave out --plot"),
        (["--batch", "1,2", "--fit", "24GB"], "`--fit` needs a single workload; got 2", "leave out"),
        (["--plot", "memory.txt"], "unsupported figure format", "--plot memory.png"),
    ],
)
def test_bad_input_says_what_to_type(tmp_path: Path, flags: list[str], said: str, typed: str) -> None:
    done = stepscope(tmp_path, "plan", *SMALL[:8], *flags)
    assert done.returncode == 2
    assert said in done.stderr
    assert typed in done.stderr.partition("hint: ")[2]
    assert "Traceback" not in done.stderr


def test_model_that_reads_a_value_is_refused_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "reader.py").write_text(READS_A_VALUE)
    done = stepscope(tmp_path, "plan", "--model", "reader.py:build", "--gpu", "H200")
    assert done.returncode == 2
    assert "reader.py:11" in done.stderr
    assert "Traceback" not in done.stderr


def test_model_that_creates_tensors_on_the_cpu_is_told_where_to_create_them(tmp_path: Path) -> None:
    (tmp_path / "positions.py").write_text(FORGETS_THE_DEVICE)
    done = stepscope(tmp_path, "plan", "--model", "positions.py:build", "--gpu", "H200")
    assert done.returncode == 2
    assert "positions.py:7" in done.stderr
    assert "device=x.device" in done.stderr.partition("hint: ")[2]


def test_model_that_raises_is_bad_input_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def build(batch):\n    raise RuntimeError('no weights')\n")
    done = stepscope(tmp_path, "plan", "--model", "broken.py:build", "--gpu", "H200")
    assert done.returncode == 2
    assert "no weights" in done.stderr
    assert "broken.py:2" in done.stderr


def test_each_of_several_gpus_holds_a_share(tmp_path: Path) -> None:
    settings = [*SMALL[:-4], "--batch", "8", "--context", "16", "--gpu", "H200", "--format", "json"]
    peaks = []
    for flags in (["--ranks", "4", "--strategy", "fsdp"], ["--ranks", "4"]):
        done = stepscope(tmp_path, "plan", *settings, *flags)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["ranks"]["count"] == 4
        assert "next: stepscope train" in done.stderr
        peaks.append(document["peak_allocated_bytes"])
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize(
    ("flags", "said", "typed"),
    [
        (["--batch", "6", "--ranks", "4"], "batch `6` cannot be split evenly over 4 ranks", "--batch 8"),
        (["--strategy", "fsdp"], "`--strategy fsdp` needs several ranks", "--ranks 8 --strategy fsdp"),
        (["--shard-optimizer"], "`--shard-optimizer` needs several ranks", "--ranks 8 --shard-optimizer"),
        (["--ranks", "4", "--fit", "24GB"], "`--fit` tries several numbers of ranks itself", "remove --ranks"),
    ],
)
def test_bad_ranks_say_what_to_type(tmp_path: Path, flags: list[str], said: str, typed: str) -> None:
    done = stepscope(tmp_path, "plan", *SMALL[:8], *flags, "--gpu", "H200")
    assert done.returncode == 2
    assert said in done.stderr
    assert typed in done.stderr.partition("hint: ")[2]

"""A recorded run: a trace of complete annotated steps, with unprofiled times next to it."""

import gzip
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.errors import StepscopeError
from stepscope.measure import profiler, timing
from stepscope.measure.profiler import record
from stepscope.recording.rows.bench import RAW_TRACE_NAME, RecordedRun
from stepscope.spec import Scalar, build_case

CPU = torch.device("cpu")
TINY: dict[str, Scalar] = {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab": 20}
TINY |= {"batch": 1, "context": 8, "device": "cpu", "warmup": 1, "steps": 4}


def run(folder: Path, *, record_steps: int = 2, functions: tuple[str, ...] = (), **settings: Scalar) -> RecordedRun:
    return record(
        build_case(TINY | settings),
        CPU,
        functions=functions,
        folder_raw=folder,
        record_steps=record_steps,
        on_stage=lambda _: None,
    )


def events(folder: Path, category: str) -> list[dict[str, Any]]:
    with gzip.open(folder / RAW_TRACE_NAME) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("cat") == category]


def span(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def recorded(folder: Path) -> RecordedRun:
    """A run that several tests read, with its trace in `folder`: recording takes longer than they do."""
    return run(folder)


@pytest.mark.usefixtures("recorded")
def test_ranges_are_user_annotations_in_the_trace(folder: Path) -> None:
    names = Counter(event["name"] for event in events(folder, "user_annotation"))
    assert [name for name in names if name.startswith("step:")] == ["step:0", "step:1"]
    expected = ["phase:forward", "phase:loss", "phase:backward", "phase:optimizer", "module:(TransformerLM)"]
    for name in (*expected, "module:blocks.1.attention.q_proj"):
        assert names[name] == 2, name
    assert names["part:scores"] == names["part:softmax"] == names["part:values"] == 2 * 2
    assert not [event for event in events(folder, "cpu_op") if event["name"].startswith(("module:", "phase:"))]


@pytest.mark.usefixtures("recorded")
def test_every_operator_is_in_a_step_and_every_matmul_in_its_module(folder: Path) -> None:
    ranges = events(folder, "user_annotation")
    steps = [span(event) for event in ranges if event["name"].startswith("step:")]
    operators = events(folder, "cpu_op")
    assert len(operators) > 100
    for operator in operators:
        start, end = span(operator)
        assert any(first <= start and end <= last for first, last in steps), operator["name"]
    projections = [span(event) for event in ranges if event["name"] == "module:blocks.0.ffn.up"]
    products = [span(event) for event in operators if event["name"] == "aten::mm"]
    for first, last in projections:
        assert sum(first <= start and end <= last for start, end in products) == 1


@pytest.mark.usefixtures("recorded")
def test_shapes_are_recorded(folder: Path) -> None:
    shapes = [event["args"]["Input Dims"] for event in events(folder, "cpu_op") if event["name"] == "aten::mm"]
    assert [[8, 16], [16, 32]] in shapes


def test_unprofiled_times_match_bench(recorded: RecordedRun) -> None:
    assert recorded.clock == "host"
    assert list(recorded.phases_ns) == ["forward", "backward", "optimizer"]
    assert [len(values) for values in (*recorded.phases_ns.values(), recorded.step_ns)] == [4] * 4
    assert [sum(phases) for phases in zip(*recorded.phases_ns.values(), strict=True)] == list(recorded.step_ns)
    assert len(recorded.recorded_step_ns) == len(recorded.annotated_step_ns) >= 5
    assert "few" in {doubt.code for doubt in recorded.doubts}


def test_unprofiled_steps_run_without_ranges_or_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []
    time_steps = timing.time_steps

    def spy(step: Any, count: int, **options: Any) -> Any:
        is_annotated = "forward" in vars(step.module.get_submodule("lm_head"))
        seen.append((torch._C._autograd._profiler_enabled(), is_annotated))
        return time_steps(step, count, **options)

    for module in (profiler, timing):
        monkeypatch.setattr(module, "time_steps", spy)
    run(tmp_path)
    turns = [(True, False), (True, True)] * 3
    assert seen == [(False, False), (False, False), *turns, (True, True)]


def test_function_that_never_runs_is_reported(tmp_path: Path) -> None:
    found = run(tmp_path, functions=("stepscope.nn.functional:causal_mask",))
    assert found.notes == ()
    assert "function:causal_mask" in {event["name"] for event in events(tmp_path, "user_annotation")}
    found = run(tmp_path, functions=("stepscope.nn.functional:rope_tables",))
    assert len(found.notes) == 1
    assert "rope_tables" in found.notes[0]


def test_wrong_function_raises_before_anything_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(profiler, "build")
    with pytest.raises(StepscopeError, match="cannot annotate"):
        run(tmp_path, functions=("stepscope.nn.functional:nothing",))
    assert list(tmp_path.iterdir()) == []


def test_worker_does_not_load_polars() -> None:
    code = "import sys, stepscope.measure.profiler, stepscope.jobs.workers.worker; sys.exit('polars' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

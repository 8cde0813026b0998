"""`stepscope.record`, `steps` and `trace_handler`, up to what they hand over to the process that writes the page."""

import json
import sys
from collections import Counter
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.profiler import profile, schedule

import stepscope
from stepscope.api.loop import name_script
from stepscope.loop import recorder as recorders
from stepscope.loop.recorder import LoopRecorder, RecordingPlan
from stepscope.recording.rows.loop_run import RUN_NAME
from stepscope.recording.store import Recording
from tests.cpu.loop.loops import (
    ENOUGH,
    SHORT,
    make_loader,
    make_model,
    no_page,
    read_handover,
    read_trace,
    train,
    train_step,
    unchanged,
)

__all__ = ["no_page"]  # a fixture
NEEDED = RecordingPlan(**SHORT).least + SHORT["steps"] + 2  # with the step for source lines


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr("stepscope.api.loop.tell", texts.append)
    return texts


def hooks() -> list[Any]:
    return [*optimizers._global_optimizer_pre_hooks, *optimizers._global_optimizer_post_hooks]


def names_by_step(trace: Recording) -> list[Counter[str]]:
    """The ranges inside each step that was marked, in order."""
    ranges = trace.ranges.sort("start_ns")
    found = []
    for number, (start_ns, end_ns) in enumerate(
        ranges.filter(pl.col("name").str.starts_with("step:")).select("start_ns", "end_ns").rows()
    ):
        inside = pl.col("start_ns").is_between(start_ns, end_ns, closed="left") & (pl.col("name") != f"step:{number}")
        found.append(Counter(ranges.filter(inside)["name"].to_list()))
    return found


@pytest.mark.usefixtures("no_page")
def test_marked_steps_are_recorded(tmp_path: Path, told: list[str]) -> None:
    with stepscope.record(tmp_path / "run", **SHORT) as recorder:
        train(after=lambda _: recorder.step())
    run, trace = read_handover(tmp_path / "run"), read_trace(tmp_path / "run")
    assert run.facts.found_by == "recorder.step()"
    assert run.facts.optimizers == ("SGD",)
    assert run.recorded_steps == len(run.recorded_step_ns) == 2
    first, second = names_by_step(trace)
    assert first == second
    for name in ("phase:backward", "module:(Sequential)", "module:2", "Optimizer.step#SGD.step"):
        assert first[name] == 1, name
    assert [text.split(":")[0] for text in told] == [
        "found steps",
        "recorded 2 steps; writing the page in the background",
    ]
    assert (recorder.page, recorder.data) == (tmp_path / "run/report.html", tmp_path / "run")
    assert run.model == "Sequential"
    assert run.parameters == 4 * 8 + 8 + 8 + 1


@pytest.mark.usefixtures("no_page", "told")
def test_steps_are_found_without_marks(tmp_path: Path) -> None:
    with stepscope.record(tmp_path / "run", **SHORT):
        model, optimizer = make_model()
        for (batch,) in make_loader():
            train_step(model, optimizer, batch)
    run = read_handover(tmp_path / "run")
    assert run.facts.found_by == "optimizer steps"
    assert run.facts.backwards_per_step == pytest.approx(1.0, abs=0.2)
    (loader,) = run.facts.loaders
    assert (loader.dataset, loader.batch_size, loader.num_workers) == ("TensorDataset", 2, 0)
    assert set(run.phases_ns) == {"input", "backward", "optimizer", "other"}
    assert all(len(samples) == RecordingPlan(**SHORT).timed for samples in run.phases_ns.values())
    assert min(run.phases_ns["input"]) > 0
    steps = names_by_step(read_trace(tmp_path / "run"))
    assert len(steps) == 2
    for names in steps:
        assert next(iter(names)) == "phase:input"  # a step begins with its batch
        assert names["phase:input"] == names["phase:backward"] == 1


@pytest.mark.usefixtures("no_page", "told")
def test_operators_have_the_lines_of_this_file(tmp_path: Path) -> None:
    with stepscope.record(tmp_path / "run", **SHORT) as recorder:
        train(after=lambda _: recorder.step())
    sources = read_handover(tmp_path / "run").sources
    places = dict(zip(sources.names, sources.places, strict=True))
    assert sources.lines[places["aten::mean"]].partition(":")[0].endswith("loops.py")
    assert "aten::_foreach_add_" in places or "aten::add_" in places


@pytest.mark.usefixtures("no_page", "told")
def test_without_sources_no_lines_are_recorded(tmp_path: Path) -> None:
    with stepscope.record(tmp_path / "run", sources=False, **SHORT) as recorder:
        train(after=lambda _: recorder.step())
    assert read_handover(tmp_path / "run").sources.names == ()


@pytest.mark.usefixtures("no_page", "told")
def test_batches_are_steps(tmp_path: Path) -> None:
    model, optimizer = make_model()
    seen = 0
    for (batch,) in stepscope.steps(make_loader(), tmp_path / "run", **SHORT):
        train_step(model, optimizer, batch)
        seen += 1
    assert seen == ENOUGH
    run = read_handover(tmp_path / "run")
    assert (run.facts.found_by, run.recorded_steps) == ("iterator", 2)
    assert hooks() == []


@pytest.mark.usefixtures("no_page", "told")
def test_leaving_the_iteration_early_ends_the_recording(tmp_path: Path) -> None:
    model, optimizer = make_model()
    batches = stepscope.steps(make_loader(), tmp_path / "run", **SHORT)
    for number, (batch,) in enumerate(batches):
        train_step(model, optimizer, batch)
        if number == NEEDED:
            break
    batches.close()  # type: ignore[attr-defined]
    assert read_handover(tmp_path / "run").recorded_steps == 2
    assert hooks() == []


def test_too_few_steps_are_told(tmp_path: Path, told: list[str]) -> None:
    with stepscope.record(tmp_path / "run") as recorder:
        train(steps=5, after=lambda _: recorder.step())
    assert told == ["nothing was recorded: the script ran 5 steps; 22 are needed (9 with skip=2)"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == [RUN_NAME]


@pytest.mark.usefixtures("no_page", "told")
@pytest.mark.parametrize("skip", [2, 5, 10])
def test_as_many_steps_as_promised_are_enough(tmp_path: Path, skip: int) -> None:
    """What the message about too few steps says is true."""
    with stepscope.record(tmp_path / "run", skip=skip):
        train(steps=RecordingPlan(skip=skip).least)
    assert read_handover(tmp_path / "run").recorded_steps == 1


def test_a_loop_without_steps_is_told_what_was_seen(tmp_path: Path, told: list[str]) -> None:
    with stepscope.record(tmp_path / "run"):
        model, _ = make_model()
        for (batch,) in make_loader(batches=3):
            model(batch).sum().backward()
    (text,) = told
    assert text.startswith(
        "no training steps found: saw 3 backward passes and 4 batches of a DataLoader. Mark them in your code"
    )


@pytest.mark.usefixtures("no_page")
def test_an_exception_passes_through_and_complete_steps_are_kept(tmp_path: Path, told: list[str]) -> None:
    def fail(step: int) -> None:
        recorder.step()
        if step == NEEDED - 3:  # after the recorded steps, before the one with stacks
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"), stepscope.record(tmp_path / "run", **SHORT) as recorder:
        train(after=fail)
    assert read_handover(tmp_path / "run").recorded_steps == 2
    assert not torch._C._autograd._profiler_enabled()
    assert hooks() == []


@pytest.mark.usefixtures("no_page", "told")
def test_a_loop_that_ends_while_it_is_recorded_keeps_the_complete_steps(tmp_path: Path) -> None:
    plan = RecordingPlan(skip=3, steps=20, sources=False)
    with stepscope.record(tmp_path / "run", skip=3, steps=20, sources=False) as recorder:
        train(steps=plan.least + 3, after=lambda _: recorder.step())
    run = read_handover(tmp_path / "run")
    assert 2 <= run.recorded_steps < 8
    assert hooks() == []


def test_errors_of_ours_never_reach_the_loop(tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: LoopRecorder) -> Any:
        raise ValueError("not expected")

    monkeypatch.setattr(LoopRecorder, "_record_steps", fail)
    steps: list[int] = []
    with unchanged(torch.autograd, torch.autograd.profiler.profile), stepscope.record(tmp_path / "run", **SHORT):
        train(after=steps.append)
    assert len(steps) == ENOUGH
    assert told[1:] == ["error: nothing was recorded: not expected"]
    assert hooks() == []


def test_a_directory_that_disappears_does_not_reach_the_loop(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    steps: list[int] = []

    def spoil(step: int) -> None:
        steps.append(step)
        if step == 1:
            (tmp_path / "run" / RUN_NAME).unlink()
            (tmp_path / "run").rmdir()
            (tmp_path / "run").write_text("a file")

    with stepscope.record(tmp_path / "run", **SHORT):
        train(after=spoil)
    assert len(steps) == ENOUGH
    assert any(text.startswith("error: nothing was recorded: cannot write to") for text in told)


@pytest.mark.parametrize("steps", [NEEDED - 3, ENOUGH])
def test_a_full_disk_does_not_reach_the_loop(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Neither while the loop runs, nor when it ends before the recording is complete. PyTorch says nothing: the file is
    just not there."""
    monkeypatch.setattr("torch.profiler._KinetoProfile.export_chrome_trace", lambda *_: None)
    done: list[int] = []
    with stepscope.record(tmp_path / "run", skip=3, steps=4):
        train(steps, after=done.append)
    assert len(done) == steps
    assert told[1].startswith("error: ")
    assert "could not write the trace" in told[1]
    assert len(told) == 2
    assert hooks() == []


@pytest.mark.usefixtures("no_page", "told")
@pytest.mark.parametrize("with_loader", [False, True])
def test_the_end_of_the_recording_is_reported_once(tmp_path: Path, *, with_loader: bool) -> None:
    """Also if it ends in the middle of a step, where no operator is running."""
    ends = []
    with stepscope.record(tmp_path / "run", **SHORT) as recorder:
        assert recorder._recorder is not None
        recorder._recorder.on_done = lambda: ends.append(1)
        model, optimizer = make_model()
        for (batch,) in make_loader() if with_loader else [(None,)] * ENOUGH:
            train_step(model, optimizer, batch)
        assert ends == [1]
    assert ends == [1]


@pytest.mark.usefixtures("no_page")
def test_a_profiler_of_the_script_has_precedence(tmp_path: Path, told: list[str]) -> None:
    """Ours stops, and records later."""
    own: list[int] = []
    with (
        stepscope.record(tmp_path / "run", **SHORT),
        profile(
            schedule=schedule(wait=7, warmup=1, active=3, repeat=1),
            on_trace_ready=lambda one: own.append(len(one.events() or ())),
        ) as profiler,
    ):
        train(after=lambda _: profiler.step())
    assert len(own) == 1
    assert own[0] > 0
    run = read_handover(tmp_path / "run")
    assert run.recorded_steps == 2
    assert any("another profiler" in note for note in run.facts.notes)
    assert len([text for text in told if text.startswith("error")]) == 0


def test_a_profiler_around_the_whole_loop_leaves_nothing_to_record(tmp_path: Path, told: list[str]) -> None:
    with stepscope.record(tmp_path / "run", **SHORT), profile() as profiler:
        train()
    assert "another profiler was active until the end" in told[-1]
    assert len(profiler.events() or ()) > 100


@pytest.mark.usefixtures("no_page", "told")
def test_models_and_facts_of_a_loop_with_a_scaler(tmp_path: Path) -> None:
    model, optimizer = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with stepscope.record(tmp_path / "run", skip=10, steps=2):
        for step in range(ENOUGH):
            loss = model(torch.randn(2, 4)).square().mean() * (float("inf") if step % 5 == 4 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    facts = read_handover(tmp_path / "run").facts
    assert facts.uses_scaler
    assert facts.skipped_steps == pytest.approx(facts.steps_seen / 5, abs=1)


def test_step_needs_the_context(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the recorder has not started"):
        stepscope.record(tmp_path / "run").step()


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"skip": -1}, {"steps": "3"}])
def test_wrong_counts_are_refused_before_anything_runs(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, stepscope.StepscopeError)):
        stepscope.record(tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_page")
@pytest.mark.parametrize("with_stack", [False, True])
def test_the_trace_of_a_profiler_is_handed_over(tmp_path: Path, *, with_stack: bool) -> None:
    handler = stepscope.trace_handler(tmp_path / "run")
    with profile(
        schedule=schedule(wait=1, warmup=1, active=2, repeat=1), on_trace_ready=handler, with_stack=with_stack
    ) as profiler:
        train(steps=8, after=lambda _: profiler.step())
    run = read_handover(tmp_path / "run")
    assert run.is_whole_trace
    assert run.facts.found_by == "torch.profiler"
    assert bool(run.sources.names) == with_stack
    assert any("loops.py" in line for line in run.sources.lines) == with_stack
    steps = read_trace(tmp_path / "run").ranges["name"].to_list()
    assert len([name for name in steps if name.startswith("ProfilerStep#")]) == 2
    if with_stack:  # every operator of the loop's thread is there, in order
        text = json.loads((tmp_path / "run/rank-0.raw/trace.json").read_text())
        forward = [one for one in text["traceEvents"] if one.get("cat") == "cpu_op" and one["name"] == "aten::linear"]
        assert run.sources.names.count("aten::linear") == len(forward)


def test_the_name_of_the_program_is_that_of_its_main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert name_script() == "python"
    main.__file__ = "/home/someone/train.py"
    assert name_script() == "train.py"
    main.__spec__ = ModuleSpec("package.train.__main__", None)
    assert name_script() == "-m package.train"


def test_ranks_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorders.rank_of() == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert recorders.rank_of() == (3, 8)


def test_the_page_of_a_marked_loop_is_written(tmp_path: Path) -> None:
    """To the end, with the process that writes it."""
    with stepscope.record(tmp_path / "run", **SHORT) as recorder:
        model, optimizer = make_model()
        loss = nn.MSELoss()
        for (batch,) in make_loader():
            loss(model(batch), batch[:, :1]).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    assert recorder.page.read_text().startswith("<!DOCTYPE html>")
    saved = stepscope.load(recorder.data)
    assert saved is not None
    assert not (recorder.data / "rank-0.raw").exists()

"""What guards an optimised step: the comparison with float64, the ladder, and errors that name a line."""

import traceback
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepscope.fast import capture
from stepscope.fast.accuracy import Reference, compare, make_reference
from stepscope.fast.ladder import climb, list_candidates
from stepscope.fast.program import Changes, Program
from stepscope.fast.weights import WorkingWeights
from tests.cpu.fast.tiny import ALL, BF16, CPU, TwoLinears, make_job, mean_square, normal


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(0)
    torch.compiler.reset()


Gradients = dict[str, Tensor]


def gradients_of(model: nn.Module, x: Tensor) -> tuple[Reference, Gradients, float]:
    reference = make_reference(model, mean_square, x, autocast=BF16, device=CPU)
    with torch.autocast("cpu", dtype=BF16):
        loss = mean_square(model, x)
    found = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    return reference, dict(zip(names, found, strict=True)), float(loss.detach())


def scaled(found: Gradients) -> None:
    found["second.weight"] *= 1.05


def zeroed(found: Gradients) -> None:
    found["second.weight"].zero_()


def poisoned(found: Gradients) -> None:
    found["second.weight"][0, 0] = torch.nan


def lost(found: Gradients) -> None:
    del found["second.weight"]


def swapped(found: Gradients) -> None:
    found["second.weight"] = found["second.weight"].flip(0)


def test_the_original_gradients_pass() -> None:
    reference, found, loss = gradients_of(TwoLinears(), normal(32, 8))
    assert compare(reference, found, loss, autocast=BF16).passes


@pytest.mark.parametrize("break_", [scaled, zeroed, poisoned, lost, swapped])
def test_a_wrong_gradient_fails(break_: Callable[[Gradients], None]) -> None:
    reference, found, loss = gradients_of(TwoLinears(), normal(32, 8))
    break_(found)
    result = compare(reference, found, loss, autocast=BF16)
    assert not result.passes
    assert result.parameter == "second.weight"


@pytest.mark.parametrize("autocast", [BF16, None], ids=["bf16", "fp32"])
def test_a_wrong_loss_fails(autocast: torch.dtype | None) -> None:
    reference, found, loss = gradients_of(TwoLinears(), normal(32, 8))
    for wrong in (loss * 1.1, loss + 1, -loss, torch.nan):
        result = compare(reference, found, wrong, autocast=autocast)
        assert not result.has_right_loss
        assert not result.passes


def test_a_missing_gradient_fails_even_if_the_original_is_mostly_noise() -> None:
    reference, found, loss = gradients_of(TwoLinears(), normal(32, 8))
    noisy = reference._replace(plain_errors=dict.fromkeys(reference.plain_errors, 1e3))
    del found["first.weight"]
    assert not compare(noisy, found, loss, autocast=BF16).passes


def failing(error: BaseException) -> Callable[[nn.Module, Any], Tensor]:
    """A loss that fails in float64 only."""

    def loss(module: nn.Module, batch: Any) -> Tensor:
        if batch.dtype == torch.float64:
            raise error
        return mean_square(module, batch)

    return loss


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("expected m1 and m2 to be alike: double != float")],
)
def test_the_truth_is_fp32_if_float64_is_impossible(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    reference = make_reference(TwoLinears(), failing(error), normal(3, 8), autocast=BF16, device=CPU)
    assert reference.dtype == torch.float32


@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("shapes do not match"), KeyError("mask")])
def test_other_errors_are_the_users_own(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        make_reference(TwoLinears(), failing(error), normal(3, 8), autocast=BF16, device=CPU)
    assert caught.value is error


def test_reference_leaves_gradients_and_dtype_alone() -> None:
    model = TwoLinears()
    model.first.weight.grad = torch.ones_like(model.first.weight)
    make_reference(model, mean_square, normal(3, 8), autocast=BF16, device=CPU)
    assert model.first.weight.grad.eq(1).all()
    assert model.first.weight.dtype == torch.float32


def test_a_change_that_fails_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step goes on without it, and the rung says why."""
    before = Program.run

    def run(self: Program) -> None:
        if self.changes.rewrites.attention and not self.changes.rewrites.norms:
            raise RuntimeError("the compiler has a bug\nand says so at length")
        before(self)

    monkeypatch.setattr(Program, "run", run)
    model = TwoLinears()
    job = make_job(model, (normal(3, 8),), optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
    tried = [one for one in list_candidates(job, compiler="eager") if one.name in ("attention", "optimizer")]
    kept, rungs = climb(job, tried)
    failed = next(rung for rung in rungs if rung.name == "attention")
    assert (failed.status, failed.notes) == ("failed", ("not compiled: the compiler has a bug",))
    assert not kept.rewrites.attention


def test_wrong_gradients_undo_all_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Program.differentiate

    def differentiate(self: Program) -> Any:
        return {parameter: 1.5 * gradient for parameter, gradient in before(self).items()}

    monkeypatch.setattr(Program, "differentiate", differentiate)
    model = TwoLinears()
    job = make_job(model, (normal(32, 8),), optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
    kept, rungs = climb(job, list_candidates(job, compiler="eager"), measures=False)
    assert kept == Changes()
    assert rungs[-1].status == "failed"
    assert "gradient of" in rungs[-1].notes[-1]


# --- Capture ---


def line_of(files: list[str]) -> str | None:
    """The line that is named for an error whose traceback goes through these files."""
    code = "def call(following):\n    following()"
    error: BaseException | None = None

    def fail() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    call: Callable[[], None] = fail
    for file in reversed(files):
        scope: dict[str, Any] = {}
        exec(compile(code, file, "exec"), scope)
        call = partial(scope["call"], call)
    try:
        call()
    except RuntimeError as found:
        error = found
    assert error is not None
    known = {str(Path(file)) for file in files}
    kept = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in known]
    assert kept
    return capture._line_of(error)


def test_errors_name_the_innermost_line_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model.py"
    model.write_text("def call(following):\n    following()  # x.item()\n")
    # This file is the user's too, and innermost.
    monkeypatch.setattr(capture, "_INTERNAL", (*capture._INTERNAL, __file__))
    internal = [nn.modules.module.__file__, capture.__file__, "<eval_with_key>.7"]
    assert line_of(["/home/me/train.py", str(model), *internal]) == "model.py:2 `following()  # x.item()`"
    assert line_of(["/home/me/torch/train.py", *internal]) == "train.py:2"
    assert line_of([*internal, "/tmp/torchinductor_me/b.py"]) is None


def test_nothing_of_what_was_tried_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves: list[weakref.ref[Tensor]] = []
    make_leaf = WorkingWeights.leaf

    def remember(self: WorkingWeights, *arguments: Any) -> Tensor:
        leaf = make_leaf(self, *arguments)
        leaves.append(weakref.ref(leaf))
        return leaf

    monkeypatch.setattr(WorkingWeights, "leaf", remember)
    model = TwoLinears()
    job = make_job(model, (normal(3, 8),), optimizer=torch.optim.AdamW(model.parameters()))
    climb(job, list_candidates(job, compiler="eager"), measures=False)
    assert leaves
    assert not [one for one in leaves if one() is not None]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("called a synchronizing CUDA operation", "it waits for the GPU"),
        ("CUDA error: operation not permitted when stream is capturing\nmore", "CUDA error: operation not permitted"),
    ],
)
def test_errors_of_a_capture_say_why(message: str, reason: str) -> None:
    with pytest.raises(capture.CannotCapture) as caught, capture._naming_lines():
        raise RuntimeError(message)
    assert caught.value.reason.startswith(reason)
    assert caught.value.line is not None
    assert caught.value.line.startswith("test_checks.py:")


def test_the_error_of_a_capture_keeps_no_tensors() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def wait() -> None:
        x = torch.ones(2)
        kept.append(weakref.ref(x))
        raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(capture.CannotCapture) as caught, capture._naming_lines():
        wait()
    assert kept[0]() is None, caught.value


@pytest.mark.parametrize(
    "error", [RuntimeError("size mismatch"), RuntimeError(), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_other_errors_pass_through_a_capture(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, capture._naming_lines():
        raise error
    assert caught.value is error


def test_a_capture_that_fails_puts_back_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that run before a capture change the statistics of BatchNorm."""

    def fail(parts: Any, _device: Any) -> None:
        for part in parts:
            if part.name != "optimizer":
                part.run()
        raise capture.CannotCapture("it waits for the GPU", None)

    monkeypatch.setattr("stepscope.fast.program.capture", fail)
    monkeypatch.setattr(torch.random, "fork_rng", lambda _devices: torch.enable_grad())
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    job = make_job(model, (normal(3, 8),), optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
    program = job.build(ALL)
    with pytest.raises(capture.CannotCapture):
        program.capture()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    program.run()
    assert program.losses[0].isfinite()


def test_graphs_give_their_gradients_to_an_optimizer_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shape has graphs with gradients of their own."""
    model = TwoLinears()
    job = make_job(model, (normal(3, 8),), optimizer=torch.optim.SGD(model.parameters(), lr=0.0))

    def fake(parts: Any, _device: Any) -> Any:
        for part in parts:
            part.run()
        gradients = [one.grad for one in model.parameters() if one.grad is not None]

        def replay() -> None:
            for gradient in gradients:
                gradient.fill_(3.0)

        return (("forward", lambda: None), ("backward", replay))

    monkeypatch.setattr("stepscope.fast.program.capture", fake)
    monkeypatch.setattr(torch.random, "fork_rng", lambda _devices: torch.enable_grad())
    first, second = job.build(Changes()), job.build(Changes())
    first.capture()
    second.capture()
    for parameter in model.parameters():
        parameter.grad = None
    first.run()
    for parameter, gradient in first.gradients().items():
        assert parameter.grad is gradient
        assert gradient.eq(3).all()

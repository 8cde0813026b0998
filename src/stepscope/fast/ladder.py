"""Tries changes to a training step one after another, and keeps those that are right and faster on this machine.

Each change is measured on top of those kept so far. It is kept if its gradients are as accurate as those of the
original step (`accuracy.py`) and the step is faster.
"""

import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from stepscope.fast.accuracy import GradientAccuracy, Reference, compare, make_reference
from stepscope.fast.batches import has_dropout
from stepscope.fast.capture import CannotCapture
from stepscope.fast.program import Changes, Program
from stepscope.fast.update import read_steps, why_not_one_launch, write_steps
from stepscope.fast.weights import WorkingWeights

Status = Literal["start", "kept", "no gain", "not applied", "failed"]
WARMUP, LEAST, REPEATS, SECONDS = 3, 5, 30, 3.0
NOISE = 0.005  # a smaller gain counts as none
AS_IT_IS = Changes()
START_TITLE = "the step as it is"


class Rung(NamedTuple):
    """One change, measured on top of those kept before it. Nothing is measured if it was not applied or failed."""

    name: str
    title: str
    status: Status
    step_ms: float | None = None
    peak_bytes: int | None = None
    prepare_s: float | None = None  # tracing, compiling and capturing
    notes: tuple[str, ...] = ()
    accuracy: GradientAccuracy | None = None


class CandidateChange(NamedTuple):
    """A change to try. `after` gives the new changes, or the reason why it cannot be applied."""

    name: str
    title: str
    after: Callable[[Changes], Changes | str]


class OptimiseJob(NamedTuple):
    """A model to optimize, with an example of its input, one per pass."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    loss_of: Callable[[nn.Module, Any], Tensor]
    batches: tuple[Any, ...]
    autocast: torch.dtype | None
    device: torch.device
    max_norm: float | None = None

    def build(
        self, changes: Changes, *, batches: Sequence[Any] | None = None, weights: WorkingWeights | None = None
    ) -> Program:
        module, loss_of = self.module, self.loss_of
        return Program(
            module=module,
            loss_of=lambda batch: loss_of(module, batch),
            batches=self.batches if batches is None else batches,
            optimizer=self.optimizer,
            autocast=self.autocast,
            device=self.device,
            changes=changes,
            max_norm=self.max_norm,
            weights=weights,
        )


def list_candidates(job: OptimiseJob, *, compiler: str = "inductor") -> tuple[CandidateChange, ...]:
    """All changes, in the order in which they are tried."""
    is_low = job.autocast == torch.bfloat16

    def rewriting(**switches: bool) -> Callable[[Changes], Changes]:
        return lambda changes: replace(changes, rewrites=replace(changes.rewrites, **switches))

    def update_in_one_launch(changes: Changes) -> Changes | str:
        reason = why_not_one_launch(job.optimizer)
        return reason or replace(rewriting(working_weights=is_low)(changes), one_launch=True)

    def merge(changes: Changes) -> Changes | str:
        has_copies = changes.rewrites.working_weights
        return rewriting(merge=True, packed=True)(changes) if has_copies else "it needs working weights"

    def capture(changes: Changes) -> Changes | str:
        return replace(changes, graph=True) if job.device.type == "cuda" else "CUDA graphs need a GPU"

    return (
        CandidateChange("compile", "torch.compile, with the loss", lambda changes: replace(changes, compiler=compiler)),
        CandidateChange("graph", "CUDA graphs of the whole step", capture),
        CandidateChange("attention", "flash_attention", rewriting(attention=True)),
        CandidateChange("optimizer", "AdamW in one launch, bf16 working weights", update_in_one_launch),
        CandidateChange("merge", "merged GEMMs, with SwiGLU and RoPE on their results", merge),
        CandidateChange("norms", "norms fused with the residual addition", rewriting(norms=True)),
        CandidateChange("loss", "cross entropy from low-precision logits", rewriting(loss=True)),
    )


def climb(
    job: OptimiseJob,
    tried: Sequence[CandidateChange],
    *,
    measures: bool = True,
    on_rung: Callable[[Rung], None] = lambda _: None,
    start: Changes = AS_IT_IS,
    reference: Reference | None = None,
) -> tuple[Changes, list[Rung]]:
    """Try all changes, and return those that are kept, and a rung for each. Without `measures`, all that can be applied
    are kept, and checked together.

    `start` is what the step has already. `reference` is what gradients are compared with: by default, those of the job.
    """
    rungs: list[Rung] = []
    with _unchanged(job):
        reference = reference or make_reference_of(job)
        kept, best_ms = start, math.inf
        done: tuple[str, ...] = ()  # by the rewrites that are kept

        def add(rung: Rung) -> None:
            rungs.append(rung)
            on_rung(rung)

        if measures:
            add(_measure(job, kept, "start", START_TITLE, reference))
            best_ms, done = rungs[0].step_ms or math.inf, rungs[0].notes
        for candidate in tried:
            changes = candidate.after(kept)
            if changes == kept:
                changes = "the step has it already"
            if isinstance(changes, str):
                add(Rung(name=candidate.name, title=candidate.title, status="not applied", notes=(changes,)))
            elif not measures:
                add(Rung(name=candidate.name, title=candidate.title, status="kept"))
                kept = changes
            else:
                # Working weights are no replacement, and are not listed as one.
                same = replace(kept.rewrites, working_weights=changes.rewrites.working_weights)
                is_rewrite = replace(changes, rewrites=same) == kept
                rung = _measure(
                    job, changes, candidate.name, candidate.title, reference, done_before=done if is_rewrite else None
                )
                add(_judge(rung, best_ms))
                if rungs[-1].status == "kept":
                    kept, best_ms, done = changes, rungs[-1].step_ms or math.inf, rungs[-1].notes
        if not measures:
            add(_judge(_measure(job, kept, "all", "all changes together", reference), math.inf))
            kept = kept if rungs[-1].status == "kept" else start
    _forget_programs(job.device)
    return kept, rungs


def _judge(rung: Rung, best_ms: float) -> Rung:
    if rung.step_ms is None:
        return rung
    worst = rung.accuracy
    assert worst is not None, "what is measured is checked"
    if not worst.passes:
        note = f"gradient of {worst.parameter}: error {worst.error:.2g}, before {worst.plain_error:.2g}"
        if not worst.has_right_loss:
            note = f"loss: {worst.loss:.6g}, before {worst.plain_loss:.6g}, in {worst.truth} {worst.true_loss:.6g}"
        return rung._replace(status="failed", notes=(*rung.notes, note))
    return rung._replace(status="kept" if rung.step_ms < best_ms * (1 - NOISE) else "no gain")


def _measure(
    job: OptimiseJob,
    changes: Changes,
    name: str,
    title: str,
    reference: Reference,
    *,
    done_before: tuple[str, ...] | None = None,
) -> Rung:
    """Build, check and time a program. It is not timed if it does no more than `done_before`."""
    _forget_programs(job.device)
    started = time.perf_counter()
    program = job.build(changes)
    try:
        if changes.graph:
            program.capture()
        program.run()
    except CannotCapture as error:
        return Rung(name=name, title=title, status="failed", notes=(f"not captured: {error}",))
    except torch.cuda.OutOfMemoryError:
        if name == "start":
            raise
        return Rung(name=name, title=title, status="failed", notes=("out of memory",))
    except RuntimeError as error:  # of the compiler, or of a rewritten graph; the original step has run before
        if name == "start":
            raise
        return Rung(name=name, title=title, status="failed", notes=(f"not compiled: {_first_line(error)}",))
    if done_before is not None and tuple(program.backend.done) == done_before:
        return Rung(name=name, title=title, status="not applied", notes=("nothing to replace was found",))
    _wait(job.device)
    prepare_s = time.perf_counter() - started
    step_ms = _time(program, job.device)
    peak = _peak_bytes(job.device, reference)
    return Rung(
        name=name,
        title=title,
        status="start",
        step_ms=step_ms,
        peak_bytes=peak,
        prepare_s=prepare_s,
        notes=tuple(program.backend.done),
        accuracy=_check(job, changes, program, reference),
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def make_reference_of(job: OptimiseJob) -> Reference:
    """What the gradients of a job are compared with."""
    with _without_dropout(job.module):
        return make_reference(job.module, job.loss_of, job.batches[0], autocast=job.autocast, device=job.device)


def _check(job: OptimiseJob, changes: Changes, program: Program, reference: Reference) -> GradientAccuracy:
    """Compare the gradients of the first batch. With dropout, they are those of the rewritten model without it, neither
    compiled nor captured."""
    if len(job.batches) > 1 or has_dropout(job.module):
        with _without_dropout(job.module):
            program = job.build(replace(changes, compiler=None, graph=False), batches=job.batches[:1])
            found = program.differentiate()
    else:
        found = program.differentiate()
    gradients = {program.weights.names[parameter]: gradient for parameter, gradient in found.items()}
    return compare(reference, gradients, float(program.losses[0]), autocast=job.autocast)


def _time(program: Program, device: torch.device) -> float:
    """The median time of a step, in milliseconds."""
    samples: list[float] = []
    begun = time.perf_counter()
    for number in range(WARMUP + REPEATS):
        started = time.perf_counter()
        program.run()
        _wait(device)
        if number >= WARMUP:
            samples.append(time.perf_counter() - started)
        if len(samples) >= LEAST and time.perf_counter() - begun > SECONDS:
            break
    return statistics.median(samples) * 1e3


def _peak_bytes(device: torch.device, reference: Reference) -> int | None:
    """The peak of the step itself, without the gradients that it is compared with. Unknown on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) - sum(one.nbytes for one in reference.truth.values())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget_programs(device: torch.device) -> None:
    """Compiled code and captured graphs of the last program hold memory."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    """Parts of a model may be in another mode than the whole, and each gets its own back."""
    modes = {one: one.training for one in module.modules()}
    if has_dropout(module):
        module.eval()
    try:
        yield
    finally:
        for one, is_training in modes.items():
            one.training = is_training


@contextmanager
def _unchanged(job: OptimiseJob) -> Iterator[None]:
    """Measure without learning: at a learning rate of zero, most optimizers leave the weights alone. Weights, buffers,
    gradients and the optimizer's state are put back in any case."""
    tensors = [*job.module.parameters(), *job.module.buffers()]
    values = [_copy(one) for one in tensors]
    gradients = [(parameter, parameter.grad) for parameter in job.module.parameters()]
    groups = [] if job.optimizer is None else [group for group in job.optimizer.param_groups if "lr" in group]
    state = {} if job.optimizer is None else _copy_state(job.optimizer)
    rates = [group["lr"] for group in groups]
    cuda = [job.device] if job.device.type == "cuda" else []
    try:
        for group in groups:
            group["lr"] = 0.0
        with torch.random.fork_rng(cuda):
            yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        if job.optimizer is not None:
            _put_back(job.optimizer, state)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for tensor, before in zip(tensors, values, strict=True):
                tensor.copy_(before)


def _copy(value: Any) -> Any:
    """A copy in CPU memory."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def _copy_state(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    write_steps(optimizer)
    return {
        parameter: {name: _copy(one) for name, one in state.items()} for parameter, state in optimizer.state.items()
    }


def _put_back(optimizer: torch.optim.Optimizer, copied: dict[Tensor, dict[str, Any]]) -> None:
    for parameter in list(optimizer.state):
        if parameter not in copied:
            del optimizer.state[parameter]
            continue
        state, before = optimizer.state[parameter], copied[parameter]
        for name in list(state):
            if name not in before:
                del state[name]
            elif isinstance(state[name], Tensor) and isinstance(before[name], Tensor):
                with torch.no_grad():
                    state[name].copy_(before[name])
            else:
                state[name] = before[name]
    read_steps(optimizer)

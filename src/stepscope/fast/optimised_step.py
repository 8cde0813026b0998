"""`optimise`: a faster training step for a model and its optimizer, checked against the original.

    step = stepscope.optimise(model, optimizer, example=batch)
    for batch in loader:
        loss = step(batch)

The model and the optimizer stay yours: parameters and state are updated in place, so evaluation, checkpoints and
learning-rate schedules need no change.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from stepscope.fast.batches import call_with, copy_batch, fill_batch, loss_in, signature_of
from stepscope.fast.capture import CannotCapture
from stepscope.fast.ladder import OptimiseJob, Rung, climb, list_candidates
from stepscope.fast.program import Changes, Program, name_parameters
from stepscope.fast.summary import summarise_rungs
from stepscope.fast.weights import WorkingWeights

MOST_SHAPES = 8
AUTOCAST = {"bf16": torch.bfloat16, "fp32": None}

UserLoss = Callable[[nn.Module, Any], Tensor]  # of the model and a batch


def optimise(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    example: Any,
    loss: UserLoss | None = None,
    precision: Literal["bf16", "fp32"] = "bf16",
    max_norm: float | None = None,
    micro_batches: int = 1,
    measure: bool = True,
    compiler: str = "inductor",
    on_rung: Callable[[Rung], None] = lambda _: None,
) -> "OptimisedStep":
    """Return a function that takes a batch, runs one training step of the model, and returns its loss.

    `example` is a batch: a tensor, a tuple of arguments, or a dict of keyword arguments. The model returns its loss, as
    a scalar or as `.loss`; otherwise pass `loss`, a function of the model and a batch of any form, such as
    `lambda model, batch: cross_entropy(model(batch[0]), batch[1])`. `precision` is that of autocast; parameters stay as
    they are. `max_norm` clips gradients. With `micro_batches`, a step takes that many batches and
    accumulates their gradients. Without an optimizer, a step leaves gradients at the parameters.

    With `measure`, each change is timed on its own, which takes minutes, and kept only if it helps. Without, all are
    applied. Either way the gradients are compared with the original first. `rungs` of the result says what was done.
    """
    model = model._orig_mod if isinstance(model, OptimizedModule) else model
    _check_arguments(model, precision, micro_batches)
    device = _only_device(model)
    example = copy_batch(example, device)
    job = OptimiseJob(
        module=model,
        optimizer=optimizer,
        loss_of=loss or _loss_of_output,
        batches=(example,) * micro_batches,
        autocast=AUTOCAST[precision],
        device=device,
        max_norm=max_norm,
    )
    changes, rungs = climb(job, list_candidates(job, compiler=compiler), measures=measure, on_rung=on_rung)
    return OptimisedStep(job, changes, rungs)


class OptimisedStep:
    """A training step: call it with a batch. Each shape of a batch is compiled and captured on first use."""

    def __init__(self, job: OptimiseJob, changes: Changes, rungs: Sequence[Rung]) -> None:
        self.changes, self.rungs = changes, tuple(rungs)
        self._job = job
        self._weights = WorkingWeights(name_parameters(job.module, job.optimizer))
        self._model_state = self._read_model_state()
        self._programs: OrderedDict[tuple[Any, ...], tuple[Program, tuple[Any, ...]]] = OrderedDict()
        self._last: Program | None = None

    def __call__(self, *batches: Any) -> Tensor:
        """Run one step and return its loss, without waiting for the GPU."""
        if len(batches) != len(self._job.batches):
            raise ValueError(f"expected {len(self._job.batches)} batches, but got {len(batches)}")
        program, fixed = self._program_for(batches)
        for own, batch in zip(fixed, batches, strict=True):
            fill_batch(own, batch)
        self._last = program
        program.run()
        program.announce_step()
        losses = [loss.detach() for loss in program.losses]
        return losses[0].clone() if len(losses) == 1 else torch.stack(losses).mean()

    @property
    def gradient_norm(self) -> Tensor | None:
        """The norm of the last gradients before they were clipped; None without `max_norm`, or with an optimizer that
        clips in PyTorch."""
        return None if self._last is None else self._last.gradient_norm

    def summary(self) -> str:
        """What was tried, as a table: the step with each change, its gain, and the check of its gradients."""
        return summarise_rungs(self.rungs)

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        kept = [rung.name for rung in self.rungs if rung.status == "kept"]
        return f"<OptimisedStep of {type(self._job.module).__name__}: {', '.join(kept) or 'no change'}>"

    def _read_model_state(self) -> tuple[Any, ...]:
        """What programs assume about the model: where its parameters are, which are trained, and its modes."""
        groups = [] if self._job.optimizer is None else self._job.optimizer.param_groups
        parameters = [(one.data_ptr(), one.requires_grad) for one in self._weights.names]
        modes = [one.training for one in self._job.module.modules()]
        return *parameters, *modes, *(len(group["params"]) for group in groups)

    def _program_for(self, batches: tuple[Any, ...]) -> tuple[Program, tuple[Any, ...]]:
        signature = tuple(signature_of(batch) for batch in batches)
        if self._model_state != self._read_model_state():
            self._programs.clear()
            self._weights = WorkingWeights(name_parameters(self._job.module, self._job.optimizer))
            self._model_state = self._read_model_state()
        if signature in self._programs:
            self._programs.move_to_end(signature)
            return self._programs[signature]
        if len(self._programs) == MOST_SHAPES:
            warnings.warn(f"more than {MOST_SHAPES} shapes of batches: each new one is compiled again", stacklevel=3)
            self._programs.popitem(last=False)
        fixed = tuple(copy_batch(batch, self._job.device) for batch in batches)
        program = self._job.build(self.changes, batches=fixed, weights=self._weights)
        if self.changes.graph:
            try:
                program.capture()
            except CannotCapture as error:
                warnings.warn(f"this shape runs without a CUDA graph: {error}", stacklevel=3)
        self._programs[signature] = program, fixed
        return self._programs[signature]


def _loss_of_output(module: nn.Module, batch: Any) -> Tensor:
    return loss_in(call_with(module, batch))


def _check_arguments(model: nn.Module, precision: str, micro_batches: int) -> None:
    """Raise ValueError for what would fail later, with an error that does not say why."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel | FullyShardedDataParallel):
        raise ValueError(
            f"expected a model on one device, but got a {type(model).__name__}, which communicates during backward; "
            "pass the bare model, in a process with one GPU"
        )
    if any(isinstance(one, DTensor) for one in model.parameters()):
        raise ValueError("expected a model on one device, but its parameters are sharded (DTensor)")
    if precision not in AUTOCAST:
        raise ValueError(f"unknown precision: {precision!r}; expected one of {', '.join(AUTOCAST)}")
    if micro_batches < 1:
        raise ValueError(f"micro_batches must be at least 1, but got {micro_batches}")


def _only_device(model: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise ValueError(f"expected a model on one device, but its parameters are on {sorted(map(str, devices))}")
    return devices.pop()

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
from torch.nn.parallel import DataParallel, DistributedDataParallel

from stepscope.fast.batches import call_with, copy_batch, fill_batch, loss_in, signature_of
from stepscope.fast.capture import CannotCapture
from stepscope.fast.ladder import Job, Rung, climb, list_candidates
from stepscope.fast.program import Changes, Program, name_parameters
from stepscope.fast.weights import WorkingWeights

MOST_SHAPES = 8
_WRAPPERS = (DataParallel, DistributedDataParallel, FullyShardedDataParallel)
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
    model = _unwrap(model)
    device = _only_device(model)
    example = copy_batch(example, device)
    job = Job(
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

    def __init__(self, job: Job, changes: Changes, rungs: Sequence[Rung]) -> None:
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
        losses = [loss.detach() for loss in program.losses]
        return losses[0].clone() if len(losses) == 1 else torch.stack(losses).mean()

    @property
    def gradient_norm(self) -> Tensor | None:
        """The norm of the last gradients before they were clipped; None without `max_norm`, or with an optimizer that
        clips in PyTorch."""
        return None if self._last is None else self._last.gradient_norm

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


def _unwrap(model: nn.Module) -> nn.Module:
    """The model that the user compiled, or the model itself. Wrappers that exchange gradients are refused: they wait
    for gradients at the parameters."""
    if isinstance(model, OptimizedModule):
        return model._orig_mod
    if isinstance(model, _WRAPPERS) or any(isinstance(one, DTensor) for one in model.parameters()):
        raise ValueError(f"expected a model for one GPU, but got a {type(model).__name__}, which exchanges gradients")
    return model


def _loss_of_output(module: nn.Module, batch: Any) -> Tensor:
    return loss_in(call_with(module, batch))


def _only_device(model: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise ValueError(f"expected a model on one device, but its parameters are on {sorted(map(str, devices))}")
    return devices.pop()

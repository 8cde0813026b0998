"""AdamW over all parameters in one launch, with gradient clipping and lower-precision working copies.

A step of a model with hundreds of parameters is three kinds of launches: partial sums of the gradient norm (only if
gradients are clipped), `prepare` (one program: step, bias corrections, clip factor), and the update. All numbers that
change between steps are on the device, so a CUDA graph of a step sees new learning rates and counts its own steps.
`adamw_kernels.py` contains the kernels; without a GPU the same steps run in plain PyTorch.

The results are those of `torch.optim.AdamW` after `torch.nn.utils.clip_grad_norm_`, except that gradients are clipped
as they are read: in memory they stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.kernels.tensor_lists import (
    BLOCK,
    CHUNK,
    NUM_WARPS,
    ListLaunch,
    TensorList,
    kernel_type,
    load_kernels,
    refuse_capture,
    upload,
)

NUM_FACTORS = 16  # per group, as in `adamw_kernels.py`
# A fixed number, not that of the SMs, so that the norm has the same bits on every GPU.
NORM_PROGRAMS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUpdate:
    """One parameter: what is read and written besides its gradient. All are contiguous, with as many elements each."""

    master: Tensor  # the parameter itself, or its fp32 copy
    exp_avg: Tensor  # in the dtype of master, as is exp_avg_sq
    exp_avg_sq: Tensor
    working: Tensor | None = None  # written from the new master; may be a part of a larger tensor
    group: int = 0  # index into the hyperparameters


class Hyper(NamedTuple):
    """The hyperparameters of a group."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    decoupled: bool = True  # False: weight decay is added to the gradient, as in Adam


class AdamWUpdates:
    """The updates of a list of parameters: `bind` their gradients, then `launch` once per step.

    `launch` can be captured in a CUDA graph, and nothing else here can. `grad_norm` is the norm before clipping, a
    scalar on the device, and is written only with `max_norm`. `steps` has the number of steps of each group.
    """

    def __init__(
        self,
        updates: Sequence[ParameterUpdate],
        hypers: Sequence[Hyper],
        *,
        max_norm: float | None = None,
        step: int | Sequence[int] = 0,
    ) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be positive, but got {max_norm}")
        for update in updates:
            _check(update, len(hypers))
        self._updates = tuple(updates)
        self._max_norm = None if max_norm is None else float(max_norm)
        rows = [(update.master, update.exp_avg, update.exp_avg_sq, update.working) for update in updates]
        self._list = TensorList(rows, [update.group for update in updates])
        device = self._list.device
        self._hypers: tuple[Hyper, ...] = ()
        self._hyper_table = torch.zeros(len(Hyper._fields), len(hypers), dtype=torch.float64, device=device)
        self._powers = torch.ones(2, len(hypers), dtype=torch.float64, device=device)
        self._factors = torch.zeros(len(hypers), NUM_FACTORS, dtype=torch.float32, device=device)
        self._partials = torch.zeros(0, dtype=torch.float32, device=device)
        self.steps = torch.zeros(len(hypers), dtype=torch.float32, device=device)
        self.grad_norm = torch.zeros((), dtype=torch.float32, device=device)
        self.set_hypers(hypers)
        self.set_step(step)

    def set_hypers(self, hypers: Sequence[Hyper]) -> None:
        """Use these from the next step on, as many as before. Costs nothing if none changed.

        If a beta changes, the bias correction is that of the averages so far, not of a new start.
        """
        new = tuple(hypers)
        if new == self._hypers:
            return
        if len(new) != self.steps.numel():
            raise ValueError(f"expected hyperparameters of {self.steps.numel()} groups, but got {len(new)}")
        refuse_capture("change hyperparameters")
        upload(torch.tensor(new, dtype=torch.float64).T.contiguous(), self._hyper_table)
        self._hypers = new

    def set_step(self, step: int | Sequence[int]) -> None:
        """Count from here: the number of steps taken so far, of all groups or of each."""
        refuse_capture("set the step")
        steps = [step] * len(self._hypers) if isinstance(step, int) else list(step)
        if len(steps) != len(self._hypers) or min(steps, default=0) < 0:
            raise ValueError(f"expected a non-negative step for each of {len(self._hypers)} groups, but got {step}")
        powers = [(hyper.beta1**taken, hyper.beta2**taken) for hyper, taken in zip(self._hypers, steps, strict=True)]
        upload(torch.tensor(powers, dtype=torch.float64).T.contiguous(), self._powers)
        upload(torch.tensor(steps, dtype=torch.float32), self.steps)

    def bind(self, gradients: Sequence[Tensor]) -> None:
        """Read these gradients from now on, one per update, contiguous, of any floating-point dtype each.

        Only addresses are compared, so this is cheap if they did not change. The gradients are kept until `release`.
        """
        changed = self._list.bind(gradients)
        if changed and self._max_norm is not None:
            self._partials = torch.zeros(len(self._list.launches) * NORM_PROGRAMS, device=self._list.device)

    def release(self) -> None:
        """Let go of the gradients after `launch`, so that their memory can be freed."""
        self._list.release()

    @torch.no_grad()
    def launch(self) -> None:
        """Take one step with the values that the bound gradients have now."""
        if self._list.device.type == "cpu":
            self._launch_plain()
        else:
            with torch.cuda.device(self._list.device):
                self.launch_kernels()

    def launch_kernels(self) -> None:
        """`launch` in Triton, which tests also run in its interpreter, on a CPU."""
        kernels, launches = load_kernels(), self._list.launches
        if self._max_norm is not None:
            for index, launch in enumerate(launches):
                self._launch_norm(kernels, launch, self._partials[index * NORM_PROGRAMS :])
        num_groups = len(self._hypers)
        kernels.adamw_prepare[(1,)](
            self._hyper_table,
            self._powers,
            self.steps,
            self._factors,
            self._partials,
            self.grad_norm,
            self._max_norm or 0.0,
            num_groups,
            self._partials.numel(),
            CLIP=self._max_norm is not None,
            GROUPS=1 << (num_groups - 1).bit_length(),
            PARTIALS=NORM_PROGRAMS,
            num_warps=NUM_WARPS,
        )
        for launch in launches:
            self._launch_update(kernels, launch)

    def _launch_norm(self, kernels: Any, launch: ListLaunch, partials: Tensor) -> None:
        kernels.sum_squares[(min(NORM_PROGRAMS, launch.num_chunks),)](
            self._list.table,
            launch.chunks,
            partials,
            launch.num_chunks,
            GRADIENT_TYPE=kernel_type(launch.kind.dtypes[-1]),
            ALIGNED=launch.kind.is_aligned,
            CHUNK=CHUNK,
            num_warps=NUM_WARPS,
        )

    def _launch_update(self, kernels: Any, launch: ListLaunch) -> None:
        state, _, _, working, gradient = launch.kind.dtypes
        kernels.adamw_update[(launch.num_chunks,)](
            self._list.table,
            launch.chunks,
            self._factors,
            STATE_TYPE=kernel_type(state),
            GRADIENT_TYPE=kernel_type(gradient),
            WORKING_TYPE=kernel_type(working),
            ALIGNED=launch.kind.is_aligned,
            BLOCK=BLOCK,
            CHUNK=CHUNK,
            num_warps=NUM_WARPS,
        )

    # --- The same steps in plain PyTorch, for a CPU. ---

    def _launch_plain(self) -> None:
        gradients = self._list.gradients
        clip: Tensor | float = 1.0
        if self._max_norm is not None:
            squares = [gradient.double().square().sum() for gradient in gradients]
            norm = torch.stack(squares).sum().sqrt()
            self.grad_norm.copy_(norm)
            clip = (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
        self.steps += 1
        self._powers *= self._hyper_table[1:3]
        corrections = (1 - self._powers).T.tolist()
        for update, gradient in zip(self._updates, gradients, strict=True):
            hyper, (correction1, correction2) = self._hypers[update.group], corrections[update.group]
            _update_plainly(update, gradient, hyper, clip, hyper.lr / correction1, correction2**0.5)


def _update_plainly(
    update: ParameterUpdate, gradient: Tensor, hyper: Hyper, clip: Tensor | float, step_size: float, root: float
) -> None:
    wide = torch.promote_types(update.master.dtype, torch.float32)
    master, average, square = (x.to(wide) for x in (update.master, update.exp_avg, update.exp_avg_sq))
    gradient = gradient.to(wide).view(master.shape) * clip
    if hyper.decoupled:
        master = master * (1 - hyper.lr * hyper.weight_decay)
    else:
        gradient = gradient + hyper.weight_decay * master
    average = average.lerp(gradient, 1 - hyper.beta1)
    square = (square * hyper.beta2).addcmul(gradient, gradient, value=1 - hyper.beta2)
    master = master.addcdiv(average, square.sqrt().div(root).add(hyper.eps), value=-step_size)
    update.master.copy_(master)
    update.exp_avg.copy_(average)
    update.exp_avg_sq.copy_(square)
    if update.working is not None:
        update.working.copy_(master.view(update.working.shape))


def _check(update: ParameterUpdate, num_groups: int) -> None:
    if not 0 <= update.group < num_groups:
        raise ValueError(f"group {update.group} is out of range for {num_groups} groups of hyperparameters")
    if not update.master.dtype == update.exp_avg.dtype == update.exp_avg_sq.dtype:
        raise ValueError(
            f"the averages must have the dtype of the master, {update.master.dtype}, but are {update.exp_avg.dtype} "
            f"and {update.exp_avg_sq.dtype}"
        )

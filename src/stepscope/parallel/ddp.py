"""Data-parallel training: every rank has the whole model and a part of the batch, and gradients are averaged.

The four strategies are one mechanism (`averaging.py`) with two settings: how many gradients share a message, and
whether a message is sent as soon as its gradients are ready or after the backward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from stepscope.errors import StepscopeError
from stepscope.parallel.agreement import InputCheck, claim, require_same_model
from stepscope.parallel.averaging import GradientAverager
from stepscope.parallel.buckets import EDGE_BYTES, SEPARATE, TOGETHER, BucketLimits
from stepscope.parallel.coalesced import broadcast_tensors
from stepscope.parallel.communicator import Communicator


class Strategy(NamedTuple):
    """Which gradients share a message (None: buckets of `bucket_mb`), and whether it is sent during the backward
    pass.
    """

    limits: BucketLimits | None
    overlapped: bool


STRATEGIES = {
    "naive": Strategy(SEPARATE, overlapped=False),
    "flat": Strategy(TOGETHER, overlapped=False),
    "overlap": Strategy(SEPARATE, overlapped=True),
    "bucketed": Strategy(None, overlapped=True),
}


class DDP(nn.Module):
    """Wraps `module` for data-parallel training: each rank processes its own batch, and gradients are averaged.

        model = DDP(model)
        loss(model(batch)).backward()
        model.finish_gradient_synchronization()
        optimizer.step()

    Every rank must call `finish_gradient_synchronization` once per step. After it, `.grad` is the average of the
    gradients of all ranks, where a rank without a gradient counts as zero; if no rank has one, it stays None. Between
    the computation of a gradient and this call, `.grad` is None. Afterwards it is a view of a buffer that the next step
    overwrites: clone what you want to keep.

    Parameters and buffers are broadcast from rank 0. Buffers that training changes differ between ranks from then on,
    until `broadcast_buffers`.

    `bucket_mb` is the size of a bucket in MiB, for `bucketed`. `check_inputs` compares the shapes of the first training
    batch across ranks. See `docs/parallel.md`.
    """

    def __init__(
        self,
        module: nn.Module,
        strategy: str = "bucketed",
        *,
        bucket_mb: float = 25.0,
        communicator: Communicator | None = None,
        check_inputs: bool = True,
    ) -> None:
        super().__init__()
        limits, overlapped = _read_strategy(strategy, bucket_mb)
        _refuse_module(module)
        claim(module, self)
        self.module = module
        self.strategy = strategy
        self._communicator = communicator or Communicator.default()
        require_same_model(self._communicator, module)
        tensors = [*module.parameters(), *module.buffers()]
        broadcast_tensors(self._communicator, tensors, [0] * len(tensors), "parameters and buffers")
        self._inputs = InputCheck(self._communicator, wanted=check_inputs)
        named = list(module.named_parameters())
        self._frozen = [(name, param) for name, param in named if not param.requires_grad]
        trained = [(name, param) for name, param in named if param.requires_grad]
        self._averager = GradientAverager(trained, self._communicator, limits, overlapped=overlapped)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.training:
            self._check_before_forward(args, kwargs)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backward passes accumulate local gradients; the next backward outside sends the
        sum.
        """
        before, self._averager.suspended = self._averager.suspended, True
        try:
            yield
        finally:
            self._averager.suspended = before

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Average gradients over ranks. Every rank must call this, even one that ran no backward pass."""
        if self._averager.suspended:
            raise StepscopeError(
                "finish_gradient_synchronization() was called inside no_sync()",
                detail="gradients accumulated there are averaged after the last backward pass, which must be outside",
                hint="exit the `with model.no_sync():` block first",
            )
        self._averager.finish()
        self._inputs.settle()

    def broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers, for example before an evaluation on all ranks. Every rank must call this."""
        buffers = list(self.module.buffers())
        broadcast_tensors(self._communicator, buffers, [0] * len(buffers), "buffers")

    def _check_before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A recomputed forward pass is part of a backward pass, in which gradients may have arrived.
        if self._averager.under_way and torch._C._current_graph_task_id() == -1:
            raise StepscopeError(
                "forward pass started before the gradients of the last backward pass were averaged",
                detail="the ranks would train different models",
                hint="call model.finish_gradient_synchronization() after backward, or run backward inside "
                "model.no_sync()",
            )
        for name, param in self._frozen:
            if param.requires_grad:
                raise StepscopeError(
                    f"`{name}` was frozen when the model was wrapped in DDP, and now requires gradients",
                    detail="its gradients would not be averaged",
                    hint="model = DDP(model.module)    # wrap it again",
                )
        self._inputs.see(args, kwargs)


def _read_strategy(strategy: str, bucket_mb: float) -> tuple[BucketLimits, bool]:
    if strategy not in STRATEGIES:
        raise ValueError(f"`strategy` must be one of {', '.join(STRATEGIES)}, but got {strategy!r}")
    if not bucket_mb > 0:
        raise ValueError(f"`bucket_mb` must be positive, but got {bucket_mb}")
    limits, overlapped = STRATEGIES[strategy]
    return limits or BucketLimits(EDGE_BYTES, bucket_mb * 2**20), overlapped


def _refuse_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"`module` must be an nn.Module, but got {type(module).__name__}")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta:
            raise ValueError(f"`module` has uninitialized parameters: `{name}` is on the meta device")

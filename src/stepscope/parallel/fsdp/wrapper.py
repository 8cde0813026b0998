"""Fully sharded data parallelism: each rank keeps a shard of every matrix, and the whole matrix only while it is used.

Files, bottom up: `plan.py` decides which matrices belong together, `flat_buffer.py` is their buffer and this rank's
slice of it, `unit.py` is what is gathered at once, `schedule.py` the order on which ranks agree, `autograd_graph.py`
finds out whether backward needs the weights, `runner.py` follows the schedule, `access.py` attaches all of this to
modules, `vectors.py` finishes a step and `full_state.py` restores whole tensors.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from stepscope.errors import StepscopeError
from stepscope.parallel.agreement import InputCheck, claim, require_same_model
from stepscope.parallel.coalesced import broadcast_tensors
from stepscope.parallel.communicator import Communicator
from stepscope.parallel.fsdp.access import serve_unit, serve_vectors, wrap_doors, wrap_root
from stepscope.parallel.fsdp.flat_buffer import GatheredBytes
from stepscope.parallel.fsdp.full_state import FullTensors, State
from stepscope.parallel.fsdp.plan import Plan, plan_units
from stepscope.parallel.fsdp.runner import Runner
from stepscope.parallel.fsdp.unit import ShardedUnit
from stepscope.parallel.fsdp.vectors import LastMessage


class FSDP(nn.Module):
    """Wraps `module` for data-parallel training with sharded parameters, gradients and optimizer state.

        model = FSDP(model)
        optimizer = AdamW(model.parameters())
        loss(model(batch)).backward()
        model.finish_gradient_synchronization()
        optimizer.step()

    Create the optimizer from the wrapped model: its parameters are this rank's shards of matrices, flattened, and the
    module's own vectors. `compute_dtype`, if given, is the dtype in which matrices are gathered, to which vectors and
    floating-point inputs are cast, and in which forward and backward run; the parameters here, their gradients and
    their sums over ranks are then fp32. Parameters and buffers are broadcast from rank 0.

    `ledger` counts the bytes of gathered parameters. See `docs/parallel.md`.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        communicator: Communicator | None = None,
        check_inputs: bool = True,
    ) -> None:
        super().__init__()
        _refuse_dtype(compute_dtype)
        _refuse_module(module)
        claim(module, self)
        self.module = module
        self.compute_dtype = compute_dtype
        self.ledger = GatheredBytes()
        self._communicator = communicator or Communicator.default()
        require_same_model(self._communicator, module)
        tensors = [*module.parameters(), *module.buffers()]
        broadcast_tensors(self._communicator, tensors, [0] * len(tensors), "parameters and buffers")
        del tensors
        plan = plan_units(module)
        self._vectors = plan.replicated
        if compute_dtype is not None:
            _widen(plan)
        self._shard(plan)
        self._inputs = InputCheck(self._communicator, wanted=check_inputs)
        self._versions: list[int] = []
        module.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]
        self._full = FullTensors(self._units, self._vectors, self._communicator)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.training:
            self._inputs.see(args, kwargs)
            self._refuse_unfinished()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backward passes accumulate local gradients, unsharded; the next backward outside
        sends the sum.
        """
        before, self._runner.is_synchronizing = self._runner.is_synchronizing, False
        try:
            yield
        finally:
            self._runner.is_synchronizing = before

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Average gradients over ranks. Every rank must call this, even one that ran no backward pass."""
        if not self._runner.is_synchronizing:
            raise StepscopeError(
                "finish_gradient_synchronization() was called inside no_sync()",
                detail="gradients accumulated there are averaged after the last backward pass, which must be outside",
                hint="exit the `with model.no_sync():` block first",
            )
        if self._runner.is_due:
            self._runner.finish()
            vectors = [member.parameter for member in self._vectors]
            LastMessage(vectors, self._units, self._communicator).exchange()
            self._inputs.settle()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their total L2 norm over ranks is at most max_norm; return the norm before
        scaling. Every rank must call this, after `finish_gradient_synchronization`.
        """
        if not max_norm > 0:
            raise ValueError(f"`max_norm` must be positive, but got {max_norm}")
        vectors = {member.parameter for member in self._vectors}
        sharded = [piece.grad for piece in self.parameters() if piece not in vectors and piece.grad is not None]
        replicated = [vector.grad for vector in vectors if vector.grad is not None]
        total = _sum_of_squares(sharded, self._device)
        self._communicator.all_reduce(total, "the gradients' norm", average=False).wait()
        norm = (total + _sum_of_squares(replicated, self._device)).sqrt()
        # The same formula as `stepscope.nn.clip_grad_norm` and torch.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in sharded + replicated:
            grad.mul_(factor.to(grad.dtype))
        return norm.float()

    def gather_full_params(self, to: int | None = None) -> dict[str, Tensor]:
        """Return whole parameters under the names of the unwrapped module, in the dtype they are trained in. Every rank
        must call this; rank `to` gets them, or all ranks if None, and the others an empty dictionary. Tied parameters
        appear under each name.
        """
        return self._full.gather_params(to)

    def load_full_params(self, params: Mapping[str, Tensor]) -> None:
        """The inverse: load whole parameters, of which each rank takes its shard."""
        self._full.load_params(params)

    def gather_full_state(self, optimizer: Optimizer, to: int | None = None) -> State:
        """Return the optimizer's state by parameter name: tensors of a shard's shape become whole, everything else is
        unchanged. Learning rates and other options are in `optimizer.state_dict()["param_groups"]`.
        """
        return self._full.gather_state(optimizer, to)

    def load_full_state(self, optimizer: Optimizer, state: Mapping[str, Mapping[str, Any]]) -> None:
        """The inverse, for an optimizer over this model's parameters."""
        self._full.load_state(optimizer, state)

    def _shard(self, plan: Plan) -> None:
        self._device = next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))
        self._runner = Runner(self._communicator)
        self._units: list[ShardedUnit] = []
        for unit_plan in plan.units:
            unit = ShardedUnit(unit_plan, self.compute_dtype, self._communicator, self.ledger)
            self._units.append(unit)
            serve_unit(self._runner.manage(unit), unit, self._runner)
            # Whole matrices are broadcast one unit at a time, so that a model that barely fits can be sharded.
            unit_plan.members.clear()
        if self.compute_dtype is not None:
            serve_vectors(self._vectors, self.compute_dtype, self._runner)
        wrap_doors(self._units, self.module, self._runner)
        wrap_root(self.module, self.compute_dtype, self._runner)

    def _refuse_unfinished(self) -> None:
        """An update before gradients are averaged would change vectors by local gradients, and matrices not at all."""
        versions = [member.parameter._version for member in self._vectors]
        if self._runner.is_due and versions != self._versions:
            raise StepscopeError(
                "parameters were updated before the gradients of the last backward pass were averaged",
                detail="the ranks would train different models",
                hint="call model.finish_gradient_synchronization() before optimizer.step()",
            )
        self._versions = versions

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002  # torch's signature
        _refuse_state_dict()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:  # noqa: ARG002  # torch's signature
        raise StepscopeError(
            "a model wrapped in FSDP cannot be moved or cast",
            detail="its parameters are views of buffers that are sharded over ranks",
            hint="FSDP(module.to(device))    # move it before wrapping",
        )


def _refuse_state_dict(*_: object) -> None:
    raise StepscopeError(
        "state_dict() is not supported on a model wrapped in FSDP",
        detail="this rank only has shards of its parameters",
        hint="call model.gather_full_params(to=0) on all ranks",
    )


def _refuse_dtype(compute_dtype: torch.dtype | None) -> None:
    if compute_dtype is not None and not (isinstance(compute_dtype, torch.dtype) and compute_dtype.is_floating_point):
        raise TypeError(f"`compute_dtype` must be a floating-point dtype, but got {compute_dtype}")


def _refuse_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"`module` must be an nn.Module, but got {type(module).__name__}")
    for name, part in module.named_modules():
        if isinstance(part, nn.RNNBase):
            raise TypeError(
                f"recurrent modules are not supported: `{name}` ({type(part).__name__}) keeps its weights "
                "in a list of its own"
            )
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        raise ValueError(
            f"expected all parameters of `module` on one device, but got {', '.join(sorted(map(str, devices)))}"
        )
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"`module` has uninitialized parameters: `{name}` is on the meta device")
        if parameter.is_complex():
            raise TypeError(f"complex parameters are not supported: `{name}`")


def _widen(plan: Plan) -> None:
    """Vectors are trained in fp32 too."""
    for member in plan.replicated:
        if member.parameter.is_floating_point():
            member.parameter.data = member.parameter.data.to(torch.promote_types(member.parameter.dtype, torch.float32))


def _sum_of_squares(grads: list[Tensor], device: torch.device) -> Tensor:
    """In float64, where the order of the sum over ranks does not matter."""
    norms = [torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
    total = torch.stack([norm.double() for norm in norms]) if norms else torch.zeros(1, dtype=torch.float64)
    return total.square().sum().to(device)

"""The built-in model with its optimizer, wrapped for a parallel strategy.

The full state can be saved and loaded under the names of the bare model with any strategy, so a checkpoint works with
every strategy and number of ranks.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypedDict

import torch
from torch import Tensor, nn

from stepscope.fast.capture import Phase
from stepscope.fast.program import Program
from stepscope.nn import Operations
from stepscope.parallel import DDP, FSDP, Communicator, ShardedOptimizer
from stepscope.spec import ModelShape, Training
from stepscope.step.builder import optimizer_of, set_float32_arithmetic
from stepscope.step.builtin import TokenBatch, build_model, choose_operations
from stepscope.step.checkpointing import checkpoint_blocks
from stepscope.step.whole_step import build_program

OptimizerState = dict[str, dict[str, object]]  # by the parameter's name


class FullState(TypedDict):
    """Everything that a run needs to resume, in CPU memory, under the names of the bare model."""

    step: int
    model: dict[str, Tensor]
    optimizer: OptimizerState


class Learner:
    """A step begins with its learning rate. It accumulates gradients with `add_gradients`, one pass of one rank's
    sequences at a time, until `update`."""

    def __init__(self, training: Training, communicator: Communicator, device: torch.device) -> None:
        workload = training.workload
        assert isinstance(workload.model, ModelShape)
        set_float32_arithmetic(tf32=workload.precision == "tf32")
        torch.manual_seed(workload.seed)
        self._operations = choose_operations(workload)
        with device:
            self._bare: nn.Module = build_model(workload, workload.model, self._operations)
        if workload.checkpointing is not None:
            every, nested = workload.checkpointing
            checkpoint_blocks(self._bare, every=every, nested=nested)
        if workload.compile and not workload.is_program:
            self._bare.compile(dynamic=False)
        self._names = [name for name, _ in self._bare.named_parameters()]
        self._training = training
        self._communicator = communicator
        self._device = device
        self.model = self._wrap()
        self.optimizer = self._make_optimizer()
        self.whole_step: WholeStep | None = None
        if workload.is_program:
            self.whole_step = WholeStep(training, self._bare, self._operations, self.optimizer, device)

    def begin(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def add_gradients(self, tokens_BC: Tensor, *, is_last: bool) -> Tensor:
        """Add the gradients of one pass and return its loss. The last pass of a step starts the communication."""
        if self.whole_step is not None:
            return self.whole_step.add_gradients(tokens_BC)
        with self._quiet(is_last), self._autocast():
            logits_BCV = self.model(tokens_BC[:, :-1])
            loss = self._operations.cross_entropy(logits_BCV, tokens_BC[:, 1:])
        with self._quiet(is_last):
            (loss / self._training.passes).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def finish_gradients(self) -> None:
        if isinstance(self.model, DDP | FSDP):
            self.model.finish_gradient_synchronization()

    def update(self) -> None:
        if self.whole_step is not None:
            self.whole_step.update()
        else:
            self.optimizer.step()

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def full_state(self, step: int) -> FullState | None:
        """The full state on rank 0, and None on the others. All ranks must call it."""
        if isinstance(self.model, FSDP):
            weights = self.model.gather_full_params(to=0)
            state = self.model.gather_full_state(self.optimizer, to=0)
        else:
            weights = {name: value.detach() for name, value in self._bare.named_parameters()}
            whole = self.optimizer.state_dict()
            state = {self._names[index]: dict(values) for index, values in whole["state"].items()}
        if self._communicator.rank != 0:
            return None
        host = {name: weights[name].cpu() for name in self._names}
        return FullState(step=step, model=host, optimizer=_state_to_host(state))

    def load_full_state(self, state: FullState) -> None:
        if isinstance(self.model, FSDP):
            self.model.load_full_params(state["model"])
            self.model.load_full_state(self.optimizer, state["optimizer"])
            return
        if self.whole_step is not None:
            self.optimizer = self._make_optimizer()  # the other one has hooks of the program that it was updated by
            self.whole_step = WholeStep(self._training, self._bare, self._operations, self.optimizer, self._device)
        with torch.no_grad():
            for name, parameter in self._bare.named_parameters():
                parameter.copy_(state["model"][name])
        names = self._names
        (group,) = self.optimizer.param_groups
        indexed = {names.index(name): values for name, values in state["optimizer"].items()}
        self.optimizer.load_state_dict(
            {"state": indexed, "param_groups": [{**group, "params": list(range(len(names)))}]}
        )

    def _wrap(self) -> nn.Module:
        match self._training.strategy:
            case "single":
                return self._bare
            case "fsdp":
                dtype = torch.bfloat16 if self._training.workload.precision == "bf16" else None
                return FSDP(self._bare, compute_dtype=dtype, communicator=self._communicator)
            case strategy:
                bucket_mb = self._training.bucket_mb
                return DDP(self._bare, strategy, bucket_mb=bucket_mb, communicator=self._communicator)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        make, options = optimizer_of(self._training.workload)
        parameters = list(self.model.parameters())
        options_and_rate = {"lr": self._training.learning_rate, **options}
        if self._training.shard_optimizer:
            return ShardedOptimizer(parameters, make, communicator=self._communicator, **options_and_rate)
        return make(parameters, **options_and_rate)

    def _quiet(self, is_last: bool) -> AbstractContextManager[object]:
        if not is_last and isinstance(self.model, DDP | FSDP):
            return self.model.no_sync()
        return nullcontext()

    def _autocast(self) -> AbstractContextManager[object]:
        if self._training.workload.precision == "bf16" and not isinstance(self.model, FSDP):
            return torch.autocast(self._device.type, dtype=torch.bfloat16)
        return nullcontext()


class WholeStep:
    """The steps of a learner as a `Program`, which reads each pass from the same tensors. It is built and captured in
    the first step, so that it starts from weights and state that were loaded before."""

    def __init__(
        self,
        training: Training,
        model: nn.Module,
        operations: Operations,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> None:
        self._workload, self._passes = training.workload, training.passes
        self._model, self._operations, self._optimizer, self._device = model, operations, optimizer, device
        self._batches: list[TokenBatch] = []
        self._program: Program | None = None
        self._pending: list[Phase] = []  # of this step
        self._done = 0  # passes of this step

    def add_gradients(self, tokens_BC: Tensor) -> Tensor:
        """Run the next pass of the step, and return its loss."""
        given = tokens_BC[:, :-1], tokens_BC[:, 1:]
        if self._program is None:
            self._batches = [(given[0].clone(), given[1].clone()) for _ in range(self._passes)]
            self._program = self._build()
        program = self._program
        for static, new in zip(self._batches[self._done], given, strict=True):
            static.copy_(new)
        self._pending = self._pending or list(program.phases)
        self._run_next()
        while self._pending[0][0] == "backward":
            self._run_next()
        self._done += 1
        return program.losses[self._done - 1].detach()

    def update(self) -> None:
        while self._pending:
            self._run_next()
        self._done = 0

    def working_weights(self) -> list[Tensor]:
        weights = self._program.weights if self._program else None
        return [copy for one in self._model.parameters() if weights and (copy := weights.copy_of(one)) is not None]

    def leaf_gradients(self) -> list[Tensor]:
        weights = self._program.weights if self._program else None
        return [
            found for one in self._model.parameters() if weights and (found := weights.gradient_of(one)) is not None
        ]

    def _run_next(self) -> None:
        _, phase = self._pending.pop(0)
        phase()

    def _build(self) -> Program:
        model, measure = self._model, self._operations.cross_entropy

        def loss_of(batch: TokenBatch) -> Tensor:
            return measure(model(batch[0]), batch[1])

        program, _ = build_program(self._workload, model, loss_of, self._batches, self._optimizer, self._device)
        if self._workload.graph and self._device.type == "cuda":
            program.capture()
        return program


def held_bytes(learner: Learner) -> tuple[int, int, int]:
    """The bytes of this rank's parameters, gradients and optimizer state. Shared storage counts once."""
    parameters: list[Tensor] = list(learner.model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if learner.whole_step is not None:
        parameters += learner.whole_step.working_weights()
        gradients += learner.whole_step.leaf_gradients()
    state = [value for values in learner.optimizer.state.values() for value in values.values()]
    return (
        _storage_bytes(parameters),
        _storage_bytes(gradients),
        _storage_bytes([value for value in state if isinstance(value, Tensor)]),
    )


def _storage_bytes(tensors: list[Tensor]) -> int:
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _state_to_host(state: Mapping[str, Mapping[str, object]]) -> OptimizerState:
    return {
        name: {key: value.cpu() if isinstance(value, Tensor) else value for key, value in values.items()}
        for name, values in state.items()
    }

"""One rank of several, simulated: the real strategies of `stepscope.parallel`, with collectives that send nothing.

Buffers, buckets, shards and gathered layers are those of the real code, so the memory is that of rank 0. What NCCL
takes outside PyTorch's allocator is not counted.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from stepscope import cost
from stepscope.cost.overlap import Compute, Layer, StepTime
from stepscope.parallel import sharded_optimizer
from stepscope.parallel.clocks import HostClock, Waitable
from stepscope.parallel.communicator import Communicator, Pending
from stepscope.parallel.fsdp.vectors import LastMessage
from stepscope.parallel.journal import Journal
from stepscope.patches import replace_attribute
from stepscope.plan.assumptions import Accelerator
from stepscope.plan.data_sheets import assume_links
from stepscope.plan.simulation import Simulation, simulate_callable
from stepscope.plan.step_time import PredictedStep
from stepscope.recording.rows.links import Links
from stepscope.spec import ModelShape, Training
from stepscope.step.learner import Learner

T = TypeVar("T")
_BYTES = {"bf16": 2}  # of a parameter that FSDP gathers; the others are fp32


class SilentCommunicator(Communicator):
    """Rank 0 of `world` ranks that do not exist. Its collectives return at once and leave tensors as they are."""

    def __init__(self, world: int) -> None:
        self.group, self.rank, self.world, self.backend = None, 0, world, "nccl"
        self.journal = Journal(None, 0)
        self._clock = HostClock()
        self._background = None
        self._message_bytes = self._issued = 0

    def share_objects(self, value: T, name: str) -> list[T]:  # noqa: ARG002
        return [value] * self.world

    def _begin(self, name: str, message_bytes: int, issue: Callable[[], Waitable | None]) -> Pending:  # noqa: ARG002
        return super()._begin(name, message_bytes, _Done)

    def _run(self, name: str, collective: Callable[[], object]) -> None:
        """Nobody is there to meet."""


class _Done:
    def wait(self) -> None:
        pass


def simulate_rank(training: Training, gpu: Accelerator, steps: int) -> Simulation:
    """Simulate rank 0 of a training run."""
    with ExitStack() as undo:
        # The type of a fake parameter is not that of an ordinary tensor, and messages have no values to read.
        replace_attribute(sharded_optimizer, "may_move", _may_move, undo)
        replace_attribute(LastMessage, "read_flags", _repeat_flags, undo)
        return simulate_callable(partial(_prepare, training), gpu, steps)


def _may_move(param: Tensor) -> bool:
    return param.is_contiguous() and param.untyped_storage().nbytes() == param.nbytes


def _repeat_flags(_message: LastMessage, _tensor: Tensor, own: list[float]) -> list[bool]:
    return [flag > 0 for flag in own]  # all ranks do the same


def _prepare(training: Training) -> Callable[[], None]:
    workload = training.workload
    learner = Learner(training, SilentCommunicator(training.ranks), torch.device("cuda", 0))
    own = workload.batch // training.ranks // training.passes
    parts = [torch.zeros(own, workload.context + 1, dtype=torch.int64) for _ in range(training.passes)]

    def run() -> None:
        learner.begin(training.learning_rate)
        for number, part_BC in enumerate(parts, start=1):
            learner.add_gradients(part_BC, is_last=number == len(parts))
        learner.finish_gradients()
        learner.update()
        learner.forget_gradients()

    return run


def time_ranks(training: Training, gpu: str, step: PredictedStep) -> StepTime:
    """The step with communication. `step` is the computation of one rank."""
    links, _ = assume_links(gpu, training.ranks)
    times = {phase.name: phase.ns for phase in step.phases}
    compute = Compute(
        forward_ns=times.get("forward", 0.0),
        backward_ns=times.get("backward", 0.0),
        optimizer_ns=times.get("optimizer", 0.0),
    )
    return _communicate(training, compute, links)


def _communicate(training: Training, compute: Compute, links: Links) -> StepTime:
    shape = training.workload.model
    assert isinstance(shape, ModelShape), "only the built-in model is trained on ranks"
    match training.strategy:
        case "single":
            raise AssertionError("one rank has no collectives")
        case "fsdp":
            # The simulated update is already that of a shard.
            return cost.predict_fsdp(
                _layers(shape, compute, _BYTES.get(training.workload.precision, 4)),
                links,
                optimizer_ns=compute.optimizer_ns * training.ranks,
            )
        case strategy:
            gradients = cost.model_gradients(shape, compute.backward_ns)
            bucket_bytes = int(training.bucket_mb * 2**20)
            ddp = cost.predict_ddp(strategy, gradients, compute, links, bucket_bytes=bucket_bytes)
            if not training.shard_optimizer:
                return ddp
            return cost.predict_sharded_optimizer(
                ddp, Compute(forward_ns=0.0, backward_ns=0.0), links, 4 * cost.parameters(shape).total
            )


def _layers(shape: ModelShape, compute: Compute, gathered_bytes: int) -> list[Layer]:
    """The units that FSDP gathers, each with its share of the computation by its parameters."""
    sizes = [sum(layer.matrices) for layer in cost.layer_sizes(shape)]
    total = sum(sizes)
    return [
        Layer(
            parameter_bytes=gathered_bytes * size,
            gradient_bytes=gathered_bytes * size,
            forward_ns=compute.forward_ns * size / total,
            backward_ns=compute.backward_ns * size / total,
        )
        for size in sizes
    ]

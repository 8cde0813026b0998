"""Runs a step with fake tensors on a GPU that is not there, and says what memory it takes.

The step is the real one: real autograd, autocast, optimizer and checkpointing, on tensors that have shapes and no
values. Its requests for memory, replayed through a model of PyTorch's allocator, give the peak; its operators are the
input of the time model.
"""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stepscope.plan import fake_cuda
from stepscope.plan.assumptions import Accelerator
from stepscope.plan.operation import Operation, TensorFacts
from stepscope.plan.places import LOSS, Places
from stepscope.plan.pretended_gpu import pretended_gpu
from stepscope.plan.tracking import Tracker
from stepscope.recording.memory.allocator_model import PLACEMENTS, AllocatorModel
from stepscope.spec import Workload
from stepscope.step import Step, build

__all__ = ["Operation", "Simulation", "TensorFacts", "simulate_callable", "simulate_workload"]


class Simulation(msgspec.Struct, kw_only=True):
    """`operations` are those of the last step."""

    operations: list[Operation]
    peak_allocated_bytes: int
    peak_requested_bytes: int
    reserved_bytes: tuple[int, int]


def simulate_workload(workload: Workload, gpu: Accelerator, steps: int = 3) -> Simulation:
    def prepare(places: Places) -> Callable[[], None]:
        step = build(workload, torch.device("cuda", 0), captures=False)
        return lambda: _run_phases(step, places)

    return _simulate(prepare, gpu, steps)


def simulate_callable(build: Callable[[], Callable[[], None]], gpu: Accelerator, steps: int = 3) -> Simulation:
    """`build` makes the model on device `cuda` and returns a function that runs one step."""

    def prepare(_places: Places) -> Callable[[], None]:
        with torch.device("cuda", 0):
            return build()

    return _simulate(prepare, gpu, steps)


def _run_phases(step: Step, places: Places) -> None:
    for name, phase in step.phases:
        places.phase = name
        phase()
    places.phase = None


def _simulate(prepare: Callable[[Places], Callable[[], None]], gpu: Accelerator, steps: int) -> Simulation:
    fake_cuda.enable()
    places = Places()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tracker = Tracker(gpu, places, mode)
    gc.collect()
    gc.disable()
    with pretended_gpu(gpu), mode, tracker, places.watching():
        run = prepare(places)
        for number in range(steps):
            places.begin_step(number)
            tracker.keeps_operations = number == steps - 1
            run()
    gc.enable()
    models = [AllocatorModel(placement) for placement in PLACEMENTS]
    for model in models:
        model.follow(tracker.events)
    return Simulation(
        operations=tracker.operations,
        peak_allocated_bytes=models[0].peak_allocated_bytes,
        peak_requested_bytes=models[0].peak_requested_bytes,
        reserved_bytes=(
            min(model.peak_reserved_bytes for model in models),
            max(model.peak_reserved_bytes for model in models),
        ),
    )

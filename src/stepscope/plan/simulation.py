"""Runs a step with fake tensors on a GPU that is not there, and says what memory it takes.

The step is the real one: real autograd, autocast, optimizer and checkpointing, on tensors that have shapes and no
values. Its requests for memory, replayed through a model of PyTorch's allocator, give the peak; its operators are the
input of the time model.

Two steps are simulated, because an optimizer makes its state in the first one. More steps repeat the second.
"""

import gc
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from stepscope.plan import fake_cuda, sdpa
from stepscope.plan.assumptions import SDPA_WORDS, Accelerator
from stepscope.plan.kernel_memory import UNKNOWN_WORKSPACES
from stepscope.plan.operation import Operation, TensorFacts
from stepscope.plan.owners import MemoryOwners, find_owner
from stepscope.plan.places import FORWARD, LOSS, ProgramPlaces
from stepscope.plan.pretended_gpu import GpuFakeMode, Noticed, pretended_gpu, trusted_tensors
from stepscope.plan.refusals import refusing
from stepscope.plan.replayed_memory import ReplayedMemory, Request, StepEvents, fits, repeat_steps, replay_memory
from stepscope.plan.tracking import Tracker
from stepscope.spec import WHOLE_STEP, Workload, flag_of
from stepscope.step import Step, build
from stepscope.units import say_size

__all__ = ["Operation", "Simulation", "TensorFacts", "simulate_callable", "simulate_workload"]
LossFunction = Callable[[object, Any], Tensor]
Prepare = Callable[[ProgramPlaces], Callable[[], None]]
SIMULATED = 2  # steps; the others repeat the last
_ONE_LAUNCH = "adamw-onelaunch"
_FUSED_UPDATE = "aten._fused_adamw_.default"


class ParameterSize(NamedTuple):
    name: str
    elements: int
    is_matrix: bool


class Simulation(msgspec.Struct, kw_only=True):
    """What simulated steps do on a GPU. `operations` are those of one step; `assumptions` are sentences. `events` and
    `requests` are the memory of all steps, request by request. `launched` are kernels that no operator stands for."""

    gpu: Accelerator
    steps: int
    parameter_sizes: list[ParameterSize]
    memory: ReplayedMemory
    operations: list[Operation]
    assumptions: list[str]
    events: StepEvents
    requests: list[Request]
    launched: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """The number of parameters; tied ones count once."""
        return sum(one.elements for one in self.parameter_sizes)

    def fits(self, memory_bytes: int | None = None) -> bool:
        """Whether all steps and the CUDA context fit into a GPU, or into a memory of this size."""
        total = self.gpu.memory_bytes if memory_bytes is None else memory_bytes
        return fits(self.events, self.memory, total - self.gpu.context_bytes)


def simulate_workload(workload: Workload, gpu: Accelerator, steps: int = 3) -> Simulation:
    """Simulate steps of a workload as it would run on `gpu`: without CUDA graphs and without compilation."""
    plain = msgspec.structs.replace(workload, compile=False, device="auto", **dict.fromkeys(WHOLE_STEP, False))

    def prepare(places: ProgramPlaces) -> Callable[[], None]:
        step = build(plain, torch.device("cuda", 0), captures=False)
        places.add_model(step.module)
        step.measure_loss = _attributed(step.measure_loss, places)
        return partial(_run_phases, step, places)

    # `stepscope.fast` finds out that a mask hides only what comes later, and drops it.
    simulation = _simulate(prepare, gpu, steps, is_traced=workload.compile and not workload.fuse)
    if workload.optimizer == _ONE_LAUNCH:
        simulation.operations = [_name_update(one) for one in simulation.operations]
    asked = [flag_of(name) for name in ("compile", *WHOLE_STEP) if getattr(workload, name)]
    if asked:
        simulation.assumptions.append(f"Predicted for the eager step, without {', '.join(asked)}.")
    return simulation


def _name_update(operation: Operation) -> Operation:
    """Our own AdamW in one launch, which is simulated as PyTorch's fused one. That also takes a list of step counts."""
    if operation.name != _FUSED_UPDATE:
        return operation
    inputs = operation.inputs[: 4 * (len(operation.inputs) // 5)]
    return msgspec.structs.replace(operation, name="stepscope.adamw.default", inputs=inputs)


def simulate_callable(build: Callable[[], Callable[[], None]], gpu: Accelerator, steps: int = 3) -> Simulation:
    """Simulate any code. `build` makes the model on device `cuda` and returns a function that runs one step."""

    def prepare(_places: ProgramPlaces) -> Callable[[], None]:
        with torch.device("cuda", 0):
            return build()

    return _simulate(prepare, gpu, steps)


def _attributed(measure_loss: LossFunction, places: ProgramPlaces) -> LossFunction:
    def attributed(output: object, batch: Any) -> Tensor:
        with places.inside(LOSS):
            return measure_loss(output, batch)

    return attributed


def _run_phases(step: Step, places: ProgramPlaces) -> None:
    for name, phase in step.phases:
        places.phase = name
        phase()
        places.on_phase_end()
    places.phase = None


class _Run:
    """A simulation while it runs."""

    def __init__(self, gpu: Accelerator) -> None:
        self.places = ProgramPlaces()
        self.mode = GpuFakeMode()
        self.tracker = Tracker(gpu, self.places, self.mode)
        self.owners = MemoryOwners(self.tracker, self.places)
        self.places.on_phase_end = self.owners.note
        self.places.on_recomputed = self._note_recomputed
        self._starts: list[int] = []  # events before each step
        self._recomputed: list[int] = []  # events before the end of each repeated forward pass

    def follow(self, prepare: Prepare, steps: int, *, is_traced: bool) -> None:
        run = prepare(self.places)
        for number in range(min(steps, SIMULATED)):
            self.places.begin_step(number)
            self._starts.append(len(self.tracker.events))
            self.tracker.keeps_operations = number == min(steps, SIMULATED) - 1
            with nullcontext() if is_traced else trusted_tensors():
                run()
            self.owners.note()
        self._end = len(self.tracker.events)  # what is freed from here on is freed by the end of the program

    def events(self) -> StepEvents:
        events = self.tracker.events
        ends = [*self._starts[1:], self._end]
        steps = [events[start:end] for start, end in zip(self._starts, ends, strict=True)]
        return StepEvents(events[: self._starts[0]], steps, {})

    def requests(self) -> list[Request]:
        died = {number: place for place, (number, size) in enumerate(self.tracker.events) if not size}
        ends = self._forward_ends()
        found = []
        for number, one in enumerate(self.tracker.allocations):
            passes = self._recomputed if one.is_recomputed else ends
            at = bisect_right(passes, one.born)
            outlives = at < len(passes) and died.get(number, self._end) >= passes[at]
            owner = find_owner(number, one, self.owners.known, outlives_forward=outlives)
            found.append(Request(one.bytes, one.operator, one.phase, one.module, one.step, owner))
        return found

    def _forward_ends(self) -> list[int]:
        """The number of events before the end of each forward pass."""
        changes = pairwise(self.tracker.allocations)
        found = [after.born for before, after in changes if before.phase == FORWARD != after.phase]
        return sorted([*found, *self._starts[1:], self._end])

    def _note_recomputed(self) -> None:
        self._recomputed.append(len(self.tracker.events))


def _simulate(prepare: Prepare, gpu: Accelerator, steps: int, *, is_traced: bool = False) -> Simulation:
    """With `is_traced`, libraries that ask do what they do under a compiler."""
    fake_cuda.enable()
    run = _Run(gpu)
    with (
        without_collector(),
        refusing(),
        pretended_gpu(gpu) as noticed,
        run.mode,
        run.tracker,
        run.places.watching(),
    ):
        run.follow(prepare, steps, is_traced=is_traced)
    requests = run.requests()
    events = repeat_steps(run.events(), steps, requests)
    return Simulation(
        gpu=gpu,
        steps=len(events.steps),
        parameter_sizes=list(_parameter_sizes(run.places)),
        memory=replay_memory(events, requests),
        operations=run.tracker.operations,
        assumptions=_state_assumptions(gpu, run.tracker, noticed),
        events=events,
        requests=requests,
        launched=tuple(sorted(noticed.launched)),
    )


def _parameter_sizes(places: ProgramPlaces) -> Iterator[ParameterSize]:
    seen: set[int] = set()
    for model in places.models.values():
        for name, one in model.named_parameters():
            if id(one) not in seen:
                seen.add(id(one))
                yield ParameterSize(name, one.numel(), one.dim() > 1)


def _state_assumptions(gpu: Accelerator, tracker: Tracker, noticed: Noticed) -> list[str]:
    """What the simulation took for granted, as sentences."""
    version = torch.__version__.partition("+")[0]
    found = [
        f"{gpu.name} with PyTorch {version}, one stream and the default settings of its allocator.",
        f"cuBLAS keeps {say_size(gpu.cublas_workspace_bytes)} for the main thread and for autograd's.",
        f"The CUDA context takes {say_size(gpu.context_bytes)}, apart from the allocator.",
    ]
    if not version.startswith("{}.{}.".format(*gpu.torch)):
        release = "{}.{}".format(*gpu.torch)
        found.append(f"scaled_dot_product_attention chooses kernels as PyTorch {release} does, which times are of.")
    if noticed.compiles:
        found.append("What `torch.compile` compiles is predicted as it runs without it.")
    libraries = {UNKNOWN_WORKSPACES[one.name] for one in tracker.operations if one.name in UNKNOWN_WORKSPACES}
    found += [f"Workspaces of {library} are not counted." for library in sorted(libraries)]
    if tracker.reads_values:
        found.append("The optimizer reads norms from the GPU; they are taken as 1, which changes no size.")
    return found + [f"scaled_dot_product_attention takes {SDPA_WORDS[kernel]}." for kernel in sdpa.chosen]


@contextmanager
def without_collector() -> Iterator[None]:
    """Without Python's garbage collector, which would free tensors in reference cycles at moments of its own."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

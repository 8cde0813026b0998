"""Runs a step with fake tensors on a GPU that is not there, and says what memory it takes.

The step is the real one: real autograd, autocast, optimizer and checkpointing, on tensors that have shapes and no
values. Its requests for memory, replayed through a model of PyTorch's allocator, give the peak; its operators are the
input of the time model.

Two steps are simulated, because an optimizer makes its state in the first one. More steps repeat the second.
"""

import gc
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from stepscope.planner import fake_cuda, sdpa
from stepscope.planner.assumptions import SDPA_WORDS, Accelerator
from stepscope.planner.kernel_memory import UNKNOWN_WORKSPACES
from stepscope.planner.operation import Operation, TensorFacts
from stepscope.planner.owners import MemoryOwners, find_owner
from stepscope.planner.places import FORWARD, LOSS, ProgramPlaces
from stepscope.planner.refusals import refusing
from stepscope.planner.replayed_memory import ReplayedMemory, Request, StepEvents, fits, repeat_steps, replay_memory
from stepscope.planner.stand_in.capture import pretended_capture
from stepscope.planner.stand_in.compiler import CannotCompile, Watching, pretended_compiler
from stepscope.planner.stand_in.gpu import GpuFakeMode, Noticed, pretended_gpu, trusted_tensors
from stepscope.planner.step_time.kernels_of import KernelModel
from stepscope.planner.step_time.measured_times import MeasuredTimes
from stepscope.planner.tracking import Tracker
from stepscope.recording.memory.allocator_model import MAIN
from stepscope.recording.rows.calibration import Calibration
from stepscope.spec import WHOLE_STEP, Workload, flag_of
from stepscope.step import Step, build
from stepscope.units import say_size

__all__ = ["Operation", "Simulation", "TensorFacts", "simulate_callable", "simulate_workload"]
LossFunction = Callable[[object, Any], Tensor]
Prepare = Callable[["_Run"], Callable[[], None]]
Compiler = Callable[[Accelerator, Watching], AbstractContextManager[None]]
SIMULATED = 2  # steps; the others repeat the last
_ONE_LAUNCH = "adamw-onelaunch"
_FUSED_UPDATE = "aten._fused_adamw_.default"
GRAPHS = (
    "The peak is that of the capture and the runs before it. Replays request no memory, so PyTorch's peak during "
    "them only shows what stays allocated between steps; the memory of the graphs stays reserved."
)


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


def simulate_workload(
    workload: Workload, gpu: Accelerator, steps: int = 3, calibration: Calibration | None = None
) -> Simulation:
    """Simulate steps of a workload as it would run on `gpu`. Operations are those of the eager step, from which the
    time model derives those of a compiled one. Memory is that of the step as it was asked for, or of the eager one if
    that cannot be simulated; the assumptions say so. The compiler makes choices by the times of a `calibration`."""
    plain = msgspec.structs.replace(workload, compile=False, device="auto", **dict.fromkeys(WHOLE_STEP, False))
    # `stepscope.fast` finds out that a mask hides only what comes later, and drops it.
    prepare = partial(_prepare, plain)
    simulation = _simulate(prepare, gpu, steps, is_traced=workload.compile and not workload.fuse)
    if workload.optimizer == _ONE_LAUNCH:
        simulation.operations = [_name_update(one) for one in simulation.operations]
    if workload.is_traced or workload.is_program:
        times = KernelModel(MeasuredTimes(calibration), tf32=workload.precision == "tf32") if calibration else None
        _follow_settings(simulation, workload, steps, times)
    return simulation


def _follow_settings(simulation: Simulation, workload: Workload, steps: int, times: KernelModel | None) -> None:
    """Replace the memory of the eager step by that of the compiled, rewritten or captured one."""
    asked = ", ".join(flag_of(name) for name in ("compile", *WHOLE_STEP) if getattr(workload, name))
    prepare = partial(_prepare, msgspec.structs.replace(workload, device="auto"))
    try:
        compiler = partial(pretended_compiler, times=times)
        found = _simulate(prepare, simulation.gpu, steps, is_traced=True, compiler=compiler)
    except CannotCompile as error:
        simulation.assumptions.append(f"Memory is that of the eager step, without {asked}: {error}.")
        return
    simulation.memory, simulation.events, simulation.requests = found.memory, found.events, found.requests
    simulation.steps = found.steps
    if workload.is_traced:
        version = torch.__version__.partition("+")[0]
        compiled = (
            f"Memory is that of the code that PyTorch {version} compiles for this GPU, with logging calls left out."
        )
        simulation.assumptions.append(compiled)
    if workload.graph:
        simulation.assumptions.append(GRAPHS)


def _prepare(workload: Workload, run: "_Run") -> Callable[[], None]:
    step = build(workload, torch.device("cuda", 0), captures=False)
    run.places.add_model(step.module)
    if step.program is not None:
        run.places.weights = step.program.weights
        if step.program.optimizer is not None:  # whose `step` may never be called
            run.places.optimizers[id(step.program.optimizer)] = step.program.optimizer
    step.measure_loss = _attributed(step.measure_loss, run.places)
    if workload.graph:
        step.capture()
        run.drawn = len(run.starts) - 1  # replays request nothing
    return partial(_run_phases, step, run.places)


def _name_update(operation: Operation) -> Operation:
    """Our own AdamW in one launch, which is simulated as PyTorch's fused one. That also takes a list of step counts."""
    if operation.name != _FUSED_UPDATE:
        return operation
    inputs = operation.inputs[: 4 * (len(operation.inputs) // 5)]
    return msgspec.structs.replace(operation, name="stepscope.adamw.default", inputs=inputs)


def simulate_callable(build: Callable[[], Callable[[], None]], gpu: Accelerator, steps: int = 3) -> Simulation:
    """Simulate any code. `build` makes the model on device `cuda` and returns a function that runs one step."""

    def prepare(_run: "_Run") -> Callable[[], None]:
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
        places.begin_phase(name)
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
        self.places.on_phase_start = self._note_phase
        self.places.on_phase_end = self.owners.note
        self.places.on_recomputed = self._note_recomputed
        self.starts: list[int] = []  # events before each step
        self.drawn = -1  # the step that the timeline shows
        self._phases: list[tuple[int, int, str]] = []  # each with its step, and the events before it
        self._recomputed: list[int] = []  # events before the end of each repeated forward pass

    def watching(self) -> AbstractContextManager[object]:
        """Watch what runs within this context."""
        stack = ExitStack()
        stack.enter_context(self.mode)
        stack.enter_context(self.tracker)
        return stack

    def begin_step(self) -> None:
        self.places.begin_step(len(self.starts))
        self.starts.append(len(self.tracker.events))

    def follow(self, prepare: Prepare, steps: int, *, is_traced: bool) -> None:
        run = prepare(self)
        for number in range(min(steps, SIMULATED)):
            self.begin_step()
            self.tracker.keeps_operations = number == min(steps, SIMULATED) - 1
            with nullcontext() if is_traced else trusted_tensors():
                run()
            self.owners.note()
        self._end = len(self.tracker.events)  # what is freed from here on is freed by the end of the program

    def events(self) -> StepEvents:
        events = self.tracker.events
        ends = [*self.starts[1:], self._end]
        steps = [events[start:end] for start, end in zip(self.starts, ends, strict=True)]
        pools = {number: one.pool for number, one in enumerate(self.tracker.allocations) if one.pool != MAIN}
        drawn = range(len(steps))[self.drawn]
        phases = tuple((place - self.starts[drawn], name) for number, place, name in self._phases if number == drawn)
        return StepEvents(events[: self.starts[0]], steps, {}, pools, self.drawn, phases)

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
        return sorted([*found, *self.starts[1:], self._end])

    def _note_phase(self, name: str) -> None:
        self._phases.append((len(self.starts) - 1, len(self.tracker.events), name))

    def _note_recomputed(self) -> None:
        self._recomputed.append(len(self.tracker.events))


def _simulate(
    prepare: Prepare, gpu: Accelerator, steps: int, *, is_traced: bool = False, compiler: Compiler | None = None
) -> Simulation:
    """With `is_traced`, libraries that ask do what they do under a compiler. With a `compiler`, what asks for it is
    compiled and captured."""
    fake_cuda.enable()
    run = _Run(gpu)
    with (
        without_collector(),
        refusing(),
        pretended_gpu(gpu) as noticed,
        nullcontext() if compiler is None else compiler(gpu, run.watching),
        nullcontext() if compiler is None else pretended_capture(run.tracker, run.places, run.begin_step),
        run.watching(),
        run.places.watching(modules=compiler is None),
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
        found.append(
            f"Attention kernels and workspaces are those of PyTorch {release}, with which times were measured."
        )
    if noticed.compiles:
        found.append("What `torch.compile` compiles is predicted as it runs without it.")
    libraries = {UNKNOWN_WORKSPACES[one.name] for one in tracker.operations if one.name in UNKNOWN_WORKSPACES}
    found += [f"Workspaces of {library} are not counted." for library in sorted(libraries)]
    if tracker.reads_values:
        found.append("The optimizer reads norms from the GPU; they are taken as 1, which changes no size.")
    return found + [f"scaled_dot_product_attention takes {SDPA_WORDS[kernel]}." for kernel in sdpa.chosen]


@contextmanager
def without_collector() -> Iterator[None]:
    """Without Python's garbage collector, which would free tensors in reference cycles at moments of its own. What is
    imported is scanned for garbage once per process: that takes as long as a small simulation."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

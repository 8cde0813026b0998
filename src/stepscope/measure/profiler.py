"""Records one case with PyTorch's profiler: the trace of a few annotated steps, and the overhead of recording them.

A profiler changes what it records. So the same step is timed in three ways with the same clock: unprofiled, with the
profiler, and with the profiler and annotations. The first is the reference for the recording; the differences are the
overhead of the profiler and of the annotations. The latter is small, so steps with and without annotations alternate:
changes on the machine affect both.

The profiler is slow at first, when it loads its libraries, and in the first step after it starts. Both are kept out of
the trace: one recording is discarded, and every recording begins with a step between `prepare_trace`, which starts the
profiler, and `start_trace`, from which events are kept.

A step in CUDA graphs is recorded once more at the end, without them: the graphs run the same kernels in the same order,
and show neither operators nor modules (`explain.trace.attribution.graphs`). Not before the capture, because the step is
timed before a profiler has run; and a recording of the capture would have no kernels, because none run then.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile

from stepscope.measure.compiled_code import CompiledCode, noting_compiled_code
from stepscope.measure.memory.limits import limit_memory
from stepscope.measure.soundness import MachineWatch, doubt_numbers, doubt_samples
from stepscope.measure.timing import Samples, settle_heap, time_in_turns, time_steps, wait_for
from stepscope.recording.rows.bench import RAW_TRACE_NAME, UNCAPTURED_TRACE_NAME, Doubt, RecordedRun
from stepscope.recording.rows.compiled_code import LOSS_MODULE, CompiledGraph, save_graphs
from stepscope.spec import Case
from stepscope.step import Step, build
from stepscope.step.annotation import annotated, check_functions
from stepscope.step.expert_routing import counting_tokens, find_experts

Stage = Literal[
    "importing",
    "building",
    "warming up",
    "timing",
    "starting the profiler",
    "measuring the overhead",
    "recording",
    "writing the trace",
    "recording a step without graphs",
]
OnStage = Callable[[Stage], None]


def record(
    case: Case,
    device: torch.device,
    *,
    functions: Sequence[str] = (),
    folder_raw: Path,
    record_steps: int = 3,
    with_stack: bool = False,
    on_stage: OnStage,
) -> RecordedRun:
    """Write the trace as `RAW_TRACE_NAME` to `folder_raw`. The process cannot be reused: one case, one process."""
    on_stage("importing")
    check_functions(functions, case.workload)
    with noting_compiled_code() if case.workload.hides_modules else nullcontext() as code:
        step = prepare(case, device, on_stage)
    on_stage("timing")
    plain, doubts = time_plainly(step, case)
    on_stage("starting the profiler")
    with annotated(step, functions=functions), _profiling(step, with_stack=with_stack):
        step.run()
    on_stage("measuring the overhead")
    with _profiling(step, with_stack=with_stack):
        recorded_ns, annotated_ns = time_in_turns(step, lambda: annotated(step, functions=functions), least=3, most=25)
    on_stage("recording")
    with annotated(step, functions=functions) as annotation, _profiling(step, with_stack=with_stack) as profiler:
        annotation.next_step = 0  # one step ran before the profiler kept events
        time_steps(step, record_steps)
    expert_tokens = _count_expert_tokens(step)
    on_stage("writing the trace")
    profiler.export_chrome_trace(str(folder_raw / RAW_TRACE_NAME))
    graphs = _name_graphs(code, step) if code is not None else ()
    save_graphs(folder_raw, graphs)
    notes = describe_gaps(step, annotation.uncalled, graphs=graphs, has_order=step.is_captured)
    if step.is_captured:
        on_stage("recording a step without graphs")
        _record_uncaptured(step, functions, folder_raw)
    return RecordedRun(
        clock="cuda events" if device.type == "cuda" else "host",
        phases_ns={name: tuple(values) for name, values in plain.phases_ns.items()},
        step_ns=tuple(plain.step_ns),
        recorded_step_ns=tuple(recorded_ns),
        annotated_step_ns=tuple(annotated_ns),
        parameters=step.parameters,
        sizes=step.sizes,
        optimizer=step.optimizer_name,
        doubts=doubts,
        notes=notes,
        expert_tokens=expert_tokens,
    )


def _record_uncaptured(step: Step, functions: Sequence[str], folder_raw: Path) -> None:
    """Write the trace of one step without its CUDA graphs."""
    step.release()
    with annotated(step, functions=functions), _profiling(step, with_stack=False) as profiler:
        step.run()
    profiler.export_chrome_trace(str(folder_raw / UNCAPTURED_TRACE_NAME))


def _count_expert_tokens(step: Step) -> dict[str, tuple[int, ...]]:
    """The tokens of each expert in one more step, if the model has experts."""
    experts = {} if step.workload.hides_modules else find_experts(step.module.named_modules())
    if not experts:
        return {}
    with counting_tokens(experts) as tokens:
        step.run()
    return tokens.count()


def _name_graphs(code: CompiledCode, step: Step) -> tuple[CompiledGraph, ...]:
    """A step that is traced as a whole includes the loss, which is in no module."""
    outside = LOSS_MODULE if step.workload.is_program else None
    return code.graphs((name for name, _ in step.module.named_modules()), outside=outside)


def prepare(case: Case, device: torch.device, on_stage: OnStage) -> Step:
    """Return the step, built and warmed up."""
    if case.timing.memory_limit is not None:
        limit_memory(device, case.timing.memory_limit)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    on_stage("building")
    step = build(case.workload, device)
    on_stage("warming up")
    settle_heap()
    time_steps(step, case.timing.warmup)
    return step


def time_plainly(step: Step, case: Case) -> tuple[Samples, tuple[Doubt, ...]]:
    """Return unprofiled step times, and what makes them unreliable."""
    watch = MachineWatch(step.device)
    samples = time_steps(step, case.timing.steps, after_step=watch.look)
    doubts = watch.doubts() + doubt_samples(samples, warmup=case.timing.warmup, waits=step.waits_inside)
    return samples, (*doubts, *doubt_numbers(step))


@contextmanager
def _profiling(step: Step, *, with_stack: bool) -> Iterator[_KinetoProfile]:
    """Keep events inside, up to the last kernel of the last step."""
    on_cuda = step.device.type == "cuda"
    profiler = _KinetoProfile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])],
        record_shapes=True,
        with_stack=with_stack,
        # Not `acc_events`: the profiler would turn every event into a Python object, which takes ten times as long as
        # the rest of stopping it, and nothing here reads them.
    )

    def warm_up() -> None:
        step.run()
        wait_for(step)

    with keeping_events(profiler, warm_up):
        yield profiler
        wait_for(step)


@contextmanager
def keeping_events(profiler: _KinetoProfile, warm_up: Callable[[], None] = lambda: None) -> Iterator[None]:
    """The profiler keeps events inside. `warm_up` runs after it has started and before it keeps events."""
    with warnings.catch_warnings():
        # torch 2.11 warns that events are kept for one cycle only; there is only one.
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
        profiler.prepare_trace()
        warm_up()
        profiler.start_trace()
    try:
        yield
    finally:
        profiler.stop_trace()


def describe_gaps(
    step: Step, uncalled: Sequence[str] | set[str], *, graphs: Sequence[CompiledGraph] = (), has_order: bool = False
) -> tuple[str, ...]:
    """What a recording lacks, in sentences: ranges, or settings that the step could not follow. `graphs` have the
    modules of compiled code. With `has_order`, the step is recorded without its CUDA graphs, too."""
    notes = [f"`{target}` was not annotated: nothing with that name ran" for target in sorted(uncalled)]
    if has_order:
        notes.append("captured in CUDA graphs: operators and modules are those of the same step without them")
    if graphs:
        notes.append("compiled: a kernel that computes parts of several modules counts for the one with most of them")
    elif (step.workload.is_traced and step.workload.is_program) or (step.is_captured and not has_order):
        notes.append("traced or captured as a whole: only the step and its phases are annotated")
    elif step.workload.compile:
        notes.append("compiled: only the step, its phases and the whole model are annotated")
    return (*notes, *(remark.text for remark in step.remarks))

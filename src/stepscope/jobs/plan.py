"""`stepscope plan`: predicts the memory and time of steps on a GPU that need not be there.

Every step is simulated in a process of its own, forked from one that has imported torch. The simulation makes PyTorch
believe in a GPU, which must not happen to a process that does anything else.
"""

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

import msgspec

import stepscope
from stepscope import cost
from stepscope.errors import StepscopeError
from stepscope.explain.commands import write_command
from stepscope.hardware import Hardware, known
from stepscope.jobs.experiments.sweep import PlannedCase
from stepscope.jobs.plan_search import OutOfTimeError
from stepscope.jobs.plan_target import Target, find_here, make_target, open_target
from stepscope.jobs.recorders.recording_job import explain_failure
from stepscope.jobs.workers.messages import PredictStep, StepPredicted
from stepscope.jobs.workers.process import Died, OnStage, Workers, require_torch
from stepscope.recording.rows.bench import PredictedCase
from stepscope.recording.rows.plan_result import ALONE, PlannedRanks, PlanResult, StepPrediction, judge_fit
from stepscope.spec import Case, Factory, Grid, HuggingFace, SpecError, Timing, Workload, flag_of
from stepscope.units import say_bytes

_WITHOUT_EFFECT = {
    "steps": "a simulated step has no noise to average",
    "warmup": "a simulated step needs no warm-up",
    "memory_limit": "--memory says how much there is",
}
Answers = list[PlanResult | StepscopeError]
_MODULES = ("stepscope.planner.prediction",)
_MOST_AT_ONCE = 4
_LOOK_S = 0.1  # between looks for Ctrl-C


class Planner:
    """Predicts steps on one GPU. Each workload is simulated once; up to `at_once` at the same time. After `limit_s`,
    there are no more predictions, but an `OutOfTimeError` for each workload."""

    def __init__(
        self,
        target: Target,
        *,
        on_stage: OnStage = lambda _: None,
        at_once: int = 1,
        limit_s: float | None = None,
    ) -> None:
        self.target = target
        self._on_stage = on_stage
        self._limit_s = limit_s
        self._began_s = time.monotonic()
        # Threads that live as long as their processes: Linux kills those whose thread has ended.
        self._threads = ThreadPoolExecutor(min(at_once, _MOST_AT_ONCE))
        self._idle: SimpleQueue[Workers] = SimpleQueue()
        self._all: list[Workers] = []
        self._started: list[Future[Answers]] = []
        self._known: dict[tuple[Workload, tuple[PlannedRanks, ...]], Answers] = {}

    @property
    def simulations(self) -> int:
        return len(self._known)

    def __enter__(self) -> Self:
        require_torch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        running = [one for one in self._started if not one.cancel()]
        while wait(running, timeout=_LOOK_S).not_done:
            for workers in self._all:
                workers.kill()
        self._threads.shutdown()
        for workers in self._all:
            workers.__exit__(kind, error, traceback)

    def predict(self, workload: Workload, ranks: PlannedRanks = ALONE) -> PlanResult:
        """Predict a step whose batch is shared by `ranks`. Raise StepscopeError if it cannot be simulated."""
        (found,) = self.predict_shares(_share(workload, ranks), [ranks])
        if isinstance(found, StepscopeError):
            raise found
        return found

    def predict_all(self, workloads: Sequence[Workload]) -> Answers:
        """The predictions, or why there is none, in the order of the workloads. Raise StepscopeError if the process of
        one died, which says nothing about its workload."""
        return [answer for answers in self._predict([(one, (ALONE,)) for one in workloads]) for answer in answers]

    def predict_shares(self, workload: Workload, choices: Sequence[PlannedRanks]) -> Answers:
        """The same if each of several GPUs has the batch of the workload, from one simulation for all choices."""
        (answers,) = self._predict([(workload, tuple(choices))])
        return answers

    def _predict(self, wanted: Sequence[tuple[Workload, tuple[PlannedRanks, ...]]]) -> list[Answers]:
        missing = [one for one in dict.fromkeys(wanted) if one not in self._known]
        started = [self._threads.submit(self._simulate, one) for one in missing]
        self._started += started
        self._known |= {one: _await(future) for one, future in zip(missing, started, strict=True)}
        return [self._known[one] for one in wanted]

    def _simulate(self, wanted: tuple[Workload, tuple[PlannedRanks, ...]]) -> Answers:
        workload, choices = wanted
        left_s = None if self._limit_s is None else self._limit_s + self._began_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            return [OutOfTimeError(f"not simulated within {self._limit_s:g} s")] * len(choices)
        workers = self._take(workload)
        case = Case(workload=workload, timing=Timing())
        ended = workers.run(ask_for(case, self.target, choices), on_stage=self._on_stage, timeout_s=left_s)
        self._idle.put(workers)
        if isinstance(ended.answer, StepPredicted):
            return [assemble(one, self.target) for one in ended.answer.predictions]
        if isinstance(ended.answer, Died) and ended.answer.status == "timeout":
            return [OutOfTimeError(f"not simulated within {self._limit_s:g} s")] * len(choices)
        failure = explain_failure(ended, case, "predicted")
        if isinstance(ended.answer, Died):
            raise failure
        return [failure] * len(choices)

    def _take(self, workload: Workload) -> Workers:
        """Processes that nobody uses."""
        try:
            return self._idle.get_nowait()
        except Empty:
            return self._start(workload)

    def _start(self, workload: Workload) -> Workers:
        more = ["transformers.modeling_utils"] if _needs_transformers(workload) else []
        if workload.is_traced:
            more.append("torch._inductor.compile_fx")
        # Threads of libraries would only wait for each other: simulated tensors have no values to compute.
        workers = Workers((*_MODULES, *more), is_serial=True)
        self._all.append(workers)
        return workers


def _await(future: Future[Answers]) -> Answers:
    """The result. Polars makes system calls go on after Ctrl-C, so one long wait would end only with the simulation."""
    while not wait([future], timeout=_LOOK_S).done:
        pass
    return future.result()


def _needs_transformers(workload: Workload) -> bool:
    """Whether a model is one of `transformers`, whose import takes as long as a simulation. A process that has it
    imported without need is only larger."""
    model = workload.model
    if not isinstance(model, Factory):
        return isinstance(model, HuggingFace)
    file = Path(model.target.rpartition(":")[0])
    return file.is_file() and b"transformers" in file.read_bytes()


def _share(workload: Workload, ranks: PlannedRanks) -> Workload:
    """The workload of one rank."""
    if workload.batch % ranks.count:
        raise SpecError(
            f"batch `{workload.batch}` cannot be split evenly over {ranks.count} ranks",
            detail="every rank gets the same number of sequences",
            hint=f"--batch {math.ceil(workload.batch / ranks.count) * ranks.count}",
        )
    return msgspec.structs.replace(workload, batch=workload.batch // ranks.count)


def ask_for(case: Case, target: Target, ranks: tuple[PlannedRanks, ...] = (ALONE,)) -> PredictStep:
    return PredictStep(case=case, gpu=target.accelerator, calibration=target.calibration, ranks=ranks)


def assemble(prediction: StepPrediction, target: Target) -> PlanResult:
    """The document: a prediction, compared with the memory and the peak of the GPU."""
    workload, time = prediction.workload, prediction.time
    verdict = judge_fit(prediction, target.planned.memory_bytes)
    step_s = time.step_ns / 1e9 if time is not None else None
    return PlanResult(
        workload=workload,
        gpu=target.planned,
        command=f"{write_command('plan', workload)} {target.flags}{prediction.ranks.flags}",
        fits=verdict == "fits",
        verdict=verdict,
        margin_bytes=target.planned.memory_bytes - prediction.reserved_bytes[1] - prediction.context_bytes,
        peak_allocated_bytes=prediction.peak_allocated_bytes,
        peak_requested_bytes=prediction.peak_requested_bytes,
        reserved_bytes=prediction.reserved_bytes,
        context_bytes=prediction.context_bytes,
        workspace_bytes=prediction.workspace_bytes,
        peak_phase=prediction.peak_phase,
        step_ns=time.step_ns if time is not None else None,
        step_ns_interval=time.interval_ns if time is not None else None,
        bound=time.bound if time is not None else None,
        mfu=_mfu(prediction, target.hardware, step_s),
        tokens_per_s=workload.tokens / step_s if step_s and prediction.has_tokens else None,
        parameters=prediction.parameters,
        categories=prediction.categories,
        phases=prediction.phases,
        modules=prediction.modules,
        assumptions=(*target.remarks, *prediction.assumptions),
        ranks=prediction.ranks,
        time=time,
        timeline=prediction.timeline,
        versions=prediction.versions | {"stepscope": stepscope.__version__},
    )


def _mfu(prediction: StepPrediction, hardware: Hardware, step_s: float | None) -> float | None:
    peak = hardware.peak_flops.get(prediction.workload.precision)
    if prediction.forward_flops is None or peak is None or not step_s:
        return None
    return cost.step_flops(prediction.forward_flops, prediction.workload.mode) / prediction.ranks.count / step_s / peak


def predict_here(planned: PlannedCase[Case], workers: Workers) -> tuple[PredictedCase | None, str]:
    """The prediction for a case on the GPU of this machine, and why it cannot fit; empty if it may. None if the model
    cannot be simulated: then only running it shows. Raise StepscopeError if the case is not for a known GPU."""
    here = None if planned.environment.device == "cpu" else find_here(workers)
    if here is None:
        raise StepscopeError(
            f"nothing can be predicted for `{planned.environment.driver_name}`",
            detail=f"expected one of {', '.join(one.name for one in known())}",
            hint="remove --predict and --skip-oom",
        )
    target = make_target(here, planned.case.timing.memory_limit, is_here=True)
    answer = workers.run(ask_for(planned.case, target)).answer
    if not isinstance(answer, StepPredicted):
        return None, ""
    (prediction,) = answer.predictions
    result = assemble(prediction, target)
    predicted = PredictedCase(
        peak_allocated_bytes=result.peak_allocated_bytes,
        reserved_bytes=result.reserved_bytes,
        step_ns=result.step_ns,
        step_ns_interval=result.step_ns_interval,
    )
    return predicted, say_excess(result)


def say_excess(result: PlanResult) -> str:
    """Why a step cannot fit, even if memory is not fragmented at all; empty if it may fit."""
    if result.verdict != "does not fit":
        return ""
    peak, memory = say_bytes(result.peak_allocated_bytes), say_bytes(result.gpu.memory_bytes)
    return f"not run: predicted to allocate {peak} of {memory}"


def check_plan_settings(grid: Grid) -> None:
    """Reject a setting that would be ignored."""
    for name, values in grid.axes:
        if name in _WITHOUT_EFFECT:
            raise StepscopeError(
                f"`{flag_of(name)}` has no effect here", detail=_WITHOUT_EFFECT[name], hint=f"remove {flag_of(name)}"
            )
        if name == "device" and "cpu" in values:
            raise StepscopeError("device `cpu` cannot be planned for", detail="expected a GPU", hint="--gpu H200")


def plan_grid(
    grid: Grid,
    *,
    gpu: str | None = None,
    memory_bytes: int | None = None,
    calibration: Path | None = None,
    ranks: PlannedRanks = ALONE,
    on_stage: OnStage = lambda _: None,
) -> tuple[PlanResult, ...]:
    """A prediction for every workload of a grid. Raise StepscopeError for the first that cannot be simulated."""
    check_plan_settings(grid)
    cases = grid.cases()
    with Planner(open_target(gpu, memory_bytes, calibration), on_stage=on_stage) as planner:
        return tuple(planner.predict(case.workload, ranks) for case in cases)

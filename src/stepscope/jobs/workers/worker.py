"""What a worker does: serve one request, then exit.

It runs only one case, so whatever the case does (run out of memory, crash, hang, leave a GPU in a bad state) ends with
it.
"""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from stepscope.errors import StepscopeError
from stepscope.jobs.workers.messages import (
    Answer,
    AttentionDone,
    AttentionMeasured,
    BeRank,
    ChangeMeasured,
    ComparePrecisions,
    Failed,
    Inspect,
    Inspected,
    MeasureAttention,
    MeasureStep,
    MemoryRecorded,
    OptimiseStep,
    OutOfMemory,
    PrecisionsCompared,
    PredictStep,
    ProbeCases,
    Probed,
    ProbedModel,
    RankMessage,
    Record,
    RecordMemory,
    Request,
    StageReached,
    StepMeasured,
    StepOptimised,
    StepPredicted,
    StepsRecorded,
)
from stepscope.measure.failures import is_out_of_memory, say_in_a_line
from stepscope.spec import DEFAULT_CONTEXT, Case, Factory, HuggingFace, ModelShape, Workload

if TYPE_CHECKING:
    import torch

# What PyTorch says if a model creates a tensor without a device, which only fails on a GPU, also on a simulated one.
_OTHER_DEVICE = "Expected all tensors to be on the same device"
_OTHER_DEVICE_HINT = "create it on the device of the input, such as torch.arange(length, device=x.device)"


def serve(request_fd: int, answer_fd: int) -> NoReturn:
    with os.fdopen(request_fd, "rb") as questions:
        request = msgspec.json.decode(questions.read(), type=Request | BeRank)

    def tell(answer: Answer | RankMessage) -> None:
        content = msgspec.json.encode(answer) + b"\n"
        while content:
            content = content[os.write(answer_fd, content) :]

    code = 0
    if isinstance(request, BeRank):
        from stepscope.jobs.workers.rank import serve_rank

        code = serve_rank(request, tell)
    else:
        tell(_answer(request, tell))
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's own shutdown: a GPU library that crashes while unloading would spoil a good result, and
    # backend threads that wait for a dead peer would block it.
    os._exit(code)


def _answer(request: Request, tell: Callable[[Answer], None]) -> Answer:
    """The process boundary: every exception of a model, driver or library becomes an answer. Nothing is swallowed."""
    stage = "starting"

    def on_stage(name: str) -> None:
        nonlocal stage
        stage = name
        tell(StageReached(name=name))

    try:
        return _serve(request, on_stage, tell)
    except StepscopeError as error:
        return Failed(message=error.message, detail=error.detail, hint=error.hint, bad_input=True)
    except BaseException as error:  # noqa: BLE001  # a model may call sys.exit, too
        traceback.print_exc()
        return _explain_failure(error, request, stage)


def _serve(request: Request, on_stage: Callable[[str], None], tell: Callable[[Answer], None]) -> Answer:
    match request:
        case ProbeCases():
            return _probe(request, on_stage)
        case MeasureStep(case=case):
            from stepscope.measure.bench import measure

            measurement, doubts = measure(case, _device_of(case), on_stage=on_stage)
            return StepMeasured(measurement=measurement, doubts=doubts)
        case Record(case=case):
            from stepscope.measure.profiler import record

            run = record(
                case,
                _device_of(case),
                functions=request.functions,
                folder_raw=Path(request.folder),
                record_steps=request.steps,
                with_stack=request.stacks,
                on_stage=on_stage,
            )
            return StepsRecorded(run=run)
        case ComparePrecisions(case=case, precisions=precisions):
            from stepscope.measure.precision.comparison import compare_precisions

            comparison = compare_precisions(case, precisions, _device_of(case), on_stage=on_stage)
            return PrecisionsCompared(comparison=comparison)
        case RecordMemory(case=case):
            from stepscope.measure.memory.recorder import record_memory

            recorded = record_memory(case, _device_of(case), folder=Path(request.folder), on_stage=on_stage)
            return MemoryRecorded(run=recorded)
        case MeasureAttention(cases=cases):
            from stepscope.measure.attention.cases import measure_cases

            for outcome in measure_cases(cases, on_stage=on_stage):
                tell(AttentionMeasured(outcome=outcome))
            return AttentionDone()
        case OptimiseStep(case=case):
            from stepscope.measure.optimisation import optimise_case

            optimise_case(
                case,
                _device_of(case),
                on_stage=on_stage,
                on_change=lambda change: tell(ChangeMeasured(change=change)),
                compiler=request.compiler,
            )
            return StepOptimised()
        case PredictStep(case=case, gpu=gpu):
            from stepscope.measure.environment import check_torch
            from stepscope.planner.prediction import predict_workload

            check_torch()
            workload = _with_context(case.workload, _check_model(case, on_stage))
            predictions = predict_workload(workload, gpu, request.calibration, request.ranks, on_stage=on_stage)
            return StepPredicted(predictions=predictions)
        case Inspect():
            from stepscope.measure.environment import inspect_torch

            return Inspected(inspection=inspect_torch())


def _device_of(case: Case) -> "torch.device":
    import torch

    return torch.device(case.workload.device)


def _probe(request: ProbeCases, on_stage: Callable[[str], None]) -> Probed:
    from stepscope.measure.environment import check_torch, describe, resolve_device

    check_torch()
    device = resolve_device(request.cases[0].workload.device)
    models = tuple(_check_model(case, on_stage) for case in request.cases)
    on_stage("probing the device")
    return Probed(environment=describe(device, {case.workload.precision for case in request.cases}), models=models)


def _check_model(case: Case, on_stage: Callable[[str], None]) -> ProbedModel:
    """Check everything about a custom model that can be rejected before it is built."""
    from stepscope.step import hf, own

    on_stage(f"importing `{case.workload.model.name}`")
    match case.workload.model:
        case Factory() as factory:
            takes_context = own.check_arguments(case.workload, factory, own.load_factory(factory))
            return ProbedModel(source=own.source_digest(), takes_context=takes_context)
        case HuggingFace() as spec:
            digest, takes_context = hf.check_config(case.workload, spec)
            return ProbedModel(source=digest, takes_context=takes_context)
        case ModelShape():
            return ProbedModel(source=None, takes_context=True)


def _with_context(workload: Workload, model: ProbedModel) -> Workload:
    context = workload.context or (DEFAULT_CONTEXT if model.takes_context else 0)
    return msgspec.structs.replace(workload, context=context)


def _explain_failure(error: BaseException, request: Request, stage: str) -> OutOfMemory | Failed:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return Failed(
            message="cannot import torch",
            detail=say_in_a_line(error),
            hint="pip install 'stepscope[train]'",
            bad_input=True,
        )
    if is_out_of_memory(error):
        return OutOfMemory(reason=say_in_a_line(error))
    match request:
        case ProbeCases() | Record() | PredictStep() if stage.startswith("importing"):
            doing = f"{stage} raised "
        case (
            MeasureStep(case=case)
            | Record(case=case)
            | RecordMemory(case=case)
            | ComparePrecisions(case=case)
            | OptimiseStep(case=case)
        ) if stage == "building" and not isinstance(case.workload.model, ModelShape):
            doing = f"building `{case.workload.model.name}` raised "
        case PredictStep(case=case):
            doing = f"simulating `{case.workload.model.name}` raised "
        case _:
            doing = ""
    blamed = _blame(error)
    hint = _OTHER_DEVICE_HINT if blamed and _OTHER_DEVICE in str(error) else ""
    return Failed(message=doing + say_in_a_line(error), detail=blamed, hint=hint, bad_input=bool(doing))


def _blame(error: BaseException) -> str:
    """Return the innermost line that is neither ours nor an installed package's: the user's code, if there is any."""
    ours = Path(__file__).parents[2]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if ours not in Path(frame.filename).parents
        and "site-packages" not in frame.filename
        and Path(frame.filename).is_file()
        and Path(sys.base_prefix) not in Path(frame.filename).parents
    ]
    if not frames:
        return ""
    file = Path(frames[-1].filename)
    near = file.relative_to(Path.cwd()) if Path.cwd() in file.parents else Path(file.name)
    return f"at {near}:{frames[-1].lineno} in {frames[-1].name}"

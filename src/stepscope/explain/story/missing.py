"""What was not measured: why, and the command that measures it. A page lists all of it in one section near its end."""

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from stepscope.explain.commands import OWN_MODEL, write_command
from stepscope.explain.experiments.attention_shapes import AttentionShape, find_attention_shape
from stepscope.explain.story.commands import find_case
from stepscope.explain.story.script import find_loop
from stepscope.explain.story.sources import Materials
from stepscope.findings import STAGES, Missing, Section
from stepscope.spec import Case, ModelShape, Precision, for_precisions
from stepscope.units import say_list

Stage = Literal["profile", "memory", "precision", "attention", "plan"]
NOT_MEASURED = "not-measured"  # the key of the section
_LAST = "environment"


def gather_missing(sections: Sequence[Section]) -> tuple[Section, ...]:
    """The sections that have something to show, and before the last one a section that lists what none of them has.
    Parts that one command measures share a line."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for section in sections:
        for one in section.missing:
            whats = reasons.setdefault((one.why, one.command), [])
            whats += [one.what] if one.what not in whats else []
    lines = tuple(Missing(what=say_list(whats), why=why, command=command) for (why, command), whats in reasons.items())
    shown = [msgspec.structs.replace(one, missing=()) for one in sections if one.exhibits or one.lead]
    listed = [Section(key=NOT_MEASURED, title="Not measured", missing=lines)] if lines else []
    place = next((at for at, one in enumerate(shown) if one.key == _LAST), len(shown))
    return (*shown[:place], *listed, *shown[place:])


def explain_absence(materials: Materials, stage: Stage, what: str = "") -> Missing:
    """Why a stage is missing: the reason in `absent`, or what the files show. `what` is the missing part of the
    stage."""
    found = materials.absent.get(stage)
    if found is not None:
        return Missing(what=what, why=found.why, command=found.command) if what else found
    return Missing(what=what or STAGES[stage].shows, why=_why(materials, stage), command=command_for(materials, stage))


def _why(materials: Materials, stage: Stage) -> str:
    if materials.is_partial:
        return "the run was interrupted before this stage"
    if (loop := find_loop(materials)) is not None:
        return _why_not_in_script(loop.script, stage)
    is_foreign = any(
        one is not None and one.recording.manifest.case is None for one in (materials.profile, materials.memory)
    )
    if not is_foreign:
        return "this stage was not run"
    match stage:
        case "profile":
            return "this file has no kernel trace"
        case "memory":
            return "this file has no memory history"
        case _:
            return "this needs the model itself, which the file does not include"


def _why_not_in_script(script: str, stage: Stage) -> str:
    match stage:
        case "profile":
            return f"no step of `{script}` was recorded"
        case "memory":
            return f"no memory history of `{script}` was recorded"
        case "precision":
            return (
                f"`{script}` was recorded as it is; comparing precisions runs the model in each of them, from a "
                "function that returns the model, its input and its loss"
            )
        case "attention":
            return f"`{script}` was recorded as it is; attention is compared on its own, with the sizes of a run"
        case "plan":
            return (
                f"`{script}` was recorded as it is; predicting other settings needs a function that returns the model, "
                "its input and its loss"
            )


def command_for(materials: Materials, stage: Stage) -> str:
    """The complete command for a run of stepscope; for a foreign file, a command for the user's own model."""
    case = find_case(materials)
    shape = find_attention_shape(materials.profile.recording) if stage == "attention" and materials.profile else None
    if shape is not None and (case is None or not isinstance(case.workload.model, ModelShape)):
        return _measure_attention(shape)
    if case is not None:
        return _command_of(case, stage)
    if materials.profile is None and materials.memory is None and not materials.attention:
        return materials.command
    match stage:
        case "profile":
            return f"stepscope profile {OWN_MODEL}"
        case "memory" if materials.profile is not None and materials.profile.on_cpu:
            return f"stepscope memory {OWN_MODEL}"
        case "memory":
            return (
                'torch.cuda.memory._record_memory_history(); step(); torch.cuda.memory._dump_snapshot("memory.pickle")'
            )
        case "precision" | "plan":
            return f"stepscope {stage} {OWN_MODEL}"
        case "attention":
            return "stepscope attention"


def _measure_attention(shape: AttentionShape) -> str:
    sizes = f"--batch {shape.batch} --heads {shape.heads} --head-dim {shape.head_dim} --length {shape.length}"
    precision = f" --precision {shape.dtype}" if shape.dtype in get_args(Precision) else ""
    return f"stepscope attention {sizes}{precision}{'' if shape.is_causal else ' --no-causal'}"


def _command_of(case: Case, stage: Stage) -> str:
    workload = case.workload
    match stage:
        case "attention":
            head_dim = getattr(workload.model, "head_dim", None)
            sizes = f" --head-dim {head_dim} --length {workload.context}" if head_dim else ""
            return f"stepscope attention{sizes}"
        case "precision":
            return write_command(stage, for_precisions(workload))
        case "plan":
            gpu = " --gpu H200" if workload.device == "cpu" else ""
            return f"{write_command(stage, workload, without=('device',))}{gpu}"
        case _:
            return write_command(stage, workload)

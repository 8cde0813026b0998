"""What to say where a stage is missing: what would stand there, why it does not, and the command that brings it."""

from typing import Literal

from stepscope.explain.commands import write_command
from stepscope.explain.story.commands import find_case
from stepscope.explain.story.sources import Materials
from stepscope.findings import STAGES, Missing
from stepscope.spec import Case, for_precisions

Stage = Literal["profile", "memory", "precision", "attention"]
_OWN = "--model my_model:build"  # how a model of one's own is named


def explain_absence(materials: Materials, stage: Stage, what: str = "") -> Missing:
    """As `absent` has it; else by what there is instead. `what` is the part of a stage that would stand there."""
    found = materials.absent.get(stage)
    if found is not None:
        return Missing(what=what, why=found.why, command=found.command) if what else found
    return Missing(what=what or STAGES[stage].shows, why=_why(materials, stage), command=command_for(materials, stage))


def _why(materials: Materials, stage: Stage) -> str:
    if materials.is_partial:
        return "the run was interrupted before this stage"
    has = [
        name
        for name, one in (("kernels", materials.profile), ("memory", materials.memory))
        if one is not None and one.recording.manifest.case is None
    ]
    if has and stage in ("profile", "memory"):
        other = "no kernels" if stage == "profile" else "no memory"
        return f"the file holds {has[0]} and {other}" if stage == "profile" else f"the file holds {other}"
    if has:
        return "the file does not hold the model, which would have to run again"
    return "this stage was not run"


def command_for(materials: Materials, stage: Stage) -> str:
    """For a run of ours the whole command; else the one for a model of one's own, or what PyTorch has."""
    case = find_case(materials)
    if case is not None:
        return _command_of(case, stage)
    if materials.profile is None and materials.memory is None and not materials.attention:
        return materials.command
    match stage:
        case "profile":
            return f"stepscope profile {_OWN}"
        case "memory":
            return (
                'torch.cuda.memory._record_memory_history(); step(); torch.cuda.memory._dump_snapshot("memory.pickle")'
            )
        case "precision":
            return f"stepscope precision {_OWN}"
        case "attention":
            return "stepscope attention"


def _command_of(case: Case, stage: Stage) -> str:
    workload = case.workload
    match stage:
        case "attention":
            head_dim = getattr(workload.model, "head_dim", None)
            sizes = f" --head-dim {head_dim} --length {workload.context}" if head_dim else ""
            return f"stepscope attention{sizes}"
        case "precision":
            return write_command(stage, for_precisions(workload))
        case _:
            return write_command(stage, workload)

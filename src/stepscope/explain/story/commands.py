"""Commands to type: a workload as the flags that make it again, for any verb that takes settings."""

import shlex

import msgspec

from stepscope.explain.story.sources import Materials, is_same_run
from stepscope.findings import Copyable
from stepscope.spec import SIZES, Case, Factory, HuggingFace, ModelShape, Workload
from stepscope.spec.choices import flag_of

# Settings that a command may name itself, at values for which `write_command` leaves their flags out.
_CHANGED_BY: dict[str, object] = {"mode": "train", "attention": None, "compile": False, "precision": "fp32"}
_SHAPE = ("d_model", "d_ff", "num_layers", "num_heads")


def find_case(materials: Materials) -> Case | None:
    """What ran, from whatever says so."""
    if materials.bench:
        return materials.bench[0].case
    for one in (materials.profile, materials.memory):
        if one is not None and one.recording.manifest.case is not None:
            return one.recording.manifest.case
    return materials.precision.case if materials.precision else None


def find_strangers(materials: Materials) -> dict[str, Case]:
    """Recordings that are of another case than the run, by what they hold: people may put any files together."""
    run = find_case(materials)
    cases = {
        name: one.recording.manifest.case
        for name, one in (("profile", materials.profile), ("memory", materials.memory))
        if one is not None
    }
    return {name: case for name, case in cases.items() if case and run and not is_same_run(case, run)}


def write_command(verb: str, workload: Workload, **changes: object) -> str:
    """The command that runs a workload, with some settings changed. Settings at their defaults are left out; the
    context is not, because verbs differ in theirs."""
    changed = msgspec.structs.replace(workload, **changes)
    flags = [*_model_flags(changed), *_run_flags(changed)]
    return shlex.join(["stepscope", verb, *flags])


def add_settings(command: str, workload: Workload) -> str:
    """A command, or several after one another, with the settings of a workload that it does not name itself."""
    return " && ".join(_add_settings(one, workload) for one in command.split(" && "))


def _add_settings(command: str, workload: Workload) -> str:
    words = command.split(" ")
    if words[:1] != ["stepscope"] or words[1:2] not in (["profile"], ["memory"]) or "--size" in words:
        return command
    changes = {name: value for name, value in _CHANGED_BY.items() if flag_of(name) in words}
    return " ".join([write_command(words[1], workload, **changes), *words[2:]])


def _model_flags(workload: Workload) -> list[str]:
    model = workload.model
    match model:
        case ModelShape():
            return _shape_flags(model)
        case Factory():
            own = ["--model", model.target]
        case HuggingFace():
            own = ["--hf", model.config]
    return own + [part for name, value in model.arguments for part in ("--set", f"{name}={_say(value)}")]


def _shape_flags(shape: ModelShape) -> list[str]:
    if shape.name in SIZES:
        flags = ["--size", shape.name]
    else:
        flags = [part for name in _SHAPE for part in (flag_of(name), str(getattr(shape, name)))]
        if shape.num_kv_heads != shape.num_heads:
            flags += ["--num-kv-heads", str(shape.num_kv_heads)]
        if shape.tie_embeddings:
            flags += ["--tie-embeddings", "yes"]
    return flags + (["--vocab", str(shape.vocab)] if shape.vocab != SIZES["nano"].vocab else [])


def _run_flags(workload: Workload) -> list[str]:
    plain = Workload(model=workload.model)
    flags = []
    for name in ("batch", "context", "precision", "mode", "attention", "compile", "checkpoint", "optimizer", "seed"):
        value = getattr(workload, name)
        if value and (name == "context" or value != getattr(plain, name)):
            flags += [flag_of(name)] if value is True else [flag_of(name), _say(value)]
    if workload.device not in ("auto", "cuda", "cuda:0"):
        flags += ["--device", workload.device]
    return flags


def _say(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def list_commands(materials: Materials) -> tuple[Copyable, ...]:
    """What was typed, each once: for the whole report first, then for its parts."""
    manifests = [one.recording.manifest for one in (materials.profile, materials.memory) if one is not None]
    typed = [("this report", materials.command)]
    typed += [("the timing", row.command) for row in materials.bench[:1]]
    typed += [("the memory" if one.memory else "the recording", one.command) for one in manifests]
    typed += [("the precisions", materials.precision.command)] if materials.precision else []
    typed += [("attention", row.command) for row in materials.attention[:1]]
    texts: dict[str, str] = {}
    for label, text in typed:
        if text:
            texts.setdefault(text, label)
    return tuple(Copyable(label=label, text=text) for text, label in texts.items())

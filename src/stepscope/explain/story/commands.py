"""Commands to type: a workload as flags, for any verb that takes settings."""

import shlex
from collections.abc import Collection

from stepscope.explain.story.sources import Materials, is_same_run
from stepscope.findings import Copyable
from stepscope.spec import (
    RUN_SETTINGS,
    SHAPE_SETTINGS,
    SIZES,
    Case,
    Factory,
    HuggingFace,
    ModelShape,
    Workload,
    flag_of,
)


def find_case(materials: Materials) -> Case | None:
    """The case that ran, from the first part of the run that has one."""
    if materials.bench:
        return materials.bench[0].case
    for one in (materials.profile, materials.memory):
        if one is not None and one.recording.manifest.case is not None:
            return one.recording.manifest.case
    return materials.precision.case if materials.precision else None


def find_strangers(materials: Materials) -> dict[str, Case]:
    """The cases of recordings that do not belong to the run, by kind: users can combine any files."""
    run = find_case(materials)
    cases = {
        name: one.recording.manifest.case
        for name, one in (("profile", materials.profile), ("memory", materials.memory))
        if one is not None
    }
    return {name: case for name, case in cases.items() if case and run and not is_same_run(case, run)}


def write_command(verb: str, workload: Workload, *, without: Collection[str] = ()) -> str:
    """The command that runs a workload, without the settings in `without` and those at their defaults. The context is
    always included, because its default differs between verbs."""
    return shlex.join(["stepscope", verb, *_model_flags(workload), *_run_flags(workload, without)])


def add_settings(command: str, workload: Workload) -> str:
    """A command, or several joined with `&&`, plus the workload settings that it does not set itself."""
    return " && ".join(_add_settings(one, workload) for one in command.split(" && "))


def _add_settings(command: str, workload: Workload) -> str:
    words = command.split(" ")
    if words[:1] != ["stepscope"] or words[1:2] not in (["profile"], ["memory"]) or "--size" in words:
        return command
    named = [name for name in RUN_SETTINGS if flag_of(name) in words]
    return " ".join([write_command(words[1], workload, without=named), *words[2:]])


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
        usual = {"num_kv_heads": shape.num_heads}  # by default every head has its own keys and values
        flags = [
            part
            for name, setting in SHAPE_SETTINGS.items()
            if name not in ("size", "vocab") and getattr(shape, name) != usual.get(name, setting.default)
            for part in (flag_of(name), str(setting.read(shape)))
        ]
    return flags + (["--vocab", str(shape.vocab)] if shape.vocab != SIZES["nano"].vocab else [])


def _run_flags(workload: Workload, without: Collection[str]) -> list[str]:
    plain = Workload(model=workload.model)
    flags = []
    for name in RUN_SETTINGS:
        value = getattr(workload, name)
        is_said = value and (name == "context" or value != getattr(plain, name))
        if is_said and name not in ("device", *without):
            flags += [flag_of(name)] if value is True else [flag_of(name), _say(value)]
    if workload.device not in ("auto", "cuda", "cuda:0") and "device" not in without:
        flags += ["--device", workload.device]
    return flags


def _say(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def list_commands(materials: Materials) -> tuple[Copyable, ...]:
    """The commands that made the report, each once: that of the whole report first, then those of its parts."""
    manifests = [one.recording.manifest for one in (materials.profile, materials.memory) if one is not None]
    typed = [("this report", materials.command)]
    typed += [("timing", row.command) for row in materials.bench[:1]]
    typed += [("memory" if one.memory else "profile", one.command) for one in manifests]
    typed += [("precision", materials.precision.command)] if materials.precision else []
    typed += [("attention", row.command) for row in materials.attention[:1]]
    texts: dict[str, str] = {}
    for label, text in typed:
        if text:
            texts.setdefault(text, label)
    return tuple(Copyable(label=label, text=text) for text, label in texts.items())

"""A workload as a command: the flags that run it again, for any verb that takes settings."""

import re
import shlex
from collections.abc import Collection, Mapping

from stepscope.recording.store import Manifest
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

OWN_MODEL = "--model my_model:build"  # stands for the user's own model


def write_command(verb: str, workload: Workload, *, without: Collection[str] = ()) -> str:
    """Return the command that runs a workload, without the flags of the settings in `without`. Settings at their
    defaults are left out, except the context: its default differs between verbs."""
    return shlex.join(["stepscope", verb, *_model_flags(workload), *_run_flags(workload, without)])


def fit_command(command: str, manifest: Manifest) -> str:
    """Return a command, or several joined with `&&`, for the model of a recording: with the settings of its run that
    the command does not set itself, or for the user's own model if another tool made the recording. Empty if it would
    measure the model of a training script, which no verb can build."""
    if manifest.loop is not None and re.match(r"stepscope (?:profile|memory)\b", command):
        return ""
    return " && ".join(_fit(one, manifest.case) for one in command.split(" && "))


def _fit(command: str, case: Case | None) -> str:
    words = command.split(" ")
    is_complete = not {"--size", "--model", "--hf"}.isdisjoint(words)
    if words[:1] != ["stepscope"] or words[1:2] not in (["profile"], ["memory"]) or is_complete:
        return command
    if case is None:
        return " ".join([*words[:2], OWN_MODEL, *words[2:]])
    named = [name for name in RUN_SETTINGS if flag_of(name) in words]
    return " ".join([write_command(words[1], case.workload, without=named), *words[2:]])


def write_flags(workload: Workload, changes: Mapping[str, object]) -> str:
    """Return the flags that make these changes to a workload: `--compile`, `--batch 8`, `--vocab 10048`."""
    words: list[str] = []
    for name, value in changes.items():
        if isinstance(value, ModelShape):
            words += [
                part
                for size in SHAPE_SETTINGS
                if size != "size" and getattr(value, size) != getattr(workload.model, size)
                for part in (flag_of(size), _say(getattr(value, size)))
            ]
        else:
            words += [flag_of(name)] if value is True else [flag_of(name), _say(value)]
    return shlex.join(words)


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
        usual = {"num_kv_heads": shape.num_heads}  # every head has keys and values of its own unless told otherwise
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

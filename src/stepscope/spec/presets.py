"""Presets: one word for several settings, such as everything that makes a step fast.

A preset fills in settings that were not given, so a given one always wins. Parts of it that have no effect on the step,
or cannot be combined with what was given, are left out: a preset never makes a valid workload invalid.
"""

from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

from stepscope.spec.settings import Scalar, Setting, complete, require_choice
from stepscope.spec.workload import (
    OWN_MODEL_SETTINGS,
    PRECISIONS_OF,
    RUN_SETTINGS,
    SHAPE_SETTINGS,
    TIMING_SETTINGS,
    WITH_COPIES,
)

V = TypeVar("V")
Preset = Literal["none", "fast"]
PRESETS: dict[Preset, dict[str, Scalar]] = {
    "none": {},
    "fast": {
        "precision": "bf16",
        "attention": "flash",
        "compile": True,
        "fuse": True,
        "merge": True,
        "working_weights": True,
        "graph": True,
        "optimizer": "adamw-onelaunch",
    },
}
PRESET_SETTING = complete(
    Setting(
        help="Settings for speed, all at once; other flags override them, and the docs list them.  [default: none]"
    ),
    "preset",
    Preset,
    "none",
)
# Every setting that flags, TOML files and Python can give.
SETTINGS = SHAPE_SETTINGS | OWN_MODEL_SETTINGS | {"preset": PRESET_SETTING} | RUN_SETTINGS | TIMING_SETTINGS


def expand_preset(settings: Mapping[str, V]) -> dict[str, V | Scalar]:
    """Replace `preset` by the settings that it stands for. Settings that are given win."""
    name = settings.get("preset", "none")
    require_choice("preset", name, get_args(Preset))  # type: ignore[arg-type]
    given = {key: value for key, value in settings.items() if key != "preset"}
    chosen: dict[str, V | Scalar] = {**PRESETS[name], **given}  # type: ignore[index]
    for key in PRESETS[name]:  # type: ignore[index]
        if key not in given and not _fits(key, chosen):
            del chosen[key]
    if not chosen.get("working_weights") and "merge" not in given:
        chosen.pop("merge", None)
    return chosen


def _fits(name: str, settings: Mapping[str, object]) -> bool:
    """Whether a part of a preset has an effect, and is allowed, next to the other settings. A factory may return its
    own optimizer, and the attention of models that are not built in is replaced by `fuse`."""
    if settings.get("mode", "train") not in RUN_SETTINGS[name].modes:
        return False
    match name:
        case "attention":
            return not {"model", "hf"} & settings.keys()
        case "optimizer":
            return "model" not in settings
        case "working_weights" if settings.get("optimizer") not in (None, *WITH_COPIES):
            return False
        case _:
            return name not in PRECISIONS_OF or settings.get("precision", "fp32") in PRECISIONS_OF[name]

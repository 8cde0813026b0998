"""Labels for the two runs of a comparison: what differs between them (`bf16 + flash` and `fp32 + naive`), else the
names of their files or directories, else `before` and `after`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from stepscope.explain.model_names import Model, name_model
from stepscope.explain.trace.profile import Profile
from stepscope.recording.store import Manifest
from stepscope.spec import RUN_SETTINGS, SIZES, Case, ModelShape, Workload
from stepscope.units import clip

MOST_LABEL = 32  # characters
BEFORE_AND_AFTER = ("before", "after")
# Settings in the order in which a label names them. What comes first stays when a label is clipped.
_ORDER = (
    "precision",
    "attention",
    "compile",
    "fuse",
    "merge",
    "working_weights",
    "graph",
    "checkpoint",
    "grad_accumulation",
    "optimizer",
    "batch",
    "context",
    "mode",
    "seed",
)
assert {*_ORDER, "device"} == set(RUN_SETTINGS)
# Names of settings that are off, for a side without any other label.
_OFF = {
    "compile": "eager",
    "fuse": "no fused kernels",
    "merge": "separate GEMMs",
    "working_weights": "casts",
    "graph": "no CUDA graphs",
    "checkpoint": "no checkpointing",
    "grad_accumulation": "1 micro-batch",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What can name one side of a comparison. `name` is a path, the name of a file, or any other description."""

    name: str
    case: Case | None = None
    device: str = ""
    torch: str = ""


def identify(profile: Profile, name: str) -> RunIdentity:
    manifest = profile.recording.manifest
    return RunIdentity(name=name, case=manifest.case, device=manifest.device, torch=find_torch(manifest))


def find_torch(manifest: Manifest) -> str:
    """The version of PyTorch; empty if the recording does not have it."""
    return manifest.environment.torch if manifest.environment else manifest.versions.get("torch", "")


def label_runs(a: RunIdentity, b: RunIdentity) -> tuple[str, str]:
    """Two different labels of at most `MOST_LABEL` characters."""
    for one, other in _candidates(a, b):
        labels = _shorten(one), _shorten(other)
        if all(labels) and labels[0] != labels[1]:
            return labels
    return BEFORE_AND_AFTER


def _candidates(a: RunIdentity, b: RunIdentity) -> Iterator[tuple[list[str], list[str]]]:
    """Words for both sides, the best first."""
    names = _differing_names(a.name, b.name)
    if a.case is not None and b.case is not None:
        yield _differing_settings(a.case.workload, b.case.workload)
        yield [a.device], [b.device]
        if a.torch and b.torch:
            yield [f"PyTorch {a.torch}"], [f"PyTorch {b.torch}"]
    elif a.case is not None:
        yield [name_model(a.case.workload.model)], [names[1]]
    elif b.case is not None:
        yield [names[0]], [name_model(b.case.workload.model)]
    yield [names[0]], [names[1]]
    yield [a.name], [b.name]


def _differing_settings(a: Workload, b: Workload) -> tuple[list[str], list[str]]:
    sides: tuple[list[str], list[str]] = ([], [])
    if a.model != b.model:
        for side, words in zip(sides, _differing_models(a.model, b.model), strict=True):
            side.extend(words)
    differing = [name for name in _ORDER if getattr(a, name) != getattr(b, name)]
    for side, workload in zip(sides, (a, b), strict=True):
        side.extend(word for name in differing if (word := _say(name, workload)))
        if not side:
            side.extend(_OFF[name] for name in differing if name in _OFF)
    return sides


def _differing_models(a: Model, b: Model) -> tuple[list[str], list[str]]:
    """The names, or the sizes and arguments that differ where both models have one name."""
    if isinstance(a, ModelShape) and isinstance(b, ModelShape):
        if a.name in SIZES and b.name in SIZES and a.name != b.name:
            return [a.name], [b.name]
        fields = [name for name in a.__struct_fields__ if getattr(a, name) != getattr(b, name)]
        return [f"{name} {getattr(a, name)}" for name in fields], [f"{name} {getattr(b, name)}" for name in fields]
    if name_model(a) != name_model(b) or isinstance(a, ModelShape) or isinstance(b, ModelShape):
        return [name_model(a)], [name_model(b)]
    left, right = dict(a.arguments), dict(b.arguments)
    names = [name for name in dict.fromkeys((*left, *right)) if left.get(name) != right.get(name)]
    one, other = ([f"{name} {given[name]}" for name in names if name in given] for given in (left, right))
    return one or [name_model(a)], other or [name_model(b)]


def _say(name: str, workload: Workload) -> str:
    """A setting's value in a word or two; empty if it is off."""
    value = getattr(workload, name)
    match name:
        case "compile":
            return "compile" if value else ""
        case "fuse" | "merge" | "working_weights" | "graph":
            return RUN_SETTINGS[name].phrase if value else ""
        case "checkpoint":
            return "" if value == "none" else "checkpointing" if value == "block" else f"checkpointing {value}"
        case "grad_accumulation":
            return "" if value == 1 else f"{value} micro-batches"
        case "attention":
            return value or "default attention"
        case "optimizer":
            return value or "custom optimizer"
        case "precision" | "mode":
            return str(value)
        case _:
            return f"{name} {value}"


def _differing_names(a: str, b: str) -> tuple[str, str]:
    """The last parts of two paths that differ: `before` and `after` of `before/profile` and `after/profile`."""
    one, other = (name.replace("\\", "/").rstrip("/").split("/") for name in (a, b))
    while len(one) > 1 and len(other) > 1 and one[-1] == other[-1]:
        one, other = one[:-1], other[:-1]
    return one[-1], other[-1]


def _shorten(words: list[str]) -> str:
    """Leave out the last words, then the middle of the only one."""
    label = " + ".join(words)
    kept = words
    while len(label) > MOST_LABEL and len(kept) > 1:
        kept = kept[:-1]
        label = f"{' + '.join(kept)} + …"
    return clip(label, MOST_LABEL)

"""Labels for the runs of a comparison: what differs between them (`bf16 + flash` and `fp32 + naive`), else the names of
their files or directories, else `before` and `after`, or a number.
"""

from collections.abc import Iterator, Sequence
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
    """What can name one run of a comparison. `name` is a path, the name of a file, or any other description."""

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


def label_pair(a: RunIdentity, b: RunIdentity) -> tuple[str, str]:
    """Two different labels of at most `MOST_LABEL` characters."""
    one, other = label_runs([a, b])
    return one, other


def label_runs(runs: Sequence[RunIdentity], most: int = MOST_LABEL) -> tuple[str, ...]:
    """Different labels of at most `most` characters, one per run."""
    for words in _join_candidates(list(_candidates(runs))):
        labels = tuple(_shorten(one, most) for one in words)
        if all(labels) and len(set(labels)) == len(labels):
            return labels
    return BEFORE_AND_AFTER if len(runs) == 2 else tuple(f"run {number}" for number in range(1, len(runs) + 1))


def _join_candidates(candidates: Sequence[list[list[str]]]) -> Iterator[list[list[str]]]:
    """The candidates; of more than two runs, those that tell some of them apart also together with a later one:
    repeated runs among others have their settings and a name."""
    for at, words in enumerate(candidates):
        yield words
        if len(words) > 2 and any(one != words[0] for one in words):
            for others in candidates[at + 1 :]:
                yield [[*one, *more] for one, more in zip(words, others, strict=True)]


def _candidates(runs: Sequence[RunIdentity]) -> Iterator[list[list[str]]]:
    """Words for every run, the best first."""
    names = _differing_names([run.name for run in runs])
    cases = [run.case for run in runs if run.case is not None]
    if len(cases) == len(runs):
        yield _differing_settings([case.workload for case in cases])
        yield [[run.device] for run in runs]
        if all(run.torch for run in runs):
            yield [[f"PyTorch {run.torch}"] for run in runs]
    elif cases:
        yield [
            [name_model(run.case.workload.model) if run.case is not None else name]
            for run, name in zip(runs, names, strict=True)
        ]
    yield [[name] for name in names]
    yield [[run.name] for run in runs]


def _differing_settings(workloads: Sequence[Workload]) -> list[list[str]]:
    sides = _differing_models([workload.model for workload in workloads])
    differing = [name for name in _ORDER if len({getattr(workload, name) for workload in workloads}) > 1]
    for side, workload in zip(sides, workloads, strict=True):
        side.extend(word for name in differing if (word := _say(name, workload)))
        if not side:
            side.extend(_OFF[name] for name in differing if name in _OFF)
    return sides


def _differing_models(models: Sequence[Model]) -> list[list[str]]:
    """The names, or the sizes and arguments that differ where all models have one name; nothing for equal models."""
    if all(model == models[0] for model in models):
        return [[] for _ in models]
    shapes = [model for model in models if isinstance(model, ModelShape)]
    if len(shapes) == len(models):
        if all(shape.name in SIZES for shape in shapes) and len({one.name for one in shapes}) == len(set(shapes)):
            return [[shape.name] for shape in shapes]
        fields = [name for name in shapes[0].__struct_fields__ if len({getattr(one, name) for one in shapes}) > 1]
        return [[f"{name} {getattr(shape, name)}" for name in fields] for shape in shapes]
    names = [name_model(model) for model in models]
    given = [dict(model.arguments) for model in models if not isinstance(model, ModelShape)]
    if len(set(names)) > 1 or len(given) < len(models):
        return [[name] for name in names]
    differing = [
        name
        for name in dict.fromkeys(name for one in given for name in one)
        if any(one.get(name) != given[0].get(name) for one in given)
    ]
    return [
        [f"{name} {one[name]}" for name in differing if name in one] or [model]
        for one, model in zip(given, names, strict=True)
    ]


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


def _differing_names(names: Sequence[str]) -> list[str]:
    """The last parts of paths that differ: `before` and `after` of `before/profile` and `after/profile`."""
    paths = [name.replace("\\", "/").rstrip("/").split("/") for name in names]
    while all(len(path) > 1 for path in paths) and len({path[-1] for path in paths}) == 1:
        paths = [path[:-1] for path in paths]
    return [path[-1] for path in paths]


def _shorten(words: list[str], most: int) -> str:
    """Leave out the last words, then the middle of the only one."""
    label = " + ".join(words)
    kept = words
    while len(label) > most and len(kept) > 1:
        kept = kept[:-1]
        label = f"{' + '.join(kept)} + …"
    return clip(label, most)

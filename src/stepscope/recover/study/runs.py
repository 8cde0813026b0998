"""One run of a study: its settings, and the counters of every part of the model.

The parts are those of `evidence.structure`: GEMMs by role, attention, and the kernels between them by position and
class. Counters are per layer, so num_layers only affects the number of launches. The settings are not used to identify
parts: a part with two interpretations is left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeGuard, get_args

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import decode, open_plain
from stepscope.recording.readers.counter_metrics import CounterKey
from stepscope.recording.store import Recording
from stepscope.recover.evidence.order import NoTransformerError, Role, Zone
from stepscope.recover.evidence.recording import gather
from stepscope.recover.evidence.structure import RoleReading, Structure, find_structure
from stepscope.recover.facts import Sighting
from stepscope.spec import Case, Factory, HuggingFace, ModelShape

Settings = Mapping[str, object]

NUMBERS = (
    "num_layers",
    "d_model",
    "d_ff",
    "num_heads",
    "num_kv_heads",
    "d_head",
    "vocab_size",
    "batch",
    "context",
)
_WORDS = ("family", "model", "precision", "attention", "compile", "mode")
_SPELLINGS = {"vocab": "vocab_size", "dtype": "precision", "head_dim": "d_head"}
# Keys of a settings file that are not settings and need no note.
_ABOUT_RUNS = {"parameters", "versions", "gpu"}
_OWN = "set "  # prefix of an argument of a user's own model
_ENDINGS = (".gz", ".csv", ".json", ".sqlite")

DURATION, LAUNCHES = "duration_ns", "launches"
COUNTERS: tuple[str, ...] = (*get_args(CounterKey), DURATION, LAUNCHES)
COUNTER_LABELS = {counter: counter.replace("_", " ") for counter in COUNTERS} | {DURATION: "duration"}
# These also depend on clocks, caches and other kernels.
LOOSE = ("dram_read_bytes", "dram_write_bytes", DURATION)
_FEWEST = 32  # counts below this are a stray instruction, not work

_ROLES: dict[Role, str] = {
    "query_key_value": "query-key-value projection",
    "query": "query projection",
    "key": "key projection",
    "value": "value projection",
    "key_value": "key-value projection",
    "scores": "attention scores",
    "values": "attention values",
    "output": "output projection",
    "gate": "gate projection",
    "up": "up projection",
    "gate_up": "up projection",  # only its size shows that it is joint
    "down": "down projection",
    "head": "LM head",
}
_ZONES: dict[Zone, str] = {
    "before": "before the layers",
    "heads": "before attention",
    "merge": "after attention",
    "middle": "before feed-forward",
    "feed_forward": "in feed-forward",
    "between": "between layers",
    "final": "before the LM head",
    "after": "after the LM head",
}
_ATTENTION, _SOFTMAX = "attention", "softmax"
_BEHIND_SCORES = list(_ROLES).index("values")
PARTS: tuple[str, ...] = (
    *dict.fromkeys(list(_ROLES.values())[:_BEHIND_SCORES]),
    _SOFTMAX,
    _ATTENTION,
    *dict.fromkeys(list(_ROLES.values())[_BEHIND_SCORES:]),
)
LAYER_KERNELS, ALL_KERNELS = "each layer kernel", "all kernels"


class PartCounter(NamedTuple):
    """A part of the model and one of its counters."""

    part: str
    counter: str


class MeasuredCounter(NamedTuple):
    value: float
    kernels: tuple[str, ...]  # distinct kernel names


@dataclass(frozen=True, slots=True, kw_only=True)
class StudiedRun:
    """`by_class` is coarser: all kernels of a class, in all layers. Any two runs can be compared by it."""

    name: str
    numbers: dict[str, int]
    words: dict[str, str]
    measured: dict[PartCounter, MeasuredCounter]
    by_class: dict[PartCounter, MeasuredCounter]
    notes: tuple[str, ...] = ()

    @property
    def products(self) -> set[str]:
        return {row.part for row in self.measured if row.part in _ROLES.values()}


def read_runs(
    recordings: Sequence[Recording], names: Sequence[str], truths: Mapping[str, Settings]
) -> list[StudiedRun]:
    """Return the runs. If they do not have the same parts, add kernel classes so that they can be compared."""
    runs = [_read_run(recording, name, truths) for recording, name in zip(recordings, names, strict=True)]
    if all(run.products == runs[0].products and run.products for run in runs):
        return runs
    return [replace(run, measured=run.measured | run.by_class) for run in runs]


def _read_run(recording: Recording, name: str, truths: Mapping[str, Settings]) -> StudiedRun:
    """Return one run. Raises StepscopeError for a run without counters or settings."""
    evidence = gather(recording, file=name)
    if not evidence.has_counters:
        raise StepscopeError(
            f"no counters in `{name}`",
            detail="a study requires hardware counters from Nsight Compute",
            hint="stepscope profile --counters, or ncu --csv --page raw",
        )
    case = recording.manifest.case
    numbers, words, ignored = _sort_out(_find_settings(case, name, truths), name)
    words |= {"device": recording.manifest.device, "torch": recording.manifest.versions.get("torch", "")}
    passes = case.timing.steps if case else 1
    measured, notes = _measure(evidence.sightings, passes)
    if ignored:
        notes.append(f"ignored settings: {', '.join(ignored)}")
    layers = measured.get(PartCounter(LAYER_KERNELS, LAUNCHES))
    if layers and numbers.get("num_layers", layers.value) != layers.value:
        notes.append(f"num_layers is {numbers['num_layers']} in the settings, but the kernels show {layers.value:.0f}")
    return StudiedRun(
        name=_bare(name),
        numbers=numbers,
        words=words,
        measured=measured,
        by_class=_measure_classes(evidence.sightings, passes),
        notes=tuple(notes),
    )


def _bare(name: str) -> str:
    """Return the name without directory and extensions."""
    bare = name.rstrip("/").rpartition("/")[2]
    for ending in _ENDINGS:
        bare = bare.removesuffix(ending)
    return bare


def _find_settings(case: Case | None, name: str, truths: Mapping[str, Settings]) -> Settings:
    if settings := truths.get(_bare(name)):
        return settings
    if case is None:
        raise StepscopeError(
            f"the settings of `{name}` are unknown",
            detail="`stepscope profile --counters` recordings include them; for other files, list them by name:\n"
            f'{{"{_bare(name)}": {{"d_model": 768, "num_heads": 12, "context": 128}}}}',
            hint="stepscope profile --counters --context 128,256,512",
        )
    workload = case.workload
    run = {name: getattr(workload, name) for name in ("batch", "context", "precision", "attention", "compile", "mode")}
    if not workload.context:  # a model without tokens
        del run["context"]
    return {**_settings_of(workload.model), **run}


def _settings_of(model: ModelShape | Factory | HuggingFace) -> dict[str, object]:
    """Return the model's settings. Arguments of a user's own model keep their names; known names have their usual
    meaning."""
    if isinstance(model, ModelShape):
        shape = msgspec.structs.asdict(model)
        tied = ", tied" if shape.pop("tie_embeddings") else ""
        return {**shape, "d_head": model.head_dim, "model": f"built-in{tied}"}
    source = model.target if isinstance(model, Factory) else model.config
    ours = (*NUMBERS, *_SPELLINGS)
    named = {key if key in ours and _is_size(value) else f"{_OWN}{key}": value for key, value in model.arguments}
    return {"model": source, **named}


def _sort_out(settings: Settings, name: str) -> tuple[dict[str, int], dict[str, str], list[str]]:
    """Return numeric settings, categorical settings, and the names of ignored ones. Arguments of a user's own model are
    never ignored."""
    numbers: dict[str, int] = {}
    words: dict[str, str] = {}
    ignored = []
    for spelled, value in settings.items():
        key = _SPELLINGS.get(spelled, spelled)
        is_own = key.startswith(_OWN)
        if key in NUMBERS or (is_own and _is_size(value)):
            numbers[key] = _whole(value, spelled, name)
        elif key in _WORDS or is_own:
            words[key] = _word(value)
        elif key not in _ABOUT_RUNS:
            ignored.append(key)
    return numbers, words, ignored


def _whole(value: object, key: str, name: str) -> int:
    if _is_size(value):
        return value
    raise StepscopeError(f"invalid {key} for `{name}`: `{value}`", detail="expected a positive integer")


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _word(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


# --- Counters


def _measure(sightings: tuple[Sighting, ...], passes: int) -> tuple[dict[PartCounter, MeasuredCounter], list[str]]:
    """Return the counters by part of the model, if the kernels show its parts, and notes."""
    notes = []
    measured: dict[PartCounter, MeasuredCounter] = {}
    try:
        structure = find_structure(sightings)
    except NoTransformerError as error:
        notes.append(f"no parts could be identified: {error}")
    else:
        measured, unclear = _measure_parts(structure)
        if unclear:
            notes.append(f"left out because they have more than one interpretation: {', '.join(unclear)}")
        launches = structure.num_layers * structure.num_passes / passes
        measured[PartCounter(LAYER_KERNELS, LAUNCHES)] = MeasuredCounter(launches, ())
    measured |= _sum_up(ALL_KERNELS, sightings, passes)
    measured[PartCounter(ALL_KERNELS, LAUNCHES)] = MeasuredCounter(len(sightings) / passes, ())
    return measured, notes


def _measure_classes(sightings: tuple[Sighting, ...], passes: int) -> dict[PartCounter, MeasuredCounter]:
    measured: dict[PartCounter, MeasuredCounter] = {}
    for kind in dict.fromkeys(sighting.name.kernel_class for sighting in sightings):
        ones = [one for one in sightings if one.name.kernel_class == kind]
        measured |= _sum_up(f"all {kind}", ones, passes)
        measured[PartCounter(f"all {kind}", LAUNCHES)] = MeasuredCounter(len(ones) / passes, ())
    return measured


def _measure_parts(structure: Structure) -> tuple[dict[PartCounter, MeasuredCounter], list[str]]:
    """Return the counters by part, and the GEMMs that the interpretations do not agree on."""
    layers = structure.num_layers
    measured: dict[PartCounter, MeasuredCounter] = {}
    measured |= _sum_up(_ATTENTION, structure.attentions, layers * structure.num_passes)
    measured |= _sum_up(_SOFTMAX, structure.softmaxes, layers)
    readings = [_parts(reading) for reading in structure.readings]
    unclear = []
    for part in dict.fromkeys(part for reading in readings for part in reading):
        ways = {tuple(one.index for one in reading.get(part, ())) for reading in readings}
        if len(ways) == 1:
            measured |= _sum_up(part, readings[0][part], 1)
        elif part in _ROLES.values():
            unclear.append(part)
    return measured, unclear


def _parts(reading: RoleReading) -> dict[str, tuple[Sighting, ...]]:
    parts: dict[str, tuple[Sighting, ...]] = {_ROLES[role]: (one,) for role, one in reading.products.items()}
    for zone, ones in reading.zones.items():
        for kind in dict.fromkeys(one.name.kernel_class for one in ones):
            parts[f"{kind} {_ZONES[zone]}"] = tuple(one for one in ones if one.name.kernel_class == kind)
    return parts


def _sum_up(part: str, sightings: Iterable[Sighting], among: int) -> dict[PartCounter, MeasuredCounter]:
    """Return the sum of each counter over the kernels, divided by `among` layers or passes. A counter that not all
    kernels have is left out."""
    ones = tuple(sightings)
    kernels = tuple(dict.fromkeys(one.name.short for one in ones))
    summed: dict[PartCounter, MeasuredCounter] = {}
    for key in get_args(CounterKey):
        values = [one.counters.get(key) for one in ones]
        total = sum(value for value in values if value is not None)
        if None not in values and total >= _FEWEST:
            summed[PartCounter(part, key)] = MeasuredCounter(total / among, kernels)
    if not any(one.counters.get("tensor_ops", 1) for one in ones):
        summed.pop(PartCounter(part, "tensor_instructions"), None)  # these do not compute anything
    time = sum(one.duration_ns for one in ones)
    return summed | ({PartCounter(part, DURATION): MeasuredCounter(time / among, kernels)} if time else {})


# --- Settings from a file, for runs that do not include them

_MOST_BYTES = 16 * 2**20
_EXAMPLE = '{"a": {"d_model": 768, "num_heads": 12, "context": 128}}, for counters in a.csv.gz'


def read_truths(path: Path) -> dict[str, Settings]:
    """Return settings by the run's name without directory and extensions."""
    with open_plain(path, what="the settings file") as (file, _):
        content = file.read(_MOST_BYTES + 1)
    try:
        if len(content) > _MOST_BYTES:
            raise msgspec.DecodeError(f"more than {_MOST_BYTES >> 20} MiB")
        decoded = decode(content, dict[str, dict[str, object]])
    except msgspec.DecodeError as error:
        raise StepscopeError(
            f"not a settings file: `{path}`: {error}", detail=f"expected JSON such as\n{_EXAMPLE}"
        ) from None
    return dict(decoded)

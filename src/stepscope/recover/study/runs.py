"""One run of a study: its settings, and what every part of the model counted.

Parts are those that `evidence.structure` reads: matrix products by role, attention, and the kernels between them by
where they stand and what they do. Figures are of one layer: the number of layers shows in nothing but how often.
Settings decide nothing here: a part that can be read in two ways is left out.
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
# What stands in a file of settings, is no setting, and is not worth a note.
_ABOUT_RUNS = {"parameters", "versions", "gpu"}
_OWN = "set "  # ahead of an argument of a user's own model
_ENDINGS = (".gz", ".csv", ".json", ".sqlite")

DURATION, LAUNCHES = "duration_ns", "launches"
COUNTERS: tuple[str, ...] = (*get_args(CounterKey), DURATION, LAUNCHES)
COUNTER_LABELS = {counter: counter.replace("_", " ") for counter in COUNTERS} | {DURATION: "duration"}
# Clocks, caches and neighbours have their say in these.
LOOSE = ("dram_read_bytes", "dram_write_bytes", DURATION)
_FEWEST = 32  # counts below this are a stray instruction, not work

_ROLES: dict[Role, str] = {
    "query_key_value": "query-key-value product",
    "query": "query product",
    "key": "key product",
    "value": "value product",
    "key_value": "key-value product",
    "scores": "scores product",
    "values": "values product",
    "output": "output product",
    "gate": "gate product",
    "up": "up product",
    "gate_up": "up product",  # told apart by sizes alone
    "down": "down product",
    "head": "head product",
}
_ZONES: dict[Zone, str] = {
    "before": "ahead of the layers",
    "heads": "ahead of attention",
    "merge": "behind attention",
    "middle": "ahead of feed-forward",
    "feed_forward": "in feed-forward",
    "between": "between layers",
    "final": "ahead of the head",
    "after": "behind the head",
}
_ATTENTION, _SOFTMAX = "attention", "softmax"
_BEHIND_SCORES = list(_ROLES).index("values")
PARTS: tuple[str, ...] = (
    *dict.fromkeys(list(_ROLES.values())[:_BEHIND_SCORES]),
    _SOFTMAX,
    _ATTENTION,
    *dict.fromkeys(list(_ROLES.values())[_BEHIND_SCORES:]),
)
LAYER_KERNELS, ALL_KERNELS = "each kernel of a layer", "all kernels"


class PartCounter(NamedTuple):
    """A counter of a part of the model."""

    part: str
    counter: str


class MeasuredCounter(NamedTuple):
    value: float
    kernels: tuple[str, ...]  # what they are called, each once


@dataclass(frozen=True, slots=True, kw_only=True)
class StudiedRun:
    """`by_class` is the coarser view: all kernels of a class, in all layers. Any two runs have it."""

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
    """Where the runs do not show the same parts, classes of kernels are there to compare them by."""
    runs = [_read_run(recording, name, truths) for recording, name in zip(recordings, names, strict=True)]
    if all(run.products == runs[0].products and run.products for run in runs):
        return runs
    return [replace(run, measured=run.measured | run.by_class) for run in runs]


def _read_run(recording: Recording, name: str, truths: Mapping[str, Settings]) -> StudiedRun:
    """Raises StepscopeError for a run without counters or settings."""
    evidence = gather(recording, file=name)
    if not evidence.has_counters:
        raise StepscopeError(
            f"no counters in `{name}`",
            detail="a study is of hardware counters, as Nsight Compute writes them",
            hint="stepscope profile --counters, or ncu --csv --page raw",
        )
    case = recording.manifest.case
    numbers, words, ignored = _sort_out(_find_settings(case, name, truths), name)
    words |= {"device": recording.manifest.device, "torch": recording.manifest.versions.get("torch", "")}
    passes = case.timing.steps if case else 1
    measured, notes = _measure(evidence.sightings, passes)
    if ignored:
        notes.append(f"not looked at: {', '.join(ignored)}")
    layers = measured.get(PartCounter(LAYER_KERNELS, LAUNCHES))
    if layers and numbers.get("num_layers", layers.value) != layers.value:
        notes.append(f"num_layers is {numbers['num_layers']} in the settings, and {layers.value:.0f} by the kernels")
    return StudiedRun(
        name=_bare(name),
        numbers=numbers,
        words=words,
        measured=measured,
        by_class=_measure_classes(evidence.sightings, passes),
        notes=tuple(notes),
    )


def _bare(name: str) -> str:
    """Without folder and endings."""
    bare = name.rstrip("/").rpartition("/")[2]
    for ending in _ENDINGS:
        bare = bare.removesuffix(ending)
    return bare


def _find_settings(case: Case | None, name: str, truths: Mapping[str, Settings]) -> Settings:
    if settings := truths.get(_bare(name)):
        return settings
    if case is None:
        raise StepscopeError(
            f"the settings of `{name}` are not known",
            detail="recordings of `stepscope profile --counters` hold theirs; for other files give those, by name:\n"
            f'{{"{_bare(name)}": {{"d_model": 768, "num_heads": 12, "context": 128}}}}',
            hint="stepscope profile --counters --context 128,256,512",
        )
    workload = case.workload
    run = {name: getattr(workload, name) for name in ("batch", "context", "precision", "attention", "compile", "mode")}
    if not workload.context:  # of a model without tokens
        del run["context"]
    return {**_settings_of(workload.model), **run}


def _settings_of(model: ModelShape | Factory | HuggingFace) -> dict[str, object]:
    """A user's own model has its arguments by their own names; one that is ours by chance means the same."""
    if isinstance(model, ModelShape):
        shape = msgspec.structs.asdict(model)
        tied = ", tied" if shape.pop("tie_embeddings") else ""
        return {**shape, "d_head": model.head_dim, "model": f"built-in{tied}"}
    source = model.target if isinstance(model, Factory) else model.config
    ours = (*NUMBERS, *_SPELLINGS)
    named = {key if key in ours and _is_size(value) else f"{_OWN}{key}": value for key, value in model.arguments}
    return {"model": source, **named}


def _sort_out(settings: Settings, name: str) -> tuple[dict[str, int], dict[str, str], list[str]]:
    """Numbers, words, and the names of what is neither. What a user's own model was given is either."""
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
    raise StepscopeError(f"{key} of `{name}` is `{value}`", detail="expected a whole number above 0")


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _word(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


# --- What was counted


def _measure(sightings: tuple[Sighting, ...], passes: int) -> tuple[dict[PartCounter, MeasuredCounter], list[str]]:
    """By part of the model where that can be read."""
    notes = []
    measured: dict[PartCounter, MeasuredCounter] = {}
    try:
        structure = find_structure(sightings)
    except NoTransformerError as error:
        notes.append(f"no parts could be read: {error}")
    else:
        measured, unclear = _measure_parts(structure)
        if unclear:
            notes.append(f"left out, for it can be read in more than one way: {', '.join(unclear)}")
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
    """And the products that the readings do not agree on."""
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
    """Counters of kernels together, for each of so many layers or passes. What not all of them have is not there."""
    ones = tuple(sightings)
    kernels = tuple(dict.fromkeys(one.name.short for one in ones))
    summed: dict[PartCounter, MeasuredCounter] = {}
    for key in get_args(CounterKey):
        values = [one.counters.get(key) for one in ones]
        total = sum(value for value in values if value is not None)
        if None not in values and total >= _FEWEST:
            summed[PartCounter(part, key)] = MeasuredCounter(total / among, kernels)
    if not any(one.counters.get("tensor_ops", 1) for one in ones):
        summed.pop(PartCounter(part, "tensor_instructions"), None)  # of the kind that computes nothing
    time = sum(one.duration_ns for one in ones)
    return summed | ({PartCounter(part, DURATION): MeasuredCounter(time / among, kernels)} if time else {})


# --- Settings of runs that do not know their own, from a file

_MOST_BYTES = 16 * 2**20
_EXAMPLE = '{"a": {"d_model": 768, "num_heads": 12, "context": 128}}, where the counters are in a.csv.gz'


def read_truths(path: Path) -> dict[str, Settings]:
    """By name of the run, without folder and endings."""
    with open_plain(path, what="a file of settings") as (file, _):
        content = file.read(_MOST_BYTES + 1)
    try:
        if len(content) > _MOST_BYTES:
            raise msgspec.DecodeError(f"more than {_MOST_BYTES >> 20} MiB")
        decoded = decode(content, dict[str, dict[str, object]])
    except msgspec.DecodeError as error:
        raise StepscopeError(
            f"`{path}` is no file of settings: {error}", detail=f"expected JSON such as\n{_EXAMPLE}"
        ) from None
    return dict(decoded)

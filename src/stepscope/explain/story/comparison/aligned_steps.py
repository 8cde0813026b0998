"""Two steps cut at the same places: how long each place takes in both, and which changes are the largest.

A kernel's time counts as in the picture of the step (`step_picture`): overlapping kernels share a moment, and idle time
belongs to the kernel that ends it. So the places of a phase add up to the phase of the picture. All times are rounded
to whole nanoseconds so that they add up to the steps that `compare` gives, and their changes to its change.
"""

import itertools
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import polars as pl

from stepscope.explain.story.comparison.places import PLACE, Key, find_places, order_places
from stepscope.explain.story.sections.breakdown import say_lacking_modules
from stepscope.explain.trace.clock import Clock
from stepscope.explain.trace.compare import REST, Verdict, are_comparable, judge
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Cell, Column, Table
from stepscope.findings.compared import AlignedSteps, PlaceTime, StepChange, StepPlace
from stepscope.units import count_noun, say_count

_MS = 1e6
_MOST_CHANGES, _MOST_KINDS = 6, 3  # with a label: of places, and of kernels that are new or gone
_WORTH_SAYING = 0.01  # of the longer step
_UNLIKE = 2  # times the median change of alike places: one that is further from it is named alone
_MOST_ROWS = 200
_ALL = "(all)"  # a phase with a single place
_COUNTED_TWICE = "the time of new and gone kernels is also included in the changes of their places"
_NUMBER = re.compile(r" \d+$")
# Words that two runs need not share: how a kernel accesses memory, and its precision.
_MANNER = r",? (?:vectorized ×\d+|strided)|\b(?:to )?(?:[bt]?fp?\d+|float\d*|bool|u?int\d+|e\dm\d)\b"
_NAMED_BY_WORDS = ("elementwise", "reduction", "copy", "index", "random", "sort", "other")


def align_steps(a: Profile, b: Profile, labels: tuple[str, str]) -> AlignedSteps:
    """Return the steps of two recordings with a timeline."""
    frames = find_places(a, b)
    keys = order_places(*frames)
    runs = [_PlacedRun(profile.clock, frame) for profile, frame in zip((a, b), frames, strict=True)]
    sides = [run.round_times(keys) for run in runs]
    places = tuple(
        StepPlace(phase=key[0], layer=key[1], part=key[2], sides=(one, other), verdict=_judge(runs, key, one, other))
        for key, one, other in zip(keys, *sides, strict=True)
    )
    least_ns = _WORTH_SAYING * max(run.clock.step_ns for run in runs)
    found, kinds = (
        [one for one in changes if abs(one.change_ns) >= least_ns]
        for changes in (_find_changes(runs, places, least_ns), _find_kinds(runs, places))
    )
    is_step = any(run.clock.has_steps for run in runs)
    return AlignedSteps(
        title="Both steps, aligned" if is_step else "Both traces, aligned",
        runs=labels,
        places=places,
        changes=tuple(sorted([*found, *kinds], key=lambda one: -abs(one.change_ns))),
        unit="step" if is_step else "trace",
        idle="outside operators" if a.on_cpu and b.on_cpu else "idle",
        notes=(*_write_notes((a, b), frames, labels), *([_COUNTED_TWICE] if found and kinds else [])),
    )


class _PlacedRun:
    """The kernels of one run with their places."""

    def __init__(self, clock: Clock, frame: pl.DataFrame) -> None:
        self.clock = clock
        both = pl.col("own_ns") + pl.col("wait_ns")
        own = frame.group_by(*PLACE, "class").agg(pl.col("own_ns").sum())
        self._classes: dict[Key, list[tuple[str, float]]] = {}
        for *key, name, time in own.sort("own_ns", "class", descending=[True, False]).iter_rows():
            self._classes.setdefault(_key(key), []).append((name, time))
        waits = frame.group_by(PLACE).agg(pl.col("wait_ns").sum())
        self._waits: dict[Key, float] = {_key(key): time for *key, time in waits.iter_rows()}
        self._steps: dict[Key, dict[int, float]] = {}
        for *key, step, time in frame.group_by(*PLACE, "step_at").agg(both.sum()).iter_rows():
            self._steps.setdefault(_key(key), {})[step] = time
        self._kinds = frame.group_by(*PLACE, kind=_name_kind()).agg(both.sum(), count=pl.len() / clock.num_steps)

    def __contains__(self, key: Key) -> bool:
        return key in self._classes

    def sample(self, keys: Iterable[Key]) -> list[Fraction]:
        """The time that these places take in each step."""
        found = [self._steps.get(key, {}) for key in keys]
        steps = range(self.clock.num_steps)
        return [Fraction(sum(one.get(at, 0.0) for one in found)) * self.clock.num_steps for at in steps]

    def sum_kinds(self) -> "dict[tuple[str, str], _Kind]":
        """What runs, by phase and kind."""
        kinds: dict[tuple[str, str], _Kind] = {}
        for *key, name, time_ns, count in self._kinds.iter_rows():
            one = kinds.setdefault((key[0], name), _Kind())
            one.time_ns += time_ns
            one.count += count
            one.places.append(_key(key))
        return kinds

    def round_times(self, keys: Sequence[Key]) -> list[PlaceTime]:
        """Whole nanoseconds that add up to the step: running sums are rounded, not single times."""
        idle_ns = round(self.clock.idle_ns)
        own = [time for key in keys for _, time in self._classes.get(key, ())]
        busy = iter(_round_sums(own, round(self.clock.step_ns) - idle_ns))
        idle = _round_sums([self._waits.get(key, 0.0) for key in keys], idle_ns)
        sides = []
        for key, wait_ns in zip(keys, idle, strict=True):
            found = [(name, next(busy)) for name, _ in self._classes.get(key, ())]
            known = [(name, time) for name, time in found if time]
            sides.append(
                PlaceTime(
                    classes=tuple(name for name, _ in known), times_ns=tuple(time for _, time in known), idle_ns=wait_ns
                )
            )
        return sides


@dataclass(slots=True, kw_only=True)
class _Kind:
    """Kernels of one kind in one phase, per step."""

    count: float = 0.0
    time_ns: float = 0.0
    places: list[Key] = field(default_factory=list)


def _key(values: Sequence[str]) -> Key:
    phase, layer, part = values
    return phase, layer, part


def _round_sums(values: Sequence[float], total: int) -> list[int]:
    sums = [min(round(value), total) for value in itertools.accumulate(values)]
    sums[-1:] = [total] if sums else []
    return [after - before for before, after in itertools.pairwise([0, *sums])]


def _judge(runs: Sequence[_PlacedRun], key: Key, one: PlaceTime, other: PlaceTime) -> str:
    here = [key in run for run in runs]
    if not all(here):
        return "new" if here[1] else "gone"
    return _judge_change(runs, [key], other.total_ns - one.total_ns)


def _judge_change(runs: Sequence[_PlacedRun], keys: Sequence[Key], change_ns: int) -> Verdict:
    if not are_comparable(runs[0].clock, runs[1].clock):
        return "cannot tell" if change_ns else "same"
    return judge(runs[0].sample(keys), runs[1].sample(keys), change_ns)


# --- The largest changes ----------------------------------------------------------------------------------------------


def _find_changes(runs: Sequence[_PlacedRun], places: Sequence[StepPlace], least_ns: float) -> list[StepChange]:
    """The largest changes beyond noise, by phase and part of the layers. A layer whose change is unlike that of the
    others is named alone. A part that is all of its phase needs no label."""
    phases = Counter(place.phase for place in places)
    groups: dict[tuple[str, str, bool], list[int]] = {}
    for at, place in enumerate(places):
        groups.setdefault((place.phase, _NUMBER.sub("", place.part), bool(place.layer)), []).append(at)
    changes = []
    for (phase, part, in_layer), members in groups.items():
        if len(members) == phases[phase]:
            continue
        for chosen in _split_group(places, members, least_ns):
            keys = [(phase, places[at].layer, places[at].part) for at in chosen]
            change_ns = sum(places[at].change_ns for at in chosen)
            if _judge_change(runs, keys, change_ns) not in ("same", "noise"):
                text = _say_place([places[at] for at in chosen], part, in_layer=in_layer)
                changes.append(StepChange(text=text, change_ns=change_ns, places=tuple(chosen)))
    return sorted(changes, key=lambda one: -abs(one.change_ns))[:_MOST_CHANGES]


def _split_group(places: Sequence[StepPlace], members: Sequence[int], least_ns: float) -> Iterator[list[int]]:
    """Yield each member that changed by `least_ns` more than is usual in the group, then the others together."""
    usual = statistics.median(places[at].change_ns for at in members)
    unlike = max(least_ns, _UNLIKE * abs(usual))
    alone = [at for at in members if abs(places[at].change_ns - usual) >= unlike]
    yield from ([at] for at in alone)
    if rest := [at for at in members if at not in alone]:
        yield rest


def _say_place(places: Sequence[StepPlace], part: str, *, in_layer: bool) -> str:
    if len(places) == 1:
        return places[0].name or "the rest"
    return f"{part or 'the rest'} in {count_noun(len(places), 'layer' if in_layer else 'place')}"


def _name_kind() -> pl.Expr:
    """What a kernel does, in words that do not depend on its precision."""
    of_class = ~pl.col("class").is_in(_NAMED_BY_WORDS)
    compiled = pl.col("short").str.contains("Inductor", literal=True)
    words = pl.col("short").str.replace_all(_MANNER, "").str.replace_all(r"\s+", " ").str.strip_chars(" ,")
    return (
        pl.when("is_cast")
        .then(pl.lit("cast"))
        .when(of_class)
        .then("class")
        .when(compiled)
        .then(pl.concat_str(pl.lit("Inductor "), pl.col("class")))
        .otherwise(words)
    )


def _find_kinds(runs: Sequence[_PlacedRun], places: Sequence[StepPlace]) -> list[StepChange]:
    """Kernels that only one run has in a phase. Their time is part of the changes of their places."""
    index = {(place.phase, place.layer, place.part): at for at, place in enumerate(places)}
    found = [run.sum_kinds() for run in runs]
    changes = []
    for mine, theirs, word, sign in ((found[0], found[1], "gone", -1), (found[1], found[0], "new", 1)):
        for name, kind in mine.items():
            if name not in theirs:
                at = tuple(sorted(index[key] for key in kind.places))
                text = f"{word}: {say_count(round(kind.count, 1))} × {name[1]}"
                changes.append(StepChange(text=text, change_ns=sign * round(kind.time_ns), places=at))
    return sorted(changes, key=lambda one: -abs(one.change_ns))[:_MOST_KINDS]


# --- Notes and tables -------------------------------------------------------------------------------------------------


def _write_notes(profiles: Sequence[Profile], frames: Sequence[pl.DataFrame], labels: Sequence[str]) -> Iterator[str]:
    if lacking := say_lacking_modules(profiles, labels):
        yield f"modules: {lacking}; its places follow from the order of GEMMs and attention in both runs"
    elif any(_NUMBER.search(part) for frame in frames for part in frame["part"].unique()):
        yield "modules: not recorded; places are GEMMs and attention in order, each with the kernels that follow it"


def tabulate_places(steps: AlignedSteps) -> Table:
    """The places, the largest change first; the smallest ones are one row. All rows add up to the change of the
    step."""
    order = sorted(steps.places, key=lambda place: (-abs(place.change_ns), -place.width_ns))
    shown, rest = order[:_MOST_ROWS], order[_MOST_ROWS:]
    total = sum(place.change_ns for place in steps.places)
    phases = Counter(place.phase for place in steps.places)
    rows = [
        _cells((place.phase, place.name or (REST if phases[place.phase] > 1 else _ALL), place.verdict), [place], total)
        for place in shown
    ]
    rows += [_cells(("", f"{len(rest)} more", ""), rest, total)] if rest else []
    a, b = steps.runs
    per = "per step" if steps.unit == "step" else "in the trace"
    return Table(
        title="Changes by phase and layer, in ms",
        columns=(
            Column(key="phase", label="phase"),
            Column(key="place", label=per),
            Column(key="a_ms", label=a, kind="ms"),
            Column(key="b_ms", label=b, kind="ms"),
            Column(key="difference_ms", label="change", kind="ms"),
            Column(key="ratio", label="ratio", kind="ratio"),
            Column(key="share_of_change", label="of change", kind="share"),
            Column(key="verdict", label="verdict"),
            Column(key="a_ns", label=f"{a} in ns", kind="count", detail=True),
            Column(key="b_ns", label=f"{b} in ns", kind="count", detail=True),
        ),
        rows=tuple(rows),
        notes=("each place with its idle time; all places add up to the step",),
        compared=("a_ms", "b_ms", "difference_ms"),
    )


def _cells(names: tuple[str, str, str], places: Sequence[StepPlace], total: int) -> tuple[Cell, ...]:
    one, other = (sum(place.sides[run].total_ns for place in places) for run in (0, 1))
    ratio = other / one if one else None
    share = (other - one) / total if total else None
    phase, place, verdict = names
    return (phase, place, one / _MS, other / _MS, (other - one) / _MS, ratio, share, verdict, one, other)


def tabulate_phases(steps: AlignedSteps) -> Table | None:
    """The phases, each with its idle time; None if they are unknown."""
    names = list(dict.fromkeys(place.phase for place in steps.places))
    if not all(names):
        return None
    total = sum(place.change_ns for place in steps.places)
    rows = []
    for name in names:
        inside = [place for place in steps.places if place.phase == name]
        _, _, *times, _, a_ns, b_ns = _cells((name, "", ""), inside, total)
        idle = [sum(place.sides[run].idle_ns for place in inside) / _MS for run in (0, 1)]
        rows.append((name, *times, *idle, a_ns, b_ns))
    a, b = steps.runs
    keys = ("a_ms", "b_ms", "difference_ms", "a_idle_ms", "b_idle_ms")
    labels = (a, b, "change", f"{a} idle", f"{b} idle")
    first, second, change, *idles = (
        Column(key=key, label=label, kind="ms") for key, label in zip(keys, labels, strict=True)
    )
    return Table(
        title="Changes by phase, in ms",
        columns=(
            Column(key="phase", label="per step" if steps.unit == "step" else "in the trace"),
            *(first, second, change),
            Column(key="ratio", label="ratio", kind="ratio"),
            Column(key="share_of_change", label="of change", kind="share"),
            *idles,
            Column(key="a_ns", label=f"{a} in ns", kind="count", detail=True),
            Column(key="b_ns", label=f"{b} in ns", kind="count", detail=True),
        ),
        rows=tuple(rows),
        notes=("each phase with its idle time, as in the picture of the steps",),
        compared=keys,
    )

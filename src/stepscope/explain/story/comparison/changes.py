"""What is different between two runs: the settings, the time by class, phase, module and kernel, and the memory."""

from dataclasses import dataclass
from typing import Literal

import msgspec

from stepscope.explain.questions.answers import say_list
from stepscope.explain.story.commands import find_case
from stepscope.explain.story.comparison.side_by_side import join_missing
from stepscope.explain.story.missing import explain_absence
from stepscope.explain.story.opening import Opening
from stepscope.explain.story.phrases import name_class
from stepscope.explain.story.sections.environment_facts import find_environment
from stepscope.explain.story.sources import NOISE, Materials
from stepscope.explain.trace.comparability import describe_software, list_settings, list_versions
from stepscope.explain.trace.compare import (
    IDLE,
    OVERLAP,
    REST,
    By,
    ComparisonRow,
    ProfileComparison,
    compare,
    comparison_table,
    judge,
    say_sum,
)
from stepscope.findings import Bars, Cell, Column, Exhibit, Missing, Section, Table
from stepscope.units import say_size, say_time

# Settings that decide how much there is to do, and on what. The others decide how it is done.
DECIDES_WORK = ("model", "batch", "context", "mode", "device")
_BY: tuple[By, ...] = ("class", "phase", "module", "kernel")
_NAMED = 3  # changes in the lead
_WORTH_NAMING = 0.02  # of A's step
_STRETCHED = "idle is as recorded: a recorder lengthens what the host does, and idle time with it"

Setting = tuple[str, str, str]  # what, and its value in A and in B; empty where it is not known


def show_changes(a: Materials, b: Materials) -> Section:
    exhibits: list[Exhibit] = []
    missing: list[Missing] = []
    said: list[str] = []
    settings = tell_settings(a, b)
    if settings:
        exhibits.append(Exhibit(key="changes-settings", part=_settings_table(settings)))
    if a.profile and b.profile:
        names = (a.name, b.name)
        comparisons = {by: compare(a.profile, b.profile, by=by, names=names) for by in _BY}
        taken = _take_apart(comparisons["class"], Opening(a), Opening(b))
        exhibits += [Exhibit(key="changes-time", part=_draw_time(taken)), *_show_tables(comparisons)]
        said.append(_say_time_changes(taken))
    else:
        missing += _absent(a, b, "profile", "what of the step's time changed")
    if a.memory and b.memory:
        peaks = dict(a.memory.categories_at(a.memory.peak_event)), dict(b.memory.categories_at(b.memory.peak_event))
        exhibits += _show_memory(*peaks)
        said.append(_say_memory_changes(*peaks))
    else:
        missing += _absent(a, b, "memory", "what of the memory changed")
    lead = " ".join(text for text in said if text)
    return Section(key="changes", title="What changed", lead=lead, exhibits=tuple(exhibits), missing=tuple(missing))


def _absent(a: Materials, b: Materials, stage: Literal["profile", "memory"], what: str) -> tuple[Missing, ...]:
    """For each run that lacks it: both have to have it."""
    return join_missing(
        *([explain_absence(one, stage, what)] if getattr(one, stage) is None else [] for one in (a, b)),
    )


# --- Settings ---------------------------------------------------------------------------------------------------------


def tell_settings(a: Materials, b: Materials) -> list[Setting]:
    """Those that differ, of what was run, where and with what."""
    left, right = _describe(a), _describe(b)
    names = dict.fromkeys((*left, *right))
    return [(name, left.get(name, ""), right.get(name, "")) for name in names if left.get(name) != right.get(name)]


def _describe(materials: Materials) -> dict[str, str]:
    case, environment = find_case(materials), find_environment(materials)
    manifests = [one.recording.manifest for one in (materials.profile, materials.memory) if one is not None]
    ran = [row.optimizer for row in materials.bench] + [one.optimizer for one in manifests]
    said = list_settings(case, next((one for one in ran if one), None)) if case is not None else {}
    devices = [one.device for one in manifests if one.device]
    if environment is not None:
        return {**said, "device": environment.driver_name, **describe_software(environment)}
    said |= {"device": devices[0]} if devices else {}
    return {**said, **(list_versions(manifests[0]) if manifests else {})}


def _settings_table(settings: list[Setting]) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = tuple((name, one or None, other or None) for name, one, other in settings)
    return Table(
        title="What was set otherwise",
        columns=(Column(key="setting", label="setting"), Column(key="a", label="A"), Column(key="b", label="B")),
        rows=rows,
        notes=("what is not listed is the same in both, as far as both say",),
    )


# --- Time -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """Steps taken apart, the largest change first: as recorded, or with idle time by the clock of the page."""

    parts: tuple[ComparisonRow, ...]
    steps_ns: tuple[float, float]
    is_recorded: bool


def _take_apart(comparison: ProfileComparison, a: Opening, b: Opening) -> _Taken:
    """A recorder lengthens idle time and leaves kernels as they are. So idle is what the kernels leave of the step at
    the top of the page, where both runs have one without the recorder and their kernels fit into it."""
    wall = comparison.wall
    recorded = _Taken(parts=comparison.parts, steps_ns=(wall.a_ns, wall.b_ns), is_recorded=True)
    if a.step_ns is None or b.step_ns is None or not (_has_plain_gaps(a) and _has_plain_gaps(b)):
        return recorded
    kernels = [row for row in comparison.parts if row.name != IDLE]
    busy = sum(row.a_ns for row in kernels), sum(row.b_ns for row in kernels)
    steps = a.step_ns, b.step_ns
    if any(one > (1 + NOISE) * step for one, step in zip(busy, steps, strict=True)):
        return recorded
    # How long kernels take hardly varies, so that idle time varies as the steps do.
    samples = [[step - one for step in run.materials.step_samples] for one, run in zip(busy, (a, b), strict=True)]
    idle = ComparisonRow(
        group=comparison.by,
        name=IDLE,
        a_ns=max(0, round(steps[0]) - busy[0]),
        b_ns=max(0, round(steps[1]) - busy[1]),
        verdict=judge(samples[0], samples[1]) if samples[0] and samples[1] else "cannot tell",
    )
    parts = sorted((*kernels, idle), key=lambda row: (-abs(row.difference_ns), -row.b_ns, row.name))
    return _Taken(parts=tuple(parts), steps_ns=steps, is_recorded=False)


def _has_plain_gaps(opening: Opening) -> bool:
    shares = opening.shares
    return shares is not None and shares.profile.has_gaps and opening.materials.clock_kind != "recorded"


def _draw_time(taken: _Taken) -> Bars:
    parts = taken.parts
    sums = sum(row.a_ns for row in parts), sum(row.b_ns for row in parts)
    longer = [run for run, one, step in zip("AB", sums, taken.steps_ns, strict=True) if one > round(step)]
    notes = ["the largest change first" + ("" if longer else "; the bars of a run add up to its step")]
    notes += [f"{run}: its kernels took longer while recorded than the step was timed at" for run in longer]
    notes.append(_STRETCHED if taken.is_recorded else "idle: what the kernels leave of a step without the recorder")
    return Bars(
        title=f"A step's wall time{' while recorded' * taken.is_recorded}, by what ran alone",
        kind="ms",
        labels=tuple(row.name.strip("()") for row in parts),
        series=("A", "B"),
        values=(tuple(row.a_ns / 1e6 for row in parts), tuple(row.b_ns / 1e6 for row in parts)),
        notes=tuple(notes),
    )


def _show_tables(comparisons: dict[By, ProfileComparison]) -> list[Exhibit]:
    """The totals, and each note, stand once."""
    first = comparison_table(comparisons["class"])
    sums = "in each of these tables the parts add up to `wall`: what ran alone, several at once, and idle"
    notes = (*(sums if note == say_sum("class") else note for note in first.notes), _STRETCHED)
    first = msgspec.structs.replace(first, title="What changed, by class", notes=notes)
    exhibits = [Exhibit(key="changes-class", part=first)]
    said = set(first.notes)
    for by in _BY[1:]:
        table = _parts_alone(comparisons[by], said | {say_sum(by)})
        if len(table.rows) > 1:
            exhibits.append(Exhibit(key=f"changes-{by}", part=table))
            said |= set(table.notes)
    return exhibits


def _parts_alone(comparison: ProfileComparison, said: set[str]) -> Table:
    table = comparison_table(comparison)
    rows = tuple(row[1:] for row in table.rows if row[0] == comparison.by)
    notes = tuple(note for note in table.notes if note not in said)
    return Table(title=f"What changed, by {comparison.by}", columns=table.columns[1:], rows=rows, notes=notes)


def _say_time_changes(taken: _Taken) -> str:
    """Of idle time only what is not the recorder's doing."""
    least = _WORTH_NAMING * taken.steps_ns[0]
    known = [row for row in taken.parts if row.name != IDLE or not taken.is_recorded]
    changed = [row for row in known if abs(row.difference_ns) >= least and row.verdict not in ("same", "noise")]
    if not changed:
        return "No class of kernels changed by more than noise and 2% of the step."
    named = say_list(
        f"{_name(row)} {say_time(abs(row.difference_ns))} {'less' if row.difference_ns < 0 else 'more'}"
        for row in changed[:_NAMED]
    )
    a, b = (say_time(step) for step in taken.steps_ns)
    whose = "A recorded step of B's" if taken.is_recorded else "B's step"
    return f"{whose} takes {b} where A's takes {a}: {named}."


def _name(row: ComparisonRow) -> str:
    return row.name.strip("()") if row.name in (IDLE, OVERLAP, REST) else name_class(row.name)


# --- Memory -----------------------------------------------------------------------------------------------------------


def _show_memory(a: dict[str, int], b: dict[str, int]) -> list[Exhibit]:
    names = [name for name in a if a[name] or b[name]]
    names.sort(key=lambda name: (-abs(b[name] - a[name]), -max(a[name], b[name]), name))
    bars = Bars(
        title="Memory at each run's peak",
        kind="bytes",
        labels=tuple(names),
        series=("A", "B"),
        values=(tuple(float(a[name]) for name in names), tuple(float(b[name]) for name in names)),
        notes=("the largest change first; the bars of a run add up to its peak",),
    )
    return [
        Exhibit(key="changes-memory", part=bars),
        Exhibit(key="changes-categories", part=_memory_table(names, a, b)),
    ]


def _memory_table(names: list[str], a: dict[str, int], b: dict[str, int]) -> Table:
    sums = [(name, a[name], b[name]) for name in names] + [("all", sum(a.values()), sum(b.values()))]
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (name, one, other, other - one, other / one if one else None) for name, one, other in sums
    )
    return Table(
        title="Memory at each run's peak",
        columns=(
            Column(key="category", label="category"),
            Column(key="a_bytes", label="A", kind="bytes"),
            Column(key="b_bytes", label="B", kind="bytes"),
            Column(key="difference_bytes", label="B − A", kind="bytes"),
            Column(key="ratio", label="B / A", kind="ratio"),
        ),
        rows=rows,
    )


def _say_memory_changes(a: dict[str, int], b: dict[str, int]) -> str:
    one, other = sum(a.values()), sum(b.values())
    changed = [name for name in a if abs(b[name] - a[name]) >= _WORTH_NAMING * max(1, one)]
    changed.sort(key=lambda name: -abs(b[name] - a[name]))
    if not changed:
        return "What memory holds at the peak is about the same."
    parts = say_list(
        f"{name} {say_size(abs(b[name] - a[name]))} {'less' if b[name] < a[name] else 'more'}"
        for name in changed[:_NAMED]
    )
    return f"At its peak B holds {say_size(other)} where A holds {say_size(one)}: {parts}."

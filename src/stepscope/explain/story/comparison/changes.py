"""What changed between two runs: settings, time by class, phase, module and kernel, and memory."""

from typing import Literal

import msgspec

from stepscope.explain.memory import MemoryProfile
from stepscope.explain.story.commands import find_case
from stepscope.explain.story.comparison.aligned_memory import align_memory, find_peak, tabulate_peaks
from stepscope.explain.story.comparison.aligned_steps import align_steps, tabulate_phases, tabulate_places
from stepscope.explain.story.comparison.side_by_side import Labels, join_missing
from stepscope.explain.story.missing import explain_absence
from stepscope.explain.story.phrases import name_class
from stepscope.explain.story.sections.breakdown import say_lacking_modules
from stepscope.explain.story.sections.environment_facts import find_environment
from stepscope.explain.story.sources import Materials
from stepscope.explain.trace.comparability import describe_software, list_settings, list_versions
from stepscope.explain.trace.compare import (
    IDLE,
    OVERLAP,
    REST,
    By,
    ComparisonRow,
    ProfileComparison,
    are_comparable,
    compare,
    comparison_table,
    say_sum,
)
from stepscope.findings import CHANGES, Bars, Cell, Column, Exhibit, Missing, Section, Table
from stepscope.findings.compared import AlignedSteps
from stepscope.units import say_size, say_time

# Settings that decide how much work a step is, and where it runs. The others decide how it is done.
DECIDES_WORK = ("model", "batch", "context", "mode", "device")
_BY: tuple[By, ...] = ("class", "phase", "module", "kernel")
_NAMED = 3  # changes in the lead
_WORTH_NAMING = 0.02  # of the first run's step
_STRETCHED = "idle time was recorded under a profiler, which slows the CPU: it is shorter without one"

Setting = tuple[str, str, str]  # the name and both values, empty if unknown


def show_changes(a: Materials, b: Materials, labels: Labels) -> Section:
    exhibits: list[Exhibit] = []
    missing: list[Missing] = []
    said: list[str] = []
    settings = tell_settings(a, b)
    if settings:
        exhibits.append(Exhibit(key="changes-settings", part=_settings_table(settings, labels)))
    if a.profile and b.profile:
        names = (a.name, b.name)
        comparisons = {by: compare(a.profile, b.profile, by=by, names=names, labels=labels) for by in _BY}
        by_class = comparisons["class"]
        absent = say_lacking_modules((a.profile, b.profile), labels)
        if absent:
            del comparisons["module"]
            missing.append(Missing(what="changes by module", why=absent))
        steps = None
        if not a.profile.is_serialized and not b.profile.is_serialized:
            steps = align_steps(a.profile, b.profile, labels)
            exhibits.append(Exhibit(key="changes-steps", part=steps))
        exhibits += [Exhibit(key="changes-time", part=_draw_time(by_class)), *_show_tables(comparisons, steps)]
        said.append(_say_time_changes(by_class))
    else:
        missing += _absent(a, b, "profile", "changes in step time", labels)
    if a.memory and b.memory:
        exhibits += _show_memory(a.memory, b.memory, labels)
        said.append(_say_memory_changes(find_peak(a.memory), find_peak(b.memory)))
    else:
        missing += _absent(a, b, "memory", "changes in memory", labels)
    lead = " ".join(text for text in said if text)
    return Section(key=CHANGES, title="What changed", lead=lead, exhibits=tuple(exhibits), missing=tuple(missing))


def _absent(
    a: Materials, b: Materials, stage: Literal["profile", "memory"], what: str, labels: Labels
) -> tuple[Missing, ...]:
    """One entry per run that lacks the stage; a comparison needs both."""
    absent = [[explain_absence(one, stage, what)] if getattr(one, stage) is None else [] for one in (a, b)]
    return join_missing(absent[0], absent[1], labels)


# --- Settings ---------------------------------------------------------------------------------------------------------


def tell_settings(a: Materials, b: Materials) -> list[Setting]:
    """The settings, devices and versions that differ."""
    left, right = describe_settings(a), describe_settings(b)
    names = dict.fromkeys((*left, *right))
    return [(name, left.get(name, ""), right.get(name, "")) for name in names if left.get(name) != right.get(name)]


def describe_settings(materials: Materials) -> dict[str, str]:
    """The settings, device and versions of a run, as far as they are known."""
    case, environment = find_case(materials), find_environment(materials)
    manifests = [one.recording.manifest for one in (materials.profile, materials.memory) if one is not None]
    ran = [row.optimizer for row in materials.bench] + [one.optimizer for one in manifests]
    said = list_settings(case, next((one for one in ran if one), None)) if case is not None else {}
    devices = [one.device for one in manifests if one.device]
    if environment is not None:
        return {**said, "device": environment.driver_name, **describe_software(environment)}
    said |= {"device": devices[0]} if devices else {}
    return {**said, **(list_versions(manifests[0]) if manifests else {})}


def _settings_table(settings: list[Setting], labels: Labels) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = tuple((name, one or None, other or None) for name, one, other in settings)
    return Table(
        title="Settings that differ",
        columns=(
            Column(key="setting", label="setting"),
            Column(key="a", label=labels[0]),
            Column(key="b", label=labels[1]),
        ),
        rows=rows,
        notes=("all other known settings are equal",),
    )


# --- Time -------------------------------------------------------------------------------------------------------------


def _draw_time(comparison: ProfileComparison) -> Bars:
    parts = comparison.parts
    whole = "step" if comparison.has_steps else "trace"
    notes = [f"largest change first; the bars of each run add up to its {whole}"]
    notes += [_STRETCHED] if comparison.has_overhead else []
    return Bars(
        title=f"{_name_step(comparison)} time by kernel class",
        kind="ms",
        labels=tuple(row.name.strip("()") for row in parts),
        series=comparison.labels,
        values=(tuple(row.a_ns / 1e6 for row in parts), tuple(row.b_ns / 1e6 for row in parts)),
        notes=tuple(notes),
    )


def _name_step(comparison: ProfileComparison) -> str:
    if not comparison.has_steps:
        return "Trace"
    return "Profiled step" if comparison.has_overhead else "Step"


def _show_tables(comparisons: dict[By, ProfileComparison], steps: AlignedSteps | None) -> list[Exhibit]:
    """One table per grouping, and one of all places; the phases are those of `steps`, with their idle time, if they are
    known. The totals and each note appear only once."""
    first = comparison_table(comparisons["class"])
    sums = "the parts of each table add up to `wall`: kernels running alone, several at once, and idle"
    # The measurement quality has the remarks.
    remarks = comparisons["class"].remarks
    notes = tuple(sums if note == say_sum("class") else note for note in first.notes if note not in remarks)
    first = msgspec.structs.replace(first, title="Changes by class, in ms", notes=notes)
    exhibits = [Exhibit(key="changes-class", part=first)]
    said = {*first.notes, *remarks}
    phases = tabulate_phases(steps) if steps else None
    for by in (by for by in _BY[1:] if by in comparisons):
        table = phases if by == "phase" and phases else _parts_alone(comparisons[by], said | {say_sum(by)})
        if len(table.rows) > 1:
            exhibits.append(Exhibit(key=f"changes-{by}", part=table))
            said |= set(table.notes)
    if steps is not None and len(steps.places) > 1:
        exhibits.insert(1, Exhibit(key="changes-places", part=tabulate_places(steps)))
    return exhibits


def _parts_alone(comparison: ProfileComparison, said: set[str]) -> Table:
    table = comparison_table(comparison)
    rows = tuple(row[1:] for row in table.rows if row[0] == comparison.by)
    notes = tuple(note for note in table.notes if note not in said)
    return Table(
        title=f"Changes by {comparison.by}, in ms",
        columns=table.columns[1:],
        rows=rows,
        notes=notes,
        compared=table.compared,
    )


def _say_time_changes(comparison: ProfileComparison) -> str:
    """The largest changes; idle time only if a profiler made both steps longer, or neither."""
    wall = comparison.wall
    known = [row for row in comparison.parts if row.name != IDLE or are_comparable(*comparison.clocks)]
    least = _WORTH_NAMING * wall.a_ns
    changed = [row for row in known if abs(row.difference_ns) >= least and row.verdict not in ("same", "noise")]
    step = _name_step(comparison)
    if not changed:
        return f"No kernel class changed by more than noise and 2% of the {step.lower()}."
    named = ", ".join(
        f"{_name(row)} {_say_sign(row.difference_ns)}{say_time(abs(row.difference_ns))}" for row in changed[:_NAMED]
    )
    return f"The {step.lower()} goes from {say_time(wall.a_ns)} to {say_time(wall.b_ns)}: {named}."


def _say_sign(difference: int) -> str:
    return "−" if difference < 0 else "+"


def _name(row: ComparisonRow) -> str:
    return row.name.strip("()") if row.name in (IDLE, OVERLAP, REST) else name_class(row.name)


# --- Memory -----------------------------------------------------------------------------------------------------------


def _show_memory(a: MemoryProfile, b: MemoryProfile, labels: Labels) -> list[Exhibit]:
    aligned, table = align_memory(a, b, labels), tabulate_peaks(find_peak(a), find_peak(b), labels)
    drawn = [Exhibit(key="changes-memory", part=aligned)] if aligned is not None else []
    return [*drawn, Exhibit(key="changes-categories", part=table)]


def _say_memory_changes(a: dict[str, int], b: dict[str, int]) -> str:
    one, other = sum(a.values()), sum(b.values())
    changed = [name for name in a if abs(b[name] - a[name]) >= _WORTH_NAMING * max(1, one)]
    changed.sort(key=lambda name: -abs(b[name] - a[name]))
    if not changed:
        return "Peak memory is about the same in every category."
    parts = ", ".join(
        f"{name} {_say_sign(b[name] - a[name])}{say_size(abs(b[name] - a[name]))}" for name in changed[:_NAMED]
    )
    return f"Peak memory goes from {say_size(one)} to {say_size(other)}: {parts}."

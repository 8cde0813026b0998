"""Checks of what pages, comparisons and answers state: that statements agree, parts add up and savings are possible."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from stepscope.api.run import Run
from stepscope.explain.story.sections.breakdown import add_up, tabulate_dimensions
from stepscope.explain.trace.compare import ProfileComparison
from stepscope.explain.trace.profile_tables import PARTS, make_part
from stepscope.explain.trace.summary import Summary
from stepscope.findings import Bars, Breakdown, Cell, Finding, Lanes, Report, Table, joint_saving
from tests.unit.explain.story.statements import (
    PERCENT,
    TIME,
    Statement,
    column,
    parts_of,
    place_of,
    read_finding,
    read_percent,
    read_time,
)

_SHARE_SLACK = 1e-6
# What a finding is about: times that its fix can shorten.
_ABOUT = re.compile(
    rf"(?:takes?|up to|idle for|communication:|GPU waits) {TIME}|{TIME} (?:per step |in the trace )?does not overlap"
)


@dataclass(frozen=True)
class Contradiction:
    """`check` names what does not hold."""

    check: str
    details: str

    def __str__(self) -> str:
        return f"{self.check}: {self.details}"


def check_same(statements: Iterable[Statement]) -> Iterator[Contradiction]:
    """All statements about a quantity agree with the exact ones, or with each other."""
    known: dict[str, list[Statement]] = {}
    for one in statements:
        known.setdefault(one.quantity, []).append(one)
    for quantity, told in known.items():
        ordered = sorted(told, key=lambda one: one.rounding)
        for one in ordered[1:]:
            if abs(one.value - ordered[0].value) > one.rounding + ordered[0].rounding:
                yield Contradiction(f"two values of {quantity}", f"{ordered[0]}; {one}")


def check_sum(parts: Sequence[float], whole: float, what: str, *, slack: float = 0.0) -> Iterator[Contradiction]:
    """`slack` is for parts that are each rounded to whole nanoseconds."""
    if abs(math.fsum(parts) - whole) > 1e-7 * max(abs(whole), *map(abs, parts), 1e-3) + slack:
        yield Contradiction("parts do not add up", f"{what}: {math.fsum(parts):.6g} of {whole:.6g}")


def check_most(value: float, most: float, what: str) -> Iterator[Contradiction]:
    if value > most * (1 + 1e-6) + 1.0:  # nanoseconds are rounded to whole ones
        yield Contradiction("more than the whole", f"{what}: {value:.6g} of {most:.6g}")


def check_report(report: Report, run: Run) -> Iterator[Contradiction]:
    """`run` is the one that the cards are about: the second of two."""
    for key, part in parts_of(report):
        if isinstance(part, Breakdown):
            yield from _check_breakdown(part, key)
        if isinstance(part, Bars) and key.startswith("ranks-time"):
            for place, label in enumerate(part.labels):
                if any((one[place] or 0) < 0 for one in part.values):
                    yield Contradiction("negative part", f"{key}, {label}: {[one[place] for one in part.values]}")
    yield from _check_ranks(report)
    steps = [part.walls_ns[-1] for _, part in parts_of(report) if isinstance(part, Breakdown)]
    if report.advice is not None:
        yield from check_savings([advice.finding for advice in report.advice], steps[0], find_room(run), "card")


def _check_ranks(report: Report) -> Iterator[Contradiction]:
    """Compute as a multiple of the mean has a mean of 1, the lead names the largest, and a timeline fits its step."""
    for section in (one for one in report.sections if one.key == "ranks"):
        tables = [one.part for one in section.exhibits if isinstance(one.part, Table) and one.key == "ranks-table"]
        for table in tables:
            ratios = column(table, "compute_ratio")
            if any(ratios):
                yield from check_sum(ratios, float(len(ratios)), "compute of ranks as multiples of their mean")
            for said in re.findall(r"computes ([\d.]+)× the mean", section.lead):
                if abs(float(said) - max(ratios)) > 0.006:
                    yield Contradiction("imbalance", f"{said} in the lead, {max(ratios)} in the table")
        for lanes in (one.part for one in section.exhibits if isinstance(one.part, Lanes)):
            for track in lanes.tracks:
                if sum(track.spans.lengths_ns) > lanes.span_ns:
                    yield Contradiction("longer than the step", f"{track.label} of {lanes.title}")


def _check_breakdown(part: Breakdown, where: str) -> Iterator[Contradiction]:
    for run, _ in enumerate(part.runs):
        whole = math.fsum(part.times_ns[run])
        if not 0 <= part.idles_ns[run] <= part.walls_ns[run]:
            yield Contradiction("idle outside the step", f"{where}: {part.idles_ns[run]} of {part.walls_ns[run]}")
        for place, dimension in enumerate(part.dimensions):
            yield from check_sum(list(add_up(part, place).times_ns[run]), whole, f"{where} by {dimension.key}")
    for key, table in tabulate_dimensions(part):
        for share in (one.key for one in table.columns if one.key.startswith("share")):
            if any(column(table, share)):
                yield from check_sum(column(table, share), 1.0, f"{where}, shares by {key}")


def check_savings(findings: Sequence[Finding], step_ns: float, room_ns: float, where: str) -> Iterator[Contradiction]:
    """All fixes together save at most the step and at least as much as any one of them, and what each adds is at most
    what it saves alone or what the others leave."""
    for finding in findings:
        for one in (finding, *finding.also):
            yield from _check_saving(one, step_ns, room_ns, where)
    joint = joint_saving(findings)
    if joint is None:
        return
    yield from check_most(joint.saving_ns, step_ns, f"{where}: joint saving of the step")
    if abs(joint.share - joint.saving_ns / step_ns) > _SHARE_SLACK + len(findings) / step_ns:
        yield Contradiction(
            "share of another step", f"{where}: joint {joint.share:.6g}, {joint.saving_ns} of {step_ns}"
        )
    for one in findings:
        if one.joint_ns is not None and one.joint_ns < 0:
            yield Contradiction("negative part", f"{where} {one.code} adds {one.joint_ns} to the joint saving")
        if one.joint_ns is not None and (one.saving_ns or 0) > joint.saving_ns + len(findings):
            said = f"{where} {one.code} saves {one.saving_ns} alone, all fixes together {joint.saving_ns}"
            yield Contradiction("one fix saves more than all", said)


def _check_saving(finding: Finding, step_ns: float, room_ns: float, where: str) -> Iterator[Contradiction]:
    """A fix saves at most the step, and at most the kernels it is about and the time in which the longest stream is
    idle."""
    saving, name = finding.saving_ns, f"{where} {finding.code}"
    if saving is None:
        return
    yield from check_most(saving, step_ns, f"{name}: saving of the step")
    assert finding.share is not None, "a saving has a share"
    if abs(finding.share - saving / step_ns) > _SHARE_SLACK + 1 / step_ns:
        yield Contradiction(
            "share of another step",
            f"{name}: {finding.share:.6g}, but {saving} of {step_ns:.6g} ns is {saving / step_ns:.6g}",
        )
    texts = [f"{one.title}. {one.evidence}" for one in (finding, *finding.also)]
    times = [[value + rounding for value, rounding in map(_read, _ABOUT.finditer(text))] for text in texts]
    about = math.fsum(max(each, default=0.0) for each in times)
    yield from check_most(saving, about + room_ns, f"{name}: saving of {' + '.join(texts)!r}")
    if finding.about is not None and not 0 <= finding.about <= 1:
        yield Contradiction("more than the whole", f"{name} is about {finding.about:.6g} of the step")


def find_room(run: Run) -> float:
    """What a step could be shorter with the same kernels: all but those of the longest stream, which run one after
    another."""
    profile = run.profile
    busiest = max(profile.devices, key=lambda one: sum(one.whole.classes.values()) + one.whole.overlap_ns)
    longest = max(one.busy_ns for one in busiest.streams.values())
    return max(0.0, profile.clock.step_ns - profile.clock.per_step(longest))


def _read(found: re.Match[str]) -> tuple[float, float]:
    number, unit = (group for group in found.groups() if group is not None)
    return read_time(number, unit)


def check_clock(run: Run) -> Iterator[Contradiction]:
    """Profiling slows the CPU and never makes it faster: an unprofiled step is the step of the page only if it is
    shorter than the profiled one by more than single steps differ."""
    clock = run.profile.clock
    steps = sorted(clock.unprofiled_steps)
    if not steps or clock.kind == "profiled":
        return
    said = f"{float(steps[0]):.6g} to {float(steps[-1]):.6g} ns unprofiled, {clock.profiled_ns} ns profiled"
    if clock.step_ns >= clock.profiled_ns:
        yield Contradiction("slower unprofiled steps are the clock", said)
    elif steps[4 * len(steps) // 5] >= clock.profiled_ns:
        yield Contradiction("noisy unprofiled steps are the clock", said)
    if clock.busy_ns + clock.idle_ns != clock.step_ns:
        yield Contradiction("busy and idle are not the step", f"{clock.busy_ns} + {clock.idle_ns}, {clock.step_ns}")


def check_top_kernels(run: Run) -> Iterator[Contradiction]:
    """The kernels that a finding names as the longest are the first rows of the table of kernels."""
    told = next((one.evidence for one in run.ranks[0].findings if one.code == "SS014"), "")
    named = re.findall(rf"(.+?) \({PERCENT}\)(?:, |$)", told.partition("; mostly launched at")[0])
    table = make_part(run.profile, "kernels")
    for (short, under, number), row in zip(named, table.rows, strict=False):
        cells = dict(zip((one.key for one in table.columns), row, strict=True))
        value, rounding = read_percent(under, number)
        share = cells["share"]
        assert isinstance(share, float)
        if short != cells["short"] or abs(value - share) > rounding:
            yield Contradiction("other longest kernels", f"{told!r}, but the table has {cells['short']} ({share:.3%})")


def check_explain(run: Run) -> Iterator[Contradiction]:
    profile = run.profile
    yield from check_clock(run)
    yield from check_top_kernels(run)
    for name in PARTS:
        table = make_part(profile, name)
        keys = {one.key for one in table.columns}
        if name == "ranges":  # they are nested
            for share in column(table, "share"):
                yield from check_most(share * profile.step_ns, profile.step_ns, "share of a range")
        elif name == "loop":
            yield from check_sum(column(table, "share")[:-1], 1.0 if table.rows else 0.0, "shares of table loop")
            yield from (
                Contradiction("negative part", f"table loop: {row}")
                for row in table.rows
                if (row[place_of(table, "cpu_ms")] or 0) < 0  # type: ignore[operator]
            )
        elif name == "tree":
            yield from _check_tree(table)
        elif name == "experts":  # a part of the model
            yield from check_most(sum(column(table, "share")), 1.0, "shares of table experts")
        elif name == "syncs":  # several threads may wait at the same time
            for share in column(table, "share"):
                yield from check_most(share * profile.step_ns, profile.step_ns, "share of a wait")
        elif "share" in keys:
            yield from check_sum(column(table, "share"), 1.0, f"shares of table {name}")
    classes = make_part(profile, "classes")
    rows = {row[0]: float(row[place_of(classes, "alone_ms")] or 0) for row in classes.rows}
    if profile.has_gaps:
        times = [time for name, time in rows.items() if name != "wall"]
        yield from check_sum(times, rows["wall"], "table classes", slack=1e-6 * len(profile.devices))
    kernels = make_part(profile, "kernels")
    for row in kernels.rows:
        cells = dict(zip((one.key for one in kernels.columns), row, strict=True))
        count, mean, total = (float(cells[key] or 0) for key in ("count", "mean_us", "kernel_ms"))
        yield from check_sum([count * mean / 1e3], total, f"count × mean of {cells['short']}")
    streams = make_part(profile, "streams")
    for row in streams.rows:
        *parts, wall = [float(cell or 0) for cell in row[2:]]
        yield from check_sum(parts, wall, f"stream {row[1]}")
    for rank in run.ranks:
        summary = rank.summary
        assert isinstance(summary, Summary)
        yield from _check_summary(summary, rank)


def _check_tree(table: Table) -> Iterator[Contradiction]:
    """What is inside a module adds up to it, and the modules at the top to the kernel time; so do the phases and, in
    the time of one of them, the copies."""
    depth, time, share, count = (place_of(table, key) for key in ("depth", "kernel_ms", "share", "count"))
    phases = [at for at, one in enumerate(table.columns) if one.key.endswith("_ms") and at > place_of(table, "max_ms")]
    around: list[tuple[Cell, ...]] = []
    inside: dict[int, list[tuple[Cell, ...]]] = {}
    rows = {id(row): row for row in table.rows}
    for row in table.rows:
        del around[int(row[depth] or 0) :]
        if around:
            inside.setdefault(id(around[-1]), []).append(row)
        around.append(row)
        yield from check_sum([float(row[at] or 0) for at in phases], float(row[time] or 0), f"phases of {row[0]}")
        copies = float(row[place_of(table, "copies")] or 1)
        each, least, most = (float(row[place_of(table, key)] or 0) for key in ("each_ms", "min_ms", "max_ms"))
        if copies > 1:
            yield from check_sum([copies * each], float(row[time] or 0), f"copies of {row[0]}")
            if not least <= each * (1 + 1e-9) <= most * (1 + 2e-9):
                yield Contradiction("a mean outside its range", f"{row[0]}: {least}, {each}, {most}")
    for one, parts in inside.items():
        for at in (time, share, count, *phases):
            whole = float(rows[one][at] or 0)
            yield from check_sum([float(row[at] or 0) for row in parts], whole, f"inside {rows[one][0]}")
    top = [float(row[share] or 0) for row in table.rows if row[depth] == 0]
    yield from check_sum(top, 1.0, "shares of table tree")


def _check_summary(summary: Summary, run: Run) -> Iterator[Contradiction]:
    for group in (summary.classes, summary.phases, summary.modules, summary.kernels):
        yield from check_sum([one.time_ns for one in group], summary.gpu_time_ns, "JSON: kernel time")
        yield from check_sum([one.share for one in group], 1.0, "JSON: shares")
    for device in summary.devices:
        for one in (device.account, *(stream.account for stream in device.streams)):
            parts = [*one.classes.values(), one.overlap_ns, one.idle_ns]
            yield from check_sum(parts, one.wall_ns, f"JSON: device {device.device}")
            communicating = one.communication_exposed_ns + one.communication_hidden_ns
            yield from check_most(communicating, one.wall_ns, "JSON: communication in the wall time")
    step = summary.step_ns
    yield from check_savings(summary.findings, step, find_room(run), "JSON")
    for finding in summary.findings:
        text = f"{finding.title}. {finding.evidence}"
        told = math.fsum(one.value for one in read_finding(finding, "") if one.quantity in ("exposed", "hidden"))
        yield from check_most(told, step * 1.005, f"communication in {text!r}")


def check_comparison(comparison: ProfileComparison) -> Iterator[Contradiction]:
    for run, name in enumerate(comparison.labels):
        parts = [float((row.a_ns, row.b_ns)[run]) for row in comparison.parts]
        yield from check_sum(parts, float((comparison.wall.a_ns, comparison.wall.b_ns)[run]), f"`compare`, {name}")

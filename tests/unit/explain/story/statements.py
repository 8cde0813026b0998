"""Every quantity that a page, a comparison, `explain` and its answers state, gathered from structured values first and
from sentences second.

A `Statement` says that a quantity has a value, where that is said, and how exactly: a sentence rounds to the digits it
prints. Two statements about one quantity that differ by more than they round contradict each other.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from stepscope.api.run import Run
from stepscope.explain.questions import Answer
from stepscope.explain.story.sections.breakdown import add_up
from stepscope.explain.trace.compare import IDLE, ProfileComparison
from stepscope.explain.trace.module_tree import SELF, name_nodes
from stepscope.explain.trace.profile_tables import make_part
from stepscope.explain.trace.summary import Summary
from stepscope.findings import (
    Bars,
    Breakdown,
    Cell,
    Fact,
    Finding,
    Part,
    Questions,
    Report,
    SideBySide,
    Table,
)
from stepscope.render.terminal import summarize_report

_UNITS = {"s": 1e9, "ms": 1e6, "µs": 1e3, "ns": 1.0}
TIME = r"(\d[\d,]*(?:\.\d+)?) (s|ms|µs|ns)\b"
PERCENT = r"(under )?(\d+(?:\.\d+)?)%"
_EXACT = 1e-9  # relative, of values that are not rounded


@dataclass(frozen=True, kw_only=True)
class Statement:
    quantity: str
    value: float
    rounding: float
    where: str

    def scaled(self, factor: float) -> "Statement":
        return replace(self, value=self.value * factor, rounding=self.rounding * factor)

    def __str__(self) -> str:
        return f"{self.where}: {self.value:.6g}"


def exactly(quantity: str, value: float, where: str) -> Statement:
    return Statement(quantity=quantity, value=value, rounding=_EXACT * abs(value) + 1e-6, where=where)


def of_table(quantity: str, value: Cell, where: str) -> Statement:
    assert isinstance(value, int | float)
    return exactly(quantity, float(value), where)


def column(table: Table, key: str) -> list[float]:
    at = place_of(table, key)
    return [float(cell) for row in table.rows if isinstance(cell := row[at], int | float)]


def place_of(table: Table, key: str) -> int:
    return next(place for place, column in enumerate(table.columns) if column.key == key)


def read_time(number: str, unit: str) -> tuple[float, float]:
    """Nanoseconds, and half a unit of the last digit: a sentence has three digits, or whole units from 1,000 on."""
    value = float(number.replace(",", ""))
    decimals = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    printed = len(number.partition(".")[2])
    return value * _UNITS[unit], 0.501 * 10.0 ** -max(printed, min(decimals, 2)) * _UNITS[unit]


def read_percent(under: str | None, number: str) -> tuple[float, float]:
    value = float(number)
    if under:
        return value / 200, value / 200
    printed = len(number.partition(".")[2])
    if not printed and 0 < value < 10:  # 1.0 is printed as 1
        printed = 1 - math.floor(math.log10(value))
    return value / 100, 0.501 * 10.0**-printed / 100


def times_in(quantity: str, pattern: str, text: str, where: str) -> Iterator[Statement]:
    """One statement per match of `pattern`, in which TIME stands for a time."""
    for found in re.finditer(pattern.replace("TIME", TIME), text):
        value, rounding = read_time(found[1], found[2])
        yield Statement(quantity=quantity, value=value, rounding=rounding, where=f"{where} ({found[0]!r})")


def shares_in(quantity: str, pattern: str, text: str, where: str, *, rest: bool = False) -> Iterator[Statement]:
    """The same with PERCENT; `rest` states 1 minus the share."""
    for found in re.finditer(pattern.replace("PERCENT", PERCENT), text):
        value, rounding = read_percent(found[1], found[2])
        yield Statement(
            quantity=quantity, value=1 - value if rest else value, rounding=rounding, where=f"{where} ({found[0]!r})"
        )


# --- A page -----------------------------------------------------------------------------------------------------------


def parts_of(report: Report) -> Iterator[tuple[str, Part]]:
    """Every part with its key; those of a pair have the run's number behind it."""
    for section in report.sections:
        for exhibit in section.exhibits:
            if isinstance(exhibit.part, SideBySide):
                for run, part in enumerate(exhibit.part.parts):
                    if part is not None:
                        yield f"{exhibit.key} {run}", part
            else:
                yield exhibit.key, exhibit.part


def fact_of(report: Report, key: str) -> Fact | None:
    return next((fact for fact in report.facts if fact.key == key), None)


def lead_of(report: Report, key: str) -> str:
    return next((section.lead for section in report.sections if section.key == key), "")


def read_page(report: Report, *, explains_step: bool, has_idle: bool) -> Iterator[Statement]:
    """The statements of one run's page. If its recording belongs to another run than its step time, the page has two
    steps, and only the recording's is read."""
    if explains_step:
        step = fact_of(report, "step")
        assert step is not None, "a page with a recording has a step or a length"
        yield of_table("step", step.value, "fact").scaled(1e6)
        yield from times_in("step", "TIME per (?:training step|inference step|step)", report.sentence, "headline")
        yield from shares_in(
            "idle share", r"the GPU (?:waits for the CPU|is idle) PERCENT", report.sentence, "headline"
        )
        yield from shares_in("exposed share", r"exposed communication takes PERCENT of it", report.sentence, "headline")
        headline = r"(?:the GPU waits for input|loading input takes) PERCENT"
        yield from shares_in("input share", headline, report.sentence, "headline")
        yield from shares_in("copies share", r"copies between CPU and GPU take PERCENT", report.sentence, "headline")
        if busy := fact_of(report, "busy"):
            yield of_table("busy share", busy.value, "fact")
        for sentence in report.memory_card.sentences if report.memory_card else ():
            yield from times_in("step", "Step time: measured TIME", sentence, "card about memory")
    yield from _read_picture(report, 0, "picture")
    yield from times_in("step", r"in TIME per step", lead_of(report, "timeline"), "timeline's lead")
    if found := re.match(r"([\d,]+) (?:kernel|operator)s? in", lead_of(report, "timeline")):
        count = float(found[1].replace(",", ""))
        yield Statement(quantity="kernels", value=count, rounding=0.501, where="timeline's lead")
    yield from times_in("kernel time", r"take TIME", lead_of(report, "time"), "breakdown's lead")
    yield from times_in("step", "The CPU spends a step of TIME", lead_of(report, "loop"), "loop's lead")
    for key, part in parts_of(report):
        if key == "loop-time" and isinstance(part, Bars):
            yield exactly("step", math.fsum(column[0] or 0.0 for column in part.values) * 1e6, "loop's chart")
        if key == "loop-syncs" and isinstance(part, Table):
            yield from _read_syncs(part, "syncs on the page")
        if key == "loop-table" and isinstance(part, Table):
            yield from _read_loop(part, "loop's table on the page")
        if isinstance(part, Breakdown):
            yield from _read_breakdown(part, 0, key, has_idle=has_idle)
            yield from _read_tree(part, f"tree of {key}")
        if isinstance(part, Questions):
            for question in part.questions:
                yield from read_idle_answer(f"{question.figure}. {question.answer}", f"page's {question.question!r}")
    for advice in report.advice or ():
        yield from read_finding(advice.finding, "card")


def _read_picture(report: Report, run: int, where: str) -> Iterator[Statement]:
    """The bar on the first screen, and the line about it in the terminal."""
    bar = report.picture.bars[run] if report.picture is not None else None
    if bar is None:
        return
    yield exactly("step", bar.step_ns, where)
    yield exactly("step", math.fsum(math.fsum(one.times_ns) + one.idle_ns for one in bar.phases), f"parts of {where}")
    yield exactly("idle", bar.step_ns - bar.busy_ns, where)
    yield exactly("idle", math.fsum(one.idle_ns for one in bar.phases), f"parts of {where}")
    if len(report.runs) == 1:
        (line,) = (one for one in summarize_report(report) if one.startswith(("step: ", "trace: ")))
        yield from times_in("step", r"^(?:step|trace): (?:rank \d+: )?TIME", line, "summary in the terminal")
        if found := re.search(rf"idle {TIME}", line):
            value, rounding = read_time(found[1], found[2])
            yield Statement(quantity="idle", value=value, rounding=rounding, where="summary in the terminal")
        yield from shares_in("idle share", r"idle [\d.,e+-]+ ms \(PERCENT\)", line, "summary in the terminal")


def _read_breakdown(part: Breakdown, run: int, where: str, *, has_idle: bool) -> Iterator[Statement]:
    yield exactly("step", part.walls_ns[run], where)
    yield exactly("kernel time", math.fsum(part.times_ns[run]), where)
    yield exactly("kernels", math.fsum(part.counts[run]), where)
    yield exactly("idle", part.idles_ns[run], where)
    for place, dimension in enumerate(part.dimensions):
        if dimension.key in ("class", "phase"):
            for name, time in zip(dimension.values, add_up(part, place).times_ns[run], strict=True):
                yield exactly(f"time of {dimension.key} {name}", float(time), where)
    if has_idle and part.walls_ns[run]:
        yield exactly("idle share", part.idles_ns[run] / part.walls_ns[run], where)
        yield exactly("busy share", 1 - part.idles_ns[run] / part.walls_ns[run], where)


def _read_tree(part: Breakdown, where: str) -> Iterator[Statement]:
    """The time and the kernels of each node, and of what it runs itself."""
    tree = part.tree
    if tree is None:
        return
    module = [one.key for one in part.dimensions].index("module")
    paths = [name.rpartition(" × ")[2] for name in name_nodes(tree)]
    sums: dict[str, list[float]] = {}
    for row, time, count in zip(part.places, part.times_ns[0], part.counts[0], strict=True):
        node = tree.nodes[row[module]]
        reached = [f"{paths[node]}.{SELF}"]
        while node >= 0:
            reached.append(paths[node])
            node = tree.parents[node]
        for path in reached:
            own = sums.setdefault(path, [0.0, 0.0])
            own[0], own[1] = own[0] + time, own[1] + count
    for path, (time, count) in sums.items():
        yield exactly(f"time of module {path}", time, where)
        yield exactly(f"kernels of module {path}", count, where)


def read_idle_answer(text: str, where: str) -> Iterator[Statement]:
    """The figure and the first sentence of the question about idle time."""
    yield from shares_in("idle share", r"^PERCENT of the (?:step|trace)\.", text, where)
    found = re.search(rf"\. {TIME} (?:idle|outside operators) (?:per step|in the trace), {PERCENT}", text)
    if found:
        value, rounding = read_time(found[1], found[2])
        yield Statement(quantity="idle", value=value, rounding=rounding, where=where)
        value, rounding = read_percent(found[3], found[4])
        yield Statement(quantity="idle share", value=value, rounding=rounding, where=where)


def read_finding(finding: Finding, where: str) -> Iterator[Statement]:
    text = f"{finding.title}. {finding.evidence}"
    yield from shares_in("idle share", r"GPU is idle PERCENT of the step", text, f"{where} {finding.code}")
    if finding.code in ("SS012", "SS020") and finding.about is not None:
        quantity = "input share" if finding.code == "SS012" else "copies share"
        yield exactly(quantity, finding.about, f"{where} {finding.code}")
    if finding.code == "SS001" and finding.about is not None and "launches" in finding.title:
        yield exactly("launch share", finding.about, f"{where} SS001")
        yield from shares_in("launch share", "waits for launches PERCENT", text, f"{where} SS001, title")
    if finding.code == "SS011":
        yield from times_in(
            "exposed", r"TIME (?:per step |in the trace )?does not overlap", text, f"{where} {finding.code}"
        )
        yield from times_in("hidden", r"does not overlap with other kernels, TIME does", text, f"{where} SS011")


# --- A terminal page, its JSON and its answers ------------------------------------------------------------------------


def read_explain(run: Run) -> Iterator[Statement]:
    profile = run.profile
    summary = (run.ranks[0] if len(run.ranks) > 1 else run).summary
    assert isinstance(summary, Summary)
    page = run.page()
    steps, devices = profile.num_steps, len(profile.devices)
    first = page.headline.split("\n\n")[-1]  # a summary of all ranks comes before it
    yield from times_in("step", r"(?:steps? of|no marked steps,) TIME", first, "terminal's headline")
    if profile.has_gaps:
        yield from shares_in("busy share", "busy PERCENT", first, "terminal's headline")
        yield from shares_in("idle share", "idle PERCENT", first, "terminal's headline")
    yield exactly("step", summary.step_ns, "JSON")
    yield exactly("kernel time", summary.gpu_time_ns / steps, "JSON")
    yield exactly("kernels", sum(one.count for one in summary.kernels) / steps, "JSON")
    exposed = sum(one.account.communication_exposed_ns for one in summary.devices)
    hidden = sum(one.account.communication_hidden_ns for one in summary.devices)
    if devices == 1:
        yield exactly("exposed", exposed / steps, "JSON")
        yield exactly("hidden", hidden / steps, "JSON")
    yield exactly("exposed share", exposed / devices / steps / summary.step_ns, "JSON")
    for one in summary.classes:
        yield exactly(f"time of class {one.kernel_class}", one.time_ns / steps, "JSON")
    passes = [phase.time_ns for phase in summary.phases if phase.phase in ("forward", "loss")]
    yield exactly("time of forward and loss", sum(passes) / steps, "JSON")
    for phase in summary.phases:
        yield exactly(f"time of phase {phase.phase}", phase.time_ns / steps, "JSON")
    yield exactly("share of the longest kernel", summary.kernels[0].share, "JSON")
    for finding in summary.findings:
        yield from read_finding(finding, "JSON")
    yield from _read_classes(make_part(profile, "classes"), devices, has_idle=profile.has_gaps)
    for name in ("phases", "kernels", "modules", "layers", "ops"):
        table = make_part(profile, name)
        yield exactly("kernel time", math.fsum(column(table, "kernel_ms")) * 1e6, f"table {name}")
        yield exactly("kernels", math.fsum(column(table, "count")), f"table {name}")
        if name == "phases":
            for row in table.rows:
                time = of_table(f"time of phase {row[0]}", row[place_of(table, "kernel_ms")], "table phases")
                yield time.scaled(1e6)
    tree = make_part(profile, "tree")
    times, counts = (place_of(tree, key) for key in ("kernel_ms", "count"))
    for row in tree.rows:
        path = row[place_of(tree, "module")]
        yield of_table(f"time of module {path}", row[times], "table tree").scaled(1e6)
        yield of_table(f"kernels of module {path}", row[counts], "table tree")
    yield from _read_loop(make_part(profile, "loop"), "table loop")
    yield from _read_syncs(make_part(profile, "syncs"), "table syncs")
    if len(run.ranks) > 1:
        yield from _read_ranks(next(one for one in page.tables if one.title == "Ranks"), profile.has_gaps)


def _read_classes(table: Table, devices: int, *, has_idle: bool) -> Iterator[Statement]:
    """Times in this table are sums over devices."""
    rows = {row[0]: row for row in table.rows}
    alone, share = place_of(table, "alone_ms"), place_of(table, "wall_share")
    if has_idle:
        yield of_table("step", rows["wall"][alone], "table classes").scaled(1e6 / devices)
        yield of_table("idle", rows["idle"][alone], "table classes").scaled(1e6 / devices)
        yield of_table("idle share", rows["idle"][share], "table classes")
    kernels = place_of(table, "kernel_ms")
    for name, row in rows.items():
        if row[kernels] is not None:
            yield of_table(f"time of class {name}", row[kernels], "table classes").scaled(1e6)
    yield exactly("kernel time", math.fsum(column(table, "kernel_ms")) * 1e6, "table classes")
    yield exactly("kernels", math.fsum(column(table, "count")), "table classes")


def _read_loop(table: Table, where: str) -> Iterator[Statement]:
    """The parts, their total, and what belongs to a kernel's phase too."""
    for row in table.rows:
        yield of_table(f"CPU time of {row[0]}", row[place_of(table, "cpu_ms")], where)
        if row[0] == "waiting for the GPU":  # all waits of these recordings are on the thread of the loop
            yield of_table("waiting for the GPU", row[place_of(table, "cpu_ms")], where)
    *parts, total = column(table, "cpu_ms") or [0.0]
    if parts:
        yield exactly("step", math.fsum(parts) * 1e6, f"parts of {where}")
        yield exactly("step", total * 1e6, where)
    if parts and any(one.key == "gpu_ms" for one in table.columns):
        yield exactly("kernel time", math.fsum(column(table, "gpu_ms")[:-1]) * 1e6, f"parts of {where}")


def _read_syncs(table: Table, where: str) -> Iterator[Statement]:
    if table.rows:
        yield exactly("waiting for the GPU", math.fsum(column(table, "wait_ms")), where)


def _read_ranks(table: Table, has_idle: bool) -> Iterator[Statement]:
    """The rank whose figures the page shows."""
    row = table.rows[0]
    yield of_table("step", row[place_of(table, "step_ms")], "table ranks").scaled(1e6)
    if has_idle:
        yield of_table("idle share", row[place_of(table, "idle")], "table ranks")
    step, exposed = (row[place_of(table, key)] for key in ("step_ms", "exposed_ms"))
    assert isinstance(step, float)
    yield of_table("exposed share", exposed, "table ranks").scaled(1 / step)


def read_answers(answers: Iterable[Answer]) -> Iterator[Statement]:
    for one in answers:
        if one.evidence is None:
            continue
        rows, where = one.evidence.rows, f"answer `{one.key}`"
        if one.key == "idle":
            yield from read_idle_answer(f"{one.figure}. {one.sentence}", where)
            time = place_of(one.evidence, "time_ms")
            causes = [cell for row in rows if row[0] == "cause" and isinstance(cell := row[time], float)]
            yield exactly("idle", math.fsum(causes) * 1e6, f"causes of {where}")
        if one.key == "top-kernel":
            share = place_of(one.evidence, "share")
            for row in [row for row in rows if row[0] == "whole step"][:1]:
                yield of_table("share of the longest kernel", row[share], where)
        if one.key == "forward-time":
            time = place_of(one.evidence, "per_step_ms")
            for row in rows:
                if row[0] == "kernels":
                    yield of_table("time of forward and loss", row[time], where).scaled(1e6)


# --- Two runs ---------------------------------------------------------------------------------------------------------


def read_pair(report: Report, run: int, *, explains_step: bool, has_idle: bool) -> Iterator[Statement]:
    """What a page about two runs says about one of them: `run` is 0 or 1."""
    label = report.runs[run]
    yield from _read_picture(report, run, "pair's picture")
    if explains_step:
        if step := fact_of(report, "step"):
            value = (step.before, step.value)[run]
            if value is not None:
                yield of_table("step", value, "pair's fact").scaled(1e6)
        found = re.search(f"{TIME} vs {TIME} per step", report.sentence)
        if found:
            number, unit = (found[3], found[4]) if run == 0 else (found[1], found[2])
            value, rounding = read_time(number, unit)
            yield Statement(quantity="step", value=value, rounding=rounding, where="pair's headline")
        if busy := fact_of(report, "busy"):
            value = (busy.before, busy.value)[run]
            if value is not None:
                yield of_table("busy share", value, "pair's fact")
        found = re.search(f"step goes from {TIME} to {TIME}", lead_of(report, "changes"))
        if found:
            number, unit = (found[1], found[2]) if run == 0 else (found[3], found[4])
            value, rounding = read_time(number, unit)
            yield Statement(quantity="step", value=value, rounding=rounding, where="lead of the changes")
    for key, part in parts_of(report):
        if isinstance(part, Breakdown) and len(part.runs) == 2:
            yield from _read_breakdown(part, run, f"pair's {key}", has_idle=has_idle)
        if key == "changes-time" and isinstance(part, Bars):
            values = dict(zip(part.labels, part.values[run], strict=True))
            whole = {"step": math.fsum(value or 0 for value in values.values()), "idle": values.get("idle") or 0}
            for quantity, value in whole.items():  # whole nanoseconds, as in `compare`
                yield Statement(quantity=quantity, value=value * 1e6, rounding=1.0, where="bars of the changes")
        if key == "changes-class" and isinstance(part, Table):
            rows = {row[1]: row for row in part.rows}
            at = place_of(part, ("a_ms", "b_ms")[run])
            yield of_table("step", rows["wall"][at], "table of the changes").scaled(1e6)
            if "idle" in rows:  # unknown if kernels ran one at a time
                yield of_table("idle", rows["idle"][at], "table of the changes").scaled(1e6)
        if isinstance(part, Questions) and key.endswith(f" {run}"):
            for question in part.questions:
                yield from read_idle_answer(f"{question.figure}. {question.answer}", f"{label}: page's answer")


def read_comparison(comparison: ProfileComparison, run: int) -> Iterator[Statement]:
    """What `compare` prints. `wall` also decides whether a run regressed."""
    rounded = 1.0  # whole nanoseconds
    wall = float((comparison.wall.a_ns, comparison.wall.b_ns)[run])
    yield Statement(quantity="step", value=wall, rounding=rounded, where="`compare`, row `wall`")
    for row in (*comparison.totals, *comparison.parts):
        if row.name.strip("()") == IDLE.strip("()"):
            value = float((row.a_ns, row.b_ns)[run])
            yield Statement(quantity="idle", value=value, rounding=rounded, where=f"`compare`, row `{row.name}`")

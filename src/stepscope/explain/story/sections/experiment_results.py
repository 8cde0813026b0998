"""Measurements besides the step: attention implementations over lengths, the error and speed of low precision, and
changes that make the step faster."""

from collections.abc import Sequence

import msgspec

from stepscope.explain.experiments.attention_shapes import find_attention_shape
from stepscope.explain.experiments.attention_tables import (
    attention_figure,
    describe_attention,
    make_tables,
    say_common,
    summary_ms,
)
from stepscope.explain.experiments.optimise_tables import changes_table, check_table, say_result
from stepscope.explain.precision.precision_tables import answer, make_table, pair_speeds
from stepscope.explain.story.commands import find_case
from stepscope.explain.story.missing import command_for, explain_absence
from stepscope.explain.story.phrases import MOST_ROWS, retitle, shorten
from stepscope.explain.story.sources import Materials
from stepscope.findings import Bars, Exhibit, Section, Table
from stepscope.recording.rows.attention_case import AttentionRow
from stepscope.recording.rows.optimisation import OptimiseReport
from stepscope.recording.rows.precision_report import PrecisionReport, PrecisionRun
from stepscope.spec import ModelShape
from stepscope.units import count_noun, say_size, say_time


def show_attention(materials: Materials) -> Section:
    key, title = "attention", "Attention"
    rows = materials.attention
    if not rows:
        return Section(key=key, title=title, missing=(explain_absence(materials, "attention"),))
    time, memory = make_tables(_longest(rows))
    rest = len(rows) - len(time.rows)
    left_out = (f"{count_noun(rest, 'more row')} for shorter lengths: stepscope attention",) if rest else ()
    exhibits = (
        Exhibit(key="attention-time", part=attention_figure(rows, "both")),
        Exhibit(key="attention-memory", part=attention_figure(rows, "peak")),
        Exhibit(key="attention-times", part=_finish(time, "Time", left_out)),
        Exhibit(key="attention-sizes", part=_finish(memory, "Memory", left_out)),
    )
    # Charts need a measured case; the table has the reasons if there are none.
    shown = exhibits if any(row.measurement for row in rows) else exhibits[2:3]
    lead = " ".join(filter(None, (say_attention(rows), _say_recorded(materials))))
    return Section(key=key, title=title, lead=lead, exhibits=shown)


def _say_recorded(materials: Materials) -> str:
    """Where the shape comes from, if the model does not state it; empty if the rows have another shape."""
    case, profile = find_case(materials), materials.profile
    if profile is None or case is None or isinstance(case.workload.model, ModelShape):
        return ""
    shape = find_attention_shape(profile.recording)
    measured = {(row.case.batch, row.case.heads, row.case.length, row.case.head_dim) for row in materials.attention}
    if shape is None or (shape.batch, shape.heads, shape.length, shape.head_dim) not in measured:
        return ""
    sizes = (
        f"batch {shape.batch}, {count_noun(shape.heads, 'head')}, length {shape.length:,}, head_dim {shape.head_dim}"
    )
    said = f"The model's attention, as recorded: {sizes}."
    if shape.kv_heads == shape.heads:
        return said
    groups = f"{count_noun(shape.kv_heads, 'key-value head')}; measured with one per query head"
    return f"{said} It has {groups}."


def _longest(rows: Sequence[AttentionRow]) -> list[AttentionRow]:
    """The rows of the longest lengths that fit into a table: implementations differ most there."""
    chosen: list[AttentionRow] = []
    for length in sorted({row.case.length for row in rows}, reverse=True):
        more = [row for row in rows if row.case.length == length]
        if chosen and len(chosen) + len(more) > MOST_ROWS:
            break
        chosen += more
    return chosen


def _finish(table: Table, title: str, left_out: tuple[str, ...]) -> Table:
    named = retitle(table, title)
    return msgspec.structs.replace(named, notes=(*named.notes, *left_out))


def say_attention(rows: Sequence[AttentionRow]) -> str:
    """The fastest and the slowest implementation, at the longest length with the most implementations measured."""
    shapes: dict[tuple[int, int, str], list[AttentionRow]] = {}
    for row in rows:
        if row.measurement is not None:
            shapes.setdefault((row.case.length, row.case.head_dim, _all_else(row)), []).append(row)
    compared = {shape: found for shape, found in shapes.items() if len(found) > 1}
    failed = sum(row.measurement is None for row in rows)
    missing = f" {failed} of {len(rows)} cases failed; the tables have the reasons." if failed else ""
    if not compared:
        return f"{count_noun(len(rows), 'case')}: {say_common(rows)}.{missing}"
    fullest = max(compared, key=lambda shape: (len(compared[shape]), shape))
    length, head_dim, _ = fullest
    ordered = sorted(compared[fullest], key=_both_ms)
    first, last = ordered[0], ordered[-1]
    return (
        f"Fastest at length {length:,}, head_dim {head_dim}: {first.case.implementation}, {_say(first)} for forward "
        f"and backward, {_memory(first)} on top of its inputs. Slowest: {last.case.implementation}, {_say(last)}, "
        f"{_memory(last)}.{missing}"
    )


def _all_else(row: AttentionRow) -> str:
    """What two comparable rows share besides length and head size."""
    same = describe_attention(row.case).removeprefix(row.case.implementation)
    return f"{same} {row.environment.driver_name} {row.environment.torch}"


def _both_ms(row: AttentionRow) -> float:
    summary = summary_ms(row, "both")
    assert summary is not None, "only measured rows are compared"
    return summary.median


def _say(row: AttentionRow) -> str:
    return say_time(_both_ms(row) * 1e6)


def _memory(row: AttentionRow) -> str:
    assert row.measurement is not None, "only measured rows are compared"
    return say_size(row.measurement.memory.peak_bytes)


# --- Precision --------------------------------------------------------------------------------------------------------


# The toy sum and norm are the same for every model; `stepscope precision` shows them.
_SHOWN = ("errors", "dtypes", "underflow")


def show_precision(materials: Materials) -> Section:
    key, title = "precision", "Precision"
    if materials.precision is None:
        return Section(key=key, title=title, missing=(explain_absence(materials, "precision"),))
    report = _add_speeds(materials.precision, materials)
    # The report may come from another verb, and other files of the run may have another case.
    command = f"{command_for(Materials(name='', precision=report), 'precision')} --detail"
    exhibits = [
        Exhibit(key=f"precision-{name}", part=shorten(make_table(report, name), f"{command} --table {name}"))
        for name in _SHOWN
    ]
    if report.speeds:  # from timed rows; no command measures only these
        exhibits.append(Exhibit(key="precision-speed", part=shorten(make_table(report, "speed"), "")))
    return Section(key=key, title=title, lead=_say_errors(report), exhibits=tuple(exhibits))


def _add_speeds(report: PrecisionReport, materials: Materials) -> PrecisionReport:
    """The report with speeds from the timed rows, if they have the model in fp32 and in another precision."""
    if report.speeds:
        return report
    return msgspec.structs.replace(report, speeds=pair_speeds(materials.bench, report.case))


def _say_errors(report: PrecisionReport) -> str:
    """The gradient error of each precision, and what fp16 loses without loss scaling."""
    runs = report.comparison.runs
    said = ", ".join(f"{run.precision} {_say_error(run)}" for run in runs)
    lead = f"Gradient error compared with float64: {said}."
    lost = [line for line in answer(report)[len(runs) :] if line.startswith("fp16")]
    return " ".join((lead, *(f"{line}." for line in lost)))


def _say_error(run: PrecisionRun) -> str:
    if run.gradient_error is None:
        return "not finite"
    scaled = f" (loss scale {run.loss_scale:g})" if run.loss_scale != 1 else ""
    return f"{run.gradient_error:.2g}{scaled}"


# --- Optimized step ---------------------------------------------------------------------------------------------------


def show_optimised(materials: Materials) -> Section:
    key, title = "optimise", "Before and after"
    report = materials.optimisation
    if report is None:
        return Section(key=key, title=title, missing=(materials.absent[key],))
    exhibits = [Exhibit(key="optimise-changes", part=changes_table(report))]
    if any(one.step_ns for one in report.changes):
        exhibits.insert(0, Exhibit(key="optimise-steps", part=_draw_changes(report)))
    if any(one.check for one in report.changes):
        exhibits.append(Exhibit(key="optimise-check", part=check_table(report)))
    apart = "These times are from a run of their own: its start can differ from the step above."
    return Section(key=key, title=title, lead=f"{say_result(report)} {apart}", exhibits=tuple(exhibits))


def _draw_changes(report: OptimiseReport) -> Bars:
    """A bar per measured step: with each change on top of those kept before it."""
    measured = [one for one in report.changes if one.step_ns is not None]
    return Bars(
        title="Step time with each change, on top of those kept before it",
        kind="ms",
        labels=tuple(one.name if one.status in ("start", "kept") else f"{one.name} ({one.status})" for one in measured),
        series=("step",),
        values=(tuple((one.step_ns or 0) / 1e6 for one in measured),),
    )

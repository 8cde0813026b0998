"""The bodies of charts that show several runs on one scale."""

from typing import Any

from stepscope.findings import OfSeveral
from stepscope.findings.compared import AlignedMemory, AlignedSteps, PlaceTime, Trend, is_empty
from stepscope.render.drawing.aligned_memory import describe_memory
from stepscope.render.drawing.aligned_steps import PlaceBlock, cut_blocks, describe_steps, name_block
from stepscope.render.drawing.colours import Palette
from stepscope.render.drawing.compared import place_compared
from stepscope.render.drawing.svg import Canvas
from stepscope.render.drawing.trend import TrendMark, describe_trend, list_marks, say_verdict
from stepscope.render.formats import clean
from stepscope.render.numbers import format_change, format_time, format_value
from stepscope.render.site.html import prose
from stepscope.render.site.plots import NARROW, WIDE, write_nothing, write_plot

_MOST_LABEL, _MOST_PARTS = 60, 4
_MS = 1e6


def write_compared(part: OfSeveral, palette: Palette) -> str:
    """Return the inside of a chart's body: wide and narrow, and in words for readers who do not see it."""
    if is_empty(part):
        return write_nothing("Nothing to draw.")
    svgs = []
    for name, width in (("wide", WIDE), ("narrow", NARROW)):
        canvas = Canvas(palette)
        svgs.append(canvas.wrap(place_compared(canvas, part, width, f"-{name}"), class_=f"drawing {name}"))
    told, what = _describe(part)
    label = f"{clean(part.title)}. Arrow keys move from {what}."
    return f'<p class="unseen">{prose(told)}</p>' + write_plot(svgs, label, "sized")


def _describe(part: OfSeveral) -> tuple[str, str]:
    """The chart in words, and what arrow keys move between."""
    match part:
        case AlignedSteps():
            return describe_steps(part), "place to place"
        case AlignedMemory():
            return describe_memory(part), "column to column"
        case Trend():
            return describe_trend(part), "mark to mark"


def pack_compared(part: OfSeveral) -> dict[str, Any]:
    """Return what the script needs to know about the marks."""
    told: list[list[str]] = []
    match part:
        case _ if is_empty(part):
            pass
        case AlignedSteps():
            told = [_describe_block(part, block) for block in cut_blocks(part)]
        case AlignedMemory():
            told = [_describe_column(part, column) for column in range(part.num_columns)]
        case Trend():
            told = [_describe_mark(part, mark) for mark in list_marks(part)]
    marks = [{"group": -1, "lines": lines} for lines in told]
    return {"groups": [], "marks": marks, "isOnlyOne": False}


# --- steps ----------------------------------------------------------------------------------------------------------


def _describe_block(steps: AlignedSteps, block: PlaceBlock) -> list[str]:
    lines = [name_block(block) or clean(steps.title)]
    for run, label in enumerate(steps.runs):
        lines.append(f"{clean(label, _MOST_LABEL)}: {_describe_side(block.side(run), steps.idle)}")
    verdict = block.verdict if block.verdict not in ("slower", "faster") else ""
    change = format_change("ms", block.change_ns / _MS)
    return [*lines, f"{change}, {verdict}" if verdict else change]


def _describe_side(side: PlaceTime, idle: str) -> str:
    if not side.total_ns:
        return "–"
    parts = [
        f"{clean(name, 30) or 'other'} {format_time(time)}"
        for name, time in zip(side.classes[:_MOST_PARTS], side.times_ns, strict=False)
    ]
    parts += [f"{clean(idle, 30)} {format_time(side.idle_ns)}"] if side.idle_ns else []
    return f"{format_time(side.total_ns)}: {', '.join(parts)}" if len(parts) > 1 else format_time(side.total_ns)


# --- memory ---------------------------------------------------------------------------------------------------------


def _describe_column(memory: AlignedMemory, column: int) -> list[str]:
    stretch = next(one for one in memory.stretches if one.start <= column < one.end)
    done = (column - stretch.start) / max(1, stretch.end - stretch.start)
    where = f"{clean(stretch.label, 40) or 'between phases'}, at {format_value('share', done)}"
    lines = [where]
    for run, label in enumerate(memory.runs):
        lines.append(f"{clean(label, _MOST_LABEL)}: {_describe_heights(memory, run, column)}")
    if all(stretch.runs):
        change = memory.totals(1)[column] - memory.totals(0)[column]
        lines.append(format_change("bytes", change) if change else "no change")
    return lines


def _describe_heights(memory: AlignedMemory, run: int, column: int) -> str:
    sizes = [(rows[column], name) for name, rows in zip(memory.categories, memory.heights[run], strict=True)]
    total = sum(size for size, _ in sizes)
    if not total:
        return "–"
    most = sorted(sizes, reverse=True)[:_MOST_PARTS]
    parts = [f"{clean(name, 30)} {format_value('bytes', size)}" for size, name in most if size]
    return f"{format_value('bytes', total)}: {', '.join(parts)}"


# --- trends ---------------------------------------------------------------------------------------------------------


def _describe_mark(trend: Trend, mark: TrendMark) -> list[str]:
    point = mark.point
    value = format_value(trend.kind, point.value)
    if point.low is not None and point.high is not None:
        value += f" ({format_value(trend.kind, point.low)} to {format_value(trend.kind, point.high)})"
    run = f"{point.run + 1}: {clean(trend.runs[point.run], _MOST_LABEL)}"
    return [run, *([clean(mark.line.name)] if mark.line.name else []), value, *filter(None, (say_verdict(point),))]

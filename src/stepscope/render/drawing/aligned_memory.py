"""The memory of two steps, one panel below the other: the same phases at the same x, and one scale of bytes.

Each panel also has the outline of the other run, so that a difference is seen where it is. All areas are drawn in
steps, because a column has one moment and nothing is known in between.
"""

from collections.abc import Sequence

from stepscope.findings.compared import AlignedMemory
from stepscope.render.drawing.axes import Scale, find_ticks
from stepscope.render.drawing.brackets import BOLD, NARROW, Bracket, draw_brackets
from stepscope.render.drawing.svg import Bounds, Canvas, Sign, Text, fit, place_signs, width_of
from stepscope.render.formats import clean
from stepscope.render.numbers import find_binary_unit, format_change, format_tick, format_value

_HEIGHT, _SMALL_HEIGHT = 150.0, 110.0
_HEAD_SIZE, _TICK_SIZE = 13.0, 11.0
_HEADROOM = 1.06


def describe_memory(memory: AlignedMemory) -> str:
    """Return the chart as sentences, for readers who do not see it."""
    peaks = [memory.totals(run)[memory.peak(run)] for run in (0, 1)]
    said = [f"{clean(run)}: peak {format_value('bytes', peak)}" for run, peak in zip(memory.runs, peaks, strict=True)]
    said.append(f"change {format_change('bytes', peaks[1] - peaks[0])}")
    phases = [f"{clean(name, 40)} {one} → {other}" for name, one, other in _list_phase_peaks(memory) if name]
    return f"{'; '.join(said)}. " + (f"Most memory by phase: {', '.join(phases)}." if phases else "")


def _list_phase_peaks(memory: AlignedMemory) -> list[tuple[str, str, str]]:
    totals = [memory.totals(run) for run in (0, 1)]
    rows = []
    for stretch in memory.stretches:
        one, other = (
            format_value("bytes", max(totals[run][stretch.start : stretch.end])) if has else "–"
            for run, has in enumerate(stretch.runs)
        )
        rows.append((stretch.label, one, other))
    return rows


def place_aligned_memory(canvas: Canvas, memory: AlignedMemory, width: float) -> Bounds:
    """Draw both panels and the legend in `width` pixels. Each column is a group with its number."""
    totals = [memory.totals(run) for run in (0, 1)]
    highest = max(max(one) for one in totals) * _HEADROOM
    unit, size = find_binary_unit(highest)
    ticks = find_ticks(0.0, highest / size, 4)
    gutter = max(width_of(f"{format_tick(tick)} {unit}", _TICK_SIZE) for tick in ticks) + 8
    x = Scale(low=0.0, high=memory.num_columns, start=gutter, end=width)
    height = _SMALL_HEIGHT if width < NARROW else _HEIGHT
    y = draw_brackets(canvas, _list_brackets(memory, x, width), 0.0, width)
    first, bottom = y, y
    for run in (0, 1):
        top = _draw_heading(canvas, memory, run, bottom + (18 if run else 4), width)
        bottom = top + height
        scale = Scale(low=0.0, high=highest, start=bottom, end=top)
        for tick in ticks:
            level = scale(tick * size)
            canvas.line(gutter, level, width, level, canvas.palette.grid)
            label = f"{format_tick(tick)} {unit}" if tick == ticks[-1] else format_tick(tick)
            faint = canvas.palette.faint
            canvas.write([Text(x=gutter - 6, y=level, text=label, align="end", size=_TICK_SIZE, colour=faint)])
        _draw_panel(canvas, memory, run, x, scale)
        for stretch in memory.stretches[1:]:
            canvas.line(x(stretch.start), top, x(stretch.start), bottom, canvas.palette.frame, 0.7)
        canvas.trace(_step_through(totals[1 - run], x, scale), canvas.palette.ink, 1.1, "4 3")
        _draw_peak(canvas, memory, run, x, scale)
        canvas.line(gutter, bottom, width, bottom, canvas.palette.frame)
    for column in range(memory.num_columns):
        with canvas.group(class_="mark", data_mark=column):
            left, right = x(column), x(column + 1)
            canvas.add("rect", x=left, y=first, width=right - left, height=bottom - first, fill="transparent")
    y = place_signs(canvas, _list_signs(canvas, memory), left=0.0, top=bottom + 20, width=width)
    return Bounds(left=0.0, top=0.0, right=width, bottom=y)


def _list_brackets(memory: AlignedMemory, x: Scale, width: float) -> list[Bracket]:
    brackets = []
    for stretch, (name, one, other) in zip(memory.stretches, _list_phase_peaks(memory), strict=True):
        if name:
            values = (f"{one} →", other) if width < NARROW else (f"{one} → {other}",)
            brackets.append(Bracket.over((clean(name, 40), *values), x(stretch.start), x(stretch.end)))
    return brackets


def _draw_heading(canvas: Canvas, memory: AlignedMemory, run: int, y: float, width: float) -> float:
    """Write the run and its peak; the second one with the change. Return the lower edge."""
    peaks = [memory.totals(each)[memory.peak(each)] for each in (0, 1)]
    text = fit(
        f"{clean(memory.runs[run], 60)}: peak {format_value('bytes', peaks[run])}", (width - 90) / BOLD, _HEAD_SIZE
    )
    canvas.write([Text(x=0, y=y + 8, text=text, size=_HEAD_SIZE, bold=True)])
    change = peaks[1] - peaks[0]
    if run and change:
        colour = canvas.palette.change(change)
        grown = format_change("bytes", change)
        canvas.write([Text(x=width, y=y + 8, text=grown, align="end", size=_HEAD_SIZE, colour=colour, bold=True)])
    return y + 20


def _draw_panel(canvas: Canvas, memory: AlignedMemory, run: int, x: Scale, y: Scale) -> None:
    low = [0] * memory.num_columns
    for name, values in zip(memory.categories, memory.heights[run], strict=True):
        if not any(values):
            continue
        high = [below + value for below, value in zip(low, values, strict=True)]
        corners = [*_step_through(high, x, y), *reversed(_step_through(low, x, y))]
        points = " ".join(f"{across:.2f},{down:.2f}" for across, down in corners)
        canvas.add("polygon", points=points, fill=canvas.palette.fill(name))
        low = high


def _step_through(values: Sequence[int], x: Scale, y: Scale) -> list[tuple[float, float]]:
    """Return a line that keeps the height of each column; corners only where it changes."""
    points: list[tuple[float, float]] = []
    for column, value in enumerate(values):
        if not column or value != values[column - 1]:
            points += [(x(column), points[-1][1])] if points else []
            points.append((x(column), y(value)))
    return [*points, (x(len(values)), points[-1][1])]


def _draw_peak(canvas: Canvas, memory: AlignedMemory, run: int, x: Scale, y: Scale) -> None:
    column = memory.peak(run)
    across, down = x(column + 0.5), y(memory.totals(run)[column])
    canvas.mark("circle", across, down, 3.6, fill=canvas.palette.ink, stroke=canvas.palette.paper, stroke_width=1.2)


def _list_signs(canvas: Canvas, memory: AlignedMemory) -> list[Sign]:
    """Return the legend, top of the stack first: each category with its bytes at both peaks."""
    peaks = [memory.peak(run) for run in (0, 1)]
    signs = []
    for at, name in reversed(list(enumerate(memory.categories))):
        if any(any(memory.heights[run][at]) for run in (0, 1)):
            one, other = (format_value("bytes", memory.heights[run][at][peaks[run]]) for run in (0, 1))
            signs.append(Sign(fill=canvas.palette.fill(name), text=f"{clean(name, 30)} {one} → {other}"))
    signs.append(Sign(fill=canvas.palette.ink, text="all memory of the other run", shape="dash"))
    return signs

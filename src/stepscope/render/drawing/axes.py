"""Scales, ticks and axes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.findings import Axis
from stepscope.render.drawing.svg import Bounds, Canvas, Text, width_of
from stepscope.render.formats import clean
from stepscope.render.numbers import BYTE_UNITS, find_binary_unit, format_tick

_STEPS = (1.0, 2.0, 5.0, 10.0)
# Ticks within a decade, coarse to fine: the first ladder that gives a logarithmic axis enough ticks is used.
_LADDERS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0))
_FEWEST_TICKS = 4
# A logarithmic axis labels up to this many measured values; more labels would overlap.
_MOST_EXACT = 8
_MOST_LABEL, _MOST_UNIT = 60, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A map from values between `low` and `high` to pixels between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            # A value that a logarithmic axis cannot show, such as a spread that reaches zero, is at its end.
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticks:
    """The range of an axis, its ticks with their labels, and its title."""

    low: float
    high: float
    values: tuple[float, ...]
    texts: tuple[str, ...]
    title: str


def find_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return round numbers from `low` to `high`, at most `most` steps apart."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(factor * power for factor in _STEPS if factor * power * most >= (high - low) * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def find_log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers from `low` to `high`, from the coarsest ladder that has enough of them. Values that are
    close together get linear ticks."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for ladder in _LADDERS:
        # Through text, because 5 * 10.0**-2 is not the float 0.05 and its label would have all digits.
        candidates = [float(f"{step}e{decade}") for decade in decades for step in ladder]
        ticks = [tick for tick in candidates if low <= tick <= high]
        if len(ticks) >= _FEWEST_TICKS:
            return ticks[:: math.ceil(len(ticks) / 12)]
    return find_ticks(low, high, 6)


def choose_ticks(axis: Axis, values: Sequence[float], most: int, *, are_measured: bool = False) -> Ticks:
    """Return the ticks of an axis over values. A logarithmic axis labels the measured values if they are few or powers
    of two: 128, 256, 512. Byte axes use binary units, so that their ticks are round."""
    is_bytes = axis.unit in BYTE_UNITS
    unit, size = find_binary_unit(max(values, default=0.0)) if is_bytes else (clean(axis.unit, _MOST_UNIT), 1.0)
    scaled = [value / size for value in values]
    low, high = _find_domain(scaled, axis, most)
    ticks = find_log_ticks(low, high) if axis.log else find_ticks(low, high, most)
    if axis.log and are_measured:
        measured = sorted(set(scaled))
        if len(measured) <= _MOST_EXACT or all(math.log2(value).is_integer() for value in measured):
            ticks = measured[:: math.ceil(len(measured) / _MOST_EXACT) or 1]
    return Ticks(
        low=low * size,
        high=high * size,
        values=tuple(tick * size for tick in ticks),
        texts=tuple(map(format_tick, ticks)),
        title=name_quantity(axis.label, unit),
    )


def _find_domain(values: Sequence[float], axis: Axis, most: int) -> tuple[float, float]:
    """Return the range of an axis. A logarithmic one has a margin, so that no mark touches the frame; a linear one
    starts at zero and ends at a tick."""
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not axis.log)] or [1.0]
    if axis.log:
        margin = max(1.1, (max(finite) / min(finite)) ** 0.05)
        return min(finite) / margin, max(finite) * margin
    low = min(0.0, *finite)
    high = max(finite) if max(finite) > low else low + 1.0
    ticks = find_ticks(low, high, most)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else high - low
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def name_quantity(label: str, unit: str) -> str:
    return f"{clean(label, _MOST_LABEL)} ({unit})" if unit else clean(label, _MOST_LABEL)


def draw_x_axis(canvas: Canvas, plot: Bounds, places: Sequence[tuple[float, str]], title: str, *, grid: bool) -> None:
    """Draw the axis below the plot. Labels that would overlap the previous one are left out."""
    palette, free = canvas.palette, -math.inf
    texts = []
    for x, text in places:
        canvas.line(x, plot.top if grid else plot.bottom, x, plot.bottom + 4, palette.grid if grid else palette.frame)
        half = width_of(text, 12.0) / 2
        if x - half >= free:
            texts.append(Text(x=x, y=plot.bottom + 15, text=text, align="middle", colour=palette.faint))
            free = x + half + 4
    canvas.line(plot.left, plot.bottom, plot.right, plot.bottom, palette.frame)
    canvas.write(texts)
    canvas.write([Text(x=(plot.left + plot.right) / 2, y=plot.bottom + 36, text=title, align="middle", size=13.0)])


def draw_y_axis(
    canvas: Canvas, plot: Bounds, places: Sequence[tuple[float, str]], title: str, *, title_left: bool = False
) -> None:
    """Draw the axis left of the plot, with its title above, or to its left if the space above is taken
    (`title_left`)."""
    palette = canvas.palette
    for y, _ in places:
        canvas.line(plot.left, y, plot.right, y, palette.grid)
    canvas.write(Text(x=plot.left - 7, y=y, text=text, align="end", colour=palette.faint) for y, text in places)
    gutter = max((width_of(text, 12.0) for _, text in places), default=0.0) + 8
    if title_left:
        middle = (plot.top + plot.bottom) / 2
        canvas.write([Text(x=plot.left - gutter - 14, y=middle, text=title, align="middle", size=13.0, turned=True)])
    else:
        canvas.write([Text(x=plot.left - gutter, y=plot.top - 15, text=title, size=13.0)])


def measure_gutter(texts: Sequence[str]) -> float:
    """Return the room that labels left of a plot need."""
    return max((width_of(text, 12.0) for text in texts), default=0.0) + 8

"""What charts of a step share: the names of its phases above brackets, and the pattern of idle time.

A name stands above its phase or, if the phase is too narrow, next to it with a line down to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.render.drawing.svg import Canvas, Text, width_of

NARROW = 500.0  # pixels: labels have a line per value from here down
BOLD = 1.15  # how much wider bold letters are
_NAME_SIZE, _LABEL_SIZE = 13.0, 11.5
_LEADING, _HEIGHT, _GAP = 15.0, 8.0, 12.0


@dataclass(slots=True, kw_only=True)
class Bracket:
    """A label of one or more lines, the first one bold, and the part of the chart below it. A line may have a
    colour."""

    lines: tuple[str, ...]
    width: float
    left: float
    right: float
    x: float  # the centre of the label
    colours: tuple[str, ...] = ()

    @classmethod
    def over(cls, lines: tuple[str, ...], left: float, right: float, colours: tuple[str, ...] = ()) -> "Bracket":
        width = max(width_of(line, _LABEL_SIZE if row else BOLD * _NAME_SIZE) for row, line in enumerate(lines)) + 4
        return cls(lines=lines, width=width, left=left, right=right, x=(left + right) / 2, colours=colours)


def draw_brackets(canvas: Canvas, brackets: Sequence[Bracket], y: float, width: float) -> float:
    """Draw the labels next to each other, in `width` pixels. The narrowest parts lose theirs if not all fit. Return the
    upper edge of what is below."""
    shown = list(brackets)
    while sum(bracket.width + _GAP for bracket in shown) > width + _GAP:
        shown.remove(min(shown, key=lambda bracket: bracket.right - bracket.left))
    if not shown:
        return y + 4
    _move_apart(shown, width)
    top = y + 10
    foot = top + (max(len(bracket.lines) for bracket in shown) - 1) * _LEADING + 10
    # Labels that stand next to their part need room for a line down to it.
    is_above = all(bracket.left <= bracket.x <= bracket.right for bracket in shown)
    edge = foot + (_HEIGHT if is_above else 2 * _HEIGHT)
    stroke = canvas.palette.frame
    for bracket in shown:
        _write_lines(canvas, bracket, top)
        left, right = bracket.left + 1, max(bracket.right - 1, bracket.left + 1)
        end = bracket.x if left <= bracket.x <= right else (left + right) / 2
        canvas.trace([(bracket.x, foot), (end, edge)], stroke, 1.0)
        canvas.trace([(left, edge + 4), (left, edge), (right, edge), (right, edge + 4)], stroke, 1.0)
    return edge + 7


def _write_lines(canvas: Canvas, bracket: Bracket, top: float) -> None:
    for row, line in enumerate(bracket.lines):
        size, colour = (_LABEL_SIZE, canvas.palette.faint) if row else (_NAME_SIZE, "")
        if row < len(bracket.colours) and bracket.colours[row]:
            colour = bracket.colours[row]
        level = top + row * _LEADING
        canvas.write([Text(x=bracket.x, y=level, text=line, align="middle", size=size, colour=colour, bold=not row)])


def _move_apart(brackets: Sequence[Bracket], width: float) -> None:
    """Move the labels as little as needed: to the right until none overlaps the one before, then back inside."""
    edge = 0.0
    for bracket in brackets:
        bracket.x = max(bracket.x, edge + bracket.width / 2)
        edge = bracket.x + bracket.width / 2 + _GAP
    edge = width
    for bracket in reversed(brackets):
        bracket.x = min(bracket.x, edge - bracket.width / 2)
        edge = bracket.x - bracket.width / 2 - _GAP


def define_hatch(canvas: Canvas, name: str) -> None:
    """Define the pattern of idle time. `name` is its id, unique in its document."""
    box: dict[str, str | float] = {"width": 7, "height": 7}
    with (
        canvas.group_of("defs"),
        canvas.group_of("pattern", id=name, patternUnits="userSpaceOnUse", patternTransform="rotate(45)", **box),
    ):
        canvas.add("rect", fill=canvas.palette.grid, **box)
        canvas.line(0, 0, 0, 7, canvas.palette.frame, 2.2)

"""The hint of each kind of chart: how to read it, and what a pointer, fingers and keys do.

It is behind a `?` next to the chart's title, and is a `details` element: it opens without a script, and by keyboard.
"""

from typing import NamedTuple

from stepscope.findings import Breakdown, Figure, Lanes, Roofline, StepPicture, Timeline
from stepscope.findings.compared import AlignedMemory, AlignedSteps, Trend
from stepscope.render.drawing import Drawable
from stepscope.render.site.html import prose


class Hint(NamedTuple):
    """Lines on how to read a chart, and on how to use it with a mouse and keys, or with fingers. The style sheet shows
    one of the last two."""

    reading: tuple[str, ...]
    mouse: tuple[str, ...]
    touch: tuple[str, ...] = ()


_TOUCH = "Pinch to zoom, drag with one finger to move, and tap to see details."
_ONLY = "Select a name in the legend to show only that class."
_HINTS: dict[type, Hint] = {
    Lanes: Hint(
        reading=(
            "Each color is a class. Where kernels are too short to draw, a column has the color of the class that "
            "takes most of its time. Empty columns are idle time.",
            _ONLY,
        ),
        mouse=(
            "Zoom with Ctrl and the wheel, or click the chart and use the wheel. Drag the chart or the strip above it "
            "to move.",
            "Click a kernel to narrow the breakdown to its class.",
            "Keys: ← → move, + − zoom, 0 shows the whole step, N and P select the next and the previous span, ↑ ↓ "
            "change the track, F zooms to the selected span.",
        ),
        touch=(_TOUCH,),
    ),
    StepPicture: Hint(
        reading=(
            "The bar is one step, to scale. Each phase has its kernels by class, the longest first, and its idle time.",
            "Idle time belongs to the phase of the kernel that the device waits for. Where kernels overlap, they share "
            "the time; communication and transfers count only where nothing else runs.",
        ),
        mouse=("Hover over a part to see its time. Keys: ← → move from part to part.",),
        touch=("Tap a part to see its time.",),
    ),
    AlignedSteps: Hint(
        reading=(
            "Both steps are cut at the same places: phases, layers and their parts. A place starts at the same "
            "position in both bars and takes the room of the longer one, so a thin line follows the shorter one.",
            "The row in between is the change: as long as the difference, and with a color for longer, shorter, new "
            "and gone. All changes add up to the change of the step.",
            "Idle time belongs to the place of the kernel that the device waits for. A letter below the bars marks a "
            "change that is at one place.",
        ),
        mouse=("Hover over a place to see its times. Keys: ← → move from place to place.",),
        touch=("Tap a place to see its times.",),
    ),
    AlignedMemory: Hint(
        reading=(
            "Allocated memory during the step with the peak, by category, with one scale for both runs. The dashed "
            "line is all memory of the other run, and the dot is the peak.",
            "Each phase has the same width in both runs; inside a phase, allocations and frees are in order.",
        ),
        mouse=("Hover over a column to see its sizes. Keys: ← → move from column to column.",),
        touch=("Tap a column to see its sizes.",),
    ),
    Trend: Hint(
        reading=(
            "Each mark is a run, in order. Bars are the middle 60% of its steps, and the dashed line is the baseline.",
            "A triangle is a run whose step differs from the baseline by more than noise; it points to less or to more "
            "time.",
        ),
        mouse=("Hover over a mark to see its values. Keys: ← → move from mark to mark.",),
        touch=("Tap a mark to see its values.",),
    ),
    Breakdown: Hint(
        reading=(
            "Each color is a class.",
            "In the flame view, phase, module, operator and kernel are below each other, as wide as their time. Above "
            "the kernels, a box has the color of the class that takes most of it. Boxes too thin to draw are gray.",
            "12 × is the same module of twelve alike layers. The small bars in the tree are these layers, in order; "
            "one that differs by more than a quarter is marked.",
            "Select a box, a bar, a module or a kernel to narrow everything else to it; select it again, or a name "
            "above the flame view, to undo.",
        ),
        mouse=(
            "Keys in the flame view: arrows move from box to box, Enter zooms in, Backspace zooms out.",
            "Keys in the tree: ↑ ↓ move, → opens, ← closes, * shows the layers one by one, Enter selects.",
            "Keys in lists: ↑ ↓ move within a list, ← → between lists, / searches kernels, Esc clears the selection.",
        ),
    ),
    Roofline: Hint(
        reading=(
            "A point is all calls of one operator with one shape; its area is their time per step.",
            "Points under the slope are limited by memory bandwidth, points under a flat line by compute. The distance "
            "from a point up to its line is the possible gain.",
            "Above 100% of the limit, part of the data came from a cache.",
            "Operators that only move memory have no FLOPs: they are in the column on the left, as far below the line "
            "as their bandwidth is below the device's.",
            _ONLY,
        ),
        mouse=("Keys: ← → move from point to point.",),
        touch=("Tap a point to see details.",),
    ),
    Figure: Hint(
        reading=("Select a name in the legend to hide or show it.",),
        mouse=("Hover over a point to see its values. Keys: ← → move from point to point.",),
        touch=("Tap a point to see its values.",),
    ),
    Timeline: Hint(
        reading=(
            "Areas are stacked. The slider sets how many of the largest pieces are drawn individually.",
            "Select a name in the legend to hide or show it.",
        ),
        mouse=(
            "Zoom in time with the wheel, and in height with Shift and the wheel; in a report, click the chart first. "
            "Drag to move.",
            "Keys: arrows move, + − zoom, 0 or a double click shows the whole timeline.",
        ),
        touch=(_TOUCH,),
    ),
}


def write_hint(part: Drawable | Breakdown) -> str:
    """Return a `?` that opens how to read and use the chart; nothing for bars, which have their values next to them."""
    hint = _HINTS.get(type(part))
    if hint is None:
        return ""
    kinds = (("", hint.reading), (' class="for-mouse"', hint.mouse), (' class="for-touch"', hint.touch))
    items = "".join(f"<li{kind}>{prose(line)}</li>" for kind, lines in kinds for line in lines)
    return f'<details class="hint"><summary aria-label="How to read this chart">?</summary><ul>{items}</ul></details>'

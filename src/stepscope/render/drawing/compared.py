"""The charts that show several runs on one scale, under one name for files and for the page."""

from stepscope.findings import OfSeveral
from stepscope.findings.compared import AlignedMemory, AlignedSteps, Trend, is_empty
from stepscope.render.drawing.aligned_memory import place_aligned_memory
from stepscope.render.drawing.aligned_steps import place_aligned_steps
from stepscope.render.drawing.colours import Palette, assign_colours
from stepscope.render.drawing.svg import PAGE_WIDTH, Bounds, Canvas, finish
from stepscope.render.drawing.trend import place_trend


def draw_compared(part: OfSeveral) -> str:
    """Return the chart as an SVG file."""
    canvas = Canvas(Palette(assign_colours([part])))
    if is_empty(part):
        bounds = Bounds(left=0.0, top=0.0, right=PAGE_WIDTH, bottom=0.0)
        return finish(canvas, bounds, title=part.title, notes=("Nothing to draw.", *part.notes))
    return finish(canvas, place_compared(canvas, part, PAGE_WIDTH, ""), title=part.title, notes=part.notes)


def place_compared(canvas: Canvas, part: OfSeveral, width: float, name: str) -> Bounds:
    """Draw the chart in `width` pixels. `name` tells drawings apart that are in one document."""
    match part:
        case AlignedSteps():
            return place_aligned_steps(canvas, part, width, f"idle-aligned{name}")
        case AlignedMemory():
            return place_aligned_memory(canvas, part, width)
        case Trend():
            return place_trend(canvas, part, width)

"""Charts as SVG, laid out in Python: for files, and inline for the page of a report."""

from stepscope.findings import Bars, Figure, Lanes, OfSeveral, Roofline, StepPicture, Timeline
from stepscope.render.drawing.bars import chart_bars, draw_bars
from stepscope.render.drawing.compared import draw_compared
from stepscope.render.drawing.lanes import draw_lanes
from stepscope.render.drawing.lines import draw_figure
from stepscope.render.drawing.roofline import draw_roofline
from stepscope.render.drawing.step import draw_step_picture
from stepscope.render.drawing.timeline import draw_timeline
from stepscope.render.drawing.timeline_layout import DEFAULT_DETAIL

__all__ = ["Drawable", "draw_part"]

Drawable = Figure | Timeline | Lanes | StepPicture | Roofline | Bars | OfSeveral


def draw_part(part: Drawable, detail: float = DEFAULT_DETAIL) -> str:
    """Return the part as an SVG file. `detail` is the share of a timeline's pieces that are drawn one by one."""
    match part:
        case Timeline():
            return draw_timeline(part, detail)
        case Lanes():
            return draw_lanes(part)
        case StepPicture():
            return draw_step_picture(part)
        case Roofline():
            return draw_roofline(part)
        case Bars():
            return draw_bars(chart_bars(part))
        case Figure():
            return draw_figure(part)
        case _:
            return draw_compared(part)

"""The bodies of charts that show several runs on one scale."""

from typing import Any

from stepscope.findings.compared import AlignedSteps, PlaceTime
from stepscope.render.drawing.aligned import Block, cut_blocks, describe_steps, name_block, place_aligned_steps
from stepscope.render.drawing.colours import Palette
from stepscope.render.drawing.svg import Canvas
from stepscope.render.formats import clean
from stepscope.render.numbers import format_change, format_time
from stepscope.render.site.html import prose
from stepscope.render.site.plots import NARROW, WIDE, write_nothing, write_plot

_MOST_LABEL, _MOST_CLASSES = 60, 4
_MS = 1e6


def write_aligned_steps(steps: AlignedSteps, palette: Palette) -> str:
    if not any(steps.steps_ns):
        return write_nothing("Nothing to draw.")
    svgs = []
    for name, width in (("wide", WIDE), ("narrow", NARROW)):
        canvas = Canvas(palette)
        bounds = place_aligned_steps(canvas, steps, width, f"idle-aligned-{name}")
        svgs.append(canvas.wrap(bounds, class_=f"drawing {name}"))
    told = f'<p class="unseen">{prose(describe_steps(steps))}</p>'
    return told + write_plot(svgs, f"{clean(steps.title)}. Arrow keys move from place to place.", "sized")


def pack_aligned_steps(steps: AlignedSteps) -> dict[str, Any]:
    marks = [{"group": -1, "lines": _describe_block(steps, block)} for block in cut_blocks(steps)]
    return {"groups": [], "marks": marks, "isOnlyOne": False}


def _describe_block(steps: AlignedSteps, block: Block) -> list[str]:
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
        for name, time in zip(side.classes[:_MOST_CLASSES], side.times_ns, strict=False)
    ]
    parts += [f"{clean(idle, 30)} {format_time(side.idle_ns)}"] if side.idle_ns else []
    return f"{format_time(side.total_ns)}: {', '.join(parts)}" if len(parts) > 1 else format_time(side.total_ns)

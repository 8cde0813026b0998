"""A timeline as one HTML page that moves: the data, a style sheet and a script by hand, in one file, without a network.

Vega draws a hundred thousand events in seconds and moves none of them, so the page has a script of its own that writes
pixels. What comes from a recording is data and stays data: it is embedded as JSON
that no tag can end, the script puts it in as text, and the page's policy lets nothing run but the script whose hash it
names, nor anything be fetched.

Numbers are arrays, heights are differences in steps of what divides all of them (allocators round to 512 bytes), and a
text that occurs often, such as a stack frame, is there once.
"""

import base64
import hashlib
import json
import math
from collections.abc import Iterable
from html import escape
from importlib import resources
from itertools import pairwise
from typing import Any

from stepscope.findings import Area, Timeline
from stepscope.report.timeline_layout import (
    BYTE_UNITS,
    clean,
    colour_of,
    find_end,
    find_peak,
    format_height,
    format_time,
)

_SCRIPTS = ("timeline.js", "timeline_drawing.js", "timeline_controls.js")
_MOST_CHARACTERS, _MOST_DETAIL_LINES, _MOST_PARTS = 200, 30, 12
# Times are kept to a thousandth of a slice: finer than any screen shows, and shorter to write than a float.
_TIME_DIGITS = 3

_PAGE = """<!DOCTYPE html>
<html lang="en" dir="ltr">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<p class="subtitle">{subtitle}</p>
<p class="peak" id="peak"><strong>{peak}</strong> {parts}</p>
<noscript><p>The picture needs JavaScript; nothing leaves this page.</p></noscript>
<div class="controls">
<label>detail <input id="detail" type="range" min="0" max="100" step="0.1"></label>
<output id="shown" for="detail"></output>
<button id="reset" type="button">whole timeline</button>
</div>
<ul class="legend" id="legend" aria-label="areas, from the top of the stack down"></ul>
<div class="plot">
<canvas id="back" tabindex="0" role="img" aria-label="{label}"></canvas>
<canvas id="front" aria-hidden="true"></canvas>
<div id="tip" role="status" hidden></div>
</div>
<p class="help">The wheel zooms in time, and with Shift in height; dragging moves. Keys: arrows, +, −, and 0 or a double
click for the whole timeline. Names above switch areas off and on; a row below shows its piece.</p>
<h2>Largest pieces</h2>
<div class="scroll"><table role="grid">
<thead><tr><th class="number">size</th><th>what</th><th>area</th><th class="number when">from</th>
<th class="number when">to</th></tr></thead>
<tbody id="pieces"></tbody>
</table></div>
<p class="of" id="rest"></p>
<ul class="notes">{notes}</ul>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def write_page(timeline: Timeline, detail: float) -> str:
    """The page of a timeline, with this share of its pieces told apart until the reader moves the slider."""
    style, script = _read("timeline.css"), "".join(map(_read, _SCRIPTS))
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    peak, parts = _describe_peak(timeline)
    return _PAGE.format(
        policy=escape(policy),
        title=escape(clean(timeline.title, _MOST_CHARACTERS)),
        subtitle=escape(clean(timeline.subtitle, 4 * _MOST_CHARACTERS)),
        peak=escape(peak),
        parts=escape(parts),
        label=escape(f"{clean(timeline.y.label, 60)} over {clean(timeline.x.label, 60)}. {peak}"),
        notes="".join(f"<li>{escape(clean(note, 4 * _MOST_CHARACTERS))}</li>" for note in timeline.notes),
        # Inside a script only `<` can end it or open a comment; JSON may spell it out.
        data=json.dumps(_pack(timeline, detail), separators=(",", ":")).replace("<", "\\u003c"),
        script=script,
        style=style,
    )


def _read(name: str) -> str:
    return resources.files("stepscope.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _describe_peak(timeline: Timeline) -> tuple[str, str]:
    """The peak in words, and what it is made of, the largest first."""
    peak = find_peak(timeline)
    if peak is None or not peak.value:
        return "Nothing to draw.", ""
    heights = sorted(((area.values[peak.slice], area.name) for area in timeline.areas), reverse=True)
    parts = [f"{clean(name, 60)} {format_height(timeline.y, height)}" for height, name in heights if height]
    text = f"Peak {format_height(timeline.y, peak.value)} at {format_time(timeline.x, peak.time)}:"
    return text, f"{', '.join(parts[:_MOST_PARTS])}{' and more' if len(parts) > _MOST_PARTS else ''}."


def _pack(timeline: Timeline, detail: float) -> dict[str, Any]:
    """Everything the script draws, as small as plain JSON has it."""
    bands = [*timeline.areas, *([timeline.line] if timeline.line else [])]
    sizes = (piece.size for piece in timeline.pieces)
    grain = math.gcd(*(value for band in bands for value in band.values), *sizes) or 1
    strings: dict[str, int] = {}
    return {
        "detail": detail,
        "grain": grain,
        "bytes": timeline.y.unit in BYTE_UNITS,
        "xLabel": clean(timeline.x.label, 60),
        "xUnit": clean(timeline.x.unit, 20),
        "yLabel": clean(timeline.y.label, 60),
        "yUnit": clean(timeline.y.unit, 20),
        "times": _round_times(timeline),
        "end": find_end(timeline),
        "areas": [_pack_area(area, grain) | {"colour": colour_of(index)} for index, area in enumerate(timeline.areas)],
        "line": _pack_area(timeline.line, grain) if timeline.line else None,
        "stretches": [
            {"label": clean(stretch.label, 60), "start": stretch.start, "end": stretch.end}
            for stretch in timeline.stretches
        ],
        "pieces": _pack_pieces(timeline, grain, strings),
        "strings": list(strings),
    }


def _round_times(timeline: Timeline) -> list[float]:
    length = find_end(timeline) - timeline.times[0] if timeline.times else 1.0
    slice_length = length / max(len(timeline.times), 1) or 1.0
    decimals = max(0, _TIME_DIGITS - math.floor(math.log10(slice_length)))
    return [round(time, decimals) for time in timeline.times]


def _pack_area(area: Area, grain: int) -> dict[str, Any]:
    steps = [after // grain - before // grain for before, after in pairwise((0, *area.values))]
    return {"name": clean(area.name, _MOST_CHARACTERS), "steps": steps}


def _pack_pieces(timeline: Timeline, grain: int, strings: dict[str, int]) -> dict[str, Any]:
    """The pieces as columns. Their texts become places in `strings`, which is filled on the way."""

    def place(texts: Iterable[str]) -> list[int]:
        return [strings.setdefault(clean(text, _MOST_CHARACTERS), len(strings)) for text in texts]

    pieces = timeline.pieces
    return {
        "area": [piece.area for piece in pieces],
        "start": [piece.start for piece in pieces],
        "end": [piece.end for piece in pieces],
        "size": [piece.size // grain for piece in pieces],
        "label": place(piece.label for piece in pieces),
        "detail": [place(piece.detail[:_MOST_DETAIL_LINES]) for piece in pieces],
    }

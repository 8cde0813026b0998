"""The data of the page's script as plain JSON, as small as possible without a decoder.

Columns instead of objects, each text once and referred to by its index, times as differences, and one number for a
column of equal values. Every text goes through `clean`. Numbers that JSON does not have become null.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from stepscope.findings import (
    Area,
    Bars,
    Breakdown,
    Exhibit,
    Figure,
    Lanes,
    ModuleTree,
    Part,
    Report,
    Roofline,
    SideBySide,
    Spans,
    StepPicture,
    Timeline,
)
from stepscope.findings.compared import AlignedMemory, AlignedSteps, Trend
from stepscope.render.drawing.timeline_layout import DEFAULT_DETAIL, counts_bytes, find_end, place_stretches
from stepscope.render.formats import NAME, PROSE, clean
from stepscope.render.site.charts import pack_drawing
from stepscope.render.site.sections import PICTURE, name_inner

_COUNT_DIGITS = 6  # counts are means over steps, and times are divided by them
_MOST_DETAIL, _MOST_LABEL = 600, 60
_MOST_DETAIL_LINES = 30
_MOST_LINE = 160  # of an operator with its shapes
# Times are rounded to a thousandth of a slice: finer than any screen, and shorter than a float.
_TIME_DIGITS = 3


def pack_exhibits(report: Report) -> dict[str, Any]:
    """Return the data of all charts, by their key on the page."""
    exhibits = [exhibit for section in report.sections for exhibit in section.exhibits]
    if report.picture is not None:
        exhibits.append(Exhibit(key=PICTURE, part=report.picture))
    what = clean(next((one.part.what for one in exhibits if isinstance(one.part, Breakdown)), "kernels"), 40)
    return {key: packed for exhibit in exhibits for key, packed in _pack_part(exhibit.key, exhibit.part, what)}


def _pack_part(key: str, part: Part | None, what: str) -> Iterable[tuple[str, dict[str, Any]]]:
    match part:
        case Lanes():
            yield key, pack_lanes(part)
        case Figure() | Roofline() | Bars() | StepPicture() | AlignedSteps() | AlignedMemory() | Trend():
            yield key, pack_drawing(part, what)
        case Timeline():
            yield key, pack_timeline(part)
        case Breakdown():
            yield key, pack_breakdown(part)
        case SideBySide():
            for number, inner in enumerate(part.parts):
                yield from _pack_beside(name_inner(key, number), inner, part, what)


def _pack_beside(key: str, part: Part | None, beside: SideBySide, what: str) -> Iterable[tuple[str, dict[str, Any]]]:
    """Steps and memory of two runs share one scale, so that their sizes can be compared."""
    match part:
        case Lanes():
            yield key, pack_lanes(part, max(other.span_ns for other in beside.parts if isinstance(other, Lanes)))
        case Timeline():
            highest = max(find_highest(other) for other in beside.parts if isinstance(other, Timeline))
            yield key, pack_timeline(part, highest=highest)
        case _:
            yield from _pack_part(key, part, what)


def pack_breakdown(part: Breakdown) -> dict[str, Any]:
    """Return a breakdown, with times in whole nanoseconds, the resolution of a recording."""
    return {
        "runs": [clean(run, 40) for run in part.runs],
        "what": clean(part.what, 40),
        "unit": part.unit,
        "numDevices": part.num_devices,
        "dimensions": [
            {
                "key": dimension.key,
                "label": clean(dimension.label, 40),
                "values": [clean(value) for value in dimension.values],
                "details": [clean(detail, 4 * NAME + PROSE, lines=True) for detail in dimension.details],
            }
            for dimension in part.dimensions
        ],
        # One column per dimension.
        "places": [[row[at] for row in part.places] for at in range(len(part.dimensions))],
        "times": [[_whole(time) for time in column] for column in part.times_ns],
        "counts": [[_shorten(count) for count in column] for column in part.counts],
        "shortest": [[None if time is None else _whole(time) for time in column] for column in part.shortest_ns],
        "longest": [[None if time is None else _whole(time) for time in column] for column in part.longest_ns],
        "walls": [_whole(time) for time in part.walls_ns],
        "idles": [_whole(time) for time in part.idles_ns],
        "tree": _pack_tree(part.tree) if part.tree else None,
        "lines": [clean(line, _MOST_LINE) for line in part.lines],
        "sources": _pack_column(part.sources or (-1,)),
    }


def _pack_tree(tree: ModuleTree) -> dict[str, Any]:
    return {
        "names": [clean(name) for name in tree.names],
        "parents": list(tree.parents),
        "labels": list(tree.labels),
        "copies": _pack_column(tree.copies),
        "nodes": list(tree.nodes),
        "singles": [list(single) for single in tree.singles],
    }


def _whole(time_ns: float) -> int:
    """Return whole nanoseconds; 0 for infinities and NaN, which JSON does not have and a damaged recording may."""
    return round(time_ns) if math.isfinite(time_ns) else 0


def _shorten(count: float) -> float:
    return _whole(count) if not math.isfinite(count) or count == int(count) else round(count, _COUNT_DIGITS)


# --- the step -------------------------------------------------------------------------------------------------------


def pack_lanes(lanes: Lanes, longest_ns: int | None = None) -> dict[str, Any]:
    """Return a step. `longest_ns` is the least length of the axis."""
    return {
        "title": clean(lanes.title),
        "unit": lanes.unit,
        "span": lanes.span_ns,
        "longest": longest_ns,
        "names": [clean(name) for name in lanes.names],
        "details": [clean(detail, _MOST_DETAIL, lines=True) for detail in lanes.details],
        "groups": [clean(group) for group in lanes.groups],
        "lines": [clean(line, _MOST_LINE) for line in lanes.lines],
        "origins": [list(origin) for origin in lanes.origins],
        "tracks": [
            {"label": clean(track.label, 2 * _MOST_LABEL), "kind": track.kind} | _pack_spans(track.spans)
            for track in lanes.tracks
        ],
    }


def _pack_spans(spans: Spans) -> dict[str, Any]:
    """Return gaps and lengths. A gap starts at the end of the previous span, so it is a small number, often 0."""
    ends = [start + length for start, length in zip(spans.starts_ns, spans.lengths_ns, strict=True)]
    gaps = [start - end for start, end in zip(spans.starts_ns, (0, *ends), strict=False)]
    return {
        "gap": gaps,
        "length": list(spans.lengths_ns),
        "name": _pack_column(spans.names),
        "group": _pack_column(spans.groups),
        "count": _pack_column(spans.counts),
        "origin": _pack_column(spans.origins or (-1,)),
    }


def _pack_column(values: Sequence[int]) -> list[int] | int:
    """Return one number if all are equal."""
    return values[0] if values and len(set(values)) == 1 else list(values)


# --- memory ---------------------------------------------------------------------------------------------------------


def find_highest(timeline: Timeline) -> int:
    """Return the greatest height of a timeline, including its line; two next to each other share it as their scale."""
    totals = (sum(heights) for heights in zip(*(area.values for area in timeline.areas), strict=True))
    return max((*totals, *(timeline.line.values if timeline.line else ())), default=0)


def pack_timeline(timeline: Timeline, detail: float = DEFAULT_DETAIL, highest: int | None = None) -> dict[str, Any]:
    """Return a timeline with this share of its pieces drawn one by one at first. `highest` is the least height of the
    axis."""
    bands = [*timeline.areas, *([timeline.line] if timeline.line else [])]
    sizes = (piece.size for piece in timeline.pieces)
    grain = math.gcd(*(value for band in bands for value in band.values), *sizes) or 1
    strings: dict[str, int] = {}
    return {
        "title": clean(timeline.title),
        "detail": detail,
        "grain": grain,
        "highest": highest,
        "bytes": counts_bytes(timeline.y),
        "xLabel": clean(timeline.x.label, _MOST_LABEL),
        "xUnit": clean(timeline.x.unit, 20),
        "yLabel": clean(timeline.y.label, _MOST_LABEL),
        "yUnit": clean(timeline.y.unit, 20),
        "times": _round_times(timeline),
        "end": find_end(timeline),
        "areas": [_pack_area(area, grain) for area in timeline.areas],
        "line": _pack_area(timeline.line, grain) if timeline.line else None,
        "stretches": [
            {"label": clean(stretch.label, _MOST_LABEL), "start": stretch.start, "end": stretch.end, "lane": lane}
            for stretch, lane in place_stretches(timeline)
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
    return {"name": clean(area.name), "steps": steps}


def _pack_pieces(timeline: Timeline, grain: int, strings: dict[str, int]) -> dict[str, Any]:
    """Return the pieces as columns. Their texts become indices into `strings`, which this function fills."""

    def place(texts: Iterable[str]) -> list[int]:
        return [strings.setdefault(clean(text), len(strings)) for text in texts]

    pieces = timeline.pieces
    return {
        "area": [piece.area for piece in pieces],
        "start": [piece.start for piece in pieces],
        "end": [piece.end for piece in pieces],
        "size": [piece.size // grain for piece in pieces],
        "label": place(piece.label for piece in pieces),
        "detail": [place(piece.detail[:_MOST_DETAIL_LINES]) for piece in pieces],
    }

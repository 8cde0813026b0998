"""Charts as the page's scripts read them: plain JSON, as small as it is without a decoder.

Columns instead of objects, texts once and by their place, times as differences, and one number where a whole column
is the same. Every text goes through `clean`. Numbers that JSON does not have are null.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from stepscope.findings import Area, Axis, Figure, Lanes, Roofline, Spans, Timeline
from stepscope.report.site.text import clean
from stepscope.report.timeline_layout import BYTE_UNITS, DEFAULT_DETAIL, find_end

_MOST_DETAIL, _MOST_LABEL = 600, 60
_MOST_DETAIL_LINES = 30
# Times are kept to a thousandth of a slice: finer than any screen shows, and shorter to write than a float.
_TIME_DIGITS = 3


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# --- the step -------------------------------------------------------------------------------------------------------


def pack_lanes(lanes: Lanes, longest_ns: int | None = None) -> dict[str, Any]:
    """A step. `longest_ns` is what the axis reaches at least."""
    return {
        "title": clean(lanes.title),
        "span": lanes.span_ns,
        "longest": longest_ns,
        "names": [clean(name) for name in lanes.names],
        "details": [clean(detail, _MOST_DETAIL, lines=True) for detail in lanes.details],
        "groups": [clean(group) for group in lanes.groups],
        "tracks": [
            {"label": clean(track.label, 2 * _MOST_LABEL), "kind": track.kind} | _pack_spans(track.spans)
            for track in lanes.tracks
        ],
    }


def _pack_spans(spans: Spans) -> dict[str, Any]:
    """Gaps and lengths: a gap is from the end of the span before, and so a small number, often 0."""
    ends = [start + length for start, length in zip(spans.starts_ns, spans.lengths_ns, strict=True)]
    gaps = [start - end for start, end in zip(spans.starts_ns, (0, *ends), strict=False)]
    return {
        "gap": gaps,
        "length": list(spans.lengths_ns),
        "name": _pack_column(spans.names),
        "group": _pack_column(spans.groups),
        "count": _pack_column(spans.counts),
    }


def _pack_column(values: Sequence[int]) -> list[int] | int:
    """One number where all are the same."""
    return values[0] if values and len(set(values)) == 1 else list(values)


# --- points and lines -----------------------------------------------------------------------------------------------


def pack_roofline(roofline: Roofline) -> dict[str, Any]:
    points = [point for point in roofline.points if _has_place(point.intensity, point.flops_per_s)]
    return {
        "title": clean(roofline.title),
        "runs": [clean(run, _MOST_LABEL) for run in roofline.runs],
        "bandwidth": roofline.bytes_per_s,
        "roofs": [{"label": clean(roof.label, _MOST_LABEL), "flops": roof.flops_per_s} for roof in roofline.roofs],
        "points": [
            {
                "label": clean(point.label),
                "group": clean(point.group),
                "x": point.intensity,
                "y": point.flops_per_s,
                "ms": point.time_ms,
                "share": point.share,
                "reached": _finite(point.reached),
                "bound": clean(point.bound, _MOST_LABEL),
                "detail": clean(point.detail, _MOST_DETAIL, lines=True),
                "run": point.run,
            }
            for point in sorted(points, key=lambda point: -point.time_ms)
        ],
        "numLeftOut": len(roofline.points) - len(points),
    }


def _has_place(*values: float) -> bool:
    """Whether a point can stand on logarithmic axes."""
    return all(math.isfinite(value) and value > 0 for value in values)


def pack_figure(figure: Figure) -> dict[str, Any]:
    drawn = [point for point in figure.points if _can_stand(figure.x, point.x) and _can_stand(figure.y, point.y)]
    panels = {panel: at for at, panel in enumerate(dict.fromkeys(point.panel for point in drawn))}
    named = {point.series for point in drawn}
    ordered = dict.fromkeys([*(name for name in figure.series if name in named), *(point.series for point in drawn)])
    series = {name: at for at, name in enumerate(ordered)}
    return {
        "title": clean(figure.title),
        "x": _pack_axis(figure.x),
        "y": _pack_axis(figure.y),
        "seriesLabel": clean(figure.series_label, _MOST_LABEL),
        "panelLabel": clean(figure.panel_label, _MOST_LABEL),
        "panels": [clean(panel, _MOST_LABEL) for panel in panels],
        "series": [clean(name) for name in series],
        "points": {
            "panel": [panels[point.panel] for point in drawn],
            "series": [series[point.series] for point in drawn],
            "x": [point.x for point in drawn],
            "y": [point.y for point in drawn],
            "low": [_finite(point.low) for point in drawn],
            "high": [_finite(point.high) for point in drawn],
        },
        "numLeftOut": len(figure.points) - len(drawn),
    }


def _can_stand(axis: Axis, value: float) -> bool:
    return math.isfinite(value) and (value > 0 or not axis.log)


def _pack_axis(axis: Axis) -> dict[str, Any]:
    label, unit = clean(axis.label, _MOST_LABEL), clean(axis.unit, 20)
    return {"label": label, "unit": unit, "log": axis.log, "bytes": axis.unit in ("bytes", "B")}


# --- memory ---------------------------------------------------------------------------------------------------------


def find_highest(timeline: Timeline) -> int:
    """How high a timeline reaches, its line included: what two of them side by side share as their scale."""
    totals = (sum(heights) for heights in zip(*(area.values for area in timeline.areas), strict=True))
    return max((*totals, *(timeline.line.values if timeline.line else ())), default=0)


def pack_timeline(timeline: Timeline, detail: float = DEFAULT_DETAIL, highest: int | None = None) -> dict[str, Any]:
    """A timeline with this share of its pieces told apart at first. `highest` is what the axis reaches at least."""
    bands = [*timeline.areas, *([timeline.line] if timeline.line else [])]
    sizes = (piece.size for piece in timeline.pieces)
    grain = math.gcd(*(value for band in bands for value in band.values), *sizes) or 1
    strings: dict[str, int] = {}
    return {
        "title": clean(timeline.title),
        "detail": detail,
        "grain": grain,
        "highest": highest,
        "bytes": timeline.y.unit in BYTE_UNITS,
        "xLabel": clean(timeline.x.label, _MOST_LABEL),
        "xUnit": clean(timeline.x.unit, 20),
        "yLabel": clean(timeline.y.label, _MOST_LABEL),
        "yUnit": clean(timeline.y.unit, 20),
        "times": _round_times(timeline),
        "end": find_end(timeline),
        "areas": [_pack_area(area, grain) for area in timeline.areas],
        "line": _pack_area(timeline.line, grain) if timeline.line else None,
        "stretches": [
            {"label": clean(stretch.label, _MOST_LABEL), "start": stretch.start, "end": stretch.end}
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
    return {"name": clean(area.name), "steps": steps}


def _pack_pieces(timeline: Timeline, grain: int, strings: dict[str, int]) -> dict[str, Any]:
    """The pieces as columns. Their texts become places in `strings`, which is filled on the way."""

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

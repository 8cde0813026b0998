"""What the script draws, as small as plain JSON has it: columns of numbers, and every text once."""

import math
from collections.abc import Iterable
from typing import Any

from stepscope.findings import Bars, Beside, Breakdown, Figure, Lanes, Part, Report, Roofline, Timeline
from stepscope.report.site.chart_packing import find_highest, pack_figure, pack_lanes, pack_roofline, pack_timeline
from stepscope.report.site.sections import name_inner
from stepscope.report.site.text import NAME, PROSE, clean, format_value

_COUNT_DIGITS = 6  # counts are means of steps, and times are divided by them


def pack_exhibits(report: Report) -> dict[str, Any]:
    """Everything that is drawn, by the key of its place on the page."""
    exhibits = (exhibit for section in report.sections for exhibit in section.exhibits)
    return {key: packed for exhibit in exhibits for key, packed in _pack_part(exhibit.key, exhibit.part)}


def _pack_part(key: str, part: Part | None) -> Iterable[tuple[str, dict[str, Any]]]:
    match part:
        case Lanes():
            yield key, pack_lanes(part)
        case Roofline():
            yield key, pack_roofline(part)
        case Figure():
            yield key, pack_figure(part)
        case Timeline():
            yield key, pack_timeline(part)
        case Breakdown():
            yield key, pack_breakdown(part)
        case Bars():
            yield key, pack_bars(part)
        case Beside():
            for number, inner in enumerate(part.parts):
                yield from _pack_beside(name_inner(key, number), inner, part)


def _pack_beside(key: str, part: Part | None, beside: Beside) -> Iterable[tuple[str, dict[str, Any]]]:
    """Steps and memory side by side are compared by their size: one scale for all."""
    match part:
        case Lanes():
            yield key, pack_lanes(part, max(other.span_ns for other in beside.parts if isinstance(other, Lanes)))
        case Timeline():
            highest = max(find_highest(other) for other in beside.parts if isinstance(other, Timeline))
            yield key, pack_timeline(part, highest=highest)
        case _:
            yield from _pack_part(key, part)


def pack_breakdown(part: Breakdown) -> dict[str, Any]:
    """Times in whole nanoseconds: the least that a recording tells apart."""
    return {
        "runs": [clean(run, 20) for run in part.runs],
        "what": clean(part.what, 40),
        "dimensions": [
            {
                "key": dimension.key,
                "label": clean(dimension.label, 40),
                "values": [clean(value) for value in dimension.values],
                "details": [clean(detail, 4 * NAME + PROSE, lines=True) for detail in dimension.details],
            }
            for dimension in part.dimensions
        ],
        # A column a dimension.
        "places": [[row[at] for row in part.places] for at in range(len(part.dimensions))],
        "times": [[_whole(time) for time in column] for column in part.times_ns],
        "counts": [[_shorten(count) for count in column] for column in part.counts],
        "shortest": [[None if time is None else _whole(time) for time in column] for column in part.shortest_ns],
        "longest": [[None if time is None else _whole(time) for time in column] for column in part.longest_ns],
        "walls": [_whole(time) for time in part.walls_ns],
        "idles": [_whole(time) for time in part.idles_ns],
    }


def _whole(time_ns: float) -> int:
    """JSON has no number for what is not finite, and a damaged recording may."""
    return round(time_ns) if math.isfinite(time_ns) else 0


def _shorten(count: float) -> float:
    return _whole(count) if not math.isfinite(count) or count == int(count) else round(count, _COUNT_DIGITS)


def pack_bars(part: Bars) -> dict[str, Any]:
    return {
        "labels": [clean(label) for label in part.labels],
        "series": [clean(name) for name in part.series],
        "stacked": part.is_stacked,
        "values": [[_finite(value) for value in column] for column in part.values],
        "texts": [[format_value(part.kind, value) for value in column] for column in part.values],
        "totals": [_total(part, at) for at in range(len(part.labels))] if part.is_stacked else [],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _total(part: Bars, at: int) -> str:
    present = [value for column in part.values if (value := column[at]) is not None]
    return format_value(part.kind, sum(present) if present else None)

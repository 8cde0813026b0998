"""A breakdown on paper: where the page narrows one view by another, a paper has bars for each dimension."""

from collections.abc import Iterable
from dataclasses import dataclass

from stepscope.explain.story.sections.breakdown import ORDERED, Totals, add_up
from stepscope.findings import Bars, Breakdown
from stepscope.report.bars_chart import format_length
from stepscope.report.numbers import MISSING
from stepscope.report.site.colours import colour_of

_MOST_BARS = 20
_MS = 1e6
# Too many for bars: kernels are in the table alone.
_TABLE_ONLY = ("kernel",)


@dataclass(frozen=True, slots=True, kw_only=True)
class BarsOfTime:
    """Bars with what is written beside them and the colours of their labels, none where all have one."""

    key: str
    bars: Bars
    texts: tuple[tuple[str, ...], ...]
    colours: tuple[str, ...]


def draw_dimensions(breakdown: Breakdown) -> Iterable[BarsOfTime]:
    """Bars for each dimension that has values to compare."""
    for place, dimension in enumerate(breakdown.dimensions):
        if dimension.key not in _TABLE_ONLY and dimension.values:
            yield _draw(breakdown, add_up(breakdown, place))


def _draw(breakdown: Breakdown, totals: Totals) -> BarsOfTime:
    dimension = totals.dimension
    shown = totals.order if dimension.key in ORDERED else totals.order[:_MOST_BARS]
    labels = [dimension.values[at] or "unknown" for at in shown]
    times = [[float(own[at]) / _MS for at in shown] for own in totals.times_ns]
    wholes = [max(float(own.sum()) / _MS, 1e-12) for own in totals.times_ns]
    texts = tuple(
        tuple(f"{format_length('ms', time)}, {time / whole:.1%}" if time else MISSING for time in own)
        for own, whole in zip(times, wholes, strict=True)
    )
    bars = Bars(
        title=f"{breakdown.title}, by {dimension.label.lower()}",
        kind="ms",
        labels=tuple(labels),
        series=breakdown.runs,
        values=tuple(map(tuple, times)),
        notes=(*_describe_rest(totals, len(shown)), *breakdown.notes),
    )
    colours = tuple(colour_of(label)[0] for label in labels) if dimension.key == "class" else ()
    return BarsOfTime(key=dimension.key, bars=bars, texts=texts, colours=colours)


def _describe_rest(totals: Totals, num_shown: int) -> Iterable[str]:
    """How much has no bar."""
    rest = list(totals.order[num_shown:])
    if rest:
        shares = [float(own[rest].sum()) / max(float(own.sum()), 1e-12) for own in totals.times_ns]
        listed = " and ".join(f"{share:.1%}" for share in shares)
        yield f"{len(rest):,} others, each shorter, take {listed} of the time."

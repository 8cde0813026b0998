"""Pictures of `stepscope comm`: bandwidth or time against the message, a panel for each collective, a line for each
number of ranks."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from stepscope.cost.communication import bus_factor
from stepscope.explain.experiments.comm_tables import in_order, say_differing, say_shared, slowest_ms
from stepscope.findings import Axis, Figure, Point
from stepscope.recording.rows.comm import CommRow

Quantity = Literal["bus", "algorithm", "time"]
_DRAWN: dict[Quantity, tuple[str, Axis]] = {
    "bus": ("Collectives: bus bandwidth", Axis(label="bus bandwidth", unit="GB/s")),
    "algorithm": ("Collectives: message over time", Axis(label="algorithm bandwidth", unit="GB/s")),
    "time": ("Collectives: time of the slowest rank", Axis(label="time", unit="ms", log=True)),
}


def comm_figure(rows: Sequence[CommRow], quantity: Quantity) -> Figure:
    """Medians with the middle 60 % of repetitions. What was not measured is counted in the subtitle."""
    ordered = in_order(rows)
    title, y = _DRAWN[quantity]
    missing = Counter(row.status for row in ordered if row.status != "ok")
    return Figure(
        title=f"{title}, median with the middle 60 % of repetitions",
        subtitle="; ".join([say_shared(ordered), *(f"{count} {status}" for status, count in missing.items())]),
        x=Axis(label="message", unit="MB", log=True),
        y=y,
        series_label="ranks",
        points=tuple(_point(row, quantity, ordered) for row in ordered if row.measurement is not None),
    )


def _point(row: CommRow, quantity: Quantity, rows: Sequence[CommRow]) -> Point:
    slowest = slowest_ms(row)
    assert slowest is not None
    more = say_differing(row, rows)
    series = f"{row.case.ranks}" + (f", {more}" if more else "")
    panel, x = row.case.collective, row.case.message_bytes / 1e6
    if quantity == "time":
        return Point(panel=panel, series=series, x=x, y=slowest.median, low=slowest.p20, high=slowest.p80)
    factor = bus_factor(row.case.collective, row.case.ranks) if quantity == "bus" else 1.0
    rates = [factor * row.case.moved_bytes / time_ms / 1e6 for time_ms in (slowest.median, slowest.p80, slowest.p20)]
    return Point(panel=panel, series=series, x=x, y=rates[0], low=rates[1], high=rates[2])

"""Pictures of `stepscope attention`: time, rate or memory against length, a panel for each D and a line for each
implementation.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from stepscope.explain.experiments.attention_tables import in_order, say_shared, summary_ms, tell_apart, tflops_of
from stepscope.findings import Axis, Figure, Point
from stepscope.recording.rows.attention import IMPLEMENTATIONS, AttentionRow
from stepscope.units import MIB

Quantity = Literal["forward", "backward", "both", "forward-rate", "backward-rate", "before-backward", "peak"]

_TIME = Axis(label="time", unit="ms", log=True)
# Linear, from zero: a rate comes to rest as lengths grow, and how far apart two lines lie there is what matters.
_RATE = Axis(label="rate", unit="TFLOP/s")
_MEMORY = Axis(label="memory", unit="MiB", log=True)
_DRAWN: dict[Quantity, tuple[str, Axis]] = {
    "forward": ("Attention, forward: median with the middle 60 % of repetitions", _TIME),
    "backward": ("Attention, backward: median with the middle 60 % of repetitions", _TIME),
    "both": ("Attention, forward and backward: median with the middle 60 % of repetitions", _TIME),
    "forward-rate": ("Attention, forward: operations a second", _RATE),
    "backward-rate": ("Attention, backward: operations a second", _RATE),
    "before-backward": ("Attention: memory held between forward and backward, without the inputs", _MEMORY),
    "peak": ("Attention: memory at the peak of forward and backward, without the inputs", _MEMORY),
}


def attention_figure(rows: Sequence[AttentionRow], quantity: Quantity) -> Figure:
    """Rows that were not measured are named in the subtitle: a line that ends has a reason."""
    ordered = in_order(rows)
    title, y = _DRAWN[quantity]
    say_rest = tell_apart(ordered)
    return Figure(
        title=title,
        subtitle="; ".join([say_shared(ordered), *_say_missing(ordered)]),
        x=Axis(label="length", log=True),
        y=y,
        # The other way round than in tables: the first colours are the strongest, and the fastest deserve them.
        series=IMPLEMENTATIONS[::-1],
        series_label="implementation",
        points=tuple(_point(row, quantity, _panel(row, say_rest)) for row in ordered if row.measurement is not None),
    )


def _panel(row: AttentionRow, say_rest: Callable[[AttentionRow], str]) -> str:
    more = say_rest(row)
    return f"D {row.case.head_dim}" + (f", {more}" if more else "")


def _say_missing(rows: Sequence[AttentionRow]) -> list[str]:
    """Where memory ran out first, and how many rows are missing for other reasons."""
    shortest: dict[str, int] = {}
    for row in rows:
        if row.status == "oom":
            name = row.case.implementation
            shortest[name] = min(row.case.length, shortest.get(name, row.case.length))
    where = ", ".join(f"{name} from {length}" for name, length in shortest.items())
    others = Counter(row.status for row in rows if row.status not in ("ok", "oom"))
    return [f"out of memory: {where}"] * bool(where) + [f"{count} {status}" for status, count in others.items()]


def _point(row: AttentionRow, quantity: Quantity, panel: str) -> Point:
    assert row.measurement is not None
    series, x = row.case.implementation, row.case.length
    memory = row.measurement.memory
    match quantity:
        case "before-backward":
            return Point(panel=panel, series=series, x=x, y=memory.before_backward_bytes / MIB)
        case "peak":
            return Point(panel=panel, series=series, x=x, y=memory.peak_bytes / MIB)
        case "forward-rate" | "backward-rate":
            rate = tflops_of(row, "forward" if quantity == "forward-rate" else "backward")
            assert rate is not None
            return Point(panel=panel, series=series, x=x, y=rate)
        case _:
            summary = summary_ms(row, quantity)
            assert summary is not None
            return Point(panel=panel, series=series, x=x, y=summary.median, low=summary.p20, high=summary.p80)

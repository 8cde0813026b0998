"""What an analysis says: findings, tables and figures, before anybody decides how they look.

This is the waist between the half that computes (`explain`) and the half that draws (`report`). A `Table` keeps raw
values with their unit; formatting, rounding and colours belong to the renderer, so that CSV and JSON carry full
precision while the terminal shows three digits. `None` is a value that does not exist (a case that ran out of memory
has no step time).
"""

from typing import Literal

import msgspec

Cell = str | int | float | None
# What a number is; the renderer derives digits and units from it. `share` is a fraction shown in per cent, `ratio` a
# factor shown as 1.23×, `count` an integer with thousands separators, `ms` milliseconds.
Quantity = Literal["text", "ms", "us", "bytes", "count", "number", "share", "ratio"]


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One column. `key` is its stable name in CSV and JSON; `label` is what a person reads above it."""

    key: str
    label: str
    kind: Quantity = "text"
    # A detail column stands in CSV and JSON always, and in text, Markdown and LaTeX only when the user asks for all.
    detail: bool = False


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of raw values under typed columns, with a title above and notes below."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    # Columns whose cells are to be doubted, each with the column that says why: where that has a text, a question mark
    # follows the cell. Both are keys.
    doubted_by: dict[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        keys = [column.key for column in self.columns]
        assert len(set(keys)) == len(keys), f"two columns of one name among {keys}"
        assert {*self.doubted_by, *self.doubted_by.values()} <= set(keys), f"no such columns: {self.doubted_by}"
        for row in self.rows:
            assert len(row) == len(self.columns), f"{len(row)} cells under {len(self.columns)} columns"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that costs time, with what shows it and what to do. The code is stable; `stepscope rule CODE` is its
    page. `saving_ns` is what one step would gain, None where it cannot be estimated."""

    code: str
    title: str
    evidence: str
    fix: str
    saving_ns: int | None = None
    share: float | None = None  # of the step's wall time

    @property
    def saving_ms(self) -> float | None:
        return None if self.saving_ns is None else self.saving_ns / 1e6


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    unit: str = ""
    log: bool = False


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One mark of a figure. `low` and `high` are its spread, drawn as a band or bar where given."""

    panel: str
    series: str
    x: float
    y: float
    low: float | None = None
    high: float | None = None


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A line chart in panels side by side: what is drawn, not how."""

    title: str
    subtitle: str
    x: Axis
    y: Axis
    points: tuple[Point, ...]
    series: tuple[str, ...] = ()  # their order in the legend; those not named come after, as the points name them
    series_label: str = ""
    panel_label: str = ""


class Area(msgspec.Struct, frozen=True, kw_only=True):
    """One band of a timeline: its height in every slice."""

    name: str
    values: tuple[int, ...]


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a timeline with a name, such as a phase; `end` is exclusive, both are slices."""

    label: str
    start: int
    end: int


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an area that can be told apart from the rest of it: in slices `start` to `end` (exclusive) it takes
    `size` of the area's height. `detail` is shown on request, a line each."""

    area: int
    start: int
    end: int
    size: int
    label: str
    detail: tuple[str, ...] = ()


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Areas on top of each other over time, with their largest pieces told apart, the largest first.

    Time is cut into slices, each showing its highest instant, so that a peak is in the picture however short it was.
    `times` are where the slices begin, in the unit of `x`. `line` lies over the areas, such as what is reserved.
    """

    title: str
    subtitle: str
    x: Axis
    y: Axis
    times: tuple[float, ...]
    areas: tuple[Area, ...]
    stretches: tuple[Stretch, ...] = ()
    pieces: tuple[Piece, ...] = ()
    line: Area | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for area in (*self.areas, *([self.line] if self.line else [])):
            assert len(area.values) == len(self.times), f"{len(area.values)} values for {len(self.times)} slices"


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """One screen: a few lines on what this is, tables, and what to do about it."""

    headline: str
    tables: tuple[Table, ...]
    findings: tuple[Finding, ...] | None  # None where they were not looked for

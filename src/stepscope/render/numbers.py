"""How numbers of each `Column.kind` are formatted: digits, separators and units, all in this module; and a table as
strings, which text, Markdown and LaTeX escape and lay out.

A column is formatted as a whole, because readers compare values down a column: values of similar size share their
number of decimals, also across columns that are compared with each other. Values of very different size keep three to
four significant digits each: common decimals would drop the small ones, or give the large ones digits that were never
measured.

Cells are one printable line. A kernel name from an untrusted trace may contain a newline, which would break a row in
every format, or an escape sequence, which the reader's terminal would run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.findings import Axis, Cell, Column, MemoryLine, Quantity, StepBar, Table
from stepscope.render.formats import visible
from stepscope.units import BINARY_UNITS

MISSING = "–"
DOUBTED = "?"
NO_ROWS = "(no rows)"
# Values within this factor of each other share their decimals.
_CLOSE = 100.0
_SCIENTIFIC_BELOW, _SCIENTIFIC_FROM = 1e-4, 1e9
_SUFFIX = {"share": "%", "ratio": "×"}
_UNITS: dict[Quantity, str] = {"ms": " ms", "us": " µs"}
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_MS_COLUMN = Column(key="time", label="", kind="ms")
BYTE_UNITS = ("bytes", "B")  # of an axis of bytes
# Units of time, their nanoseconds, and the least duration in that unit: steps are compared in milliseconds.
_TIMES = (("s", 1e9, 9.995e8), ("ms", 1e6, 1e5), ("µs", 1e3, 1e3))


def format_cells(table: Table, index: int) -> list[str]:
    """Return the cells of a table's column as text, with a mark on unreliable ones."""
    column = table.columns[index]
    peers = table.compared if column.key in table.compared else ()
    others = [at for at, one in enumerate(table.columns) if one.key in peers]
    texts = format_column(
        column, [row[index] for row in table.rows], compared=[row[at] for at in others for row in table.rows]
    )
    reason = table.doubted_by.get(column.key)
    if reason is None:
        return texts
    at = [one.key for one in table.columns].index(reason)
    return [text + DOUBTED * bool(row[at]) for text, row in zip(texts, table.rows, strict=True)]


def format_column(column: Column, cells: Sequence[Cell], *, compared: Sequence[Cell] = ()) -> list[str]:
    """Return the cells of one column as text, `MISSING` for None, with decimals that also suit the cells they are
    `compared` with. Strings are unchanged."""
    values = [_displayed(column, cell) for cell in (*cells, *compared) if _is_finite(cell)]
    decimals = _common_decimals(column, values)
    return [_format_cell(column, cell, decimals) for cell in cells]


def _is_finite(cell: Cell) -> bool:
    return isinstance(cell, int | float) and math.isfinite(cell)


def _displayed(column: Column, cell: Cell) -> float:
    """Return the number whose digits are shown: a share is stored as a fraction and shown in percent."""
    assert isinstance(cell, int | float)
    return cell * 100 if column.kind == "share" else cell


def _format_cell(column: Column, cell: Cell, decimals: int | None) -> str:
    if cell is None:
        return MISSING
    if isinstance(cell, str) or column.kind == "text" or not math.isfinite(cell):
        return str(cell)
    if column.kind == "bytes":
        return _format_bytes(cell)
    value = _displayed(column, cell)
    return _format_decimal(value, _decimals(column, value) if decimals is None else decimals, column.kind)


def _format_decimal(value: float, decimals: int, kind: str) -> str:
    # A count is exact at any size and a share has one decimal; other kinds may switch to powers of ten.
    if kind not in ("count", "share") and value and not _SCIENTIFIC_BELOW <= abs(value) < _SCIENTIFIC_FROM:
        return _sign(f"{value:.2e}{_SUFFIX.get(kind, '')}")
    return _sign(f"{value:z,.{decimals}f}{_SUFFIX.get(kind, '')}")


def _sign(number: str) -> str:
    """Return a number with the minus sign that sentences have."""
    return f"−{number[1:]}" if number.startswith("-") else number


def _common_decimals(column: Column, values: Sequence[float]) -> int | None:
    """Return the decimals that all values share, or None if their sizes are too different."""
    sizes = [abs(value) for value in values if value]
    if not sizes:
        return 0
    if column.kind == "number" and max(sizes) < _SCIENTIFIC_FROM and all(size == round(size) for size in sizes):
        return 0
    if max(sizes) > _CLOSE * min(sizes):
        return None
    return _decimals(column, min(sizes))


def _decimals(column: Column, value: float) -> int:
    """Return the decimals for a single value. Rounds first: 9.999 becomes 10.0, not 10.00."""
    match column.kind:
        case "count":
            return 0
        case "share":
            return 1
        case "ratio":
            ladder = _ratio_decimals
        case _:
            ladder = _measured_decimals
    return ladder(round(value, ladder(value)))


def _measured_decimals(value: float) -> int:
    """Three significant digits, four from 100 on: 0.0123, 1.23, 12.3, 123.4, 1,234."""
    size = abs(value)
    if size >= 1000 or not size:
        return 0
    if size >= 100:
        return 1
    return 2 - math.floor(math.log10(size))


def _ratio_decimals(value: float) -> int:
    """Two decimals, as usual for a speed-up; fewer for a large factor, more for one that would read 0.00×."""
    size = abs(value)
    if size >= 100 or not size:
        return 0
    if size >= 10:
        return 1
    return 2 if size >= 0.1 else 1 - math.floor(math.log10(size))


def _format_bytes(value: float) -> str:
    """Three significant digits in binary units; the unit changes at 1000 rather than 1024, so that no number has
    four."""
    unit = 0
    while abs(value) >= 999.5 and unit < len(BINARY_UNITS) - 1:
        value /= 1024
        unit += 1
    if unit == 0:
        return _sign(f"{value:z.0f} {BINARY_UNITS[unit]}")
    return _sign(f"{value:z,.{_byte_decimals(value)}f} {BINARY_UNITS[unit]}")


def _byte_decimals(value: float) -> int:
    size = abs(value)
    if size >= 99.95:
        return 0
    if size >= 9.995:
        return 1
    return 2 if size >= 0.9995 else 3


# --- one value with its unit ----------------------------------------------------------------------------------------


def format_value(kind: Quantity, value: Cell) -> str:
    """Return one value with its unit."""
    text = format_column(Column(key="value", label="", kind=kind), [value])[0]
    return f"{text}{_UNITS.get(kind, '')}" if isinstance(value, int | float) else text


def format_effect(line: MemoryLine) -> tuple[str, ...]:
    """Return what a change saves and adds, and where that is from: `−7.64 GiB`, `+32.0 ms`, `predicted`. The time of a
    finding has its code: `−2.33 GiB`, `measured`, `−54.0 ms (finding SS005)`."""
    saved = () if line.saving_bytes is None else (format_change("bytes", -line.saving_bytes),)
    added = () if line.adds_ns is None else (format_change("ms", line.adds_ns / 1e6),)
    source = ("measured",) if line.is_measured else ("predicted",)
    if line.finding:
        return (*saved, *source, f"{added[0]} (finding {line.finding})" if added else f"time: finding {line.finding}")
    return (*saved, *added, *source)


def format_change(kind: Quantity, value: float) -> str:
    """Return a difference with its sign and unit."""
    return f"{'−' if value < 0 else '+'}{format_value(kind, abs(value))}"


def format_ms(time_ns: float) -> str:
    """Return a part of a step in milliseconds, whatever its size."""
    return format_value("ms", _in_ms(time_ns))


def _in_ms(time_ns: float) -> float:
    """Return milliseconds; 0 for times that would need a power of ten, such as the rounding error of a sum."""
    return time_ns / 1e6 if abs(time_ns) >= 1e6 * _SCIENTIFIC_BELOW else 0.0


def format_measured(value: float) -> str:
    """Return a measured number without a unit; it keeps its decimals even if it is a whole number."""
    return format_column(Column(key="value", label="", kind="ms"), [value])[0]


def format_time(ns: float) -> str:
    """Return a duration in the unit that keeps it short, as the page's script does."""
    for unit, size, least in _TIMES:
        if abs(ns) >= least:
            return f"{format_measured(ns / size)} {unit}"
    return f"{ns:.0f} ns" if ns else "0 ms"


def format_on(axis: Axis, value: float) -> str:
    """Return a value on an axis, with the unit of the axis; whole numbers have no decimals."""
    if axis.unit in BYTE_UNITS:
        return format_value("bytes", value)
    return f"{format_value('number', value)} {axis.unit}".rstrip()


def format_rate(rate: float, unit: str, *, exact: bool = False) -> str:
    """Return a rate per second: `410.0 TFLOP/s`. An exact rate, such as a device limit, has no trailing zeros."""
    size, prefix = find_prefix(rate)
    return f"{f'{rate / size:.3g}' if exact else format_measured(rate / size)} {prefix}{unit}"


def find_prefix(rate: float) -> tuple[float, str]:
    """Return the largest decimal prefix that gives at least 1 after rounding, and its size."""
    return next((pair for pair in _PREFIXES if rate >= 0.9995 * pair[0]), _PREFIXES[-1])


def find_binary_unit(highest: float) -> tuple[str, float]:
    """Return the unit of an axis that reaches `highest` bytes, and its number of bytes."""
    exponent = 0
    while highest >= 1000 * 1024.0**exponent and exponent < len(BINARY_UNITS) - 1:
        exponent += 1
    return BINARY_UNITS[exponent], 1024.0**exponent


def format_tick(value: float) -> str:
    """Return the shortest exact form: 0.05 and 1,024."""
    return f"{float(f'{value:.9g}'):z,.9g}"


# --- a table as strings ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One column as strings. `names_row` is true for the leading columns that identify a row."""

    label: str
    cells: tuple[str, ...]
    is_text: bool
    names_row: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    title: str
    lanes: tuple[Lane, ...]
    notes: tuple[str, ...]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return list(zip(*(lane.cells for lane in self.lanes), strict=True))


def lay_out(table: Table, *, detail: bool) -> Sheet:
    """Return the table's visible columns as strings. If all are detail columns, they are shown anyway."""
    shown = [index for index, column in enumerate(table.columns) if detail or not column.detail]
    indices = shown or range(len(table.columns))
    lanes: list[Lane] = []
    for index in indices:
        column = table.columns[index]
        cells = format_cells(table, index)
        names_row = column.kind in ("text", "count") and all(lane.names_row for lane in lanes)
        lane = Lane(
            label=one_line(column.label),
            cells=tuple(one_line(cell) for cell in cells),
            is_text=column.kind == "text",
            names_row=names_row or not lanes,
        )
        lanes.append(lane)
    notes = table.notes if table.rows else (NO_ROWS, *table.notes)
    return Sheet(title=one_line(table.title), lanes=tuple(lanes), notes=tuple(map(one_line, notes)))


def one_line(text: str) -> str:
    return visible(" ".join(text.split()))


# --- a step in words ------------------------------------------------------------------------------------------------


def split_step(bar: StepBar) -> tuple[str, str, str]:
    """Return step, busy and idle time as texts. Each is the time itself, rounded: a difference of rounded times would
    contradict the tables, which have the same time."""
    busy, idle = format_column(_MS_COLUMN, [_in_ms(bar.busy_ns), _in_ms(bar.step_ns - bar.busy_ns)])
    return format_ms(bar.step_ns), f"{busy} ms", f"{idle} ms"


def say_split(bar: StepBar) -> str:
    """Return `GPU busy 98.0 ms (81.1%), idle 22.8 ms (18.9%)`."""
    busy, idle = split_shares(bar)
    if bar.device == "CPU":
        return f"in operators {busy}, {name_idle(bar)} {idle}"
    return f"{visible(bar.device[:20])} busy {busy}, idle {idle}"


def name_idle(bar: StepBar) -> str:
    """Return what a step is when it is not busy: a CPU runs Python and the framework outside operators."""
    return "outside operators" if bar.device == "CPU" else "idle"


def split_shares(bar: StepBar) -> tuple[str, str]:
    """Return busy and idle time with their shares, which add up to 100%."""
    _, busy, idle = split_step(bar)
    percent = round(100 * bar.busy_ns / bar.step_ns, 1) if bar.step_ns > 0 else 0.0
    return f"{busy} ({percent:.1f}%)", f"{idle} ({100 - percent:.1f}%)"

"""Tables and figures with rich display: HTML in a notebook, text on a terminal, polars frames for programs. The table
names are here too; `--table` takes the same."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from stepscope.findings import Cell, Column, Figure, Table, Timeline

if TYPE_CHECKING:
    import polars as pl

StrPath = str | PathLike[str]
T = TypeVar("T", bound=Table)
FormatName = Literal["text", "md", "latex", "csv", "json"]
MemoryPart = Literal["categories", "phases", "steps", "modules", "layers", "largest", "freed", "leaks", "saved"]
# Tables of a trace, then those that only a memory snapshot has.
RunPart = Literal[
    "classes",
    "phases",
    "kernels",
    "modules",
    "tree",
    "layers",
    "ops",
    "ranges",
    "loop",
    "syncs",
    "experts",
    "steps",
    "streams",
    "roofline",
    "counters",
    "findings",
    "ranks",
    "collectives",
    "categories",
    "largest",
    "freed",
    "leaks",
    "saved",
]
OptimisePart = Literal["changes", "check"]
PlanPart = Literal["categories", "phases", "modules", "assumptions"]
PrecisionPart = Literal["dtypes", "errors", "underflow", "accumulation", "norm", "speed"]

_FRAME_HEIGHT = 800  # pixels, for a page in a notebook


class DataTable(Table, frozen=True, kw_only=True):
    """A table of results with raw values in typed columns. `frame` is the same as a polars frame."""

    @classmethod
    def of(cls, table: Table) -> "DataTable":
        return cls(**{name: getattr(table, name) for name in Table.__struct_fields__})

    @property
    def frame(self) -> "pl.DataFrame":
        """The table as a polars frame in full precision, one column per key. Call `.to_pandas()` on it for pandas."""
        import polars as pl

        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.columns)
        return pl.DataFrame([_series(column, cells) for column, cells in zip(self.columns, columns, strict=True)])

    def render(self, format: FormatName = "text", *, detail: bool = False, width: int | None = None) -> str:  # noqa: A002
        """The table as `--format` prints it. `detail` shows all columns, as CSV and JSON always do; `width` wraps
        text."""
        from stepscope.render.formats import Format
        from stepscope.render.tables import render

        return render(self, Format(format), detail=detail, width=width)

    def __str__(self) -> str:
        return self.render().rstrip("\n")

    def __repr__(self) -> str:
        return f"<DataTable {self.title!r}: {len(self.rows)} rows, {len(self.columns)} columns>"

    def _repr_html_(self) -> str:
        return write_table(self)


def name_rank(table: T, label: str) -> T:
    """The table with the rank in its title."""
    return msgspec.structs.replace(table, title=f"{table.title}, {label}")


def _series(column: Column, cells: "tuple[Cell, ...]") -> "pl.Series":
    import polars as pl

    present = [cell for cell in cells if cell is not None]
    if any(isinstance(cell, str) for cell in present) or (column.kind == "text" and not present):
        return pl.Series(column.key, [None if cell is None else str(cell) for cell in cells], pl.String)
    whole = column.kind in ("text", "count", "bytes") and all(isinstance(cell, int) for cell in present)
    return pl.Series(column.key, cells, pl.Int64 if whole else pl.Float64)


def write_table(table: Table) -> str:
    """A table as HTML, for a notebook, which brings its own table styles."""
    from stepscope.render.numbers import lay_out

    sheet = lay_out(table, detail=False)
    sides = ["left" if lane.is_text else "right" for lane in sheet.lanes]

    def write_row(tag: str, cells: Iterable[str]) -> str:
        written = zip(sides, cells, strict=True)
        return "".join(f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>' for side, cell in written)

    head = write_row("th", (lane.label for lane in sheet.lanes))
    body = "".join(f"<tr>{write_row('td', row)}</tr>" for row in sheet.rows)
    notes = "".join(f"<div><small>{escape(note)}</small></div>" for note in sheet.notes)
    caption = f"<div><strong>{escape(sheet.title)}</strong></div>"
    return f"<div>{caption}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}</div>"


def write_frame(page: str) -> str:
    """An HTML page as a frame in a notebook. Its scripts run but cannot reach outside the frame."""
    return (
        f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts allow-popups allow-downloads" allow="clipboard-write" '
        f'style="width:100%;height:{_FRAME_HEIGHT}px;border:0"></iframe>'
    )


@dataclass(frozen=True, repr=False)
class Picture:
    """A figure, drawn when it is displayed or saved. `figure` holds its data."""

    figure: Figure | Timeline

    def save(self, path: StrPath, *, force: bool = False) -> Path:
        """Save as .png, .svg, .pdf or .html, depending on the suffix. Without `force`, only a figure by stepscope is
        overwritten."""
        from stepscope.render.figures import check_figure, save

        target = Path(path)
        check_figure(target, force=force)
        save(self.figure, target)
        return target

    def __repr__(self) -> str:
        return f"<Picture {self.figure.title!r}>"

    def _repr_html_(self) -> str:
        from stepscope.render.figures import draw

        if isinstance(self.figure, Timeline):
            return write_frame(draw(self.figure, ".html").decode())
        return draw(self.figure, ".svg").decode()


def encode_document(content: msgspec.Struct | Sequence[msgspec.Struct]) -> str:
    """The JSON document that the command line prints."""
    return msgspec.json.format(msgspec.json.encode(content), indent=1).decode() + "\n"

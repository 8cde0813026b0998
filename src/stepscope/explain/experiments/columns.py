"""Columns and titles of the tables over the rows of an experiment."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from stepscope.explain.statistics import Statistics
from stepscope.findings import Cell, Column, Quantity, Table
from stepscope.recording.rows.bench import Row

R = TypeVar("R", bound=Row)
Word = Callable[[R], str]


class RowColumns(Generic[R]):
    """The columns of a table of `rows`, in the order they were added."""

    def __init__(self, rows: Sequence[R]) -> None:
        self.rows = rows
        self._filled: list[tuple[Column, list[Cell]]] = []

    def add(
        self, key: str, label: str, read: Callable[[R], Cell], kind: Quantity = "text", *, detail: bool = False
    ) -> None:
        column = Column(key=key, label=label, kind=kind, detail=detail)
        self.put(column, [read(row) for row in self.rows])

    def add_setting(
        self, key: str, label: str, read: Callable[[R], Cell], kind: Quantity = "text", *, shown: bool | None = None
    ) -> None:
        """Add a column that is shown if the rows differ in it, unless `shown` is given."""
        cells = [read(row) for row in self.rows]
        is_shown = len(set(cells)) > 1 if shown is None else shown
        self.put(Column(key=key, label=label, kind=kind, detail=not is_shown), cells)

    def add_summary(
        self,
        name: str,
        summarise_row: Callable[[R], Statistics | None],
        labels: dict[str, str],
        shown: Sequence[str],
    ) -> None:
        """Add a column in milliseconds for each statistic in `labels`; those not in `shown` are detail columns."""
        summaries = [summarise_row(row) for row in self.rows]
        for statistic, label in labels.items():
            column = Column(key=f"{name}{statistic}_ms", label=label, kind="ms", detail=statistic not in shown)
            self.put(column, [getattr(summary, statistic) if summary else None for summary in summaries])

    def add_ends(self, remark: Callable[[R], str] | None = None) -> None:
        """Add how each case ended, and a column of remarks if there are any."""
        remark = remark or remark_on
        self.add("status", "status", lambda row: row.status, detail=True)
        self.add("reason", "reason", lambda row: row.reason or "; ".join(one.text for one in row.doubts), detail=True)
        if any(map(remark, self.rows)):
            self.add("remarks", "remarks", remark)

    def put(self, column: Column, cells: list[Cell]) -> None:
        self._filled.append((column, cells))

    def table(self, title: str, notes: Sequence[str], doubted_by: dict[str, str] | None = None) -> Table:
        return Table(
            title=title,
            columns=tuple(column for column, _ in self._filled),
            rows=tuple(zip(*(cells for _, cells in self._filled), strict=True)),
            notes=tuple(notes),
            doubted_by=doubted_by or {},
        )


def remark_on(row: Row) -> str:
    """The status of a failed case; otherwise the codes of its quality warnings."""
    return row.status if row.status != "ok" else ", ".join(doubt.code for doubt in row.doubts)


def join_shared(words: Sequence[Word[R]], rows: Sequence[R]) -> str:
    """Describe in one line what all rows have in common."""
    said = [{word(row) for row in rows} for word in words]
    return ", ".join(text for texts in said if len(texts) == 1 for text in texts if text)


def tell_apart(words: Sequence[Word[R]], rows: Sequence[R]) -> Word[R]:
    """Return a function that describes in one line how a row differs from the others; the line may be empty."""
    differing = [word for word in words if len({word(row) for row in rows}) > 1]
    return lambda row: ", ".join(text for word in differing if (text := word(row)))


def count_failed(rows: Sequence[Row], *, but: Sequence[str] = ("ok",)) -> list[str]:
    """Count the rows of each status that is not in `but`."""
    return [f"{count} {status}" for status, count in Counter(r.status for r in rows if r.status not in but).items()]

"""From the rows of `stepscope comm` to its table, and to the line of each collective.

A collective is done when its last rank is, so a sample is the slowest rank's. How far ranks differ stands beside it: a
rank that is always late is a slow link or a busy core, not noise.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from stepscope.cost.communication import bus_factor, fit_link
from stepscope.explain.experiments.cases import brief, doubt_notes, limit_notes
from stepscope.explain.statistics import Summary, summarise
from stepscope.findings import Cell, Column, Table
from stepscope.recording.rows.comm import CommCase, CommRow
from stepscope.recording.rows.links import COLLECTIVES, Collective, Link, Links, Place
from stepscope.units import say_message_bytes

DOUBTS = {
    "few": "too few repetitions for a spread",
    "spread": "repetitions differ by more than 10 % from one another",
    "crowded": "more ranks than cores: they wait for each other, not for the network",
}
_ALWAYS_SHOWN, _NEVER_SHOWN = ("collective", "ranks", "message"), ("message_bytes",)
Kind = Literal["text", "ms", "count", "number", "share"]


def describe_comm(case: CommCase) -> str:
    """A case in a few words."""
    dtype = "" if case.dtype == "fp32" else f" {case.dtype}"
    return f"{case.collective} {say_message_bytes(case.message_bytes)}{dtype}, {case.ranks} ranks, {case.backend}"


def outcome_of_comm(row: CommRow) -> str:
    """A measured case in a few words."""
    slowest, bus = slowest_ms(row), bus_gb_per_s(row)
    if slowest is None:
        return row.status
    return f"{slowest.median:.4g} ms" + (f", {bus:.3g} GB/s on the bus" if bus else "")


# --- Figures of a row -------------------------------------------------------------------------------------------------


def slowest_ms(row: CommRow) -> Summary | None:
    return summarise([sample / 1e6 for sample in row.measurement.slowest_ns]) if row.measurement else None


def algorithm_gb_per_s(row: CommRow) -> float | None:
    slowest = slowest_ms(row)
    return row.case.moved_bytes / slowest.median / 1e6 if slowest and slowest.median else None


def bus_gb_per_s(row: CommRow) -> float | None:
    """None for one rank, which has nobody to send to."""
    algorithm = algorithm_gb_per_s(row)
    if algorithm is None or row.case.ranks < 2:
        return None
    return algorithm * bus_factor(row.case.collective, row.case.ranks)


def rank_spread(row: CommRow) -> float | None:
    """How much sooner the first rank is done than the last, as a share of the last one's time, in the median."""
    if row.measurement is None or row.case.ranks < 2:
        return None
    by_repetition = zip(*row.measurement.samples_ns, strict=True)
    return summarise([1 - min(samples) / max(samples) for samples in by_repetition]).median


def slowest_rank(row: CommRow) -> str | None:
    """The rank that was last in most repetitions, where one was in more than half; else nobody in particular."""
    if row.measurement is None or row.case.ranks < 2:
        return None
    by_repetition = list(zip(*row.measurement.samples_ns, strict=True))
    rank, count = Counter(samples.index(max(samples)) for samples in by_repetition).most_common(1)[0]
    return str(rank) if 2 * count > len(by_repetition) else ""


# --- The lines --------------------------------------------------------------------------------------------------------


def fit_links(rows: Iterable[CommRow]) -> tuple[Links, ...]:
    """The line of each collective of each place that was measured at two sizes or more, in one environment."""
    points: dict[tuple[Place, tuple[str, ...]], dict[Collective, dict[int, float]]] = {}
    when: dict[tuple[Place, tuple[str, ...]], str] = {}
    for row in rows:
        if row.measurement is not None and row.case.ranks > 1:
            key = (row.place, row.environment.identity)
            sizes = points.setdefault(key, {}).setdefault(row.case.collective, {})
            sizes[row.case.moved_bytes] = summarise(row.measurement.slowest_ns).median
            when[key] = max(row.started, when.get(key, ""))
    found = []
    for key, of_place in points.items():
        fitted = {name: fit_link(sorted(of_place[name].items())) for name in COLLECTIVES if name in of_place}
        links: dict[Collective, Link] = {name: link for name, link in fitted.items() if link is not None}
        if links:
            found.append(Links(place=key[0], links=links, measured=when[key]))
    return tuple(found)


def say_link(place: Place, collective: Collective, link: Link) -> str:
    """One fitted line in words."""
    fit = (
        "two sizes, so nothing is left over"
        if link.sizes == 2
        else f"off by {link.residual or 0:.0%} over {link.sizes} sizes"
    )
    return (
        f"{collective}, {place.ranks} ranks, {place.backend}: {link.latency_ns / 1e6:.3g} ms + message / "
        f"{link.bytes_per_s / 1e9:.3g} GB/s ({fit})"
    )


# --- The table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """A column and where its values come from."""

    column: Column
    read: Callable[[CommRow], Cell]


def comm_table(rows: Sequence[CommRow]) -> Table:
    """A row for each case, the sizes of one collective together."""
    ordered = in_order(rows)
    fields = [*_case_fields(ordered), *_time_fields(), *_end_fields(ordered)]
    return Table(
        title=f"{say_shared(ordered)}; times of the slowest rank, medians in ms",
        columns=tuple(field.column for field in fields),
        rows=tuple(tuple(field.read(row) for field in fields) for row in ordered),
        notes=tuple(_notes(ordered)),
    )


def in_order(rows: Sequence[CommRow]) -> list[CommRow]:
    def key(row: CommRow) -> tuple[object, ...]:
        case = row.case
        where = (row.environment.driver_name, case.backend, case.device, case.interface or "", case.hosts, case.dtype)
        what = (COLLECTIVES.index(case.collective), case.ranks, case.message_bytes)
        return (*where, *what, case.repetitions, case.seconds, *row.environment.identity)

    return sorted(rows, key=key)


def _case_fields(rows: Sequence[CommRow]) -> list[_Field]:
    def field(key: str, label: str, read: Callable[[CommRow], Cell], kind: Kind = "text") -> _Field:
        shown = key in _ALWAYS_SHOWN or (key not in _NEVER_SHOWN and len({read(row) for row in rows}) > 1)
        return _Field(column=Column(key=key, label=label, kind=kind, detail=not shown), read=read)

    return [
        field("device_name", "device", lambda row: row.environment.driver_name),
        field("torch", "torch", lambda row: row.environment.torch),
        field("backend", "backend", lambda row: row.case.backend),
        field("device", "on", lambda row: row.case.device),
        field("interface", "interface", lambda row: row.case.interface or ""),
        field("hosts", "hosts", lambda row: row.case.hosts, "count"),
        field("dtype", "dtype", lambda row: row.case.dtype),
        field("collective", "collective", lambda row: row.case.collective),
        field("ranks", "ranks", lambda row: row.case.ranks, "count"),
        field("message", "message", lambda row: say_message_bytes(row.case.message_bytes)),
        field("message_bytes", "bytes", lambda row: row.case.message_bytes, "count"),
        field("repetitions", "at most", lambda row: row.case.repetitions, "count"),
        field("seconds", "seconds", lambda row: f"{row.case.seconds:g}"),
    ]


def _time_fields() -> list[_Field]:
    def field(key: str, label: str, kind: Kind, read: Callable[[CommRow], Cell], *, detail: bool = False) -> _Field:
        return _Field(column=Column(key=key, label=label, kind=kind, detail=detail), read=read)

    def statistic(name: str) -> Callable[[CommRow], Cell]:
        def read(row: CommRow) -> Cell:
            value: Cell = getattr(slowest_ms(row), name) if row.measurement else None
            return value

        return read

    return [
        field("median_ms", "latency", "ms", statistic("median")),
        field("p20_ms", "p20", "ms", statistic("p20")),
        field("p80_ms", "p80", "ms", statistic("p80")),
        field("min_ms", "min", "ms", statistic("min"), detail=True),
        field("max_ms", "max", "ms", statistic("max"), detail=True),
        field("algorithm_gb_per_s", "algorithm GB/s", "number", algorithm_gb_per_s),
        field("bus_gb_per_s", "bus GB/s", "number", bus_gb_per_s),
        field("rank_spread", "ranks differ", "share", rank_spread),
        field("slowest_rank", "slowest rank", "text", slowest_rank, detail=True),
        field("processor_share", "of a core", "share", _processor_share, detail=True),
        field("samples", "repetitions", "count", _count, detail=True),
    ]


def _processor_share(row: CommRow) -> Cell:
    return row.measurement.processor_share if row.measurement else None


def _count(row: CommRow) -> Cell:
    return len(row.measurement.slowest_ns) if row.measurement else None


def _end_fields(rows: Sequence[CommRow]) -> list[_Field]:
    fields = [
        _Field(column=Column(key="status", label="status", detail=True), read=lambda row: row.status),
        _Field(
            column=Column(key="reason", label="reason", detail=True),
            read=lambda row: row.reason or "; ".join(doubt.text for doubt in row.doubts),
        ),
    ]
    if any(_remark(row) for row in rows):
        fields.append(_Field(column=Column(key="remarks", label="remarks"), read=_remark))
    return fields


def _remark(row: CommRow) -> str:
    return row.status if row.status != "ok" else ", ".join(doubt.code for doubt in row.doubts)


# --- Words ------------------------------------------------------------------------------------------------------------

_WORDS: tuple[Callable[[CommRow], str], ...] = (
    lambda row: row.case.backend,
    lambda row: f"{row.case.device} tensors",
    lambda row: row.case.dtype,
    lambda row: f"{row.case.hosts} hosts" if row.case.hosts > 1 else "",
    lambda row: f"over {row.case.interface}" if row.case.interface else "",
    lambda row: row.environment.driver_name,
    lambda row: f"torch {row.environment.torch}",
)


def say_shared(rows: Sequence[CommRow]) -> str:
    """What all rows have in common, in a line."""
    said = [{word(row) for row in rows} for word in _WORDS]
    return ", ".join(text for texts in said if len(texts) == 1 for text in texts if text)


def say_differing(row: CommRow, rows: Sequence[CommRow]) -> str:
    """What tells this row apart from others besides collective, ranks and size; empty where nothing does."""
    return ", ".join(text for word in _WORDS if len({word(other) for other in rows}) > 1 and (text := word(row)))


def _notes(rows: Sequence[CommRow]) -> list[str]:
    notes = [
        "message: all ranks' parts together; algorithm: message over time; bus: times 2(n−1)/n for an all-reduce, "
        "(n−1)/n for an all-gather or reduce-scatter, 1 for a broadcast",
        "ranks differ: how much sooner the first rank was done than the last",
    ]
    for one in fit_links(rows):
        notes += [say_link(one.place, collective, link) for collective, link in one.links.items()]
    notes += limit_notes(row.environment for row in rows) + doubt_notes(rows, DOUBTS)
    reasons = {(row.status, row.case.collective): row.reason for row in reversed(rows) if row.status != "ok"}
    return notes + [f"{status}: {name}: {brief(reason)}" for (status, name), reason in sorted(reasons.items())]

"""The table, the figures and the fitted links of `stepscope comm`.

A collective ends when its last rank does, so each sample is the time of the slowest rank. The table also shows how far
ranks differ: a rank that is always late has a slow link or a busy core, which is not noise.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from stepscope.cost.communication import bus_factor, fit_link
from stepscope.explain.experiments.cases import brief, doubt_notes, limit_notes
from stepscope.explain.experiments.columns import RowColumns, count_failed, join_shared, tell_apart
from stepscope.explain.statistics import Statistics, summarise
from stepscope.findings import Axis, Cell, Figure, Point, Table
from stepscope.recording.rows.collective_case import CommCase, CommRow
from stepscope.recording.rows.links import COLLECTIVES, Collective, Link, LinkPlace, Links
from stepscope.units import say_message_bytes

DOUBTS = {
    "few": "too few repetitions to estimate the spread",
    "spread": "repetitions differ by more than 10%",
    "crowded": "more ranks than cores: ranks wait for each other, not for the network",
}


def describe_comm(case: CommCase) -> str:
    """Describe a case in a few words."""
    dtype = "" if case.dtype == "fp32" else f" {case.dtype}"
    return f"{case.collective} {say_message_bytes(case.message_bytes)}{dtype}, {case.ranks} ranks, {case.backend}"


def outcome_of_comm(row: CommRow) -> str:
    """Describe the outcome of a case in a few words."""
    slowest, bus = slowest_ms(row), bus_gb_per_s(row)
    if slowest is None:
        return row.status
    return f"{slowest.median:.4g} ms" + (f", {bus:.3g} GB/s bus bandwidth" if bus else "")


# --- Statistics of a row ----------------------------------------------------------------------------------------------


def slowest_ms(row: CommRow) -> Statistics | None:
    return summarise([sample / 1e6 for sample in row.measurement.slowest_ns]) if row.measurement else None


def algorithm_gb_per_s(row: CommRow) -> float | None:
    slowest = slowest_ms(row)
    return row.case.moved_bytes / slowest.median / 1e6 if slowest and slowest.median else None


def bus_gb_per_s(row: CommRow) -> float | None:
    """Bus bandwidth as NCCL defines it; None for one rank, which sends nothing."""
    algorithm = algorithm_gb_per_s(row)
    if algorithm is None or row.case.ranks < 2:
        return None
    return algorithm * bus_factor(row.case.collective, row.case.ranks)


def rank_spread(row: CommRow) -> float | None:
    """The median of how much earlier the first rank finishes than the last, as a share of the last rank's time."""
    if row.measurement is None or row.case.ranks < 2:
        return None
    by_repetition = zip(*row.measurement.samples_ns, strict=True)
    return summarise([1 - min(samples) / max(samples) for samples in by_repetition]).median


def slowest_rank(row: CommRow) -> str | None:
    """The rank that was last in more than half of the repetitions; empty if there is none."""
    if row.measurement is None or row.case.ranks < 2:
        return None
    by_repetition = list(zip(*row.measurement.samples_ns, strict=True))
    rank, count = Counter(samples.index(max(samples)) for samples in by_repetition).most_common(1)[0]
    return str(rank) if 2 * count > len(by_repetition) else ""


# --- Links ------------------------------------------------------------------------------------------------------------


def fit_links(rows: Iterable[CommRow]) -> tuple[Links, ...]:
    """Fit a link (latency and bandwidth) for each collective that was measured at two or more sizes in one place and
    environment."""
    points: dict[tuple[LinkPlace, tuple[str, ...]], dict[Collective, dict[int, float]]] = {}
    when: dict[tuple[LinkPlace, tuple[str, ...]], str] = {}
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


def say_link(place: LinkPlace, collective: Collective, link: Link) -> str:
    """Describe a fitted link in a few words."""
    fit = (
        "two sizes, so the fit is exact"
        if link.sizes == 2
        else f"fit error {link.residual or 0:.0%} over {link.sizes} sizes"
    )
    return (
        f"{collective}, {place.ranks} ranks, {place.backend}: {link.latency_ns / 1e6:.3g} ms + message / "
        f"{link.bytes_per_s / 1e9:.3g} GB/s ({fit})"
    )


# --- Table ------------------------------------------------------------------------------------------------------------


def comm_table(rows: Sequence[CommRow]) -> Table:
    """One row per case, with the sizes of a collective next to each other."""
    ordered = in_order(rows)
    columns = RowColumns(ordered)
    _add_case(columns)
    _add_times(columns)
    columns.add_ends()
    title = f"{join_shared(_WORDS, ordered)}; median times of the slowest rank"
    return columns.table(title, _notes(ordered))


def in_order(rows: Sequence[CommRow]) -> list[CommRow]:
    def key(row: CommRow) -> tuple[object, ...]:
        case = row.case
        where = (row.environment.driver_name, case.backend, case.device, case.interface or "", case.hosts, case.dtype)
        what = (COLLECTIVES.index(case.collective), case.ranks, case.message_bytes)
        return (*where, *what, case.repetitions, case.seconds, *row.environment.identity)

    return sorted(rows, key=key)


def _add_case(columns: RowColumns[CommRow]) -> None:
    add = columns.add_setting
    add("device_name", "device", lambda row: row.environment.driver_name)
    add("torch", "torch", lambda row: row.environment.torch)
    add("backend", "backend", lambda row: row.case.backend)
    add("device", "tensors on", lambda row: row.case.device)
    add("interface", "interface", lambda row: row.case.interface or "")
    add("hosts", "hosts", lambda row: row.case.hosts, "count")
    add("dtype", "dtype", lambda row: row.case.dtype)
    add("collective", "collective", lambda row: row.case.collective, shown=True)
    add("ranks", "ranks", lambda row: row.case.ranks, "count", shown=True)
    add("message", "message", lambda row: say_message_bytes(row.case.message_bytes), shown=True)
    add("message_bytes", "bytes", lambda row: row.case.message_bytes, "count", shown=False)
    add("repetitions", "max repetitions", lambda row: row.case.repetitions, "count")
    add("seconds", "max time (s)", lambda row: f"{row.case.seconds:g}")


def _add_times(columns: RowColumns[CommRow]) -> None:
    labels = {"median": "latency (ms)", **{name: f"{name} (ms)" for name in ("p20", "p80", "min", "max")}}
    columns.add_summary("", slowest_ms, labels, shown=("median", "p20", "p80"))
    columns.add("algorithm_gb_per_s", "algorithm (GB/s)", algorithm_gb_per_s, "number")
    columns.add("bus_gb_per_s", "bus (GB/s)", bus_gb_per_s, "number")
    columns.add("rank_spread", "rank spread", rank_spread, "share")
    columns.add("slowest_rank", "slowest rank", slowest_rank, detail=True)
    columns.add("processor_share", "core usage", _processor_share, "share", detail=True)
    columns.add("samples", "repetitions", _count, "count", detail=True)


def _processor_share(row: CommRow) -> Cell:
    return row.measurement.processor_share if row.measurement else None


def _count(row: CommRow) -> Cell:
    return len(row.measurement.slowest_ns) if row.measurement else None


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


def _notes(rows: Sequence[CommRow]) -> list[str]:
    notes = [
        "message: all ranks together; algorithm bandwidth: message / time; "
        "bus bandwidth: that × 2(n−1)/n for all-reduce, (n−1)/n for all-gather and reduce-scatter, 1 for broadcast",
        "rank spread: how much earlier the first rank finished than the last",
    ]
    for one in fit_links(rows):
        notes += [say_link(one.place, collective, link) for collective, link in one.links.items()]
    notes += limit_notes(row.environment for row in rows) + doubt_notes(rows, DOUBTS)
    reasons = {(row.status, row.case.collective): row.reason for row in reversed(rows) if row.status != "ok"}
    return notes + [f"{status}: {name}: {brief(reason)}" for (status, name), reason in sorted(reasons.items())]


# --- Figures ----------------------------------------------------------------------------------------------------------

CommQuantity = Literal["bus", "algorithm", "time"]
_DRAWN: dict[CommQuantity, tuple[str, Axis]] = {
    "bus": ("Collectives: bus bandwidth", Axis(label="bus bandwidth", unit="GB/s")),
    "algorithm": ("Collectives: algorithm bandwidth", Axis(label="algorithm bandwidth", unit="GB/s")),
    "time": ("Collectives: time of the slowest rank", Axis(label="time", unit="ms", log=True)),
}


def comm_figure(rows: Sequence[CommRow], quantity: CommQuantity) -> Figure:
    """Bandwidth or time against message size, with a panel per collective and a line per number of ranks: medians with
    the middle 60% of repetitions. The subtitle counts the cases that were not measured."""
    ordered = in_order(rows)
    title, y = _DRAWN[quantity]
    say_rest = tell_apart(_WORDS, ordered)
    return Figure(
        title=f"{title} (median; bars span the middle 60% of repetitions)",
        subtitle="; ".join([join_shared(_WORDS, ordered), *count_failed(ordered)]),
        x=Axis(label="message size", unit="MB", log=True),
        y=y,
        series_label="ranks",
        points=tuple(_point(row, quantity, say_rest(row)) for row in ordered if row.measurement is not None),
    )


def _point(row: CommRow, quantity: CommQuantity, more: str) -> Point:
    slowest = slowest_ms(row)
    assert slowest is not None
    series = f"{row.case.ranks}" + (f", {more}" if more else "")
    panel, x = row.case.collective, row.case.message_bytes / 1e6
    if quantity == "time":
        return Point(panel=panel, series=series, x=x, y=slowest.median, low=slowest.p20, high=slowest.p80)
    factor = bus_factor(row.case.collective, row.case.ranks) if quantity == "bus" else 1.0
    rates = [factor * row.case.moved_bytes / time_ms / 1e6 for time_ms in (slowest.median, slowest.p80, slowest.p20)]
    return Point(panel=panel, series=series, x=x, y=rates[0], low=rates[1], high=rates[2])

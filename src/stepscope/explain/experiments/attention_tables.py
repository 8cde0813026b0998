"""The tables and figures of `stepscope attention`.

The implementations of one shape are adjacent, so that a reader compares down a column. Ratios compare with a peer at
the same shape: the fastest SDPA backend in the file, chosen separately for forward and backward, or the named one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from stepscope.cost.attention import (
    ATTENTION_CONVENTION,
    EXACT_BEFORE_BACKWARD,
    EXACT_PEAK,
    flops_of_attention,
    need_of_attention,
)
from stepscope.errors import StepscopeError, nearest
from stepscope.explain.experiments.cases import brief, doubt_notes, limit_notes
from stepscope.explain.experiments.columns import RowColumns, count_failed, join_shared, tell_apart
from stepscope.explain.statistics import Statistics, summarise
from stepscope.findings import Axis, Cell, Figure, Point, Table
from stepscope.recording.rows.attention_case import (
    IMPLEMENTATIONS,
    NOT_TRIED,
    AttentionCase,
    AttentionMeasurement,
    AttentionRow,
)
from stepscope.spec.backends import Implementation
from stepscope.units import MIB

Part = Literal["time", "memory", "all"]
Timing = Literal["forward", "backward", "both"]
TIMINGS: tuple[Timing, ...] = ("forward", "backward", "both")
_SHORT: dict[Timing, str] = {"forward": "fwd", "backward": "bwd", "both": "both"}
_STATISTICS = ("p20", "p80", "mean", "min", "max")

DOUBTS = {
    "throttled": "the GPU reduced its clocks",
    "shared": "other processes used the device",
    "few": "too few repetitions to estimate the spread",
    "spread": "repetitions differ by more than 10%",
    "host-bound": "the GPU waited for the CPU to launch kernels, so this times Python, not attention",
}


def describe_attention(case: AttentionCase) -> str:
    """Describe a case in a few words."""
    mask = "causal" if case.causal else "full"
    heads = f" heads {case.heads}" if case.heads > 1 else ""
    return f"{case.implementation} D {case.head_dim} L {case.length} batch {case.batch}{heads} {case.precision} {mask}"


def outcome_of(row: AttentionRow) -> str:
    """Describe the outcome of a case in a few words."""
    forward, backward = summary_ms(row, "forward"), summary_ms(row, "backward")
    if forward is None or backward is None:
        return row.status
    return f"forward {forward.median:.4g} ms, backward {backward.median:.4g} ms"


def parse_peer(text: str | None) -> Implementation | None:
    for name in IMPLEMENTATIONS:
        if name == text:
            return name
    if text is None:
        return None
    close = nearest(text, IMPLEMENTATIONS)
    raise StepscopeError(
        f"unknown peer: `{text}`",
        detail=f"expected one of {', '.join(IMPLEMENTATIONS)}",
        hint=f"--peer {close}" if close else "",
    )


# --- Tables ---------------------------------------------------------------------------------------------------------


def make_tables(
    rows: Sequence[AttentionRow], *, part: Part | None = None, peer: Implementation | None = None
) -> tuple[Table, ...]:
    """Return the requested table, or one for time and one for memory."""
    parts: tuple[Part, ...] = ("time", "memory") if part is None else (part,)
    return tuple(attention_table(rows, part=one, peer=peer) for one in parts)


def attention_table(rows: Sequence[AttentionRow], *, part: Part, peer: Implementation | None = None) -> Table:
    """Return a table of time, of memory, or of both, for programs."""
    ordered, peers = in_order(rows), _Peers(rows, peer)
    columns = RowColumns(ordered)
    _add_case(columns)
    if part != "memory":
        _add_times(columns, peers)
    if part != "time":
        _add_memory(columns)
    for result in ("output", "dq", "dk", "dv"):
        columns.add(f"{result}_error", f"{result} error", partial(_error, result=result), "number", detail=True)
    columns.add_ends(_failure if part == "memory" else _remark)  # quality warnings are about time
    what = {"time": "median times", "memory": "memory excluding the inputs", "all": "time and memory"}[part]
    return columns.table(f"{say_common(ordered)}; {what}", _notes(ordered, part, peers))


def _shape(row: AttentionRow) -> tuple[str | int, ...]:
    """Everything that identifies a row except its implementation."""
    case = row.case
    sizes = (case.causal, case.batch, case.heads, case.head_dim, case.length, case.seed, case.memory_limit or 0)
    return (row.environment.driver_name, case.precision, *sizes, *row.environment.identity)


def in_order(rows: Sequence[AttentionRow]) -> list[AttentionRow]:
    """Sort rows by shape, then by implementation."""
    return sorted(rows, key=lambda row: (_shape(row), IMPLEMENTATIONS.index(row.case.implementation)))


def _add_case(columns: RowColumns[AttentionRow]) -> None:
    add = columns.add_setting
    add("precision", "precision", lambda row: row.case.precision)
    add("mask", "mask", lambda row: "causal" if row.case.causal else "full")
    add("batch", "batch", lambda row: row.case.batch, "count")
    add("heads", "heads", lambda row: row.case.heads, "count")
    add("head_dim", "D", lambda row: row.case.head_dim, "count", shown=True)
    add("length", "L", lambda row: row.case.length, "count", shown=True)
    add("implementation", "implementation", lambda row: row.case.implementation, shown=True)
    add("device_name", "device", lambda row: row.environment.driver_name)
    add("torch", "torch", lambda row: row.environment.torch)
    add("repetitions", "max repetitions", lambda row: row.case.repetitions, "count")
    add("seconds", "max time (s)", lambda row: f"{row.case.seconds:g}")
    add("seed", "seed", lambda row: str(row.case.seed))
    add("memory_limit", "memory limit", _say_limit)


class _Peers:
    """The peer that each row is compared with."""

    def __init__(self, rows: Sequence[AttentionRow], named: Implementation | None) -> None:
        self.label = named or "sdpa"
        self.full_name = named or "the fastest SDPA backend"
        self._best: dict[tuple[object, ...], tuple[float, str]] = {}
        for row in rows:
            name = row.case.implementation
            if name == named or (named is None and name.startswith("sdpa")):
                for timing in TIMINGS:
                    self._offer(row, timing)

    def _offer(self, row: AttentionRow, timing: Timing) -> None:
        found = summary_ms(row, timing)
        key = (timing, *_shape(row))
        if found is not None and (key not in self._best or found.median < self._best[key][0]):
            self._best[key] = (found.median, row.case.implementation)

    def __bool__(self) -> bool:
        return bool(self._best)

    def name(self, row: AttentionRow, timing: Timing) -> Cell:
        found = self._best.get((timing, *_shape(row)))
        return found[1] if found else None

    def ratio(self, row: AttentionRow, timing: Timing) -> Cell:
        """The peer's time over the row's time; above 1, the row is faster."""
        found, own = self._best.get((timing, *_shape(row))), summary_ms(row, timing)
        return found[0] / own.median if found and own else None


def _add_times(columns: RowColumns[AttentionRow], peers: _Peers) -> None:
    """Add times, rates and ratios. Without a peer in the file, its columns are detail columns."""
    for timing in TIMINGS:
        labels = {"median": f"{timing} (ms)", **{name: f"{timing} {name} (ms)" for name in _STATISTICS}}
        columns.add_summary(f"{timing}_", partial(summary_ms, timing=timing), labels, shown=("median",))
        repetitions = partial(_repetitions, timing=timing)
        columns.add(f"{timing}_repetitions", f"{timing} repetitions", repetitions, "count", detail=True)
    for timing in TIMINGS:
        rate, share, short = partial(tflops_of, timing=timing), partial(_of_peak, timing=timing), _SHORT[timing]
        columns.add(f"{timing}_tflops", f"{short} TFLOP/s", rate, "number", detail=timing == "both")
        columns.add(f"{timing}_of_peak", f"{short} share of peak", share, "share", detail=True)
    for timing in TIMINGS:
        ratio, name, short = partial(peers.ratio, timing=timing), partial(peers.name, timing=timing), _SHORT[timing]
        is_detail = timing == "both" or not peers
        columns.add(f"{timing}_vs_peer", f"{short} vs {peers.label}", ratio, "ratio", detail=is_detail)
        columns.add(f"{timing}_peer", f"{short} peer", name, detail=True)


def _samples_ns(measurement: AttentionMeasurement, timing: Timing) -> tuple[int, ...]:
    return {
        "forward": measurement.forward_ns,
        "backward": measurement.backward_ns,
        "both": measurement.both_ns,
    }[timing]


def summary_ms(row: AttentionRow, timing: Timing) -> Statistics | None:
    if row.measurement is None:
        return None
    return summarise([sample / 1e6 for sample in _samples_ns(row.measurement, timing)])


def _repetitions(row: AttentionRow, timing: Timing) -> Cell:
    return len(_samples_ns(row.measurement, timing)) if row.measurement else None


def tflops_of(row: AttentionRow, timing: Timing) -> float | None:
    summary, flops = summary_ms(row, timing), flops_of_attention(row.case)
    count = {"forward": flops.forward, "backward": flops.backward, "both": flops.both}[timing]
    return count / summary.median / 1e9 if summary else None


def _of_peak(row: AttentionRow, timing: Timing) -> float | None:
    tflops, peak = tflops_of(row, timing), row.environment.hardware.peak_flops.get(row.case.precision)
    return tflops * 1e12 / peak if tflops is not None and peak else None


def _add_memory(columns: RowColumns[AttentionRow]) -> None:
    """Add measured and predicted memory, before backward and at the peak. A CPU has no reserved memory."""

    def weighed(key: str, label: str, *, detail: bool = True) -> None:
        columns.add(key, label, partial(_weighed, name=key), "bytes", detail=detail)

    def formed(moment: str, formula_label: str) -> None:
        columns.add(f"{moment}_form_bytes", "predicted", partial(_need, name=f"{moment}_bytes"), "bytes")
        columns.add(f"{moment}_bound", "bound", partial(_need, name=f"{moment}_bound"), detail=True)
        columns.add(f"{moment}_formula", formula_label, partial(_need, name=f"{moment}_formula"), detail=True)

    reserves = any(row.measurement and row.measurement.memory.peak_reserved_bytes is not None for row in columns.rows)
    weighed("before_backward_bytes", "before backward", detail=False)
    formed("before_backward", "formula")
    weighed("peak_bytes", "peak memory", detail=False)
    formed("peak", "peak formula")
    weighed("before_backward_reserved_bytes", "reserved before backward", detail=not reserves)
    weighed("peak_reserved_bytes", "reserved at peak", detail=not reserves)
    weighed("before_backward_allocated_bytes", "total before backward")
    weighed("peak_allocated_bytes", "total at peak")
    weighed("forward_peak_bytes", "forward peak")
    weighed("input_bytes", "inputs")


def _weighed(row: AttentionRow, name: str) -> Cell:
    value: Cell = getattr(row.measurement.memory, name) if row.measurement else None
    return value


def _need(row: AttentionRow, name: str) -> Cell:
    value: Cell = getattr(need_of_attention(row.case), name)
    return value


def _error(row: AttentionRow, result: str) -> Cell:
    accuracies = row.measurement.accuracies if row.measurement else ()
    return next((one.error for one in accuracies if one.result == result), None)


def _remark(row: AttentionRow) -> str:
    return _failure(row) or ", ".join(doubt.code for doubt in row.doubts)


def _failure(row: AttentionRow) -> str:
    if row.status == "ok":
        return ""
    return f"{row.status}, {NOT_TRIED}" if row.reason.startswith(NOT_TRIED) else row.status


# --- Words ----------------------------------------------------------------------------------------------------------


# Settings that go into the title if all rows share them, and into panel names if not; D, length and implementation
# have their own columns.
_WORDS: tuple[Callable[[AttentionRow], str], ...] = (
    lambda row: f"batch {row.case.batch}",
    lambda row: f"{row.case.heads} heads" if row.case.heads > 1 else "",
    lambda row: "causal" if row.case.causal else "full",
    lambda row: row.case.precision,
    lambda row: row.environment.driver_name,
    lambda row: f"torch {row.environment.torch}",
    lambda row: f"memory limit {_say_limit(row)}" if row.case.memory_limit else "",
)
# Settings that are mentioned only if rows differ in them.
_FINER_WORDS: tuple[Callable[[AttentionRow], str], ...] = (
    lambda row: f"at most {row.case.repetitions} repetitions or {row.case.seconds:g} s",
    lambda row: f"seed {row.case.seed}",
    lambda row: row.environment.cpu_limits,
)


def _say_limit(row: AttentionRow) -> str:
    return f"{row.case.memory_limit / 1e9:g} GB" if row.case.memory_limit else ""


def say_common(rows: Sequence[AttentionRow]) -> str:
    """Describe in one line what all rows have in common."""
    return join_shared(_WORDS, rows)


def _notes(rows: Sequence[AttentionRow], part: Part, peers: _Peers) -> list[str]:
    measured = [row.measurement for row in rows if row.measurement is not None]
    notes = []
    if part != "memory":
        if peers:
            notes.append(f"vs {peers.label}: speedup over {peers.full_name} at the same shape; above 1 is faster")
        notes.append(f"FLOP: {ATTENTION_CONVENTION}")
        if any(one.clock == "cuda events" for one in measured):
            notes.append("times: CUDA events, with the L2 cache flushed before each repetition")
        notes += limit_notes(row.environment for row in rows) + doubt_notes(rows, DOUBTS)
    if part != "time":
        notes += _memory_notes(rows, measured)
    return notes + _failure_notes(rows)


def _memory_notes(rows: Sequence[AttentionRow], measured: Sequence[AttentionMeasurement]) -> list[str]:
    notes = ["memory: excludes q, k, v and the gradient of the output"]
    if any(one.memory.counter == "cuda allocator" for one in measured):
        notes.append("measured by the CUDA caching allocator, in blocks; reserved memory covers the whole process")
    if any(one.memory.counter == "profiler" for one in measured):
        notes.append("measured by the PyTorch profiler: memory that operators allocated minus what they freed")
    names = [name for name in IMPLEMENTATIONS if any(row.case.implementation == name for row in rows)]
    for when, exact in (("before backward", EXACT_BEFORE_BACKWARD), ("at the peak", EXACT_PEAK)):
        listed = ", ".join(name for name in names if name in exact) or "none"
        notes.append(f"predicted {when}: exact for {listed}; a lower bound for the others")
    return notes


def _failure_notes(rows: Sequence[AttentionRow]) -> list[str]:
    """The first reason for each status of each implementation."""
    reasons = {(row.status, row.case.implementation): row.reason for row in reversed(rows) if row.status != "ok"}
    ordered = sorted(reasons.items(), key=lambda item: (item[0][0], IMPLEMENTATIONS.index(item[0][1])))
    return [f"{status}: {name}: {brief(reason)}" for (status, name), reason in ordered]


# --- Figures --------------------------------------------------------------------------------------------------------

AttentionQuantity = Literal["forward", "backward", "both", "forward-rate", "backward-rate", "before-backward", "peak"]

_TIME = Axis(label="time", unit="ms", log=True)
# Linear, from zero: rates level off at long lengths, and the distance between two lines there is what matters.
_RATE = Axis(label="throughput", unit="TFLOP/s")
_MEMORY = Axis(label="memory", unit="MiB", log=True)
_DRAWN: dict[AttentionQuantity, tuple[str, Axis]] = {
    "forward": ("Attention forward (median; bars span the middle 60% of repetitions)", _TIME),
    "backward": ("Attention backward (median; bars span the middle 60% of repetitions)", _TIME),
    "both": ("Attention forward and backward (median; bars span the middle 60% of repetitions)", _TIME),
    "forward-rate": ("Attention forward throughput", _RATE),
    "backward-rate": ("Attention backward throughput", _RATE),
    "before-backward": ("Attention memory between forward and backward, excluding the inputs", _MEMORY),
    "peak": ("Attention peak memory in forward and backward, excluding the inputs", _MEMORY),
}


def attention_figure(rows: Sequence[AttentionRow], quantity: AttentionQuantity) -> Figure:
    """Time, throughput or memory against length, with a panel per head dimension and a line per implementation. The
    subtitle names the rows that were not measured, which explains why a line ends early."""
    ordered = in_order(rows)
    title, y = _DRAWN[quantity]
    say_rest = tell_apart((*_WORDS, *_FINER_WORDS), ordered)
    return Figure(
        title=title,
        subtitle="; ".join([say_common(ordered), *_say_missing(ordered)]),
        x=Axis(label="length", log=True),
        y=y,
        # The reverse of the order in tables: the first colours are the strongest and go to the fastest implementations.
        series=IMPLEMENTATIONS[::-1],
        series_label="implementation",
        points=tuple(_point(row, quantity, _panel(row, say_rest)) for row in ordered if row.measurement is not None),
    )


def _panel(row: AttentionRow, say_rest: Callable[[AttentionRow], str]) -> str:
    more = say_rest(row)
    return f"D {row.case.head_dim}" + (f", {more}" if more else "")


def _say_missing(rows: Sequence[AttentionRow]) -> list[str]:
    """The shortest length at which each implementation ran out of memory, and counts of other failures."""
    shortest: dict[str, int] = {}
    for row in rows:
        if row.status == "oom":
            name = row.case.implementation
            shortest[name] = min(row.case.length, shortest.get(name, row.case.length))
    where = ", ".join(f"{name} at length {length} and above" for name, length in shortest.items())
    return [f"out of memory: {where}"] * bool(where) + count_failed(rows, but=("ok", "oom"))


def _point(row: AttentionRow, quantity: AttentionQuantity, panel: str) -> Point:
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

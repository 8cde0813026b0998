"""From the rows of `stepscope attention` to its tables.

Implementations of one shape stand together, so that a reader compares down a column. A ratio is always to a peer at the
same shape: the fastest of SDPA's backends in the file unless another is named, for forward and for backward each its
own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from stepscope.cost.attention import (
    ATTENTION_CONVENTION,
    EXACT_BEFORE_BACKWARD,
    EXACT_PEAK,
    AttentionNeed,
    flops_of_attention,
    need_of_attention,
)
from stepscope.errors import StepscopeError, nearest
from stepscope.explain.experiments.cases import brief, doubt_notes, limit_notes
from stepscope.explain.statistics import Summary, summarise
from stepscope.findings import Cell, Column, Table
from stepscope.recording.rows.attention import (
    IMPLEMENTATIONS,
    NOT_TRIED,
    AttentionCase,
    AttentionMeasurement,
    AttentionRow,
    Implementation,
)

Part = Literal["time", "memory", "all"]
Timing = Literal["forward", "backward", "both"]
TIMINGS: tuple[Timing, ...] = ("forward", "backward", "both")
Kind = Literal["text", "ms", "bytes", "count", "number", "share", "ratio"]
_SHORT: dict[Timing, str] = {"forward": "fwd", "backward": "bwd", "both": "both"}
_STATISTICS = ("p20", "p80", "mean", "min", "max")
_ALWAYS_SHOWN = ("implementation", "head_dim", "length")

DOUBTS = {
    "throttled": "the GPU held its clocks back",
    "shared": "other processes were using the device",
    "few": "too few repetitions for a spread",
    "spread": "repetitions differ by more than 10 % from one another",
    "host-bound": "the GPU waited for the host to issue work: what is timed is Python",
}


def describe_attention(case: AttentionCase) -> str:
    """A case in a few words."""
    mask = "causal" if case.causal else "full"
    heads = f" heads {case.heads}" if case.heads > 1 else ""
    return f"{case.implementation} D {case.head_dim} L {case.length} batch {case.batch}{heads} {case.precision} {mask}"


def outcome_of(row: AttentionRow) -> str:
    """A measured case in a few words."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """A column and where its values come from. `part` is the table it stands in."""

    column: Column
    read: Callable[[AttentionRow], Cell]
    part: Literal["case", "time", "memory"] = "case"


def make_tables(
    rows: Sequence[AttentionRow], *, part: Part | None = None, peer: Implementation | None = None
) -> tuple[Table, ...]:
    """The table that was asked for, or one of time and one of memory."""
    parts: tuple[Part, ...] = ("time", "memory") if part is None else (part,)
    return tuple(attention_table(rows, part=one, peer=peer) for one in parts)


def attention_table(rows: Sequence[AttentionRow], *, part: Part, peer: Implementation | None = None) -> Table:
    """Time, memory, or all in one, for programs."""
    ordered, peers = in_order(rows), _Peers(rows, peer)
    fields = [
        *_case_fields(ordered),
        *_time_fields(peers),
        *_memory_fields(ordered),
        *_end_fields(ordered, part),
    ]
    chosen = [field for field in fields if part == "all" or field.part in ("case", part)]
    what = {"time": "medians in ms", "memory": "memory on top of the inputs", "all": "time and memory"}[part]
    return Table(
        title=f"{say_shared(ordered)}; {what}",
        columns=tuple(field.column for field in chosen),
        rows=tuple(tuple(field.read(row) for field in chosen) for row in ordered),
        notes=tuple(_notes(ordered, part, peers)),
    )


def _shape(row: AttentionRow) -> tuple[str | int, ...]:
    """All that two rows share which differ in their implementation alone."""
    case = row.case
    sizes = (case.causal, case.batch, case.heads, case.head_dim, case.length, case.seed, case.memory_limit or 0)
    return (row.environment.driver_name, case.precision, *sizes, *row.environment.identity)


def in_order(rows: Sequence[AttentionRow]) -> list[AttentionRow]:
    """By shape, and the implementations of a shape together."""
    return sorted(rows, key=lambda row: (_shape(row), IMPLEMENTATIONS.index(row.case.implementation)))


def _case_fields(rows: Sequence[AttentionRow]) -> list[_Field]:
    def field(key: str, label: str, read: Callable[[AttentionRow], Cell], kind: Literal["text", "count"]) -> _Field:
        shown = key in _ALWAYS_SHOWN or len({read(row) for row in rows}) > 1
        return _Field(column=Column(key=key, label=label, kind=kind, detail=not shown), read=read)

    return [
        field("precision", "precision", lambda row: row.case.precision, "text"),
        field("mask", "mask", lambda row: "causal" if row.case.causal else "full", "text"),
        field("batch", "batch", lambda row: row.case.batch, "count"),
        field("heads", "heads", lambda row: row.case.heads, "count"),
        field("head_dim", "D", lambda row: row.case.head_dim, "count"),
        field("length", "L", lambda row: row.case.length, "count"),
        field("implementation", "implementation", lambda row: row.case.implementation, "text"),
        field("device_name", "device", lambda row: row.environment.driver_name, "text"),
        field("torch", "torch", lambda row: row.environment.torch, "text"),
        field("repetitions", "at most", lambda row: row.case.repetitions, "count"),
        field("seconds", "seconds", lambda row: f"{row.case.seconds:g}", "text"),
        field("seed", "seed", lambda row: str(row.case.seed), "text"),
        field("memory_limit", "held to", _say_limit, "text"),
    ]


class _Peers:
    """Who a row is compared with."""

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
        """The peer's time over the row's: above one is faster than the peer."""
        found, own = self._best.get((timing, *_shape(row))), summary_ms(row, timing)
        return found[0] / own.median if found and own else None


def _time_fields(peers: _Peers) -> list[_Field]:
    """Without a peer in the file its columns are left to programs."""
    fields = [field for timing in TIMINGS for field in _statistic_fields(timing)]
    for timing in TIMINGS:
        rate, share = partial(tflops_of, timing=timing), partial(_of_peak, timing=timing)
        fields.append(_field("tflops", timing, f"{_SHORT[timing]} TFLOP/s", "number", rate, detail=timing == "both"))
        fields.append(_field("of_peak", timing, f"{_SHORT[timing]} of peak", "share", share))
    for timing in TIMINGS:
        ratio, name = partial(peers.ratio, timing=timing), partial(peers.name, timing=timing)
        label = f"{_SHORT[timing]} vs {peers.label}"
        fields.append(_field("vs_peer", timing, label, "ratio", ratio, detail=timing == "both" or not peers))
        fields.append(_field("peer", timing, f"{_SHORT[timing]} peer", "text", name))
    return fields


def _field(
    name: str, timing: Timing, label: str, kind: Kind, read: Callable[[AttentionRow], Cell], *, detail: bool = True
) -> _Field:
    return _Field(column=Column(key=f"{timing}_{name}", label=label, kind=kind, detail=detail), read=read, part="time")


def _statistic_fields(timing: Timing) -> list[_Field]:
    """The median; the rest of the statistics as detail, and how many repetitions they are of."""
    return [
        _field("median_ms", timing, timing, "ms", partial(_statistic, timing=timing, name="median"), detail=False),
        *(
            _field(f"{name}_ms", timing, f"{timing} {name}", "ms", partial(_statistic, timing=timing, name=name))
            for name in _STATISTICS
        ),
        _field("repetitions", timing, f"{timing} repetitions", "count", partial(_repetitions, timing=timing)),
    ]


def _samples_ns(measurement: AttentionMeasurement, timing: Timing) -> tuple[int, ...]:
    return {
        "forward": measurement.forward_ns,
        "backward": measurement.backward_ns,
        "both": measurement.both_ns,
    }[timing]


def summary_ms(row: AttentionRow, timing: Timing) -> Summary | None:
    if row.measurement is None:
        return None
    return summarise([sample / 1e6 for sample in _samples_ns(row.measurement, timing)])


def _statistic(row: AttentionRow, timing: Timing, name: str) -> Cell:
    summary = summary_ms(row, timing)
    value: Cell = getattr(summary, name) if summary else None
    return value


def _repetitions(row: AttentionRow, timing: Timing) -> Cell:
    return len(_samples_ns(row.measurement, timing)) if row.measurement else None


def tflops_of(row: AttentionRow, timing: Timing) -> float | None:
    summary, flops = summary_ms(row, timing), flops_of_attention(row.case)
    count = {"forward": flops.forward, "backward": flops.backward, "both": flops.both}[timing]
    return count / summary.median / 1e9 if summary else None


def _of_peak(row: AttentionRow, timing: Timing) -> float | None:
    tflops, peak = tflops_of(row, timing), row.environment.hardware.peak_flops.get(row.case.precision)
    return tflops * 1e12 / peak if tflops is not None and peak else None


def _memory_fields(rows: Sequence[AttentionRow]) -> list[_Field]:
    """Measured beside the closed form, at both moments. A CPU reserves nothing."""

    def field(key: str, label: str, read: Callable[[AttentionRow], Cell], *, detail: bool = False) -> _Field:
        kind: Kind = "bytes" if key.endswith("_bytes") else "text"
        return _Field(column=Column(key=key, label=label, kind=kind, detail=detail), read=read, part="memory")

    def weighed(key: str, label: str, *, detail: bool = True) -> _Field:
        return field(key, label, partial(_weighed, name=key), detail=detail)

    reserves = any(row.measurement and row.measurement.memory.peak_reserved_bytes is not None for row in rows)
    return [
        weighed("before_backward_bytes", "before backward", detail=False),
        field("before_backward_form_bytes", "closed form", lambda row: _need(row).before_backward_bytes),
        field("before_backward_bound", "it is", lambda row: _need(row).before_backward_bound, detail=True),
        field("before_backward_formula", "formula", lambda row: _need(row).before_backward_formula, detail=True),
        weighed("peak_bytes", "peak", detail=False),
        field("peak_form_bytes", "closed form", lambda row: _need(row).peak_bytes),
        field("peak_bound", "it is", lambda row: _need(row).peak_bound, detail=True),
        field("peak_formula", "formula of the peak", lambda row: _need(row).peak_formula, detail=True),
        weighed("before_backward_reserved_bytes", "reserved before", detail=not reserves),
        weighed("peak_reserved_bytes", "reserved at the peak", detail=not reserves),
        weighed("before_backward_allocated_bytes", "all allocated before"),
        weighed("peak_allocated_bytes", "all allocated at the peak"),
        weighed("forward_peak_bytes", "peak of forward"),
        weighed("input_bytes", "inputs"),
    ]


def _weighed(row: AttentionRow, name: str) -> Cell:
    value: Cell = getattr(row.measurement.memory, name) if row.measurement else None
    return value


def _need(row: AttentionRow) -> AttentionNeed:
    return need_of_attention(row.case)


def _end_fields(rows: Sequence[AttentionRow], part: Part) -> list[_Field]:
    """Errors and remarks. What is doubted is the time, so a table of memory has the status alone."""

    def error_of(result: str) -> Callable[[AttentionRow], Cell]:
        return lambda row: next(
            (one.error for one in (row.measurement.accuracies if row.measurement else ()) if one.result == result), None
        )

    fields = [
        _Field(
            column=Column(key=f"{result}_error", label=f"error of {result}", kind="number", detail=True),
            read=error_of(result),
        )
        for result in ("output", "dq", "dk", "dv")
    ]
    fields += [
        _Field(column=Column(key="status", label="status", detail=True), read=lambda row: row.status),
        _Field(column=Column(key="reason", label="reason", detail=True), read=_reason),
    ]
    remark = _failure if part == "memory" else _remark
    if any(remark(row) for row in rows):
        fields.append(_Field(column=Column(key="remarks", label="remarks"), read=remark))
    return fields


def _reason(row: AttentionRow) -> str:
    return row.reason or "; ".join(doubt.text for doubt in row.doubts)


def _remark(row: AttentionRow) -> str:
    return _failure(row) or ", ".join(doubt.code for doubt in row.doubts)


def _failure(row: AttentionRow) -> str:
    if row.status == "ok":
        return ""
    return f"{row.status}, {NOT_TRIED}" if row.reason.startswith(NOT_TRIED) else row.status


# --- Words ----------------------------------------------------------------------------------------------------------


# What may be the same in all rows or tell them apart, besides D, length and implementation.
_WORDS: tuple[Callable[[AttentionRow], str], ...] = (
    lambda row: f"batch {row.case.batch}",
    lambda row: f"{row.case.heads} heads" if row.case.heads > 1 else "",
    lambda row: "causal" if row.case.causal else "full",
    lambda row: row.case.precision,
    lambda row: row.environment.driver_name,
    lambda row: f"torch {row.environment.torch}",
    lambda row: f"held to {_say_limit(row)}" if row.case.memory_limit else "",
)
# What may tell rows apart and is not worth a word where it does not.
_FINER_WORDS: tuple[Callable[[AttentionRow], str], ...] = (
    lambda row: f"{row.case.repetitions} times or {row.case.seconds:g} s",
    lambda row: f"seed {row.case.seed}",
    lambda row: row.environment.cpu_limits,
)


def _say_limit(row: AttentionRow) -> str:
    return f"{row.case.memory_limit / 1e9:g} GB" if row.case.memory_limit else ""


def say_shared(rows: Sequence[AttentionRow]) -> str:
    """What all rows have in common, in a line."""
    said = [{word(row) for row in rows} for word in _WORDS]
    return ", ".join(text for texts in said if len(texts) == 1 for text in texts if text)


def tell_apart(rows: Sequence[AttentionRow]) -> Callable[[AttentionRow], str]:
    """What tells a row apart from the others, in a line; empty where nothing does."""
    words = [word for word in (*_WORDS, *_FINER_WORDS) if len({word(row) for row in rows}) > 1]
    return lambda row: ", ".join(text for word in words if (text := word(row)))


def _notes(rows: Sequence[AttentionRow], part: Part, peers: _Peers) -> list[str]:
    measured = [row.measurement for row in rows if row.measurement is not None]
    notes = []
    if part != "memory":
        if peers:
            notes.append(
                f"vs {peers.label}: {peers.full_name}'s time at the same shape over this one's; above 1 is faster"
            )
        notes.append(f"FLOP: {ATTENTION_CONVENTION}")
        if any(one.clock == "cuda events" for one in measured):
            notes.append("times from CUDA events, the cache flushed before each repetition")
        notes += limit_notes(row.environment for row in rows) + doubt_notes(rows, DOUBTS)
    if part != "time":
        notes += _memory_notes(rows, measured)
    return notes + _failure_notes(rows)


def _memory_notes(rows: Sequence[AttentionRow], measured: Sequence[AttentionMeasurement]) -> list[str]:
    notes = ["memory: on top of q, k, v and the gradient of the output"]
    if any(one.memory.counter == "cuda allocator" for one in measured):
        notes.append("counted by CUDA's caching allocator, in its blocks; reserved: all of the process")
    if any(one.memory.counter == "profiler" for one in measured):
        notes.append("counted by PyTorch's profiler: what operators took, less what they gave back")
    names = [name for name in IMPLEMENTATIONS if any(row.case.implementation == name for row in rows)]
    for when, exact in (("before backward", EXACT_BEFORE_BACKWARD), ("of the peak", EXACT_PEAK)):
        listed = ", ".join(name for name in names if name in exact) or "none"
        notes.append(f"closed form {when}: exact for {listed}; at least so much for the others")
    return notes


def _failure_notes(rows: Sequence[AttentionRow]) -> list[str]:
    """The first reason of each kind for each implementation."""
    reasons = {(row.status, row.case.implementation): row.reason for row in reversed(rows) if row.status != "ok"}
    ordered = sorted(reasons.items(), key=lambda item: (item[0][0], IMPLEMENTATIONS.index(item[0][1])))
    return [f"{status}: {name}: {brief(reason)}" for (status, name), reason in ordered]

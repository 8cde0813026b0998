"""Tables of the gate: what was compared, and what a baseline holds."""

import statistics
from collections.abc import Sequence

from stepscope.explain.gate.noise import RunSample
from stepscope.explain.gate.verdict import GateResult, MetricVerdict, say_change
from stepscope.findings import Cell, Column, Table
from stepscope.recording.baseline import Baseline
from stepscope.units import count_noun

_MOST_PARTS = 12


def gate_tables(result: GateResult) -> list[Table]:
    """The metrics, and the parts of the step if both sides have them."""
    tables = [metrics_table(result)]
    if result.parts:
        tables.append(_parts_table(result))
    return tables


def metrics_table(result: GateResult) -> Table:
    columns = (
        Column(key="metric", label="metric"),
        Column(key="baseline", label="baseline"),
        Column(key="new", label="new"),
        Column(key="change_text", label="change"),
        Column(key="noise_text", label="noise"),
        Column(key="verdict", label="verdict"),
        Column(key="outcome", label="gate"),
        Column(key="unit", label="unit", detail=True),
        Column(key="baseline_value", label="baseline value", kind="number", detail=True),
        Column(key="new_value", label="new value", kind="number", detail=True),
        Column(key="change", label="relative change", kind="number", detail=True),
        Column(key="noise", label="relative noise", kind="number", detail=True),
    )
    runs = f"{count_noun(result.num_base, 'baseline run')}, {count_noun(result.num_new, 'new run')}"
    return Table(
        title=f"Baseline {result.name}: {runs}",
        columns=columns,
        rows=tuple(_cells(one, is_gated=result.limit is not None) for one in result.metrics),
        notes=(*(f"not compared: {one}" for one in result.refusals), *result.notes),
    )


def _cells(one: MetricVerdict, *, is_gated: bool) -> tuple[Cell, ...]:
    noise = one.noise.margin if one.noise.kind in ("between runs", "within runs") and one.change is not None else None
    said_noise = "exact" if one.noise.kind == "exact" else "unknown" if noise is None else f"±{say_change(noise)}"
    return (
        one.label,
        "–" if one.base is None else one.say(one.base),
        "–" if one.new is None else one.say(one.new),
        "–" if one.change is None else f"{one.change * 100:+.2f}%",
        said_noise,
        one.verdict,
        one.outcome if is_gated else "–",
        {"ms": "ns", "bytes": "bytes"}.get(one.unit, one.unit),
        one.base,
        one.new,
        one.change,
        noise,
    )


def _parts_table(result: GateResult) -> Table:
    columns = (
        Column(key="part", label=result.by),
        Column(key="base_ms", label="baseline", kind="ms"),
        Column(key="new_ms", label="new", kind="ms"),
        Column(key="difference_ms", label="change", kind="ms"),
        Column(key="ratio", label="ratio", kind="ratio"),
        Column(key="verdict", label="verdict"),
    )
    rows = tuple(
        (
            one.name,
            one.base_ns / 1e6,
            one.new_ns / 1e6,
            (one.new_ns - one.base_ns) / 1e6,
            one.new_ns / one.base_ns if one.base_ns else None,
            one.verdict,
        )
        for one in result.parts[:_MOST_PARTS]
    )
    left_out = len(result.parts) - len(rows)
    notes = (f"{count_noun(left_out, 'smaller change')} not shown",) if left_out else ()
    title = f"Time per step by {result.by}, in ms; overlapping kernels each count"
    return Table(title=title, columns=columns, rows=rows, notes=notes, compared=("base_ms", "new_ms", "difference_ms"))


def baselines_table(named: Sequence[tuple[str, Baseline]]) -> Table:
    columns = (
        Column(key="name", label="baseline"),
        Column(key="runs", label="runs", kind="count"),
        Column(key="step_ms", label="step", kind="ms"),
        Column(key="device", label="device"),
        Column(key="torch", label="torch"),
        Column(key="saved", label="saved"),
    )
    rows = []
    for name, one in named:
        medians = [RunSample.of_steps(run.step_ns).value for run in one.runs if run.step_ns]
        step_ms = statistics.fmean(medians) / 1e6 if medians else None
        conditions = one.conditions
        rows.append((name, len(one.runs), step_ms, conditions.device or "–", conditions.torch or "–", one.saved))
    return Table(title="Baselines", columns=columns, rows=tuple(rows))


def runs_table(name: str, baseline: Baseline) -> Table:
    """One row per run of a baseline, with the conditions below."""
    columns = (
        Column(key="run", label="run"),
        Column(key="steps", label="steps", kind="count"),
        Column(key="step_ms", label="median step", kind="ms"),
        Column(key="idle_ms", label="idle", kind="ms"),
        Column(key="kernels", label="kernels per step", kind="number"),
        Column(key="peak_bytes", label="peak memory", kind="bytes"),
        Column(key="clock", label="clock"),
        Column(key="started", label="started", detail=True),
        Column(key="identity", label="identity", detail=True),
    )
    rows = tuple(
        (
            run.file,
            len(run.step_ns),
            RunSample.of_steps(run.step_ns).value / 1e6 if run.step_ns else None,
            None if run.idle_ns is None else run.idle_ns / 1e6,
            run.kernels,
            run.peak_bytes,
            run.clock if run.step_ns else "–",
            run.started,
            run.identity,
        )
        for run in baseline.runs
    )
    conditions = baseline.conditions
    said = {"device": conditions.device, "torch": conditions.torch, "ranks": str(conditions.world_size)}
    said |= conditions.settings
    notes = [f"must be equal: {', '.join(f'{key} {value}' for key, value in said.items() if value)}"]
    if conditions.versions:
        notes.append(f"versions: {', '.join(f'{key} {value}' for key, value in conditions.versions.items())}")
    return Table(title=f"Baseline {name}, saved {baseline.saved}", columns=columns, rows=rows, notes=tuple(notes))

"""The table and chart of a bench sweep.

Columns show what differs between the rows; the title states what they share. Comparisons use medians, so that one
interrupted step does not decide them; means and standard deviations are in the table too.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from stepscope import cost
from stepscope.explain.experiments.cases import (
    ALWAYS_SHOWN,
    CASE_SETTINGS,
    CaseSetting,
    all_else,
    brief,
    doubt_notes,
    find_setting,
    limit_notes,
    say_setting,
    say_shared,
    varies,
)
from stepscope.explain.experiments.columns import RowColumns, count_failed
from stepscope.explain.statistics import Statistics, summarise
from stepscope.findings import Axis, Cell, Column, Figure, Point, Table
from stepscope.recording.rows.bench import STEP_DOUBTS, BenchRow, CaseRow, Environment
from stepscope.spec import SIZES, Workload

PHASES = ("forward", "backward", "optimizer")
_STATISTICS = ("mean", "sd", "median", "p20", "p80", "min", "max")

DOUBTS = {
    "throttled": "the GPU reduced its clocks",
    "shared": "other processes used the device",
    "few": "too few steps to estimate the spread",
    "spread": "step times differ by more than 10%",
    "cold": "the first timed step was much slower than the others; use more warm-up steps",
    "clocks": "the CPU clock and CUDA events disagree",
    "host-bound": "the GPU waited for the CPU to launch kernels; a faster GPU does not help",
    "uncounted": "the FLOPs could not be counted",
    "not-finite": "the loss is NaN or infinite, so the timed steps may not do what training does",
    "skipped": "gradients were infinite, so some steps skipped the update",
    "denormal": "denormal numbers are slow on a CPU: torch.set_flush_denormal(True)",
}


# What helps a host-bound step, by what it does already.
_FEWER_LAUNCHES = {
    "eager": "fewer kernels do (--compile, or --preset fast)",
    "compiled": "CUDA graphs (--graph) or a larger batch do",
    "captured": "a larger batch does",
}


def bench_table(rows: Sequence[BenchRow]) -> Table:
    columns = RowColumns(rows)
    for setting in CASE_SETTINGS:
        shown = setting.key in ALWAYS_SHOWN or varies(setting, rows)
        columns.add_setting(setting.key, setting.label, setting.read, setting.kind, shown=shown)
    _add_times(columns)
    _add_rates(columns)
    ratios = _speedup_columns(rows)
    if varies(find_setting("warmup"), rows):
        ratios.append(_warmup_column(rows))
    for ratio in ratios:
        columns.put(ratio.column, ratio.cells)
        columns.put(ratio.doubt_column, ratio.doubts)
    columns.add_ends()
    title = f"{say_shared(rows)}; median times" if rows else "no cases"
    return columns.table(
        title,
        (*_notes(rows), *_doubt_note(ratios)),
        doubted_by={ratio.column.key: ratio.doubt_column.key for ratio in ratios},
    )


def bench_figure(rows: Sequence[BenchRow]) -> Figure:
    """Step time against context, or against the number of parameters if all contexts are the same."""
    by_context = varies(find_setting("context"), rows)
    # A model without tokens cannot be plotted against context.
    measured = [row for row in rows if row.measurement and (row.case.workload.context or not by_context)]
    inside = ("context", "precision") if by_context else ("model", "precision", "vocab")
    told_apart = [s for s in CASE_SETTINGS if varies(s, rows) or (by_context and s.key == "model")]
    series = [setting for setting in told_apart if setting.key not in inside]
    missing = count_failed([row for row in rows if row.measurement is None], but=())
    return Figure(
        title="Step time (median; bars span the middle 60% of steps)",
        subtitle="; ".join([say_shared(rows), *missing]),
        x=Axis(label="context", unit="tokens", log=True) if by_context else Axis(label="parameters", log=True),
        y=Axis(label="step time", unit="ms", log=True),
        series_label=" · ".join(setting.label for setting in series),
        panel_label="precision",
        points=tuple(_point(row, series, by_context=by_context) for row in measured),
    )


def sizes_table() -> Table:
    """The named sizes, with their exact parameter counts."""
    keys = ("d_model", "d_ff", "num_layers", "num_heads", "parameters")
    return Table(
        title="Sizes of the built-in model: vocabulary 10,000, untied head",
        columns=(
            Column(key="size", label="size"),
            *(Column(key=key, label=key.removeprefix("num_"), kind="count") for key in keys),
        ),
        rows=tuple(
            (name, shape.d_model, shape.d_ff, shape.num_layers, shape.num_heads, cost.parameters(shape).total)
            for name, shape in SIZES.items()
        ),
    )


def outcome_of(row: CaseRow) -> str:
    """Describe the outcome of a case in a few words."""
    step = step_ms(row) if isinstance(row, BenchRow) else None
    return f"{step.median:.4g} ms" if step else row.status


def step_ms(row: BenchRow) -> Statistics | None:
    return _summary_ms(row.measurement.step_ns) if row.measurement else None


def _summary_ms(samples_ns: Sequence[int]) -> Statistics:
    return summarise([sample / 1e6 for sample in samples_ns])


def _add_times(columns: RowColumns[BenchRow]) -> None:
    """Add the median of each phase, with its other statistics as detail columns. A step with a single phase shows only
    the step."""
    phases = [p for p in PHASES if any(row.measurement and p in row.measurement.phases_ns for row in columns.rows)]
    for phase in phases if len(phases) > 1 else ():
        _add_statistics(columns, phase, partial(_phase_ms, phase=phase), {"median": f"{phase} (ms)"})
    _add_statistics(columns, "step", step_ms, {"median": "step (ms)", "mean": "mean", "sd": "sd"})
    if any(row.predicted and row.predicted.step_ns for row in columns.rows):
        columns.add("predicted_ms", "predicted step (ms)", _predicted_ms, "ms")
        columns.add("predicted_step_error", "step error", _step_error, "share")


def _add_statistics(
    columns: RowColumns[BenchRow], name: str, read: Callable[[BenchRow], Statistics | None], shown: dict[str, str]
) -> None:
    others = {one: f"{name} {one} (ms)" for one in _STATISTICS if one not in shown}
    columns.add_summary(f"{name}_", read, shown | others, shown=tuple(shown))


def _phase_ms(row: BenchRow, phase: str) -> Statistics | None:
    samples = row.measurement.phases_ns.get(phase) if row.measurement else None
    return _summary_ms(samples) if samples else None


def _add_rates(columns: RowColumns[BenchRow]) -> None:
    """Add tokens per second, or samples per second if a case has no tokens and all have samples."""
    measured = [row.measurement for row in columns.rows if row.measurement]
    has_tokens = all(one.has_tokens or not one.has_samples for one in measured)
    columns.add("tokens_per_s", "tokens/s", tokens_per_s, "count", detail=not has_tokens)
    columns.add("samples_per_s", "samples/s", samples_per_s, "number", detail=has_tokens)
    columns.add("tflops", "TFLOP/s", _tflops, "number")
    columns.add("mfu", "MFU", mfu_of, "share")
    columns.add("peak_bytes", "peak memory", partial(_of, name="peak_bytes"), "bytes")
    if any(row.predicted for row in columns.rows):
        columns.add("predicted_bytes", "predicted peak", _predicted_bytes, "bytes")
        columns.add("predicted_peak_error", "peak error", _peak_error, "share")
    columns.add("reserved_bytes", "reserved memory", partial(_of, name="reserved_bytes"), "bytes", detail=True)
    columns.add("parameters", "parameters", partial(_of, name="parameters"), "count", detail=True)
    columns.add("attention_kernels", "attention kernels", _attention_kernels, detail=True)


def _predicted_ms(row: BenchRow) -> float | None:
    return row.predicted.step_ns / 1e6 if row.predicted and row.predicted.step_ns else None


def _predicted_bytes(row: BenchRow) -> int | None:
    return row.predicted.peak_allocated_bytes if row.predicted else None


def _step_error(row: BenchRow) -> float | None:
    """By how much the prediction is longer than the median."""
    predicted, step = _predicted_ms(row), step_ms(row)
    return None if predicted is None or step is None else predicted / step.median - 1


def _peak_error(row: BenchRow) -> float | None:
    predicted = _predicted_bytes(row)
    measured = row.measurement.peak_bytes if row.measurement else 0
    return None if predicted is None or not measured else predicted / measured - 1


def _attention_kernels(row: BenchRow) -> Cell:
    """The kernels that `flash` used: it selects them by GPU, dtype and shape."""
    return ", ".join(row.measurement.attention_kernels) or None if row.measurement else None


def tokens_per_s(row: BenchRow) -> int | None:
    step = step_ms(row)
    if step is None or row.measurement is None or not row.measurement.has_tokens:
        return None
    return round(row.case.workload.tokens / step.median * 1e3)


def samples_per_s(row: BenchRow) -> float | None:
    """Samples per second, where a sample is one item of the batch: a sequence, an image, a recording."""
    step = step_ms(row)
    if step is None or row.measurement is None or not (row.measurement.has_tokens or row.measurement.has_samples):
        return None
    return row.case.workload.batch / step.median * 1e3


def _tflops(row: BenchRow) -> float | None:
    step = step_ms(row)
    if row.measurement is None or row.measurement.forward_flops is None or step is None:
        return None
    return cost.step_flops(row.measurement.forward_flops, row.case.workload.mode) / step.median / 1e9


def mfu_of(row: BenchRow) -> float | None:
    """Model FLOPs utilization: achieved FLOP/s as a share of the peak for this precision; None if either is unknown."""
    peak = row.environment.hardware.peak_flops.get(row.case.workload.precision)
    tflops = _tflops(row)
    return tflops * 1e12 / peak if tflops is not None and peak else None


def _of(row: BenchRow, name: str) -> Cell:
    value: Cell = getattr(row.measurement, name) if row.measurement else None
    return value


class _RatioColumn(NamedTuple):
    """The ratio of each row to another row, and the quality warnings of either."""

    column: Column
    cells: list[Cell]
    doubts: list[Cell]

    @property
    def doubt_column(self) -> Column:
        return Column(key=f"{self.column.key}_doubts", label=f"{self.column.label}: warnings", detail=True)


def _speedup_columns(rows: Sequence[BenchRow]) -> list[_RatioColumn]:
    """A column per setting that varies, or a single one if several vary together, as those of a preset do."""
    compared = [setting for setting in CASE_SETTINGS if setting.baseline is not None and varies(setting, rows)]
    columns = [_speedup_column(rows, setting) for setting in compared]
    if len(compared) > 1 and all(cell in (None, 1.0) for column in columns for cell in column.cells):
        return [_speedup_column(rows, *compared)]
    return columns


def _speedup_column(rows: Sequence[BenchRow], *settings: CaseSetting) -> _RatioColumn:
    """The baseline's step time over this row's, all else equal. Without the usual baseline, the first value is used."""
    baseline = tuple(_choose_baseline(rows, setting) for setting in settings)
    (setting, *others), (value, *_) = settings, baseline
    named = f"{setting.label} {value}" if setting.needs_label else str(value)
    column = Column(
        key="speedup_all" if others else f"speedup_{setting.key}",
        label="vs baselines" if others else f"vs {named}",
        kind="ratio",
    )
    return _ratio_column(column, settings, rows, baseline, lambda base, step: base.median / step.median)


def _choose_baseline(rows: Sequence[BenchRow], setting: CaseSetting) -> Cell:
    values = [setting.read(row) for row in rows]
    return setting.baseline if setting.baseline in values else values[0]


def _warmup_column(rows: Sequence[BenchRow]) -> _RatioColumn:
    """The mean compared with the case with the most warm-up steps: how skipping the warm-up distorts the mean."""
    longest = max(row.case.timing.warmup for row in rows)
    column = Column(key="mean_vs_warm", label=f"mean vs {longest} warm-up steps", kind="ratio")
    settings = (find_setting("warmup"),)
    return _ratio_column(column, settings, rows, (longest,), lambda base, step: step.mean / base.mean)


def _ratio_column(
    column: Column,
    settings: Sequence[CaseSetting],
    rows: Sequence[BenchRow],
    baseline: tuple[Cell, ...],
    divide: Callable[[Statistics, Statistics], float],
) -> _RatioColumn:
    """Compare each row with the row that has the values of the baseline, all else equal."""
    others = {all_else(row, *settings): row for row in rows if tuple(one.read(row) for one in settings) == baseline}
    ratios: list[Cell] = []
    doubts: list[Cell] = []
    for row in rows:
        base = others.get(all_else(row, *settings))
        steps = (step_ms(base), step_ms(row)) if base else (None, None)
        ratios.append(divide(steps[0], steps[1]) if steps[0] and steps[1] else None)
        both = (base, row) if base and base is not row and ratios[-1] is not None else ()
        codes = dict.fromkeys(doubt.code for one in both for doubt in one.doubts if doubt.code not in STEP_DOUBTS)
        doubts.append(", ".join(codes) or None)
    return _RatioColumn(column, ratios, doubts)


def _doubt_note(ratios: Iterable[_RatioColumn]) -> list[str]:
    codes = dict.fromkeys(code for one in ratios for cell in one.doubts if cell for code in str(cell).split(", "))
    return [f"?: unreliable, because the times behind this ratio have warnings: {', '.join(codes)}"] if codes else []


def _notes(rows: Sequence[BenchRow]) -> list[str]:
    measured = [row for row in rows if row.measurement is not None]
    notes = [_peak_note(environment) for environment in _environments(measured)]
    if any(row.measurement and row.measurement.flops_source == "closed form" for row in rows):
        notes.append(f"FLOP: {cost.FLOP_CONVENTION}")
    if any(row.measurement and row.measurement.flops_source == "counted" for row in rows):
        notes.append(f"FLOP: {cost.COUNTED_CONVENTION}")
    if any(row.measurement and row.measurement.peak_kind == "rss above start" for row in rows):
        notes.append("peak memory: growth of the process's resident memory since it started, excluding code")
    if any(row.measurement and row.measurement.peak_kind == "cuda allocator" for row in rows):
        notes.append("peak memory: allocated by the CUDA caching allocator; times: CUDA events")
    notes += limit_notes(row.environment for row in rows) + doubt_notes(rows, _advise_host_bound(rows))
    reasons = {row.status: row.reason for row in reversed(rows) if row.status != "ok"}
    notes += [f"{status}: {brief(reason)}" for status, reason in reasons.items()]
    return notes


def _advise_host_bound(rows: Sequence[BenchRow]) -> dict[str, str]:
    """The meanings of the doubts, with what helps the host-bound rows."""
    bound = [row for row in rows if any(doubt.code == "host-bound" for doubt in row.doubts)]
    kinds = {_way_to_launch(row.case.workload) for row in bound}
    helps = [f"for {kind} steps {advice}" for kind, advice in _FEWER_LAUNCHES.items() if kind in kinds]
    if len(kinds) == 1:
        helps = [_FEWER_LAUNCHES[kind] for kind in kinds]
    return DOUBTS | {"host-bound": ", ".join([DOUBTS["host-bound"], *helps])}


def _way_to_launch(workload: Workload) -> str:
    return "captured" if workload.graph else "compiled" if workload.compile else "eager"


def _environments(rows: Sequence[BenchRow]) -> list[Environment]:
    """One environment per set of hardware peaks, since each sweep measures the peaks of a CPU again."""
    return list({msgspec.json.encode(row.environment.hardware): row.environment for row in rows}.values())


def _peak_note(environment: Environment) -> str:
    hardware = environment.hardware
    peaks = ", ".join(f"{name} {peak / 1e12:.4g}" for name, peak in hardware.peak_flops.items())
    source = "measured with a large GEMM" if hardware.source == "measured" else "dense, from the data sheet"
    return f"MFU: relative to the peak of {hardware.name} in TFLOP/s ({source}): {peaks}"


def _point(row: BenchRow, series: Sequence[CaseSetting], *, by_context: bool) -> Point:
    step = step_ms(row)
    assert step is not None
    assert row.measurement is not None
    return Point(
        panel=row.case.workload.precision,
        series=" · ".join(say_setting(setting, row) for setting in series) or "step",
        x=row.case.workload.context if by_context else row.measurement.parameters,
        y=step.median,
        low=step.p20,
        high=step.p80,
    )

"""From the rows of a sweep to its table and chart.

A column stands for what differs between the rows; what they share is said once, in the title. Medians are compared,
since one interrupted step should not decide a comparison; means and deviations stand beside them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

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
from stepscope.explain.statistics import Summary, summarise
from stepscope.findings import Axis, Cell, Column, Figure, Point, Table
from stepscope.recording.rows.bench import BenchRow, CaseRow, Environment
from stepscope.spec import SIZES

# A column of ratios, and a column of what makes each of them doubtful.
_Filled = tuple[Column, list[Cell]]
_Ratio = tuple[_Filled, _Filled]

PHASES = ("forward", "backward", "optimizer")
_STATISTICS = ("mean", "sd", "median", "p20", "p80", "min", "max")

# Doubts that leave the times as they are; all others make them uncertain.
_NOT_OF_TIMES = ("host-bound", "uncounted")

DOUBTS = {
    "throttled": "the GPU held its clocks back",
    "shared": "other processes were using the device",
    "few": "too few steps for a spread",
    "spread": "steps differ by more than 10 % from one another",
    "cold": "the first timed step was much slower than the others: more warm-up",
    "clocks": "the host's clock and CUDA events disagree",
    "host-bound": "the GPU waited for the host to issue work: fewer kernels (--compile) help, a faster GPU does not",
    "uncounted": "the operations could not be counted",
    "not-finite": "the loss is not a number, or infinite: what is timed may not be what training does",
    "skipped": "infinite gradients: some steps made no update",
}


def bench_table(rows: Sequence[BenchRow]) -> Table:
    shown = [setting for setting in CASE_SETTINGS if setting.key in ALWAYS_SHOWN or varies(setting, rows)]
    columns: list[tuple[Column, list[Cell]]] = [
        (
            Column(key=setting.key, label=setting.label, kind=setting.kind, detail=setting not in shown),
            [setting.read(row) for row in rows],
        )
        for setting in CASE_SETTINGS
    ]
    columns += _phase_columns(rows) + _step_columns(rows) + _rate_columns(rows)
    ratios = [_speedup_columns(s, rows) for s in shown if s.baseline is not None and varies(s, rows)]
    if varies(find_setting("warmup"), rows):
        ratios.append(_warmup_columns(rows))
    columns += [one for pair in ratios for one in pair]
    columns += _remark_columns(rows)
    return Table(
        title=_title(rows),
        columns=tuple(column for column, _ in columns),
        rows=tuple(zip(*(values for _, values in columns), strict=True)),
        notes=(*_notes(rows), *_doubt_note(doubts for _, (_, doubts) in ratios)),
        doubted_by={ratio.key: doubts.key for (ratio, _), (doubts, _) in ratios},
    )


def bench_figure(rows: Sequence[BenchRow]) -> Figure:
    """Step time against context where contexts differ, and against the number of parameters where they do not."""
    by_context = varies(find_setting("context"), rows)
    # A model without tokens has no place on an axis of contexts.
    measured = [row for row in rows if row.measurement and (row.case.workload.context or not by_context)]
    inside = ("context", "precision") if by_context else ("model", "precision", "vocab")
    told_apart = [s for s in CASE_SETTINGS if varies(s, rows) or (by_context and s.key == "model")]
    series = [setting for setting in told_apart if setting.key not in inside]
    missing = Counter(row.status for row in rows if row.measurement is None)
    subtitle = say_shared(rows) + "".join(f"; {count} {status}" for status, count in missing.items())
    return Figure(
        title="Step time, median with the middle 60 % of steps",
        subtitle=subtitle,
        x=Axis(label="context", unit="tokens", log=True) if by_context else Axis(label="parameters", log=True),
        y=Axis(label="step", unit="ms", log=True),
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
    """A timed case in a few words."""
    step = step_ms(row) if isinstance(row, BenchRow) else None
    return f"{step.median:.4g} ms" if step else row.status


def step_ms(row: BenchRow) -> Summary | None:
    return _summary_ms(row.measurement.step_ns) if row.measurement else None


def _summary_ms(samples_ns: Sequence[int]) -> Summary:
    return summarise([sample / 1e6 for sample in samples_ns])


def _phase_columns(rows: Sequence[BenchRow]) -> list[tuple[Column, list[Cell]]]:
    """A phase's median; the rest of its statistics as detail. Of a step with one phase, the step says it all."""
    columns = []
    present = [p for p in PHASES if any(row.measurement and p in row.measurement.phases_ns for row in rows)]
    for phase in present if len(present) > 1 else ():
        samples = [row.measurement.phases_ns.get(phase, ()) if row.measurement else () for row in rows]
        summaries = [_summary_ms(values) if values else None for values in samples]
        columns += _statistic_columns(phase, summaries, shown={"median": phase})
    return columns


def _step_columns(rows: Sequence[BenchRow]) -> list[tuple[Column, list[Cell]]]:
    return _statistic_columns(
        "step", [step_ms(row) for row in rows], shown={"median": "step", "mean": "mean", "sd": "sd"}
    )


def _statistic_columns(
    name: str, summaries: Sequence[Summary | None], *, shown: dict[str, str]
) -> list[tuple[Column, list[Cell]]]:
    order = [*shown, *(statistic for statistic in _STATISTICS if statistic not in shown)]
    return [
        (
            Column(
                key=f"{name}_{statistic}_ms",
                label=shown.get(statistic, f"{name} {statistic}"),
                kind="ms",
                detail=statistic not in shown,
            ),
            [getattr(summary, statistic) if summary else None for summary in summaries],
        )
        for statistic in order
    ]


def _rate_columns(rows: Sequence[BenchRow]) -> list[tuple[Column, list[Cell]]]:
    """Tokens a second; samples a second where a case has no tokens and all have samples."""
    measured = [row.measurement for row in rows if row.measurement]
    has_tokens = all(one.has_tokens or not one.has_samples for one in measured)
    kinds: tuple[tuple[Column, Callable[[BenchRow], Cell]], ...] = (
        (Column(key="tokens_per_s", label="tokens/s", kind="count", detail=not has_tokens), tokens_per_s),
        (Column(key="samples_per_s", label="samples/s", kind="number", detail=has_tokens), samples_per_s),
        (Column(key="tflops", label="TFLOP/s", kind="number"), _tflops),
        (Column(key="mfu", label="MFU", kind="share"), mfu_of),
        (Column(key="peak_bytes", label="peak", kind="bytes"), lambda row: _of(row, "peak_bytes")),
        (
            Column(key="reserved_bytes", label="reserved", kind="bytes", detail=True),
            lambda row: _of(row, "reserved_bytes"),
        ),
        (
            Column(key="parameters", label="parameters", kind="count", detail=True),
            lambda row: _of(row, "parameters"),
        ),
        (Column(key="attention_kernels", label="attention kernels", detail=True), _attention_kernels),
    )
    return [(column, [read(row) for row in rows]) for column, read in kinds]


def _attention_kernels(row: BenchRow) -> Cell:
    """Which kernels `flash` took: it chooses by the GPU, the dtype and the head size."""
    return ", ".join(row.measurement.attention_kernels) or None if row.measurement else None


def tokens_per_s(row: BenchRow) -> int | None:
    step = step_ms(row)
    if step is None or row.measurement is None or not row.measurement.has_tokens:
        return None
    return round(row.case.workload.tokens / step.median * 1e3)


def samples_per_s(row: BenchRow) -> float | None:
    """Sequences, images or recordings: whatever the batch counts."""
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
    """Arithmetic as a share of the peak of the case's precision; None where either is not known."""
    peak = row.environment.hardware.peak_flops.get(row.case.workload.precision)
    tflops = _tflops(row)
    return tflops * 1e12 / peak if tflops is not None and peak else None


def _of(row: BenchRow, name: str) -> Cell:
    value: Cell = getattr(row.measurement, name) if row.measurement else None
    return value


def _speedup_columns(setting: CaseSetting, rows: Sequence[BenchRow]) -> _Ratio:
    """Step time of the baseline over this row's, all else equal. Without the usual baseline the first value is it."""
    values = [setting.read(row) for row in rows]
    baseline = setting.baseline if setting.baseline in values else values[0]
    named = f"{setting.label} {baseline}" if setting.needs_label else baseline
    column = Column(key=f"speedup_{setting.key}", label=f"vs {named}", kind="ratio")
    return _ratio_columns(column, setting, rows, baseline, lambda base, step: base.median / step.median)


def _warmup_columns(rows: Sequence[BenchRow]) -> _Ratio:
    """The mean against that of the longest warm-up: what skipping it does to the figure people quote."""
    longest = max(row.case.timing.warmup for row in rows)
    column = Column(key="mean_vs_warm", label=f"mean vs {longest} warm-ups", kind="ratio")
    return _ratio_columns(column, find_setting("warmup"), rows, longest, lambda base, step: step.mean / base.mean)


def _ratio_columns(
    column: Column,
    setting: CaseSetting,
    rows: Sequence[BenchRow],
    baseline: Cell,
    divide: Callable[[Summary, Summary], float],
) -> _Ratio:
    """Each row against the one with the baseline's value and all else equal, and what makes the times of either
    uncertain."""
    others = {all_else(row, setting): row for row in rows if setting.read(row) == baseline}
    ratios: list[Cell] = []
    doubts: list[Cell] = []
    for row in rows:
        base = others.get(all_else(row, setting))
        steps = (step_ms(base), step_ms(row)) if base else (None, None)
        ratios.append(divide(steps[0], steps[1]) if steps[0] and steps[1] else None)
        both = (base, row) if base and base is not row and ratios[-1] is not None else ()
        codes = dict.fromkeys(doubt.code for one in both for doubt in one.doubts if doubt.code not in _NOT_OF_TIMES)
        doubts.append(", ".join(codes) or None)
    said = Column(key=f"{column.key}_doubts", label=f"{column.label}: doubts", detail=True)
    return (column, ratios), (said, doubts)


def _doubt_note(doubts: Iterable[Sequence[Cell]]) -> list[str]:
    codes = dict.fromkeys(code for cells in doubts for cell in cells if cell for code in str(cell).split(", "))
    return [f"?: the times behind this ratio are doubtful: {', '.join(codes)}"] if codes else []


def _remark_columns(rows: Sequence[BenchRow]) -> list[tuple[Column, list[Cell]]]:
    columns: list[tuple[Column, list[Cell]]] = [
        (Column(key="status", label="status", detail=True), [row.status for row in rows]),
        (
            Column(key="reason", label="reason", detail=True),
            [row.reason or "; ".join(doubt.text for doubt in row.doubts) for row in rows],
        ),
    ]
    remarks: list[Cell] = [
        row.status if row.status != "ok" else ", ".join(doubt.code for doubt in row.doubts) for row in rows
    ]
    if any(remarks):
        columns.append((Column(key="remarks", label="remarks"), remarks))
    return columns


def _title(rows: Sequence[BenchRow]) -> str:
    return f"{say_shared(rows)}; medians in ms" if rows else "no cases"


def _notes(rows: Sequence[BenchRow]) -> list[str]:
    measured = [row for row in rows if row.measurement is not None]
    notes = [_peak_note(environment) for environment in _environments(measured)]
    if any(row.measurement and row.measurement.flops_source == "closed form" for row in rows):
        notes.append(f"FLOP: {cost.FLOP_CONVENTION}")
    if any(row.measurement and row.measurement.flops_source == "counted" for row in rows):
        notes.append(f"FLOP: {cost.COUNTED_CONVENTION}")
    if any(row.measurement and row.measurement.peak_kind == "rss above start" for row in rows):
        notes.append("peak: the process's resident high-water mark above its start, code apart")
    if any(row.measurement and row.measurement.peak_kind == "cuda allocator" for row in rows):
        notes.append("peak: allocated bytes of CUDA's caching allocator; times from CUDA events")
    notes += limit_notes(row.environment for row in rows) + doubt_notes(rows, DOUBTS)
    reasons = {row.status: row.reason for row in reversed(rows) if row.status != "ok"}
    notes += [f"{status}: {brief(reason)}" for status, reason in reasons.items()]
    return notes


def _environments(rows: Sequence[BenchRow]) -> list[Environment]:
    """One for each set of peaks: those of a CPU are measured anew by each sweep."""
    return list({msgspec.json.encode(row.environment.hardware): row.environment for row in rows}.values())


def _peak_note(environment: Environment) -> str:
    hardware = environment.hardware
    peaks = ", ".join(f"{name} {peak / 1e12:.4g}" for name, peak in hardware.peak_flops.items())
    source = (
        "measured here on a large matrix product" if hardware.source == "measured" else "dense, from its data sheet"
    )
    return f"MFU: against {hardware.name}'s peak in TFLOP/s ({source}): {peaks}"


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

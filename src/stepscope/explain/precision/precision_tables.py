"""The effect of low precision on a workload: dtypes with reasons, errors relative to float64, underflow, small examples
of a sum and a norm, and the speedup.

Models have many similar layers, so modules are grouped by role: `blocks.*.ffn.up` is that module in all layers, with
the median and the maximum of their errors. Grouping by class would be shorter, but in most models all matrices have the
same class, and errors differ among them.
"""

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

from stepscope.errors import StepscopeError
from stepscope.explain.experiments.cases import limit_notes, say_sizes
from stepscope.explain.module_roles import find_roles
from stepscope.explain.precision.autocast import explain_dtype
from stepscope.explain.statistics import summarise
from stepscope.findings import Cell, Column, Page, Table
from stepscope.recording.rows.bench import BenchRow
from stepscope.recording.rows.precision_report import (
    LowDtype,
    Output,
    PrecisionReport,
    PrecisionRun,
    ScaledBackward,
    Speed,
    Sum,
    Underflow,
)
from stepscope.spec import RUN_SETTINGS, Case, ModelShape, Setting, Workload, with_precision
from stepscope.units import count_noun

_AUTOCAST = ("bf16", "fp16")
_MANTISSA_BITS = {"fp32": 23, "fp16": 10, "bf16": 7}
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_GRADIENT = "a gradient has the dtype of its tensor"
_PARAMETERS = "autocast casts copies of the inputs of an operation; parameters keep their dtype"


def make_page(report: PrecisionReport, *, detail: bool = False) -> Page:
    tables = [make(report, detail) for name, make in TABLES.items() if name != "speed" or report.speeds]
    return Page(headline="\n".join((_title(report), *answer(report))), tables=tuple(tables), findings=None)


def make_table(report: PrecisionReport, name: str, *, detail: bool = False) -> Table:
    return TABLES[name](report, detail)


# --- Headline -------------------------------------------------------------------------------------------------------


def answer(report: PrecisionReport) -> tuple[str, ...]:
    """Answer the common questions: how large are the errors, does fp16 need loss scaling, are norms special?"""
    runs = {run.precision: run for run in report.comparison.runs}
    said = [_say_cost(run) for run in runs.values()]
    if "fp16" in runs and (underflow := _say_underflow(runs["fp16"])):
        said.append(underflow)
    return (*said, _say_norm(report))


def _say_cost(run: PrecisionRun) -> str:
    worst = max(run.gradients, key=lambda one: _or_infinite(one.relative), default=None)
    scaled = f" (loss scale {run.loss_scale:g})" if run.precision == "fp16" else ""
    module = f"; largest in {worst.module}: {_or_infinite(worst.relative):.1e}" if worst else ""
    return (
        f"{run.precision}: relative error {_or_infinite(run.loss_error):.1e} in the loss, "
        f"{_or_infinite(run.gradient_error):.1e} in the gradients{scaled}{module}"
    )


def _say_underflow(run: PrecisionRun) -> str:
    """Empty unless the run includes loss scales 1 and 2¹⁶, where PyTorch's scaler starts."""
    by_scale = {one.scale: one for one in run.backwards}
    plain, scaled = by_scale.get(1.0), by_scale.get(2.0**16)
    if plain is None or scaled is None:
        return ""
    overflowing = [one.scale for one in run.backwards if one.total.parameters_not_finite]
    over = (
        f"gradients overflow at {_power(min(overflowing))} and above"
        if overflowing
        else "no gradient overflows at any tested scale"
    )
    return (
        f"fp16 without loss scaling: {_lost(plain.total, 'parameters'):.2%} of parameter gradients and "
        f"{_lost(plain.total, 'outputs'):.2%} of output gradients underflow; at loss scale 2¹⁶, "
        f"{_lost(scaled.total, 'parameters'):.2%} and {_lost(scaled.total, 'outputs'):.2%}; {over}"
    )


def _say_norm(report: PrecisionReport) -> str:
    """The norms that the model has; all that were studied if it has none of them."""
    kinds = [_short_kind(one.kind) for run in report.comparison.runs for one in run.outputs]
    studied = dict.fromkeys(one.norm for one in report.comparison.norm_parts)
    own = [norm for norm in studied if any(kind.endswith(norm) for kind in kinds)]
    parts = [one for one in report.comparison.norm_parts if one.norm in (own or studied)]
    words = []
    for dtype in ("fp16", "bf16"):
        worst = max((one for one in parts if one.dtype == dtype), key=lambda one: _or_infinite(one.error))
        size = f"{_or_infinite(worst.error):.2g}"
        words.append(f"{dtype} {size} ({worst.norm}, {worst.part}, inputs of size {worst.input_scale:g})")
    return f"most sensitive part of a norm (relative error): {'; '.join(words)}"


# --- Dtypes ---------------------------------------------------------------------------------------------------------


def _dtypes_table(report: PrecisionReport, detail: bool) -> Table:
    runs = report.comparison.runs
    rows = [
        _row("parameters", [", ".join(run.parameter_dtypes) for run in runs], _PARAMETERS),
        *_module_rows(report, detail=detail),
        *_end_rows(report),
        _row("gradients of outputs", [_output_gradients(run) for run in runs], _GRADIENT),
        _row("gradients of parameters", [", ".join(run.gradient_dtypes) for run in runs], _GRADIENT),
    ]
    return Table(
        title=f"Dtypes under autocast: {_where(report)}",
        columns=(
            Column(key="tensor", label="tensor"),
            *(Column(key=run.precision, label=run.precision) for run in runs),
            Column(key="operation", label="operation", detail=True),
            Column(key="class", label="class", detail=True),
            Column(key="why", label="why"),
        ),
        rows=tuple(rows),
        notes=("Autocast's lists differ between CPU and CUDA; this table is for the device in its title.",),
    )


def _row(
    name: str, dtypes: Sequence[str], why: str, operation: str | None = None, kind: str | None = None
) -> tuple[Cell, ...]:
    return (name, *dtypes, operation, kind, why)


def _module_rows(report: PrecisionReport, *, detail: bool) -> list[tuple[Cell, ...]]:
    """One row per group of identical modules, in the order in which the first of each group ran."""
    by_run = [{output.name: output for output in run.outputs} for run in report.comparison.runs]
    names = _name_rows(report, detail=detail)
    rows: dict[tuple[Cell, ...], None] = {}
    for name in by_run[0]:
        outputs = [outputs.get(name) for outputs in by_run]
        rows[_output_row(report, names[name], outputs)] = None
    return list(rows)


def _end_rows(report: PrecisionReport) -> list[tuple[Cell, ...]]:
    runs = report.comparison.runs
    logits = [_output_row(report, "logits", [run.logits for run in runs])] if any(run.logits for run in runs) else []
    return [*logits, _output_row(report, "loss", [run.loss for run in runs])]


def _output_row(report: PrecisionReport, name: str, outputs: Sequence[Output | None]) -> tuple[Cell, ...]:
    device = report.environment.device.partition(":")[0]
    precisions = [run.precision for run in report.comparison.runs]
    seen = [(precision, one) for precision, one in zip(precisions, outputs, strict=True) if one is not None]
    precision, telling = next((pair for pair in seen if pair[0] in _AUTOCAST), seen[0])
    dtypes = [one.dtype if one else "–" for one in outputs]
    why = explain_dtype(telling, device=device, precision=precision)
    return _row(name, dtypes, why, telling.operation, telling.kind)


def _output_gradients(run: PrecisionRun) -> str:
    same = all(output.gradient_dtype in (None, output.dtype) for output in run.outputs)
    return "as output" if same else "mixed"


def _name_rows(report: PrecisionReport, *, detail: bool) -> dict[str, str]:
    """The name of each module's row. A number that is not that of a layer says little: its class follows."""
    kinds = {one.name: one.kind for run in report.comparison.runs for one in run.outputs}
    kinds |= {one.module: kinds.get(one.module, "") for run in report.comparison.runs for one in run.gradients}
    if detail:
        return {name: name for name in kinds}
    roles = find_roles(kinds)
    return {
        name: f"{role} ({_short_kind(kinds[name])})" if role.rpartition(".")[2].isdecimal() and kinds[name] else role
        for name, role in roles.items()
    }


def _short_kind(kind: str) -> str:
    return kind.rpartition(".")[2]


# --- Errors ---------------------------------------------------------------------------------------------------------


def _errors_table(report: PrecisionReport, detail: bool) -> Table:
    runs = report.comparison.runs
    groups = _group_errors(runs, _name_rows(report, detail=detail))
    rows: list[tuple[Cell, ...]] = [
        _error_row("loss", [[run.loss_error] for run in runs]),
        _error_row("all gradients", [[run.gradient_error] for run in runs]),
        _error_row("all gradients, 1 − cosine", [[run.gradient_one_minus_cosine] for run in runs]),
        *(_error_row(role, values) for role, values in groups.items()),
    ]
    columns = [Column(key="module", label="error of"), Column(key="modules", label="modules", kind="count")]
    for run in runs:
        columns.append(Column(key=f"{run.precision}_median", label=f"{run.precision} median", kind="number"))
        columns.append(Column(key=f"{run.precision}_max", label=f"{run.precision} max", kind="number"))
    return Table(
        title=f"Relative error compared with float64: {_where(report)}",
        columns=tuple(columns),
        rows=tuple(rows),
        notes=tuple(_error_notes(report)),
    )


def _group_errors(runs: Sequence[PrecisionRun], names: Mapping[str, str]) -> dict[str, list[list[float | None]]]:
    groups: dict[str, list[list[float | None]]] = {}
    for index, run in enumerate(runs):
        for one in run.gradients:
            groups.setdefault(names[one.module], [[] for _ in runs])[index].append(one.relative)
    return groups


def _error_row(name: str, values: Sequence[Sequence[float | None]]) -> tuple[Cell, ...]:
    cells: list[Cell] = [name, max(len(found) for found in values)]
    for found in values:
        numbers = [_or_infinite(value) for value in found]
        cells += [statistics.median(numbers), max(numbers)] if numbers else [None, None]
    return tuple(cells)


def _error_notes(report: PrecisionReport) -> list[str]:
    notes = ["‖g − g₆₄‖ / ‖g₆₄‖ over the parameters of the module itself; g₆₄: the same weights and inputs in float64."]
    notes += [
        f"fp16: at loss scale {run.loss_scale:g}, the largest scale up to 65536 without an infinite gradient."
        for run in report.comparison.runs
        if run.precision == "fp16"
    ]
    narrowed = report.comparison.truth.narrowed
    if narrowed:
        notes.append(f"The reference is not float64 in {count_noun(len(narrowed), 'place')}, such as {narrowed[0]}.")
    return notes + limit_notes([report.environment])


# --- Underflow ------------------------------------------------------------------------------------------------------


def _underflow_table(report: PrecisionReport, detail: bool) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for run in report.comparison.runs:
        if run.precision in _AUTOCAST:
            rows += [_underflow_row(run, one, one.total, "all") for one in run.backwards]
            if detail:
                rows += [
                    _underflow_row(run, one, module, module.module) for one in run.backwards for module in one.modules
                ]
    return Table(
        title=f"Gradient underflow and overflow: {_where(report)}",
        columns=(
            Column(key="precision", label="precision"),
            Column(key="module", label="module", detail=not detail),
            Column(key="scale", label="loss scale", kind="count"),
            # Not a percentage: those have one decimal, and most of these shares are smaller.
            Column(key="parameters_lost", label="parameter underflow (share)", kind="number"),
            Column(key="outputs_lost", label="output underflow (share)", kind="number"),
            Column(key="parameters_zero", label="parameter underflow (count)", kind="count", detail=True),
            Column(key="outputs_zero", label="output underflow (count)", kind="count", detail=True),
            Column(key="parameters_not_finite", label="parameter not finite", kind="count"),
            Column(key="outputs_not_finite", label="output not finite", kind="count"),
            Column(key="gradient_error", label="gradient error", kind="number"),
        ),
        rows=tuple(rows),
        notes=(
            "Underflow: zero here but not in float64. Parameter gradients are fp32, computed from output gradients.",
            "Zeros that remain at every loss scale, and in bf16, come from cancellation, not underflow.",
        ),
    )


def _underflow_row(run: PrecisionRun, backward: ScaledBackward, found: Underflow, name: str) -> tuple[Cell, ...]:
    whole = name == "all"
    return (
        run.precision,
        name,
        int(backward.scale),
        _lost(found, "parameters") if found.parameters else None,
        _lost(found, "outputs") if found.outputs else None,
        found.parameters_zero,
        found.outputs_zero,
        found.parameters_not_finite,
        found.outputs_not_finite,
        _or_infinite(backward.gradient_error) if whole else None,
    )


def _lost(found: Underflow, what: str) -> float:
    total: int = getattr(found, what)
    return getattr(found, f"{what}_zero") / total if total else 0.0


# --- Examples: a sum and a norm -------------------------------------------------------------------------------------


def _accumulation_table(report: PrecisionReport, _detail: bool) -> Table:
    sums = report.comparison.sums
    one = sums[0]
    return Table(
        title=f"{one.count} × {one.term:g}, added one by one",
        columns=(
            Column(key="sum", label="sum"),
            Column(key="stored_term", label="stored term"),
            Column(key="result", label="result"),
            Column(key="error", label="error", kind="number"),
            Column(key="why", label="why"),
        ),
        rows=tuple(
            (
                _name_sum(one),
                f"{one.stored_term:.9f}",
                f"{one.result:.4f}",
                one.result - one.count * one.term,
                explain_sum(one),
            )
            for one in sums
        ),
    )


def _name_sum(one: Sum) -> str:
    return f"{one.accumulator} += {one.term_dtype}" + (" upcast" if one.upcast else "")


def explain_sum(one: Sum) -> str:
    """Say which rounding caused the error: that of the term, once, or that of the sum, at every addition. Empty for an
    unknown dtype and for a subnormal or infinite sum."""
    if one.accumulator not in _MANTISSA_BITS or not sys.float_info.min < abs(one.result) < math.inf:
        return ""
    exact, spacing = one.count * one.stored_term, find_spacing(one.accumulator, one.result)
    step = f"{_power(spacing)} = {spacing:.3g}"
    if one.stopped_at is not None:
        return (
            f"stops at {one.result:g} after {one.stopped_at} additions: above it, sums are multiples of {step}, "
            f"and {one.term:g} is less than half of that"
        )
    if abs(one.result - exact) > abs(exact - one.count * one.term):
        counted = round(one.stored_term / spacing) * spacing
        lean = f", so {one.term:g} counts as {counted:.3g}" if spacing > one.term / 10 else ""
        return f"near {one.result:.0f}, every addition rounds to a multiple of {step}{lean}"
    upcast = "; upcasting does not restore digits" if one.upcast else "; promotion adds it in " + one.accumulator
    return f"the error is in the stored term: {one.count} × {one.stored_term:.9f} = {exact:.4f}{upcast}"


def find_spacing(dtype: str, value: float) -> float:
    """The spacing of the numbers of a dtype just above `value`."""
    return 2.0 ** (math.floor(math.log2(abs(value))) - _MANTISSA_BITS[dtype])


def _norm_table(report: PrecisionReport, _detail: bool) -> Table:
    parts = report.comparison.norm_parts
    found = {(one.norm, one.part, one.dtype, one.input_scale): _or_infinite(one.error) for one in parts}
    scales = list({f"{one.input_scale:g}": one.input_scale for one in parts}.values())
    dtypes: tuple[LowDtype, ...] = ("fp16", "bf16")
    heads = [(dtype, scale) for dtype in dtypes for scale in scales]
    return Table(
        title=f"Norm of width {parts[0].width} with one part in low precision: relative error of the output",
        columns=(
            Column(key="norm", label="norm"),
            Column(key="part", label="part in low precision"),
            *(
                Column(key=f"{dtype}_{scale:g}", label=f"{dtype}, inputs {scale:g}", kind="number")
                for dtype, scale in heads
            ),
        ),
        rows=tuple(
            (norm, part, *(found.get((norm, part, dtype, scale)) for dtype, scale in heads))
            for norm, part in dict.fromkeys((one.norm, one.part) for one in parts)
        ),
        notes=(
            "An error of 1 means that the squares overflowed and the output is all zeros. bf16 has the range of fp32 "
            "and does not overflow; its other errors are larger because it has fewer digits.",
        ),
    )


# --- Speed ----------------------------------------------------------------------------------------------------------


def find_speeds(rows: Sequence[BenchRow], case: Case) -> tuple[Speed, ...]:
    """Like `pair_speeds`, but raise an error if there are none."""
    speeds = pair_speeds(rows, case)
    if not speeds:
        size = f"--size {case.workload.model.name} " if isinstance(case.workload.model, ModelShape) else ""
        raise StepscopeError(
            f"no case of `{case.workload.model.name}` was timed both in fp32 and in another precision",
            detail=f"the file contains {', '.join(dict.fromkeys(row.case.workload.model.name for row in rows))}",
            hint=f"stepscope bench {size}--precision fp32,bf16",
        )
    return speeds


def pair_speeds(rows: Sequence[BenchRow], case: Case) -> tuple[Speed, ...]:
    """The speedups over fp32 that `bench` measured for the model of the case, on the same device."""
    timed = [row for row in rows if row.measurement is not None and row.case.workload.model == case.workload.model]
    in_fp32 = {_in_fp32(row): row for row in timed if row.case.workload.precision == "fp32"}
    others = {(row.case.workload, *_in_fp32(row)[1:]): row for row in timed if row.case.workload.precision != "fp32"}
    return tuple(
        Speed(
            workload=row.case.workload,
            device=row.environment.driver_name,
            step_ns=_median_ns(row),
            fp32_step_ns=_median_ns(in_fp32[_in_fp32(row)]),
        )
        for row in others.values()
        if _in_fp32(row) in in_fp32
    )


def _in_fp32(row: BenchRow) -> tuple[Workload, str, str]:
    return with_precision(row.case.workload, "fp32"), row.environment.driver_name, row.environment.torch


def _median_ns(row: BenchRow) -> int:
    assert row.measurement is not None, "a row without a measurement has no speed"
    return round(summarise(row.measurement.step_ns).median)


_SPEED_SETTINGS = ("batch", "context", "mode", "attention", "compile")  # in every table; the others where they differ


def _speed_table(report: PrecisionReport, _detail: bool) -> Table:
    if not report.speeds:
        raise StepscopeError(
            "this result has no speeds",
            detail="speeds come from a `stepscope bench` results file",
            hint="--bench FILE",
        )
    settings = [
        one
        for name, one in RUN_SETTINGS.items()
        if name in _SPEED_SETTINGS
        or (name not in ("precision", "device") and len({one.read(speed.workload) for speed in report.speeds}) > 1)
    ]
    return Table(
        title=f"Speedup (from bench) and error: {_where(report)}",
        columns=(
            Column(key="model", label="size"),
            *(Column(key=one.name, label=one.label, kind=one.kind) for one in settings),
            Column(key="device", label="timed on"),
            Column(key="precision", label="precision"),
            Column(key="fp32_step_ms", label="fp32 step (ms)", kind="ms"),
            Column(key="step_ms", label="step (ms)", kind="ms"),
            Column(key="speedup", label="speedup", kind="ratio"),
            Column(key="loss_error", label="loss error", kind="number"),
            Column(key="gradient_error", label="gradient error", kind="number"),
        ),
        rows=tuple(_speed_row(report, speed, settings) for speed in report.speeds),
        notes=("Errors are shown for the batch, context and attention they were measured with.",),
    )


def _speed_row(report: PrecisionReport, speed: Speed, settings: Sequence[Setting]) -> tuple[Cell, ...]:
    timed, here = speed.workload, report.case.workload
    measured_here = (timed.batch, timed.context, timed.attention) == (here.batch, here.context, here.attention)
    run = next((run for run in report.comparison.runs if run.precision == timed.precision and measured_here), None)
    return (
        timed.model.name,
        *(one.read(timed) for one in settings),
        speed.device,
        timed.precision,
        speed.fp32_step_ns / 1e6,
        speed.step_ns / 1e6,
        speed.speedup,
        _or_infinite(run.loss_error) if run else None,
        _or_infinite(run.gradient_error) if run else None,
    )


TABLES: dict[str, Callable[[PrecisionReport, bool], Table]] = {
    "dtypes": _dtypes_table,
    "errors": _errors_table,
    "underflow": _underflow_table,
    "accumulation": _accumulation_table,
    "norm": _norm_table,
    "speed": _speed_table,
}


def _title(report: PrecisionReport) -> str:
    precisions = ", ".join(run.precision for run in report.comparison.runs)
    return f"{precisions} compared with float64: {_where(report)}, torch {report.environment.torch}"


def _where(report: PrecisionReport) -> str:
    workload, environment = report.case.workload, report.environment
    attention = f" {workload.attention}" if workload.attention else ""
    name = f"{workload.model.name} {' '.join(say_sizes(workload))}{attention}"
    return f"{name} on {environment.device} ({environment.driver_name})"


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None else value


def _power(value: float) -> str:
    return "2" + str(round(math.log2(value))).translate(_SUPERSCRIPTS)

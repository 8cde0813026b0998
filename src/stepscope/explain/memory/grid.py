"""Memory tables over many cases: peaks by size, context, mode and precision, what a change of precision does to each
category, and how much activation checkpointing saves."""

from collections.abc import Sequence

from stepscope import cost
from stepscope.explain.experiments.cases import (
    ALWAYS_SHOWN,
    CASE_SETTINGS,
    all_else,
    brief,
    describe_case,
    find_setting,
    limit_notes,
    say_shared,
    varies,
)
from stepscope.explain.memory.categories import CATEGORIES
from stepscope.explain.statistics import summarise
from stepscope.findings import Axis, Cell, Column, Figure, Point, Table
from stepscope.recording.rows.bench import CaseRow
from stepscope.recording.rows.memory_summary import MemoryRow, MemorySummary
from stepscope.spec import ModelShape, Workload
from stepscope.units import GIB, say_bytes

_ALWAYS = (*ALWAYS_SHOWN, "mode")
_NO_PART = ("warmup",)  # recording starts with the first step


def outcome_of(row: CaseRow) -> str:
    """Describe the outcome of a case in a few words."""
    summary = row.summary if isinstance(row, MemoryRow) else None
    return f"peak {say_bytes(summary.peak_bytes)}" if summary else row.status


def grid_table(rows: Sequence[MemoryRow]) -> Table:
    """One row per case, including the cases that ran out of memory."""
    shown = [setting for setting in CASE_SETTINGS if setting.key in _ALWAYS or varies(setting, rows)]
    columns: list[tuple[Column, list[Cell]]] = [
        (
            Column(key=setting.key, label=setting.label, kind=setting.kind, detail=setting not in shown),
            [setting.read(row) for row in rows],
        )
        for setting in CASE_SETTINGS
        if setting.key != "warmup"
    ]
    columns += [
        (Column(key="peak_bytes", label="peak memory", kind="bytes"), [_of(row, "peak_bytes") for row in rows]),
        (Column(key="peak_phase", label="peak phase"), [_of(row, "peak_phase") for row in rows]),
        (
            Column(key="reserved_bytes", label="reserved", kind="bytes"),
            [_of(row, "peak_reserved_bytes") for row in rows],
        ),
        (Column(key="first_peak_bytes", label="step 1 peak", kind="bytes"), [_first_peak(row) for row in rows]),
        (Column(key="after_bytes", label="after step", kind="bytes"), [_after(row) for row in rows]),
    ]
    columns += _category_columns(rows)
    columns.append((Column(key="step_ms", label="step (ms)", kind="ms", detail=True), [_step_ms(row) for row in rows]))
    remarks = [row.status if row.status != "ok" else None for row in rows]
    if any(remarks):
        columns.append((Column(key="remarks", label="remarks"), list(remarks)))
    columns = [(column, values) for column, values in columns if column.detail or any(v is not None for v in values)]
    reasons = {row.status: row.reason for row in reversed(rows) if row.status != "ok"}
    return Table(
        title=f"{say_shared(rows, without=_NO_PART)}; peak memory by category",
        columns=tuple(column for column, _ in columns),
        rows=tuple(zip(*(values for _, values in columns), strict=True)),
        notes=(
            *limit_notes(row.environment for row in rows),
            *(f"{status}: {brief(reason)}" for status, reason in reasons.items()),
        ),
    )


def _of(row: MemoryRow, field: str) -> Cell:
    value: Cell = getattr(row.summary, field) if row.summary else None
    return value


def _first_peak(row: MemoryRow) -> Cell:
    return row.summary.steps[0].peak_bytes if row.summary and row.summary.steps else None


def _after(row: MemoryRow) -> Cell:
    return row.summary.steps[-1].end_bytes if row.summary and row.summary.steps else None


def _step_ms(row: MemoryRow) -> Cell:
    return summarise(row.run.step_ns).median / 1e6 if row.run and row.run.step_ns else None


def _category_columns(rows: Sequence[MemoryRow]) -> list[tuple[Column, list[Cell]]]:
    """Bytes at the peak by category, without the categories that no case has."""
    columns = []
    for category in CATEGORIES:
        values: list[Cell] = [_category(row.summary, category) if row.summary else None for row in rows]
        if any(values):
            key = category.replace(" ", "_") + "_bytes"
            columns.append((Column(key=key, label=category, kind="bytes"), values))
    return columns


def _category(summary: MemorySummary, category: str) -> int:
    return next((one.bytes for one in summary.categories if one.category == category), 0)


def precision_table(rows: Sequence[MemoryRow]) -> Table | None:
    """How precision changes the peak, category by category; None if no two cases can be compared."""
    setting = find_setting("precision")
    bases = {all_else(row, setting): row for row in rows if row.case.workload.precision == "fp32"}
    pairs = [
        (bases[all_else(row, setting)], row)
        for row in rows
        if row.case.workload.precision != "fp32" and all_else(row, setting) in bases
    ]
    pairs = [(base, row) for base, row in pairs if base.summary and row.summary]
    if not pairs:
        return None
    names = [name for name in CATEGORIES if any(_change(base, row, name) for base, row in pairs)]
    shown = [s for s in CASE_SETTINGS if s.key in _ALWAYS or varies(s, [row for _, row in pairs])]
    cells = [
        (
            *(setting.read(row) for setting in shown),
            _of(base, "peak_bytes"),
            _of(row, "peak_bytes"),
            _ratio(row, base),
            *(_change(base, row, name) for name in names),
            _say_change(base, row, names),
        )
        for base, row in pairs
    ]
    return Table(
        title="Peak memory by precision, compared with fp32",
        columns=(
            *(Column(key=setting.key, label=setting.label, kind=setting.kind) for setting in shown),
            Column(key="fp32_peak_bytes", label="fp32 peak", kind="bytes"),
            Column(key="peak_bytes", label="peak", kind="bytes"),
            Column(key="ratio", label="vs fp32", kind="ratio"),
            *(Column(key=name.replace(" ", "_") + "_bytes", label=name, kind="bytes", detail=True) for name in names),
            Column(key="why", label="largest changes"),
        ),
        rows=tuple(cells),
    )


def _ratio(row: MemoryRow, base: MemoryRow) -> Cell:
    assert row.summary is not None
    assert base.summary is not None
    return row.summary.peak_bytes / base.summary.peak_bytes


def _change(base: MemoryRow, row: MemoryRow, category: str) -> int:
    assert base.summary is not None
    assert row.summary is not None
    return _category(row.summary, category) - _category(base.summary, category)


def _say_change(base: MemoryRow, row: MemoryRow, names: Sequence[str]) -> str:
    """The two categories that changed most."""
    changes = sorted(((_change(base, row, name), name) for name in names), key=lambda pair: -abs(pair[0]))
    said = [f"{name} {'+' if size > 0 else '−'}{say_bytes(abs(size))}" for size, name in changes[:2] if size]
    return ", ".join(said) or "none"


def grid_figure(rows: Sequence[MemoryRow]) -> Figure:
    """Peak memory against context, or against parameters if all contexts are the same."""
    by_context = varies(find_setting("context"), rows)
    # A model without tokens cannot be plotted against context.
    done = [row for row in rows if row.summary and row.run and (row.case.workload.context or not by_context)]
    inside = ("context", "mode") if by_context else ("model", "mode", "vocab")
    told_apart = [s for s in CASE_SETTINGS if varies(s, rows) or s.key == "model"]
    series = [setting for setting in told_apart if setting.key not in inside]
    points = []
    for row in done:
        assert row.summary is not None
        assert row.run is not None
        points.append(
            Point(
                panel=row.case.workload.mode,
                series=" · ".join(str(setting.read(row)) for setting in series),
                x=row.case.workload.context if by_context else row.run.parameters,
                y=row.summary.peak_bytes / GIB,
            )
        )
    return Figure(
        title="Peak memory",
        subtitle=say_shared(rows, without=_NO_PART),
        x=Axis(label="context", unit="tokens", log=True) if by_context else Axis(label="parameters", log=True),
        y=Axis(label="peak memory", unit="GiB", log=True),
        points=tuple(points),
        series_label=" · ".join(setting.label for setting in series),
        panel_label="mode",
    )


# --- Activation checkpointing -----------------------------------------------------------------------------------------


def study_table(rows: Sequence[MemoryRow]) -> Table:
    """Peak memory and step time for each checkpointing setting, with the predicted peak for the built-in model."""
    plain = next((row for row in rows if row.case.workload.checkpoint == "none"), rows[0])
    cells = [
        (
            row.case.workload.checkpoint,
            _of(row, "peak_bytes"),
            _predicted(row.case.workload),
            _ratio(row, plain) if row.summary and plain.summary else None,
            _of(row, "saved_bytes"),
            _step_ms(row),
            _slower(row, plain),
            row.status if row.status != "ok" else None,
        )
        for row in rows
    ]
    return Table(
        title=f"{describe_case(plain.case)} on {plain.environment.driver_name}; activation checkpointing",
        columns=(
            Column(key="checkpoint", label="checkpoint"),
            Column(key="peak_bytes", label="peak memory", kind="bytes"),
            Column(key="predicted_bytes", label="predicted peak", kind="bytes"),
            Column(key="ratio", label="peak vs none", kind="ratio"),
            Column(key="saved_bytes", label="saved for backward", kind="bytes"),
            Column(key="step_ms", label="step (ms)", kind="ms"),
            Column(key="slower", label="step vs none", kind="ratio"),
            Column(key="remarks", label="remarks"),
        ),
        rows=tuple(cells),
        notes=tuple(_study_notes(rows, plain)),
    )


def _predicted(workload: Workload) -> Cell:
    return cost.step_peak(workload).bytes if isinstance(workload.model, ModelShape) else None


def _slower(row: MemoryRow, plain: MemoryRow) -> Cell:
    mine, base = _step_ms(row), _step_ms(plain)
    return mine / base if isinstance(mine, float) and isinstance(base, float) else None


def _study_notes(rows: Sequence[MemoryRow], plain: MemoryRow) -> list[str]:
    done = [row for row in rows if row.summary]
    if not done:
        return []
    best = min(done, key=lambda row: (_size(row), _time(row)))
    notes = [f"lowest peak: checkpoint {best.case.workload.checkpoint}, {say_bytes(_size(best))}"]
    if isinstance(plain.case.workload.model, ModelShape):
        predicted = cost.best_checkpoint(plain.case.workload)
        notes.append(f"lowest predicted peak: checkpoint {predicted.checkpoint}, {say_bytes(predicted.bytes)}")
        notes.append(
            "predicted peak: parameters, optimizer state, gradients and activations, excluding workspaces and rounding"
        )
    return notes


def _size(row: MemoryRow) -> int:
    assert row.summary is not None
    return row.summary.peak_bytes


def _time(row: MemoryRow) -> float:
    value = _step_ms(row)
    return value if isinstance(value, float) else 0.0


def is_study(rows: Sequence[MemoryRow]) -> bool:
    """Whether the rows differ only in activation checkpointing."""
    changing = [setting.key for setting in CASE_SETTINGS if varies(setting, rows)]
    return len(rows) > 2 and changing == ["checkpoint"]


def study_values(workload: Workload) -> tuple[str, ...]:
    """The checkpointing settings to compare: every k that divides the number of blocks, and nested."""
    if not isinstance(workload.model, ModelShape):
        return ("none", "1", "2", "4", "nested:2", "nested:4")
    layers = workload.model.num_layers
    divisors = [k for k in range(1, layers + 1) if layers % k == 0]
    nested = [k for k in divisors if 1 < k < layers]
    return ("none", *(str(k) for k in divisors), *(f"nested:{k}" for k in nested))

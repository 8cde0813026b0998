"""What `stepscope optimise` found: every change with its gain, the check of its gradients, and how to use them."""

from collections.abc import Callable

from stepscope.errors import StepscopeError
from stepscope.explain.commands import write_command
from stepscope.explain.experiments.cases import describe_case, limit_notes
from stepscope.findings import Cell, Column, Page, Table
from stepscope.recording.rows.optimisation import MeasuredChange, OptimiseReport
from stepscope.spec import PRESETS, Workload
from stepscope.units import count_noun, say_factor, say_percent, say_time

PYTHON_LINE = "step = stepscope.optimise(model, optimizer, example=batch)"
_REASONS = ("not applied", "failed")  # statuses whose notes say why


def optimise_page(report: OptimiseReport) -> Page:
    tables = [changes_table(report)]
    if any(one.check for one in report.changes):
        tables.append(check_table(report))
    return Page(headline=f"{say_where(report)}\n{say_result(report)}", tables=tuple(tables), findings=None)


def make_table(report: OptimiseReport, name: str) -> Table:
    return TABLES[name](report)


# --- Sentences --------------------------------------------------------------------------------------------------------


def say_where(report: OptimiseReport) -> str:
    return f"{describe_case(report.case)} on {report.environment.driver_name}, torch {report.environment.torch}"


def say_result(report: OptimiseReport) -> str:
    """The step before and after, in a sentence."""
    start, final, speedup = report.start_ns, report.final_ns, report.speedup
    if start is None or final is None or speedup is None:
        return "The step itself could not be measured."
    tried = sum(one.status != "start" for one in report.changes)
    if not report.kept or final >= start:
        return f"No change made the step faster: {say_time(start)} per step, {count_noun(tried, 'change')} tried."
    kept = f"{len(report.kept)} of {count_noun(tried, 'change')} kept"
    return f"{say_time(start)} per step before, {say_time(final)} after: {say_factor(speedup)} faster, {kept}."


def say_change(report: OptimiseReport, change: MeasuredChange) -> str:
    """A change and its outcome in a line."""
    before, after = report.before_ns(change), change.step_ns
    if after is None:
        why = f": {change.notes[-1]}" if change.notes else ""
        return f"{change.name}: {change.status}{why}"
    if before is None:
        return f"{change.name}: {say_time(after)} per step"
    return f"{change.name}: {change.status}, {say_time(before)} → {say_time(after)} ({_say_gain(before, after)})"


def _say_gain(before_ns: int, after_ns: int) -> str:
    sign = "−" if after_ns <= before_ns else "+"
    return f"{sign}{say_percent(abs(before_ns - after_ns) / before_ns)}"


def write_fast_command(workload: Workload, verb: str = "bench") -> str:
    """The command that runs the same workload with all changes. The precision stays."""
    command = write_command(verb, workload, without=PRESETS["fast"])
    own = "" if workload.precision == PRESETS["fast"]["precision"] else f" --precision {workload.precision}"
    return f"{command} --preset fast{own}"


def list_notes(report: OptimiseReport) -> list[str]:
    """What each change replaced, or why it was not applied. A change lists what those before it did too; each sentence
    is said once."""
    kept = {note for change in report.kept for note in change.notes}
    said: dict[str, None] = {}
    for change in report.changes:
        for note in change.notes:
            if change.status in _REASONS and note == change.notes[-1]:
                said[f"{change.name}: {change.status}, {note}"] = None
            else:
                said[note if note in kept or change.status == "start" else f"{note} (not kept)"] = None
    return list(said)


# --- Tables -----------------------------------------------------------------------------------------------------------


def changes_table(report: OptimiseReport) -> Table:
    notes = list_notes(report)
    if report.stopped:
        notes.append(f"Not all changes were tried: {report.stopped}.")
    return Table(
        title="Changes, each measured on top of those kept before it",
        columns=(
            Column(key="change", label="change"),
            Column(key="title", label="what it is"),
            Column(key="status", label="status"),
            Column(key="before_ms", label="before (ms)", kind="ms"),
            Column(key="step_ms", label="step (ms)", kind="ms"),
            Column(key="gain_ms", label="gain (ms)", kind="ms"),
            Column(key="gain", label="gain", kind="share"),
            Column(key="peak_bytes", label="peak memory", kind="bytes"),
            Column(key="prepare_s", label="preparation (s)", kind="number"),
            Column(key="notes", label="notes", detail=True),
        ),
        rows=tuple(_change_row(report, one) for one in report.changes),
        notes=(*notes, *limit_notes([report.environment])),
        compared=("before_ms", "step_ms"),
    )


def _change_row(report: OptimiseReport, change: MeasuredChange) -> tuple[Cell, ...]:
    before, after = report.before_ns(change), change.step_ns
    gain = None if before is None or after is None else before - after
    return (
        change.name,
        change.title,
        change.status,
        None if before is None or after is None else before / 1e6,
        None if after is None else after / 1e6,
        None if gain is None else gain / 1e6,
        None if gain is None or not before else gain / before,
        change.peak_bytes,
        None if change.prepare_s is None else round(change.prepare_s, 1),
        "; ".join(change.notes) or None,
    )


def check_table(report: OptimiseReport) -> Table:
    checked = [one for one in report.changes if one.check is not None]
    if not checked:
        raise StepscopeError("this result has no checks", detail="no change was measured", hint="--table changes")
    truth = checked[0].check.truth if checked[0].check else ""
    return Table(
        title=f"Check: the gradient closest to its limit, compared with {truth}",
        columns=(
            Column(key="change", label="change"),
            Column(key="parameter", label="gradient of"),
            Column(key="error", label="error", kind="number"),
            Column(key="plain_error", label="error of the original", kind="number"),
            Column(key="share_of_limit", label="share of limit", kind="share"),
            Column(key="verdict", label="verdict"),
            Column(key="loss_error", label="loss error", kind="number"),
            Column(key="plain_loss_error", label="loss error of the original", kind="number"),
            Column(key="loss", label="loss", kind="number", detail=True),
            Column(key="plain_loss", label="loss of the original", kind="number", detail=True),
            Column(key="true_loss", label=f"loss in {truth}", kind="number", detail=True),
        ),
        rows=tuple(_check_row(one) for one in checked),
        notes=(
            f"Error: ‖g − g*‖ / ‖g*‖, where g* is the gradient in {truth}. Limit: twice the error of the original step "
            "in the same precision, plus half a unit in the last place.",
            *(["float64 did not fit into memory."] if truth == "fp32" else []),
        ),
    )


def _check_row(change: MeasuredChange) -> tuple[Cell, ...]:
    check = change.check
    assert check is not None, "only checked changes have a row"
    return (
        change.name,
        check.parameter,
        check.error,
        check.plain_error,
        check.share_of_limit,
        "passes" if check.passes else "fails",
        _relative(check.loss, check.true_loss),
        _relative(check.plain_loss, check.true_loss),
        check.loss,
        check.plain_loss,
        check.true_loss,
    )


def _relative(value: float | None, truth: float | None) -> float | None:
    return None if value is None or not truth else abs(value - truth) / abs(truth)


TABLES: dict[str, Callable[[OptimiseReport], Table]] = {"changes": changes_table, "check": check_table}

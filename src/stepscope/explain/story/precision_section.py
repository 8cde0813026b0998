"""What low precision does to the numbers, and what speed it buys."""

import msgspec

from stepscope.explain.precision.tables import answer, make_table, pair_speeds
from stepscope.explain.questions.answers import say_list
from stepscope.explain.story.missing import command_for, explain_absence
from stepscope.explain.story.phrases import shorten
from stepscope.explain.story.sources import Materials
from stepscope.findings import Exhibit, Section
from stepscope.recording.rows.precision_report import PrecisionReport, PrecisionRun

# The sum and the norm in small are the same for every model: `stepscope precision` has them.
_SHOWN = ("errors", "dtypes", "underflow")


def show_precision(materials: Materials) -> Section:
    key, title = "precision", "Precision"
    if materials.precision is None:
        return Section(key=key, title=title, missing=(explain_absence(materials, "precision"),))
    report = _add_speeds(materials.precision, materials)
    # The report may have been typed as another verb's command, and other files beside it may be of another case.
    command = f"{command_for(Materials(name='', precision=report), 'precision')} --detail"
    exhibits = [
        Exhibit(key=f"precision-{name}", part=shorten(make_table(report, name), f"{command} --table {name}"))
        for name in _SHOWN
    ]
    if report.speeds:  # which come from timed rows: no command makes them alone
        exhibits.append(Exhibit(key="precision-speed", part=shorten(make_table(report, "speed"), "")))
    return Section(key=key, title=title, lead=_say_errors(report), exhibits=tuple(exhibits))


def _add_speeds(report: PrecisionReport, materials: Materials) -> PrecisionReport:
    """From the timed rows, where they have the model in fp32 and in another precision."""
    if report.speeds:
        return report
    return msgspec.structs.replace(report, speeds=pair_speeds(materials.bench, report.case))


def _say_errors(report: PrecisionReport) -> str:
    """How far the gradients are off in each precision, and what fp16 loses without its loss scale."""
    runs = report.comparison.runs
    said = [f"{run.precision} by {_say_error(run)}" for run in runs]
    lead = f"Against float64 the gradients are off in {say_list(said)}."
    lost = [line for line in answer(report)[len(runs) :] if line.startswith("fp16")]
    return " ".join((lead, *(f"{line}." for line in lost)))


def _say_error(run: PrecisionRun) -> str:
    if run.gradient_error is None:
        return "more than can be said: they are not finite"
    scaled = f" (loss scale {run.loss_scale:g})" if run.loss_scale != 1 else ""
    return f"{run.gradient_error:.2g}{scaled}"

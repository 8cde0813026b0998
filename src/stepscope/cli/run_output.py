"""Printing a run, for the verbs that show one: `explain` and `memory`."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stepscope.cli.output import say, show, show_tables, terminal_width
from stepscope.errors import StepscopeError
from stepscope.render.formats import Format

if TYPE_CHECKING:
    from stepscope.api.display import RunPart
    from stepscope.api.run import Run

Stacked = Literal["category", "module"]  # what each area of a figure stands for
TopFlag = Annotated[int, typer.Option(metavar="N", min=1, help="Number of rows in long tables.")]
ShareFlag = Annotated[
    str | None,
    typer.Option(
        "--detail", metavar="[SHARE]", help="Show all columns; 10%: plot the largest 10% of allocations one by one."
    ),
]
PlotFlag = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Save a chart of memory over time as .html (interactive), .png, .svg or .pdf."),
]
ByFlag = Annotated[Stacked, typer.Option("--by", help="Stack the chart by category or module.")]
StepFlag = Annotated[str, typer.Option("--step", metavar="last|all|N", help="Step to plot.")]
DEFAULT_DETAIL = 0.1
SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%?")


def check_view(*, questions: bool, part: str | None, step: str, detail: str | None) -> None:
    """Raise StepscopeError, before anything runs, for options that could not be honored afterwards."""
    parse_detail(detail)
    if questions and part is not None:
        raise StepscopeError("`--questions` and `--table` are mutually exclusive", hint="remove one of them")
    if step not in ("last", "all") and not step.isdecimal():
        raise StepscopeError(
            f"invalid step: `--step {step}`", detail="expected last, all or a step number", hint="--step last"
        )


def parse_detail(text: str | None) -> float:
    """The share of allocations that a figure draws separately: `10%` and `0.1` both mean a tenth. `yes`, the value of
    `--detail` without one, concerns only the columns of tables."""
    if text is None or text == "yes":
        return DEFAULT_DETAIL
    found = SHARE.fullmatch(text.strip())
    value = float(found[1]) / (100 if text.strip().endswith("%") else 1) if found else -1.0
    if not 0 <= value <= 1:
        raise StepscopeError(f"invalid share: `--detail {text}`", detail="expected 0% to 100%", hint="--detail 10%")
    return value


def draw(run: "Run", path: Path, *, by: Stacked, step: str, detail: str | None, force: bool) -> None:
    from stepscope.render.figures import check_figure, save

    check_figure(path, force=force)
    save(run.figure(by=by, step=step).figure, path, detail=parse_detail(detail))
    say(f"chart: {path}")


def show_run(
    run: "Run", format_: Format, *, part: "RunPart | None", top: int, questions: bool, detail: str | None
) -> None:
    """Print the whole page, one table of it, or the answers to questions."""
    from stepscope.render.terminal import render_page

    if questions:
        answers = run.questions()
        if format_ is Format.TEXT:
            show(answers.text(terminal_width()))
        tables = [] if format_ is Format.TEXT else [answers.table]
        show_tables([*tables, *(answers.evidence if detail is not None else ())], format_)
    elif part is not None:
        show_tables(run.tables(part, top=top), format_, detail=detail == "yes")
    elif format_ is Format.JSON:
        show(run.to_json())
    elif format_ is Format.TEXT:
        show(render_page(run.page(), width=terminal_width()))
    else:
        table = "categories" if run.is_of_memory else "classes"
        raise StepscopeError(
            f"`--format {format_.value}` requires `--table`: the whole page prints as text or json",
            hint=f"--table {table} --format {format_.value}",
        )

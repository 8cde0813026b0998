"""`stepscope optimise`: changes that make a training step faster, each checked and measured."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.api.display import OptimisePart
from stepscope.cli.experiment import typed_command
from stepscope.cli.options import FormatFlag, refuse_settings, takes_grid
from stepscope.cli.output import say, show, show_tables, showing_stages, terminal_width
from stepscope.errors import StepscopeError
from stepscope.render.formats import Format
from stepscope.spec import Grid
from stepscope.units import count_noun

if TYPE_CHECKING:
    from stepscope.api.optimise import OptimiseResult


@takes_grid
def optimise(
    *,
    grid: Grid,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Save the result here.")] = Path("runs/optimise"),
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="FILE.json", help="Show a saved result and run nothing.")
    ] = None,
    table: Annotated[OptimisePart | None, typer.Option("--table", help="Show only this table.")] = None,
    format_: FormatFlag = Format.TEXT,
) -> None:
    """Try changes to a training step, one after another, and keep those that are right and faster on this machine.

    Each change is checked first: its gradients may be twice as far from float64 as those of the original step. Then it
    is timed, on top of the changes kept so far. The settings describe a single case.
    """
    from stepscope.render.terminal import render_page

    if from_ is not None:
        from stepscope.api.optimise import OptimiseResult

        refuse_settings(grid, "--from shows a saved result and runs nothing")
        result = OptimiseResult.read(from_)
    else:
        result = _run(grid, out)
    if table is not None:
        show_tables([result.table(table)], format_)
    elif format_ is Format.TEXT:
        show(render_page(result.page(), width=terminal_width()))
    elif format_ is Format.JSON:
        show(result.to_json())
    else:
        show_tables([result.table()], format_)
    _end(result, is_new=from_ is None)


def _run(grid: Grid, out: Path) -> "OptimiseResult":
    from stepscope.api.optimise import optimise_workload
    from stepscope.explain.experiments.optimise_tables import say_change
    from stepscope.jobs.optimise import OptimisationInterrupted

    try:
        with showing_stages() as on_stage:
            return optimise_workload(
                grid,
                out=out,
                progress=on_stage,
                on_change=lambda report, change: say(say_change(report, change)),
                command=typed_command(),
            )
    except OptimisationInterrupted as interrupted:
        shown = f"stepscope optimise --from {shlex.quote(str(interrupted.path))}"
        saved = count_noun(len(interrupted.report.changes), "measured change")
        say(f"interrupted: saved {saved}; show with: {shown}")
        raise


def _end(result: "OptimiseResult", *, is_new: bool) -> None:
    from stepscope.explain.experiments.optimise_tables import PYTHON_LINE, write_fast_command

    report = result.report
    if is_new:
        say(f"saved: {result.path}")
        if report.stopped:
            raise StepscopeError(
                "not all changes were tried", detail=report.stopped, hint=f"stepscope optimise --from {result.path}"
            )
    say(f"in your code: {PYTHON_LINE}")
    say(f"next: {write_fast_command(report.case.workload)}")

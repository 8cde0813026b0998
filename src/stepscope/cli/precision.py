"""`stepscope precision`: the dtypes of a step under autocast, and the errors of low precision."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from stepscope.api.display import PrecisionPart
from stepscope.cli.experiment import typed_command
from stepscope.cli.options import refuse_settings, takes_grid
from stepscope.cli.output import say, show, show_tables, showing_stages, terminal_width
from stepscope.errors import StepscopeError
from stepscope.render.formats import Format
from stepscope.spec import Grid


@takes_grid
def precision(
    *,
    grid: Grid,
    table: Annotated[PrecisionPart | None, typer.Option("--table", help="Show only this table.")] = None,
    format_: Annotated[
        Format, typer.Option("--format", help="Output format; json without --table prints the whole document.")
    ] = Format.TEXT,
    detail: Annotated[bool, typer.Option("--detail", help="Show every module instead of one row per role.")] = False,
    bench: Annotated[
        Path | None,
        typer.Option("--bench", metavar="FILE", help="Add speedups from a `stepscope bench` results file."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Save the result.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite a file at --out that another command wrote.")
    ] = False,
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="FILE.json", help="Show a saved result and run nothing.")
    ] = None,
) -> None:
    """Show the dtype of every tensor under autocast, and the errors of loss and gradients compared with float64.

    Runs one step in each precision that the device supports, or in those given with --precision. All other settings
    describe a single case.
    """
    from stepscope.api.measure import BenchResults, PrecisionResult
    from stepscope.api.measure import precision as compare_precisions
    from stepscope.render.terminal import render_page

    _check_flags(table=table, format_=format_, bench=bench, out=out, from_=from_)
    timed = BenchResults.read(bench).rows if bench is not None else ()
    if from_ is not None:
        refuse_settings(grid, "--from shows a saved result and runs nothing")
        result = PrecisionResult.read(from_)
        if timed:
            result = result.with_speeds(timed)
    else:
        with showing_stages() as on_stage:
            result = compare_precisions(
                grid, bench=timed, out=out, force=force, progress=on_stage, command=typed_command()
            )
    if table is not None:
        show_tables([result.table(table, detail=detail)], format_, detail=detail)
    elif format_ is Format.JSON:
        show(result.to_json())
    else:
        show(render_page(result.page(detail=detail), width=terminal_width()))
    if out is not None:
        say(f"saved: {out}")
    say(f"next: {_next_command(from_ or out, table)}")


def _check_flags(
    *, table: PrecisionPart | None, format_: Format, bench: Path | None, out: Path | None, from_: Path | None
) -> None:
    if table is None and format_ not in (Format.TEXT, Format.JSON):
        raise StepscopeError(
            f"`--format {format_.value}` requires `--table`", hint=f"--table dtypes --format {format_.value}"
        )
    if table == "speed" and bench is None and from_ is None:
        raise StepscopeError(
            "`--table speed` requires `--bench`",
            detail="speeds come from a `stepscope bench` results file",
            hint="--bench runs/bench/results.jsonl",
        )
    if out is not None and from_ is not None:
        raise StepscopeError("`--out` cannot be used with `--from`", hint=f"cp {from_} {out}")


def _next_command(kept: Path | None, table: PrecisionPart | None) -> str:
    if kept is None:
        return shlex.join(["stepscope", *sys.argv[1:], "--out", "precision.json"])
    other = "underflow" if table == "errors" else "errors"
    return f"stepscope precision --from {shlex.quote(str(kept))} --table {other} --detail"

"""`stepscope precision`: which dtypes does a step use, and what does low precision cost?"""

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
    table: Annotated[PrecisionPart | None, typer.Option("--table", help="One table alone.")] = None,
    format_: Annotated[
        Format, typer.Option("--format", help="How it is printed; json without --table is the whole document.")
    ] = Format.TEXT,
    detail: Annotated[bool, typer.Option("--detail", help="Every module, not only roles.")] = False,
    bench: Annotated[
        Path | None, typer.Option("--bench", metavar="FILE", help="Speeds from a results file of stepscope bench.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Keep the result.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file at --out that another command wrote.")] = False,
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="FILE.json", help="Show a kept result and run nothing.")
    ] = None,
) -> None:
    """Which dtype does everything have under autocast, and how far are loss and gradients from float64?

    Runs one step in each precision that the device has, or in those that --precision names. The other settings from
    --size on make one case.
    """
    from stepscope.api.measure import BenchResults, PrecisionResult
    from stepscope.api.measure import precision as compare_precisions
    from stepscope.render.terminal import render_page

    _check_flags(table=table, format_=format_, bench=bench, out=out, from_=from_)
    timed = BenchResults.read(bench).rows if bench is not None else ()
    if from_ is not None:
        refuse_settings(grid, "--from shows a file as it is")
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
        say(f"kept: {out}")
    say(f"next: {_next_command(from_ or out, table)}")


def _check_flags(
    *, table: PrecisionPart | None, format_: Format, bench: Path | None, out: Path | None, from_: Path | None
) -> None:
    if table is None and format_ not in (Format.TEXT, Format.JSON):
        raise StepscopeError(
            f"the page is text or json, not `{format_.value}`", hint=f"--table dtypes --format {format_.value}"
        )
    if table == "speed" and bench is None and from_ is None:
        raise StepscopeError(
            "`--table speed` without `--bench`",
            detail="speeds come from a results file of stepscope bench",
            hint="--bench runs/bench/results.jsonl",
        )
    if out is not None and from_ is not None:
        raise StepscopeError("`--out` with `--from`: it is a file already", hint=f"cp {from_} {out}")


def _next_command(kept: Path | None, table: PrecisionPart | None) -> str:
    if kept is None:
        return shlex.join(["stepscope", *sys.argv[1:], "--out", "precision.json"])
    other = "underflow" if table == "errors" else "errors"
    return f"stepscope precision --from {shlex.quote(str(kept))} --table {other} --detail"

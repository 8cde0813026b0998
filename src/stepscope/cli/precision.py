"""`stepscope precision`: which dtypes does a step use, and what does low precision cost?"""

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from stepscope.cli.options import refuse_settings, takes_grid
from stepscope.cli.output import say, show, terminal_width
from stepscope.cli.stages import showing_stages
from stepscope.errors import StepscopeError
from stepscope.report.formats import Format
from stepscope.spec import Grid


class Part(StrEnum):
    """What `--table` accepts: one table alone."""

    DTYPES = "dtypes"
    ERRORS = "errors"
    UNDERFLOW = "underflow"
    ACCUMULATION = "accumulation"
    NORM = "norm"
    SPEED = "speed"


@takes_grid
def precision(
    *,
    grid: Grid,
    table: Annotated[Part | None, typer.Option("--table", help="One table alone.")] = None,
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
    from stepscope.explain.precision.precision_tables import find_speeds, make_page, make_table
    from stepscope.recording.rows.precision_report import encode_report, read_report
    from stepscope.recording.rows.results_file import read_rows
    from stepscope.report.tables import render
    from stepscope.report.terminal import render_page

    _check_flags(table=table, format_=format_, bench=bench, out=out, from_=from_)
    rows = read_rows(bench)[0] if bench is not None else ()
    if from_ is not None:
        refuse_settings(grid, "--from shows a file as it is")
        report = read_report(from_)
        if rows:
            report = msgspec.structs.replace(report, speeds=find_speeds(rows, report.case))
    else:
        from stepscope.jobs.precision import PrecisionJob

        command = shlex.join(["stepscope", *sys.argv[1:]])
        job = PrecisionJob(command=command, out=out, force=force, bench_rows=rows)
        with showing_stages() as on_stage:
            report = job.run(grid, on_stage)
    width = terminal_width()
    if table is not None:
        show(render(make_table(report, table.value, detail=detail), format_, detail=detail, width=width))
    elif format_ is Format.JSON:
        show(encode_report(report).decode())
    else:
        show(render_page(make_page(report, detail=detail), width=width))
    if out is not None:
        say(f"kept: {out}")
    say(f"next: {_next_command(from_ or out, table)}")


def _check_flags(
    *, table: Part | None, format_: Format, bench: Path | None, out: Path | None, from_: Path | None
) -> None:
    if table is None and format_ not in (Format.TEXT, Format.JSON):
        raise StepscopeError(
            f"the page is text or json, not `{format_.value}`", hint=f"--table dtypes --format {format_.value}"
        )
    if table is Part.SPEED and bench is None and from_ is None:
        raise StepscopeError(
            "`--table speed` without `--bench`",
            detail="speeds come from a results file of stepscope bench",
            hint="--bench runs/bench/results.jsonl",
        )
    if out is not None and from_ is not None:
        raise StepscopeError("`--out` with `--from`: it is a file already", hint=f"cp {from_} {out}")


def _next_command(kept: Path | None, table: Part | None) -> str:
    if kept is None:
        return shlex.join(["stepscope", *sys.argv[1:], "--out", "precision.json"])
    other = Part.UNDERFLOW if table is Part.ERRORS else Part.ERRORS
    return f"stepscope precision --from {shlex.quote(str(kept))} --table {other.value} --detail"

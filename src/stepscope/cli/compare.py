"""`stepscope compare`: what changed between two recordings."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from stepscope.cli.options import FormatFlag
from stepscope.cli.output import say, show_tables
from stepscope.errors import Exit
from stepscope.render.formats import Format


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="The baseline recording.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The recording to compare with it.")],
    by: Annotated[
        Literal["phase", "class", "module", "kernel"], typer.Option("--by", help="What to break the step down by.")
    ] = "class",
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on", metavar="PERCENT", help="Exit with status 1 if B's step is slower by more than this."
        ),
    ] = None,
    format_: FormatFlag = Format.TEXT,
    detail: Annotated[bool, typer.Option("--detail", help="Also show nanoseconds and full names.")] = False,
) -> None:
    """Show what changed between two recordings, the largest change first, and which changes are noise.

    A and B are directories that `stepscope profile` saved, or traces from PyTorch's profiler or Nsight Systems. Of two
    directories with a trace per rank, the first rank that both have is compared.
    """
    from stepscope.api.run import load
    from stepscope.explain.trace.compare import parse_percent

    limit = None if fail_on is None else parse_percent(fail_on)
    result = load(a, cache=False).compare(load(b, cache=False), by=by)
    show_tables([result.table], format_, detail=detail)
    if limit is not None:
        say(result.verdict(limit))
        if result.is_slower(limit):
            raise typer.Exit(Exit.GATE_FAILED)
    elif by != "kernel":
        say(f"next: stepscope compare {shlex.quote(str(a))} {shlex.quote(str(b))} --by kernel")

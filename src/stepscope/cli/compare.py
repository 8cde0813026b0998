"""`stepscope compare`: what changed between two recordings?"""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from stepscope.cli.output import say, show_tables
from stepscope.errors import Exit
from stepscope.render.formats import Format


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="The recording to hold B against.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The recording that may be slower or faster.")],
    by: Annotated[
        Literal["phase", "class", "module", "kernel"], typer.Option("--by", help="What the step is taken apart by.")
    ] = "class",
    fail_on: Annotated[
        str | None,
        typer.Option("--fail-on", metavar="PERCENT", help="Exit with 1 when B's step is slower by more than this."),
    ] = None,
    format_: Annotated[Format, typer.Option("--format", help="How the table is printed.")] = Format.TEXT,
    detail: Annotated[bool, typer.Option("--detail", help="Nanoseconds and names as recorded, too.")] = False,
) -> None:
    """What changed between two recordings, what of it is noise, and what changed most?

    A and B are folders of `stepscope profile`, or traces of PyTorch's profiler or Nsight Systems.
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

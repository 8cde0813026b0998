"""`stepscope compare`: what changed between two recordings?"""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.output import say, show, terminal_width
from stepscope.errors import Exit
from stepscope.report.formats import Format


class Key(StrEnum):
    PHASE = "phase"
    CLASS = "class"
    MODULE = "module"
    KERNEL = "kernel"


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="The recording to hold B against.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The recording that may be slower or faster.")],
    by: Annotated[Key, typer.Option("--by", help="What the step is taken apart by.")] = Key.CLASS,
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
    from stepscope.explain.trace.compare import compare as compare_profiles
    from stepscope.explain.trace.compare import comparison_table, gate_sentence, parse_percent, regressed
    from stepscope.explain.trace.profile import make_profile
    from stepscope.recording.readers.formats import open_recording
    from stepscope.report.tables import render

    limit = None if fail_on is None else parse_percent(fail_on)
    profiles = [make_profile(open_recording(path)) for path in (a, b)]
    result = compare_profiles(profiles[0], profiles[1], by=by.value, names=(str(a), str(b)))
    show(render(comparison_table(result), format_, detail=detail, width=terminal_width()))
    if limit is not None:
        say(gate_sentence(result, limit))
        if regressed(result, limit):
            raise typer.Exit(Exit.GATE_FAILED)
    elif by is not Key.KERNEL:
        say(f"next: stepscope compare {shlex.quote(str(a))} {shlex.quote(str(b))} --by kernel")

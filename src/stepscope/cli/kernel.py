"""`stepscope kernel NAME`: what a GPU kernel's name says."""

from typing import Annotated

import typer

from stepscope.cli.output import show, terminal_width
from stepscope.render.formats import Format


def kernel(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="As a profiler shows it, mangled or not. Quote it: <, > and ( are signs."),
    ],
    format_: Annotated[Format, typer.Option("--format", help="How the table is printed.")] = Format.TEXT,
) -> None:
    """What does a GPU kernel's name say? Its parts one by one, in plain words: library, operation, tile, data type.

    A name that is not recognised is an answer too: its class is `other`.
    """
    from stepscope.explain.kernel_names import decode, describe
    from stepscope.render.tables import render

    show(render(describe(decode(name)), format_, width=terminal_width()))

"""`stepscope kernel NAME`: decode a GPU kernel's name."""

from typing import Annotated

import typer

from stepscope.cli.options import FormatFlag
from stepscope.cli.output import show, terminal_width
from stepscope.errors import StepscopeError
from stepscope.render.formats import Format


def kernel(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A kernel name from a profiler, mangled or not. Quote it for the shell."),
    ],
    format_: FormatFlag = Format.TEXT,
) -> None:
    """Decode a GPU kernel's name: library, operation, tile, dtype, and what each part of the name means.

    Names that are not recognized get the class `other`.
    """
    from stepscope.explain.kernel_names import decode, describe
    from stepscope.render.tables import render

    if not name.strip():
        raise StepscopeError("the kernel name is empty", hint="stepscope kernel ampere_sgemm_128x64_nn")
    show(render(describe(decode(name)), format_, width=terminal_width()))

"""`stepscope doctor`: is this machine fit to measure on?"""

from typing import Annotated

import typer

from stepscope.cli.output import say, show, terminal_width
from stepscope.errors import Exit
from stepscope.render.formats import Format


def doctor(
    format_: Annotated[Format, typer.Option("--format", help="How the table is printed.")] = Format.TEXT,
) -> None:
    """Is this machine fit to measure on? Each line is fine, limited or broken, and says what to do.

    Exits with 1 when something is broken.
    """
    from stepscope.jobs.doctor import any_broken, checks_table, examine
    from stepscope.render.tables import render

    checks = examine()
    show(render(checks_table(checks), format_, width=terminal_width()))
    if any_broken(checks):
        raise typer.Exit(Exit.GATE_FAILED)
    say("next: stepscope bench")

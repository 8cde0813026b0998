"""`stepscope doctor`: check whether this machine can measure reliably."""

import typer

from stepscope.cli.options import FormatFlag
from stepscope.cli.output import say, show, terminal_width
from stepscope.errors import Exit
from stepscope.render.formats import Format


def doctor(
    format_: FormatFlag = Format.TEXT,
) -> None:
    """Check whether this machine can measure reliably.

    Each check is fine, limited or broken, with advice on what to do. Exits with 1 if anything is broken.
    """
    from stepscope.jobs.doctor import any_broken, checks_table, examine
    from stepscope.render.tables import render

    checks = examine()
    show(render(checks_table(checks), format_, width=terminal_width()))
    if any_broken(checks):
        raise typer.Exit(Exit.GATE_FAILED)
    say("next: stepscope bench")

"""`stepscope rule [CODE]`: what a finding means and how to fix it."""

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli.options import FormatFlag
from stepscope.cli.output import show, terminal_width
from stepscope.render.formats import Format

if TYPE_CHECKING:
    from stepscope.findings import Table

OWN = "your own code"


def rule(
    code: Annotated[
        str | None, typer.Argument(metavar="CODE", help="A finding's code, such as SS007. Lists all rules if omitted.")
    ] = None,
    format_: FormatFlag = Format.TEXT,
) -> None:
    """Explain a finding: what it means, how to fix it, and how it is detected."""
    from stepscope.explain.rules import describe_rule, find_rule, tabulate_rules
    from stepscope.render.tables import render

    table = tabulate_rules() if code is None else describe_rule(find_rule(code))
    if code is not None and format_ is Format.TEXT:
        show(_lay_out(table))
    else:
        show(render(table, format_, width=terminal_width()))


def _lay_out(table: "Table") -> str:
    """Lay out a rule's paragraphs under headings: they are too long for table cells."""
    lines = [f"{table.columns[0].label}  {table.columns[1].label}"]
    for heading, text in table.rows:
        if heading:
            lines += ["", str(heading)]
        is_code = heading in ("", OWN)
        lines += (
            [f"  {text}"] if is_code else textwrap.wrap(str(text), 100, initial_indent="  ", subsequent_indent="  ")
        )
    return "\n".join(lines) + "\n"

"""`stepscope rule [CODE]`: what a finding means and what to do about it."""

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli.output import show, terminal_width
from stepscope.render.formats import Format

if TYPE_CHECKING:
    from stepscope.findings import Table

OWN = "your own"


def rule(
    code: Annotated[str | None, typer.Argument(metavar="CODE", help="Such as SS007. Without one: the list.")] = None,
    format_: Annotated[Format, typer.Option("--format", help="How the table is printed.")] = Format.TEXT,
) -> None:
    """What does a finding mean? How it is seen, how its saving is estimated, and what to do about it."""
    from stepscope.explain.rules import describe_rule, find_rule, tabulate_rules
    from stepscope.render.tables import render

    table = tabulate_rules() if code is None else describe_rule(find_rule(code))
    if code is not None and format_ is Format.TEXT:
        show(_lay_out(table))
    else:
        show(render(table, format_, width=terminal_width()))


def _lay_out(table: "Table") -> str:
    """A page's paragraphs under their headings: too long for the cells of a table."""
    lines = [f"{table.columns[0].label}  {table.columns[1].label}"]
    for heading, text in table.rows:
        if heading:
            lines += ["", str(heading)]
        is_code = heading in ("", OWN)
        lines += (
            [f"  {text}"] if is_code else textwrap.wrap(str(text), 100, initial_indent="  ", subsequent_indent="  ")
        )
    return "\n".join(lines) + "\n"

"""`stepscope key new`: a key to sign reports with."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.output import say, show, terminal_width
from stepscope.render.formats import Format


class Action(StrEnum):
    NEW = "new"


def key(
    action: Annotated[Action, typer.Argument(metavar="new", help="Make a new pair of keys.")],  # noqa: ARG001
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="For the private key; the public one goes to FILE.pub.")
    ] = Path("stepscope.key"),
    force: Annotated[bool, typer.Option("--force", help="Replace a key that is there. It is lost then.")] = False,
    format_: Annotated[Format, typer.Option("--format", help="How the table is printed.")] = Format.TEXT,
) -> None:
    """A key to sign reports with (Ed25519). The private key goes into a file that you alone can read.

    Give the public key to whoever is to check your reports.
    """
    from stepscope.findings import Column, Table
    from stepscope.recover.reports.keys import new_key, public_path
    from stepscope.render.tables import render

    public = new_key(path, force=force)
    rows = (
        ("private key", f"{path}, readable by you alone"),
        ("public key", public.text),
        ("public key is in", str(public_path(path))),
        ("fingerprint", public.fingerprint),
    )
    columns = (Column(key="what", label="what"), Column(key="value", label="value"))
    show(render(Table(title="A new key", columns=columns, rows=rows), format_, width=terminal_width()))
    say(f"next: stepscope verify EVIDENCE --claim CLAIM --sign {shlex.quote(str(path))}")

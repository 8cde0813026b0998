"""`stepscope key new`: create a key pair for signing reports."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.options import FormatFlag
from stepscope.cli.output import say, show, terminal_width
from stepscope.render.formats import Format


class Action(StrEnum):
    NEW = "new"


def key(
    action: Annotated[Action, typer.Argument(metavar="new", help="Create a key pair.")],  # noqa: ARG001
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="The private key file. The public key is written to FILE.pub.")
    ] = Path("stepscope.key"),
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite an existing key. The old key cannot be recovered.")
    ] = False,
    format_: FormatFlag = Format.TEXT,
) -> None:
    """Create an Ed25519 key pair for signing reports. Only you can read the private key file.

    Give the public key to the people who check your reports.
    """
    from stepscope.findings import Column, Table
    from stepscope.recover.reports.keys import new_key, public_path
    from stepscope.render.tables import render

    public = new_key(path, force=force)
    rows = (
        ("private key file", f"{path} (readable only by you)"),
        ("public key file", str(public_path(path))),
        ("public key", public.text),
        ("fingerprint", public.fingerprint),
    )
    columns = (Column(key="what", label="item"), Column(key="value", label="value"))
    show(render(Table(title="New key", columns=columns, rows=rows), format_, width=terminal_width()))
    say(f"next: stepscope verify EVIDENCE --claim CLAIM --sign {shlex.quote(str(path))}")

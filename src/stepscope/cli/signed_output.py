"""What verbs that sign, or look at what was signed, have in common."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import typer

from stepscope.cli.output import say, show_tables
from stepscope.report.formats import Format


def print_signed(
    report: Path, public_key: str, evidence: Sequence[Path], *, nonce: str | None, format_: Format
) -> None:
    """`--signed REPORT --public-key KEY [EVIDENCE...]`. Leaves with 1 where the report is not what was signed."""
    from stepscope.errors import Exit
    from stepscope.jobs.signing import examination_table, examine_signed

    examination = examine_signed(report, public_key, evidence, nonce=nonce)
    show_tables([examination_table(examination)], format_)
    if examination.exit is not Exit.OK:
        raise typer.Exit(examination.exit)
    if not evidence:
        say(f"next: stepscope verify EVIDENCE --signed {shlex.quote(str(report))} --public-key …, to hash files again")

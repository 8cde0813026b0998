"""Signed reports on the command line: the options of `recover` and `verify`, and what is printed about a report or a
challenge."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli.output import say, show_tables
from stepscope.errors import Exit
from stepscope.render.formats import Format

if TYPE_CHECKING:
    from stepscope.recover.reports.challenge import Challenge

KeyFlag = Annotated[
    Path | None, typer.Option("--sign", metavar="KEY", help="Write a report signed with this private key.")
]
ReportFlag = Annotated[
    Path | None,
    typer.Option("--out", metavar="REPORT", help="With --sign: the report to write (default: report.json)."),
]
WeightsFlag = Annotated[
    Path | None, typer.Option("--weights", metavar="PATH", help="With --sign: include the SHA-256 of these weights.")
]
GpuUuidFlag = Annotated[str | None, typer.Option("--gpu-uuid", help="With --sign: the UUID of the GPU to record.")]
SignedFlag = Annotated[
    Path | None, typer.Option("--signed", metavar="REPORT", help="Check a signed report instead of a claim.")
]
PublicKeyFlag = Annotated[
    str | None,
    typer.Option("--public-key", metavar="KEY", help="With --signed: the signer's .pub file, or the line it contains."),
]
ForceFlag = Annotated[bool, typer.Option("--force", help="Overwrite an existing report.")]


def print_challenge(challenge: "Challenge", format_: Format) -> None:
    from stepscope.recover.reports.challenge import challenge_table

    show_tables([challenge_table(challenge)], format_)
    sizes = f"--batch {challenge.batch} --context {challenge.context}"
    say(f"next: stepscope profile --counters --hf config.json --precision bf16 {sizes} --out evidence")


def print_signed(
    report: Path,
    public_key: str,
    evidence: Sequence[Path],
    *,
    nonce: str | None,
    format_: Format,
    challenge: "Challenge | None" = None,
) -> None:
    """Check `--signed REPORT --public-key KEY [EVIDENCE...]`. Exit with 1 if the report or a file was changed."""
    from stepscope.jobs.signing import examination_table, examine_signed

    examination = examine_signed(report, public_key, evidence, nonce=nonce, challenge=challenge)
    show_tables([examination_table(examination)], format_)
    if examination.exit is not Exit.OK:
        raise typer.Exit(examination.exit)
    if not evidence:
        say(
            f"next: stepscope verify EVIDENCE --signed {shlex.quote(str(report))} --public-key …, "
            "to check the evidence files too"
        )

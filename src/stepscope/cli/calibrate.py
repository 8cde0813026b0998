"""`stepscope calibrate`: measure the table of this GPU and host that `stepscope plan` predicts from."""

import time
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.options import FormatFlag
from stepscope.cli.output import say, show, terminal_width
from stepscope.files import check_target
from stepscope.recording.rows.calibration import CALIBRATION_NAME
from stepscope.render.formats import Format

_EVERY_S = 5.0


def calibrate(
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the table.")] = Path(CALIBRATION_NAME),
    device: Annotated[str, typer.Option(help="The GPU to measure; cpu for a trial run with few sizes.")] = "auto",
    seconds: Annotated[float, typer.Option(min=1.0, help="Longest time to measure.")] = 280.0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files of other programs.")] = False,
    format_: FormatFlag = Format.TEXT,
) -> None:
    """Measure how fast this GPU and its host are, for `stepscope plan`.

    Times GEMMs, memory-bound operations, attention, launches and the host, in under five minutes. A table
    also serves for other GPUs, estimated with data sheets.
    """
    from stepscope.explain.experiments.calibration_tables import calibration_table
    from stepscope.jobs.calibrate import calibrate as measure
    from stepscope.render.tables import render

    check_target(out, force=force, flag="--out", command="stepscope calibrate")
    said_at = 0.0

    def on_stage(stage: str) -> None:
        nonlocal said_at
        if time.monotonic() - said_at > _EVERY_S or stage.endswith(" s"):
            said_at = time.monotonic()
            say(stage)

    calibration = measure(device=device, out=out, seconds=seconds, on_stage=on_stage)
    show(render(calibration_table(calibration), format_, width=terminal_width()))
    say(f"saved: {out}")
    say(f"next: stepscope plan --calibration {out}")

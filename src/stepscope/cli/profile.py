"""`stepscope profile`: record one step, with what ran where and for how long."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.options import takes_grid
from stepscope.cli.output import say, show, terminal_width
from stepscope.report.formats import Format
from stepscope.spec import Grid


@takes_grid
def profile(
    *,
    grid: Grid,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the recording goes.")] = Path("runs/profile"),
    force: Annotated[bool, typer.Option("--force", help="Replace a recording that is there.")] = False,
    record_steps: Annotated[
        int, typer.Option("--record-steps", metavar="N", min=1, max=1000, help="Steps in the recording.")
    ] = 3,
    annotate: Annotated[
        list[str] | None,
        typer.Option("--annotate", metavar="MODULE:FUNCTION", help="A range around a function; may be repeated."),
    ] = None,
    stacks: Annotated[bool, typer.Option("--stacks", help="Record Python's stacks, which costs a lot.")] = False,
    format_: Annotated[Format, typer.Option("--format", help="How the table is printed.")] = Format.TEXT,
) -> None:
    """What does one step do, kernel by kernel? Records a few steps with PyTorch's profiler, annotated with the names of
    phases and modules.

    The settings from --size on make one case.
    """
    from stepscope.explain.overhead import overhead_table
    from stepscope.jobs.profile import Profile
    from stepscope.report.tables import render

    command = shlex.join(["stepscope", *sys.argv[1:]])
    job = Profile(
        folder=out,
        command=command,
        force=force,
        steps=record_steps,
        functions=tuple(annotate or ()),
        stacks=stacks,
    )
    try:
        with _showing_stages() as on_stage:
            recording = job.run(grid, on_stage)
    except KeyboardInterrupt:
        say("interrupted: nothing was kept")
        raise
    show(render(overhead_table(recording.manifest), format_, width=terminal_width()))
    say(f"recording: {out}")
    say(f"next: stepscope explain {shlex.quote(str(out))}")


@contextmanager
def _showing_stages() -> Iterator[Callable[[str], None]]:
    """What is being done, on a terminal and only there."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True, highlight=False).status("looking at the device") as status:
        yield status.update

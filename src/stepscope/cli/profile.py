"""`stepscope profile`: record one step, with what ran where and for how long."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.options import takes_grid
from stepscope.cli.output import say, show, terminal_width
from stepscope.cli.stages import showing_stages
from stepscope.errors import StepscopeError
from stepscope.report.formats import PageFormat
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
    format_: Annotated[PageFormat, typer.Option("--format", help="How it is printed.")] = PageFormat.TEXT,
    nsys: Annotated[
        bool, typer.Option("--nsys", help="Record with Nsight Systems, which must be on the PATH.")
    ] = False,
    python_backtrace: Annotated[
        bool, typer.Option("--python-backtrace", help="With --nsys: Python's stacks at CUDA calls.")
    ] = False,
    pytorch: Annotated[
        str | None, typer.Option("--pytorch", metavar="WHAT", help="With --nsys: passed on, such as autograd-nvtx.")
    ] = None,
) -> None:
    """What does one step do, kernel by kernel? Records a few steps, annotated with the names of phases and modules, and
    explains them.

    The settings from --size on make one case.
    """
    from stepscope.jobs.explain import document_fresh, explain_fresh
    from stepscope.jobs.profile import NsysProfile, Profile
    from stepscope.report.page import render_page

    _check_flags(nsys=nsys, stacks=stacks, python_backtrace=python_backtrace, pytorch=pytorch)
    command = shlex.join(["stepscope", *sys.argv[1:]])
    functions = tuple(annotate or ())
    try:
        with showing_stages() as on_stage:
            if nsys:
                under_nsys = NsysProfile(
                    folder=out,
                    command=command,
                    force=force,
                    steps=record_steps,
                    functions=functions,
                    python_backtrace=python_backtrace,
                    pytorch=pytorch,
                )
                recording, run = under_nsys.run(grid, on_stage)
                say(f"nsys was run as: {run.typed}")
                say(f"its report: {run.report}")
            else:
                job = Profile(
                    folder=out, command=command, force=force, steps=record_steps, functions=functions, stacks=stacks
                )
                recording = job.run(grid, on_stage)
    except KeyboardInterrupt:
        say("interrupted: nothing was kept")
        raise
    if format_ is PageFormat.JSON:
        show(document_fresh(recording, out.name))
    else:
        show(render_page(explain_fresh(recording, out.name), width=terminal_width()))
    say(f"recording: {out}")
    say(f"next: stepscope explain {shlex.quote(str(out))} --questions")


def _check_flags(*, nsys: bool, stacks: bool, python_backtrace: bool, pytorch: str | None) -> None:
    """A flag that would be ignored is an error."""
    for given, flag in ((python_backtrace, "--python-backtrace"), (pytorch is not None, "--pytorch")):
        if given and not nsys:
            raise StepscopeError(f"`{flag}` does nothing without `--nsys`", hint=f"--nsys {flag}, or leave it out")
    if nsys and stacks:
        raise StepscopeError("`--stacks` does nothing with `--nsys`", hint="--python-backtrace")

"""`stepscope profile`: record a few steps kernel by kernel, or collect hardware counters."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.experiment import typed_command
from stepscope.cli.options import takes_grid
from stepscope.cli.output import if_interrupted, say, show, showing_stages, terminal_width
from stepscope.errors import StepscopeError
from stepscope.render.formats import Format
from stepscope.spec import Grid


@takes_grid
def profile(
    *,
    grid: Grid,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to save the recording.  [default: runs/profile, or runs/counters]"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a recording that another command made.")] = False,
    record_steps: Annotated[
        int | None,
        typer.Option(
            "--record-steps",
            metavar="N",
            min=1,
            max=1000,
            help="Number of steps to record.  [default: 3, or 1 with --counters]",
        ),
    ] = None,
    annotate: Annotated[
        list[str] | None,
        typer.Option("--annotate", metavar="MODULE:FUNCTION", help="Add a range around a function; may be repeated."),
    ] = None,
    stacks: Annotated[bool, typer.Option("--stacks", help="Record Python stacks (slow).")] = False,
    format_: Annotated[
        Format, typer.Option("--format", help="Output format; text or json without --counters.")
    ] = Format.TEXT,
    nsys: Annotated[bool, typer.Option("--nsys", help="Record with Nsight Systems; nsys must be on the PATH.")] = False,
    python_backtrace: Annotated[
        bool, typer.Option("--python-backtrace", help="With --nsys: record Python stacks at CUDA calls.")
    ] = False,
    pytorch: Annotated[
        str | None,
        typer.Option("--pytorch", metavar="WHAT", help="With --nsys: value for its --pytorch, such as autograd-nvtx."),
    ] = None,
    counters: Annotated[
        bool,
        typer.Option(
            "--counters", help="Collect hardware counters of forward passes with Nsight Compute; takes a grid."
        ),
    ] = False,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics", metavar="few|full|NAME,…", help="With --counters: which metrics to collect.  [default: few]"
        ),
    ] = None,
    kernel_class: Annotated[
        str | None,
        typer.Option(
            "--kernel-class",
            metavar="CLASS,…",
            help="With --counters: kernel classes in a grid's table.  [default: attention]",
        ),
    ] = None,
) -> None:
    """Record a few training steps kernel by kernel, with phases and modules, and explain them.

    The settings from --size on describe one case, or a grid with --counters.
    """
    _check_flags(
        {"--nsys": nsys, "--counters": counters},
        {
            "--nsys": {"--python-backtrace": python_backtrace, "--pytorch": pytorch},
            "--counters": {"--metrics": metrics, "--kernel-class": kernel_class},
            "": {"--stacks": stacks} | ({"--annotate": annotate} if counters else {}),
        },
    )
    command = typed_command()
    if counters:
        from stepscope.cli.experiment import count

        count(
            grid,
            out or Path("runs/counters"),
            command=command,
            force=force,
            passes=record_steps or 1,
            metrics=metrics or "few",
            kernel_class=kernel_class,
            format_=format_,
        )
        return
    if format_ not in (Format.TEXT, Format.JSON):
        raise StepscopeError(
            f"unsupported format: `{format_.value}`",
            detail="expected text or json without --counters",
            hint="--format json",
        )
    folder, steps = out or Path("runs/profile"), record_steps or 3
    with if_interrupted("nothing was saved"), showing_stages() as on_stage:
        if nsys:
            from stepscope.api.run import Run
            from stepscope.jobs.recorders.recording_job import NsysJob

            under_nsys = NsysJob(
                folder=folder,
                command=command,
                force=force,
                steps=steps,
                functions=tuple(annotate or ()),
                python_backtrace=python_backtrace,
                pytorch=pytorch,
            )
            recording, nsys_run = under_nsys.run(grid, on_stage)
            say(f"ran: {nsys_run.typed}")
            say(f"Nsight Systems report: {nsys_run.report}")
            run = Run.of(recording, folder)
        else:
            from stepscope.api.measure import profile as record

            run = record(
                grid,
                record_steps=steps,
                annotate=annotate or (),
                stacks=stacks,
                out=folder,
                force=force,
                progress=on_stage,
                command=command,
            )
    if format_ is Format.JSON:
        show(run.to_json())
    else:
        from stepscope.render.terminal import render_page

        show(render_page(run.page(overhead=True), width=terminal_width()))
    say(f"recording: {folder}")
    say(f"next: stepscope explain {shlex.quote(str(folder))} --questions")


def _check_flags(recorders: dict[str, bool], flags: dict[str, dict[str, object]]) -> None:
    """Reject flags that would be ignored. `flags` are grouped by the recorder they require; the empty name is for flags
    that only PyTorch's profiler supports."""
    chosen = [name for name, given in recorders.items() if given]
    if len(chosen) > 1:
        raise StepscopeError(
            f"`{chosen[0]}` and `{chosen[1]}` are mutually exclusive", hint="run them one after the other"
        )
    for recorder, belonging in flags.items():
        for flag in (flag for flag, given in belonging.items() if given not in (None, False)):
            if recorder and recorder not in chosen:
                raise StepscopeError(f"`{flag}` requires `{recorder}`", hint=f"add {recorder}, or remove {flag}")
            if not recorder and chosen:
                hint = "--python-backtrace" if chosen == ["--nsys"] else f"remove {flag}"
                raise StepscopeError(f"`{flag}` cannot be used with `{chosen[0]}`", hint=hint)

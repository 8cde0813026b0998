"""`stepscope explain FILE`: where the time or memory goes in a recording or trace."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from stepscope.api.display import RunPart
from stepscope.cli.output import say
from stepscope.cli.run_output import ByFlag, PlotFlag, ShareFlag, StepFlag, TopFlag, check_view, draw, show_run
from stepscope.errors import StepscopeError
from stepscope.render.formats import Format


def explain(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…",
            help="A recording, a PyTorch profiler trace, an Nsight Systems export, an Nsight Compute CSV or a CUDA "
            "memory snapshot. Several files, or a directory of traces, are the ranks of one run.",
        ),
    ],
    table: Annotated[RunPart | None, typer.Option("--table", help="Show only this table.")] = None,
    top: TopFlag = 20,
    questions: Annotated[
        bool,
        typer.Option("--questions", help="Answer common questions about a step; --detail adds the evidence."),
    ] = False,
    format_: Annotated[
        Format, typer.Option("--format", help="Output format; json without --table prints the whole analysis.")
    ] = Format.TEXT,
    detail: ShareFlag = None,
    plot: PlotFlag = None,
    by: ByFlag = "category",
    step: StepFlag = "last",
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Save it as a recording, which loads faster.")
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a Perfetto trace annotated with classes, phases and modules."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite existing files at --save, --perfetto and --plot.")
    ] = False,
    bounded: Annotated[
        bool, typer.Option("--bounded", help="Read a PyTorch trace larger than memory: slower, no findings.")
    ] = False,
    cache: Annotated[bool, typer.Option(help="Cache parsed large files for the next run.")] = True,
) -> None:
    """Explain where the time or the memory of a training step goes, and why.

    Reads recordings and traces; runs nothing and does not need PyTorch.
    """
    from stepscope.api.rank_files import expand_ranks
    from stepscope.api.run import load

    check_view(questions=questions, part=table, step=step, detail=detail)
    if plot is not None:
        from stepscope.render.figures import check_figure

        check_figure(plot, force=force)
    if bounded:
        _check_bounded(
            expand_ranks(files), {"--questions": questions, "--save": save, "--perfetto": perfetto, "--plot": plot}
        )
        show_run(load(*files, bounded=True), format_, part=table, top=top, questions=False, detail=detail)
        return
    _check_outputs(expand_ranks(files), {"--save": save, "--perfetto": perfetto})
    run = load(*files, cache=cache)
    if run.is_of_memory and perfetto is not None:
        raise StepscopeError("`--perfetto` needs a trace; this is a memory snapshot", hint="--plot memory.html")
    if plot is not None and not run.is_of_memory:
        raise StepscopeError("`--plot` needs a memory snapshot; this is a trace", hint="--perfetto trace.json")
    if save is not None:
        run.save(save, force=force)
    if perfetto is not None:
        run.write_perfetto(perfetto, force=force)
    show_run(run, format_, part=table, top=top, questions=questions, detail=detail)
    if plot is not None:
        draw(run, plot, by=by, step=step, detail=detail, force=force)
    elif not questions and table is None:
        more = "--plot memory.html" if run.is_of_memory else "--questions"
        say(f"next: stepscope explain {shlex.join(map(str, files))} {more}")


def _check_outputs(files: Sequence[Path], targets: dict[str, Path | None]) -> None:
    """Check before reading anything that outputs come from one file and do not overwrite it."""
    for flag, target in targets.items():
        if target is None:
            continue
        if len(files) != 1:
            raise StepscopeError(
                f"`{flag}` requires exactly one file, got {len(files)}", hint="stepscope explain FILE, once per file"
            )
        if target.exists() and target.resolve() == files[0].resolve():
            raise StepscopeError(f"`{flag}` would overwrite its input: `{target}`", hint=f"{flag} with another path")


def _check_bounded(files: Sequence[Path], flags: dict[str, object]) -> None:
    for flag in (flag for flag, given in flags.items() if given):
        raise StepscopeError(f"`{flag}` cannot be used with `--bounded`", hint=f"{flag} without --bounded")
    if len(files) != 1:
        raise StepscopeError(
            f"`--bounded` requires exactly one file, got {len(files)}", hint="stepscope explain FILE, once per file"
        )

"""`stepscope explain FILE`: where the time goes in a recording, ours or anybody's."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from stepscope.api.display import RunPart
from stepscope.cli.output import say
from stepscope.cli.run_output import Stacked, check_view, draw, show_run
from stepscope.errors import StepscopeError
from stepscope.render.formats import Format


def explain(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…",
            help="A recording's folder, a PyTorch profiler trace, an Nsight Systems export, Nsight Compute's CSV, a "
            "CUDA memory snapshot; several for the ranks of one run.",
        ),
    ],
    table: Annotated[RunPart | None, typer.Option("--table", help="One part of the page alone.")] = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Rows of a table by kernel, module or operator.")] = 20,
    questions: Annotated[
        bool,
        typer.Option("--questions", help="The questions people ask of a step; --detail adds the evidence."),
    ] = False,
    format_: Annotated[
        Format, typer.Option("--format", help="How it is printed; json without --table is the whole document.")
    ] = Format.TEXT,
    detail: Annotated[
        str | None,
        typer.Option(
            "--detail", metavar="[SHARE]", help="All columns; 10%: the largest pieces in a picture of memory."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw memory over time: .html (interactive), .png, .svg or .pdf."),
    ] = None,
    by: Annotated[Stacked, typer.Option("--by", help="What the picture is stacked by.")] = "category",
    step: Annotated[str, typer.Option("--step", metavar="last|all|N", help="The step that is drawn.")] = "last",
    save: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep it as a recording of ours.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto with what was found out on it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what --save, --perfetto and --plot name.")] = False,
    bounded: Annotated[
        bool, typer.Option("--bounded", help="For a PyTorch trace larger than memory: slower, and without findings.")
    ] = False,
    cache: Annotated[bool, typer.Option(help="Keep what large files were read into, for the next look.")] = True,
) -> None:
    """Where does the time go, or the memory, and why? Reads a recording and answers; nothing is run and torch is not
    needed."""
    from stepscope.api.run import load
    from stepscope.render.figures import check_figure

    check_view(questions=questions, part=table, step=step, detail=detail)
    if plot is not None:
        check_figure(plot, force=force)
    if bounded:
        _check_bounded(files, {"--questions": questions, "--save": save, "--perfetto": perfetto, "--plot": plot})
        show_run(load(*files, bounded=True), format_, part=table, top=top, questions=False, detail=detail)
        return
    _check_outputs(files, {"--save": save, "--perfetto": perfetto})
    run = load(*files, cache=cache)
    if run.is_of_memory and perfetto is not None:
        raise StepscopeError("`--perfetto` is of time, and this is of memory", hint="--plot memory.html")
    if plot is not None and not run.is_of_memory:
        raise StepscopeError("`--plot` draws memory, and this is a recording of time", hint="--perfetto trace.json")
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
    """Before anything is read: of one file, and not onto that file."""
    for flag, target in targets.items():
        if target is None:
            continue
        if len(files) != 1:
            raise StepscopeError(f"`{flag}` takes one file, not {len(files)}", hint="name the files one at a time")
        if target.exists() and target.resolve() == files[0].resolve():
            raise StepscopeError(f"`{flag}` would replace the file it reads: `{target}`", hint="another name")


def _check_bounded(files: Sequence[Path], flags: dict[str, object]) -> None:
    for flag in (flag for flag, given in flags.items() if given):
        raise StepscopeError(f"`{flag}` needs all of the recording in memory", hint="leave out --bounded")
    if len(files) != 1:
        raise StepscopeError(f"`--bounded` takes one file, not {len(files)}", hint="name the files one at a time")

"""`stepscope explain FILE`: where the time goes in a recording, ours or anybody's."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.memory_output import Stacked, check_view, draw, print_profile
from stepscope.cli.output import say, show, show_tables, terminal_width
from stepscope.errors import StepscopeError
from stepscope.report.formats import Format


class Part(StrEnum):
    """What `--table` accepts: one part of the page alone."""

    CLASSES = "classes"
    PHASES = "phases"
    KERNELS = "kernels"
    MODULES = "modules"
    LAYERS = "layers"
    OPS = "ops"
    STEPS = "steps"
    STREAMS = "streams"
    ROOFLINE = "roofline"
    COUNTERS = "counters"
    FINDINGS = "findings"
    RANKS = "ranks"
    CATEGORIES = "categories"
    LARGEST = "largest"
    FREED = "freed"
    LEAKS = "leaks"
    SAVED = "saved"


def explain(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…",
            help="A recording's folder, a PyTorch profiler trace, an Nsight Systems export, Nsight Compute's CSV, a "
            "CUDA memory snapshot; several for the ranks of one run.",
        ),
    ],
    table: Annotated[Part | None, typer.Option("--table", help="One part of the page alone.")] = None,
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
    by: Annotated[Stacked, typer.Option("--by", help="What the picture is stacked by.")] = Stacked.CATEGORY,
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
    from stepscope.jobs import explain as job
    from stepscope.report.figures import check_figure
    from stepscope.report.terminal import render_page

    width = terminal_width()
    check_view(questions=questions, part=table, step=step, detail=detail)
    if plot is not None:
        check_figure(plot, force=force)
    all_columns = detail == "yes"
    if bounded:
        asked = (("--questions", questions), ("--save", save), ("--perfetto", perfetto), ("--plot", plot))
        refused = [flag for flag, value in asked if value]
        _explain_bounded(files, table, top, format_, detail=all_columns, refused=refused)
        return
    job.check_outputs(files, save=save, perfetto=perfetto)
    opened = job.open_files(files, cached=cache)
    if opened[0].is_of_memory:
        if perfetto is not None:
            raise StepscopeError("`--perfetto` is of time, and this is of memory", hint="--plot memory.html")
        profile = job.open_memory(opened[0], save=save, force=force)
        print_profile(profile, format_, part=table, top=top, questions=questions, detail=detail)
        if plot is not None:
            draw(profile, plot, by=by.value, step=step, detail=detail, force=force)
        elif not questions and table is None:
            say(f"next: stepscope explain {shlex.join(map(str, files))} --plot memory.html")
        return
    if plot is not None:
        raise StepscopeError("`--plot` draws memory, and this is a recording of time", hint="--perfetto trace.json")
    profiles = job.make_profiles(opened)
    if save is not None or perfetto is not None:
        job.export(profiles[0], save=save, perfetto=perfetto, force=force)
    if questions:
        if format_ is Format.TEXT:
            show(job.answer_in_words(profiles, width))
        show_tables(job.answer_in_tables(profiles, words=format_ is not Format.TEXT, evidence=all_columns), format_)
    elif table is not None:
        show_tables(job.make_part(profiles, table.value, top=top), format_, detail=all_columns)
    elif format_ is Format.JSON:
        show(job.encode_summary(profiles))
    elif format_ is Format.TEXT:
        show(render_page(job.make_page(profiles), width=width))
    else:
        raise StepscopeError(
            f"the page is text or json, not `{format_.value}`", hint=f"--table classes --format {format_.value}"
        )
    if not questions and table is None:
        say(f"next: stepscope explain {shlex.join(map(str, files))} --questions")


def _explain_bounded(
    files: list[Path], table: Part | None, top: int, format_: Format, *, detail: bool, refused: list[str]
) -> None:
    from stepscope.explain.trace import bounded
    from stepscope.explain.trace.summary import summarise
    from stepscope.jobs.explain import encode
    from stepscope.recording.readers.formats import require_trace
    from stepscope.report.tables import render
    from stepscope.report.terminal import render_page

    if refused:
        raise StepscopeError(f"`{refused[0]}` needs all of the recording in memory", hint="leave out --bounded")
    if len(files) != 1:
        raise StepscopeError(f"`--bounded` takes one file, not {len(files)}", hint="name the files one at a time")
    require_trace(files[0])
    profile = bounded.make_bounded_profile(files[0])
    width = terminal_width()
    if table is not None:
        show(render(bounded.make_part(profile, table.value, top=top), format_, detail=detail, width=width))
    elif format_ is Format.JSON:
        show(encode(summarise(profile, ())))
    else:
        show(render_page(bounded.make_page(profile), width=width))

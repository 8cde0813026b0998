"""`stepscope report`: one page that tells the whole story of a training step."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli.options import refuse_settings, takes_grid
from stepscope.cli.output import say, show
from stepscope.errors import Exit, StepscopeError
from stepscope.findings import STAGES
from stepscope.spec import Grid

if TYPE_CHECKING:
    from stepscope.api.report import ReportPage


@takes_grid
def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE…",
            help="Recordings, foreign traces, results and folders of earlier reports, in place of running anything; "
            "two runs are compared.",
        ),
    ] = None,
    *,
    grid: Grid,
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="The page.")] = Path("report.html"),
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where stages are kept and resumed from.  [default: runs/report/CASE]"),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Its figures and tables as files, for a paper.")
    ] = None,
    without: Annotated[
        str | None,
        typer.Option(metavar="STAGE,…", help=f"Leave out some of {', '.join(STAGES)}."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run everything again.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a file at --out that stepscope did not write.")
    ] = False,
    cache: Annotated[bool, typer.Option(help="Keep what large files were read into, for the next look.")] = True,
) -> None:
    """Where do the time and the memory of a step go, and what would help? All of it on one page, opened by a double
    click.

    Runs bench, profile, memory, precision and attention on the one case that the settings from --size on make. Ctrl-C
    leaves a page of what is done; the same command goes on. With files, nothing is run.
    """
    if export is not None:
        from stepscope.render.export import check_folder

        check_folder(export)
    if files:
        _refuse_flags({"--data": data, "--without": without, "--fresh": fresh})
        refuse_settings(grid, "the report is of the files, and nothing is run")
        _read(files, out, export, force=force, cached=cache)
    else:
        _run(grid, out, export, data=data, without=without, fresh=fresh, force=force)


def _refuse_flags(flags: dict[str, object]) -> None:
    for flag in (flag for flag, given in flags.items() if given not in (None, False)):
        raise StepscopeError(
            f"`{flag}` does nothing here", detail="the report is of the files, and nothing is run", hint="leave it out"
        )


def _read(files: list[Path], out: Path, export: Path | None, *, force: bool, cached: bool) -> None:
    from stepscope.api.report import report as make_report

    page = make_report(files, out, force=force, cache=cached, command=_words())
    next_ = f"{shlex.join(_words())} --export figures" if export is None else "stepscope report --help"
    _end(page, export, next_=next_)


def _run(
    grid: Grid, out: Path, export: Path | None, *, data: Path | None, without: str | None, fresh: bool, force: bool
) -> None:
    from stepscope.api.report import NothingMeasuredError
    from stepscope.api.report import report as make_report
    from stepscope.cli.report_progress import watching
    from stepscope.jobs.report.run import Interrupted, parse_stages

    left_out = parse_stages(without) if without is not None else ()
    try:
        with watching() as watcher:
            page = make_report(
                grid, out, force=force, data=data, without=left_out, fresh=fresh, progress=watcher, command=_words()
            )
    except Interrupted as interrupted:
        where = f"the page so far is {interrupted.page}" if interrupted.page else f"{out} is as it was"
        say(f"interrupted: {where}; to go on: {interrupted.go_on}")
        raise
    except NothingMeasuredError as error:
        say(error.message)
        raise typer.Exit(Exit.GATE_FAILED) from None
    folder = shlex.quote(str(page.data))
    next_ = (
        f"report {folder} --out {shlex.quote(str(out))} --export figures"
        if export is None
        else f"explain {folder}/profile --questions"
    )
    if page.num_done:
        _end(page, export, next_=f"stepscope {next_}")
    else:
        say("every stage failed, and the page says why")
        _end(page, export, next_="stepscope doctor")
        raise typer.Exit(Exit.GATE_FAILED)


def _end(page: "ReportPage", export: Path | None, *, next_: str) -> None:
    show(f"{page.path}\n")
    if export is not None:
        say(f"exported: {len(page.export(export))} files in {export}")
    say(f"next: {next_}")


def _words() -> list[str]:
    return ["stepscope", *sys.argv[1:]]

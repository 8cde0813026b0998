"""`stepscope report`: one page that tells the whole story of a training step."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli.options import refuse_settings, takes_grid
from stepscope.cli.output import say, show
from stepscope.errors import Exit, StepscopeError
from stepscope.spec import Grid

if TYPE_CHECKING:
    from stepscope.findings import Report


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
        typer.Option(metavar="STAGE,…", help="Leave out some of bench, profile, memory, precision, attention."),
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
    from stepscope.jobs.report.page import check_page

    check_page(out, force=force, inputs=files or ())
    if export is not None:
        from stepscope.report.export import check_folder

        check_folder(export)
    if files:
        _refuse_flags({"--data": data, "--without": without, "--fresh": fresh})
        refuse_settings(grid, "the report is of the files, and nothing is run")
        _read(files, out, export, cached=cache)
    else:
        _run(grid, out, export, data=data, without=without, fresh=fresh)


def _refuse_flags(flags: dict[str, object]) -> None:
    for flag in (flag for flag, given in flags.items() if given not in (None, False)):
        raise StepscopeError(
            f"`{flag}` does nothing here", detail="the report is of the files, and nothing is run", hint="leave it out"
        )


def _read(files: list[Path], out: Path, export: Path | None, *, cached: bool) -> None:
    from stepscope.jobs.report.files import read_runs
    from stepscope.jobs.report.page import write_page

    runs = read_runs(files, command=shlex.join(_words()), cached=cached)
    next_ = f"{shlex.join(_words())} --export figures" if export is None else "stepscope report --help"
    _end(write_page(out, runs), out, export, next_=next_)


def _run(grid: Grid, out: Path, export: Path | None, *, data: Path | None, without: str | None, fresh: bool) -> None:
    from stepscope.cli.report_progress import watching
    from stepscope.jobs.report.run import Interrupted, ReportJob, parse_stages

    job = ReportJob(
        page=out, words=_words(), data=data, fresh=fresh, without=parse_stages(without) if without is not None else ()
    )
    try:
        with watching() as watcher:
            made = job.run(grid, watcher)
    except Interrupted as interrupted:
        where = f"the page so far is {interrupted.page}" if interrupted.page else f"{out} is as it was"
        say(f"interrupted: {where}; to go on: {interrupted.go_on}")
        raise
    if made.report is None:
        say(f"every stage failed; {out} is as it was")
        raise typer.Exit(Exit.GATE_FAILED)
    folder, page = shlex.quote(str(made.data)), shlex.quote(str(out))
    next_ = (
        f"report {folder} --out {page} --export figures" if export is None else f"explain {folder}/profile --questions"
    )
    if made.num_done:
        _end(made.report, out, export, next_=f"stepscope {next_}")
    else:
        say("every stage failed, and the page says why")
        _end(made.report, out, export, next_="stepscope doctor")
        raise typer.Exit(Exit.GATE_FAILED)


def _end(report: "Report", out: Path, export: Path | None, *, next_: str) -> None:
    show(f"{out}\n")
    if export is not None:
        from stepscope.report.export import export as write_files

        say(f"exported: {len(write_files(report, export))} files in {export}")
    say(f"next: {next_}")


def _words() -> list[str]:
    return ["stepscope", *sys.argv[1:]]

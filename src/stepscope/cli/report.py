"""`stepscope report`: everything about a training step on one page."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from stepscope.cli.options import refuse_settings, takes_grid
from stepscope.cli.output import say, show
from stepscope.errors import Exit, StepscopeError
from stepscope.findings import STAGES
from stepscope.spec import Grid
from stepscope.units import count_noun

if TYPE_CHECKING:
    from stepscope.api.report import ReportPage

Order = Literal["given", "time"]


@takes_grid
def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE…",
            help="Recordings, traces, results or directories of earlier reports to show instead of measuring. Several "
            "runs are compared.",
        ),
    ] = None,
    *,
    grid: Grid,
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="The page to write.")] = Path("report.html"),
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep results here and resume from them.  [default: runs/report/CASE]"),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write all figures and tables as files, for a paper.")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The run that others are compared with.  [default: the first]"),
    ] = None,
    order: Annotated[Order, typer.Option(help="Runs as given, or by the time they were recorded.")] = "given",
    without: Annotated[
        str | None,
        typer.Option(metavar="STAGE,…", help=f"Skip stages: {', '.join(STAGES)}."),
    ] = None,
    optimise: Annotated[
        bool, typer.Option("--optimise", help="Also try to make the step faster, as `stepscope optimise` does.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run all stages again.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file at --out even if stepscope did not write it.")
    ] = False,
    cache: Annotated[bool, typer.Option(help="Cache parsed large files for the next run.")] = True,
) -> None:
    """Show where a step's time and memory go and what would make it faster, on one self-contained HTML page.

    Measures one case with bench, profile, memory, precision and attention, and predicts others with plan. Ctrl-C leaves
    a page of the finished stages, and the same command resumes. With files, nothing is measured.
    """
    if export is not None:
        from stepscope.render.export import check_folder

        check_folder(export)
    if files:
        _refuse_flags({"--data": data, "--without": without, "--optimise": optimise, "--fresh": fresh})
        refuse_settings(grid, "a report on existing files does not measure anything")
        _read(files, out, export, force=force, cache=cache, baseline=baseline, order=order)
    else:
        if baseline is not None or order != "given":
            raise StepscopeError("`--baseline` and `--order` need several runs", hint="stepscope report A B C")
        _run(grid, out, export, data=data, without=without, optimise=optimise, fresh=fresh, force=force)


def _refuse_flags(flags: dict[str, object]) -> None:
    for flag in (flag for flag, given in flags.items() if given not in (None, False)):
        raise StepscopeError(
            f"`{flag}` has no effect here",
            detail="a report on existing files does not measure anything",
            hint=f"remove {flag}",
        )


def _read(files: list[Path], out: Path, export: Path | None, **how: Any) -> None:
    from stepscope.api.report import report as make_report

    page = make_report(files, out, command=_words(), **how)
    next_ = f"{shlex.join(_words())} --export figures" if export is None else "stepscope report --help"
    if len(page.report.runs) > 2 and len(page.report.commands) > 1:
        next_ = page.report.commands[-1].text  # two of the runs in depth
    _end(page, export, next_=next_)


def _run(grid: Grid, out: Path, export: Path | None, *, data: Path | None, without: str | None, **how: Any) -> None:
    from stepscope.api.report import NothingMeasuredError
    from stepscope.api.report import report as make_report
    from stepscope.cli.report_progress import watching
    from stepscope.jobs.report.run import Interrupted, parse_stages

    left_out = parse_stages(without) if without is not None else ()
    try:
        with watching() as watcher:
            page = make_report(grid, out, data=data, without=left_out, progress=watcher, command=_words(), **how)
    except Interrupted as interrupted:
        where = (
            f"stages that finished, if any, are in {interrupted.page}" if interrupted.page else f"{out} was not changed"
        )
        say(f"interrupted: {where}; resume with: {interrupted.go_on}")
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
        say("every stage failed; the page shows why")
        _end(page, export, next_="stepscope doctor")
        raise typer.Exit(Exit.GATE_FAILED)


def _end(page: "ReportPage", export: Path | None, *, next_: str) -> None:
    from stepscope.render.terminal import summarize_report

    for line in summarize_report(page.report):
        say(line)
    show(f"{page.path}\n")
    if export is not None:
        say(f"exported {count_noun(len(page.export(export)), 'file')} to {export}")
    say(f"next: {next_}")


def _words() -> list[str]:
    return ["stepscope", *sys.argv[1:]]

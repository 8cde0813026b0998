"""`stepscope bench`: how long do forward, backward and optimizer take?"""

import shlex
import sys
from pathlib import Path
from typing import Annotated, TypedDict

import typer

from stepscope.cli.options import RetryFlag, refuse_settings, takes_grid
from stepscope.cli.output import say, show, terminal_width
from stepscope.cli.slurm_options import SlurmChoice, refuse_slurm, takes_slurm, watching_jobs
from stepscope.recording.rows.bench import BenchRow, Retry
from stepscope.report.formats import Format
from stepscope.spec import Grid


@takes_grid
@takes_slurm(ranks=False)
def bench(
    *,
    grid: Grid,
    slurm: SlurmChoice | None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results.jsonl is kept and resumed from.")] = Path(
        "runs/bench"
    ),
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Show a results file and run nothing.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the named sizes and run nothing.")] = False,
    format_: Annotated[Format, typer.Option("--format", help="How the table is printed.")] = Format.TEXT,
    detail: Annotated[bool, typer.Option("--detail", help="All statistics, of every phase.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the chart: .png, .svg, .pdf or .html.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a file at --plot that stepscope did not draw.")
    ] = False,
    retry: RetryFlag = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure everything again.")] = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.001, max=1e7, help="End a case that takes longer.")
    ] = None,
) -> None:
    """How long do forward, backward and optimizer take, over sizes, contexts, precisions, attention, compile?

    Every setting from --size on may take several values, comma-separated; the cases are their product. Each case runs
    in its own process and is kept as soon as it is done: run the same command again to go on.
    """
    from stepscope.explain.experiments.bench_tables import bench_figure, bench_table, sizes_table
    from stepscope.report.figures import check_figure, save
    from stepscope.report.tables import render

    width = terminal_width()
    if list_:
        refuse_settings(grid, "--list shows the named sizes")
        refuse_slurm(slurm, "--list shows the named sizes")
        show(render(sizes_table(), format_, detail=detail, width=width))
        return
    if plot is not None:
        check_figure(plot, force=force)
    if from_ is not None:
        refuse_settings(grid, "--from shows a file as it is")
        refuse_slurm(slurm, "--from shows a file as it is")
        from stepscope.recording.rows.results_file import read_rows

        rows, left_out = read_rows(from_)
        for remark in left_out:
            say(remark)
    else:
        options = _Options(folder=out, retry=retry, fresh=fresh, timeout_s=timeout)
        measured = _run_here(grid, options) if slurm is None else _run_on_slurm(grid, slurm, options)
        if measured is None:
            return
        rows = measured
    show(render(bench_table(rows), format_, detail=detail, width=width))
    if plot is not None:
        save(bench_figure(rows), plot)
        say(f"chart: {plot}")
    elif from_ is None:
        say(f"next: stepscope bench --from {shlex.quote(str(out / 'results.jsonl'))} --plot bench.png")


class _Options(TypedDict):
    """How to run, wherever it is."""

    folder: Path
    retry: Retry | None
    fresh: bool
    timeout_s: float | None


def _run_here(grid: Grid, options: _Options) -> tuple[BenchRow, ...]:
    from stepscope.cli.progress import choose_listener
    from stepscope.explain.experiments.bench_tables import outcome_of
    from stepscope.jobs.experiments.sweep import Sweep, Timed

    try:
        with choose_listener(outcome_of) as listener:
            return Sweep(kind=Timed(), command=_command(), **options).run(grid, listener)
    except KeyboardInterrupt:
        say("interrupted: what is done is kept, and the same command goes on")
        raise


def _run_on_slurm(grid: Grid, slurm: SlurmChoice, options: _Options) -> tuple[BenchRow, ...] | None:
    """None where the script was only shown, or rows are still to come and nobody waits."""
    from stepscope.explain.experiments.bench_tables import outcome_of
    from stepscope.jobs.slurm.bench_jobs import SlurmBench

    bench = SlurmBench(command=_command(), resources=slurm.resources, array=slurm.array, **options)
    if slurm.print_only:
        show(bench.script(grid))
        return None
    with watching_jobs(outcome_of) as watcher:
        return bench.run(grid, watcher, wait=slurm.wait)


def _command() -> str:
    return shlex.join(["stepscope", *sys.argv[1:]])

"""`stepscope bench`: time forward, backward and optimizer."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepscope.cli.experiment import (
    ForceFlag,
    FreshFlag,
    FromFlag,
    OutFlag,
    TimeoutFlag,
    read_results,
    typed_command,
    watch_sweep,
)
from stepscope.cli.options import FormatFlag, RetryFlag, refuse_settings, takes_grid
from stepscope.cli.output import say, show, show_tables
from stepscope.cli.slurm_options import SlurmChoice, refuse_slurm, takes_slurm, watching_jobs
from stepscope.errors import StepscopeError
from stepscope.recording.rows.bench import BenchRow
from stepscope.render.formats import Format
from stepscope.spec import Grid

if TYPE_CHECKING:
    from stepscope.api.measure import BenchResults


@takes_grid
@takes_slurm(ranks=False)
def bench(
    *,
    grid: Grid,
    slurm: SlurmChoice | None,
    out: OutFlag = Path("runs/bench"),
    from_: FromFlag = None,
    list_: Annotated[bool, typer.Option("--list", help="List the named model sizes and exit.")] = False,
    format_: FormatFlag = Format.TEXT,
    detail: Annotated[bool, typer.Option("--detail", help="Show all statistics of every phase.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the chart as .png, .svg, .pdf or .html.")
    ] = None,
    force: ForceFlag = False,
    retry: RetryFlag = None,
    fresh: FreshFlag = False,
    timeout: TimeoutFlag = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Predict each case too, as `stepscope plan` does.")
    ] = False,
    skip_oom: Annotated[
        bool, typer.Option("--skip-oom", help="Do not run cases that are predicted not to fit.")
    ] = False,
) -> None:
    """Time forward, backward and optimizer over a grid of settings.

    Every setting from --size on accepts comma-separated values; each combination is one case. A case runs in its own
    process and is saved when it finishes. Run the same command again to resume.
    """
    from stepscope.api.measure import BenchResults
    from stepscope.explain.experiments.bench_tables import sizes_table
    from stepscope.render.figures import check_figure

    if list_:
        refuse_settings(grid, "--list only shows the named sizes")
        refuse_slurm(slurm, "--list only shows the named sizes")
        show_tables([sizes_table()], format_, detail=detail)
        return
    if plot is not None:
        check_figure(plot, force=force)
    results: BenchResults | None
    if from_ is not None:
        refuse_settings(grid, "--from only shows saved results")
        refuse_slurm(slurm, "--from only shows saved results")
        results = BenchResults(read_results(from_, BenchRow))
    elif slurm is not None:
        if predict or skip_oom:
            raise StepscopeError(
                "`--predict` and `--skip-oom` run on this machine; `--slurm` on others", hint="remove one"
            )
        results = _submit(grid, slurm, folder=out, retry=retry, fresh=fresh, timeout_s=timeout)
    else:
        how = {"out": out, "retry": retry, "fresh": fresh, "timeout_s": timeout}
        results = _measure(grid, predict=predict, skip_oom=skip_oom, **how)
    if results is None:
        return
    show_tables([results.table], format_, detail=detail)
    if plot is not None:
        results.figure.save(plot, force=True)
        say(f"chart: {plot}")
    elif from_ is None:
        say(f"next: stepscope bench --from {shlex.quote(str(out / 'results.jsonl'))} --plot bench.png")


def _measure(grid: Grid, **how: Any) -> "BenchResults":
    from stepscope.api.measure import bench as measure
    from stepscope.explain.experiments.bench_tables import outcome_of

    return watch_sweep(lambda listener: measure(grid, progress=listener, command=typed_command(), **how), outcome_of)


def _submit(grid: Grid, slurm: SlurmChoice, **how: Any) -> "BenchResults | None":
    """None if the script was only printed, or if rows are missing and `--no-wait` was given."""
    from stepscope.api.measure import BenchResults
    from stepscope.explain.experiments.bench_tables import outcome_of
    from stepscope.jobs.experiments.sweep import BenchExperiment
    from stepscope.jobs.slurm.sweep_jobs import SlurmSweep

    sweep = SlurmSweep(
        experiment=BenchExperiment(grid=grid),
        resources=slurm.resources,
        array=slurm.array,
        command=typed_command(),
        **how,
    )
    if slurm.print_only:
        show(sweep.script())
        return None
    with watching_jobs(outcome_of) as watcher:
        rows = sweep.run_jobs(watcher, wait=slurm.wait)
    return None if rows is None else BenchResults(rows)

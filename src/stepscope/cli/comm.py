"""`stepscope comm`: what do collectives cost between these ranks?"""

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.experiment import (
    ForceFlag,
    FreshFlag,
    FromFlag,
    OutFlag,
    TimeoutFlag,
    draw_one,
    read_results,
    takes_fields,
    typed_command,
    watch_sweep,
)
from stepscope.cli.options import RetryFlag
from stepscope.cli.output import say, show_tables
from stepscope.jobs.experiments.flag_grids import CommGrid, grid_from_texts, refuse_texts
from stepscope.recording.rows.collective_case import CommRow
from stepscope.render.formats import Format


class CommDrawn(StrEnum):
    """What `--plot-of` accepts: what stands on the y axis."""

    BUS = "bus"
    ALGORITHM = "algorithm"
    TIME = "time"


@takes_fields(CommGrid)
def comm(
    *,
    texts: dict[str, str],
    out: OutFlag = Path("runs/comm"),
    from_: FromFlag = None,
    format_: Annotated[Format, typer.Option("--format", help="How the table is printed.")] = Format.TEXT,
    detail: Annotated[bool, typer.Option("--detail", help="All columns.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw over the message: .png, .svg, .pdf or .html.")
    ] = None,
    plot_of: Annotated[CommDrawn, typer.Option("--plot-of", help="What is drawn.")] = CommDrawn.BUS,
    force: ForceFlag = False,
    retry: RetryFlag = None,
    fresh: FreshFlag = False,
    timeout: TimeoutFlag = 300.0,
) -> None:
    """All-reduce, all-gather, reduce-scatter and broadcast: latency and bandwidth over messages and numbers of ranks.

    Each case is kept as soon as it is done: run the same command again to go on. What is fitted, a latency and a
    bandwidth for each collective, is kept for predictions. Under torchrun the ranks are those it starts.
    """
    from stepscope.explain.experiments import comm_tables as tables
    from stepscope.render.figures import check_figure

    if plot is not None:
        check_figure(plot, force=force)
    rows: tuple[CommRow, ...] | None
    if from_ is not None:
        refuse_texts(texts, "--from shows a file as it is")
        rows = read_results(from_, CommRow)
    else:
        from stepscope.jobs.experiments.comm_sweep import CommExperiment, run_comm
        from stepscope.jobs.experiments.sweep import Sweep

        experiment = CommExperiment(grid=grid_from_texts(CommGrid, texts))
        sweep = Sweep(
            experiment=experiment, folder=out, command=typed_command(), retry=retry, fresh=fresh, timeout_s=timeout
        )
        rows = watch_sweep(
            lambda listener: run_comm(sweep, listener, remark=say), tables.outcome_of_comm, tables.describe_comm
        )
    if rows is None:  # one of several ranks that somebody else started: the first of them speaks
        return
    show_tables([tables.comm_table(rows)], format_, detail=detail)
    figure = partial(tables.comm_figure, rows, plot_of.value)
    other = CommDrawn.BUS if plot_of is CommDrawn.TIME else CommDrawn.TIME
    draw_one("comm", from_ or out / "results.jsonl", plot, figure, other=other)

"""`stepscope comm`: measure collectives between ranks."""

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
from stepscope.cli.options import DetailFlag, FormatFlag, RetryFlag
from stepscope.cli.output import say, show_tables
from stepscope.jobs.experiments.flag_grids import CommGrid, grid_from_texts, refuse_texts
from stepscope.recording.rows.collective_case import CommRow
from stepscope.render.formats import Format


class CommDrawn(StrEnum):
    """The values of `--plot-of`: the quantity on the y axis."""

    BUS = "bus"
    ALGORITHM = "algorithm"
    TIME = "time"


@takes_fields(CommGrid)
def comm(
    *,
    texts: dict[str, str],
    out: OutFlag = Path("runs/comm"),
    from_: FromFlag = None,
    format_: FormatFlag = Format.TEXT,
    detail: DetailFlag = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save a chart over message size as .png, .svg, .pdf or .html.")
    ] = None,
    plot_of: Annotated[CommDrawn, typer.Option("--plot-of", help="Quantity to plot.")] = CommDrawn.BUS,
    force: ForceFlag = False,
    retry: RetryFlag = None,
    fresh: FreshFlag = False,
    timeout: TimeoutFlag = 300.0,
) -> None:
    """Measure the latency and bandwidth of collectives.

    Runs all-reduce, all-gather, reduce-scatter and broadcast over message sizes and numbers of ranks. A case is saved
    when it finishes. Run the same command again to resume. The latency and bandwidth fitted for each collective are
    saved for predictions. Under torchrun, the ranks are the processes it starts.
    """
    from stepscope.explain.experiments import comm_tables as tables
    from stepscope.render.figures import check_figure

    if plot is not None:
        check_figure(plot, force=force)
    rows: tuple[CommRow, ...] | None
    if from_ is not None:
        refuse_texts(texts, "--from only shows saved results")
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
    if rows is None:  # under torchrun, only rank 0 prints
        return
    show_tables([tables.comm_table(rows)], format_, detail=detail)
    figure = partial(tables.comm_figure, rows, plot_of.value)
    other = CommDrawn.BUS if plot_of is CommDrawn.TIME else CommDrawn.TIME
    draw_one("comm", from_ or out / "results.jsonl", plot, figure, other=other)

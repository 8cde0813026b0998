"""`stepscope attention`: compare attention implementations over head dimensions and sequence lengths."""

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
from stepscope.cli.output import show_tables
from stepscope.jobs.experiments.flag_grids import AttentionGrid, grid_from_texts, refuse_texts
from stepscope.recording.rows.attention_case import AttentionRow
from stepscope.render.formats import Format


class AttentionPart(StrEnum):
    """The values of `--table`: a single table, or one with all columns."""

    TIME = "time"
    MEMORY = "memory"
    ALL = "all"


class AttentionDrawn(StrEnum):
    """The values of `--plot-of`: the quantity on the y axis."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"
    FORWARD_RATE = "forward-rate"
    BACKWARD_RATE = "backward-rate"
    BEFORE_BACKWARD = "before-backward"
    PEAK = "peak"


@takes_fields(AttentionGrid)
def attention(
    *,
    texts: dict[str, str],
    peer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Baseline of the ratios.  [default: SDPA's fastest backend]")
    ] = None,
    out: OutFlag = Path("runs/attention"),
    from_: FromFlag = None,
    table: Annotated[
        AttentionPart | None, typer.Option("--table", help="Show only this table.  [default for csv and json: all]")
    ] = None,
    format_: FormatFlag = Format.TEXT,
    detail: DetailFlag = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save a chart over sequence length as .png, .svg, .pdf or .html."),
    ] = None,
    plot_of: Annotated[AttentionDrawn, typer.Option("--plot-of", help="Quantity to plot.")] = AttentionDrawn.BOTH,
    force: ForceFlag = False,
    retry: RetryFlag = None,
    fresh: FreshFlag = False,
    timeout: TimeoutFlag = None,
) -> None:
    """Compare the time and memory of attention implementations.

    Runs naive, compiled, SDPA and flash attention, forward and backward, over head dimensions and sequence lengths. The
    first four options accept comma-separated values; each combination is one case. Each implementation runs in its own
    process, and a case is saved when it finishes. Run the same command again to resume.
    """
    from stepscope.explain.experiments import attention_tables as tables
    from stepscope.render.figures import check_figure

    peer_named = tables.parse_peer(peer)
    if plot is not None:
        check_figure(plot, force=force)
    if from_ is not None:
        refuse_texts(texts, "--from only shows saved results")
        rows = read_results(from_, AttentionRow)
    else:
        from stepscope.jobs.experiments.attention_sweep import AttentionExperiment
        from stepscope.jobs.experiments.sweep import Sweep

        experiment = AttentionExperiment(grid=grid_from_texts(AttentionGrid, texts))
        sweep = Sweep(
            experiment=experiment, folder=out, command=typed_command(), retry=retry, fresh=fresh, timeout_s=timeout
        )
        rows = watch_sweep(sweep.run, tables.outcome_of, tables.describe_attention)
    chosen = table or (AttentionPart.ALL if format_ in (Format.CSV, Format.JSON) else None)
    show_tables(
        tables.make_tables(rows, part=chosen.value if chosen else None, peer=peer_named), format_, detail=detail
    )
    rate, peak = AttentionDrawn.FORWARD_RATE, AttentionDrawn.PEAK
    figure, other = partial(tables.attention_figure, rows, plot_of.value), rate if plot_of is peak else peak
    draw_one("attention", from_ or out / "results.jsonl", plot, figure, other=other)

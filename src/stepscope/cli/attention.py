"""`stepscope attention`: what does attention cost, over head sizes and lengths, however it is computed?"""

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
from stepscope.cli.output import show_tables
from stepscope.jobs.experiments.flag_grids import AttentionGrid, grid_from_texts, refuse_texts
from stepscope.recording.rows.attention_case import AttentionRow
from stepscope.render.formats import Format


class AttentionPart(StrEnum):
    """What `--table` accepts: one table alone, or all columns in one."""

    TIME = "time"
    MEMORY = "memory"
    ALL = "all"


class AttentionDrawn(StrEnum):
    """What `--plot-of` accepts: what stands on the y axis."""

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
        str | None, typer.Option(metavar="NAME", help="Ratios are to this one; else to SDPA's fastest backend.")
    ] = None,
    out: OutFlag = Path("runs/attention"),
    from_: FromFlag = None,
    table: Annotated[
        AttentionPart | None, typer.Option("--table", help="One table alone; csv and json have all columns in one.")
    ] = None,
    format_: Annotated[Format, typer.Option("--format", help="How tables are printed.")] = Format.TEXT,
    detail: Annotated[bool, typer.Option("--detail", help="All columns.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw over length: .png, .svg, .pdf or .html.")
    ] = None,
    plot_of: Annotated[AttentionDrawn, typer.Option("--plot-of", help="What is drawn.")] = AttentionDrawn.BOTH,
    force: ForceFlag = False,
    retry: RetryFlag = None,
    fresh: FreshFlag = False,
    timeout: TimeoutFlag = None,
) -> None:
    """Naive, compiled, SDPA and flash attention: time and memory over head sizes and lengths, forward and backward.

    The first four settings may take several values, comma-separated; the cases are their product. Each implementation
    runs in its own process and each case is kept as soon as it is done: run the same command again to go on.
    """
    from stepscope.explain.experiments import attention_tables as tables
    from stepscope.render.figures import check_figure

    peer_named = tables.parse_peer(peer)
    if plot is not None:
        check_figure(plot, force=force)
    if from_ is not None:
        refuse_texts(texts, "--from shows a file as it is")
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

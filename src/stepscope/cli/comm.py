"""`stepscope comm`: what do collectives cost between these ranks?"""

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from stepscope.cli.options import RetryFlag
from stepscope.cli.output import say, show, terminal_width
from stepscope.recording.rows.links import COLLECTIVES
from stepscope.report.formats import Format


class Drawn(StrEnum):
    """What `--plot-of` accepts: what stands on the y axis."""

    BUS = "bus"
    ALGORITHM = "algorithm"
    TIME = "time"


def _setting(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text)


def comm(
    *,
    collective: Annotated[str | None, _setting("NAME,…", f"Of {', '.join(COLLECTIVES)}.  [default: all]")] = None,
    sizes: Annotated[str | None, _setting("SIZE,…", "Whole messages, such as 1MB,1GB (decimal).")] = None,
    ranks: Annotated[str | None, _setting("N,…", "How many processes.  [default: 2,4 on a CPU]")] = None,
    backend: Annotated[str | None, _setting("gloo|nccl", "gloo on a CPU, nccl on GPUs.")] = None,
    device: Annotated[
        str | None, _setting("auto|cpu|cuda", "Where the tensors are; on CUDA rank r takes GPU r.")
    ] = None,
    dtype: Annotated[str | None, _setting("fp32|bf16|fp16,…", "Of the elements.  [default: fp32]")] = None,
    repetitions: Annotated[str | None, _setting("N", "At most so many.  [default: 20]")] = None,
    seconds: Annotated[str | None, _setting("S", "At most so long, each case: 1 on GPUs, 0.2 on a CPU.")] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results.jsonl is kept and resumed from.")] = Path(
        "runs/comm"
    ),
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Show a results file and run nothing.")
    ] = None,
    format_: Annotated[Format, typer.Option("--format", help="How the table is printed.")] = Format.TEXT,
    detail: Annotated[bool, typer.Option("--detail", help="All columns.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw over the message: .png, .svg, .pdf or .html.")
    ] = None,
    plot_of: Annotated[Drawn, typer.Option("--plot-of", help="What is drawn.")] = Drawn.BUS,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a file at --plot that stepscope did not draw.")
    ] = False,
    retry: RetryFlag = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure everything again.")] = False,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.001, max=1e7, help="End a case that takes longer.")
    ] = 300.0,
) -> None:
    """All-reduce, all-gather, reduce-scatter and broadcast: latency and bandwidth over messages and numbers of ranks.

    Each case is kept as soon as it is done: run the same command again to go on. What is fitted, a latency and a
    bandwidth for each collective, is kept for predictions. Under torchrun the ranks are those it starts.
    """
    from stepscope.explain.experiments.comm_figure import comm_figure
    from stepscope.explain.experiments.comm_tables import comm_table
    from stepscope.jobs.experiments.comm_grid import grid_from_texts, refuse_texts
    from stepscope.recording.rows.comm import CommRow
    from stepscope.report.figures import check_figure, save
    from stepscope.report.tables import render

    flags = {
        "collective": collective,
        "sizes": sizes,
        "ranks": ranks,
        "backend": backend,
        "device": device,
        "dtype": dtype,
        "repetitions": repetitions,
        "seconds": seconds,
    }
    texts = {name: text for name, text in flags.items() if text is not None}
    if plot is not None:
        check_figure(plot, force=force)
    rows: tuple[CommRow, ...] | None
    if from_ is not None:
        refuse_texts(texts, "--from shows a file as it is")
        from stepscope.recording.rows.results_file import read_rows_of

        rows, left_out = read_rows_of(from_, CommRow)
        for remark in left_out:
            say(remark)
    else:
        from stepscope.cli.progress import choose_listener
        from stepscope.explain.experiments.comm_tables import describe_comm, outcome_of_comm
        from stepscope.jobs.experiments.comm_sweep import CommSweep

        command = shlex.join(["stepscope", *sys.argv[1:]])
        sweep = CommSweep(folder=out, command=command, retry=retry, fresh=fresh, timeout_s=timeout, remark=say)
        grid = grid_from_texts(texts)
        try:
            with choose_listener(outcome_of_comm, describe_comm) as listener:
                rows = sweep.run(grid, listener)
        except KeyboardInterrupt:
            say("interrupted: what is done is kept, and the same command goes on")
            raise
    if rows is None:  # one of several ranks that somebody else started: the first of them speaks
        return
    show(render(comm_table(rows), format_, detail=detail, width=terminal_width()))
    kept = shlex.quote(str(from_ or out / "results.jsonl"))
    if plot is not None:
        save(comm_figure(rows, plot_of.value), plot)
        say(f"picture: {plot}")
        other = Drawn.TIME if plot_of is not Drawn.TIME else Drawn.BUS
        say(f"next: stepscope comm --from {kept} --plot {other.value}.png --plot-of {other.value}")
    else:
        say(f"next: stepscope comm --from {kept} --plot comm.png")

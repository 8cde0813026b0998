"""`stepscope attention`: what does attention cost, over head sizes and lengths, however it is computed?"""

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from stepscope.cli.options import RetryFlag
from stepscope.cli.output import say, show_tables
from stepscope.recording.rows.attention import IMPLEMENTATIONS
from stepscope.report.formats import Format


class Part(StrEnum):
    """What `--table` accepts: one table alone, or all columns in one."""

    TIME = "time"
    MEMORY = "memory"
    ALL = "all"


class Drawn(StrEnum):
    """What `--plot-of` accepts: what stands on the y axis."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"
    FORWARD_RATE = "forward-rate"
    BACKWARD_RATE = "backward-rate"
    BEFORE_BACKWARD = "before-backward"
    PEAK = "peak"


def _setting(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text)


def attention(
    *,
    implementation: Annotated[str | None, _setting("NAME,…", f"Of {', '.join(IMPLEMENTATIONS)}.")] = None,
    head_dim: Annotated[str | None, _setting("N,…", "Width of a head.")] = None,
    length: Annotated[str | None, _setting("N,…", "Length of the sequences.")] = None,
    precision: Annotated[str | None, _setting("fp32|tf32|bf16|fp16,…", "bf16 on a GPU, fp32 on a CPU.")] = None,
    batch: Annotated[str | None, _setting("N", "Sequences.  [default: 8]")] = None,
    heads: Annotated[str | None, _setting("N", "Heads.  [default: 1]")] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--no-causal", help="Causal unless told otherwise.")] = None,
    device: Annotated[str | None, _setting("auto|cpu|cuda|cuda:N", "Where to run.")] = None,
    seed: Annotated[str | None, _setting("N", "Seed of the inputs.")] = None,
    repetitions: Annotated[str | None, _setting("N", "At most so many.  [default: 100]")] = None,
    seconds: Annotated[str | None, _setting("S", "At most so long, each timing: 1 on a GPU, 0.1 on a CPU.")] = None,
    memory_limit: Annotated[str | None, _setting("SIZE", "Cap on memory, such as 24GB.")] = None,
    peer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Ratios are to this one; else to SDPA's fastest backend.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results.jsonl is kept and resumed from.")] = Path(
        "runs/attention"
    ),
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Show a results file and run nothing.")
    ] = None,
    table: Annotated[
        Part | None, typer.Option("--table", help="One table alone; csv and json have all columns in one.")
    ] = None,
    format_: Annotated[Format, typer.Option("--format", help="How tables are printed.")] = Format.TEXT,
    detail: Annotated[bool, typer.Option("--detail", help="All columns.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw over length: .png, .svg, .pdf or .html.")
    ] = None,
    plot_of: Annotated[Drawn, typer.Option("--plot-of", help="What is drawn.")] = Drawn.BOTH,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a file at --plot that stepscope did not draw.")
    ] = False,
    retry: RetryFlag = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure everything again.")] = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.001, max=1e7, help="End a case that takes longer.")
    ] = None,
) -> None:
    """Naive, compiled, SDPA and flash attention: time and memory over head sizes and lengths, forward and backward.

    The first four settings may take several values, comma-separated; the cases are their product. Each implementation
    runs in its own process and each case is kept as soon as it is done: run the same command again to go on.
    """
    from stepscope.explain.experiments.attention_figure import attention_figure
    from stepscope.explain.experiments.attention_tables import describe_attention, make_tables, outcome_of, parse_peer
    from stepscope.jobs.experiments.attention_grid import grid_from_texts, refuse_texts
    from stepscope.report.figures import check_figure, save

    flags = {
        "implementation": implementation,
        "head_dim": head_dim,
        "length": length,
        "precision": precision,
        "batch": batch,
        "heads": heads,
        "causal": None if causal is None else "yes" if causal else "no",
        "device": device,
        "seed": seed,
        "repetitions": repetitions,
        "seconds": seconds,
        "memory_limit": memory_limit,
    }
    texts = {name: text for name, text in flags.items() if text is not None}
    named = parse_peer(peer)
    if plot is not None:
        check_figure(plot, force=force)
    if from_ is not None:
        refuse_texts(texts, "--from shows a file as it is")
        from stepscope.recording.rows.attention import AttentionRow
        from stepscope.recording.rows.results_file import read_rows_of

        rows, left_out = read_rows_of(from_, AttentionRow)
        for remark in left_out:
            say(remark)
    else:
        from stepscope.cli.progress import choose_listener
        from stepscope.jobs.experiments.attention_sweep import AttentionSweep

        command = shlex.join(["stepscope", *sys.argv[1:]])
        sweep = AttentionSweep(folder=out, command=command, retry=retry, fresh=fresh, timeout_s=timeout)
        grid = grid_from_texts(texts)
        try:
            with choose_listener(outcome_of, describe_attention) as listener:
                rows = sweep.run(grid, listener)
        except KeyboardInterrupt:
            say("interrupted: what is done is kept, and the same command goes on")
            raise
    chosen = table or (Part.ALL if format_ in (Format.CSV, Format.JSON) else None)
    tables = make_tables(rows, part=chosen.value if chosen else None, peer=named)
    show_tables(tables, format_, detail=detail)
    kept = shlex.quote(str(from_ or out / "results.jsonl"))
    other = Drawn.FORWARD_RATE if plot_of is Drawn.PEAK else Drawn.PEAK
    if plot is not None:
        save(attention_figure(rows, plot_of.value), plot)
        say(f"picture: {plot}")
        say(f"next: stepscope attention --from {kept} --plot {other.value}.png --plot-of {other.value}")
    else:
        say(f"next: stepscope attention --from {kept} --plot attention.png")

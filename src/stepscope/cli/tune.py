"""`stepscope tune`: find the fastest tiles of the Triton attention kernels on this GPU."""

from typing import Annotated

import typer

from stepscope.cli.options import FormatFlag
from stepscope.cli.output import say, show, showing_stages, terminal_width
from stepscope.render.formats import Format
from stepscope.spec import Precision

MOST_HEAD_DIM = 256


def tune(
    *,
    head_dim: Annotated[int, typer.Option(metavar="N", min=1, max=MOST_HEAD_DIM, help="Head dimension.")] = 128,
    precision: Annotated[
        Precision, typer.Option(help="Precision of q, k and v; tf32 is fp32 with a single tensor core pass.")
    ] = "bf16",
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="Use a causal mask.")] = True,
    length: Annotated[int, typer.Option(metavar="N", min=128, help="Sequence length to measure at.")] = 4096,
    format_: FormatFlag = Format.TEXT,
) -> None:
    """Find the fastest Triton attention tiles for this GPU.

    Measures all candidates and saves the fastest, which takes about a minute. Without tuning, the kernels use a
    built-in table.
    """
    from stepscope.jobs.tune import tune_tiles
    from stepscope.render.tables import render

    with showing_stages() as on_stage:
        table, path = tune_tiles(
            head_dim=head_dim, precision=precision, causal=causal, length=length, on_trial=on_stage
        )
    show(render(table, format_, width=terminal_width()))
    say(f"saved: {path}")
    shape = f"--head-dim {head_dim} --precision {precision}" + ("" if causal else " --no-causal")
    say(f"next: stepscope attention --implementation triton {shape} --fresh")

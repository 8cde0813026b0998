"""`stepscope tune`: which tiles of the Triton attention kernels are fastest on this GPU?"""

from typing import Annotated

import typer

from stepscope.cli.output import say, show, showing_stages, terminal_width
from stepscope.render.formats import Format
from stepscope.spec import Precision

MOST_HEAD_DIM = 256


def tune(
    *,
    head_dim: Annotated[int, typer.Option(metavar="N", min=1, max=MOST_HEAD_DIM, help="Width of a head.")] = 128,
    precision: Annotated[Precision, typer.Option(help="Of q, k and v; tf32 is fp32 in one product.")] = "bf16",
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="The mask.")] = True,
    length: Annotated[int, typer.Option(metavar="N", min=128, help="Length to measure at.")] = 4096,
    format_: Annotated[Format, typer.Option("--format", help="How the table is printed.")] = Format.TEXT,
) -> None:
    """Measure the candidate tiles of the Triton attention kernels and keep the fastest for this GPU.

    Nothing is tuned unless you ask: without it, a built-in table is used. Takes a minute.
    """
    from stepscope.jobs.tune import tune_tiles
    from stepscope.render.tables import render

    with showing_stages() as on_stage:
        table, path = tune_tiles(
            head_dim=head_dim, precision=precision, causal=causal, length=length, on_trial=on_stage
        )
    show(render(table, format_, width=terminal_width()))
    say(f"kept: {path}")
    shape = f"--head-dim {head_dim} --precision {precision}" + ("" if causal else " --no-causal")
    say(f"next: stepscope attention --implementation triton {shape} --fresh")

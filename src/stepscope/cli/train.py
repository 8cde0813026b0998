"""`stepscope train`: train the built-in model on one or more ranks, and measure what communication costs."""

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli.experiment import ForceFlag
from stepscope.cli.options import DetailFlag, FormatFlag, refuse_settings, takes_workload
from stepscope.cli.output import if_interrupted, say, show_tables
from stepscope.cli.slurm_options import SlurmChoice, refuse_slurm, run_on_slurm, takes_slurm
from stepscope.errors import Exit
from stepscope.render.formats import Format
from stepscope.spec import Grid

if TYPE_CHECKING:
    from stepscope.jobs.train import TrainJob, TrainResult


class Way(StrEnum):
    """The values of `--strategy`."""

    SINGLE = "single"
    NAIVE = "naive"
    FLAT = "flat"
    OVERLAP = "overlap"
    BUCKETED = "bucketed"
    FSDP = "fsdp"


class Backend(StrEnum):
    AUTO = "auto"
    GLOO = "gloo"
    NCCL = "nccl"


@takes_workload
@takes_slurm(ranks=True)
def train(
    *,
    grid: Grid,
    slurm: SlurmChoice | None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Number of processes that share the batch.  [default: 1]")
    ] = None,
    strategy: Annotated[
        Way | None, typer.Option(help="Data-parallel strategy.  [default: single, or bucketed with several ranks]")
    ] = None,
    bucket_mb: Annotated[float, typer.Option(metavar="MB", help="Gradient bucket size.")] = 25.0,
    shard_optimizer: Annotated[
        bool, typer.Option("--shard-optimizer", help="Shard the optimizer state across ranks.")
    ] = False,
    steps: Annotated[int, typer.Option(metavar="N", help="Total steps, including those of a resumed run.")] = 100,
    lr: Annotated[float, typer.Option(metavar="RATE", help="Learning rate.")] = 1e-3,
    lr_warmup: Annotated[int, typer.Option(metavar="N", help="Learning rate warm-up steps.")] = 0,
    accumulate: Annotated[int, typer.Option(hidden=True, help="Former name of --grad-accumulation.")] = 1,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text file to train on, read as bytes.  [default: synthetic tokens]"),
    ] = None,
    save_every: Annotated[int, typer.Option(metavar="N", help="Steps between checkpoints.")] = 50,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Save the log and checkpoints here, and resume from them.")
    ] = Path("runs/train"),
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Show a saved run without training.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the run in --out and start over.")] = False,
    stop_on_nan: Annotated[
        bool, typer.Option("--stop-on-nan", help="Stop if the loss is NaN or infinite, and exit with 1.")
    ] = False,
    backend: Annotated[Backend, typer.Option(help="Communication backend.")] = Backend.AUTO,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, max=1e6, help="Time limit per collective.")
    ] = 300.0,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show the memory of each rank, measured and predicted.")
    ] = False,
    format_: FormatFlag = Format.TEXT,
    detail: DetailFlag = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save a chart of the loss as .png, .svg, .pdf or .html.")
    ] = None,
    force: ForceFlag = False,
) -> None:
    """Train the built-in model on one or more ranks.

    Shows loss, tokens per second, MFU and exposed communication. --batch is the global batch, over all ranks. Run the
    same command again to resume, even with a different number of ranks or another strategy. Under torchrun, each
    process is a rank.
    """
    from stepscope.explain.experiments.train_tables import loss_figure, memory_table, say_not_finite, train_table
    from stepscope.jobs.train import TrainJob, build_training, read_result
    from stepscope.render.figures import check_figure, save

    if plot is not None:
        check_figure(plot, force=force)
    result: TrainResult | None
    if from_ is not None:
        refuse_settings(grid, "--from only shows a saved run")
        refuse_slurm(slurm, "--from only shows a saved run")
        result = read_result(from_)
    else:
        training = build_training(
            grid,
            ranks=ranks,
            strategy=strategy.value if strategy else None,
            bucket_mb=bucket_mb,
            shard_optimizer=shard_optimizer,
            steps=steps,
            learning_rate=lr,
            warmup_steps=lr_warmup,
            accumulate=accumulate,
            data=str(data) if data else "",
            save_every=save_every,
        )
        # A job is found again by its request, which includes this command: with or without --no-wait.
        command = shlex.join(["stepscope", *(word for word in sys.argv[1:] if word != "--no-wait")])
        job = TrainJob(
            training=training,
            folder=out,
            command=command,
            backend=backend.value,
            fresh=fresh,
            stop_on_nan=stop_on_nan,
            timeout_s=timeout,
        )
        result = _run(job) if slurm is None else _submit(job, slurm)
    if result is None:  # not rank 0, or nothing ran
        return
    table = memory_table(result.run, result.memory) if memory else train_table(result.run, result.rows)
    show_tables([table], format_, detail=detail)
    if plot is not None:
        save(loss_figure(result.run, result.rows), plot)
        say(f"chart: {plot}")
    else:
        say(f"next: stepscope train --from {shlex.quote(str(from_ or out))} --plot loss.png")
    if stop_on_nan and (diverged := say_not_finite(result.rows)):
        say(f"--stop-on-nan: {diverged[0]}")
        raise typer.Exit(Exit.GATE_FAILED)


def _run(job: "TrainJob") -> "TrainResult | None":
    from stepscope.cli.progress import watching_training
    from stepscope.jobs.train import is_rank

    left = "run the same command again to resume from the last checkpoint"
    with if_interrupted(left), watching_training(job.training.steps) as on_message:
        return job.run_here(on_message) if is_rank() else job.run(on_message)


def _submit(job: "TrainJob", slurm: SlurmChoice) -> "TrainResult | None":
    from stepscope.jobs.slurm.rank_jobs import SlurmRanks
    from stepscope.jobs.train import ENTRY, read_result

    if not slurm.print_only:
        job.claim_folder()
    if not job.is_done:
        ranks = SlurmRanks(
            folder=job.folder,
            command=job.command,
            resources=slurm.resources,
            name="stepscope-train",
            entry=ENTRY,
            request=job.as_request(),
            ranks=job.training.ranks,
        )
        if not run_on_slurm(slurm, ranks, job.prepare):
            return None
    return read_result(job.folder)

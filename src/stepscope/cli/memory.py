"""`stepscope memory`: where the memory of a step goes, and when it peaks."""

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from stepscope.api.display import MemoryPart
from stepscope.cli.experiment import ForceFlag, FromFlag, TimeoutFlag, read_results, typed_command, watch_sweep
from stepscope.cli.options import RetryFlag, refuse_settings, takes_grid
from stepscope.cli.output import say, show_tables
from stepscope.cli.run_output import ByFlag, PlotFlag, ShareFlag, StepFlag, TopFlag, check_view, draw, show_run
from stepscope.errors import StepscopeError
from stepscope.recording.rows.memory_summary import MemoryRow
from stepscope.render.formats import Format
from stepscope.spec import Grid


@takes_grid
def memory(
    *,
    grid: Grid,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Save results.jsonl and recordings here.")] = Path(
        "runs/memory"
    ),
    from_: FromFlag = None,
    table: Annotated[
        MemoryPart | None, typer.Option("--table", help="Show only this table; needs a single case.")
    ] = None,
    top: TopFlag = 20,
    questions: Annotated[bool, typer.Option("--questions", help="Answer common questions about memory.")] = False,
    format_: Annotated[
        Format, typer.Option("--format", help="Output format; for a single case, json prints the whole document.")
    ] = Format.TEXT,
    detail: ShareFlag = None,
    plot: PlotFlag = None,
    by: ByFlag = "category",
    step: StepFlag = "last",
    checkpoint_study: Annotated[
        bool, typer.Option("--checkpoint-study", help="Compare activation checkpointing settings.")
    ] = False,
    snapshots: Annotated[
        bool, typer.Option("--snapshots", help="Keep the snapshot of every case; a single case always keeps it.")
    ] = False,
    force: ForceFlag = False,
    retry: RetryFlag = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore saved results and record again.")] = False,
    timeout: TimeoutFlag = None,
) -> None:
    """Show where memory goes and when it peaks: parameters, gradients, optimizer state, activations, temporaries.

    Records every allocation of --steps steps, from the first step on. A single case is shown in full; several cases
    (comma-separated settings) as a table of peaks. Run the same command again to resume.
    """
    from stepscope.api.measure import MemoryResults
    from stepscope.api.measure import memory as record_memory
    from stepscope.render.figures import check_figure

    check_view(questions=questions, part=table, step=step, detail=detail)
    if plot is not None:
        check_figure(plot, force=force)
    alone = "--questions" if questions else f"--table {table}" if table not in (None, "saved") else ""
    if alone and (checkpoint_study or len(grid.cases()) > 1):
        raise StepscopeError(f"`{alone}` needs a single case; got several", hint=f"leave out {alone}")
    if from_ is not None:
        refuse_settings(grid, "--from shows saved results and runs nothing")
        results = MemoryResults(read_results(from_, MemoryRow), from_.parent)
    else:
        from stepscope.explain.memory.grid import outcome_of

        record = partial(
            record_memory,
            grid,
            checkpoint_study=checkpoint_study,
            snapshots=snapshots,
            out=out,
            retry=retry,
            fresh=fresh,
            timeout_s=timeout,
            command=typed_command(),
        )
        results = watch_sweep(lambda listener: record(progress=listener), outcome_of)
    if len(results) == 1 and results[0].status == "ok" and not checkpoint_study:
        run = results.run()
        show_run(run, format_, part=table, top=top, questions=questions, detail=detail)
        if plot is not None:
            draw(run, plot, by=by, step=step, detail=detail, force=force)
        say(f"recording: {run.files[0]}")
        next_ = f"stepscope explain {shlex.quote(str(run.files[0]))} --questions"
    else:
        if alone and len(results) > 1:
            raise StepscopeError(f"`{alone}` needs a single case; got {len(results)}", hint=f"leave out {alone}")
        if alone:
            say(f"nothing to show for `{alone}`: the case failed")
        show_tables(results.compare_saved() if table == "saved" else results.tables, format_, detail=detail == "yes")
        if plot is not None:
            results.figure.save(plot, force=True)
            say(f"chart: {plot}")
        next_ = f"stepscope memory --from {shlex.quote(str(from_ or out / 'results.jsonl'))} --plot peaks.png"
    say(f"next: {next_}")

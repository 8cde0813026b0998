"""`stepscope memory`: where does the memory of a step go, and when is it most?"""

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from stepscope.api.display import MemoryPart
from stepscope.cli.experiment import ForceFlag, FromFlag, TimeoutFlag, read_results, typed_command, watch_sweep
from stepscope.cli.options import RetryFlag, refuse_settings, takes_grid
from stepscope.cli.output import say, show_tables
from stepscope.cli.run_output import Stacked, check_view, draw, show_run
from stepscope.errors import StepscopeError
from stepscope.recording.rows.memory_summary import MemoryRow
from stepscope.render.formats import Format
from stepscope.spec import Grid


@takes_grid
def memory(
    *,
    grid: Grid,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results.jsonl and recordings are kept.")] = Path(
        "runs/memory"
    ),
    from_: FromFlag = None,
    table: Annotated[MemoryPart | None, typer.Option("--table", help="One part alone, of one case.")] = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Rows of a table that can be long.")] = 20,
    questions: Annotated[bool, typer.Option("--questions", help="The questions people ask about memory.")] = False,
    format_: Annotated[
        Format, typer.Option("--format", help="How it is printed; json of one case is the whole document.")
    ] = Format.TEXT,
    detail: Annotated[
        str | None,
        typer.Option(
            "--detail", metavar="[SHARE]", help="All columns; 10%: the largest tenth of pieces in the picture."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw memory over time: .html (interactive), .png, .svg or .pdf."),
    ] = None,
    by: Annotated[Stacked, typer.Option("--by", help="What the picture is stacked by.")] = "category",
    step: Annotated[str, typer.Option("--step", metavar="last|all|N", help="The step that is drawn.")] = "last",
    checkpoint_study: Annotated[
        bool, typer.Option("--checkpoint-study", help="Peak and time over ways to recompute activations.")
    ] = False,
    snapshots: Annotated[
        bool, typer.Option("--snapshots", help="Of several cases keep the snapshots too; of one it is kept anyway.")
    ] = False,
    force: ForceFlag = False,
    retry: RetryFlag = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Record everything again.")] = False,
    timeout: TimeoutFlag = None,
) -> None:
    """Where does the memory go, and when is it most: parameters, gradients, optimizer state, activations, temporaries?

    Records every allocation of --steps steps, from the first after the model was built. One case is shown in full;
    several, comma-separated settings, as a table of peaks. Run the same command again to go on.
    """
    from stepscope.api.measure import MemoryResults
    from stepscope.api.measure import memory as record_memory
    from stepscope.render.figures import check_figure

    check_view(questions=questions, part=table, step=step, detail=detail)
    if plot is not None:
        check_figure(plot, force=force)
    alone = "--questions" if questions else f"--table {table}" if table not in (None, "saved") else ""
    if alone and (checkpoint_study or len(grid.cases()) > 1):
        raise StepscopeError(f"`{alone}` needs a single case; got several", hint="leave it out")
    if from_ is not None:
        refuse_settings(grid, "--from shows a file as it is")
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
            raise StepscopeError(f"`{alone}` needs a single case; got {len(results)}", hint="leave it out")
        if alone:
            say(f"nothing to show for `{alone}`: the case failed")
        show_tables(results.compare_saved() if table == "saved" else results.tables, format_, detail=detail == "yes")
        if plot is not None:
            results.figure.save(plot, force=True)
            say(f"picture: {plot}")
        next_ = f"stepscope memory --from {shlex.quote(str(from_ or out / 'results.jsonl'))} --plot peaks.png"
    say(f"next: {next_}")

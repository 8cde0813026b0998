"""`stepscope memory`: where does the memory of a step go, and when is it most?"""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.experiment import ForceFlag, FromFlag, TimeoutFlag, read_results, typed_command, watch_sweep
from stepscope.cli.memory_output import MemoryPart, Stacked, check_view, draw, print_profile
from stepscope.cli.options import RetryFlag, refuse_settings, takes_grid
from stepscope.cli.output import say, show_tables
from stepscope.errors import StepscopeError
from stepscope.report.formats import Format
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
    by: Annotated[Stacked, typer.Option("--by", help="What the picture is stacked by.")] = Stacked.CATEGORY,
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
    from stepscope.explain.memory.grid import grid_figure, outcome_of
    from stepscope.jobs.experiments import memory_view
    from stepscope.jobs.experiments.memory_sweep import recording_folder
    from stepscope.report.figures import check_figure, save

    check_view(questions=questions, part=table, step=step, detail=detail)
    if plot is not None:
        check_figure(plot, force=force)
    alone = "--questions" if questions else f"--table {table}" if table not in (None, MemoryPart.SAVED) else ""
    if alone and (checkpoint_study or len(grid.cases()) > 1):
        raise StepscopeError(f"`{alone}` needs a single case; got several", hint="leave it out")
    if from_ is not None:
        refuse_settings(grid, "--from shows a file as it is")
        from stepscope.recording.rows.memory_summary import MemoryRow

        out = from_.parent
        rows = read_results(from_, MemoryRow)
    else:
        from stepscope.jobs.experiments.memory_sweep import MemoryExperiment, choose_grid
        from stepscope.jobs.experiments.sweep import Sweep

        experiment = MemoryExperiment(grid=choose_grid(grid, study=checkpoint_study), snapshots=snapshots)
        sweep = Sweep(
            experiment=experiment, folder=out, command=typed_command(), retry=retry, fresh=fresh, timeout_s=timeout
        )
        rows = watch_sweep(sweep.run, outcome_of)
    if len(rows) == 1 and rows[0].status == "ok" and not checkpoint_study:
        profile = memory_view.load_profile(out, rows[0])
        print_profile(profile, format_, part=table, top=top, questions=questions, detail=detail)
        if plot is not None:
            draw(profile, plot, by=by.value, step=step, detail=detail, force=force)
        say(f"recording: {recording_folder(out, rows[0].key)}")
        next_ = f"stepscope explain {shlex.quote(str(recording_folder(out, rows[0].key)))} --questions"
    else:
        if alone and len(rows) > 1:
            raise StepscopeError(f"`{alone}` needs a single case; got {len(rows)}", hint="leave it out")
        if alone:
            say(f"nothing to show for `{alone}`: the case failed")
        chosen = memory_view.show_saved(out, rows) if table == MemoryPart.SAVED else None
        tables = chosen or memory_view.show_rows(rows, study=checkpoint_study)
        show_tables(tables, format_, detail=detail == "yes")
        if plot is not None:
            save(grid_figure(rows), plot)
            say(f"picture: {plot}")
        next_ = f"stepscope memory --from {shlex.quote(str(from_ or out / 'results.jsonl'))} --plot peaks.png"
    say(f"next: {next_}")

"""`stepscope plan`: whether a step fits, how fast it will be and what to change, without a GPU."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepscope.api.display import PlanPart
from stepscope.cli.experiment import ForceFlag, typed_command
from stepscope.cli.options import FormatFlag, takes_grid
from stepscope.cli.output import if_interrupted, say, show, show_tables, showing_stages, terminal_width
from stepscope.errors import StepscopeError
from stepscope.render.formats import Format
from stepscope.spec import Grid, Strategy

if TYPE_CHECKING:
    from stepscope.api.plan import Fit, StepPlan

_UNSAVED = "nothing was saved"


@takes_grid
def plan(
    *,
    grid: Grid,
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="NAME", help="Predict for this GPU.  [default: that of this machine]")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="Memory of the GPU, such as 80GB.")
    ] = None,
    fit: Annotated[
        str | None, typer.Option("--fit", metavar="SIZE|GPU", help="Search for what fits, such as 24GB or H100.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Table of times that `stepscope calibrate` wrote.")
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", metavar="N", min=1, max=4096, help="GPUs that share the batch; memory is per GPU.")
    ] = 1,
    strategy: Annotated[
        Strategy | None, typer.Option("--strategy", help="How they share it, as for `train`.  [default: bucketed]")
    ] = None,
    shard_optimizer: Annotated[
        bool, typer.Option("--shard-optimizer", help="Give each rank a share of the optimizer state.")
    ] = False,
    table: Annotated[PlanPart | None, typer.Option("--table", help="Show only this table.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save a chart of memory over a step, or with --fit of memory against time."),
    ] = None,
    force: ForceFlag = False,
    format_: FormatFlag = Format.TEXT,
) -> None:
    """Predict the peak memory and the time of a step on a GPU that need not be there.

    The real step runs on tensors without values: peak memory by category, phase and module, whether it fits, and the
    time of each phase. --fit searches for the largest batch and context, and for changes that make the step fit.
    """
    from stepscope.api.plan import as_ranks
    from stepscope.render.figures import check_figure

    if plot is not None:
        check_figure(plot, force=force)
    if fit is not None:
        _refuse_with_fit(memory, table, ranks)
        _show_fit(_search(grid, fit, gpu=gpu, calibration=calibration), format_, plot, force=force)
        return
    shared = as_ranks(ranks, strategy, shard_optimizer=shard_optimizer)
    plans = _predict(grid, gpu=gpu, memory=memory, calibration=calibration, ranks=shared)
    if len(plans) == 1:
        _show_plan(plans[0], table, format_, plot, memory=memory, force=force)
        return
    _refuse_for_several(len(plans), table, plot)
    _show_several(plans, format_)


def _refuse_with_fit(memory: str | None, table: str | None, ranks: int) -> None:
    if ranks > 1:
        raise StepscopeError("`--fit` tries several numbers of ranks itself", hint="remove --ranks")
    if memory is not None:
        raise StepscopeError(
            "`--fit` and `--memory` are mutually exclusive", detail="--fit says how much there is", hint="--fit 24GB"
        )
    if table is not None:
        raise StepscopeError("`--table` shows a part of one prediction; `--fit` has several", hint="leave out --table")


def _refuse_for_several(count: int, table: str | None, plot: Path | None) -> None:
    if table is not None or plot is not None:
        flag = "--table" if table is not None else "--plot"
        raise StepscopeError(f"`{flag}` needs a single workload; got {count}", hint=f"leave out {flag}")


def _predict(grid: Grid, **where: Any) -> "list[StepPlan]":
    from stepscope.api.plan import plan_all

    with if_interrupted(_UNSAVED), showing_stages() as on_stage:
        return plan_all(grid, progress=on_stage, **where)


def _search(grid: Grid, fit: str, **where: Any) -> "Fit":
    from stepscope.api.plan import plan_fit

    with if_interrupted(_UNSAVED), showing_stages() as on_stage:
        return plan_fit(grid, fit=fit, progress=on_stage, command=typed_command(), **where)


def _show_plan(
    found: "StepPlan", table: PlanPart | None, format_: Format, plot: Path | None, *, memory: str | None, force: bool
) -> None:
    from stepscope.explain.commands import write_command
    from stepscope.render.terminal import render_page

    if table is not None:
        show_tables([found.table(table)], format_)
    elif format_ is Format.TEXT:
        show(render_page(found.page(), width=terminal_width()))
    elif format_ is Format.JSON:
        show(found.to_json())
    else:
        show_tables(list(found.page().tables), format_)
    _draw(found, plot, force=force)
    result = found.result
    gpu = shlex.quote(result.gpu.name)
    wanted = "" if result.fits else f" --fit {gpu}" if memory is None else f" --gpu {gpu} --fit {memory}"
    verb = "plan" if not result.fits else "bench" if result.ranks.count == 1 else "train"
    say(f"next: {write_command(verb, result.workload)}{wanted or result.ranks.flags}")


def _show_several(plans: "list[StepPlan]", format_: Format) -> None:
    from stepscope.api.plan import encode_plans, tables_of

    if format_ is Format.JSON:
        show(encode_plans(plans))
    else:
        show_tables([tables_of(plans)], format_)


def _show_fit(found: "Fit", format_: Format, plot: Path | None, *, force: bool) -> None:
    from stepscope.render.terminal import render_page

    if format_ is Format.TEXT:
        show(render_page(found.page(), width=terminal_width()))
    elif format_ is Format.JSON:
        show(found.to_json())
    else:
        show_tables([found.limits, found.proposals], format_)
    _draw(found, plot, force=force)
    commands = [one.command for one in (found.result.limits if found.result.start.fits else found.result.fitting)]
    if any(commands):
        say(f"next: {next(filter(None, commands))}")


def _draw(shown: "StepPlan | Fit", plot: Path | None, *, force: bool) -> None:
    if plot is not None:
        shown.figure.save(plot, force=force)
        say(f"chart: {plot}")

"""`plan`: what `stepscope plan` does, from Python. No GPU is needed, and torch runs in other processes."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.api.arguments import require_choice
from stepscope.api.display import DataTable, Picture, PlanPart, StrPath, encode_document, write_table
from stepscope.api.measure import make_grid_of_one, name_command
from stepscope.errors import StepscopeError
from stepscope.explain.experiments.plan_tables import (
    fit_figure,
    fit_page,
    limits_table,
    make_plan_table,
    plan_page,
    plan_timeline,
    plans_table,
    proposals_table,
    say_fit,
    say_result,
)
from stepscope.jobs.plan import Planner, check_plan_settings, plan_grid
from stepscope.jobs.plan_search import find_fit
from stepscope.jobs.plan_target import find_card, look_up_card, open_target
from stepscope.jobs.workers.process import OnStage
from stepscope.recording.rows.plan_result import ALONE, FitResult, PlannedRanks, PlanResult
from stepscope.spec import Grid, Strategy, Workload
from stepscope.spec.settings import parse_bytes

if TYPE_CHECKING:
    from stepscope.findings import Page

Memory = int | str  # bytes, or text such as `80GB`
_LEAST_MEMORY = 1_000_000


class StepPlan:
    """The prediction for one workload. `result` is the document that `to_json` returns."""

    def __init__(self, result: PlanResult) -> None:
        self.result = result

    @property
    def fits(self) -> bool:
        return self.result.fits

    @property
    def peak_allocated_bytes(self) -> int:
        return self.result.peak_allocated_bytes

    @property
    def step_ns(self) -> int | None:
        return self.result.step_ns

    def table(self, name: PlanPart = "categories") -> DataTable:
        require_choice("table", name, PlanPart)
        return DataTable.of(make_plan_table(self.result, name))

    def page(self) -> "Page":
        return plan_page(self.result)

    @property
    def figure(self) -> Picture:
        """Memory during a step, by category."""
        return Picture(plan_timeline(self.result))

    def to_json(self) -> str:
        """The document that `stepscope plan --format json` prints."""
        return encode_document(self.result)

    def to_dict(self) -> dict[str, Any]:
        return msgspec.json.decode(self.to_json(), type=dict[str, Any])

    def __str__(self) -> str:
        return say_result(self.result)

    def __repr__(self) -> str:
        return f"<StepPlan: {say_result(self.result)}>"

    def _repr_html_(self) -> str:
        return "".join(write_table(table) for table in self.page().tables)


class Fit:
    """What fits into a GPU: limits, and changes with their predictions. `result` is the document."""

    def __init__(self, result: FitResult) -> None:
        self.result = result

    @property
    def limits(self) -> DataTable:
        return DataTable.of(limits_table(self.result))

    @property
    def proposals(self) -> DataTable:
        return DataTable.of(proposals_table(self.result))

    def page(self) -> "Page":
        return fit_page(self.result)

    @property
    def figure(self) -> Picture:
        """Memory against time of everything that was simulated."""
        return Picture(fit_figure(self.result))

    def to_json(self) -> str:
        """The document that `stepscope plan --fit … --format json` prints."""
        return encode_document(self.result)

    def to_dict(self) -> dict[str, Any]:
        return msgspec.json.decode(self.to_json(), type=dict[str, Any])

    def __str__(self) -> str:
        return say_fit(self.result)

    def __repr__(self) -> str:
        return f"<Fit: {say_fit(self.result)}>"

    def _repr_html_(self) -> str:
        return "".join(write_table(table) for table in self.page().tables)


def plan(
    workload: Workload | Grid | None = None,
    *,
    gpu: str | None = None,
    memory: Memory | None = None,
    calibration: StrPath | None = None,
    ranks: int = 1,
    strategy: Strategy | None = None,
    shard_optimizer: bool = False,
    progress: OnStage | None = None,
) -> StepPlan:
    """Predict the peak memory and the step time of a workload on a GPU, which need not be there.

    `gpu` is a name such as `"H200"`; by default, the GPU of this machine. `memory` replaces its memory: bytes, or text
    such as `"80GB"`. `calibration` is a file that `stepscope calibrate` wrote; by default, times come from the table
    that stepscope has for the GPU, or from data sheets. With `ranks`, the batch is shared by that many GPUs with a
    `strategy` of `stepscope train`, and memory is that of one of them.
    """
    grid = make_grid_of_one(workload)
    shared = as_ranks(ranks, strategy, shard_optimizer=shard_optimizer)
    results = plan_all(grid, gpu=gpu, memory=memory, calibration=calibration, ranks=shared, progress=progress)
    if len(results) > 1:
        raise ValueError(f"expected one workload, got {len(results)}")
    return results[0]


def plan_all(
    grid: Grid,
    *,
    gpu: str | None = None,
    memory: Memory | None = None,
    calibration: StrPath | None = None,
    ranks: PlannedRanks = ALONE,
    progress: OnStage | None = None,
) -> list[StepPlan]:
    """The same for every workload of a grid."""
    found = plan_grid(
        grid,
        gpu=gpu,
        memory_bytes=as_bytes(memory),
        calibration=as_path(calibration),
        ranks=ranks,
        on_stage=progress or (lambda _: None),
    )
    return [StepPlan(one) for one in found]


def plan_fit(
    workload: Workload | Grid | None = None,
    *,
    fit: Memory,
    gpu: str | None = None,
    calibration: StrPath | None = None,
    progress: OnStage | None = None,
    command: str = "",
) -> Fit:
    """Search for what fits: the largest batch and context, and the changes that make the workload fit, with the
    predicted memory and time of each. `fit` is an amount of memory or the name of a GPU."""
    grid = make_grid_of_one(workload)
    check_plan_settings(grid)
    cases = grid.cases()
    if len(cases) > 1:
        raise StepscopeError(f"`--fit` needs a single workload; got {len(cases)}", hint="leave out other values")
    named = isinstance(fit, str) and (look_up_card(fit) is not None or fit[:1].isalpha())
    if named and gpu is not None:
        raise StepscopeError(
            f"`--fit {fit}` and `--gpu {gpu}` both name a GPU", hint=f"--fit {fit}, or --gpu {gpu} --fit 24GB"
        )
    if named:
        find_card(str(fit), flag="--fit")
    table = as_path(calibration)
    target = open_target(str(fit), None, table) if named else open_target(gpu, as_bytes(fit), table)
    with Planner(target, on_stage=progress or (lambda _: None), at_once=os.cpu_count() or 1) as planner:
        return Fit(find_fit(cases[0].workload, planner, command or name_command("plan", grid)))


def as_bytes(memory: Memory | None) -> int | None:
    """Raise StepscopeError for less than any GPU has: a unit may be missing."""
    size = parse_bytes(memory) if isinstance(memory, str) else memory
    if size is not None and size < _LEAST_MEMORY:
        has_unit = isinstance(memory, str) and memory[-1:] in "bB"
        raise StepscopeError(
            f"not the memory of a GPU: `{memory}`",
            detail="less than any GPU has" if has_unit else "expected a number and a unit",
            hint="24GB, 80GiB",
        )
    return size


def as_ranks(count: int, strategy: Strategy | None = None, *, shard_optimizer: bool = False) -> PlannedRanks:
    """One GPU, or several with a strategy; `bucketed` by default. Raise StepscopeError for a strategy without ranks."""
    if count > 1:
        return PlannedRanks(count=count, strategy=strategy or "bucketed", shard_optimizer=shard_optimizer)
    if strategy not in (None, "single") or shard_optimizer:
        flag = "--shard-optimizer" if shard_optimizer else f"--strategy {strategy}"
        raise StepscopeError(f"`{flag}` needs several ranks", hint=f"--ranks 8 {flag}")
    return ALONE


def as_path(path: StrPath | None) -> Path | None:
    return None if path is None else Path(path)


def tables_of(plans: list[StepPlan]) -> DataTable:
    """One row per prediction."""
    return DataTable.of(plans_table([one.result for one in plans]))


def encode_plans(plans: list[StepPlan]) -> str:
    """The predictions of a grid as one document: a list."""
    return encode_document([one.result for one in plans])

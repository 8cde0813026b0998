"""The stage of a report that predicts: what the step needs, and what changes would save, on the GPU that was measured.

It is a short `stepscope plan --fit`: changes one by one, the largest batch, and a limit on the time that all of it may
take. It runs after the stages that measure, so that it tries what the findings propose: two parts of a page must not
advise two things.
"""

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError
from stepscope.explain.commands import write_command
from stepscope.explain.story.memory_card import find_proposed
from stepscope.explain.story.run import list_advice
from stepscope.explain.story.sources import Materials
from stepscope.findings import Advice
from stepscope.hardware import find
from stepscope.jobs.plan import Planner
from stepscope.jobs.plan_search import (
    Changes,
    OutOfTimeError,
    PlanSource,
    combine,
    find_limits,
    list_changes,
    propose,
    rank,
    take_pairs,
    try_changes,
)
from stepscope.jobs.plan_target import USUAL_GPU, Target, find_here, make_target
from stepscope.jobs.report.stage import ReportStage, StageWork, UnavailableError
from stepscope.jobs.workers.process import OnStage
from stepscope.recording.rows.plan_result import FitResult, Limit, PlanResult, read_fit, write_fit
from stepscope.spec import Workload
from stepscope.units import count_noun, say_bytes

_LIMIT_S = 60.0  # for all simulations; a large model needs about as long for one as this for a dozen of a small one
_USUAL_S = 30.0
_COMPILING = 3  # times as long: how long the simulation of a compiled step takes


class PlanStage(ReportStage):
    name = "plan"

    def command(self, work: StageWork) -> str:
        command = write_command(self.name, work.planned.case.workload, without=("device",))
        return f"{command} --gpu {USUAL_GPU}" if work.planned.environment.device == "cpu" else command

    def expected_s(self, work: StageWork) -> float:
        usual_s = _USUAL_S * (_COMPILING if work.planned.case.workload.is_traced else 1)
        return 0.0 if work.planned.environment.device == "cpu" else usual_s

    def load(self, folder: Path, _keys: Sequence[str], materials: Materials, /) -> Materials:
        return replace(materials, plan=read_fit(folder / f"{self.name}.json"))

    def run(self, work: StageWork, materials: Materials) -> tuple[Materials, tuple[str, ...]]:
        workload = work.planned.case.workload
        try:
            target = find_target(work)
            with Planner(target, at_once=os.cpu_count() or 1, limit_s=_limit_s(workload)) as planner:
                start = _predict_start(planner, work)
                changes = list(choose_changes(start, list_advice(materials) or ()))
                found = search(start, changes, planner, work.on_stage)
        except UnavailableError as error:
            raise UnavailableError(error.message, hint=self.command(work)) from None
        memory = f"{target.planned.memory_bytes / 1e9:.4g}GB"
        command = f"{write_command('plan', workload)} --gpu {shlex.quote(target.planned.name)} --fit {memory}"
        found = msgspec.structs.replace(found, command=command)
        write_fit(found, work.folder / f"{self.name}.json")
        return replace(materials, plan=found), self.keys(work)

    def tell(self, materials: Materials) -> str:
        assert materials.plan is not None
        largest = [f"largest batch that fits: {one.value}" for one in materials.plan.limits if one.value]
        peak = say_bytes(materials.plan.start.peak_allocated_bytes)
        return ", ".join((f"predicted peak memory {peak}", *largest))


def _limit_s(workload: Workload) -> float:
    return _LIMIT_S * (_COMPILING if workload.is_traced else 1)


def find_target(work: StageWork) -> Target:
    """The GPU of the report, with the memory that its driver reports. Raise UnavailableError if it is not a GPU, or one
    that is not known."""
    environment = work.planned.environment
    if environment.device == "cpu":
        raise UnavailableError("only steps on a GPU can be predicted, and this one ran on a CPU")
    here = find_here(work.workers)
    card = here or find(environment.driver_name)
    if card is None:
        raise UnavailableError(f"nothing is known about the memory and kernels of `{environment.driver_name}`")
    try:
        return make_target(card, work.planned.case.timing.memory_limit, is_here=here is not None)
    except StepscopeError as error:
        raise UnavailableError(error.message) from None


def _predict_start(planner: Planner, work: StageWork) -> PlanResult:
    work.on_stage("predicting the step")
    (start,) = planner.predict_all([work.planned.case.workload])
    if isinstance(start, OutOfTimeError):
        raise UnavailableError(f"the step was {start.message}")
    if isinstance(start, StepscopeError):
        raise UnavailableError(f"the step cannot be simulated: {start.message}")
    return start


def choose_changes(start: PlanResult, advice: Sequence[Advice]) -> Iterator[tuple[str, Changes]]:
    """The changes to try: with the attention that the findings propose, if they do; an optimizer only if the peak is
    its own; and more than the fewest micro-batches only if the step does not fit."""
    splits = 0
    for title, changes in list_changes(start.workload):
        splits += "grad_accumulation" in changes
        is_of_no_use = ("optimizer" in changes and start.peak_phase != "optimizer") or (splits > 1 and start.fits)
        if "attention" in changes and (proposed := find_proposed(advice, "attention")):
            yield f"{proposed} attention", {"attention": proposed}
        elif not is_of_no_use:
            yield title, changes


def search(
    start: PlanResult, changes: Sequence[tuple[str, Changes]], planner: PlanSource, on_stage: OnStage
) -> FitResult:
    """The predictions of the changes, and the largest batch. After the time limit, the rest is not simulated, and a
    note says so."""
    on_stage(f"trying {count_noun(len(changes), 'change')}")
    proposals = [propose("as it is", {}, start.workload, start), *try_changes(changes, start.workload, planner)]
    pairs = take_pairs(combine(changes)) if not start.fits else iter(())
    for pair in pairs:
        proposals += try_changes(pair, start.workload, planner)
        if any(one.fits for one in proposals):
            break
    on_stage("searching for the largest batch")
    limits: tuple[Limit, ...] = ()
    notes: tuple[str, ...] = ()
    try:
        limits = find_limits(("batch",), start, planner)
    except OutOfTimeError:
        notes = (f"The search stopped after {_limit_s(start.workload):g} s.",)
    return FitResult(
        gpu=start.gpu,
        command=start.command,
        start=start,
        limits=limits,
        proposals=tuple(rank(proposals)),
        simulations=planner.simulations,
        notes=notes,
    )

"""`stepscope attention`: one process per implementation, one row per case, resumable like any sweep.

A worker reports each case as it finishes. If it dies before its last case, the running case gets a row that says why,
and a new worker continues with the next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stepscope.cost.attention import flops_of_attention
from stepscope.jobs.experiments.flag_grids import AttentionGrid
from stepscope.jobs.experiments.sweep import Experiment, PlannedCase, Turn, judge, look_at
from stepscope.jobs.workers.messages import AttentionDone, Failed, MeasureAttention
from stepscope.jobs.workers.process import InputRefusedError, Workers
from stepscope.recording.rows.attention_case import AttentionCase, AttentionRow
from stepscope.recording.rows.bench import Environment
from stepscope.spec import build_case

# For the time estimate: fixed cost of a case, and the share of peak that its repetitions reach.
EXPECTED_EXTRA_S = 0.3
EXPECTED_SHARE = 0.1
_PROCESS_ENDED = ("crash", "killed", "timeout", "error")


class PlannedAttention(PlannedCase[AttentionCase], frozen=True, kw_only=True):
    """A case and the environment it will run in."""

    @property
    def expected_s(self) -> float:
        """A rough estimate: three timings, each of forward, backward or both."""
        peak = self.environment.hardware.peak_flops.get(self.case.precision, 1e11)
        each_s = flops_of_attention(self.case).both / (EXPECTED_SHARE * peak)
        return EXPECTED_EXTRA_S + 3 * min(self.case.seconds, self.case.repetitions * each_s)


@dataclass(frozen=True, kw_only=True)
class AttentionExperiment(Experiment[AttentionCase, AttentionRow]):
    grid: AttentionGrid = field(default_factory=AttentionGrid)

    row_type = AttentionRow

    def plan(self, workers: Workers, timeout_s: float | None) -> list[PlannedAttention]:
        """The default precisions depend on the device."""
        environment = self._look(self.grid.precision or ("fp32",), workers, timeout_s)
        cases = self.grid.cases(environment.device)
        needed = tuple(dict.fromkeys(case.precision for case in cases))
        if not set(needed) <= set(environment.hardware.peak_flops):
            environment = self._look(needed, workers, timeout_s)
        return [PlannedAttention(case=case, environment=environment) for case in cases]

    def group_of(self, planned: PlannedCase[AttentionCase]) -> str:
        return planned.case.implementation

    def run_group(self, turn: Turn[AttentionCase, AttentionRow], workers: Workers) -> None:
        """The case that was running when the worker ended is the one that failed. After the last case there is none:
        every row is written and stays.
        """
        while turn.waiting:
            turn.start()
            ended = workers.run(
                MeasureAttention(cases=tuple(one.case for one in turn.waiting)),
                on_stage=turn.listener.stage,
                on_part=lambda part: turn.take(part.outcome),
                timeout_s=turn.sweep.timeout_s,
            )
            if isinstance(ended.answer, Failed) and ended.answer.bad_input:
                raise InputRefusedError(ended.answer)
            if isinstance(ended.answer, AttentionDone):
                assert not turn.waiting, "the worker finished with cases left to run"
            elif turn.waiting:
                status, reason = judge(ended.answer)
                turn.finish(status, reason, log=ended.log if status in _PROCESS_ENDED else None)

    def _look(self, precisions: Sequence[str], workers: Workers, timeout_s: float | None) -> Environment:
        """Probe through a workload, which names a device and a precision; its model does not run."""
        stands_in = [build_case({"device": self.grid.device, "precision": precision}) for precision in precisions]
        return look_at(stands_in, workers, timeout_s).environment

"""The card about memory: what was predicted next to what was measured, and the changes that save most.

Savings are differences between two predictions, so an error that both have cancels out. A page says everything once:
where a finding or `bench` has the time of a change, the card has that time and not a predicted one, and a change that
contradicts a finding is left out.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from stepscope.explain.commands import write_command
from stepscope.explain.experiments.bench_tables import step_ms
from stepscope.explain.experiments.plan_tables import say_gpu, say_verdict
from stepscope.explain.story.measured import RULES_OF_SETTING
from stepscope.explain.story.opening import Opening
from stepscope.explain.story.sources import is_same_run
from stepscope.findings import Advice, MemoryCard, MemoryLine
from stepscope.recording.rows.bench import BenchRow
from stepscope.recording.rows.plan_result import FitResult, Limit, PlanResult, Proposal
from stepscope.spec import Workload, flag_of
from stepscope.units import count_noun, say_bytes, say_factor, say_time

_MOST_LINES = 4  # and one for the batch
_MOST_PER_SETTING = 2
_WORTH_SAYING = 0.05  # of the peak
_FAR_OFF = 0.15  # of the measured peak; differences between predictions this far off are rough, too


def make_memory_card(opening: Opening, advice: Sequence[Advice]) -> MemoryCard | None:
    """The card of a run; None if nothing was predicted for it. `advice` has the findings of the page."""
    plan, case = opening.materials.plan, opening.case
    if plan is None or case is None:
        return None
    if not is_same_run(case, msgspec.structs.replace(case, workload=plan.start.workload)):
        return None
    choice = _Choice(opening=opening, plan=plan, workload=case.workload, advice=advice)
    where = f"Predicted for {say_gpu(plan)} in {count_noun(plan.simulations, 'simulation')} of a step."
    return MemoryCard(
        sentences=tuple(_compare(opening, plan.start)),
        lines=(*choice.list_changes(), *choice.list_limits()),
        command=plan.command,
        notes=(where, *_remark(plan, opening.peak_bytes)),
    )


def _remark(plan: FitResult, measured: int | None) -> Iterator[str]:
    if measured and abs(plan.start.peak_allocated_bytes / measured - 1) > _FAR_OFF:
        yield "The predicted peak is far from the measured one, so predicted savings are rough."
    if plan.start.time is not None and plan.start.time.is_rough:
        yield "Times are rough: they are scaled by data sheets."
    yield from plan.notes


# --- Predicted and measured -------------------------------------------------------------------------------------------


def _compare(opening: Opening, start: PlanResult) -> Iterator[str]:
    measured, predicted = opening.peak_bytes, start.peak_allocated_bytes
    if measured:
        error = say_error(predicted / measured - 1)
        yield f"Peak memory: measured {say_bytes(measured)}, predicted {say_bytes(predicted)} ({error})."
    else:
        yield f"Peak memory: predicted {say_bytes(predicted)}. {say_verdict(start)}"
    if start.step_ns is None or start.step_ns_interval is None:
        return
    low, high = map(say_time, start.step_ns_interval)
    predicted_ns, step_ns = say_time(start.step_ns), opening.step_ns
    if step_ns:
        error = say_error(start.step_ns / step_ns - 1)
        yield f"Step time: measured {say_time(step_ns)}, predicted {predicted_ns} ({error}), from {low} to {high}."
    else:
        yield f"Step time: predicted {predicted_ns}, from {low} to {high}."


def say_error(share: float) -> str:
    """How far a prediction is off: +4.5%, −0.2%."""
    return f"{'−' if share < 0 else '+'}{abs(share):.1%}"


# --- Lines ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """Chooses what the card says from all predictions of a run."""

    opening: Opening
    plan: FitResult
    workload: Workload
    advice: Sequence[Advice]

    @cached_property
    def _ran(self) -> bool:
        """Whether the step ran. Then it fits, whatever is predicted."""
        return self.opening.peak_bytes is not None

    def list_changes(self) -> list[MemoryLine]:
        """A step that fits: what saves most first. One that does not: what makes it fit, the fastest first."""
        known = [one for one in self.plan.proposals if one.changes and one.peak_allocated_bytes is not None]
        if not self._ran and not self.plan.start.fits:
            return [self._write(one) for one in known if one.fits][:_MOST_LINES]
        alone = [one for one in known if len(one.changes) == 1 and not self._contradicts(one)]
        lines = {id(one): self._write(one) for one in alone}
        least = _WORTH_SAYING * self.plan.start.peak_allocated_bytes
        chosen: list[tuple[str, MemoryLine]] = []
        for one in sorted(alone, key=lambda one: -(lines[id(one)].saving_bytes or 0)):
            ((setting, _),) = one.changes.items()
            same = [line for other, line in chosen if other == setting]
            line = lines[id(one)]
            is_worth = (line.saving_bytes or 0) >= least and not any(_beats(other, line) for other in same)
            if is_worth and len(same) < _MOST_PER_SETTING:
                chosen.append((setting, line))
        return [line for _, line in chosen[:_MOST_LINES]]

    def _write(self, proposal: Proposal) -> MemoryLine:
        changed = msgspec.structs.replace(self.workload, **proposal.changes)
        line = MemoryLine(
            title=f"{proposal.title[0].upper()}{proposal.title[1:]}" if _is_word(proposal.title) else proposal.title,
            command=write_command("report", changed),
            saving_bytes=self.plan.start.peak_allocated_bytes - (proposal.peak_allocated_bytes or 0),
            adds_ns=_subtract(proposal.step_ns, self.plan.start.step_ns),
        )
        return self._with_finding(self._with_measured(line, changed), proposal)

    def _with_measured(self, line: MemoryLine, changed: Workload) -> MemoryLine:
        """The line with what `bench` measured with this change, if it did."""
        rows, step_ns = self.opening.materials.bench, self.opening.step_ns
        row = next((one for one in rows[1:] if one.case.workload == changed), None)
        saved, ratio = (_measure(rows[0], row)) if row is not None else (None, None)
        if saved is None or ratio is None or step_ns is None:
            return line
        return msgspec.structs.replace(line, saving_bytes=saved, adds_ns=round((ratio - 1) * step_ns), is_measured=True)

    def _with_finding(self, line: MemoryLine, proposal: Proposal) -> MemoryLine:
        """The line with the time of the finding that proposes the same command, or with only its code if it proposes
        more than this change."""
        advice = self._find_advice(proposal)
        if advice is None or len(proposal.changes) > 1:
            return line
        finding = advice.finding
        is_same = advice.fixes[0].text == line.command and finding.saving_ns is not None
        adds_ns = -(finding.saving_ns or 0) if is_same else None
        return msgspec.structs.replace(line, adds_ns=adds_ns, finding=finding.code)

    def _find_advice(self, proposal: Proposal) -> Advice | None:
        return next((one for setting in proposal.changes if (one := _find_advice(self.advice, setting))), None)

    def _contradicts(self, proposal: Proposal) -> bool:
        """Whether a finding proposes another value of the setting."""
        return any(find_proposed(self.advice, name) not in ("", str(value)) for name, value in proposal.changes.items())

    def list_limits(self) -> Iterator[MemoryLine]:
        """The largest batch, if it is another than the present one. A step that ran fits, so a smaller batch is an
        error of the prediction."""
        for limit in self.plan.limits:
            if limit.value is None or limit.value == self.workload.batch:
                continue
            if limit.value < self.workload.batch and self._ran:
                continue
            changed = msgspec.structs.replace(self.workload, batch=limit.value)
            yield MemoryLine(
                title=f"Largest batch that fits: {limit.value:,}",
                command=write_command("report", changed),
                note="; ".join(_say_limit(limit, self.plan.start)),
            )


def _say_limit(limit: Limit, start: PlanResult) -> Iterator[str]:
    yield f"now {start.workload.batch:,}"
    if limit.peak_allocated_bytes is not None:
        yield f"{say_bytes(limit.peak_allocated_bytes)} allocated"
    if limit.tokens_per_s and start.tokens_per_s:
        yield f"{say_factor(limit.tokens_per_s / start.tokens_per_s)} the tokens per second"
    if limit.is_cap:
        yield "the model allows no more"


def _is_word(title: str) -> bool:
    """Whether a title starts with a word, and not with an identifier such as `bf16` or `sdpa`."""
    return title.split()[0] in ("checkpoint", "flash", "fused")


def _beats(one: MemoryLine, other: MemoryLine) -> bool:
    """Whether a change saves as much and costs no more time."""
    cheaper = one.adds_ns is not None and other.adds_ns is not None and one.adds_ns <= other.adds_ns
    return cheaper and (one.saving_bytes or 0) >= (other.saving_bytes or 0)


def _measure(row: BenchRow, other: BenchRow) -> tuple[int | None, float | None]:
    """The memory that the second row saves, and its step time as a share of the first one's."""
    times = step_ms(row), step_ms(other)
    if row.measurement is None or other.measurement is None or times[0] is None or times[1] is None:
        return None, None
    return row.measurement.peak_bytes - other.measurement.peak_bytes, times[1].median / times[0].median


def _subtract(ns: int | None, from_ns: int | None) -> int | None:
    return None if ns is None or from_ns is None else ns - from_ns


# --- Agreement with the findings --------------------------------------------------------------------------------------


def find_proposed(advice: Sequence[Advice], setting: str) -> str:
    """The value of a setting in the command of the finding about it; empty if there is no such finding, or if its
    command does not have the setting."""
    found = _find_advice(advice, setting)
    return _read_flag(found.fixes[0].text, setting) if found is not None else ""


def drop_larger_batches(advice: Advice, plan: FitResult | None) -> Advice:
    """The advice without commands for a batch that is predicted not to fit."""
    beyond = next((one.beyond for one in plan.limits if one.beyond is not None), None) if plan is not None else None
    if plan is None or beyond is None:
        return advice
    least = max(beyond, plan.start.workload.batch + 1)  # the present batch is not advice
    kept = [one for one in advice.fixes if int(_read_flag(one.text, "batch") or 0) < least]
    return msgspec.structs.replace(advice, fixes=tuple(kept))


def _find_advice(advice: Sequence[Advice], setting: str) -> Advice | None:
    codes = RULES_OF_SETTING.get(setting, ())
    return next((one for one in advice if one.finding.code in codes and one.fixes), None)


def _read_flag(command: str, setting: str) -> str:
    """The value of a setting in a command of stepscope; empty if it does not have it."""
    words = shlex.split(command) if command.startswith("stepscope ") else []
    flag = flag_of(setting)
    return words[words.index(flag) + 1] if flag in words[:-1] else ""

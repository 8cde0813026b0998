"""The gate: compares runs with a baseline, metric by metric.

A metric fails if it is worse than the baseline by more than the limit and by more than the noise. It cannot be decided
if a side lacks it, or if it exceeds the limit and its noise is unknown. Runs under other conditions (device, torch
version, ranks, settings) are not compared at all unless the caller allows it.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stepscope.explain.gate.noise import UNKNOWN_NOISE, Noise, RunSample, is_outside, measure_noise
from stepscope.findings import Quantity
from stepscope.recording.baseline import Baseline, BaselineRun, Metric, RunConditions
from stepscope.units import count_noun, say_count, say_digits, say_size, say_time

Outcome = Literal["pass", "fail", "cannot tell"]
Change = Literal["higher", "lower", "noise", "same", "cannot tell"]
PartsBy = Literal["class", "phase"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _MetricText:
    label: str
    unit: Quantity
    record: str  # how to get it if it is missing


_TEXTS: dict[Metric, _MetricText] = {
    "step": _MetricText(label="step time", unit="ms", record="stepscope bench, or stepscope profile"),
    "kernels": _MetricText(label="kernels per step", unit="count", record="stepscope profile"),
    "peak-memory": _MetricText(label="peak memory", unit="bytes", record="stepscope bench, or stepscope memory"),
    "idle": _MetricText(label="idle time", unit="ms", record="stepscope profile on a GPU"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricVerdict:
    """One metric: the means over the runs of each side, in nanoseconds, bytes or a count. `change` is relative to the
    baseline; that of the idle time is relative to the baseline's step, because an idle time of nearly zero doubles
    easily. `margin` and `run_sd` are on the same scale."""

    metric: Metric
    base: float | None = None
    new: float | None = None
    change: float | None = None
    noise: Noise = UNKNOWN_NOISE
    verdict: Change = "cannot tell"
    outcome: Outcome = "pass"
    reason: str = ""  # why it cannot be decided
    range: tuple[float, float] | None = None  # of the baseline's runs

    @property
    def label(self) -> str:
        return _TEXTS[self.metric].label

    @property
    def unit(self) -> Quantity:
        return _TEXTS[self.metric].unit

    def sentence(self, limit: float | None) -> str:
        """The outcome with its figures: `FAIL: step time +6.4% (10 ms → 10.6 ms), limit +3%`."""
        word = {"pass": "pass", "fail": "FAIL", "cannot tell": "cannot tell"}[self.outcome]
        if self.change is None or self.base is None or self.new is None:
            return f"{word}: {self.label}: {self.reason}"
        of = " of the step" if self.metric == "idle" else ""
        said = f"{self.label} {self.change * 100:+.2f}%{of} ({self.say(self.base)} → {self.say(self.new)})"
        if limit is not None:
            said = f"{word}: {said}, limit +{limit * 100:g}%"
        if self.noise.kind in ("between runs", "within runs"):
            said += f", noise ±{say_change(self.noise.margin)}"
        if self.verdict == "noise" and self.outcome == "pass":
            said += "; within noise"
        return f"{said}; {self.reason}" if self.reason else said

    def say(self, value: float) -> str:
        match self.unit:
            case "ms":
                return say_time(value)
            case "bytes":
                return say_size(value)
            case _:
                return say_count(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartChange:
    """One part of the step, in nanoseconds per step: means over the runs of each side."""

    name: str
    base_ns: float
    new_ns: float
    verdict: Change


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """A comparison with a baseline. `refusals` are differences that make it meaningless; `metrics` is empty then."""

    name: str
    limit: float | None
    num_base: int
    num_new: int
    metrics: tuple[MetricVerdict, ...]
    by: PartsBy
    parts: tuple[PartChange, ...]
    refusals: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def outcome(self) -> Outcome:
        """Failed if any metric failed, else undecided if any is."""
        if self.refusals:
            return "cannot tell"
        outcomes = {one.outcome for one in self.metrics}
        return "fail" if "fail" in outcomes else "cannot tell" if "cannot tell" in outcomes else "pass"

    @property
    def sentences(self) -> tuple[str, ...]:
        if self.refusals:
            return (f"cannot tell: baseline `{self.name}` was measured under other conditions: {self.differences}",)
        return tuple(one.sentence(self.limit) for one in self.metrics)

    @property
    def differences(self) -> str:
        return "; ".join(self.refusals)


def judge_runs(
    baseline: Baseline,
    runs: Sequence[BaselineRun],
    conditions: RunConditions,
    *,
    name: str,
    limit: float | None = None,
    metrics: Sequence[Metric] = ("step",),
    by: PartsBy = "class",
    allow_different: bool = False,
) -> GateResult:
    """Compare `runs` with a baseline. Without a `limit`, nothing fails."""
    differences = [*baseline.conditions.differences(conditions), *_differing_clocks(baseline.runs, runs, metrics)]
    refusals = () if allow_different else tuple(differences)
    verdicts = () if refusals else tuple(_judge(one, baseline.runs, runs, limit) for one in dict.fromkeys(metrics))
    notes = [f"the conditions differ: {one}" for one in differences if allow_different]
    notes += baseline.conditions.remarks(conditions)
    known = {run.identity for run in baseline.runs}
    notes += [f"`{run.file}` is itself a run of the baseline" for run in runs if run.identity in known]
    counts = (len(baseline.runs), len(runs))
    notes += [note for one in verdicts for note in _say_noise(one, limit, counts, name)]
    return GateResult(
        name=name,
        limit=limit,
        num_base=counts[0],
        num_new=counts[1],
        metrics=verdicts,
        by=by,
        parts=() if refusals else _compare_parts(baseline.runs, runs, by),
        refusals=refusals,
        notes=tuple(notes),
    )


# --- One metric -------------------------------------------------------------------------------------------------------


def _judge(
    metric: Metric, base: Sequence[BaselineRun], new: Sequence[BaselineRun], limit: float | None
) -> MetricVerdict:
    sides = [[_sample(metric, run) for run in runs] for runs in (base, new)]
    known = [[one for one in side if one is not None] for side in sides]
    for runs, some, which in zip((base, new), known, ("the baseline", "the new run"), strict=True):
        if len(some) < len(runs):
            absent = next(run.file for run in runs if _sample(metric, run) is None)
            reason = f"`{absent}` of {which} does not have it; record it with {_TEXTS[metric].record}"
            return MetricVerdict(metric=metric, outcome="cannot tell", reason=reason)
    means = [statistics.fmean(one.value for one in some) for some in known]
    scale = statistics.fmean(_median(run) for run in base) if metric == "idle" else means[0]
    if scale == 0:
        if means[1] == 0:
            return MetricVerdict(
                metric=metric, base=0, new=0, change=0, noise=Noise(kind="exact"), range=(0, 0), verdict="same"
            )
        return MetricVerdict(metric=metric, outcome="cannot tell", reason="it is zero in the baseline")
    change = (means[1] - means[0]) / scale
    noise = _find_noise(metric, base, known[0], known[1])
    verdict = _name_change(change * scale, noise, outside=is_outside(known[0], known[1]))
    run_sd = None if noise.run_sd is None else noise.run_sd / scale
    return MetricVerdict(
        metric=metric,
        base=means[0],
        new=means[1],
        change=change,
        noise=Noise(kind=noise.kind, margin=noise.margin / scale, run_sd=run_sd),
        verdict=verdict,
        outcome=_decide(change, verdict, limit),
        range=(min(one.value for one in known[0]), max(one.value for one in known[0])),
        reason=_say_unknown(noise, base, new) if _decide(change, verdict, limit) == "cannot tell" else "",
    )


def _decide(change: float, verdict: Change, limit: float | None) -> Outcome:
    if limit is None or change <= limit or verdict == "noise":
        return "pass"
    return "fail" if verdict == "higher" else "cannot tell"


def _name_change(difference: float, noise: Noise, *, outside: bool) -> Change:
    if difference == 0:
        return "same"
    if noise.kind == "unknown":
        return "cannot tell"
    if (not outside) if noise.kind == "exact" else abs(difference) <= noise.margin:
        return "noise"
    return "higher" if difference > 0 else "lower"


def _sample(metric: Metric, run: BaselineRun) -> RunSample | None:
    match metric:
        case "step":
            return RunSample.of_steps(run.step_ns) if run.step_ns else None
        case "idle":
            if run.idle_ns is None or not run.step_ns:
                return None
            # Kernel times hardly vary, so idle time varies as much as the step does.
            step = RunSample.of_steps(run.step_ns)
            return RunSample(value=run.idle_ns, step_sd=step.step_sd, num_steps=step.num_steps)
        case "kernels":
            return None if run.kernels is None else RunSample(value=run.kernels)
        case "peak-memory":
            return None if run.peak_bytes is None else RunSample(value=run.peak_bytes)


def _find_noise(
    metric: Metric, runs: Sequence[BaselineRun], base: Sequence[RunSample], new: Sequence[RunSample]
) -> Noise:
    # The resident memory of a process varies from run to run; the count of PyTorch's allocator does not.
    is_exact = metric == "kernels" or (metric == "peak-memory" and all(run.peak_is_exact for run in runs))
    return Noise(kind="exact") if is_exact else measure_noise(base, new)


def _median(run: BaselineRun) -> float:
    return RunSample.of_steps(run.step_ns).value


def _differing_clocks(base: Sequence[BaselineRun], new: Sequence[BaselineRun], metrics: Sequence[Metric]) -> list[str]:
    """A profiler makes steps longer, so steps are compared only if it was active on both sides or on neither."""
    if not {"step", "idle"} & set(metrics):
        return []
    sides = [{run.clock for run in runs if run.step_ns} for runs in (base, new)]
    if not all(sides) or len(sides[0] | sides[1]) == 1:
        return []
    said = [" and ".join(sorted(side)) for side in sides]
    return [f"step times {said[0]} → {said[1]}"]


# --- Parts ------------------------------------------------------------------------------------------------------------


def _compare_parts(base: Sequence[BaselineRun], new: Sequence[BaselineRun], by: PartsBy) -> tuple[PartChange, ...]:
    """The parts that all runs have figures for, the largest change first."""
    sides = [[run.classes if by == "class" else run.phases for run in runs] for runs in (base, new)]
    if not all(all(side) for side in sides):
        return ()
    changes = []
    for name in {name for side in sides for parts in side for name in parts}:
        samples = [[RunSample(value=parts.get(name, 0.0)) for parts in side] for side in sides]
        means = [statistics.fmean(one.value for one in some) for some in samples]
        noise = measure_noise(samples[0], samples[1])
        verdict = _name_change(means[1] - means[0], noise, outside=True)
        changes.append(PartChange(name=name, base_ns=means[0], new_ns=means[1], verdict=verdict))
    return tuple(sorted(changes, key=lambda one: (-abs(one.new_ns - one.base_ns), one.name)))


# --- What is said about the noise -------------------------------------------------------------------------------------


def _say_unknown(noise: Noise, base: Sequence[BaselineRun], new: Sequence[BaselineRun]) -> str:
    if noise.kind != "unknown":
        return ""
    steps = f"{len(base[0].step_ns)} and {len(new[0].step_ns)} steps"
    return f"its noise is unknown, with one run on each side and {steps}"


def _say_noise(one: MetricVerdict, limit: float | None, counts: tuple[int, int], name: str) -> list[str]:
    """What was measured about the noise, and what would make the gate sharper."""
    noise, more = one.noise, f"stepscope baseline save {name} RUN... --add"
    if one.change is None:
        return []
    match noise.kind:
        case "between runs":
            sides = f"{count_noun(counts[0], 'baseline run')} and {count_noun(counts[1], 'new run')}"
            said = [
                f"{one.label}: repeated runs differ by {say_change(noise.run_sd or 0)} (standard deviation); "
                f"with {sides}, a change of up to {say_change(noise.margin)} is noise"
            ]
        case "within runs":
            said = [
                f"{one.label}: the noise between runs is unknown, because there is one run on each side; ±"
                f"{say_change(noise.margin)} is a guess from the spread of single steps. Add runs: {more}"
            ]
        case "exact":
            said = [_say_range(one)]
        case "unknown":
            said = [f"{one.label}: the noise is unknown. Add runs: {more}"]
    if limit is not None and noise.kind == "between runs" and noise.margin > limit:
        said.append(
            f"{one.label}: the noise is larger than the limit of {limit * 100:g}%, so a regression of up to "
            f"{say_change(noise.margin)} passes. Add runs: {more}"
        )
    return said


def _say_range(one: MetricVerdict) -> str:
    low, high = one.range or (0.0, 0.0)
    if low == high:
        return f"{one.label} is equal in all runs of the baseline, so every change counts"
    return f"{one.label}: from {one.say(low)} to {one.say(high)} in the baseline; a value in this range is noise"


def say_change(change: float) -> str:
    return f"{say_digits(100 * change)}%"

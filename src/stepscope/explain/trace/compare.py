"""Compare two recordings: which parts of the step time changed, and whether the change is more than noise.

The step is that of each recording's clock (`clock`), split without counting anything twice (`accounting`): time in
which one thing ran alone, time in which several overlapped, and idle time. The differences of the parts therefore add
up to the difference of the step, to the nanosecond; parts that are not listed are one row `rest`.

Noise is judged from the steps of each recording, with Welch's 95% interval for the difference of two means. It accounts
for the variation between steps of one run, not between two runs of the same workload. Step and idle time are judged
only if no profiler made one of them longer and not the other.
"""

import itertools
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import numpy as np
import polars as pl

from stepscope.errors import StepscopeError
from stepscope.explain.statistics import student_t
from stepscope.explain.trace.accounting import Ints, account
from stepscope.explain.trace.clock import Clock
from stepscope.explain.trace.comparability import compare_circumstances
from stepscope.explain.trace.profile import UNKNOWN, Profile
from stepscope.explain.trace.run_labels import BEFORE_AND_AFTER, identify, label_pair
from stepscope.findings import Cell, Column, Table
from stepscope.units import count_noun, say_time

By = Literal["phase", "class", "module", "kernel"]
Verdict = Literal["slower", "faster", "noise", "same", "cannot tell", "new", "gone"]
WALL, GPU_TIME = "wall", "sum of kernels"
IDLE, OVERLAP, REST = "(idle)", "(overlap)", "(rest)"
TOP = 12
LEAST_STEPS = 3
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_CLASS_NUMBER = re.compile(r"_\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One item in both recordings, in whole nanoseconds per step."""

    group: str
    name: str
    a_ns: int
    b_ns: int
    verdict: Verdict

    @property
    def difference_ns(self) -> int:
        return self.b_ns - self.a_ns

    @property
    def ratio(self) -> float | None:
        return self.b_ns / self.a_ns if self.a_ns else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileComparison:
    """`parts` add up to `wall`, the step by the clock of each recording, in A, in B and in the difference. `wall` also
    decides whether B regressed."""

    names: tuple[str, str]  # of the files
    labels: tuple[str, str]  # of the runs, by what differs between them
    by: By
    clocks: tuple[Clock, Clock]
    wall: ComparisonRow
    totals: tuple[ComparisonRow, ...]
    parts: tuple[ComparisonRow, ...]
    remarks: tuple[str, ...]
    shorts: dict[str, str]  # short names by kernel name, if compared by kernel

    @property
    def has_steps(self) -> bool:
        """Whether a recording marks steps; otherwise all times are those of whole traces."""
        return any(clock.has_steps for clock in self.clocks)

    @property
    def has_overhead(self) -> bool:
        """Whether a profiler may have made a step longer, and with it the idle time."""
        return any(clock.has_overhead for clock in self.clocks)


def compare(
    a: Profile,
    b: Profile,
    *,
    by: By = "class",
    names: tuple[str, str] = BEFORE_AND_AFTER,
    labels: tuple[str, str] | None = None,
    remarks: tuple[str, ...] = (),
) -> ProfileComparison:
    """`remarks` are shown first."""
    labels = labels or label_pair(identify(a, names[0]), identify(b, names[1]))
    one, other = (_take_apart(profile, by) for profile in (a, b))
    steps = round(a.clock.step_ns), round(b.clock.step_ns)
    wall = ComparisonRow(group="step", name=WALL, a_ns=steps[0], b_ns=steps[1], verdict=judge_steps(a.clock, b.clock))
    rows = _parts(one, other, by)
    idle = [replace(row, group="step", name=IDLE.strip("()")) for row in rows if row.name == IDLE]
    if a.is_serialized or b.is_serialized:  # its idle time is unknown
        idle = []
    return ProfileComparison(
        names=names,
        labels=labels,
        by=by,
        clocks=(a.clock, b.clock),
        wall=wall,
        totals=(wall, _sum_kernels(a, b), *idle),
        parts=tuple(row for row in rows if row.a_ns or row.b_ns),
        remarks=(
            *remarks,
            *_say_lengths((a.clock, b.clock), labels),
            *compare_circumstances(a, b, labels),
            *_say_clocks((a.clock, b.clock), labels),
        ),
        shorts=_find_shorts(a) | _find_shorts(b) if by == "kernel" else {},
    )


def _say_lengths(clocks: tuple[Clock, Clock], labels: tuple[str, str]) -> Iterator[str]:
    """A step and a whole trace are different lengths of time."""
    whole = [label for clock, label in zip(clocks, labels, strict=True) if not clock.has_steps]
    if len(whole) == 1:
        yield f"warning: {whole[0]} has no marked steps: its times cover the whole trace, not one step"


def _say_clocks(clocks: tuple[Clock, Clock], labels: tuple[str, str]) -> Iterator[str]:
    """The second clock of each recording that has one."""
    for clock, label in zip(clocks, labels, strict=True):
        if clock.unprofiled_ns is not None:
            used = "wall and idle are unprofiled" if clock.kind == "unprofiled" else "all times are profiled"
            times = f"{say_time(clock.unprofiled_ns)} unprofiled, {say_time(clock.profiled_ns)} profiled"
            yield f"{label}: a step takes {times}; {used}"


def _find_shorts(profile: Profile) -> dict[str, str]:
    return dict(profile.kernels.select("name", "short").unique("name").iter_rows())


# --- Taking a step apart --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _TakenApart:
    """The parts of a step but idle time, as the mean over devices: per step, and in each profiled step."""

    clock: Clock
    per_step: dict[str, Fraction]
    samples: list[dict[str, Fraction]]

    def mean(self, name: str) -> Fraction:
        return Fraction(self.clock.idle_ns) if name == IDLE else self.per_step.get(name, Fraction(0))

    def sample(self, name: str) -> list[Fraction]:
        """The part in each step. Kernel times hardly vary, so unprofiled idle time varies as much as steps do."""
        if name != IDLE:
            return [step.get(name, Fraction(0)) for step in self.samples]
        if self.clock.kind == "unprofiled":
            return [step - Fraction(self.clock.busy_ns) for step in self.clock.step_samples]
        busy = [sum(step.values(), Fraction(0)) for step in self.samples]
        return [step - one for step, one in zip(self.clock.step_samples, busy, strict=True)]


def _take_apart(profile: Profile, by: By) -> _TakenApart:
    """Kernels that run past the end of their step are cut there, so that every moment belongs to one step."""
    keyed = profile.kernels.select("process", "device", "start_ns", "end_ns", _key(profile, by)).sort("start_ns")
    parted = keyed.partition_by("process", "device", maintain_order=True, include_key=False)
    devices = [_Device.of(kernels) for kernels in parted]
    steps = Fraction(profile.num_steps)
    return _TakenApart(
        clock=profile.clock,
        per_step={name: time / steps for name, time in _add_parts(devices, profile.window).items()},
        samples=[_add_parts(devices, window) for window in profile.step_windows],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """The kernels of one device, sorted by start. `latest_ns` is the running maximum of ends, which finds the kernels
    of a window without scanning all of them."""

    kernels: pl.DataFrame
    starts_ns: Ints
    latest_ns: Ints

    @classmethod
    def of(cls, kernels: pl.DataFrame) -> "_Device":
        latest = np.maximum.accumulate(kernels["end_ns"].to_numpy())
        return cls(kernels=kernels, starts_ns=kernels["start_ns"].to_numpy(), latest_ns=latest)

    def cut(self, window: tuple[int, int]) -> pl.DataFrame:
        """Return the kernels in a window, clipped to it."""
        first = int(np.searchsorted(self.latest_ns, window[0], side="right"))
        behind = int(np.searchsorted(self.starts_ns, window[1], side="left"))
        near = self.kernels.slice(first, max(0, behind - first))
        return near.filter(pl.col("end_ns") > window[0]).with_columns(
            pl.col("start_ns", "end_ns").clip(window[0], window[1])
        )


def _add_parts(devices: Sequence[_Device], window: tuple[int, int]) -> dict[str, Fraction]:
    parts: dict[str, Fraction] = {}
    for device in devices:
        done = account(device.cut(window), window)
        for name, time in (*done.classes.items(), (OVERLAP, done.overlap_ns)):
            parts[name] = parts.get(name, Fraction(0)) + Fraction(time, len(devices))
    return parts


def _key(profile: Profile, by: By) -> pl.Expr:
    """Return what to compare by, in the column that `account` reads."""
    match by:
        case "class":
            return pl.col("class")
        case "phase":
            return pl.col("phase").fill_null(UNKNOWN).alias("class")
        case "kernel":
            return pl.col("name").alias("class")
        case "module":
            paths = {path: align_module(path) for path in profile.kernels["module"].drop_nulls().unique()}
            return pl.col("module").replace_strict(paths, default=UNKNOWN, return_dtype=pl.String).alias("class")


def align_module(path: str) -> str:
    """Merge the same module of all layers, so that models of different depth can be compared."""
    return _CLASS_NUMBER.sub("", _LAYER.sub("*", path))


def _sum_kernels(a: Profile, b: Profile) -> ComparisonRow:
    """The sum of kernel durations per step, as the mean over devices."""
    times = [round(one.clock.per_step(one.gpu_time_ns) / len(one.devices)) for one in (a, b)]
    verdict = judge(_gpu_times(a), _gpu_times(b), times[1] - times[0])
    return ComparisonRow(group="step", name=GPU_TIME, a_ns=times[0], b_ns=times[1], verdict=verdict)


def _gpu_times(profile: Profile) -> list[Fraction]:
    """Return the sum of kernel durations per step that launched them."""
    times = profile.kernels.group_by("step").agg(ns=pl.col("time_ns").sum())
    known = dict(times.select("step", "ns").iter_rows())
    steps = profile.steps["step"].unique(maintain_order=True).to_list()
    values = [known.get(step, 0) for step in steps] if steps else [profile.gpu_time_ns]
    return [Fraction(value, len(profile.devices)) for value in values]


# --- Rows that add up -----------------------------------------------------------------------------------------------


def _parts(a: _TakenApart, b: _TakenApart, by: By) -> list[ComparisonRow]:
    """Return the largest changes first, then the rest. Values are rounded so that they still add up."""
    names = [*dict.fromkeys((*a.per_step, *b.per_step)), IDLE]
    order = sorted(names, key=lambda name: (-abs(b.mean(name) - a.mean(name)), -b.mean(name), name))
    shown = order if len(order) <= TOP + 1 else order[:TOP]
    shown += [] if IDLE in shown else [IDLE]
    rest = [name for name in order if name not in shown]
    columns = [_round_parts(one, shown, rest) for one in (a, b)]
    rows = []
    for name, a_ns, b_ns in zip((*shown, *([REST] if rest else [])), *columns, strict=True):
        samples = [_add_samples(one, rest if name == REST else [name]) for one in (a, b)]
        verdict = judge(samples[0], samples[1], b_ns - a_ns)
        if name == IDLE and not are_comparable(a.clock, b.clock):
            verdict = "same" if a_ns == b_ns else "cannot tell"
        rows.append(ComparisonRow(group=by, name=name, a_ns=a_ns, b_ns=b_ns, verdict=verdict))
    return rows


def _add_samples(one: _TakenApart, names: Sequence[str]) -> list[Fraction]:
    return [sum(column, Fraction(0)) for column in zip(*(one.sample(name) for name in names), strict=True)]


def _round_parts(one: _TakenApart, shown: Sequence[str], rest: Sequence[str]) -> list[int]:
    """Return whole nanoseconds per step. They add up to the step, because running sums are rounded."""
    idle = round(one.clock.idle_ns)
    busy = round(one.clock.step_ns) - idle
    values = [Fraction(0) if name == IDLE else one.mean(name) for name in shown]
    values += [sum((one.mean(name) for name in rest), Fraction(0))] if rest else []
    sums = [min(round(value), busy) for value in itertools.accumulate(values)]
    sums[-1] = busy
    rounded = [after - before for before, after in itertools.pairwise([0, *sums])]
    rounded[shown.index(IDLE)] += idle
    return rounded


# --- Noise ----------------------------------------------------------------------------------------------------------


def judge_steps(a: Clock, b: Clock) -> Verdict:
    """Return whether B's step differs from A's."""
    difference = round(b.step_ns) - round(a.step_ns)
    if not are_comparable(a, b):
        return "same" if not difference else "cannot tell"
    return judge(a.step_samples, b.step_samples, difference)


def are_comparable(a: Clock, b: Clock) -> bool:
    """Whether a profiler made both steps longer, or neither."""
    return a.kind == b.kind or not (a.has_overhead or b.has_overhead)


def judge(a: Sequence[Fraction], b: Sequence[Fraction], difference: float) -> Verdict:
    """Return whether B differs from A, by `difference`, by more than steps differ from each other."""
    if difference == 0:
        return "same"
    if min(len(a), len(b)) < LEAST_STEPS:
        return "cannot tell"
    if abs(difference) <= welch_margin([float(v) for v in a], [float(v) for v in b]):
        return "noise"
    return "slower" if difference > 0 else "faster"


def say_undecided(a: Clock, b: Clock) -> str:
    """Return why the steps, or parts of them, cannot be judged."""
    if not are_comparable(a, b):
        return "one step was timed under the profiler, the other was not"
    counts = [len(clock.step_samples) for clock in (a, b)]
    return f"too few steps to rule out noise ({counts[0]} and {counts[1]})"


def welch_margin(a: Sequence[float], b: Sequence[float]) -> float:
    """Return half the width of the 95% interval around the difference of the means."""
    errors = [statistics.variance(one) / len(one) for one in (a, b)]
    total = sum(errors)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(error**2 / (len(one) - 1) for error, one in zip(errors, (a, b), strict=True))
    return student_t(freedom) * math.sqrt(total)


# --- The gate and the table -----------------------------------------------------------------------------------------


def parse_percent(text: str) -> float:
    """Parse `3%` or `3` as 0.03."""
    number = text.strip().removesuffix("%").strip()
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise StepscopeError(
            f"invalid percentage: `{text}`", detail="expected a number of at least 0", hint="--fail-on 3%"
        )
    return value / 100


def regressed(comparison: ProfileComparison, limit: float) -> bool:
    """Return whether B's step is slower by more than `limit` and by more than noise. With too few steps to judge noise,
    only the limit counts. False if one step was timed under the profiler and the other was not: its overhead alone
    could exceed the limit."""
    gate = comparison.wall
    is_judged = gate.verdict == "slower" or (gate.verdict == "cannot tell" and are_comparable(*comparison.clocks))
    return is_judged and gate.b_ns > gate.a_ns * (1 + limit)


def gate_sentence(comparison: ProfileComparison, limit: float) -> str:
    gate, failed = comparison.wall, regressed(comparison, limit)
    change = f"{(gate.b_ns / gate.a_ns - 1) * 100:+.2f}%" if gate.a_ns else "–"
    said = f"{'FAIL' if failed else 'pass'}: {gate.name} {change}, limit +{limit * 100:g}%"
    if gate.verdict == "cannot tell":
        unused = "" if are_comparable(*comparison.clocks) else "not compared with the limit: "
        return f"{said}; {unused}{say_undecided(*comparison.clocks)}"
    return said + ("; within noise" if gate.verdict == "noise" else "")


def comparison_table(comparison: ProfileComparison) -> Table:
    total = comparison.wall.difference_ns
    a, b = comparison.labels
    columns = (
        Column(key="group", label=""),
        Column(key="name", label="per step" if comparison.has_steps else "in the trace"),
        Column(key="a_ms", label=a, kind="ms"),
        Column(key="b_ms", label=b, kind="ms"),
        Column(key="difference_ms", label="change", kind="ms"),
        Column(key="ratio", label="ratio", kind="ratio"),
        Column(key="share_of_change", label="of change", kind="share"),
        Column(key="verdict", label="verdict"),
        Column(key="a_ns", label=f"{a} in ns", kind="count", detail=True),
        Column(key="b_ns", label=f"{b} in ns", kind="count", detail=True),
        Column(key="recorded_name", label="full name", detail=True),
    )
    rows = [_cells(row, None, comparison) for row in comparison.totals]
    rows += [_cells(row, total, comparison) for row in comparison.parts]
    return Table(
        title=_title(comparison),
        columns=columns,
        rows=tuple(rows),
        notes=tuple(_notes(comparison)),
        compared=("a_ms", "b_ms", "difference_ms"),
    )


def _cells(row: ComparisonRow, total: int | None, comparison: ProfileComparison) -> tuple[Cell, ...]:
    share = row.difference_ns / total if total else None
    times = (row.a_ns / 1e6, row.b_ns / 1e6, row.difference_ns / 1e6)
    verdict = row.verdict
    if bool(row.a_ns) != bool(row.b_ns) and row.name != IDLE:
        verdict = "new" if row.b_ns else "gone"
    name = comparison.shorts.get(row.name, row.name)
    return (row.group, name, *times, row.ratio, share, verdict, row.a_ns, row.b_ns, row.name)


def _title(comparison: ProfileComparison) -> str:
    a, b = comparison.labels
    if not comparison.has_steps:
        return f"{a} → {b}: whole traces, in ms"
    counts = " and ".join(count_noun(clock.num_steps, "step") for clock in comparison.clocks)
    return f"{a} → {b}: mean of {counts}, in ms"


def say_sum(by: By) -> str:
    return f"the `{by}` rows add up to `{WALL}`: kernels that ran alone, overlap and idle time"


def _notes(comparison: ProfileComparison) -> list[str]:
    files = [f"{label}: {name}" for label, name in zip(comparison.labels, comparison.names, strict=True)]
    named = comparison.names not in (comparison.labels, BEFORE_AND_AFTER)
    notes = [*(files if named else []), *comparison.remarks, say_sum(comparison.by)]
    verdicts = {row.verdict for row in (*comparison.totals, *comparison.parts)}
    if "cannot tell" in verdicts:
        notes.append(f"cannot tell: {say_undecided(*comparison.clocks)}")
    if verdicts & {"noise", "slower", "faster"}:
        notes.append(
            "noise: within Welch's 95% interval over the recorded steps; two identical runs can differ by more"
        )
    return notes

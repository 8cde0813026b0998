"""Compare two recordings: which parts of the step time changed, and whether the change is more than noise.

A step's wall time is split without counting anything twice (`accounting`): time in which one thing ran alone, time in
which several overlapped, and idle time. The differences of the parts therefore add up to the difference of the step, to
the nanosecond; parts that are not listed are one row `rest`.

Noise is judged from the steps of each recording, with Welch's 95% interval for the difference of two means. It accounts
for the variation between steps of one run, not between two runs of the same workload.
"""

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
import polars as pl

from stepscope.errors import StepscopeError
from stepscope.explain.trace.accounting import Ints, account
from stepscope.explain.trace.comparability import compare_circumstances
from stepscope.explain.trace.profile import UNKNOWN, Profile
from stepscope.explain.trace.run_labels import BEFORE_AND_AFTER, identify, label_runs
from stepscope.findings import Cell, Column, Table
from stepscope.units import count_noun

By = Literal["phase", "class", "module", "kernel"]
Verdict = Literal["slower", "faster", "noise", "same", "cannot tell"]
WALL, ALONE, GPU_TIME = "wall", "wall, unprofiled", "sum of kernels"
IDLE, OVERLAP, REST = "(idle)", "(overlap)", "(rest)"
TOP = 12
LEAST_STEPS = 3
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_CLASS_NUMBER = re.compile(r"_\d+(?=\.|$)")
# Student's t, two-sided 95%, by degrees of freedom. Between two entries, the smaller one (wider interval) is used.
_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
_T |= {12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.0, 120: 1.98, 1000: 1.962}


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
    """`parts` add up to `wall` in A, in B and in the difference. `gate` is the row that decides whether B regressed:
    the unprofiled steps if both recordings have them, otherwise the profiled ones."""

    names: tuple[str, str]  # of the files
    labels: tuple[str, str]  # of the runs, by what differs between them
    by: By
    steps: tuple[int, int]
    wall: ComparisonRow
    totals: tuple[ComparisonRow, ...]
    parts: tuple[ComparisonRow, ...]
    gate: ComparisonRow
    remarks: tuple[str, ...]
    shorts: dict[str, str]  # short names by kernel name, if compared by kernel


def compare(
    a: Profile,
    b: Profile,
    *,
    by: By = "class",
    names: tuple[str, str] = BEFORE_AND_AFTER,
    labels: tuple[str, str] | None = None,
) -> ProfileComparison:
    labels = labels or label_runs(identify(a, names[0]), identify(b, names[1]))
    pieces = [_take_apart(profile, by) for profile in (a, b)]
    walls = [[sum(step.values(), Fraction(0)) for step in each] for each in pieces]
    wall = _row("step", WALL, walls[0], walls[1])
    parts = _parts(pieces[0], pieces[1], wall, by)
    totals = [wall]
    alone = [profile.plain_steps for profile in (a, b)]
    if all(alone):
        totals.append(_row("step", ALONE, alone[0], alone[1]))
    totals.append(_row("step", GPU_TIME, *(_gpu_times(profile) for profile in (a, b))))
    idle = [[step.get(IDLE, Fraction(0)) for step in each] for each in pieces]
    totals.append(_row("step", IDLE.strip("()"), idle[0], idle[1]))
    gate = totals[1] if all(alone) else wall
    return ProfileComparison(
        names=names,
        labels=labels,
        by=by,
        steps=(len(walls[0]), len(walls[1])),
        wall=wall,
        totals=tuple(totals),
        parts=tuple(parts),
        gate=gate,
        remarks=compare_circumstances(a, b, labels),
        shorts=_find_shorts(a) | _find_shorts(b) if by == "kernel" else {},
    )


def _find_shorts(profile: Profile) -> dict[str, str]:
    return dict(profile.kernels.select("name", "short").unique("name").iter_rows())


# --- Taking a step apart --------------------------------------------------------------------------------------------


def _take_apart(profile: Profile, by: By) -> list[dict[str, Fraction]]:
    """Return the parts of each step's wall time, as the mean over devices. Kernels that run past the end of their step
    are cut there, so that every moment belongs to one step."""
    keyed = profile.kernels.select("process", "device", "start_ns", "end_ns", _key(profile, by)).sort("start_ns")
    parted = keyed.partition_by("process", "device", maintain_order=True, include_key=False)
    devices = [_Device.of(kernels) for kernels in parted]
    return [_step_parts(devices, window) for window in profile.step_windows]


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


def _step_parts(devices: Sequence[_Device], window: tuple[int, int]) -> dict[str, Fraction]:
    parts: dict[str, Fraction] = {}
    for device in devices:
        done = account(device.cut(window), window)
        for name, time in (*done.classes.items(), (OVERLAP, done.overlap_ns), (IDLE, done.idle_ns)):
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


def _gpu_times(profile: Profile) -> list[Fraction]:
    """Return the sum of kernel durations per step that launched them."""
    times = profile.kernels.group_by("step").agg(ns=pl.col("time_ns").sum())
    known = dict(times.select("step", "ns").iter_rows())
    steps = profile.steps["step"].unique(maintain_order=True).to_list()
    values = [known.get(step, 0) for step in steps] if steps else [profile.gpu_time_ns]
    return [Fraction(value, len(profile.devices)) for value in values]


# --- Rows that add up -----------------------------------------------------------------------------------------------


def _parts(
    a: Sequence[dict[str, Fraction]], b: Sequence[dict[str, Fraction]], wall: ComparisonRow, by: By
) -> list[ComparisonRow]:
    """Return the largest changes first, then the rest. Values are rounded so that they still add up."""
    names = list(dict.fromkeys(name for step in (*a, *b) for name in step))
    samples = {name: ([s.get(name, Fraction(0)) for s in a], [s.get(name, Fraction(0)) for s in b]) for name in names}
    means = {name: (_mean(one), _mean(other)) for name, (one, other) in samples.items()}
    order = sorted(names, key=lambda name: (-abs(means[name][1] - means[name][0]), -means[name][1], name))
    shown = order if len(order) <= TOP + 1 else order[:TOP]
    rest = [name for name in order if name not in shown]
    if rest:
        summed = tuple(
            [sum(column, Fraction(0)) for column in zip(*(samples[n][k] for n in rest), strict=True)] for k in (0, 1)
        )
        samples[REST] = (summed[0], summed[1])
        shown = [*shown, REST]
    rounded = [
        _round_to_sum([_mean(samples[name][k]) for name in shown], total)
        for k, total in ((0, wall.a_ns), (1, wall.b_ns))
    ]
    return [
        ComparisonRow(group=by, name=name, a_ns=a_ns, b_ns=b_ns, verdict=judge(*samples[name]))
        for name, a_ns, b_ns in zip(shown, *rounded, strict=True)
        if a_ns or b_ns
    ]


def _round_to_sum(values: Sequence[Fraction], total: int) -> list[int]:
    """Round each value to a neighboring integer so that they add up to `total`, by rounding the running sum."""
    rounded, before, running = [], 0, Fraction(0)
    for value in values:
        running += value
        rounded.append(round(running) - before)
        before = round(running)
    assert before == total, "the parts of a step add up to its wall time"
    return rounded


def _row(group: str, name: str, a: Sequence[Fraction], b: Sequence[Fraction]) -> ComparisonRow:
    return ComparisonRow(group=group, name=name, a_ns=round(_mean(a)), b_ns=round(_mean(b)), verdict=judge(a, b))


def _mean(values: Sequence[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


# --- Noise ----------------------------------------------------------------------------------------------------------


def judge(a: Sequence[Fraction], b: Sequence[Fraction]) -> Verdict:
    """Return whether B differs from A by more than steps differ from each other."""
    difference = float(_mean(b) - _mean(a))
    if difference == 0:
        return "same"
    if min(len(a), len(b)) < LEAST_STEPS:
        return "cannot tell"
    if abs(difference) <= welch_margin([float(v) for v in a], [float(v) for v in b]):
        return "noise"
    return "slower" if difference > 0 else "faster"


def welch_margin(a: Sequence[float], b: Sequence[float]) -> float:
    """Return half the width of the 95% interval around the difference of the means."""
    errors = [statistics.variance(one) / len(one) for one in (a, b)]
    total = sum(errors)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(error**2 / (len(one) - 1) for error, one in zip(errors, (a, b), strict=True))
    return _student(freedom) * math.sqrt(total)


def _student(freedom: float) -> float:
    return _T[max(1, *(known for known in _T if known <= freedom + 1e-9))]


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
    only the limit counts."""
    gate = comparison.gate
    return gate.verdict in ("slower", "cannot tell") and gate.b_ns > gate.a_ns * (1 + limit)


def gate_sentence(comparison: ProfileComparison, limit: float) -> str:
    gate, failed = comparison.gate, regressed(comparison, limit)
    change = f"{(gate.b_ns / gate.a_ns - 1) * 100:+.2f}%" if gate.a_ns else "–"
    said = f"{'FAIL' if failed else 'pass'}: {gate.name} {change}, limit +{limit * 100:g}%"
    if gate.verdict == "cannot tell":
        return f"{said}; too few steps to rule out noise ({comparison.steps[0]} and {comparison.steps[1]})"
    return said + ("; within noise" if gate.verdict == "noise" else "")


def comparison_table(comparison: ProfileComparison) -> Table:
    total = comparison.wall.difference_ns
    a, b = comparison.labels
    columns = (
        Column(key="group", label=""),
        Column(key="name", label="per step"),
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
    return Table(title=_title(comparison), columns=columns, rows=tuple(rows), notes=tuple(_notes(comparison)))


def _cells(row: ComparisonRow, total: int | None, comparison: ProfileComparison) -> tuple[Cell, ...]:
    share = row.difference_ns / total if total else None
    times = (row.a_ns / 1e6, row.b_ns / 1e6, row.difference_ns / 1e6)
    verdict: str = row.verdict
    if not row.a_ns or not row.b_ns:
        verdict += f", only in {comparison.labels[1 if row.b_ns else 0]}"
    name = comparison.shorts.get(row.name, row.name)
    return (row.group, name, *times, row.ratio, share, verdict, row.a_ns, row.b_ns, row.name)


def _title(comparison: ProfileComparison) -> str:
    a, b = comparison.labels
    counts = " and ".join(count_noun(count, "step") for count in comparison.steps)
    return f"{a} → {b}: mean of {counts}, in ms"


def say_sum(by: By) -> str:
    return f"the `{by}` rows add up to `{WALL}`: kernels that ran alone, overlap and idle time"


def _notes(comparison: ProfileComparison) -> list[str]:
    files = [f"{label}: {name}" for label, name in zip(comparison.labels, comparison.names, strict=True)]
    named = comparison.names not in (comparison.labels, BEFORE_AND_AFTER)
    notes = [*(files if named else []), *comparison.remarks, say_sum(comparison.by)]
    verdicts = {row.verdict for row in (*comparison.totals, *comparison.parts)}
    if "cannot tell" in verdicts:
        notes.append(
            f"cannot tell: a recording has fewer than {LEAST_STEPS} steps, too few to distinguish a change from noise"
        )
    if verdicts & {"noise", "slower", "faster"}:
        notes.append(
            "noise: within Welch's 95% interval over the recorded steps; two identical runs can differ by more"
        )
    return notes

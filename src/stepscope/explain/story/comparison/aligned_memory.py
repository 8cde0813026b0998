"""The memory of two steps on one axis, phase by phase, and what makes their peaks differ.

Two steps allocate at different moments, so neither time nor the number of an event is a common axis. Both are cut into
phases, and each phase is stretched to the same columns. Inside a phase, x is the share of its allocations and frees.
The step shown is the one with the peak, so the highest column of the chart is the peak of the page.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stepscope.explain.alignment import align
from stepscope.explain.memory import MemoryProfile
from stepscope.explain.memory.timeline import Instants, stack_categories
from stepscope.findings import Cell, Column, Table
from stepscope.findings.compared import AlignedMemory, MemoryStretch

_COLUMNS = 160
_LEAST_COLUMNS = 8  # of a phase
_NESTED = "loss"  # inside the forward pass
_NO_PHASES = "the snapshots mark no phases, so all of their events are stretched to the same length"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phase:
    """Events `start` to `end` (exclusive)."""

    label: str
    start: int
    end: int

    def cut(self, profile: MemoryProfile, count: int) -> list[int]:
        """The event with the most memory in each of `count` columns."""
        edges = [self.start + (self.end - self.start) * column // count for column in range(count + 1)]
        return [low + int(profile.totals[low : max(high, low + 1)].argmax()) for low, high in pairwise(edges)]


def align_memory(a: MemoryProfile, b: MemoryProfile, labels: tuple[str, str]) -> AlignedMemory | None:
    """Return the memory of two recordings with events; None if one is a single moment."""
    if not a.num_events or not b.num_events:
        return None
    steps = [_choose_step(profile) for profile in (a, b)]
    phases = [_cut_step(profile, step) for profile, step in zip((a, b), steps, strict=True)]
    pairs = _join_phases(phases[0], phases[1])
    stretches = _place_phases(pairs)
    heights = [_stack(profile, [pair[run] for pair in pairs], stretches) for run, profile in enumerate((a, b))]
    names = tuple(dict.fromkeys((*heights[0], *heights[1])))
    empty = (0,) * stretches[-1].end
    one, other = (tuple(rows.get(name, empty) for name in names) for rows in heights)
    return AlignedMemory(
        title="Memory during the step" if any(step is not None for step in steps) else "Memory over time",
        runs=labels,
        categories=names,
        stretches=stretches,
        heights=(one, other),
        notes=tuple(_write_notes((a, b), steps, labels)),
    )


def _choose_step(profile: MemoryProfile) -> int | None:
    """The step with the peak or, if that is outside all steps, the one that the page shows elsewhere."""
    if not profile.steps:
        return None
    step, _ = profile.place_of(profile.peak_event)
    return profile.last_plain_step if step is None else step


def _cut_step(profile: MemoryProfile, step: int | None) -> list[_Phase]:
    """The phases of a step in order, and what is between them."""
    span = profile.span(step) if step is not None else None
    if step is None or span is None:
        return [_Phase(label="", start=0, end=profile.num_events)]
    found = sorted(
        (start, end, phase)
        for phase in profile.phases
        if phase != _NESTED
        for start, end in profile.phase_spans(step, phase)
    )
    phases, at = [], span[0]
    for start, end, label in (*found, (span[1], span[1], "")):
        if start > at:
            phases.append(_Phase(label="", start=at, end=start))
        if end > max(at, start):
            phases.append(_Phase(label=label, start=max(at, start), end=end))
        at = max(at, end)
    return phases


_Pair = tuple[_Phase | None, _Phase | None]


def _join_phases(a: Sequence[_Phase], b: Sequence[_Phase]) -> list[_Pair]:
    """The phases of both runs in order; one that only one run has is alone."""
    joined = align([phase.label for phase in a], [phase.label for phase in b])
    pairs: list[_Pair] = []
    last = (0, 0)
    for one, other in (*joined, (len(a), len(b))):
        pairs += [(phase, None) for phase in a[last[0] : one]]
        pairs += [(None, phase) for phase in b[last[1] : other]]
        pairs += [(a[one], b[other])] if one < len(a) and other < len(b) else []
        last = one + 1, other + 1
    return pairs


def _place_phases(pairs: Sequence[_Pair]) -> tuple[MemoryStretch, ...]:
    """Columns for each phase, by its largest share of the events of a run."""
    counts = [[phase.end - phase.start if phase is not None else 0 for phase in pair] for pair in pairs]
    totals = [max(1, sum(column)) for column in zip(*counts, strict=True)]
    shares = [max(count / total for count, total in zip(pair, totals, strict=True)) for pair in counts]
    stretches, at = [], 0
    for pair, share in zip(pairs, shares, strict=True):
        count = max(_LEAST_COLUMNS, round(_COLUMNS * share / sum(shares)))
        label = next(phase.label for phase in pair if phase is not None)
        runs = (pair[0] is not None, pair[1] is not None)
        stretches.append(MemoryStretch(label=label, start=at, end=at + count, runs=runs))
        at += count
    return tuple(stretches)


def _stack(
    profile: MemoryProfile, phases: Sequence[_Phase | None], stretches: Sequence[MemoryStretch]
) -> dict[str, tuple[int, ...]]:
    """The bytes of each category in every column; 0 where the run has no such phase."""
    events: list[int] = []
    columns: list[int] = []
    for phase, stretch in zip(phases, stretches, strict=True):
        if phase is not None:
            events += phase.cut(profile, stretch.end - stretch.start)
            columns += range(stretch.start, stretch.end)
    if profile.allocated_at(events[0] - 1) > profile.totals[events[0]]:
        events[0] -= 1  # a step that first frees memory
    instants: Instants = np.array(events, dtype=np.int64)
    rows = {}
    for area in stack_categories(profile, instants):
        row = [0] * stretches[-1].end
        for column, value in zip(columns, area.values, strict=True):
            row[column] = value
        rows[area.name] = tuple(row)
    return rows


def _write_notes(
    profiles: Sequence[MemoryProfile], steps: Sequence[int | None], labels: Sequence[str]
) -> Iterator[str]:
    if any(step is None for step in steps):
        yield f"{_NO_PHASES}; sizes in the legend are those at the peaks"
        return
    yield "each phase is stretched to the same length in both runs; sizes in the legend are those at the peaks"
    for profile, step, label in zip(profiles, steps, labels, strict=True):
        if profile.place_of(profile.peak_event)[0] != step:
            yield f"{label}: its peak is outside the steps; this is step {(step or 0) + 1}"


# --- The peaks --------------------------------------------------------------------------------------------------------


def find_peak(profile: MemoryProfile) -> dict[str, int]:
    """The bytes of every category at the peak."""
    return dict(profile.categories_at(profile.peak_event))


def tabulate_peaks(a: dict[str, int], b: dict[str, int], labels: tuple[str, str]) -> Table:
    """Each category at the peak of each run, the largest change first. The rows add up to `all`, to the byte."""
    names = [name for name in a if a[name] or b[name]]
    names.sort(key=lambda name: (-abs(b[name] - a[name]), -max(a[name], b[name]), name))
    total = sum(b.values()) - sum(a.values())
    change = f"{total:+,}".replace("-", "−")
    sums = [(name, a[name], b[name]) for name in names] + [("all", sum(a.values()), sum(b.values()))]
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (name, one, other, other - one, other / one if one else None, (other - one) / total if total else None)
        for name, one, other in sums
    )
    return Table(
        title="Peak memory by category",
        columns=(
            Column(key="category", label="category"),
            Column(key="a_bytes", label=labels[0], kind="bytes"),
            Column(key="b_bytes", label=labels[1], kind="bytes"),
            Column(key="difference_bytes", label="change", kind="bytes"),
            Column(key="ratio", label="ratio", kind="ratio"),
            Column(key="share_of_change", label="of change", kind="share"),
        ),
        rows=rows,
        notes=(f"the rows add up to the change of {change} bytes",) if total else (),
    )

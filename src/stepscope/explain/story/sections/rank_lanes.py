"""One step of several ranks on one clock: what each computes, when it waits for which rank, and when it is idle.

Clocks are aligned by the ends of collectives. Each rank has one track, with one thing at a time: computing by phase,
then waiting for a later rank, communication, and input. What is left is idle. A page shows a few ranks: the latest
ones, the extremes and a sample.
"""

from collections.abc import Sequence

import numpy as np
import polars as pl

from stepscope.explain.ranks.activity import RankActivity
from stepscope.explain.ranks.lateness import NEVER, RankTimes
from stepscope.explain.story.sections.lanes import Lane, fit_lanes, say_merged, write_down
from stepscope.explain.story.sections.spans import NONE, Ints, join_runs
from stepscope.explain.trace.attribution.names import cut_name
from stepscope.findings import Lanes

MOST_RANKS = 16
_LATEST = 3
_MOST_SPANS = 8_000
_COMMUNICATION, _INPUT, _WAITING, _OTHER = "communication", "input", "waiting", "computing"


def choose_ranks(
    ranks: Sequence[RankActivity], times: RankTimes | None, shown: int, most: int = MOST_RANKS
) -> list[int]:
    """Return the places of at most `most` ranks, in order: the one that the page is about, those that the others wait
    for most, the extremes, and an even sample."""
    if len(ranks) <= most:
        return list(range(len(ranks)))
    everyone = range(len(ranks))
    chosen = [shown]
    if times is not None:
        chosen += sorted(everyone, key=lambda place: -times.lateness[place].late_ns)[:_LATEST]
    for of in ("step_ns", "computed_ns", "exposed_ns"):
        values = [float(getattr(one, of)) for one in ranks]
        chosen += [values.index(max(values)), values.index(min(values))]
    kept = list(dict.fromkeys(chosen))[:most]
    for place in np.linspace(0, len(ranks) - 1, most).round().astype(int).tolist():
        if len(kept) < most and place not in kept:
            kept.append(place)
    return sorted(kept)


def say_chosen(shown: int, everyone: int) -> list[str]:
    """A note on the choice; empty if all ranks are shown."""
    if shown == everyone:
        return []
    return [
        f"{shown} of {everyone} ranks: those that the others wait for most, the longest and shortest step, compute and "
        "exposed communication, and an even sample"
    ]


def draw_ranks(times: RankTimes, labels: Sequence[str], shown: int) -> Lanes | None:
    """Return one step of several ranks; None if the rank at place `shown` has no matched step."""
    chosen = choose_ranks(times.ranks, times, shown)
    step = _choose_step(times.ranks[shown])
    windows = [_find_window(times, place, step) for place in chosen]
    known = [window for window in windows if window is not None]
    if not known:
        return None
    begin, end = min(start for start, _ in known), max(stop for _, stop in known)
    lanes = [
        _draw_rank(times, place, labels[place], begin, end)
        for place, window in zip(chosen, windows, strict=True)
        if window is not None
    ]
    fitted, cell = fit_lanes(lanes, _MOST_SPANS)
    steps = times.ranks[shown].clock.num_steps
    notes = [
        "clocks aligned by the ends of collectives; empty time is idle",
        "waiting: the rank has arrived at a collective, and the one that it waits for has not",
        *(["times in the legend add up all ranks shown"] if len(lanes) > 1 else []),
        *say_chosen(len(lanes), len(times.ranks)),
        *say_merged("stretches", lanes, fitted, cell),
    ]
    if times.ranks[shown].clock.has_steps and steps > 1:
        notes.insert(0, f"step {step + 1} of {steps}, the closest to the median on {labels[shown]}")
    title = f"Step {step + 1} on each rank" if times.ranks[shown].clock.has_steps else "Whole trace"
    return write_down(title, round(end - begin), fitted, notes)


def _choose_step(rank: RankActivity) -> int:
    """The place of the step closest to the median."""
    lengths = [end - start for start, end in rank.extent.windows]
    median = sorted(lengths)[(len(lengths) - 1) // 2]
    return lengths.index(median)


def _find_window(times: RankTimes, place: int, step: int) -> tuple[float, float] | None:
    """When a rank ran a step, on the common clock; None if it did not, or its clock is unknown."""
    windows = times.ranks[place].extent.windows
    if step >= len(windows) or (times.places[:, place] == NEVER).all():
        return None
    start, end = times.common_clock(np.array(windows[step]), place).tolist()
    return start, end


def _draw_rank(times: RankTimes, place: int, label: str, begin: float, end: float) -> Lane:
    rank = times.ranks[place]
    start, stop = times.own_clock(np.array([begin, end]), place).tolist()
    waits = times.waits_of(place)
    edges = [rank.computes, rank.running, rank.loading, waits, rank.phases]
    moments = np.unique(np.concatenate([[start, stop], *(_edges(frame) for frame in edges)]).astype(np.int64))
    moments = moments[(moments >= start) & (moments <= stop)]
    at = moments[:-1]
    phases = ["other" if name is None else name for name in rank.phases["phase"].to_list()]
    names = [*dict.fromkeys(phases), _COMMUNICATION, _INPUT, *dict.fromkeys(waits["name"].to_list()), _OTHER]
    numbers = {name: number for number, name in enumerate(names)}
    phase = np.array([numbers[name] for name in phases] + [numbers[_OTHER]])
    waiting = np.array([numbers[name] for name in waits["name"].to_list()] + [NONE])
    found = np.full(len(at), NONE, np.int64)
    # In this order: what comes later matters more.
    found[_inside(rank.loading, at) >= 0] = numbers[_INPUT]
    found[_inside(rank.running, at) >= 0] = numbers[_COMMUNICATION]
    waits_at = _inside(waits, at)
    found[waits_at >= 0] = waiting[waits_at[waits_at >= 0]]
    computes = _inside(rank.computes, at) >= 0
    found[computes] = phase[np.searchsorted(rank.phases["start_ns"].to_numpy(), at, side="right") - 1][computes]
    groups = [_WAITING if name.startswith("waits for") else name for name in names]
    group_names = list(dict.fromkeys(groups))
    group_of = np.array([group_names.index(group) for group in groups] + [NONE])
    runs = join_runs(at - start, moments[1:] - start, found, group_of[found])
    runs.counts[:] = 1
    return Lane(
        label=label,
        kind="rank",
        stretches=runs,
        names=names,
        groups=group_names,
        shorten=cut_name,
        several="several, mostly {}",
    )


def _edges(frame: pl.DataFrame) -> Ints:
    return np.concatenate((frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()))


def _inside(stretches: pl.DataFrame, moments: Ints) -> Ints:
    """The row of the stretch around each moment, -1 if there is none."""
    starts, ends = stretches["start_ns"].to_numpy(), stretches["end_ns"].to_numpy()
    row = np.searchsorted(starts, moments, side="right") - 1
    if not len(starts):
        return np.full(len(moments), -1)
    result: Ints = np.where((row >= 0) & (moments < ends[row]), row, -1)
    return result

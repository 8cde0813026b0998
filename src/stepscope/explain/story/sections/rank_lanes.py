"""One step of several ranks on one clock: what each computes, when it waits for which rank, and when it is idle.

Clocks are aligned by the ends of collectives. Each rank has one track, with one thing at a time: computing by phase,
then waiting for a later rank, communication, input, and what the CPU does. The rest is idle. A page shows a few ranks:
the latest ones, the extremes and a sample.
"""

from collections.abc import Sequence

import numpy as np
import polars as pl

from stepscope.explain.ranks.activity import RankActivity
from stepscope.explain.ranks.lateness import NEVER, RankTimes
from stepscope.explain.ranks.rank_tables import name_idle
from stepscope.explain.story.sections.lanes import TrackDraft, find_median_step, fit_lanes, say_merged, write_down
from stepscope.explain.story.sections.spans import NONE, Ints, join_runs
from stepscope.explain.trace.attribution.names import cut_name
from stepscope.findings import Lanes

MOST_RANKS = 16
_LATEST = 3
_MOST_SPANS = 8_000
_COMMUNICATION, _INPUT, _WAITING, _HOST = "communication", "input", "waiting", "CPU"
_SHORTEST_GAP = 0.0005  # of the step: a shorter one does not separate two stretches of the same kind


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
    """Return one step of several ranks, as long as that of the rank at place `shown`; None if its clock is unknown."""
    chosen = choose_ranks(times.ranks, times, shown)
    step = find_median_step(times.ranks[shown].extent.windows)
    matched = [place for place in chosen if (times.places[:, place] != NEVER).any()]
    if shown not in matched:  # its clock is unknown
        return None
    begin, end = times.common_clock(np.array(times.ranks[shown].extent.windows[step]), shown).tolist()
    lanes = [_draw_rank(times, place, labels[place], begin, end) for place in matched]
    fitted, cell = fit_lanes(lanes, _MOST_SPANS)
    steps = times.ranks[shown].clock.num_steps
    notes = [
        f"clocks aligned by the ends of collectives; empty time is {name_idle(times.ranks)}",
        "waiting: the rank has arrived at a collective, and the one that it waits for has not",
        *(["times in the legend add up all ranks shown"] if len(lanes) > 1 else []),
        *say_chosen(len(lanes), len(times.ranks)),
        *say_merged("stretches", lanes, fitted, cell),
    ]
    if times.ranks[shown].clock.has_steps and steps > 1:
        notes.insert(0, f"step {step + 1} of {steps}, the closest to the median on {labels[shown]}")
    title = f"Step {step + 1} on each rank" if times.ranks[shown].clock.has_steps else "Whole trace"
    return write_down(title, round(end - begin), fitted, notes)


def _draw_rank(times: RankTimes, place: int, label: str, begin: float, end: float) -> TrackDraft:
    rank, waits = times.ranks[place], times.waits_of(place)
    start, stop = times.own_clock(np.array([begin, end]), place).tolist()
    host = rank.host.filter((pl.col("end_ns") > start) & (pl.col("start_ns") < stop))
    edges = [rank.computes, rank.running, rank.loading, waits, rank.phases, host]
    moments = np.unique(np.concatenate([[start, stop], *(_edges(frame) for frame in edges)]).astype(np.int64))
    moments = moments[(moments >= start) & (moments <= stop)]
    at = moments[:-1]
    names: dict[tuple[str, str], int] = {}  # name and group
    found = np.full(len(at), NONE, np.int64)

    def number(name: str, group: str) -> int:
        return names.setdefault((name, group), len(names))

    # What comes later matters more; inner ranges begin later.
    for name, first, last in host.select("name", "start_ns", "end_ns").iter_rows():
        found[(at >= first) & (at < last)] = number(name, _HOST)
    found[_inside(rank.loading, at) >= 0] = number(_INPUT, _INPUT)
    found[_inside(rank.running, at) >= 0] = number(_COMMUNICATION, _COMMUNICATION)
    waiting = np.array([number(name, _WAITING) for name in waits["name"].to_list()] + [NONE])
    waits_at = _inside(waits, at)
    found[waits_at >= 0] = waiting[waits_at[waits_at >= 0]]
    phases = np.array([number(name, name) for name in rank.phases["phase"].to_list()] + [NONE])
    computes = _inside(rank.computes, at) >= 0
    phase_at = np.searchsorted(rank.phases["start_ns"].to_numpy(), at, side="right") - 1
    found[computes] = phases[phase_at][computes]
    kept = (found != NONE) | (np.diff(moments) >= _SHORTEST_GAP * (stop - start))
    group_names = list(dict.fromkeys(group for _, group in names))
    group_of = np.array([group_names.index(group) for _, group in names] + [NONE])
    runs = join_runs(at[kept] - start, moments[1:][kept] - start, found[kept], group_of[found[kept]])
    runs.counts[:] = 1
    return TrackDraft(
        label=label,
        kind="rank",
        stretches=runs,
        names=[name for name, _ in names],
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

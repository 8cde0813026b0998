"""Several ranks of one run: where the time of each goes, and which one the others wait for."""

from collections.abc import Sequence

import msgspec

from stepscope.explain.ranks.activity import RankActivity
from stepscope.explain.ranks.lateness import RankTimes
from stepscope.explain.ranks.matching import rank_numbers
from stepscope.explain.ranks.rank_tables import (
    REASONS,
    label_ranks,
    late_table,
    name_idle,
    ranks_table,
    say_imbalance,
    say_straggler,
    unit_of_ranks,
)
from stepscope.explain.story.sections.rank_lanes import choose_ranks, draw_ranks, say_chosen
from stepscope.explain.story.sources import Materials
from stepscope.findings import Bars, Exhibit, Section
from stepscope.units import say_list, say_percent, say_time

_SERIES = ("compute only", "hidden communication", "exposed communication")
_MS = 1e6
_LATE_ROWS = 10
_MOST_ROWS = 64  # ranks in the table on a page


def show_ranks(materials: Materials) -> Section:
    ranks, times = materials.ranks, materials.rank_times
    exhibits = tell_ranks(ranks, times, materials.shown)
    return Section(key="ranks", title="Ranks", lead=_say_ranks(ranks, times), exhibits=exhibits)


def _say_ranks(ranks: Sequence[RankActivity], times: RankTimes | None) -> str:
    labels, steps = label_ranks(ranks), [one.step_ns for one in ranks]
    slowest = labels[steps.index(max(steps))]
    fastest = labels[steps.index(min(steps))]
    spread = f"{say_time(min(steps))} ({fastest}) to {say_time(max(steps))} ({slowest})"
    shares = [one.exposed_ns / max(1, one.step_ns) for one in ranks]
    low, high = say_percent(min(shares)), say_percent(max(shares))
    between = low if low == high else f"{low} to {high}"
    is_run = rank_numbers(ranks) is not None
    mean = f"{say_time(sum(steps) / len(steps))} on average over {len(ranks)} ranks, " if is_run else ""
    said = f"A {unit_of_ranks(ranks)} takes {mean}{spread}. Exposed communication takes {between} of it."
    uneven = say_imbalance(ranks)
    if is_run and uneven:
        said += f" {uneven[0].upper()}{uneven[1:]}."
    if times is None:
        unmatched = "No collective could be matched across these ranks."
        return f"{said} {unmatched if is_run else 'The files do not contain their rank.'}"
    if times.straggler is None or times.straggler.share <= 0.5:
        return said
    late = say_straggler(times, times.straggler)
    said += f" {late[0].upper()}{late[1:]}."
    next_ = [f"rank {one.lateness.rank} ({REASONS[one.reason]})" for one in times.others_late]
    return f"{said} Ranks also wait for {say_list(next_)}." if next_ else said


def tell_ranks(ranks: Sequence[RankActivity], times: RankTimes | None, shown: int = 0) -> tuple[Exhibit, ...]:
    """Empty for fewer than two ranks."""
    if len(ranks) < 2:
        return ()
    labels, unit = label_ranks(ranks), unit_of_ranks(ranks)
    drawn, listed = choose_ranks(ranks, times, shown), choose_ranks(ranks, times, shown, _MOST_ROWS)
    bars = Bars(
        title=f"{unit.capitalize()} time by rank",
        kind="ms",
        labels=tuple(labels[place] for place in drawn),
        series=(*_SERIES, name_idle(ranks)),
        values=tuple(zip(*(_take_apart(ranks[place]) for place in drawn), strict=True)),
        is_stacked=True,
        notes=(
            f"the parts add up to the {unit}; hidden communication overlaps with compute, exposed communication does "
            "not",
            *say_chosen(len(drawn), len(ranks)),
        ),
    )
    table = ranks_table(ranks, times, listed)
    if len(listed) < len(ranks):
        table = msgspec.structs.replace(
            table, notes=(*table.notes, *say_chosen(len(listed), len(ranks)), "all ranks: --table ranks")
        )
    exhibits = [Exhibit(key="ranks-time", part=bars), Exhibit(key="ranks-table", part=table)]
    if times is not None:
        lanes = draw_ranks(times, labels, shown)
        exhibits += [Exhibit(key="ranks-timeline", part=lanes)] if lanes is not None else []
        exhibits.append(Exhibit(key="ranks-late", part=late_table(times, top=_LATE_ROWS)))
    return tuple(exhibits)


def _take_apart(rank: RankActivity) -> tuple[float, ...]:
    """Milliseconds per step, mean over devices."""
    alone = rank.clock.per_step(rank.per_device(rank.totals.busy - rank.totals.hidden)) - rank.exposed_ns
    return tuple(time / _MS for time in (alone, rank.hidden_ns, rank.exposed_ns, rank.clock.idle_ns))

"""Several ranks of one run: where the time of each goes, and which one the others wait for."""

from collections.abc import Sequence

from stepscope.explain.ranks.lateness import RankTimes, rank_numbers
from stepscope.explain.ranks.rank_tables import exposed_step_ns, label_ranks, late_table, ranks_table, unit_of_ranks
from stepscope.explain.story.sources import Materials
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Bars, Exhibit, Section
from stepscope.units import say_percent, say_time

_SERIES = ("compute only", "hidden communication", "exposed communication", "idle")
_MS = 1e6
_LATE_ROWS = 10


def show_ranks(materials: Materials) -> Section:
    profiles, times = materials.ranks, materials.rank_times
    return Section(key="ranks", title="Ranks", lead=_say_ranks(profiles, times), exhibits=tell_ranks(profiles, times))


def _say_ranks(profiles: Sequence[Profile], times: RankTimes | None) -> str:
    labels, steps = label_ranks(profiles), [one.clock.step_ns for one in profiles]
    slowest = labels[steps.index(max(steps))]
    fastest = labels[steps.index(min(steps))]
    spread = f"{say_time(min(steps))} ({fastest}) to {say_time(max(steps))} ({slowest})"
    shares = [exposed_step_ns(one) / max(1, one.clock.step_ns) for one in profiles]
    low, high = say_percent(min(shares)), say_percent(max(shares))
    between = low if low == high else f"{low} to {high}"
    is_run = rank_numbers(profiles) is not None
    mean = f"{say_time(sum(steps) / len(steps))} on average over {len(profiles)} ranks, " if is_run else ""
    said = f"A {unit_of_ranks(profiles)} takes {mean}{spread}. Exposed communication takes {between} of it."
    if times is None:
        unmatched = "No collective could be matched across these ranks."
        return f"{said} {unmatched if is_run else 'The files do not contain their rank.'}"
    if times.straggler is None or times.straggler.share <= 0.5:
        return said
    late = times.straggler.lateness
    place = times.lateness.index(late)
    return f"{said} The others wait for {labels[place]}: {say_time(late.late_ns)} in the recording."


def tell_ranks(profiles: Sequence[Profile], times: RankTimes | None) -> tuple[Exhibit, ...]:
    """Empty for fewer than two ranks."""
    if len(profiles) < 2:
        return ()
    parts, unit = [_take_apart(profile) for profile in profiles], unit_of_ranks(profiles)
    bars = Bars(
        title=f"{unit.capitalize()} time by rank",
        kind="ms",
        labels=label_ranks(profiles),
        series=_SERIES,
        values=tuple(zip(*parts, strict=True)),
        is_stacked=True,
        notes=(
            f"the parts add up to the {unit}; hidden communication overlaps with compute, exposed communication does "
            "not",
        ),
    )
    exhibits = [
        Exhibit(key="ranks-time", part=bars),
        Exhibit(key="ranks-table", part=ranks_table(profiles, times)),
    ]
    if times is not None:
        exhibits.append(Exhibit(key="ranks-late", part=late_table(times, top=_LATE_ROWS)))
    return tuple(exhibits)


def _take_apart(profile: Profile) -> tuple[float, ...]:
    """Milliseconds per step, mean over devices."""
    whole = [device.whole for device in profile.devices]
    hidden, busy = (
        sum(times) / len(whole)
        for times in zip(*((one.communication_hidden_ns, one.busy_ns) for one in whole), strict=True)
    )
    exposed = exposed_step_ns(profile)
    alone, hidden = profile.clock.per_step(busy - hidden) - exposed, profile.clock.per_step(hidden)
    return tuple(time / _MS for time in (alone, hidden, exposed, profile.clock.idle_ns))

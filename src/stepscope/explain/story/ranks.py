"""Several ranks of one run beside each other: what each computes, and how much of its communication it waits for."""

from collections.abc import Sequence

from stepscope.explain.trace.breakdown import ranks_table
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Bars, Exhibit

_SERIES = ("compute alone", "communication hidden", "communication exposed", "idle")


def tell_ranks(profiles: Sequence[Profile]) -> tuple[Exhibit, ...]:
    """Nothing for fewer than two."""
    if len(profiles) < 2:
        return ()
    parts = [_take_apart(profile) for profile in profiles]
    bars = Bars(
        title="A step of each rank",
        kind="ms",
        labels=_label(profiles),
        series=_SERIES,
        values=tuple(zip(*parts, strict=True)),
        is_stacked=True,
        notes=(
            "the parts add up to a step's wall time while recorded; hidden: something else runs beside it, exposed: "
            "the device waits for it",
        ),
    )
    return (Exhibit(key="ranks-time", part=bars), Exhibit(key="ranks-table", part=ranks_table(profiles)))


def _take_apart(profile: Profile) -> tuple[float, ...]:
    """In milliseconds a step; over several devices the mean."""
    whole = [device.whole for device in profile.devices]
    scale = len(whole) * profile.steps_in_window * 1e6
    hidden = sum(one.communication_hidden_ns for one in whole)
    exposed = sum(one.communication_exposed_ns for one in whole)
    alone = sum(one.busy_ns for one in whole) - hidden - exposed
    idle = sum(one.idle_ns for one in whole)
    return tuple(time / scale for time in (alone, hidden, exposed, idle))


def share_exposed(profile: Profile) -> float:
    """Of a step's wall time while recorded, as the bars have it."""
    parts = _take_apart(profile)
    return parts[_SERIES.index("communication exposed")] / max(sum(parts), 1e-6)


def _label(profiles: Sequence[Profile]) -> tuple[str, ...]:
    """By rank where every one is known and there once, else by place."""
    ranks = [profile.recording.manifest.rank for profile in profiles]
    known = [rank for rank in ranks if rank is not None]
    if len(set(known)) == len(ranks):
        return tuple(f"rank {rank}" for rank in known)
    return tuple(f"recording {place + 1}" for place in range(len(ranks)))

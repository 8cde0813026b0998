"""Where a step's time goes: as it ran, taken apart, against the device's limits, and rank by rank."""

from collections.abc import Sequence

from stepscope.explain.experiments.bench_tables import bench_table
from stepscope.explain.questions.answers import say_list
from stepscope.explain.story.missing import explain_absence
from stepscope.explain.story.phrases import name_class, retitle, shorten
from stepscope.explain.story.sections.breakdown import TITLE, break_down
from stepscope.explain.story.sections.lanes import draw_step
from stepscope.explain.story.sections.roofline_chart import draw_roofline
from stepscope.explain.story.sources import Materials
from stepscope.explain.trace.counters import has_counters
from stepscope.explain.trace.counters import kernels_table as counters_table
from stepscope.explain.trace.profile import Profile
from stepscope.explain.trace.profile_tables import ranks_table
from stepscope.explain.trace.roofline import roofline_table
from stepscope.findings import Bars, Exhibit, Missing, Section
from stepscope.units import say_percent, say_share, say_time

_ROOFLINE_ROWS = 20
_COUNTED_ROWS = 25
_NAMED = 3  # classes in a lead
_LIMITS = {
    "compute": "by arithmetic",
    "memory": "by memory bandwidth",
    "launch": "by the time it takes to start a kernel",
}


def show_timeline(materials: Materials) -> Section:
    key, title = "timeline", "One step as it ran"
    profile = materials.profile
    if profile is None:
        return Section(key=key, title=title, missing=(explain_absence(materials, "profile", "the step's timeline"),))
    if profile.is_serialized:
        why = "Nsight Compute runs one kernel at a time, so there is no order of a step to show"
        missing = Missing(what="the step's timeline", why=why, command="stepscope profile")
        return Section(key=key, title=title, missing=(missing,))
    step_ns = materials.profile_step_ns
    assert step_ns is not None, "there is a profile"
    exhibit = Exhibit(key="step-timeline", part=draw_step(profile, step_ns))
    return Section(key=key, title=title, lead=_say_step(profile, step_ns), exhibits=(exhibit,))


def _say_step(profile: Profile, step_ns: float) -> str:
    word = "operators" if profile.on_cpu else "kernels"
    if not profile.has_steps:
        return (
            f"The recording marks no steps; it holds {profile.kernels.height:,} {word} in {say_time(profile.wall_ns)}."
        )
    count = profile.kernels.height / profile.steps_in_window
    said = f"A step runs {count:,.0f} {word} in {say_time(step_ns)}"
    if step_ns != profile.recorded_step_ns:
        said += f"; drawn is one as recorded, when a step took {say_time(profile.recorded_step_ns)}"
    elif profile.recording.manifest.overhead is not None:
        said += f" while recorded, {say_time(profile.recording.manifest.overhead.plain_ns)} without the recorder"
    phases = [row for row in profile.time_by("phase").iter_rows(named=True) if row["phase"] != "unknown"]
    named = say_list(f"{row['phase']} {say_percent(row['share'])}" for row in phases)
    return f"{said}. Of the {word}' time, {named}." if phases else f"{said}."


def show_time(materials: Materials) -> Section:
    key, title = "time", TITLE
    profile, rows = materials.profile, materials.bench
    timed = (
        [Exhibit(key="time-bench", part=shorten(retitle(bench_table(rows), "Steps timed by themselves"), ""))]
        if rows
        else []
    )
    if profile is None:
        missing = (explain_absence(materials, "profile", "time by class, phase and kernel"),)
        return Section(key=key, title=title, exhibits=tuple(timed), missing=missing)
    assert materials.profile_step_ns is not None, "there is a profile"
    taken_apart = break_down([profile], [""], [materials.profile_step_ns])
    exhibits = [Exhibit(key="breakdown", part=taken_apart), *timed]
    if profile.recording.counters.height and has_counters(profile.recording):
        counted = counters_table(profile.recording, top=_COUNTED_ROWS)
        exhibits.append(Exhibit(key="time-counters", part=counted))
    return Section(key=key, title=title, lead=_say_classes(profile), exhibits=tuple(exhibits))


def _say_classes(profile: Profile) -> str:
    classes = profile.time_by("class").head(_NAMED).iter_rows(named=True)
    named = say_list(f"{say_percent(row['share'])} {name_class(row['class'])}" for row in classes)
    word = "operators" if profile.on_cpu else "kernels"
    whole = "a step" if profile.has_steps else "the recording"
    time = profile.gpu_time_ns / (profile.steps_in_window if profile.has_steps else 1)
    return f"The {word} of {whole} take {say_time(time)} together: {named}{_say_overlap(profile)}."


def _say_overlap(profile: Profile) -> str:
    """Durations added up are more than a device's busy time where kernels run side by side."""
    busy = sum(one.whole.busy_ns for one in profile.devices)
    twice = profile.gpu_time_ns - busy
    return (
        f"; {say_share(twice / profile.gpu_time_ns)} of it beside others" if twice > 0.01 * profile.gpu_time_ns else ""
    )


def show_roofline(materials: Materials) -> Section:
    key, title = "roofline", "How near to the device's limits"
    profile, shares = materials.profile, materials.shares
    if profile is None or shares is None:
        return Section(
            key=key,
            title=title,
            missing=(explain_absence(materials, "profile", "operators against the device's limits"),),
        )
    drawn = draw_roofline([profile], [""])
    if isinstance(drawn, Missing):
        return Section(key=key, title=title, missing=(drawn,))
    table = roofline_table(profile, top=_ROOFLINE_ROWS, step_ns=shares.step_ns if profile.has_steps else None)
    exhibits = (Exhibit(key="roofline", part=drawn), Exhibit(key="roofline-table", part=table))
    return Section(key=key, title=title, lead=_say_limits(shares.limits), exhibits=exhibits)


def _say_limits(limits: dict[str, float]) -> str:
    if not limits:
        return "For no operator are both its cost and the device's limits known."
    ordered = sorted(limits.items(), key=lambda item: -item[1])
    (largest, most), *others = ordered
    said = f"{say_percent(most)} is limited {_LIMITS[largest]}"
    said += "".join(f", {say_percent(share)} {_LIMITS[name]}" for name, share in others)
    rest = 1 - sum(limits.values())
    unknown = f"; of {say_percent(rest)} the limit is not known" if rest > 0.01 else ""
    return f"Of the kernels' time, {said}{unknown}."


def show_ranks(materials: Materials) -> Section:
    profiles = materials.ranks
    return Section(key="ranks", title="Ranks", lead=_say_ranks(profiles), exhibits=tell_ranks(profiles))


def _say_ranks(profiles: Sequence[Profile]) -> str:
    exposed = [share_exposed(profile) for profile in profiles]
    low, high = say_percent(min(exposed)), say_percent(max(exposed))
    between = low if low == high else f"between {low} and {high}"
    return f"On {len(profiles)} ranks communication that nothing hides takes {between} of the step as recorded."


# --- Ranks ------------------------------------------------------------------------------------------------------------


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

"""Where a step's time goes: the timeline, the breakdown, the roofline, and each rank."""

from collections.abc import Sequence

from stepscope.explain.experiments.bench_tables import bench_table
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
from stepscope.units import count_noun, say_percent, say_share, say_time

_ROOFLINE_ROWS = 20
_COUNTED_ROWS = 25
_NAMED = 3  # classes in a lead
_LIMITS = {"compute": "compute-bound", "memory": "memory-bound", "launch": "too small to fill the GPU"}


def show_timeline(materials: Materials) -> Section:
    key, title = "timeline", "Timeline"
    profile = materials.profile
    if profile is None:
        return Section(key=key, title=title, missing=(explain_absence(materials, "profile", "the timeline"),))
    if profile.is_serialized:
        why = "Nsight Compute runs one kernel at a time, so its file has no timeline of a step"
        missing = Missing(what="the timeline", why=why, command="stepscope profile")
        return Section(key=key, title=title, missing=(missing,))
    step_ns = materials.profile_step_ns
    assert step_ns is not None, "a profile has a step time"
    exhibit = Exhibit(key="step-timeline", part=draw_step(profile, step_ns))
    return Section(key=key, title=title, lead=_say_step(profile, step_ns), exhibits=(exhibit,))


def _say_step(profile: Profile, step_ns: float) -> str:
    word = "operator" if profile.on_cpu else "kernel"
    if not profile.has_steps:
        return f"{count_noun(profile.kernels.height, word)} in {say_time(profile.wall_ns)}; no steps are marked."
    said = (
        f"{count_noun(round(profile.kernels.height / profile.steps_in_window), word)} in {say_time(step_ns)} per step"
    )
    if step_ns != profile.recorded_step_ns:
        said += f" ({say_time(profile.recorded_step_ns)} in the profiled step shown here)"
    elif profile.recording.manifest.overhead is not None:
        said += f" while profiling ({say_time(profile.recording.manifest.overhead.plain_ns)} unprofiled)"
    phases = [row for row in profile.time_by("phase").iter_rows(named=True) if row["phase"] != "unknown"]
    named = ", ".join(f"{row['phase']} {say_percent(row['share'])}" for row in phases)
    return f"{said}. {word.capitalize()} time: {named}." if phases else f"{said}."


def show_time(materials: Materials) -> Section:
    key, title = "time", TITLE
    profile, rows = materials.profile, materials.bench
    timed = (
        [Exhibit(key="time-bench", part=shorten(retitle(bench_table(rows), "Unprofiled steps"), ""))] if rows else []
    )
    if profile is None:
        missing = (explain_absence(materials, "profile", "time by kernel"),)
        return Section(key=key, title=title, exhibits=tuple(timed), missing=missing)
    assert materials.profile_step_ns is not None, "a profile has a step time"
    taken_apart = break_down([profile], [""], [materials.profile_step_ns])
    exhibits = [Exhibit(key="breakdown", part=taken_apart), *timed]
    if profile.recording.counters.height and has_counters(profile.recording):
        counted = counters_table(profile.recording, top=_COUNTED_ROWS)
        exhibits.append(Exhibit(key="time-counters", part=counted))
    return Section(key=key, title=title, lead=_say_classes(profile), exhibits=tuple(exhibits))


def _say_classes(profile: Profile) -> str:
    classes = profile.time_by("class").head(_NAMED).iter_rows(named=True)
    named = ", ".join(f"{name_class(row['class'])} {say_percent(row['share'])}" for row in classes)
    word = "Operators" if profile.on_cpu else "Kernels"
    whole = " per step" if profile.has_steps else ""
    time = profile.gpu_time_ns / (profile.steps_in_window if profile.has_steps else 1)
    return f"{word} take {say_time(time)}{whole}: {named}{_say_overlap(profile)}."


def _say_overlap(profile: Profile) -> str:
    """Kernel times add up to more than the busy time if kernels overlap."""
    busy = sum(one.whole.busy_ns for one in profile.devices)
    twice = profile.gpu_time_ns - busy
    return (
        f"; {say_share(twice / profile.gpu_time_ns)} of it overlaps with other kernels"
        if twice > 0.01 * profile.gpu_time_ns
        else ""
    )


def show_roofline(materials: Materials) -> Section:
    key, title = "roofline", "Roofline"
    profile, shares = materials.profile, materials.shares
    if profile is None or shares is None:
        return Section(
            key=key,
            title=title,
            missing=(explain_absence(materials, "profile", "the roofline"),),
        )
    drawn = draw_roofline([profile], [""])
    if isinstance(drawn, Missing):
        return Section(key=key, title=title, missing=(drawn,))
    table = roofline_table(profile, top=_ROOFLINE_ROWS, step_ns=shares.step_ns if profile.has_steps else None)
    exhibits = (Exhibit(key="roofline", part=drawn), Exhibit(key="roofline-table", part=table))
    return Section(key=key, title=title, lead=_say_limits(shares.limits), exhibits=exhibits)


def _say_limits(limits: dict[str, float]) -> str:
    if not limits:
        return "No operator has both a known cost and known device limits."
    ordered = sorted(limits.items(), key=lambda item: -item[1])
    said = ", ".join(f"{say_percent(share)} {_LIMITS[name]}" for name, share in ordered)
    rest = 1 - sum(limits.values())
    unknown = f", {say_percent(rest)} unknown" if rest > 0.01 else ""
    return f"Kernel time: {said}{unknown}."


def show_ranks(materials: Materials) -> Section:
    profiles = materials.ranks
    return Section(key="ranks", title="Ranks", lead=_say_ranks(profiles), exhibits=tell_ranks(profiles))


def _say_ranks(profiles: Sequence[Profile]) -> str:
    exposed = [share_exposed(profile) for profile in profiles]
    low, high = say_percent(min(exposed)), say_percent(max(exposed))
    between = low if low == high else f"between {low} and {high}"
    return f"Exposed communication takes {between} of the profiled step on {len(profiles)} ranks."


# --- Ranks ------------------------------------------------------------------------------------------------------------


_SERIES = ("compute", "hidden communication", "exposed communication", "idle")


def tell_ranks(profiles: Sequence[Profile]) -> tuple[Exhibit, ...]:
    """Empty for fewer than two ranks."""
    if len(profiles) < 2:
        return ()
    parts = [_take_apart(profile) for profile in profiles]
    bars = Bars(
        title="Step time by rank",
        kind="ms",
        labels=_label(profiles),
        series=_SERIES,
        values=tuple(zip(*parts, strict=True)),
        is_stacked=True,
        notes=(
            "the parts add up to the profiled step; hidden communication overlaps with compute, exposed communication "
            "does not",
        ),
    )
    return (Exhibit(key="ranks-time", part=bars), Exhibit(key="ranks-table", part=ranks_table(profiles)))


def _take_apart(profile: Profile) -> tuple[float, ...]:
    """Milliseconds per step, mean over devices."""
    whole = [device.whole for device in profile.devices]
    scale = len(whole) * profile.steps_in_window * 1e6
    hidden = sum(one.communication_hidden_ns for one in whole)
    exposed = sum(one.communication_exposed_ns for one in whole)
    alone = sum(one.busy_ns for one in whole) - hidden - exposed
    idle = sum(one.idle_ns for one in whole)
    return tuple(time / scale for time in (alone, hidden, exposed, idle))


def share_exposed(profile: Profile) -> float:
    """The share of exposed communication in the profiled step, as in the bars."""
    parts = _take_apart(profile)
    return parts[_SERIES.index("exposed communication")] / max(sum(parts), 1e-6)


def _label(profiles: Sequence[Profile]) -> tuple[str, ...]:
    """Ranks if all are known and distinct, else positions."""
    ranks = [profile.recording.manifest.rank for profile in profiles]
    known = [rank for rank in ranks if rank is not None]
    if len(set(known)) == len(ranks):
        return tuple(f"rank {rank}" for rank in known)
    return tuple(f"recording {place + 1}" for place in range(len(ranks)))

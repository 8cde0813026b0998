"""Where a step's time goes: the timeline, the breakdown and the roofline."""

from stepscope.explain.experiments.bench_tables import bench_table
from stepscope.explain.story.missing import explain_absence
from stepscope.explain.story.phrases import name_class, retitle, shorten
from stepscope.explain.story.sections.breakdown import TITLE, break_down
from stepscope.explain.story.sections.lanes import draw_step
from stepscope.explain.story.sections.roofline_chart import draw_roofline
from stepscope.explain.story.sources import Materials
from stepscope.explain.trace.counters import has_counters
from stepscope.explain.trace.counters import kernels_table as counters_table
from stepscope.explain.trace.profile import Profile, kernel_word
from stepscope.explain.trace.ranges_table import ranges_table
from stepscope.explain.trace.roofline import roofline_table
from stepscope.findings import Exhibit, Missing, Section
from stepscope.units import count_noun, say_percent, say_share, say_time

_ROOFLINE_ROWS = 20
_COUNTED_ROWS = 25
_RANGES = 25
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
    drawn = draw_step(profile)
    exhibit = Exhibit(key="step-timeline", part=drawn)
    return Section(key=key, title=title, lead=_say_step(profile, drawn.span_ns), exhibits=(exhibit,))


def _say_step(profile: Profile, shown_ns: int) -> str:
    """`shown_ns` is the length of the step in the timeline."""
    word, clock = kernel_word(profile), profile.clock
    if not profile.has_steps:
        return f"{count_noun(profile.kernels.height, word)} in {say_time(profile.wall_ns)}; no steps are marked."
    count = count_noun(round(clock.per_step(profile.kernels.height)), word)
    said = f"{count} in {say_time(clock.step_ns)} per step"
    if say_time(shown_ns) != say_time(clock.step_ns):
        said += f" ({say_time(shown_ns)} in the profiled step shown here)"
    phases = [row for row in profile.time_by("phase").iter_rows(named=True) if row["phase"] != "unknown"]
    named = ", ".join(f"{row['phase']} {say_percent(row['share'])}" for row in phases)
    return f"{said}. {word.capitalize()} time: {named}." if phases else f"{said}."


def show_time(materials: Materials) -> Section:
    key, title = "time", TITLE
    profile = materials.profile
    timed = _show_timed(materials)
    if profile is None:
        missing = (explain_absence(materials, "profile", "time by kernel"),)
        return Section(key=key, title=title, exhibits=tuple(timed), missing=missing)
    exhibits = [Exhibit(key="breakdown", part=break_down([profile], [""])), *timed]
    ranges = ranges_table(profile, top=_RANGES)
    if ranges.rows:
        exhibits.append(Exhibit(key="time-ranges", part=ranges))
    if profile.recording.counters.height and has_counters(profile.recording):
        counted = counters_table(profile.recording, top=_COUNTED_ROWS)
        exhibits.append(Exhibit(key="time-counters", part=counted))
    return Section(key=key, title=title, lead=_say_classes(profile), exhibits=tuple(exhibits))


def _show_timed(materials: Materials) -> list[Exhibit]:
    """The timing of `bench`: the page's own, or that of variants of the run. Next to a profile of the run, a single row
    is a second clock, which is part of the measurement quality."""
    rows = materials.bench
    if not rows or (materials.clock is not None and len(rows) == 1):
        return []
    title = "Unprofiled steps" if materials.clock is None else "Variants, timed separately by bench"
    return [Exhibit(key="time-bench", part=shorten(retitle(bench_table(rows), title), ""))]


def _say_classes(profile: Profile) -> str:
    classes = profile.time_by("class").head(_NAMED).iter_rows(named=True)
    named = ", ".join(f"{name_class(row['class'])} {say_percent(row['share'])}" for row in classes)
    word = "Operators" if profile.on_cpu else "Kernels"
    whole = " per step" if profile.has_steps else ""
    whole += f" on {len(profile.devices)} GPUs" if len(profile.devices) > 1 else ""
    time = profile.clock.per_step(profile.gpu_time_ns)
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
    table = roofline_table(profile, top=_ROOFLINE_ROWS)
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

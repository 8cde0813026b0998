"""Where the device idles, and why."""

import polars as pl

from stepscope.explain.questions.answers import Answer, device_word, missing, share_by
from stepscope.explain.questions.gaps import CAUSES, find_gaps
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Cell, Column, Table
from stepscope.units import say_share, say_time

_LONGEST = 8


def idle_time(profile: Profile) -> Answer:
    word = device_word(profile)
    key, question = (
        "idle",
        "Where is time spent outside of operators?" if profile.on_cpu else "Where does the GPU idle, and why?",
    )
    if profile.is_serialized:
        reason = "Nsight Compute runs one kernel at a time and records no gaps between them"
        return missing(key, question, reason, "stepscope profile")
    gaps = find_gaps(profile)
    wall = sum(device.whole.wall_ns for device in profile.devices)
    idle = int(gaps["time_ns"].sum())
    share, devices = idle / max(1, wall), len(profile.devices)
    if not idle:
        return Answer(key=key, question=question, figure="0 %", sentence=f"Nowhere: the {word} is busy all the time.")
    causes = share_by(gaps, "cause")
    said = [f"{row['cause']} {say_share(row['share'])}" for row in causes.head(3).iter_rows(named=True)]
    first = causes["cause"][0]
    longest = gaps.sort("time_ns", descending=True).row(0, named=True)
    mean = f" (mean of {devices} devices)" if devices > 1 else ""
    idles = f"idles for {say_time(idle / profile.num_steps / devices)} a step"
    if profile.clock.is_recorded:
        opening = f"It {idles}, {say_share(share)} of wall time{mean}"
    else:
        share, lost = profile.idle_share, round(profile.step_ns - profile.busy_step_ns)
        opening = (
            f"By the clock without the recorder it idles for {say_time(lost)} a step, {say_share(share)}. "
            f"Under the recorder, which slows the host, it {idles}{mean}"
        )
    sentence = (
        f"{opening}; of that, {', '.join(said)} ({CAUSES[first]}); the longest gap lasts "
        f"{say_time(longest['time_ns'])}{_place(longest)}"
    )
    figure = f"{say_share(share)} of wall time"
    return Answer(
        key=key,
        question=question,
        figure=figure,
        sentence=sentence + ".",
        evidence=_table(profile, gaps, causes),
    )


def _place(gap: dict[str, object]) -> str:
    before, after = gap["before"], gap["after"]
    where = f" before `{after}`" if after else ""
    where += f" and after `{before}`" if before and after else f" after `{before}`" if before else ""
    return where


def _table(profile: Profile, gaps: pl.DataFrame, causes: pl.DataFrame) -> Table:
    """Causes first, then the longest gaps: one table, because they are read together."""
    start, scale = profile.window[0], profile.num_steps * len(profile.devices) * 1e6
    total = max(1, int(gaps["time_ns"].sum()))
    rows: list[tuple[Cell, ...]] = [
        ("cause", row["cause"], row["count"], row["time_ns"] / scale, row["share"], None, None, None, None)
        for row in causes.iter_rows(named=True)
    ]
    for gap in gaps.sort("time_ns", "start_ns", descending=[True, False]).head(_LONGEST).iter_rows(named=True):
        at = (gap["start_ns"] - start) / 1e6
        around = (at, gap["before"], gap["after"], gap["host_op"])
        rows.append(("gap", gap["cause"], 1, gap["time_ns"] / 1e6, gap["time_ns"] / total, *around))
    return Table(
        title="Idle time by cause (mean a step), then the longest single gaps",
        columns=(
            Column(key="kind", label=""),
            Column(key="cause", label="cause"),
            Column(key="gaps", label="gaps", kind="count"),
            Column(key="time_ms", label="time", kind="ms"),
            Column(key="share", label="of idle", kind="share"),
            Column(key="at_ms", label="at", kind="ms"),
            Column(key="before", label="ran before"),
            Column(key="after", label="ran after"),
            Column(key="host_op", label="host was in"),
        ),
        rows=tuple(rows),
        notes=tuple(f"{cause}: {CAUSES[cause]}" for cause in causes["cause"]),
    )

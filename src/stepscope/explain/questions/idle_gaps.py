"""The idle gaps of a device, each with its cause.

A gap ends with a kernel, and its cause is why that kernel did not start earlier. If the CPU launched it after the
device went idle, the launch was late; if a synchronizing call was open meanwhile, that is the cause. If it was launched
in time, the device waited for another stream or just needed a moment to start the next kernel. The gaps of a device add
up to its idle time exactly. They answer where the device is idle, and why.
"""

from collections.abc import Iterator

import numpy as np
import polars as pl

from stepscope.explain.questions.answers import Answer, missing, share_by
from stepscope.explain.trace.profile import Profile, device_word, kernel_word
from stepscope.findings import Cell, Column, Table
from stepscope.recording.nesting import around
from stepscope.units import say_share, say_time

# Templates: in a CPU recording, operators take the place of kernels. Causes that it cannot have name kernels directly.
BEFORE, AFTER, BETWEEN_STEPS = "before the first {kernel}", "after the last {kernel}", "between steps"
SYNCHRONISING, HOST_LATE, RECORDER = "CPU synchronizing", "late launch", "profiler"
OTHER_STREAM, DEVICE, IN_GRAPH = "waiting for another stream", "kernel start", "inside a CUDA graph"
OUTSIDE, UNKNOWN_CAUSE = "between operators", "launch not recorded"
CAUSES = {
    HOST_LATE: "the CPU launched the next kernel after the device went idle",
    SYNCHRONISING: "the CPU was in a synchronizing call, waiting for the device, and launched nothing",
    OTHER_STREAM: "the next kernel was launched in time but waited for work on another stream",
    DEVICE: "the next kernel was launched in time; the device needs a moment to start it",
    IN_GRAPH: "between the kernels of one CUDA graph",
    BETWEEN_STEPS: "the next {kernel} belongs to another step",
    BEFORE: "from the start of the recording",
    AFTER: "to the end of the recording",
    RECORDER: "the profiler was handling its own buffers",
    OUTSIDE: "no operator was running: Python, the dispatcher or unrecorded code",
    UNKNOWN_CAUSE: "the launch of the next kernel is not in the recording",
}
# Calls that return when the device is done, including copies without `Async` in their name.
_SYNC = r"(?i)synchronize|^(?:cuda|hip)Memcpy(?:2D|3D|ToSymbol|FromSymbol)?(?:_v\d+)?$"
_RECORDER = r"(?i)activity buffer|buffer (?:request|flush)|profiler (?:overhead|start|stop)|cupti"
# The longest gap between kernels of one stream without any cause; in a longer one the device waited for something.
_DEVICE_NS = 20_000


def find_gaps(profile: Profile) -> pl.DataFrame:
    """One row per gap: process, device, start_ns, end_ns, time_ns, cause (a template, with its
    explanation in `CAUSES`), before and after (the kernels around it), host_op (the operator that the launching thread
    was in when the device went idle), step."""
    kernels = profile.kernels.with_row_index("row")
    frames = [_gaps_of(group, profile.window) for group in _devices(kernels)]
    gaps = pl.concat(frames)
    columns = [
        "row",
        "short",
        "class",
        "stream",
        "correlation",
        "launched",
        "launch_ns",
        "launch_end_ns",
        "thread",
        "step",
    ]
    for side in ("before", "after"):
        ran = kernels.select(pl.col(columns).name.prefix(f"{side}_"))
        gaps = gaps.join(ran, on=f"{side}_row", how="left", maintain_order="left")
    at = gaps.select("process", thread="after_thread", ns="start_ns")
    return gaps.with_columns(
        cause=_causes(profile, gaps),
        host_op=around(profile.recording.ops, "name", at),
        time_ns=pl.col("end_ns") - pl.col("start_ns"),
        before="before_short",
        after="after_short",
        step="after_step",
    ).select("process", "device", "start_ns", "end_ns", "time_ns", "cause", "before", "after", "host_op", "step")


def _devices(kernels: pl.DataFrame) -> Iterator[pl.DataFrame]:
    yield from kernels.partition_by("process", "device", maintain_order=True)


def _gaps_of(kernels: pl.DataFrame, window: tuple[int, int]) -> pl.DataFrame:
    ordered = kernels.sort("start_ns", "end_ns")
    starts, ends = ordered["start_ns"].to_numpy(), ordered["end_ns"].to_numpy()
    rows = ordered["row"].to_numpy().astype(np.int64)
    reached = np.maximum.accumulate(ends)
    # The kernel with the latest end so far: the gap starts after it.
    latest = np.maximum.accumulate(np.where(ends == reached, np.arange(len(ends)), 0))
    holes = np.flatnonzero(starts[1:] > reached[:-1])
    begin = np.concatenate(([window[0]], reached[holes], reached[-1:]))
    end = np.concatenate((starts[:1], starts[holes + 1], [window[1]]))
    before = [None, *rows[latest[holes]].tolist(), int(rows[latest[-1]])]
    after = [int(rows[0]), *rows[holes + 1].tolist(), None]
    frame = pl.DataFrame(
        {"start_ns": begin, "end_ns": end, "before_row": before, "after_row": after},
        schema={"start_ns": pl.Int64, "end_ns": pl.Int64, "before_row": pl.UInt32, "after_row": pl.UInt32},
    )
    process, device = ordered["process"][0], ordered["device"][0]
    named = frame.with_columns(process=pl.lit(process, pl.Int64), device=pl.lit(device, pl.Int32))
    return named.filter(pl.col("end_ns") > pl.col("start_ns"))


def _causes(profile: Profile, gaps: pl.DataFrame) -> pl.Series:
    if profile.on_cpu:
        on_host = (
            pl.when(pl.col("before_row").is_null())
            .then(pl.lit(BEFORE))
            .when(pl.col("after_row").is_null())
            .then(pl.lit(AFTER))
            .when(_steps_differ())
            .then(pl.lit(BETWEEN_STEPS))
            .otherwise(pl.lit(OUTSIDE))
        )
        return gaps.select(on_host.alias("c"))["c"]
    launches = profile.recording.launches
    waits = gaps.with_columns(until=pl.min_horizontal(pl.max_horizontal("after_launch_ns", "start_ns"), "end_ns"))
    synchronising = _touches(launches.filter(pl.col("name").str.contains(_SYNC)), waits)
    recorder = _touches(_recorder_calls(profile), waits)
    late = pl.col("after_launch_end_ns") >= pl.col("start_ns")
    same_graph = (pl.col("after_launched") == "graph") & (pl.col("before_correlation") == pl.col("after_correlation"))
    communicates = (pl.col("before_class") == "communication") | (pl.col("after_class") == "communication")
    crosses = (pl.col("before_stream") != pl.col("after_stream")) | communicates
    cause = (
        pl.when(pl.col("before_row").is_null())
        .then(pl.lit(BEFORE))
        .when(pl.col("after_row").is_null())
        .then(pl.lit(AFTER))
        .when(same_graph)
        .then(pl.lit(IN_GRAPH))
        .when(pl.col("after_launch_ns").is_null())
        .then(pl.lit(UNKNOWN_CAUSE))
        .when(recorder & late)
        .then(pl.lit(RECORDER))
        .when(_steps_differ() & late)
        .then(pl.lit(BETWEEN_STEPS))
        .when(synchronising & late)
        .then(pl.lit(SYNCHRONISING))
        .when(late)
        .then(pl.lit(HOST_LATE))
        .when(crosses | (pl.col("end_ns") - pl.col("start_ns") > _DEVICE_NS))
        .then(pl.lit(OTHER_STREAM))
        .otherwise(pl.lit(DEVICE))
    )
    return gaps.select(cause.alias("c"))["c"]


def _steps_differ() -> pl.Expr:
    return (pl.col("before_step") != pl.col("after_step")).fill_null(value=False)


def _recorder_calls(profile: Profile) -> pl.DataFrame:
    ranges = profile.recording.ranges
    return ranges.filter(pl.col("name").str.contains(_RECORDER))


def _touches(calls: pl.DataFrame, waits: pl.DataFrame) -> pl.Series:
    """For each gap, whether a call of the process was open at any time between its start and the next launch."""
    found = np.zeros(waits.height, bool)
    asked = waits.with_row_index("n").partition_by("process", as_dict=True)
    for key, group in calls.partition_by("process", as_dict=True).items():
        mine = asked.get(key)
        if mine is None:
            continue
        start, end = np.sort(group["start_ns"].to_numpy()), np.sort(group["end_ns"].to_numpy())
        begun = np.searchsorted(start, mine["until"].to_numpy(), side="right")
        ended = np.searchsorted(end, mine["start_ns"].to_numpy(), side="left")
        found[mine["n"].to_numpy()] = begun > ended
    return pl.Series(found)


# --- The question -----------------------------------------------------------------------------------------------------


_LONGEST = 8


def idle_time(profile: Profile) -> Answer:
    word = device_word(profile)
    key, question = (
        "idle",
        "Where is time spent outside operators?" if profile.on_cpu else "Where does the GPU sit idle, and why?",
    )
    if profile.is_serialized:
        reason = "Nsight Compute runs one kernel at a time and does not record idle time"
        return missing(key, question, reason, "stepscope profile")
    gaps = find_gaps(profile)
    clock, devices = profile.clock, len(profile.devices)
    if not gaps.height:
        return Answer(key=key, question=question, figure="0%", sentence=f"Nowhere: the {word} is always busy.")
    causes = share_by(gaps, "cause")
    said = [f"{_say(profile, row['cause'])} {say_share(row['share'])}" for row in causes.head(3).iter_rows(named=True)]
    first = causes["cause"][0]
    longest = gaps.sort("time_ns", "start_ns", descending=[True, False]).row(0, named=True)
    mean = f" (mean of {devices} devices)" if devices > 1 else ""
    what = "outside operators" if profile.on_cpu else "idle"
    opening = f"{say_time(clock.idle_ns)} {what} {clock.say_per_step}, {say_share(clock.idle_share)}{mean}"
    profiled = " in profiled steps" if clock.kind == "unprofiled" else ""
    sentence = (
        f"{opening}. Causes{profiled}: {', '.join(said)} ({_explain(profile, first)}). The longest gap{profiled} is "
        f"{say_time(longest['time_ns'])}{_place(longest)}"
    )
    figure = f"{say_share(clock.idle_share)} {clock.say_of_step}"
    return Answer(
        key=key,
        question=question,
        figure=figure,
        sentence=sentence + ".",
        evidence=_table(profile, gaps, causes),
    )


def _say(profile: Profile, template: str) -> str:
    return template.format(kernel=kernel_word(profile))


def _explain(profile: Profile, cause: str) -> str:
    return _say(profile, f"{cause}: {CAUSES[cause]}")


def _place(gap: dict[str, object]) -> str:
    before, after = gap["before"], gap["after"]
    if before and after:
        return f", between `{before}` and `{after}`"
    return f", before `{after}`" if after else f", after `{before}`" if before else ""


def _table(profile: Profile, gaps: pl.DataFrame, causes: pl.DataFrame) -> Table:
    """Causes first, then the longest gaps, in one table because they belong together."""
    start, idle_ms = profile.window[0], profile.clock.idle_ns / 1e6
    total = max(1, int(gaps["time_ns"].sum()))
    rows: list[tuple[Cell, ...]] = [
        ("cause", _say(profile, cause), count, share * idle_ms, share, None, None, None, None)
        for cause, count, share in causes.select("cause", "count", "share").iter_rows()
    ]
    for gap in gaps.sort("time_ns", "start_ns", descending=[True, False]).head(_LONGEST).iter_rows(named=True):
        at = (gap["start_ns"] - start) / 1e6
        around = (at, gap["before"], gap["after"], gap["host_op"])
        rows.append(("gap", _say(profile, gap["cause"]), 1, gap["time_ns"] / 1e6, gap["time_ns"] / total, *around))
    return Table(
        title=f"Idle time by cause ({profile.clock.say_per_step}), then the longest gaps",
        columns=(
            Column(key="kind", label=""),
            Column(key="cause", label="cause"),
            Column(key="gaps", label="gaps", kind="count"),
            Column(key="time_ms", label="time", kind="ms"),
            Column(key="share", label="of idle time", kind="share"),
            Column(key="at_ms", label="at", kind="ms"),
            Column(key="before", label=f"{kernel_word(profile)} before"),
            Column(key="after", label=f"{kernel_word(profile)} after"),
            Column(key="host_op", label="CPU was in"),
        ),
        rows=tuple(rows),
        notes=(*_say_scaled(profile), *(_explain(profile, cause) for cause in causes["cause"])),
    )


def _say_scaled(profile: Profile) -> tuple[str, ...]:
    """Gaps are known in profiled steps only."""
    if profile.clock.kind == "profiled":
        return ()
    return ("causes: the idle time of an unprofiled step, split as in profiled steps; gaps: as profiled",)

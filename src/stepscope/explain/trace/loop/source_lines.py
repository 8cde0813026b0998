"""The lines of code behind a recording: which line of the user's code launched a kernel or made the CPU wait."""

import polars as pl

from stepscope.explain.trace.profile import Profile
from stepscope.recording.nesting import around
from stepscope.recording.store import Recording
from stepscope.units import say_list


def has_sources(recording: Recording) -> bool:
    return recording.ops["source"].null_count() < recording.ops.height


def find_sources(recording: Recording, points: pl.DataFrame) -> pl.Series:
    """Return the line of code at each moment (`process`, `thread`, `ns`): that of the innermost operator which has one,
    or else the frame of Python that is open, if the recording has it."""
    frames = recording.ranges.filter(pl.col("source") == "python")
    # The profiler writes `optimizer.py(939): step`.
    framed = around(frames, "name", points).str.replace(r"\((\d+)\): ", ":$1 ")
    if not has_sources(recording):
        return framed
    of_ops = around(recording.ops.filter(pl.col("source").is_not_null()), "source", points)
    return of_ops.zip_with(of_ops.is_not_null(), framed)


def launch_sources(profile: Profile, kernels: pl.DataFrame) -> pl.Series:
    """Return the line that launched each kernel."""
    return find_sources(profile.recording, kernels.select("process", "thread", ns="launch_ns"))


def main_sources(profile: Profile) -> dict[str, str]:
    """Return for each kernel name the line that launches most of its time; empty if operators have no lines."""
    if not has_sources(profile.recording):
        return {}
    lines = profile.kernels.select("name", "time_ns", line=launch_sources(profile, profile.kernels))
    known = lines.filter(pl.col("line").is_not_null()).group_by("name", "line").agg(pl.col("time_ns").sum())
    ranked = known.sort("time_ns", "line", descending=[True, False]).unique("name", keep="first", maintain_order=True)
    return dict(ranked.select("name", "line").iter_rows())


def name_lines(lines: pl.Series, weights: pl.Series, most: int = 2) -> str:
    """Return the lines with the largest weight in a few words: `train.py:42 and train.py:57`; empty if none is
    known."""
    known = pl.DataFrame({"line": lines, "weight": weights}).filter(pl.col("line").is_not_null())
    ranked = known.group_by("line").agg(pl.col("weight").sum()).sort("weight", "line", descending=[True, False])
    named = ranked["line"].to_list()
    rest = len(named) - most
    return say_list([*named[:most], f"{rest} more lines"] if rest > 1 else named)

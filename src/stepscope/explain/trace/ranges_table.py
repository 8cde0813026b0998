"""The time of the ranges that users put around their code, as a table."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import polars as pl

from stepscope.explain.trace.attribution.user_ranges import BETWEEN
from stepscope.explain.trace.profile import Profile, kernel_word
from stepscope.findings import Column, Table
from stepscope.units import count_noun

_NAMED_CLASSES = 3
_SEVERAL = "several"
_ON_A_PAGE = 12


@dataclass(slots=True)
class _Range:
    """What was launched inside a range: in all of it, outside the ranges nested in it, and later for its backward."""

    time_ns: int = 0
    own_ns: int = 0
    backward_ns: int = 0
    count: int = 0
    classes: Counter[str] = field(default_factory=Counter)
    parents: dict[str, None] = field(default_factory=dict)


def short_ranges(profile: Profile) -> list[Table]:
    """Return the table if it has rows, and few enough for a page that shows other things too."""
    table = ranges_table(profile)
    return [table] if 0 < len(table.rows) <= _ON_A_PAGE else []


def ranges_table(profile: Profile, *, top: int | None = None) -> Table:
    """Return the device time of each range by name, the longest first."""
    ranges = _add_up(profile)
    ranked = sorted(ranges.items(), key=lambda item: (-item[1].time_ns, -item[1].backward_ns, item[0]))
    shown, total, clock = ranked[:top], max(1, profile.gpu_time_ns), profile.clock
    rows = tuple(
        (
            name,
            next(iter(one.parents)) if len(one.parents) == 1 else _SEVERAL,
            one.time_ns / clock.num_steps / 1e6,
            one.time_ns / total,
            one.count / clock.num_steps,
            one.own_ns / clock.num_steps / 1e6,
            one.backward_ns / clock.num_steps / 1e6 if one.backward_ns else None,
            ", ".join(f"{kind} {time / one.time_ns:.0%}" for kind, time in _largest(one.classes)),
        )
        for name, one in shown
    )
    rest = len(ranked) - len(shown)
    return Table(
        title="Time by user range",
        columns=(
            Column(key="range", label="range"),
            Column(key="inside", label="inside"),
            Column(key="kernel_ms", label=f"{kernel_word(profile)}s ms", kind="ms"),
            Column(key="share", label="share", kind="share"),
            Column(key="count", label="count", kind="number"),
            Column(key="own_ms", label="own ms", kind="ms"),
            Column(key="backward_ms", label="its backward ms", kind="ms"),
            Column(key="mostly", label="mostly"),
        ),
        rows=rows,
        notes=(
            *_notes(profile, ranges),
            *((f"{count_noun(rest, 'more row')}: --top {len(ranked)}",) if rest else ()),
        ),
    )


def _notes(profile: Profile, ranges: Mapping[str, _Range]) -> tuple[str, ...]:
    word = kernel_word(profile)
    if not ranges:
        return (f"no {word} was launched inside a range: add `torch.profiler.record_function` or NVTX ranges",)
    inside = profile.kernels.filter(pl.col("user_range").is_not_null())["time_ns"].sum() / max(1, profile.gpu_time_ns)
    is_nested = any(any(one.parents) for one in ranges.values())
    overlap = "; ranges contain each other, so their shares overlap" if is_nested else ""
    return (
        f"{word}s launched inside ranges: {inside:.1%} of {word} time{overlap}",
        "own: outside the ranges inside it; its backward: the gradients of what ran inside, launched elsewhere",
    )


def _add_up(profile: Profile) -> dict[str, _Range]:
    ranges: defaultdict[str, _Range] = defaultdict(_Range)
    for path, kind, time, count in _time_by(profile, "user_range").iter_rows():
        names = path.split(BETWEEN)
        for name in dict.fromkeys(names):
            ranges[name].time_ns += time
            ranges[name].count += count
            ranges[name].classes[kind] += time
        for parent, name in zip(("", *names), names, strict=False):
            ranges[name].parents[parent] = None
        ranges[names[-1]].own_ns += time
    for path, _, time, _ in _time_by(profile, "forward_range").iter_rows():
        for name in dict.fromkeys(path.split(BETWEEN)):
            ranges[name].backward_ns += time
    return dict(ranges)


def _time_by(profile: Profile, column: str) -> pl.DataFrame:
    inside = profile.kernels.filter(pl.col(column).is_not_null())
    return inside.group_by(column, "class").agg(pl.col("time_ns", "count").sum()).sort(column, "class")


def _largest(classes: Counter[str]) -> list[tuple[str, int]]:
    ranked = sorted(classes.items(), key=lambda item: (-item[1], item[0]))
    return [(kind, time) for kind, time in ranked if time][:_NAMED_CLASSES]

"""The timeline of one step: its phases, layers and modules above the kernels of each stream.

It shows the step closest to the median, because a mean of steps never ran. Everything that ran in its window is
included, even kernels launched in the step before. Time outside any phase, layer or module is a gap in that track.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
import polars as pl

from stepscope.explain.story.sections.breakdown import MOST_DESCRIBED
from stepscope.explain.story.sections.spans import NONE, Ints, Stretches, fit, join_runs, lay_out
from stepscope.explain.trace.attribution.modules import label_layers
from stepscope.explain.trace.attribution.names import cut_name, describe_kernel
from stepscope.explain.trace.attribution.phases import named_ranges, step_ranges
from stepscope.explain.trace.loop.source_lines import launch_sources
from stepscope.explain.trace.profile import Profile
from stepscope.explain.trace.roofline import shorten_shapes
from stepscope.findings import Lanes, Spans, Track
from stepscope.recording.nesting import innermost, look_up
from stepscope.units import count_noun

MOST_STREAMS = 12
_WHOLE = "Whole trace"
# Together about as much as a page can hold and still scroll smoothly.
MOST_KERNELS = 15_000
MOST_RUNS = 5_000
_MOSTLY = 0.9  # share of a stream's time that names the stream
_STREAM = ["process", "device", "stream"]
_LAUNCHED = ["thread", "launch_ns", "op", "op_row"]
_ORIGIN = ["call", "module", "source"]
_NO_COMPUTING = ["communication", "memcpy", "memset"]
_Kind = Literal["phase", "layer", "module", "stream", "host", "rank"]


@dataclass(frozen=True, kw_only=True)
class TrackDraft:
    """A track before it is encoded. The numbers in its stretches index `names` and `groups`."""

    label: str
    kind: _Kind
    stretches: Stretches
    names: Sequence[str]
    groups: Sequence[str]
    shorten: Callable[[str], str]  # a name as shown
    describe: Callable[[str], str] | None = None  # its detail
    origins: Sequence[tuple[str, ...]] = ()  # where kernels come from, as lines
    several: str  # the name of a block with several names; `{}` is its group


def draw_step(profile: Profile) -> Lanes:
    window, title, notes = _choose_step(profile)
    inside = _cut_out(profile.kernels, window)
    if inside.is_empty():
        return write_down(title, window[1] - window[0], [], [*notes, f"no {_what(profile)} ran in this window"])
    ran = _order_streams(_find_origins(profile, inside))
    lanes = [*_run_lanes(ran[0]), *_host_lane(profile, window)]
    streams, hidden = _stream_lanes(profile, ran[:MOST_STREAMS])
    notes += [*_name_main_stream(ran, profile), *_count_hidden(hidden, profile), *_name_left_out(ran, profile)]
    drawn = []
    for what, before, most in (
        ("phases, layers and modules", lanes, MOST_RUNS),
        (_what(profile), streams, MOST_KERNELS),
    ):
        fitted, cell = fit_lanes(before, most)
        notes += say_merged(what, before, fitted, cell)
        drawn += fitted
    return write_down(title, window[1] - window[0], drawn, notes)


def _what(profile: Profile) -> str:
    return "operators" if profile.on_cpu else "kernels"


# --- Which step -------------------------------------------------------------------------------------------------------


def _choose_step(profile: Profile) -> tuple[tuple[int, int], str, list[str]]:
    """The window, the title and notes on the choice. Steps count from 1, whatever their recorded number."""
    if not profile.steps.height:
        return profile.window, _WHOLE, ["no steps are marked, so this is the whole trace"]
    begun = np.sort(profile.kernels["start_ns"].to_numpy())
    windows = [
        (number, window)
        for number, window in enumerate(profile.step_windows, start=1)
        if begun[np.searchsorted(begun, window[0]) : np.searchsorted(begun, window[1])].size
    ]
    if not windows:
        said = f"no {_what(profile)} start inside the marked steps, so this is the whole trace"
        return profile.window, _WHOLE, [said]
    lengths = [end - start for _, (start, end) in windows]
    number, window = windows[find_median_step([window for _, window in windows])]
    wall = window[1] - window[0]
    notes = []
    if len(windows) > 1:
        spread = f"{min(lengths) / 1e6:,.2f} to {max(lengths) / 1e6:,.2f} ms"
        notes.append(
            f"step {number} ({wall / 1e6:,.2f} ms) is closest to the median of {len(windows)} profiled steps ({spread})"
        )
    if profile.clock.kind == "unprofiled" and profile.step_ns < 0.95 * wall:
        notes.append(
            f"an unprofiled step takes {profile.step_ns / 1e6:,.2f} ms; profiling slows the CPU, so idle gaps are "
            "longer here"
        )
    return window, f"Step {number}", notes


def find_median_step(windows: Sequence[tuple[int, int]]) -> int:
    """Return the place of the step closest to the median, the first of those equally close."""
    lengths = [end - start for start, end in windows]
    median = statistics.median(lengths)
    return min(range(len(lengths)), key=lambda place: abs(lengths[place] - median))


def _cut_out(kernels: pl.DataFrame, window: tuple[int, int]) -> pl.DataFrame:
    """What ran in a window, in order, clipped to it and with times relative to its start."""
    start, end = window
    touches = (pl.col("end_ns") > start) & (pl.col("start_ns") < end)
    is_mark = (pl.col("end_ns") == pl.col("start_ns")) & (pl.col("start_ns") >= start) & (pl.col("start_ns") < end)
    columns = (*_STREAM, "kind", "name", "short", "class", "phase", "module", "layer", "start_ns", "end_ns", *_LAUNCHED)
    inside = kernels.select(columns).filter(touches | is_mark)
    cut = inside.with_columns(pl.col("start_ns", "end_ns").clip(start, end) - start)
    return cut.with_columns(time_ns=pl.col("end_ns") - pl.col("start_ns")).sort("start_ns", "end_ns")


def _find_origins(profile: Profile, kernels: pl.DataFrame) -> pl.DataFrame:
    """Add what launched each kernel: `call`, the operator with its shapes, and `source`, the line of code if the
    recording has it. The module is there already."""
    shapes = look_up(profile.recording.ops, "shapes", kernels["op_row"]).map_elements(shorten_shapes, pl.String)
    return kernels.with_columns(
        call=pl.concat_str("op", shapes, separator=" ", ignore_nulls=True).replace("", None),
        source=launch_sources(profile, kernels),
    )


# --- Phases, layers and modules ---------------------------------------------------------------------------------------


def _order_streams(kernels: pl.DataFrame) -> list[pl.DataFrame]:
    """The main stream, which computes most, first; the others by busy time."""

    def computed(stream: pl.DataFrame) -> int:
        return int(stream.filter(~pl.col("class").is_in(_NO_COMPUTING))["time_ns"].sum())

    streams = kernels.partition_by(_STREAM, maintain_order=True)
    streams.sort(key=lambda stream: (-int(stream["time_ns"].sum()), str(stream.select(_STREAM).row(0))))
    main = max(streams, key=computed)
    return [main, *(stream for stream in streams if stream is not main)]


def _run_lanes(main: pl.DataFrame) -> list[TrackDraft]:
    """Phases, layers and modules of the main stream. Across streams, kernels of different layers overlap."""
    starts, ends = main["start_ns"].to_numpy(), main["end_ns"].to_numpy()
    lanes = []
    tracks: tuple[tuple[str, _Kind, pl.Series], ...] = (
        ("phases", "phase", main["phase"]),
        ("layers", "layer", label_layers(main)),
        ("modules", "module", main["module"]),
    )
    for label, kind, column in tracks:
        numbers, names = _number(column)
        groups = numbers if kind == "phase" else np.zeros_like(numbers)
        runs = join_runs(starts, ends, numbers, groups)
        if len(runs):
            lanes.append(
                TrackDraft(
                    label=label,
                    kind=kind,
                    stretches=runs,
                    names=names,
                    groups=names if kind == "phase" else ("",),
                    shorten=cut_name,
                    several=f"several {label}",
                )
            )
    return lanes


def _number(column: pl.Series) -> tuple[Ints, list[str]]:
    """Number the values in the order of first appearance. Return the numbers, with NONE for null, and the values."""
    names = column.drop_nulls().unique(maintain_order=True).to_list()
    numbers = column.replace_strict(names, list(range(len(names))), default=NONE, return_dtype=pl.Int64)
    return numbers.to_numpy(), names


def _host_lane(profile: Profile, window: tuple[int, int]) -> list[TrackDraft]:
    """What the CPU did in this window, from its ranges. Without a GPU, the operators show it already."""
    named = named_ranges(profile.recording.ranges)
    steps = step_ranges(profile.recording)
    if profile.on_cpu or not named.height or not steps.height:
        return []
    process, thread = steps.select("process", "thread").row(0)
    here = named.filter((pl.col("process") == process) & (pl.col("thread") == thread))
    here = here.filter((pl.col("end_ns") > window[0]) & (pl.col("start_ns") < window[1]))
    here = here.with_columns(pl.col("start_ns", "end_ns").clip(*window))
    moments = np.unique(np.concatenate((here["start_ns"].to_numpy(), here["end_ns"].to_numpy())))
    if len(moments) < 2:
        return []
    points = pl.DataFrame({"ns": moments[:-1]}).with_columns(process=pl.lit(process), thread=pl.lit(thread))
    phase = here["phase"].gather(innermost(here, points))
    numbers, names = _number(phase)
    runs = join_runs(moments[:-1] - window[0], moments[1:] - window[0], numbers, numbers)
    runs = replace(runs, counts=np.ones_like(runs.counts))  # CPU time is not a number of kernels
    lane = TrackDraft(
        label="CPU",
        kind="host",
        stretches=runs,
        names=names,
        groups=names,
        shorten=cut_name,
        several="several phases",
    )
    return [lane] if len(runs) else []


# --- Streams ----------------------------------------------------------------------------------------------------------


def _stream_lanes(profile: Profile, streams: Sequence[pl.DataFrame]) -> tuple[list[TrackDraft], int]:
    """One lane per stream, and how many kernels lie inside others on the same stream."""
    lanes, hidden_in_all = [], 0
    shorts = dict(profile.kernels.select("name", "short").unique("name").iter_rows())
    for stream in streams:
        names, texts = _number(stream["name"])
        groups, classes = _number(stream["class"])
        origins, origin_texts = _number_origins(stream)
        laid, hidden = lay_out(stream["start_ns"].to_numpy(), stream["end_ns"].to_numpy(), names, groups, origins)
        hidden_in_all += hidden
        on_host = bool((stream["kind"] == "cpu").all())
        lanes.append(
            TrackDraft(
                label=_label_stream(profile, stream),
                kind="stream",
                stretches=laid,
                names=texts,
                groups=classes,
                shorten=lambda name: cut_name(shorts[name]),
                describe=partial(describe_kernel, on_host=on_host),
                several=f"{'operators' if on_host else 'kernels'}, mostly {{}}",
                origins=origin_texts,
            )
        )
    return lanes, hidden_in_all


def _number_origins(stream: pl.DataFrame) -> tuple[Ints, list[tuple[str, ...]]]:
    """Number the distinct origins in the order of first appearance. Return the numbers and the lines of each."""
    known = stream.select(_ORIGIN)
    distinct = known.unique(maintain_order=True).with_row_index("number")
    numbers = known.join(distinct, on=_ORIGIN, how="left", nulls_equal=True, maintain_order="left")["number"]
    words = ("operator", "module", "source")
    texts = [
        tuple(f"{word}: {cut_name(part)}" for word, part in zip(words, row, strict=True) if part is not None)
        for row in distinct.select(_ORIGIN).iter_rows()
    ]
    return numbers.to_numpy().astype(np.int64), texts


def _call_stream(profile: Profile, stream: pl.DataFrame) -> str:
    process, device, number = stream.select(_STREAM).row(0)
    what = "thread" if profile.on_cpu else "stream"
    label = f"{what} {number}"
    if len(profile.devices) > 1 and not profile.on_cpu:
        several = len({one.process for one in profile.devices}) > 1
        label = f"GPU {device} {label}" + (f" of process {process}" if several else "")
    return label


def _label_stream(profile: Profile, stream: pl.DataFrame) -> str:
    """The label, with the stream's purpose if it has a single one."""
    label = _call_stream(profile, stream)
    times = stream.group_by("class").agg(pl.col("time_ns").sum()).sort("time_ns", "class", descending=[True, False])
    mostly, time = times.row(0)
    is_apart = mostly in ("communication", "memcpy") and time >= _MOSTLY * max(1, int(times["time_ns"].sum()))
    return f"{label}: {'copies' if mostly == 'memcpy' else mostly}" if is_apart else label


# --- Notes ------------------------------------------------------------------------------------------------------------


def _name_main_stream(streams: Sequence[pl.DataFrame], profile: Profile) -> list[str]:
    if len(streams) < 2:
        return []
    return [f"phases, layers and modules are those of {_call_stream(profile, streams[0])}, the busiest compute stream"]


def _count_hidden(hidden: int, profile: Profile) -> list[str]:
    if not hidden:
        return []
    return [f"not shown: {count_noun(hidden, _what(profile)[:-1])} inside others on the same stream"]


def _name_left_out(streams: Sequence[pl.DataFrame], profile: Profile) -> list[str]:
    rest = streams[MOST_STREAMS:]
    if not rest:
        return []
    total = max(1, sum(int(stream["time_ns"].sum()) for stream in streams))
    share = sum(int(stream["time_ns"].sum()) for stream in rest) / total
    named = ", ".join(_label_stream(profile, stream) for stream in rest[:MOST_STREAMS])
    more = f" and {len(rest) - MOST_STREAMS} more" if len(rest) > MOST_STREAMS else ""
    return [f"not shown, {share:.1%} of the {_what(profile)[:-1]} time: {named}{more}"]


def say_merged(what: str, before: Sequence[TrackDraft], after: Sequence[TrackDraft], cell: int) -> list[str]:
    if not cell:
        return []
    total, drawn = (sum(len(lane.stretches) for lane in lanes) for lanes in (before, after))
    length = f"{cell / 1e6:,.3g} ms" if cell >= 1e6 else f"{cell / 1e3:,.3g} µs"
    return [
        f"{total:,} {what} are shown as {drawn:,} blocks: those shorter than {length} are merged with their neighbors"
    ]


# --- Encoding ---------------------------------------------------------------------------------------------------------


def fit_lanes(lanes: Sequence[TrackDraft], most: int) -> tuple[list[TrackDraft], int]:
    merged, cell = fit([lane.stretches for lane in lanes], most)
    return [replace(lane, stretches=stretches) for lane, stretches in zip(lanes, merged, strict=True)], cell


@dataclass(kw_only=True)
class _Places:
    """Texts with their places, each once; only the first `MOST_DESCRIBED` have details."""

    texts: list[tuple[str, str]] = field(default_factory=list)
    known: dict[tuple[str, str], int] = field(default_factory=dict)  # by text and full name
    described: int = 0

    def of(self, text: str, apart: str = "", describe: Callable[[], str] | None = None) -> int:
        """`describe` is called only for new texts: it takes longer than everything else here."""
        if (text, apart) in self.known:
            return self.known[text, apart]
        if describe is None or self.described >= MOST_DESCRIBED:
            # Without a description, equal texts are the same.
            place = self.known.get((text, ""))
            if place is None:
                place = self.known[text, ""] = self._add(text, "")
        else:
            self.described += 1
            place = self._add(text, describe())
        self.known[text, apart] = place
        return place

    def _add(self, text: str, detail: str) -> int:
        self.texts.append((text, detail))
        return len(self.texts) - 1


def write_down(title: str, span_ns: int, lanes: Sequence[TrackDraft], notes: Sequence[str]) -> Lanes:
    names, groups = _Places(), _Places()
    origins: dict[tuple[str, ...], int] = {}
    tracks = tuple(_track(lane, names, groups, origins) for lane in lanes)
    lines = list(dict.fromkeys(line for origin in origins for line in origin))
    places = {line: place for place, line in enumerate(lines)}
    return Lanes(
        title=title,
        unit="trace" if title == _WHOLE else "step",
        span_ns=span_ns,
        tracks=tracks,
        names=tuple(text for text, _ in names.texts),
        details=tuple(detail for _, detail in names.texts),
        groups=tuple(text for text, _ in groups.texts),
        origins=tuple(tuple(places[line] for line in origin) for origin in origins),
        lines=tuple(lines),
        notes=tuple(notes),
    )


def _track(lane: TrackDraft, names: _Places, groups: _Places, origins: dict[tuple[str, ...], int]) -> Track:
    """Return a lane as a track. Names, groups and origins that are new get the next number."""
    drawn = lane.stretches
    group_places = {number: groups.of(lane.groups[number]) for number in np.unique(drawn.groups).tolist()}
    pairs = np.unique(np.stack((drawn.names, drawn.groups)), axis=1).T.tolist() if len(drawn) else []
    name_places = {}
    for name, group in pairs:
        if name == NONE:
            name_places[name, group] = names.of(lane.several.format(lane.groups[group]))
        else:
            recorded = lane.names[name]
            describe = partial(lane.describe, recorded) if lane.describe else None
            name_places[name, group] = names.of(lane.shorten(recorded), recorded if describe else "", describe)
    listed = drawn.names.tolist(), drawn.groups.tolist()
    origin_places = {NONE: NONE}
    for number in np.unique(drawn.origins).tolist():
        if number != NONE and lane.origins[number]:
            origin_places[number] = origins.setdefault(lane.origins[number], len(origins))
    return Track(
        label=lane.label,
        kind=lane.kind,
        spans=Spans(
            starts_ns=tuple(drawn.starts.tolist()),
            lengths_ns=tuple(drawn.lengths.tolist()),
            names=tuple(name_places[pair] for pair in zip(*listed, strict=True)),
            groups=tuple(group_places[number] for number in listed[1]),
            counts=tuple(drawn.counts.tolist()),
            origins=tuple(origin_places.get(number, NONE) for number in drawn.origins.tolist()),
        ),
    )

"""A step as one bar to scale: phases along it, kernel classes and idle time inside each phase.

In a comparison the bars share one scale.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from stepscope.findings import StepBar, StepPhase, StepPicture
from stepscope.render.drawing.axes import Scale, draw_x_axis, find_ticks
from stepscope.render.drawing.brackets import BOLD, NARROW, Bracket, define_hatch, draw_brackets
from stepscope.render.drawing.colours import Palette, assign_colours
from stepscope.render.drawing.svg import PAGE_WIDTH, Bounds, Canvas, Sign, Text, finish, fit, place_signs, width_of
from stepscope.render.formats import clean
from stepscope.render.numbers import format_ms, format_tick, name_idle, say_split, split_shares, split_step
from stepscope.units import say_percent

_MS = 1e6
_BAR, _SMALL_BAR = 52.0, 44.0
_LABEL_SIZE, _INSIDE_SIZE, _HEAD_SIZE = 11.5, 11.0, 13.5
_LEAST_LABEL = 0.004  # share of the longest step: narrower phases have no name
_MOST_SIGNS, _LEAST_SIGN = 7, 0.005  # classes in the legend, and the least share of a step that has its own entry


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSegment:
    """A part of a bar: a class of kernels in a phase, or its idle time (`name` is empty)."""

    bar: int
    phase: StepPhase
    name: str
    start_ns: float
    time_ns: float


def list_segments(picture: StepPicture) -> list[StepSegment]:
    """Return the parts of all bars in the order they are drawn; their numbers are those of the marks."""
    return [segment for at, bar in enumerate(picture.bars) if bar for segment in _cut(at, bar)]


def _cut(at: int, bar: StepBar) -> Iterator[StepSegment]:
    start = 0.0
    for phase in bar.phases:
        for name, time in (*zip(phase.classes, phase.times_ns, strict=True), ("", phase.idle_ns)):
            if time > 0:
                yield StepSegment(bar=at, phase=phase, name=name, start_ns=start, time_ns=time)
                start += time


# --- in words -------------------------------------------------------------------------------------------------------


def describe_picture(picture: StepPicture) -> str:
    """Return the picture as sentences, for readers who do not see it."""
    said = []
    for run, bar in zip(picture.runs, picture.bars, strict=True):
        if bar is None:
            continue
        head = f"{clean(run)}: " if run else ""
        what = "per step" if bar.is_step else "in the trace"
        said.append(f"{head}{split_step(bar)[0]} {what}: {say_split(bar)}.")
        said += [_describe_phase(phase, bar) for phase in bar.phases if phase.name]
        classes = [f"{clean(name) or name_idle(bar)} {format_ms(time)}" for name, time in _sum_classes(bar).items()]
        said.append(f"By class: {', '.join(classes)}.")
    return " ".join(said)


def _describe_phase(phase: StepPhase, bar: StepBar) -> str:
    whole = phase.busy_ns + phase.idle_ns
    share = say_percent(whole / bar.step_ns) if bar.step_ns else "0%"
    return f"{name_phase(phase)}: {format_ms(whole)}, {share} of it; {name_idle(bar)} {format_ms(phase.idle_ns)}."


def name_phase(phase: StepPhase) -> str:
    return clean(phase.name, 40)


def _sum_classes(bar: StepBar) -> dict[str, float]:
    """Return the time of each class, the longest first, and the idle time under an empty name at the end."""
    times: dict[str, float] = {}
    for phase in bar.phases:
        for name, time in zip(phase.classes, phase.times_ns, strict=True):
            times[name] = times.get(name, 0.0) + time
    ordered = {name: times[name] for name in sorted(times, key=lambda name: (-times[name], name))}
    return ordered | {"": sum(phase.idle_ns for phase in bar.phases)}


# --- the drawing ----------------------------------------------------------------------------------------------------


def draw_step_picture(picture: StepPicture) -> str:
    """Return the picture as an SVG file."""
    canvas = Canvas(Palette(assign_colours([picture])))
    bounds = place_step_picture(canvas, picture, PAGE_WIDTH, "idle")
    return finish(canvas, bounds, title=picture.title, notes=picture.notes)


def place_step_picture(canvas: Canvas, picture: StepPicture, width: float, hatch: str) -> Bounds:
    """Draw bars, axis and legend in `width` pixels. Each part of a bar is a group with its number. `hatch` is the id of
    the pattern of idle time, unique in its document."""
    define_hatch(canvas, hatch)
    longest = max((bar.step_ns for bar in picture.bars if bar), default=0.0) or 1.0
    x = Scale(low=0.0, high=longest, start=0.0, end=width)
    segments = list_segments(picture)
    numbers = {id(segment): at for at, segment in enumerate(segments)}
    thickness = _BAR if len(picture.bars) == 1 else _SMALL_BAR
    y = 0.0
    for at, (run, bar) in enumerate(zip(picture.runs, picture.bars, strict=True)):
        if bar is None:
            continue
        y = _draw_heading(canvas, run, bar, y + (26 if at and y else 0), width)
        y = draw_brackets(canvas, _list_brackets(bar, x, width), y, width)
        for segment in segments:
            if segment.bar == at:
                with canvas.group(class_="mark", data_mark=numbers[id(segment)]):
                    _draw_segment(canvas, segment, x, y, thickness, hatch)
                _write_inside(canvas, segment, x, y, thickness, name_idle(bar))
        y += thickness
    _draw_axis(canvas, x, y + 5, width)
    y = place_signs(canvas, _list_signs(canvas, picture, hatch), left=0.0, top=y + 42, width=width)
    return Bounds(left=0.0, top=0.0, right=width, bottom=y)


def _draw_heading(canvas: Canvas, run: str, bar: StepBar, y: float, width: float) -> float:
    """Write the run, the step time, and its busy and idle parts. Return the lower edge."""
    what = "per step" if bar.is_step else "in the trace"
    total = f"{split_step(bar)[0]} {what}"
    bold = fit(f"{clean(run, 60)}: {total}" if run else total, width / BOLD, _HEAD_SIZE)
    rest = say_split(bar)
    fits = width_of(bold, BOLD * _HEAD_SIZE) + 14 + width_of(rest, _LABEL_SIZE + 1) <= width
    canvas.write([Text(x=0, y=y + 9, text=bold, size=_HEAD_SIZE, bold=True)])
    size, faint, foot = _LABEL_SIZE + 1, canvas.palette.faint, y + (9 if fits else 27)
    if fits:
        canvas.write([Text(x=width, y=foot, text=rest, align="end", size=size, colour=faint)])
    else:
        canvas.write([Text(x=0, y=foot, text=rest, size=size, colour=faint)])
    return foot + 15


def _list_brackets(bar: StepBar, x: Scale, width: float) -> list[Bracket]:
    brackets, start = [], 0.0
    for phase in bar.phases:
        whole = phase.busy_ns + phase.idle_ns
        left, start = x(start), start + whole
        if phase.name and whole >= _LEAST_LABEL * x.high:
            lines = _write_label(phase, bar, is_tall=width < NARROW)
            brackets.append(Bracket.over(lines, left, x(start)))
    return brackets


def _write_label(phase: StepPhase, bar: StepBar, *, is_tall: bool) -> tuple[str, ...]:
    whole = phase.busy_ns + phase.idle_ns
    time, share = format_ms(whole), say_percent(whole / bar.step_ns)
    busy = f"{say_percent(phase.busy_ns / whole)} {'in operators' if bar.device == 'CPU' else 'busy'}"
    return (name_phase(phase), time, share, busy) if is_tall else (name_phase(phase), f"{time} · {share}", busy)


def _draw_segment(canvas: Canvas, segment: StepSegment, x: Scale, y: float, thickness: float, hatch: str) -> None:
    left, right = x(segment.start_ns), x(segment.start_ns + segment.time_ns)
    # A gap of half a pixel between parts, unless they are too narrow to lose it.
    right -= 0.5 if right - left > 2 else 0.0
    fill = canvas.palette.fill(segment.name) if segment.name else f"url(#{hatch})"
    canvas.box(left, y, right, y + thickness, fill)


def _write_inside(canvas: Canvas, segment: StepSegment, x: Scale, y: float, thickness: float, idle: str) -> None:
    """Write name and time of a part that is wide enough."""
    left, right = x(segment.start_ns), x(segment.start_ns + segment.time_ns)
    lines = [clean(segment.name, 30) or idle, format_ms(segment.time_ns)]
    if max(width_of(line, _INSIDE_SIZE) for line in lines) + 4 > right - left:
        return
    ink = canvas.palette.ink_on(segment.name) if segment.name else canvas.palette.ink
    middle = y + thickness / 2
    canvas.write(
        Text(x=(left + right) / 2, y=middle + shift, text=line, align="middle", size=_INSIDE_SIZE, colour=ink, rim=rim)
        for line, shift, rim in zip(lines, (-7, 8), (not segment.name,) * 2, strict=True)
    )


def _draw_axis(canvas: Canvas, x: Scale, y: float, width: float) -> None:
    ticks = find_ticks(0.0, x.high / _MS, 8 if width > NARROW else 5)
    places = [(x(tick * _MS), format_tick(tick) if tick else "0 ms") for tick in ticks]
    draw_x_axis(canvas, Bounds(left=0.0, top=y, right=width, bottom=y), places, "", grid=False)


def _list_signs(canvas: Canvas, picture: StepPicture, hatch: str) -> list[Sign]:
    """Return the legend: classes with their time and share, the longest first, what is left, and idle time."""
    bars = [bar for bar in picture.bars if bar]
    sums = [_sum_classes(bar) for bar in bars]
    total: dict[str, float] = {}
    for one in sums:
        for name, time in one.items():
            total[name] = total.get(name, 0.0) + time
    ranked = sorted((name for name in total if name), key=lambda name: (-total[name], name))
    large = [
        name
        for name in ranked
        if any(one.get(name, 0.0) >= _LEAST_SIGN * bar.step_ns for one, bar in zip(sums, bars, strict=True))
    ]
    shown = large[:_MOST_SIGNS] if len(large[:_MOST_SIGNS]) + 1 < len(ranked) else ranked
    rest = [name for name in ranked if name not in shown]
    palette = canvas.palette
    entries: list[tuple[str, str, Iterable[str]]] = [
        (clean(name, 30) or "other", palette.fill(name), (name,)) for name in shown
    ]
    if rest:
        entries.append((f"{len(rest)} more", palette.faint, rest))
    entries.append((name_idle(bars[0]) if bars else "idle", f"url(#{hatch})", ("",)))
    signs = []
    for text, fill, names in entries:
        times = [sum(one.get(name, 0.0) for name in names) for one in sums]
        if names == ("",) and len(bars) == 1:
            signs.append(Sign(fill=fill, text=f"{text} {split_shares(bars[0])[1]}"))
        elif any(times):
            signs.append(Sign(fill=fill, text=f"{text} {_say_times(times, bars)}"))
    return signs


def _say_times(times: Sequence[float], bars: Sequence[StepBar]) -> str:
    if len(times) == 1:
        share = times[0] / bars[0].step_ns if bars[0].step_ns else 0.0
        return f"{format_ms(times[0])} ({say_percent(share)})"
    return f"{' → '.join(format_ms(time).removesuffix(' ms') for time in times)} ms"

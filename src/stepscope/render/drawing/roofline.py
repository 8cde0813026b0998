"""A roofline: the limits of the device as lines, and operators as points whose area is their share of the time.

Operators without FLOPs, which only move memory, have no place on a logarithmic axis of FLOPs. They are in a column left
of it, where the line of the bandwidth goes on: a point is as far below the line as its bandwidth is below the device's,
as everywhere else. The axes fit the points that take 99% of the time, so that a tiny operator does not push the others
into a corner.

Names at the points would overlap, because the operators of a model are few kinds in many shapes. So the largest points
have numbers, and a list below has the names.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepscope.findings import Roofline, RoofPoint
from stepscope.render.drawing.axes import Scale, draw_x_axis, draw_y_axis, find_log_ticks
from stepscope.render.drawing.colours import Palette, assign_colours
from stepscope.render.drawing.svg import PAGE_WIDTH, Bounds, Canvas, Sign, Text, finish, fit, place_signs, width_of
from stepscope.render.formats import clean
from stepscope.render.numbers import find_prefix, format_rate, format_tick, format_value

_HEIGHT = 330.0
_LEFT = 44.0  # of the vertical axis
_MOST_POINTS, MOST_NUMBERED, _MOST_ROOFS, _MOST_SIGNS = 1500, 12, 6, 14
_LEAST_SIZE, _MOST_SIZE = 2.6, 15.0
# A number fits into a point of at least this radius.
_ROOMY = 7.5
_MARGIN, _TERA = 1.8, 1e12
_FITTED = 0.99  # of the time of all points decides the axes
_COLUMN, _COLUMN_SHARE, _COLUMN_NAME = 90.0, 0.18, "memory only"  # its least width and share of the plot
_LINE, _FIGURE, _SMALL = 16.0, 46.0, 11.0  # a row of the list, room for a share in it, font size

Place = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """The ranges of both axes, in FLOP/byte and FLOP/s."""

    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, point: RoofPoint) -> Place:
        """Return the coordinates of a point. One that only moves memory stands where the horizontal axis starts."""
        return _place(point, self.x[0])

    def contain(self, point: RoofPoint) -> bool:
        x, y = self.place(point)
        return self.x[0] <= x <= self.x[1] and self.y[0] <= y <= self.y[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plane:
    """Both axes, logarithmic; `column` is the width of the column of memory-only operators at the left."""

    x: Scale
    y: Scale
    column: float
    roofline: Roofline


def _is_memory_only(point: RoofPoint) -> bool:
    return not point.flops_per_s and point.bytes_per_s > 0


def _place(point: RoofPoint, least: float) -> Place:
    return (least, point.bytes_per_s * least) if _is_memory_only(point) else (point.intensity, point.flops_per_s)


def choose_points(roofline: Roofline) -> list[RoofPoint]:
    """Return the points on the axes, largest first, so that none hides another."""
    drawn = sorted(filter(_has_place, roofline.points), key=lambda point: -point.share)[:_MOST_POINTS]
    limits = _find_limits(roofline, drawn)
    return [point for point in drawn if limits.contain(point)]


def _has_place(point: RoofPoint) -> bool:
    values = (point.bytes_per_s,) if _is_memory_only(point) else (point.intensity, point.flops_per_s)
    return all(math.isfinite(value) and value > 0 for value in values) and math.isfinite(point.share)


def _find_limits(roofline: Roofline, points: Sequence[RoofPoint]) -> _Limits:
    """Return axes around the points that take most of the time, all roofs and the ridges, with a margin."""
    computing = _drop_lowest([one for one in points if not _is_memory_only(one)], lambda one: one.intensity)
    roofs = [roof.flops_per_s for roof in roofline.roofs if roof.flops_per_s > 0][:_MOST_ROOFS]
    ridges = [roof / roofline.bytes_per_s for roof in roofs] if roofline.bytes_per_s > 0 else []
    xs = [*(point.intensity for point in computing), *ridges] or [1.0]
    least = min(xs) / 3
    fitted = _drop_lowest(points, lambda one: _place(one, least)[1])
    ys = [*(_place(point, least)[1] for point in fitted), *roofs]
    if roofline.bytes_per_s > 0 and math.isfinite(roofline.bytes_per_s):
        ys.append(roofline.bytes_per_s * least)
    ys = ys or [1.0]
    return _Limits(x=(least, max(xs) * 4), y=(min(ys) / 2, max(ys) * _MARGIN))


def _drop_lowest(points: Sequence[RoofPoint], height: Callable[[RoofPoint], float]) -> list[RoofPoint]:
    """Return the points without the lowest, which together take less than 1% of the time. Dropping the shortest was
    tried: a point of 0.1% at a millionth of the throughput of the others remained."""
    ordered = sorted(points, key=height)
    passed = itertools.accumulate(max(point.share, 0.0) for point in ordered)
    least = (1 - _FITTED) * sum(max(point.share, 0.0) for point in points)
    dropped = {id(point) for point, share in zip(ordered, passed, strict=True) if share < least}
    return [point for point in points if id(point) not in dropped]


def draw_roofline(roofline: Roofline) -> str:
    """Return the roofline as an SVG file."""
    points = choose_points(roofline)
    canvas = Canvas(Palette(assign_colours([roofline])))
    plot = place_roofline(canvas, roofline, points, PAGE_WIDTH, _HEIGHT)
    signs = list_signs(canvas.palette, roofline, points)
    end = place_signs(canvas, signs, left=-_LEFT, top=plot.bottom + 16, width=PAGE_WIDTH) if signs else plot.bottom
    end = _list_names(canvas, roofline, points[:MOST_NUMBERED], end + 16)
    bounds = Bounds(left=plot.left, top=plot.top, right=plot.right, bottom=end)
    return finish(canvas, bounds, title=roofline.title, notes=_make_notes(roofline, points))


def place_roofline(
    canvas: Canvas, roofline: Roofline, points: Sequence[RoofPoint], width: float, height: float
) -> Bounds:
    """Draw the plot and its axes in `width` pixels. Points are groups with their index in `points`."""
    plane = _span(roofline, points, width - _LEFT, height)
    sizes = _find_sizes(points)
    places = _find_places(plane, points, sizes)
    _draw_axes(canvas, plane, width - _LEFT, height)
    names = _draw_roofs(canvas, plane, width - _LEFT)
    _draw_moves(canvas, points, places)
    groups = rank_groups(points)
    for at, (point, size, (x, y)) in enumerate(zip(points, sizes, places, strict=True)):
        fill = canvas.palette.fill(point.group)
        with canvas.group(class_="mark", data_mark=at, data_group=groups.index(point.group)):
            # In a comparison the points of the first run, the baseline, are hollow.
            if len(roofline.runs) > 1 and point.run == 0:
                canvas.mark("circle", x, y, max(size - 1, 1.5), fill="none", stroke=fill, stroke_width=2)
            else:
                style: dict[str, str | float] = {"stroke": canvas.palette.paper, "stroke_width": 0.8}
                canvas.mark("circle", x, y, size, fill=fill, fill_opacity=0.86, **style)
    _draw_numbers(canvas, plane, points, sizes, places, [_box_of(name) for name in names], height)
    canvas.write(names)
    return Bounds(left=-_LEFT, top=-26.0, right=width - _LEFT, bottom=height + 44)


def _span(roofline: Roofline, points: Sequence[RoofPoint], width: float, height: float) -> _Plane:
    limits = _find_limits(roofline, points)
    column = max(_COLUMN, _COLUMN_SHARE * width) if any(map(_is_memory_only, points)) else 0.0
    return _Plane(
        x=Scale(low=limits.x[0], high=limits.x[1], start=column, end=width, log=True),
        y=Scale(low=limits.y[0], high=limits.y[1], start=height, end=0.0, log=True),
        column=column,
        roofline=roofline,
    )


def _find_places(plane: _Plane, points: Sequence[RoofPoint], sizes: Sequence[float]) -> list[Place]:
    """Return the centres of the points. Those in the column are moved sideways until they are apart, if that is
    possible."""
    places: list[Place] = []
    taken: list[tuple[Place, float]] = []
    for point, size in zip(points, sizes, strict=True):
        x, y = _place(point, plane.x.low)
        place = (plane.x(x), plane.y(y))
        if _is_memory_only(point):
            place = _move_aside(plane.column, place[1], size, taken)
            taken.append((place, size))
        places.append(place)
    return places


def _move_aside(width: float, y: float, size: float, taken: Sequence[tuple[Place, float]]) -> Place:
    room = max(0.0, width / 2 - size - 3)
    shifts = (sign * step for step in range(0, int(room) + 1, 3) for sign in (1, -1))
    candidates = [(width / 2 + shift, y) for shift in shifts]

    def find_overlap(place: Place) -> float:
        return max((size + other - math.dist(place, centre) for centre, other in taken), default=0.0)

    free = next((place for place in candidates if find_overlap(place) <= 0), None)
    return free or min(candidates, key=find_overlap)


def _draw_axes(canvas: Canvas, plane: _Plane, width: float, height: float) -> None:
    plot = Bounds(left=0.0, top=0.0, right=width, bottom=height)
    # The margin above the highest roof must not change the unit. Devices are compared in TFLOP/s, never in PFLOP/s.
    size, prefix = find_prefix(min(plane.y.high / _MARGIN, _TERA))
    speeds = [(plane.y(tick), format_tick(tick / size)) for tick in find_log_ticks(plane.y.low, plane.y.high)]
    ticks = [(plane.x(tick), format_tick(tick)) for tick in find_log_ticks(plane.x.low, plane.x.high)]
    draw_y_axis(canvas, plot, speeds, f"throughput ({prefix}FLOP/s)")
    if plane.column:
        middle, faint = plane.column / 2, canvas.palette.faint
        edge = middle + width_of(_COLUMN_NAME, 12.0) / 2 + 6
        ticks = [(x, text if x - width_of(text, 12.0) / 2 > edge else "") for x, text in ticks]
        canvas.write([Text(x=middle, y=height + 15, text=_COLUMN_NAME, align="middle", colour=faint)])
        canvas.line(plane.column, 0.0, plane.column, height, canvas.palette.frame, 1.0, "3 4")
    draw_x_axis(canvas, plot, ticks, "intensity (FLOP/byte)", grid=True)


def _draw_roofs(canvas: Canvas, plane: _Plane, width: float) -> list[Text]:
    """Draw the memory slope up to the highest roof, and each roof from the slope to the right. Return their labels,
    which are drawn on top of everything."""
    bandwidth = plane.roofline.bytes_per_s
    if not bandwidth > 0 or not math.isfinite(bandwidth):
        return []
    known = (roof for roof in plane.roofline.roofs if roof.flops_per_s > 0)
    roofs = sorted(known, key=lambda roof: -roof.flops_per_s)[:_MOST_ROOFS]
    top = roofs[0].flops_per_s if roofs else plane.y.high
    start = max(plane.x.low, plane.y.low / bandwidth)
    end = min(top / bandwidth, plane.x.high)
    if end <= start:
        return []
    x, y, ink = plane.x, plane.y, canvas.palette.ink
    canvas.line(x(start), y(start * bandwidth), x(end), y(end * bandwidth), ink, 1.4)
    if plane.column:
        canvas.line(0.0, y(x.low * bandwidth), plane.column, y(x.low * bandwidth), ink, 1.4)
    texts = [_name_slope(plane, start, end)]
    lowest_free = math.inf
    for roof in roofs:
        level = y(roof.flops_per_s)
        canvas.line(x(roof.flops_per_s / bandwidth), level, width, level, ink, 1.4)
        # Roofs can be close together: a label that would overlap the one above is left out.
        if level - 8 > lowest_free or lowest_free is math.inf:
            text = f"{clean(roof.label, 30)}, {format_rate(roof.flops_per_s, 'FLOP/s', exact=True)}"
            texts.append(Text(x=width - 2, y=level - 8, text=text, align="end", size=_SMALL, rim=True))
            lowest_free = level + 8
    return texts


def _name_slope(plane: _Plane, start: float, end: float) -> Text:
    """Place the label left of the slope, a little over halfway up, where no points can be; right of it if that is too
    narrow."""
    bandwidth = plane.roofline.bytes_per_s
    middle = start * (end / start) ** 0.6
    text = f"memory, {format_rate(bandwidth, 'B/s', exact=True)}"
    x, y = plane.x(middle) - 13, plane.y(middle * bandwidth)
    if x < width_of(text, _SMALL) + 4:
        return Text(x=x + 21, y=y + 8, text=text, size=_SMALL, rim=True)
    return Text(x=x, y=y, text=text, align="end", size=_SMALL, rim=True)


def _draw_moves(canvas: Canvas, points: Sequence[RoofPoint], places: Sequence[Place]) -> None:
    """Draw lines from an operator in one run to the same one in the other, unless it occurs twice. Not in the column,
    where points are moved sideways."""
    first: dict[str, Place | None] = {}
    for point, place in zip(points, places, strict=True):
        if point.run == 0:
            first[point.label] = None if point.label in first else place
    for point, place in zip(points, places, strict=True):
        before = first.get(point.label) if point.run and not _is_memory_only(point) else None
        if before is not None:
            canvas.line(*before, *place, canvas.palette.frame, 0.8)


def _find_sizes(points: Sequence[RoofPoint]) -> list[float]:
    """Return a radius that makes the area proportional to the time: readers compare areas."""
    most = max((point.share for point in points), default=0.0) or 1.0
    return [max(_LEAST_SIZE, _MOST_SIZE * math.sqrt(max(point.share, 0.0) / most)) for point in points]


def _draw_numbers(
    canvas: Canvas,
    plane: _Plane,
    points: Sequence[RoofPoint],
    sizes: Sequence[float],
    centres: Sequence[Place],
    names: Sequence[Bounds],
    height: float,
) -> None:
    """Draw a number inside each of the largest points, or next to it with a line, at the first place where it covers
    nothing."""
    taken, width = list(centres), plane.x.end
    discs = list(zip(centres, sizes, strict=True))
    for at, ((x, y), size) in enumerate(zip(centres[:MOST_NUMBERED], sizes, strict=False)):
        crowded = sum(1 for other in centres[:MOST_NUMBERED] if not _lie_apart((x, y), other)) > 1
        is_hollow = len(plane.roofline.runs) > 1 and points[at].run == 0
        if size >= _ROOMY + 2.5 * (at >= 9) and not crowded:
            colour = canvas.palette.ink if is_hollow else canvas.palette.ink_on(points[at].group)
            canvas.write([_number(at, (x, y), colour)])
            continue
        place = _find_place(x, y, size, taken, discs, names, width, height)
        taken.append(place)
        canvas.line(x, y, (place[0] * 2 + x) / 3, (place[1] * 2 + y) / 3, canvas.palette.ink, 0.6)
        canvas.write([_number(at, place, canvas.palette.ink)])


def _number(at: int, place: Place, colour: str) -> Text:
    return Text(x=place[0], y=place[1], text=str(at + 1), align="middle", size=10.5, bold=True, colour=colour)


def _find_place(
    x: float,
    y: float,
    radius: float,
    taken: Sequence[Place],
    discs: Sequence[tuple[Place, float]],
    names: Sequence[Bounds],
    width: float,
    height: float,
) -> Place:
    """Return a free place, or at least one that covers no other number and no name of a roof."""
    places = [
        (x + (radius + reach) * math.cos(angle), y - (radius + reach) * math.sin(angle))
        for reach in (9, 16, 24, 34, 46)
        for angle in (math.pi / 4, 0.0, -math.pi / 4, math.pi, 3 * math.pi / 4, -3 * math.pi / 4)
    ]
    inside = [
        place
        for place in places
        if 8 < place[0] < width - 8 and 8 < place[1] < height - 8 and not any(_covers(name, place) for name in names)
    ]
    free = [place for place in inside if all(_lie_apart(place, other) for other in taken)]
    clear = (place for place in free if all(math.dist(place, centre) > size + 5 for centre, size in discs))
    return next(clear, free[0] if free else places[0])


def _box_of(text: Text) -> Bounds:
    """Return the room of a label."""
    left = text.x - (width_of(text.text, text.size) if text.align == "end" else 0.0)
    half = 0.6 * text.size
    return Bounds(left=left, top=text.y - half, right=left + width_of(text.text, text.size), bottom=text.y + half)


def _covers(box: Bounds, place: Place) -> bool:
    """Whether a number at this place would touch a label."""
    return box.left - 8 < place[0] < box.right + 8 and box.top - 6 < place[1] < box.bottom + 6


def _lie_apart(one: Place, other: Place) -> bool:
    return abs(one[0] - other[0]) > 12 or abs(one[1] - other[1]) > 11


def _list_names(canvas: Canvas, roofline: Roofline, points: Sequence[RoofPoint], top: float) -> float:
    """Draw the numbered points in two columns: name, share of the time, share of the device's limit."""
    num_rows = math.ceil(len(points) / 2)
    column_width = PAGE_WIDTH / 2
    for at, point in enumerate(points):
        column, row = divmod(at, num_rows)
        left, y = -_LEFT + column * column_width, top + 4 + (row + 1) * _LINE
        right = left + column_width - 14
        if not row:
            canvas.write([_figure(canvas, "of time", right - _FIGURE, top), _figure(canvas, "of limit", right, top)])
        name = fit(clean(name_point(roofline, point), 80), column_width - 34 - 2 * _FIGURE, _SMALL)
        canvas.write(
            [
                Text(x=left + 14, y=y, text=str(at + 1), align="end", size=10.5, bold=True),
                Text(x=left + 20, y=y, text=name, size=_SMALL),
                _figure(canvas, format_value("share", point.share), right - _FIGURE, y),
                _figure(canvas, format_value("share", point.reached), right, y),
            ]
        )
    return top + (num_rows + 1) * _LINE if points else top


def name_point(roofline: Roofline, point: RoofPoint) -> str:
    """Return the label of a point, with its run, and with the shapes if the first line of the details has them."""
    first = point.detail.partition("\n")[0]
    label = first if first.startswith(point.label) else point.label
    run = roofline.runs[point.run] if point.run < len(roofline.runs) else ""
    return f"{run}: {label}" if run else label


def _figure(canvas: Canvas, text: str, right: float, y: float) -> Text:
    return Text(x=right, y=y, text=text, align="end", size=_SMALL, colour=canvas.palette.faint)


def rank_groups(points: Sequence[RoofPoint]) -> list[str]:
    """Return the classes, longest time first."""
    shares: dict[str, float] = {}
    for point in points:
        shares[point.group] = shares.get(point.group, 0.0) + point.share
    return sorted(shares, key=lambda group: -shares[group])


def list_signs(palette: Palette, roofline: Roofline, points: Sequence[RoofPoint]) -> list[Sign]:
    """Return the legend: classes, longest time first, then the marks of the runs."""
    groups = rank_groups(points)[:_MOST_SIGNS]
    signs = [Sign(fill=palette.fill(group), text=clean(group, 30) or "other") for group in groups]
    if len(roofline.runs) > 1:
        signs += [
            Sign(fill=palette.faint, text=clean(run, 40), shape="circle", hollow=at == 0)
            for at, run in enumerate(roofline.runs)
        ]
    return signs


def _make_notes(roofline: Roofline, points: Sequence[RoofPoint]) -> list[str]:
    notes = [] if points else ["No operators to draw."]
    if points:
        notes.append("A point is all calls of one operator with one shape; its area is its share of the time.")
    hidden = len(roofline.points) - len(points)
    if hidden:
        notes.append(
            f"{hidden} of {len(roofline.points)} points not drawn: not finite, or outside the axes, which fit the "
            "points that take 99% of the time."
        )
    return [*notes, *roofline.notes]

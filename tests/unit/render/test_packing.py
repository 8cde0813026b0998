"""The data of the page's charts: every number survives, text is clean, and nothing is repeated."""

import json
import math
import re
from itertools import accumulate

import msgspec
import pytest

from stepscope.findings import Axis, Bars, Figure, Point, Roofline
from stepscope.render.drawing.colours import Palette, assign_colours, write_colours
from stepscope.render.drawing.lines import arrange
from stepscope.render.site.charts import pack_drawing, write_body
from stepscope.render.site.packing import find_highest, pack_lanes, pack_timeline
from tests.unit.render.report_parts import draw_attention, draw_roofline, kernels_of_step, lay_lanes
from tests.unit.render.timelines import GIB, training_step


def test_spans_round_trip_to_the_nanosecond() -> None:
    lanes = lay_lanes(kernels_of_step())
    packed = pack_lanes(lanes)
    for track, was in zip(packed["tracks"], lanes.tracks, strict=True):
        ends = list(accumulate(gap + length for gap, length in zip(track["gap"], track["length"], strict=True)))
        starts = tuple(end - length for end, length in zip(ends, track["length"], strict=True))
        assert starts == was.spans.starts_ns
        assert tuple(track["length"]) == was.spans.lengths_ns
    stream = packed["tracks"][2]
    assert [packed["names"][name] for name in stream["name"][:2]] == ["embedding bf16", "layer norm forward bf16"]
    assert packed["groups"][stream["group"][1]] == "norm"


def test_constant_column_is_one_number() -> None:
    packed = pack_lanes(lay_lanes(kernels_of_step()))
    assert packed["tracks"][2]["count"] == 1
    assert packed["tracks"][0]["count"] != 1
    nothing = pack_lanes(lay_lanes([]))
    assert nothing["tracks"][0]["count"] == []


def test_packed_step_is_small() -> None:
    lanes = lay_lanes(kernels_of_step() * 40)
    packed = json.dumps(pack_lanes(lanes), separators=(",", ":"))
    num_spans = sum(len(track.spans.starts_ns) for track in lanes.tracks)
    assert num_spans > 20_000
    assert len(packed) < 20 * num_spans


def test_text_is_cut_and_made_visible() -> None:
    lanes = lay_lanes(kernels_of_step())
    spoilt = msgspec.structs.replace(lanes, names=("\u202eevil", "x" * 10_000, *lanes.names[2:]))
    names = pack_lanes(spoilt)["names"]
    assert names[0] == "\\u202eevil"
    assert len(names[1]) < 300


def test_undrawable_roofline_points_are_left_out() -> None:
    roofline = draw_roofline()
    without = msgspec.structs.replace(roofline.points[0], intensity=math.nan)
    unknown = msgspec.structs.replace(roofline.points[1], reached=None)
    part = msgspec.structs.replace(roofline, points=(without, unknown, *roofline.points[2:]))
    packed = pack_drawing(part, "kernels")
    assert len(packed["marks"]) == len(roofline.points) - 1
    assert packed["marks"][0]["lines"][0] == unknown.label  # the most time first
    assert not any("the device allows" in line for line in packed["marks"][0]["lines"])
    written = write_body(part, Palette(assign_colours([part]), on_page=True))
    assert "1 of 8 points not drawn" in written
    assert written.count("<svg") == 2 + len(packed["groups"])
    json.dumps(packed, allow_nan=False)


def test_a_figure_keeps_the_order_of_its_series() -> None:
    figure = msgspec.structs.replace(draw_attention(), series=("ours", "not there", "sdpa"))
    packed = pack_drawing(figure, "")
    assert packed["groups"] == ["ours", "sdpa", "plain"]
    assert list(dict.fromkeys(place.split(",")[0] for place in packed["places"])) == ["forward", "forward and backward"]
    assert [mark["lines"][0].split(":")[0] for mark in packed["marks"][::5]] == ["ours", "sdpa", "plain"] * 2
    assert [mark["place"] for mark in packed["marks"][:6]] == [0, 1, 2, 3, 4, 0]


def test_drawn_marks_match_packed_marks() -> None:
    bars = Bars(title="", kind="ms", labels=("a", "b"), series=("x", "y"), values=((1.0, None), (2.0, 3.0)))
    parts: tuple[tuple[Figure | Roofline | Bars, int], ...] = ((draw_attention(), 30), (draw_roofline(), 8), (bars, 3))
    for part, num_drawn in parts:
        packed = pack_drawing(part, "kernels")
        written = write_body(part, Palette(assign_colours([part]), on_page=True))
        numbers = {int(number) for number in re.findall(r'<g class="mark" data-mark="(\d+)"', written)}
        assert len(numbers) == num_drawn
        assert numbers <= set(range(len(packed["marks"])))
    assert pack_drawing(bars, "")["marks"][3]["lines"] == ["b", "y: 3.00 ms"]


def test_drawing_on_the_page_uses_colour_variables() -> None:
    part = draw_attention()
    palette = Palette(assign_colours([part]), on_page=True)
    written = write_body(part, palette)
    assert not re.search(r'(?:fill|stroke)="#', written)
    assert "style=" not in written  # which the page's policy forbids
    named = set(re.findall(r"var\(--(c[0-9A-F]{6})\)", written))
    assert named
    assert all(f"--{name}:" in write_colours(palette.pairs.values()) for name in named)


@pytest.mark.parametrize(("y", "is_log", "num_left_out"), [(0.0, True, 1), (0.0, False, 0), (float("inf"), False, 1)])
def test_undrawable_points_are_left_out(y: float, is_log: bool, num_left_out: int) -> None:
    points = (Point(panel="", series="", x=1.0, y=2.0), Point(panel="", series="", x=2.0, y=y))
    axis = Axis(label="time", log=is_log)
    figure = Figure(title="", subtitle="", x=Axis(label="size"), y=axis, points=points)
    assert len(pack_drawing(figure, "")["marks"]) == 2 - num_left_out
    written = write_body(figure, Palette({}, on_page=True))
    assert ("1 of 2 points not drawn" in written) == bool(num_left_out)


def test_bytes_have_round_ticks_from_zero() -> None:
    points = tuple(Point(panel="", series="", x=float(x), y=2.9 * x * 2**30) for x in (1, 8))
    figure = Figure(title="", subtitle="", x=Axis(label="batch"), y=Axis(label="peak", unit="bytes"), points=points)
    lines = arrange(figure)
    assert lines.y.texts == ("0", "5", "10", "15", "20", "25")
    assert lines.y.title == "peak (GiB)"
    assert lines.x.texts[:2] == ("0", "2")


def test_close_values_have_ticks() -> None:
    points = tuple(Point(panel="", series="", x=float(x), y=1.0 + x / 1e4) for x in (128, 256))
    axis = Axis(label="time", unit="ms", log=True)
    figure = Figure(title="", subtitle="", x=Axis(label="size", log=True), y=axis, points=points)
    texts = arrange(figure).y.texts
    assert len(texts) >= 4
    assert len(set(texts)) == len(texts)


def test_height_of_a_timeline_includes_its_line() -> None:
    timeline = training_step()
    assert timeline.line is not None
    assert find_highest(timeline) == max(timeline.line.values)
    without = msgspec.structs.replace(timeline, line=None)
    assert 19 * GIB < find_highest(without) < max(timeline.line.values)
    assert pack_timeline(timeline, highest=123)["highest"] == 123
    assert find_highest(msgspec.structs.replace(without, areas=())) == 0


@pytest.mark.parametrize(("count", "said"), [(1, "it does not fit"), (2, "they do not fit")])
def test_points_left_out_are_counted(count: int, said: str) -> None:
    roofline = draw_roofline()
    tiny = msgspec.structs.replace(roofline.points[0], label="tiny", flops_per_s=1e3, intensity=1e-6, share=0.0001)
    part = msgspec.structs.replace(roofline, points=(*roofline.points, *[tiny] * count))
    written = write_body(part, Palette(assign_colours([part]), on_page=True))
    assert f"{count} of {len(part.points)} points not drawn: {said}" in written

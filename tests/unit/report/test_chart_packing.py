"""What the page's charts are given: every number survives, texts are clean, and what repeats is there once."""

import json
from itertools import accumulate

import msgspec
import pytest

from stepscope.findings import Axis, Figure, Point
from stepscope.report.site.chart_packing import find_highest, pack_figure, pack_lanes, pack_roofline, pack_timeline
from tests.unit.report.report_parts import draw_attention, draw_roofline, kernels_of_step, lay_lanes
from tests.unit.report.timelines import GIB, training_step


def test_spans_come_back_to_the_nanosecond() -> None:
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


def test_a_column_of_one_number_is_that_number() -> None:
    packed = pack_lanes(lay_lanes(kernels_of_step()))
    assert packed["tracks"][2]["count"] == 1
    assert packed["tracks"][0]["count"] != 1
    nothing = pack_lanes(lay_lanes([]))
    assert nothing["tracks"][0]["count"] == []


def test_a_step_is_small() -> None:
    lanes = lay_lanes(kernels_of_step() * 40)
    packed = json.dumps(pack_lanes(lanes), separators=(",", ":"))
    num_spans = sum(len(track.spans.starts_ns) for track in lanes.tracks)
    assert num_spans > 20_000
    assert len(packed) < 20 * num_spans


def test_texts_are_cut_and_made_visible() -> None:
    lanes = lay_lanes(kernels_of_step())
    spoilt = msgspec.structs.replace(lanes, names=("\u202eevil", "x" * 10_000, *lanes.names[2:]))
    names = pack_lanes(spoilt)["names"]
    assert names[0] == "\\u202eevil"
    assert len(names[1]) < 300


def test_points_of_a_roofline_need_a_place_on_its_axes() -> None:
    roofline = draw_roofline()
    without = msgspec.structs.replace(roofline.points[0], intensity=0.0)
    endless = msgspec.structs.replace(roofline.points[1], reached=float("nan"))
    packed = pack_roofline(msgspec.structs.replace(roofline, points=(without, endless, *roofline.points[2:])))
    assert packed["numLeftOut"] == 1
    assert len(packed["points"]) == len(roofline.points) - 1
    times = [point["ms"] for point in packed["points"]]
    assert times == sorted(times, reverse=True)
    assert packed["points"][0]["reached"] is None
    json.dumps(packed, allow_nan=False)


def test_a_figure_keeps_the_order_of_its_series() -> None:
    figure = msgspec.structs.replace(draw_attention(), series=("ours", "not there", "sdpa"))
    packed = pack_figure(figure)
    assert packed["series"] == ["ours", "sdpa", "plain"]
    assert packed["panels"] == ["forward", "forward and backward"]
    first = packed["points"]["series"][0]
    assert packed["series"][first] == figure.points[0].series


@pytest.mark.parametrize(("y", "is_log", "num_left_out"), [(0.0, True, 1), (0.0, False, 0), (float("inf"), False, 1)])
def test_points_without_a_place_are_left_out(y: float, is_log: bool, num_left_out: int) -> None:
    points = (Point(panel="", series="", x=1.0, y=2.0, high=float("inf")), Point(panel="", series="", x=2.0, y=y))
    axis = Axis(label="time", log=is_log)
    packed = pack_figure(Figure(title="", subtitle="", x=Axis(label="size"), y=axis, points=points))
    assert packed["numLeftOut"] == num_left_out
    assert packed["points"]["high"][0] is None


def test_the_highest_of_a_timeline_has_its_line_in_it() -> None:
    timeline = training_step()
    assert timeline.line is not None
    assert find_highest(timeline) == max(timeline.line.values)
    without = msgspec.structs.replace(timeline, line=None)
    assert 19 * GIB < find_highest(without) < max(timeline.line.values)
    assert pack_timeline(timeline, highest=123)["highest"] == 123
    assert find_highest(msgspec.structs.replace(without, areas=())) == 0

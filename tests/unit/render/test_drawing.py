"""What is drawn, measured in the drawing: lengths and places say the values, and words neither collide nor leave the
picture."""

import math
import re
from collections.abc import Iterator
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest

from stepscope.findings import Axis, Bars, Figure, Point
from stepscope.render.drawing import draw_part
from stepscope.render.drawing.axes import Scale, find_log_ticks, find_ticks
from stepscope.render.drawing.svg import width_of
from stepscope.render.paper import collect, tidy
from tests.unit.render import report_samples
from tests.unit.render.report_parts import draw_roofline

Element = ElementTree.Element
Box = tuple[float, float, float, float]


def parse(svg: str) -> Element:
    return ElementTree.fromstring(svg)


def find_marks(svg: str, tag: str) -> list[Element]:
    """Return the shapes inside the marks, in the order of their numbers."""
    groups = [one for one in parse(svg).iter() if one.get("class") == "mark"]
    groups.sort(key=lambda one: int(one.get("data-mark") or 0))
    return [inner for group in groups for inner in group if inner.tag.endswith("}" + tag)]


def number(element: Element, name: str) -> float:
    return float(element.attrib[name])


def text_boxes(element: Element, x: float = 0.0, y: float = 0.0) -> Iterator[tuple[str, Box]]:
    """Every horizontal text with about the room it takes; widths are estimated on the wide side, so less is assumed."""
    if moved := re.match(r"translate\(([-\d.]+) ([-\d.]+)\)", element.get("transform", "")):
        x, y = x + float(moved[1]), y + float(moved[2])
    for inner in element:
        if inner.tag.endswith("}text") and "rotate" not in inner.get("transform", ""):
            text, size = inner.text or "", float(inner.get("font-size", "12"))
            width = 0.82 * width_of(text, size)
            share = {"start": 0.0, "middle": 0.5, "end": 1.0}[inner.get("text-anchor", "start")]
            left, base = x + number(inner, "x") - share * width, y + number(inner, "y")
            yield text, (left, base - 0.7 * size, left + width, base + 0.1 * size)
        yield from text_boxes(inner, x, y)


def drawings() -> dict[str, str]:
    found = {}
    for name, report in (("one", report_samples.one_run()), ("two", report_samples.two_runs())):
        for drawing in collect(tidy(report))[0]:
            found[f"{name}-{drawing.key}"] = drawing.draw()
    return found


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return drawings()


def test_no_text_leaves_its_chart(drawn: dict[str, str]) -> None:
    assert len(drawn) > 12
    for name, svg in drawn.items():
        root = parse(svg)
        left, top, width, height = map(float, root.attrib["viewBox"].split())
        for text, box in text_boxes(root):
            assert left <= box[0], (name, text)
            assert box[2] <= left + width, (name, text)
            assert top <= box[1], (name, text)
            assert box[3] <= top + height, (name, text)


def test_no_two_texts_overlap(drawn: dict[str, str]) -> None:
    for name, svg in drawn.items():
        for (one, a), (other, b) in combinations(text_boxes(parse(svg)), 2):
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert apart, (name, one, other)


def test_bars_are_as_long_as_their_values() -> None:
    bars = Bars(title="", kind="ms", labels=("a", "b"), series=("x", "y"), values=((4.0, -1.0), (2.0, None)))
    boxes = find_marks(draw_part(bars), "rect")
    widths = [number(box, "width") for box in boxes]
    assert [width / widths[0] for width in widths] == pytest.approx([1, 0.25, 0.5], rel=1e-3)
    # A negative bar ends where the others start.
    assert number(boxes[1], "x") + widths[1] == pytest.approx(number(boxes[0], "x"), abs=0.02)


def test_stacked_bars_are_end_to_end_with_their_total() -> None:
    bars = Bars(title="", kind="bytes", labels=("a",), series=("x", "y"), values=((2**30,), (2**29,)), is_stacked=True)
    svg = draw_part(bars)
    first, second = find_marks(svg, "rect")
    assert number(first, "x") + number(first, "width") == pytest.approx(number(second, "x"), abs=0.02)
    assert number(first, "width") == pytest.approx(2 * number(second, "width"), rel=1e-3)
    texts = [text for text, _ in text_boxes(parse(svg))]
    assert {"1.00 GiB", "512 MiB", "1.50 GiB"} <= set(texts)


def test_points_are_at_their_logarithms() -> None:
    points = tuple(Point(panel="", series="s", x=10.0**at, y=10.0 ** (2 * at)) for at in range(4))
    axis = Axis(label="", log=True)
    circles = find_marks(draw_part(Figure(title="", subtitle="", x=axis, y=axis, points=points)), "circle")
    places = [(number(one, "cx"), number(one, "cy")) for one in circles]
    steps = {(round(b[0] - a[0], 1), round(b[1] - a[1], 1)) for a, b in pairwise(places)}
    assert len(steps) == 1
    across, up = steps.pop()
    assert across > 80
    assert up < -60


def test_the_area_of_a_point_is_its_share_of_the_time() -> None:
    roofline = draw_roofline()
    circles = find_marks(draw_part(roofline), "circle")
    shares = sorted((point.share for point in roofline.points), reverse=True)
    areas = [number(one, "r") ** 2 for one in circles]
    assert [area / areas[0] for area in areas] == pytest.approx([share / shares[0] for share in shares], rel=1e-2)


def test_first_of_two_runs_is_hollow_with_a_line_to_the_second() -> None:
    svg = draw_part(draw_roofline(("A", "B")))
    fills = [one.attrib["fill"] for one in find_marks(svg, "circle")]
    assert fills.count("none") == len(fills) / 2
    assert len(re.findall(r'stroke-width="0.8"/>', re.sub(r"<circle[^>]*>", "", svg))) == len(fills) / 2


@pytest.mark.parametrize("log", [False, True])
def test_scale_clamps_values_below_a_log_axis(log: bool) -> None:
    scale = Scale(low=1.0, high=100.0, start=300.0, end=0.0, log=log)
    assert (scale(1.0), scale(100.0)) == pytest.approx((300.0, 0.0))
    if log:
        assert scale(10.0) == pytest.approx(150.0)
        assert scale(-5.0) == 300.0


def test_ticks_are_round_and_inside() -> None:
    assert find_ticks(-3.2, 7.9, 6) == [-2.0, 0.0, 2.0, 4.0, 6.0]
    assert find_ticks(5.0, 5.0) == [5.0]
    assert find_log_ticks(0.9, 1100) == [1.0, 10.0, 100.0, 1000.0]
    close = find_log_ticks(1.01, 1.03)
    assert len(close) >= 4
    assert all(1.01 <= tick <= 1.03 and math.isclose(tick, round(tick, 4)) for tick in close)

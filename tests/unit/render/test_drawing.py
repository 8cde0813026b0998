"""What is drawn, measured in the drawing: lengths and places say the values, and words neither collide nor leave the
picture."""

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from itertools import combinations, pairwise
from xml.etree import ElementTree

import msgspec
import pytest

from stepscope.findings import Axis, Bars, Figure, Point, Roof, StepBar, StepPhase, StepPicture
from stepscope.findings.compared import StepChange
from stepscope.render.drawing import draw_part
from stepscope.render.drawing.axes import Scale, find_log_ticks, find_ticks
from stepscope.render.drawing.roofline import choose_points
from stepscope.render.drawing.step import describe_picture, list_segments
from stepscope.render.drawing.svg import width_of
from stepscope.render.numbers import say_split, split_step
from stepscope.render.paper import collect, tidy
from tests.unit.render import report_samples
from tests.unit.render.comparison_samples import aligned_steps
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


def test_letters_of_changes_at_one_place_are_one_text() -> None:
    """Steps with a change and new kernels at the same place."""
    steps = aligned_steps()
    alone = [StepChange(text=f"change {at}", change_ns=300_000, places=(at,)) for at in (5, 5, 11)]
    svg = draw_part(msgspec.structs.replace(steps, changes=tuple(alone)))
    found = [text for text, _ in text_boxes(parse(svg))]
    assert "a, b" in found
    assert "c" in found
    for (one, a), (other, b) in combinations(text_boxes(parse(svg)), 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (one, other)


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
    # None in the column of operators without FLOPs.
    assert len(re.findall(r'stroke-width="0.8"/>', re.sub(r"<circle[^>]*>", "", svg))) == len(fills) / 2 - 3


def test_memory_only_points_are_below_the_line_by_their_share_of_the_bandwidth() -> None:
    roofline = draw_roofline()
    svg = draw_part(roofline)
    circles = dict(zip((point.label for point in choose_points(roofline)), find_marks(svg, "circle"), strict=True))
    levels = {label: number(circle, "cy") for label, circle in circles.items()}
    norm, gelu = (levels[name] for name in ("layer norm 2048×768", "gelu 2048×3072"))
    lines = [one for one in parse(svg).iter() if one.tag.endswith("}line") and one.get("stroke-width") == "1.4"]
    (roof,) = (number(one, "y1") for one in lines if number(one, "x1") == 0)
    assert roof < gelu < norm
    # The same distance as at other points: half a decade is half a decade everywhere.
    decade = (levels["flash attention 4×12×512×64"] - levels["mm 2048×768 · 768×50257"]) / math.log10(5.9e14 / 1.3e14)
    assert norm - roof == pytest.approx(decade * math.log10(4.8e12 / 2.1e12), abs=0.5)
    column = [number(circles[label], "cx") for label in circles if "norm" in label or "gelu" in label]
    assert max(column) < min(number(circle, "cx") for label, circle in circles.items() if "mm" in label)


def test_points_in_the_column_do_not_cover_each_other() -> None:
    roofline = draw_roofline()
    one = next(point for point in roofline.points if not point.flops_per_s)
    many = tuple(msgspec.structs.replace(one, label=f"add {at}", share=0.01) for at in range(8))
    circles = find_marks(draw_part(msgspec.structs.replace(roofline, points=(*roofline.points[:3], *many))), "circle")
    small = [(number(circle, "cx"), number(circle, "cy"), number(circle, "r")) for circle in circles[3:]]
    assert len(small) == 8
    for (x, y, r), (x2, y2, r2) in combinations(small, 2):
        assert math.dist((x, y), (x2, y2)) >= r + r2 - 0.1


def test_short_points_far_below_the_others_do_not_stretch_the_axes() -> None:
    """Each of them is among the points that take 99% of the time, if the longest count first."""
    roofline = draw_roofline()
    slow = msgspec.structs.replace(roofline.points[0], label="slow", flops_per_s=1e3, intensity=1e-6, share=0.004)
    shorter = [msgspec.structs.replace(roofline.points[0], label="shorter", share=0.003)] * 40
    with_slow = msgspec.structs.replace(roofline, points=(*roofline.points, slow, *shorter))
    assert "slow" not in [point.label for point in choose_points(with_slow)]


def test_throughput_is_in_tflops_on_any_device() -> None:
    roofline = draw_roofline()
    fast = msgspec.structs.replace(roofline, roofs=(Roof(label="fp8", flops_per_s=4.5e15),))
    texts = [text for text, _ in text_boxes(parse(draw_part(fast)))]
    assert "throughput (TFLOP/s)" in texts
    assert "1,000" in texts


def test_axes_fit_the_points_that_take_the_time() -> None:
    roofline = draw_roofline()
    tiny = msgspec.structs.replace(roofline.points[0], label="tiny", flops_per_s=1e3, intensity=1e-6, share=0.001)
    with_tiny = msgspec.structs.replace(roofline, points=(*roofline.points, tiny))
    assert [point.label for point in choose_points(with_tiny)] == [point.label for point in choose_points(roofline)]
    places = [
        [circle.attrib["cy"] for circle in find_marks(draw_part(part), "circle")] for part in (roofline, with_tiny)
    ]
    assert places[0] == places[1]
    large = msgspec.structs.replace(tiny, share=0.2)
    assert "tiny" in [
        point.label for point in choose_points(msgspec.structs.replace(roofline, points=(*roofline.points, large)))
    ]


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


# --- the picture of a step ------------------------------------------------------------------------------------------


def picture() -> StepPicture:
    found = report_samples.two_runs().picture
    assert found is not None
    return found


def test_parts_of_a_step_are_to_scale_and_end_to_end() -> None:
    drawn = picture()
    boxes = find_marks(draw_part(drawn), "rect")
    segments = list_segments(drawn)
    assert len(boxes) == len(segments) > 10
    longest = max(bar.step_ns for bar in drawn.bars if bar)
    for box, segment in zip(boxes, segments, strict=True):
        assert number(box, "x") == pytest.approx(640 * segment.start_ns / longest, abs=0.01)
        assert number(box, "width") == pytest.approx(640 * segment.time_ns / longest, abs=0.51)
    for bar, run in ((bar, at) for at, bar in enumerate(drawn.bars) if bar):
        last = [segment for segment in segments if segment.bar == run][-1]
        assert last.start_ns + last.time_ns == pytest.approx(bar.step_ns)


@pytest.mark.parametrize(
    ("step_ms", "busy_ms", "idle"),
    [
        (46.04, 39.46, "6.58 ms"),  # 46.0 - 39.5 is 6.5
        (1025.4, 932.3, "93.1 ms"),
        (122.5499, 117.7499, "4.80 ms"),
        (1.0, 1.0, "0.00 ms"),
        (41.4, 41.4 - 1.82e-6, "0.0 ms"),
        (54.85, 0.0, "54.9 ms"),
    ],
)
def test_busy_and_idle_time_are_rounded_and_not_derived_from_rounded_times(
    step_ms: float, busy_ms: float, idle: str
) -> None:
    bar = StepBar(step_ns=step_ms * 1e6, busy_ns=busy_ms * 1e6, phases=())
    for text, value in zip(split_step(bar), (step_ms, busy_ms, step_ms - busy_ms), strict=True):
        digits = text.removesuffix(" ms").replace(",", "")
        assert abs(float(digits) - value) <= 0.5001 * 10.0 ** -len(digits.partition(".")[2])
    assert split_step(bar)[2] == idle
    percents = re.findall(r"\(([\d.]+)%\)", say_split(bar))
    assert sum(map(Decimal, percents)) == 100


def test_a_rounding_error_is_not_shown_as_idle_time() -> None:
    phase = StepPhase(name="forward", classes=("GEMM",), times_ns=(3e6,), idle_ns=1.82)
    bar = StepBar(step_ns=3e6 + 1.82, busy_ns=3e6, phases=(phase,))
    assert "; idle 0 ms." in describe_picture(StepPicture(title="x", runs=("",), bars=(bar,)))


def test_a_cpu_is_not_called_idle() -> None:
    phase = StepPhase(name="forward", classes=("GEMM",), times_ns=(3e6,), idle_ns=1e6)
    bar = StepBar(step_ns=4e6, busy_ns=3e6, phases=(phase,), device="CPU")
    assert say_split(bar) == "in operators 3.00 ms (75.0%), outside operators 1.00 ms (25.0%)"
    drawn = StepPicture(title="x", runs=("",), bars=(bar,))
    texts = [text for text, _ in text_boxes(parse(draw_part(drawn)))]
    assert "75% in operators" in texts
    assert "idle" not in " ".join((*texts, describe_picture(drawn)))


def test_a_step_is_described_in_words() -> None:
    said = describe_picture(picture())
    for expected in ("A: 141.6 ms per step: GPU busy", "backward:", "optimizer:", "By class: GEMM"):
        assert expected in said


def test_labels_of_narrow_phases_stand_apart() -> None:
    phases = tuple(
        StepPhase(
            name=f"phase number {number}", classes=("GEMM",), times_ns=(1e6 * (60 if number == 4 else 1),), idle_ns=0.0
        )
        for number in range(8)
    )
    busy = sum(phase.busy_ns for phase in phases)
    svg = draw_part(StepPicture(title="x", runs=("",), bars=(StepBar(step_ns=busy, busy_ns=busy, phases=phases),)))
    boxes = [(text, box) for text, box in text_boxes(parse(svg)) if text.startswith("phase")]
    assert 3 <= len(boxes) < 8
    assert all(a[2] <= b[0] for (_, a), (_, b) in pairwise(boxes))
    assert "phase number 4" in [text for text, _ in boxes]

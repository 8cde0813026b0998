"""The roofline, figures and memory timelines of a report in a real browser: they answer with exact numbers."""

import msgspec
import pytest

from stepscope.findings import Axis, Beside, Figure, Point, Timeline
from tests.browser.chart_views import ask, move_to, picture, read_pixel, view_of
from tests.browser.conftest import Open, wait_for_frame
from tests.unit.report.report_parts import draw_attention, draw_roofline
from tests.unit.report.timelines import training_step

# --- the roofline ---------------------------------------------------------------------------------------------------


def test_a_point_of_the_roofline_tells_its_numbers(open_parts: Open) -> None:
    page = open_parts(draw_roofline())
    place = ask(page, "roofline", "chart.placeOf(chart.points.find((point) => point.group === 'attention'))")
    move_to(page, "roofline", place["x"], place["y"])
    text = page.inner_text("#tip")
    for expected in (
        "flash attention 4×12×512×64",
        "0.440 ms a step, 16.1% of all kernels",
        "130.0 TFLOP/s at 128.0 FLOP a byte",
        "21.2% of what the device allows",
        "bound by compute",
        "12 calls a step",
    ):
        assert expected in text
    move_to(page, "roofline", 60, 60)
    assert page.is_hidden("#tip")


def test_keys_go_through_the_points_by_their_time(open_parts: Open) -> None:
    page = open_parts(draw_roofline())
    page.focus("figure.roofline canvas.back")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#tip").startswith("mm 2048×768 · 768×3072")
    page.keyboard.press("ArrowRight")
    assert "mm 2048×768 · 768×2304" in (page.text_content("#said") or "")
    assert page.locator("figure.roofline ol.unseen li").count() == 8


def test_names_of_points_do_not_lie_on_each_other(open_parts: Open) -> None:
    page = open_parts(draw_roofline())
    boxes = ask(page, "roofline", "chart.state.names")
    assert len(boxes) >= 2 + 5
    for at, one in enumerate(boxes):
        for other in boxes[:at]:
            apart = one["left"] >= other["right"] or other["left"] >= one["right"]
            assert apart or one["top"] >= other["bottom"] or other["top"] >= one["bottom"]


def test_two_runs_are_told_apart_by_shape(open_parts: Open) -> None:
    page = open_parts(draw_roofline(("A", "B")))
    opacities = []
    for run in (0, 1):
        question = f"chart.placeOf(chart.points.find((point) => point.run === {run} && point.group === 'norm'))"
        place = ask(page, "roofline", question)
        opacities.append(read_pixel(page, "figure.roofline canvas.back", place["x"] + 2, place["y"] - 3)[3])
    assert opacities[0] < 100
    assert opacities[1] > 200
    assert page.locator("figure.roofline .legend .run").all_inner_texts() == ["run A", "run B"]


# --- lines ----------------------------------------------------------------------------------------------------------


def test_a_point_of_a_figure_tells_all_series_at_its_place(open_parts: Open) -> None:
    figure = draw_attention()
    points = (*figure.points, Point(panel="forward", series="ours", x=16384.0, y=4.5, low=4.0, high=5.25))
    page = open_parts(msgspec.structs.replace(figure, points=points))
    x, y = ask(page, "figure", "[chart.panels[0].x(1024), chart.panels[0].y(0.9 * 2 ** 1.9)]")
    move_to(page, "figure", x, y)
    lines = page.inner_text("#tip").splitlines()
    assert [line for line in lines if line] == [
        "forward, length 1,024 tokens",
        "plain: 3.36 ms",
        "sdpa: 0.784 ms",
        "ours: 0.672 ms",
    ]
    x, y = ask(page, "figure", "[chart.panels[0].x(16384), chart.panels[0].y(4.5)]")
    move_to(page, "figure", x, y)
    assert "ours: 4.50 ms (4 ms to 5.25 ms)" in page.inner_text("#tip")


def test_panels_stand_side_by_side_or_under_one_another(open_parts: Open) -> None:
    tops = []
    for width in (420, 1200):
        page = open_parts(draw_attention(), width=width)
        tops.append(ask(page, "figure", "chart.panels.map((panel) => panel.frame.top)"))
    assert tops[0][1] > tops[0][0] + 150
    assert tops[1][0] == tops[1][1]


def test_the_legend_of_a_figure_switches_series(open_parts: Open) -> None:
    page = open_parts(draw_attention())
    before = picture(page, "figure.figure canvas.back")
    page.locator("figure.figure .legend button", has_text="sdpa").click()
    assert picture(page, "figure.figure canvas.back") != before
    page.focus("figure.figure canvas.back")
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    assert "ours: " in page.inner_text("#tip .name")
    assert "sdpa" not in page.inner_text("#tip")


def test_values_that_lie_close_together_have_ticks(open_parts: Open) -> None:
    points = tuple(Point(panel="", series="", x=float(x), y=1.0 + x / 1e4) for x in (128, 256))
    axis = Axis(label="time", unit="ms", log=True)
    page = open_parts(Figure(title="Close", subtitle="", x=Axis(label="size", log=True), y=axis, points=points))
    ticks = ask(page, "figure", "chart.panels[0].yTicks.map((tick) => tick.text)")
    assert len(ticks) >= 4
    assert len(set(ticks)) == len(ticks)


def test_bytes_have_round_ticks_from_zero(open_parts: Open) -> None:
    points = tuple(Point(panel="", series="", x=float(x), y=2.9 * x * 2**30) for x in (1, 8))
    figure = Figure(title="", subtitle="", x=Axis(label="batch"), y=Axis(label="peak", unit="bytes"), points=points)
    page = open_parts(figure)
    ticks = ask(
        page, "figure", "[chart.panels[0].yTicks, chart.panels[0].xTicks].map((axis) => axis.map((tick) => tick.text))"
    )
    assert ticks[0] == ["0 B", "5 GiB", "10 GiB", "15 GiB", "20 GiB", "25 GiB"]
    assert ticks[1][:2] == ["0", "1"]


def test_points_without_a_place_are_counted(open_parts: Open) -> None:
    points = tuple(
        Point(panel="", series="", x=x, y=y) for x, y in ((1.0, 2.0), (2.0, 3.0), (0.0, 1.0), (3.0, float("nan")))
    )
    axis = Axis(label="size", log=True)
    figure = Figure(title="Few", subtitle="", x=axis, y=Axis(label="time", unit="ms"), points=points)
    page = open_parts(figure)
    assert "2 of 4 points not drawn" in page.inner_text("figure.figure .help")
    assert page.is_hidden("figure.figure .legend")


# --- memory ---------------------------------------------------------------------------------------------------------


def test_two_timelines_share_a_scale_and_nothing_else(open_parts: Open) -> None:
    low = training_step(200)
    areas = tuple(
        msgspec.structs.replace(area, values=tuple(value // 4096 * 1024 for value in area.values)) for area in low.areas
    )
    lower: Timeline = msgspec.structs.replace(low, areas=areas, line=None, pieces=())
    page = open_parts(Beside(title="Memory", runs=("A", "B"), parts=(training_step(200), lower)), width=1440)
    views = "() => [...document.querySelectorAll('figure.timeline')].map(({ chart }) => ({ ...chart.view }))"
    first, second = page.evaluate(views)
    assert first == second
    selectors = [f"#part-0-{letter} canvas.back" for letter in "ab"]
    before = [picture(page, selector) for selector in selectors]
    page.focus(selectors[0])
    page.keyboard.press("+")
    wait_for_frame(page)
    after = page.evaluate(views)
    assert after[0]["end"] - after[0]["start"] == pytest.approx(150)
    assert after[1] == second
    assert picture(page, selectors[0]) != before[0]
    assert picture(page, selectors[1]) == before[1]


def test_a_timeline_in_a_report_leaves_the_wheel_alone_and_answers(open_parts: Open) -> None:
    page = open_parts(training_step(200))
    whole = view_of(page, "timeline")
    x, y = ask(page, "timeline", "[chart.toX(65), chart.toY(12.9 * 2 ** 30)]")
    move_to(page, "timeline", x, y)
    for expected in ("logits", "1.46 GiB", "activations: 9.71 GiB", "total 19.1 GiB"):
        assert expected in page.inner_text("#tip")
    page.mouse.wheel(0, -30)
    assert view_of(page, "timeline") == whole
    page.locator("figure.timeline canvas.back").click()
    page.mouse.wheel(0, -300)
    assert view_of(page, "timeline") != whole

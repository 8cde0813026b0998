"""The roofline, figures and memory timelines of a report in a real browser: their tooltips have exact numbers."""

from pathlib import Path

import msgspec
import pytest

from stepscope.findings import Axis, Bars, Figure, Point, SideBySide, Timeline
from stepscope.render.figures import save
from tests.browser.chart_views import ask, look_at, move_to, picture, view_of
from tests.browser.conftest import Open, OpenFile, wait_for_frame
from tests.unit.render.report_parts import draw_attention, draw_roofline
from tests.unit.render.timelines import training_step

# --- the roofline ---------------------------------------------------------------------------------------------------


def test_roofline_tooltip_has_the_numbers_of_a_point(open_parts: Open) -> None:
    page = open_parts(draw_roofline())
    look_at(page, "roofline", 2)
    text = page.inner_text("#tip")
    for expected in (
        "flash attention 4×12×512×64",
        "0.440 ms per step, 16.1% of all kernel time",
        "130.0 TFLOP/s at 128.0 FLOP/byte",
        "21.2% of the device's limit",
        "compute-bound",
        "12 calls per step",
    ):
        assert expected in text
    page.mouse.move(5, 5)
    assert page.is_hidden("#tip")
    look_at(page, "roofline", 4)
    assert "2.10 TB/s, only moves memory" in page.inner_text("#tip")


def test_keys_move_through_points_by_time(open_parts: Open) -> None:
    page = open_parts(draw_roofline())
    page.focus("figure.roofline .plot")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#tip").startswith("mm 2048×768 · 768×3072")
    page.keyboard.press("ArrowRight")
    assert "mm 2048×768 · 768×2304" in (page.text_content("#said") or "")
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")
    assert page.locator("figure.roofline ol.points li").count() == 8


def test_the_list_shows_a_point_and_the_legend_one_class(open_parts: Open) -> None:
    page = open_parts(draw_roofline())
    page.locator("figure.roofline ol.points li", has_text="gelu").hover()
    chosen = page.locator("figure.roofline svg:visible .chosen")
    assert chosen.count() == 1
    assert "gelu 2048×3072" in page.inner_text("#tip")
    button = page.locator("figure.roofline .legend button", has_text="norm")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert page.locator("figure.roofline svg:visible .mark:not(.off)").count() == 1
    button.click()
    assert page.locator("figure.roofline svg:visible .mark.off").count() == 0


@pytest.mark.parametrize("width", [420, 1200])
def test_text_keeps_its_size_and_numbers_do_not_overlap(open_parts: Open, width: int) -> None:
    page = open_parts(draw_roofline(), width=width)
    script = """(texts) => texts.filter((one) => /^\\d$/.test(one.textContent) && one.matches('[font-weight="bold"]'))
      .map((one) => one.getBoundingClientRect().toJSON())"""
    boxes = page.locator("figure.roofline svg:visible text").evaluate_all(script)
    assert len(boxes) == 8
    for at, one in enumerate(boxes):
        assert one["height"] > 10
        for other in boxes[:at]:
            apart = one["left"] >= other["right"] or other["left"] >= one["right"]
            assert apart or one["top"] >= other["bottom"] or other["top"] >= one["bottom"]


def test_two_runs_have_different_marks(open_parts: Open) -> None:
    page = open_parts(draw_roofline(("A", "B")))
    fills = page.locator("figure.roofline svg:visible .mark circle").evaluate_all(
        "(circles) => circles.map((one) => one.getAttribute('fill') === 'none')"
    )
    assert sorted(fills) == [False] * 8 + [True] * 8
    assert page.locator("figure.roofline .legend .run").all_inner_texts() == ["A", "B"]


# --- lines ----------------------------------------------------------------------------------------------------------


def test_figure_tooltip_lists_all_series_at_a_place(open_parts: Open) -> None:
    figure = draw_attention()
    points = (*figure.points, Point(panel="forward", series="ours", x=16384.0, y=4.5, low=4.0, high=5.25))
    page = open_parts(msgspec.structs.replace(figure, points=points))
    look_at(page, "figure", 1)
    lines = page.inner_text("#tip").splitlines()
    assert [line for line in lines if line] == [
        "forward, length 1,024 tokens",
        "plain: 3.36 ms",
        "sdpa: 0.784 ms",
        "ours: 0.672 ms",
    ]
    look_at(page, "figure", 15)
    assert "ours: 4.50 ms (4 ms to 5.25 ms)" in page.inner_text("#tip")


def test_panels_wrap_on_a_narrow_screen(open_parts: Open) -> None:
    tops = []
    for width in (420, 1200):
        page = open_parts(draw_attention(), width=width)
        script = "(panels) => panels.map((one) => one.getBoundingClientRect().top)"
        tops.append(page.locator("figure.figure svg.drawing").evaluate_all(script))
    assert tops[0][1] > tops[0][0] + 150
    assert tops[1][0] == tops[1][1]


def test_legend_of_a_figure_hides_and_shows_series(open_parts: Open) -> None:
    page = open_parts(draw_attention())
    page.locator("figure.figure .legend button", has_text="sdpa").click()
    assert page.locator("figure.figure .mark:visible").count() == 20
    page.focus("figure.figure .plot")
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    assert "ours: " in page.inner_text("#tip .name")
    assert "sdpa" not in page.inner_text("#tip")


def test_undrawable_points_are_counted(open_parts: Open) -> None:
    points = tuple(
        Point(panel="", series="", x=x, y=y) for x, y in ((1.0, 2.0), (2.0, 3.0), (0.0, 1.0), (3.0, float("nan")))
    )
    axis = Axis(label="size", log=True)
    figure = Figure(title="Few", subtitle="", x=axis, y=Axis(label="time", unit="ms"), points=points)
    page = open_parts(figure)
    assert "2 of 4 points not drawn" in page.inner_text("figure.figure .help")
    assert page.locator("figure.figure .legend").count() == 0


def test_figure_can_be_a_page(open_file: OpenFile, tmp_path: Path) -> None:
    save(draw_attention(), tmp_path / "attention.html")
    page = open_file(tmp_path / "attention.html")
    assert page.inner_text("h1") == "Attention by length"
    look_at(page, "figure", 1)
    assert "plain: 3.36 ms" in page.inner_text("#tip")


def test_drawings_need_no_script(open_file: OpenFile, tmp_path: Path) -> None:
    save(draw_attention(), tmp_path / "attention.html")
    page = open_file(tmp_path / "attention.html", java_script_enabled=False)
    assert page.locator("svg.drawing .mark:visible").count() == 30


# --- bars -----------------------------------------------------------------------------------------------------------


def test_bar_tooltip_has_its_value(open_parts: Open) -> None:
    bars = Bars(title="Times", kind="ms", labels=("a", "b"), series=("x", "y"), values=((1.0, 4.0), (2.0, None)))
    page = open_parts(bars)
    page.locator("figure.bars svg:visible .mark").nth(1).hover()
    assert page.locator("#tip p").all_inner_texts() == ["a", "y: 2.00 ms"]


# --- memory ---------------------------------------------------------------------------------------------------------


def test_two_timelines_share_only_their_scale(open_parts: Open) -> None:
    low = training_step(200)
    areas = tuple(
        msgspec.structs.replace(area, values=tuple(value // 4096 * 1024 for value in area.values)) for area in low.areas
    )
    lower: Timeline = msgspec.structs.replace(low, areas=areas, line=None, pieces=())
    page = open_parts(SideBySide(title="Memory", runs=("A", "B"), parts=(training_step(200), lower)), width=1440)
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


def test_timeline_in_a_report_does_not_capture_the_wheel(open_parts: Open) -> None:
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

"""The charts of a report in a real browser: they draw what is there, answer with exact numbers, and move."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stepscope.findings import (
    Axis,
    Beside,
    Exhibit,
    Figure,
    Lanes,
    Part,
    Point,
    Report,
    Section,
    Spans,
    Timeline,
    Track,
)
from stepscope.report.site import write_site
from tests.browser.conftest import OpenFile, wait_for_frame
from tests.unit.report.report_parts import (
    WALL_NS,
    break_down,
    draw_attention,
    draw_roofline,
    kernels_of_step,
    lay_lanes,
)
from tests.unit.report.report_samples import empty, hostile, one_run
from tests.unit.report.timelines import training_step

if TYPE_CHECKING:
    from playwright.sync_api import Page

Open = Callable[..., "Page"]
KINDS = ("lanes", "roofline", "figure", "timeline")


@pytest.fixture
def open_report(open_file: OpenFile, tmp_path: Path) -> Open:
    """Opens a report's page and scrolls to each of its charts, which builds them."""

    def open_one(report: Report, **options: Any) -> "Page":
        target = tmp_path / "report.html"
        target.write_text(write_site(report), encoding="utf-8")
        page = open_file(target, **options)
        for figure in page.locator(",".join(f"figure.{kind}" for kind in KINDS)).all():
            figure.scroll_into_view_if_needed()
            page.wait_for_function("(figure) => figure.chart", arg=figure.element_handle())
        return page

    return open_one


@pytest.fixture
def open_parts(open_report: Open) -> Open:
    def open_them(*parts: Part, **options: Any) -> "Page":
        exhibits = tuple(Exhibit(key=f"part-{number}", part=part) for number, part in enumerate(parts))
        section = Section(key="parts", title="Parts", exhibits=exhibits)
        return open_report(msgspec.structs.replace(one_run(), sections=(section,)), **options)

    return open_them


def picture(page: "Page", selector: str) -> str:
    """What is on a canvas, as one number."""
    wait_for_frame(page)
    return hashlib.sha256(page.eval_on_selector(selector, "(one) => one.toDataURL()").encode()).hexdigest()


def count_colours(page: "Page", selector: str) -> int:
    script = """(one) => {
      const data = one.getContext("2d").getImageData(0, 0, one.width, one.height).data;
      return new Set(new Uint32Array(data.buffer)).size;
    }"""
    return int(page.eval_on_selector(selector, script))


def read_pixel(page: "Page", selector: str, x: float, y: float) -> list[int]:
    """Red, green, blue and opacity at a place in CSS pixels."""
    script = """(one, [x, y]) => {
      const ratio = one.width / one.clientWidth;
      // Through a copy: a canvas that is read often is moved away from the GPU, with a message.
      const copy = new OffscreenCanvas(1, 1).getContext("2d");
      copy.drawImage(one, -Math.round(x * ratio), -Math.round(y * ratio));
      return [...copy.getImageData(0, 0, 1, 1).data];
    }"""
    pixel: list[int] = page.eval_on_selector(selector, script, [x, y])
    return pixel


def ask(page: "Page", kind: str, question: str) -> Any:
    """Asks a chart, which the question calls `chart`."""
    wait_for_frame(page)
    return page.eval_on_selector(f"figure.{kind}", f"({{ chart }}) => ({question})")


def view_of(page: "Page", kind: str = "lanes") -> tuple[float, float]:
    start, end = ask(page, kind, "[chart.view.start, chart.view.end]")
    return start, end


def move_to(page: "Page", kind: str, x: float, y: float) -> None:
    """Moves the mouse to a place of a chart's canvas."""
    canvas = page.locator(f"figure.{kind} canvas.back").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + x, box["y"] + y)
    wait_for_frame(page)


def point_at_time(page: "Page", track: int, time_ns: float) -> None:
    x, y = ask(page, "lanes", f"[chart.toX({time_ns}), chart.tracks[{track}].y + 5]")
    move_to(page, "lanes", x, y)


def one_step() -> Lanes:
    return lay_lanes(kernels_of_step())


def many_spans(count: int) -> Lanes:
    """A stream that is busy half of the first half and all of the last quarter, in spans far thinner than a pixel."""
    length = 1000
    starts = [2 * length * at for at in range(count // 2)]
    starts += [3 * length * count // 2 + length * at for at in range(count // 2)]
    spans = Spans(
        starts_ns=tuple(starts),
        lengths_ns=(length,) * count,
        names=(0,) * count,
        groups=(0,) * count,
        counts=(1,) * count,
    )
    track = Track(label="stream 7", kind="stream", spans=spans)
    return Lanes(title="Many", span_ns=2 * length * count, tracks=(track,), names=("tiny",), groups=("gemm",))


# --- all of them ----------------------------------------------------------------------------------------------------


def all_parts() -> tuple[Part, ...]:
    return one_step(), draw_roofline(), draw_attention(), training_step(300)


def test_every_chart_is_drawn_with_data_and_named(open_parts: Open) -> None:
    page = open_parts(*all_parts())
    labels = {}
    for kind in KINDS:
        assert count_colours(page, f"figure.{kind} canvas.back") > 20
        labels[kind] = page.get_attribute(f"figure.{kind} canvas.back", "aria-label") or ""
        assert page.get_attribute(f"figure.{kind} canvas.back", "tabindex") == "0"
    assert "12.9 ms in 3 tracks, 570 spans; most time: gemm 3.61 ms" in labels["lanes"]
    assert "mm 2048×768 · 768×3072 at 410.0 TFLOP/s" in labels["roofline"]
    assert "for plain, sdpa, ours" in labels["figure"]
    assert "Peak 19.1 GiB at 60.0 ms" in labels["timeline"]


def test_dark_changes_every_chart(open_parts: Open) -> None:
    page = open_parts(*all_parts(), color_scheme="light")
    canvases = [f"figure.{kind} canvas.back" for kind in KINDS]
    light = [picture(page, canvas) for canvas in canvases]
    page.emulate_media(color_scheme="dark")
    assert not set(light) & {picture(page, canvas) for canvas in canvases}


@pytest.mark.parametrize("width", [420, 1440])
def test_charts_fit_their_window_and_follow_it(open_parts: Open, width: int) -> None:
    page = open_parts(*all_parts(), width=width, device_scale_factor=2)
    fits = "() => document.documentElement.scrollWidth <= innerWidth"
    assert page.evaluate(fits)
    for kind in KINDS:
        selector = f"figure.{kind} canvas.back"
        assert page.eval_on_selector(selector, "(one) => one.width === Math.round(2 * one.clientWidth)")
    page.set_viewport_size({"width": 600, "height": 900})
    wait_for_frame(page)
    wait_for_frame(page)
    assert page.evaluate(fits)
    for kind in KINDS:
        selector = f"figure.{kind} canvas.back"
        assert page.eval_on_selector(selector, "(one) => one.width === Math.round(2 * one.clientWidth)")


def test_empty_charts_say_so(open_report: Open) -> None:
    page = open_report(empty())
    assert page.inner_text("figure.lanes .body") == "Nothing was recorded in this step."
    assert page.inner_text("figure.roofline .body") == "No points to draw."
    assert page.inner_text("figure.figure .body") == "No points to draw."
    selector = "figure.timeline canvas.back"
    assert "Nothing to draw" in (page.get_attribute(selector, "aria-label") or "")
    page.focus(selector)
    for key in ("+", "ArrowRight", "0", "Escape"):
        page.keyboard.press(key)


def test_hostile_names_are_text_in_every_chart(open_report: Open) -> None:
    page = open_report(hostile())
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    point_at_time(page, 2, 2000)
    assert page.is_visible("#tip")
    assert page.locator("#tip img, #tip script").count() == 0


# --- the step -------------------------------------------------------------------------------------------------------


def test_a_span_tells_its_nanoseconds(open_parts: Open) -> None:
    page = open_parts(one_step())
    ask(page, "lanes", "chart.setView(0, 60000)")
    # The embedding takes 4.4 µs and is followed by a pause of 9; then comes the first norm.
    point_at_time(page, 2, 15_000)
    text = page.inner_text("#tip")
    assert text.splitlines()[0] == "layer norm forward bf16"
    for expected in ("norm", "6.100 µs, 0.0472% of the step", "from 13.400 µs", ": decoded"):
        assert expected in text
    point_at_time(page, 2, 9_000)
    assert page.is_hidden("#tip")
    point_at_time(page, 0, 30_000)
    assert "3.597720 ms, 27.9% of the step" in page.inner_text("#tip")


def test_the_wheel_is_the_pages_until_it_is_meant(open_parts: Open) -> None:
    page = open_parts(one_step())
    page.evaluate("() => scrollTo(0, 0)")
    whole = view_of(page)
    point_at_time(page, 2, whole[1] / 4)
    page.mouse.wheel(0, 40)
    page.wait_for_function("() => scrollY > 0")
    assert view_of(page) == whole
    point_at_time(page, 2, whole[1] / 4)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    start, end = view_of(page)
    assert end - start < whole[1] / 2
    # What was under the pointer still is.
    assert (whole[1] / 4 - start) / (end - start) == pytest.approx(0.25, abs=0.01)
    page.mouse.down()
    page.mouse.up()
    page.mouse.wheel(0, -200)
    assert view_of(page)[1] - view_of(page)[0] < end - start
    page.dblclick("figure.lanes canvas.back")
    assert view_of(page) == whole


def test_keys_and_dragging_move_the_step(open_parts: Open) -> None:
    page = open_parts(one_step())
    whole = view_of(page)
    page.focus("figure.lanes canvas.back")
    page.keyboard.press("+")
    zoomed = view_of(page)
    length = zoomed[1] - zoomed[0]
    assert length == pytest.approx(0.75 * whole[1])
    page.keyboard.press("ArrowRight")
    assert view_of(page)[0] == pytest.approx(zoomed[0] + 0.1 * length)
    page.keyboard.press("ArrowLeft")
    width = ask(page, "lanes", "chart.plot.width")
    move_to(page, "lanes", 400, 60)
    page.mouse.down()
    move_to(page, "lanes", 450, 60)
    page.mouse.up()
    assert view_of(page)[0] == pytest.approx(zoomed[0] - 50 / width * length)
    page.keyboard.press("0")
    assert view_of(page) == whole


def test_keys_go_from_span_to_span_and_say_them(open_parts: Open) -> None:
    page = open_parts(one_step())
    page.focus("figure.lanes canvas.back")
    page.keyboard.press("n")
    assert page.inner_text("#tip").startswith("embedding bf16")
    page.keyboard.press("n")
    assert page.inner_text("#tip").startswith("layer norm forward bf16")
    assert "6.100 µs" in (page.text_content("#said") or "")
    page.keyboard.press("p")
    assert page.inner_text("#tip").startswith("embedding bf16")
    page.keyboard.press("ArrowUp")
    assert page.inner_text("#tip").startswith("layers.0")
    page.keyboard.press("f")
    start, end = view_of(page)
    # The first layer, with a margin on both sides: it begins after the embedding and takes 0.25 ms.
    assert start == 0
    assert 0.25e6 < end < 0.35e6
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")


def test_the_strip_above_moves_the_window(open_parts: Open) -> None:
    page = open_parts(one_step())
    whole = view_of(page)
    ask(page, "lanes", f"chart.setView(0, {whole[1]} / 4)")
    left, width = ask(page, "lanes", "[chart.plot.left, chart.plot.width]")
    box = page.locator("figure.lanes canvas.map").bounding_box()
    assert box is not None
    y = box["y"] + 8

    def x_of(share: float) -> float:
        return float(box["x"] + left + share * width)

    page.mouse.move(x_of(0.125), y)
    page.mouse.down()
    page.mouse.move(x_of(0.625), y)
    page.mouse.up()
    start, end = view_of(page)
    assert (start / whole[1], end / whole[1]) == pytest.approx((0.5, 0.75), abs=0.01)
    # By its side the window is widened, and a press beside it brings it there.
    page.mouse.move(x_of(0.75), y)
    page.mouse.down()
    page.mouse.move(x_of(0.9), y)
    page.mouse.up()
    assert view_of(page)[0] == start
    assert view_of(page)[1] / whole[1] == pytest.approx(0.9, abs=0.01)
    page.mouse.click(x_of(0.2), y)
    assert sum(view_of(page)) / 2 / whole[1] == pytest.approx(0.2, abs=0.01)


def test_spans_thinner_than_a_pixel_show_how_busy_it_is(open_parts: Open) -> None:
    page = open_parts(many_spans(20_000))
    y, left, width = ask(page, "lanes", "[chart.tracks[0].y + 10, chart.plot.left, chart.plot.width]")
    half, idle, full = (read_pixel(page, "canvas.back", left + share * width, y) for share in (0.231, 0.631, 0.871))
    assert idle[3] == 0
    assert 100 < half[3] < 200
    assert full[3] == 255
    # Far in, single spans are there with their names.
    ask(page, "lanes", "chart.setView(10000, 14000)")
    x_busy, x_idle = ask(page, "lanes", "[chart.toX(10900), chart.toX(11370)]")
    assert read_pixel(page, "canvas.back", x_busy, y)[3] == 255
    assert read_pixel(page, "canvas.back", x_idle, y)[3] == 0


def test_a_long_span_keeps_its_name_far_in(open_parts: Open) -> None:
    page = open_parts(one_step())
    script = """(one) => {
      const { chart } = one.closest("figure");
      const ratio = one.width / one.clientWidth;
      const row = one.getContext("2d").getImageData(chart.plot.left * ratio, chart.tracks[0].y * ratio,
        chart.plot.width * ratio, chart.tracks[0].height * ratio);
      return new Set(new Uint32Array(row.data.buffer)).size;
    }"""
    ask(page, "lanes", "chart.setView(2000000, 2000500)")
    wait_for_frame(page)
    assert page.eval_on_selector("figure.lanes canvas.back", script) > 5


def test_the_axis_says_where_one_is_in_its_unit(open_parts: Open) -> None:
    page = open_parts(one_step())
    assert page.inner_text("figure.lanes .status") == "the whole step, 12.9 ms"
    ask(page, "lanes", "chart.setView(2000000, 2000800)")
    wait_for_frame(page)
    assert page.inner_text("figure.lanes .status") == "800 ns of 12.9 ms, from 2.000000 ms"


def test_the_legend_shows_one_class_alone(open_parts: Open) -> None:
    page = open_parts(one_step())
    button = page.locator("figure.lanes .legend button", has_text="norm")
    assert button.locator(".of").inner_text() == "0.468 ms"
    ask(page, "lanes", "chart.setView(0, 60000)")
    places = ask(page, "lanes", "[15000, 40000].map((time) => [chart.toX(time), chart.tracks[2].y + 4])")

    def colours() -> list[list[int]]:
        wait_for_frame(page)
        return [read_pixel(page, "figure.lanes canvas.back", *place) for place in places]

    norm, gemm = colours()
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert colours()[0] == norm
    assert min(colours()[1][:3]) > 150 > min(gemm[:3])
    button.click()
    assert colours() == [norm, gemm]


def test_a_click_narrows_the_breakdown_to_its_class(open_parts: Open) -> None:
    kernels = kernels_of_step()
    page = open_parts(lay_lanes(kernels), break_down([kernels], [WALL_NS]))
    ask(page, "lanes", "chart.setView(0, 60000)")
    point_at_time(page, 2, 15_000)
    page.mouse.down()
    page.mouse.up()
    assert page.inner_text("figure.lanes .linked") == "The time below is narrowed to norm."
    assert "norm" in page.inner_text("figure.breakdown .chip")
    # A drag is no click.
    point_at_time(page, 2, 1_000)
    page.mouse.down()
    point_at_time(page, 2, 11_000)
    page.mouse.up()
    assert page.inner_text("figure.lanes .linked") == "The time below is narrowed to norm."
    assert page.locator("figure.breakdown .chip").count() == 1


def test_two_steps_share_a_scale(open_parts: Open) -> None:
    kernels = kernels_of_step()
    parts = (lay_lanes(kernels), lay_lanes(kernels[:60]))
    page = open_parts(Beside(title="Steps", runs=("A", "B"), parts=parts), width=1440)
    script = "() => [...document.querySelectorAll('figure.lanes')].map(({ chart }) => [chart.view.end, chart.spanNs])"
    (first_end, first), (second_end, second) = page.evaluate(script)
    assert first_end == second_end == first == parts[0].span_ns
    assert second == parts[1].span_ns < first
    # The shares are of its own step.
    page.focus("#part-0-b canvas.back")
    page.keyboard.press("n")
    assert f"{100 * 4_400 / second:.3f}% of the step" in page.inner_text("#tip")


def test_labels_stand_above_the_tracks_on_a_narrow_screen(open_parts: Open) -> None:
    page = open_parts(one_step(), width=420)
    left, top = ask(page, "lanes", "[chart.plot.left, chart.tracks[0].y]")
    wide = open_parts(one_step(), width=1200)
    wide_left, wide_top = ask(wide, "lanes", "[chart.plot.left, chart.tracks[0].y]")
    assert left < 10 < wide_left
    assert top > wide_top


def test_a_long_label_is_cut_and_told(open_parts: Open) -> None:
    step = one_step()
    long = "GPU 1 stream 15 of process 112: copies and more that is said of it"
    page = open_parts(
        msgspec.structs.replace(step, tracks=(*step.tracks[:2], msgspec.structs.replace(step.tracks[2], label=long)))
    )
    left, width, y = ask(page, "lanes", "[chart.plot.left, chart.plot.all, chart.tracks[2].y + 5]")
    assert 92 < left <= 0.22 * width
    move_to(page, "lanes", 20, y)
    assert page.inner_text("#tip") == long
    move_to(page, "lanes", 20, 5)
    assert page.is_hidden("#tip")


def test_a_tap_shows_a_span_and_the_next_takes_it_away(open_parts: Open) -> None:
    page = open_parts(one_step(), width=420, has_touch=True)
    x, y = ask(page, "lanes", "[chart.toX(1000000), chart.tracks[0].y + 8]")
    page.locator("figure.lanes canvas.back").tap(position={"x": x, "y": y})
    assert page.is_visible("#tip")
    assert page.inner_text("#tip").startswith("forward")
    # Near enough that the page need not scroll, which takes a tip away too.
    page.locator("figure.lanes .status").tap()
    assert page.is_hidden("#tip")


def test_two_fingers_zoom(open_parts: Open) -> None:
    page = open_parts(one_step(), width=420, has_touch=True)
    whole = view_of(page)
    canvas = page.locator("figure.lanes canvas.back")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    session = page.context.new_cdp_session(page)

    def touch(kind: str, *xs: float) -> None:
        points = [{"x": box["x"] + x, "y": box["y"] + 60, "id": number} for number, x in enumerate(xs)]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", 150, 200)
    touch("touchMove", 100, 250)
    touch("touchEnd")
    start, end = view_of(page)
    assert end - start == pytest.approx(whole[1] / 3, rel=0.1)


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

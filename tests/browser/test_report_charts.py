"""The charts of a report in a real browser: all of them, and the timeline of a step to the nanosecond."""

from typing import TYPE_CHECKING

import msgspec
import pytest

from stepscope.findings import Lanes, Part, SideBySide, Spans, Track
from tests.browser.chart_views import (
    CANVASES,
    DRAWINGS,
    ask,
    count_colours,
    move_to,
    note_texts,
    noted_texts,
    picture,
    read_pixel,
    view_of,
)
from tests.browser.conftest import Open, wait_for_frame
from tests.unit.render.report_parts import (
    WALL_NS,
    break_down,
    draw_attention,
    draw_roofline,
    kernels_of_step,
    lay_lanes,
)
from tests.unit.render.report_samples import empty, hostile
from tests.unit.render.timelines import training_step

if TYPE_CHECKING:
    from playwright.sync_api import Page


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
    return Lanes(title="Many", span_ns=2 * length * count, tracks=(track,), names=("tiny",), groups=("GEMM",))


# --- all of them ----------------------------------------------------------------------------------------------------


def all_parts() -> tuple[Part, ...]:
    return one_step(), draw_roofline(), draw_attention(), training_step(300)


def test_every_chart_is_drawn_with_data_and_named(open_parts: Open) -> None:
    page = open_parts(*all_parts())
    labels = {}
    for kind in (*CANVASES, *DRAWINGS):
        if kind in CANVASES:
            assert count_colours(page, f"figure.{kind} canvas.back") > 20
        else:
            assert page.locator(f"figure.{kind} svg.drawing:visible .mark").count() >= 8
        labels[kind] = page.get_attribute(f"figure.{kind} [role=application]", "aria-label") or ""
        assert page.get_attribute(f"figure.{kind} [role=application]", "tabindex") == "0"
    assert "12.9 ms, 3 tracks, 570 spans. Most time: GEMM 3.61 ms" in labels["lanes"]
    assert "mm 2048×768 · 768×3072 at 410.0 TFLOP/s" in labels["roofline"]
    assert "for plain, sdpa, ours" in labels["figure"]
    assert "Peak 19.1 GiB at 60.0 ms" in labels["timeline"]


def test_dark_changes_every_chart(open_parts: Open) -> None:
    page = open_parts(*all_parts(), color_scheme="light")
    canvases = [f"figure.{kind} canvas.back" for kind in CANVASES]

    def fills() -> list[str]:
        script = "(one) => [getComputedStyle(one).fill, getComputedStyle(one).stroke].join()"
        return [page.eval_on_selector(f"figure.{kind} .mark > *", script) for kind in DRAWINGS]

    light, light_fills = [picture(page, canvas) for canvas in canvases], fills()
    page.emulate_media(color_scheme="dark")
    assert not set(light) & {picture(page, canvas) for canvas in canvases}
    assert not set(light_fills) & set(fills())


@pytest.mark.parametrize("width", [420, 1440])
def test_charts_fit_their_window_and_follow_it(open_parts: Open, width: int) -> None:
    page = open_parts(*all_parts(), width=width, device_scale_factor=2)
    fits = "() => document.documentElement.scrollWidth <= innerWidth"
    assert page.evaluate(fits)
    for kind in CANVASES:
        selector = f"figure.{kind} canvas.back"
        assert page.eval_on_selector(selector, "(one) => one.width === Math.round(2 * one.clientWidth)")
    page.set_viewport_size({"width": 600, "height": 900})
    wait_for_frame(page)
    wait_for_frame(page)
    assert page.evaluate(fits)
    for kind in CANVASES:
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


def test_span_tooltip_has_exact_nanoseconds(open_parts: Open) -> None:
    page = open_parts(one_step())
    ask(page, "lanes", "chart.setView(0, 60000)")
    # The embedding takes 4.4 µs and is followed by a pause of 9; then comes the first norm.
    point_at_time(page, 2, 15_000)
    text = page.inner_text("#tip")
    assert text.splitlines()[0] == "layer norm forward bf16"
    for expected in ("norm", "6.100 µs, 0.0472% of the step", "from 13.400 µs", ": decoded"):
        assert expected in text
    for expected in ("operator: aten::mm [[64,32],[32,16]]", "module: blocks.0"):
        assert expected in text
    assert "source:" not in text
    point_at_time(page, 2, 9_000)
    assert page.is_hidden("#tip")
    point_at_time(page, 0, 30_000)
    assert "3.597720 ms, 27.9% of the step" in page.inner_text("#tip")


def test_wheel_scrolls_the_page_until_the_chart_is_clicked(open_parts: Open) -> None:
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
    # The span under the pointer stays there.
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


def test_keys_select_spans_and_announce_them(open_parts: Open) -> None:
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


def test_map_above_the_chart_moves_the_view(open_parts: Open) -> None:
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
    # Dragging a side resizes the window, and a press elsewhere moves it there.
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
    # Zoomed in, single spans are visible with their names.
    ask(page, "lanes", "chart.setView(10000, 14000)")
    x_busy, x_idle = ask(page, "lanes", "[chart.toX(10900), chart.toX(11370)]")
    assert read_pixel(page, "canvas.back", x_busy, y)[3] == 255
    assert read_pixel(page, "canvas.back", x_idle, y)[3] == 0


def test_long_span_keeps_its_name_when_zoomed_in(open_parts: Open) -> None:
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


def test_status_shows_the_visible_range_with_its_unit(open_parts: Open) -> None:
    page = open_parts(one_step())
    assert page.inner_text("figure.lanes .status") == "Whole step, 12.9 ms"
    ask(page, "lanes", "chart.setView(2000000, 2000800)")
    wait_for_frame(page)
    assert page.inner_text("figure.lanes .status") == "800 ns of 12.9 ms, from 2.000000 ms"


def test_legend_shows_only_one_class(open_parts: Open) -> None:
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
    assert page.inner_text("figure.lanes .linked") == "The breakdown is narrowed to norm."
    assert "norm" in page.inner_text("figure.breakdown .chip")
    # A drag is not a click.
    point_at_time(page, 2, 1_000)
    page.mouse.down()
    point_at_time(page, 2, 11_000)
    page.mouse.up()
    assert page.inner_text("figure.lanes .linked") == "The breakdown is narrowed to norm."
    assert page.locator("figure.breakdown .chip").count() == 1


def test_two_steps_share_a_scale(open_parts: Open) -> None:
    kernels = kernels_of_step()
    parts = (lay_lanes(kernels), lay_lanes(kernels[:60]))
    page = open_parts(SideBySide(title="Steps", runs=("A", "B"), parts=parts), width=1440)
    script = "() => [...document.querySelectorAll('figure.lanes')].map(({ chart }) => [chart.view.end, chart.spanNs])"
    (first_end, first), (second_end, second) = page.evaluate(script)
    assert first_end == second_end == first == parts[0].span_ns
    assert second == parts[1].span_ns < first
    # Shares are relative to its own step.
    page.focus("#part-0-b canvas.back")
    page.keyboard.press("n")
    assert f"{100 * 4_400 / second:.3f}% of the step" in page.inner_text("#tip")


@pytest.mark.parametrize("unit", ["step", "trace"])
def test_the_end_of_the_shorter_one_is_named(open_parts: Open, unit: str) -> None:
    kernels = kernels_of_step()
    parts = tuple(msgspec.structs.replace(lay_lanes(some), unit=unit) for some in (kernels, kernels[:60]))
    page = open_parts(SideBySide(title="Both", runs=("A", "B"), parts=parts), width=1440)
    note_texts(page)
    page.set_viewport_size({"width": 1300, "height": 900})
    wait_for_frame(page)
    assert [text for text in noted_texts(page) if text.startswith("end of")] == [f"end of {unit}"]


def test_labels_are_above_the_tracks_on_a_narrow_screen(open_parts: Open) -> None:
    page = open_parts(one_step(), width=420)
    left, top = ask(page, "lanes", "[chart.plot.left, chart.tracks[0].y]")
    wide = open_parts(one_step(), width=1200)
    wide_left, wide_top = ask(wide, "lanes", "[chart.plot.left, chart.tracks[0].y]")
    assert left < 10 < wide_left
    assert top > wide_top


def test_long_label_is_cut_and_has_a_tooltip(open_parts: Open) -> None:
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


def test_tap_shows_a_tooltip_and_the_next_tap_hides_it(open_parts: Open) -> None:
    page = open_parts(one_step(), width=420, has_touch=True)
    x, y = ask(page, "lanes", "[chart.toX(1000000), chart.tracks[0].y + 8]")
    page.locator("figure.lanes canvas.back").tap(position={"x": x, "y": y})
    assert page.is_visible("#tip")
    assert page.inner_text("#tip").startswith("forward")
    # Close enough that the page does not scroll, which would hide the tooltip too.
    page.locator("figure.lanes .status").tap()
    assert page.is_hidden("#tip")


def test_pinch_zooms(open_parts: Open) -> None:
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

"""The page of a timeline in a real browser: it opens from a file, draws, responds, and never runs code from a name."""

import hashlib
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stepscope.findings import Area, Timeline
from stepscope.render.figures import save
from tests.browser.conftest import OpenFile, wait_for_frame
from tests.unit.render.timelines import HOSTILE, busy_timeline, hostile_timeline, training_step

if TYPE_CHECKING:
    from playwright.sync_api import Page

Open = Callable[..., "Page"]
CHART = "document.querySelector('figure.chart').chart"


@pytest.fixture
def open_page(open_file: OpenFile, tmp_path: Path) -> Open:
    def open_timeline(timeline: Timeline, *, detail: float = 0.1, **options: Any) -> "Page":
        target = tmp_path / "timeline.html"
        save(timeline, target, detail=detail)
        return open_file(target, **options)

    return open_timeline


def picture(page: "Page") -> str:
    """Return a hash of the canvas."""
    wait_for_frame(page)
    return hashlib.sha256(page.evaluate("() => document.querySelector('canvas.back').toDataURL()").encode()).hexdigest()


def count_colours(page: "Page") -> int:
    script = """() => {
      const canvas = document.querySelector("canvas.back");
      const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      return new Set(new Uint32Array(data.buffer)).size;
    }"""
    return int(page.evaluate(script))


def point_at(page: "Page", time: float, height_gib: float) -> None:
    """Move the mouse to a time and a height of the chart."""
    script = """([time, height]) => {
      const box = document.querySelector("canvas.back").getBoundingClientRect();
      const { chart } = document.querySelector("figure.chart");
      return [box.left + chart.toX(time), box.top + chart.toY(height * 2 ** 30)];
    }"""
    x, y = page.evaluate(script, [time, height_gib])
    page.mouse.move(x, y)
    wait_for_frame(page)


def view_of(page: "Page") -> dict[str, float]:
    wait_for_frame(page)
    view: dict[str, float] = page.evaluate(f"() => ({{ ...{CHART}.view }})")
    return view


def test_page_draws_and_names_the_peak(open_page: Open) -> None:
    page = open_page(training_step())
    assert count_colours(page) > 10
    assert page.inner_text("#peak").startswith("Peak 19.1 GiB at 60.0 ms: activations 9.71 GiB")
    assert page.inner_text("h1") == training_step().title
    assert page.inner_text(".shown") == "10%: 14 of 134 pieces"


def test_the_slider_changes_what_is_drawn(open_page: Open) -> None:
    page = open_page(training_step(), detail=0)
    pictures = [picture(page)]
    for share in ("10", "100"):
        page.fill("input[type=range]", share)
        pictures.append(picture(page))
    assert len(set(pictures)) == 3
    assert page.inner_text(".shown") == "100%: 134 of 134 pieces"


def test_the_pointer_shows_the_piece_under_it(open_page: Open) -> None:
    page = open_page(training_step())
    # At 65 ms: parameters and optimizer state up to 7.9 GiB, twelve attention scores of 384 MiB, then the logits.
    point_at(page, 65, 7.875 + 12 * 0.375 + 0.7)
    text = page.inner_text("#tip")
    for expected in ("logits", "1.46 GiB", "from 53.0 ms to 76.0 ms", "model.py:123 forward", "activations: 9.71 GiB"):
        assert expected in text
    assert "total 19.1 GiB at" in text
    point_at(page, 65, 1)
    assert "parameters: 2.62 GiB" in page.inner_text("#tip")
    page.mouse.move(1, 1)
    assert page.is_hidden("#tip")


def test_the_wheel_zooms_around_the_pointer(open_page: Open) -> None:
    page = open_page(training_step())
    before = view_of(page)
    point_at(page, 50, 5)
    page.mouse.wheel(0, -300)
    after = view_of(page)
    assert before == {"start": 0, "end": 200, "low": 0, "high": after["high"]}
    assert after["end"] - after["start"] < 150
    # The time under the pointer, a quarter from the left, stays there.
    assert (50 - after["start"]) / (after["end"] - after["start"]) == pytest.approx(0.25, abs=0.01)
    page.dblclick("canvas.back")
    assert view_of(page) == before


def test_dragging_and_keys_move_the_view(open_page: Open) -> None:
    page = open_page(training_step())
    whole = view_of(page)
    page.focus("canvas.back")
    page.keyboard.press("+")
    zoomed = view_of(page)
    assert zoomed["end"] - zoomed["start"] == pytest.approx(150)
    page.keyboard.press("ArrowRight")
    assert view_of(page)["start"] == pytest.approx(zoomed["start"] + 15)
    page.keyboard.press("ArrowLeft")
    point_at(page, 100, 5)
    page.mouse.down()
    point_at(page, 110, 5)
    page.mouse.up()
    assert view_of(page)["start"] == pytest.approx(zoomed["start"] - 10, abs=0.5)
    page.keyboard.press("-")
    page.keyboard.press("0")
    assert view_of(page) == whole


def test_peak_of_one_slice_is_visible_at_any_zoom(open_page: Open) -> None:
    timeline = training_step(6000)
    heights = list(timeline.areas[4].values)
    heights[4321] += 30 << 30
    areas = (*timeline.areas[:4], Area(name="temporaries", values=tuple(heights)))
    page = open_page(msgspec.structs.replace(timeline, areas=areas, line=None), width=400)
    assert 4321 in page.evaluate(f"() => [...{CHART}.runs.slices]")
    page.evaluate(f"() => {CHART}.setView(100, 190)")
    wait_for_frame(page)
    assert 4321 in page.evaluate(f"() => [...{CHART}.runs.slices]")


def test_legend_hides_and_shows_areas(open_page: Open) -> None:
    page = open_page(training_step())
    names = [name.strip() for name in page.locator(".legend button").all_inner_texts()]
    assert names == ["temporaries", "activations", "gradients", "optimizer state", "parameters", "reserved"]
    before = picture(page)
    button = page.locator(".legend button", has_text="activations")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert picture(page) != before
    point_at(page, 65, 8.5)
    assert "activations" not in page.inner_text("#tip")
    button.click()
    assert picture(page) == before


@pytest.mark.parametrize("detail", [0.0, 1.0])
def test_a_row_of_the_table_shows_its_piece(open_page: Open, detail: float) -> None:
    page = open_page(training_step(), detail=detail)
    before = picture(page)
    row = page.locator("#pieces tbody tr").first
    assert "logits" in row.inner_text()
    row.click()
    assert row.get_attribute("aria-selected") == "true"
    assert picture(page) != before
    row.click()
    assert picture(page) == before


def test_hostile_names_are_inert(open_page: Open) -> None:
    page = open_page(hostile_timeline(), detail=1)
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert HOSTILE in page.inner_text("#pieces")
    point_at(page, 65, 14)
    assert page.locator("#tip img, #tip script").count() == 0
    # Nothing is wider than the window, even with long names.
    assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("width", [400, 900, 1600])
def test_the_page_fits_its_window(open_page: Open, width: int) -> None:
    page = open_page(training_step(), width=width, device_scale_factor=2)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert page.eval_on_selector("canvas.back", "(back) => back.width === Math.round(2 * back.clientWidth)")


def test_dark_differs_from_light_and_follows_the_system(open_page: Open) -> None:
    page = open_page(training_step(), color_scheme="light")
    light = picture(page)
    colour = "() => getComputedStyle(document.body).backgroundColor"
    background = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    assert picture(page) != light
    assert page.evaluate(colour) != background


def test_an_empty_timeline_opens(open_page: Open) -> None:
    timeline = training_step()
    areas = tuple(Area(name=area.name, values=()) for area in timeline.areas)
    page = open_page(msgspec.structs.replace(timeline, times=(), areas=areas, stretches=(), pieces=(), line=None))
    assert page.inner_text("#peak") == "Nothing to draw."
    page.focus("canvas.back")
    page.keyboard.press("+")


def test_a_million_events_move(open_page: Open) -> None:
    page = open_page(busy_timeline(num_slices=8192, num_pieces=5000), detail=1, width=1600)
    frames_ms = []
    for _ in range(15):
        page.evaluate(f"() => {CHART}.zoom(0.9, {{ x: 0.4 }})")
        wait_for_frame(page)
        frames_ms.append(float(page.get_attribute("canvas.back", "data-frame-ms") or "nan"))
    assert statistics.median(frames_ms) < 50

"""The flame view and the tree of modules in a real browser: zooming is a selection that all lists share."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from stepscope.findings import Breakdown
from tests.browser.chart_views import count_colours, note_texts, noted_texts, picture
from tests.browser.conftest import wait_for_frame
from tests.unit.render.report_parts import WALL_NS, Kernel, break_down, kernels_of_step

if TYPE_CHECKING:
    from playwright.sync_api import Page

OpenParts = Callable[..., "Page"]
CANVAS = ".flame canvas.back"
ROW = 26


def times_by(kernels: list[Kernel], read: Callable[[Kernel], str]) -> Counter[str]:
    times: Counter[str] = Counter()
    for kernel in kernels:
        times[read(kernel)] += kernel.length_ns * kernel.count
    return times


@pytest.fixture
def page(open_parts: OpenParts) -> "Page":
    return open_flame(open_parts, break_down([kernels_of_step()], [WALL_NS]))


def open_flame(open_parts: OpenParts, part: Breakdown) -> "Page":
    page = open_parts(part, width=1440, reduced_motion="reduce")
    page.locator(CANVAS).scroll_into_view_if_needed()
    wait_for_frame(page)
    return page


def crumbs(page: "Page") -> list[str]:
    return page.locator(".crumb").all_inner_texts()


def point_at(page: "Page", share: float, row: int) -> None:
    """Move the pointer to a share of the width in a row of boxes."""
    width = page.locator(CANVAS).evaluate("(one) => one.clientWidth")
    page.locator(CANVAS).hover(position={"x": share * width, "y": ROW * row + ROW / 2})


def click_at(page: "Page", share: float, row: int) -> None:
    point_at(page, share, row)
    page.mouse.down()
    page.mouse.up()
    wait_for_frame(page)


def middle_of(phase: str) -> float:
    """The place of a phase in the whole step, as a share of the width."""
    times = times_by(kernels_of_step(), lambda kernel: kernel.phase)
    before = 0
    for name in ("forward", "loss", "backward", "optimizer"):
        if name == phase:
            return (before + times[name] / 2) / times.total()
        before += times[name]
    raise AssertionError(phase)


def tip_of(page: "Page") -> list[str]:
    return page.locator("#tip p").all_inner_texts()


def rows_of(page: "Page") -> list[str]:
    return page.locator(".modules tbody .name").all_inner_texts()


def test_a_click_zooms_in_and_a_crumb_zooms_out(page: "Page") -> None:
    whole = picture(page, CANVAS)
    assert crumbs(page) == ["all kernels"]
    click_at(page, middle_of("backward"), 0)
    zoomed = picture(page, CANVAS)
    assert zoomed != whole
    assert crumbs(page) == ["all kernels", "backward"]
    time = times_by(kernels_of_step(), lambda kernel: kernel.phase)["backward"]
    assert page.inner_text(".told") == f"{time / 1e6:.2f} ms of 60.9 ms: kernels of backward"
    # Further in: all layers, in the middle of the row below.
    click_at(page, 0.5, 1)
    assert crumbs(page) == ["all kernels", "backward", "12 × layers.*"]
    assert page.locator(".chip").all_inner_texts() == ["phase\nbackward\n×", "module\n12 × layers.*\n×"]
    assert page.locator(".modules tr[aria-selected=true] .name").inner_text().split("\n")[-1] == "layers.*"
    page.locator(".crumb", has_text="backward").click()
    assert picture(page, CANVAS) == zoomed
    page.locator(".crumb").first.click()
    assert crumbs(page) == ["all kernels"]
    assert picture(page, CANVAS) == whole


def test_keys_move_zoom_in_and_zoom_out(page: "Page") -> None:
    page.focus(CANVAS)
    page.keyboard.press("ArrowRight")  # selects the first box
    assert tip_of(page)[0] == "forward"
    for key, name in (("ArrowRight", "loss"), ("ArrowRight", "backward"), ("ArrowDown", "12 × layers.*")):
        page.keyboard.press(key)
        assert tip_of(page)[0] == name, key
        assert page.inner_text("#said").startswith(f"{name}, ")
    page.keyboard.press("Enter")
    assert crumbs(page) == ["all kernels", "backward", "12 × layers.*"]
    assert page.is_hidden("#tip"), "it would cover what is zoomed in to, and say what is no longer there"
    assert page.evaluate("() => document.activeElement.matches('.flame canvas.back')")
    page.keyboard.press("ArrowDown")
    assert tip_of(page)[0] == "12 × mlp", "the longest part of what is zoomed in to"
    page.keyboard.press("Backspace")
    page.keyboard.press("Backspace")
    assert crumbs(page) == ["all kernels"]
    page.keyboard.press("Enter")
    assert crumbs(page) == ["all kernels", "forward"]
    page.keyboard.press("Escape")
    assert crumbs(page) == ["all kernels"]


def test_boxes_say_their_time_copies_and_line(page: "Page") -> None:
    kernels = kernels_of_step()
    times = times_by(kernels, lambda kernel: f"{kernel.phase} {kernel.layer[:6]}")
    point_at(page, middle_of("backward"), 1)
    tip = tip_of(page)
    assert tip[0] == "12 × layers.*"
    time, total = times["backward layers"], times.total()
    assert f"{time / 1e6:.2f} ms, {100 * time / total:.1f}% of all kernel time" in tip
    assert f"{time / 12 / 1e6:.3f} ms each" in tip
    counts = sum(kernel.count for kernel in kernels if kernel.layer and kernel.phase == "backward")
    assert f"{counts} kernels per step" in tip
    # The optimizer has no module: its operator is below the phase, and the kernel below that.
    point_at(page, middle_of("optimizer"), 1)
    tip = tip_of(page)
    assert (tip[0], tip[1]) == ("aten::add", "optimizer")
    assert "model.py:31 forward" in tip
    point_at(page, middle_of("optimizer"), 2)
    assert "what its name says" in page.inner_text("#tip")
    page.mouse.move(5, 5)
    assert page.is_hidden("#tip")


def test_layers_unfold_in_order(page: "Page") -> None:
    folded = picture(page, CANVAS)
    page.get_by_role("button", name="Unfold layers").click()
    assert picture(page, CANVAS) != folded
    page.focus(CANVAS)
    for key in ("ArrowLeft", "ArrowRight", "ArrowRight", "ArrowDown", "Home"):
        page.keyboard.press(key)
    names = []
    for _ in range(14):
        names.append(tip_of(page)[0])
        page.keyboard.press("ArrowRight")
    assert names == ["embedding", *(f"layers.{at}" for at in range(12)), "head"]
    page.get_by_role("button", name="Fold layers").click()
    assert picture(page, CANVAS) == folded


def test_a_number_is_never_the_whole_name_of_a_box(open_parts: OpenParts) -> None:
    """A box that has no room for its path keeps the name above its number."""
    kernels = [replace(one, module=f"trunk.{one.module.replace('mlp.up', 'mlp.0')}") for one in kernels_of_step()]
    page = open_flame(open_parts, break_down([kernels], [WALL_NS]))
    note_texts(page)
    for width in range(1400, 300, -100):
        page.set_viewport_size({"width": width, "height": 900})
        wait_for_frame(page)
    texts = noted_texts(page)
    assert "12 × layers.*" in texts
    assert "mlp.*" in texts
    assert not [text for text in texts if text.replace("12 × ", "") in ("0", "*")]


def test_search_highlights_and_adds_up(page: "Page") -> None:
    before = picture(page, CANVAS)
    page.fill(".flame .search", "ATTENTION")
    kernels = kernels_of_step()
    time = sum(one.length_ns * one.count for one in kernels if "attention" in one.module)
    total = sum(one.length_ns * one.count for one in kernels)
    said = f"{time / 1e6:.2f} ms, {100 * time / total:.1f}% of all kernel time"
    assert page.inner_text(".flame .found") == said
    assert picture(page, CANVAS) != before
    page.fill(".flame .search", "no such thing")
    assert page.inner_text(".flame .found") == "No match"
    page.keyboard.press("Escape")
    assert picture(page, CANVAS) == before


def test_lists_narrow_the_flame_view(page: "Page") -> None:
    page.locator("[data-dimension=class] .choice", has_text="attention").click()
    assert crumbs(page) == ["attention kernels"]
    page.locator("[data-dimension=phase] .choice", has_text="forward").click()
    assert crumbs(page) == ["attention kernels", "forward"]
    # A single kernel: the flame view shows where it runs.
    page.keyboard.press("Escape")
    page.locator(".kernels tbody tr", has_text="AdamW").click()
    assert crumbs(page) == ["all kernels"]
    point_at(page, 0.5, 0)
    assert tip_of(page)[0] == "optimizer"


def test_tree_opens_to_parts_and_to_single_layers(page: "Page") -> None:
    names = rows_of(page)
    assert names[0].split() == ["▾", "12", "×", "layers.*"]
    row = page.locator(".modules tbody tr").first
    row.locator(".copies-chip").click()
    singles = [name.split()[-1] for name in rows_of(page)[1:13]]
    assert singles == [f"layers.{at}" for at in range(12)]
    row.locator(".copies-chip").click()
    assert rows_of(page) == names
    row.locator(".twist").click()
    assert rows_of(page)[0].split() == ["▸", "12", "×", "layers.*"]
    row.focus()
    page.keyboard.press("ArrowRight")
    assert row.get_attribute("aria-expanded") == "true"
    page.keyboard.press("*")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.inner_text(".told").endswith("kernels in layers.0")
    assert crumbs(page) == ["all kernels"], "two phases are left"
    page.keyboard.press("ArrowLeft")
    assert page.locator(".modules tr:focus .label").inner_text() == "layers.*"


def test_rows_of_the_tree_add_up(page: "Page") -> None:
    cells = [row.split("\t") for row in page.locator(".modules tbody tr").all_inner_texts()]
    levels = page.locator(".modules tbody tr").evaluate_all("(rows) => rows.map((row) => Number(row.ariaLevel))")
    times = [
        float(next(cell for cell in row if "." in cell and cell.strip().replace(".", "").isdigit())) for row in cells
    ]
    total = sum(kernel.length_ns * kernel.count for kernel in kernels_of_step()) / 1e6
    assert sum(time for level, time in zip(levels, times, strict=True) if level == 1) == pytest.approx(total, abs=0.005)
    inside = [time for level, time in zip(levels, times, strict=True) if level == 2]
    assert sum(inside) == pytest.approx(times[0], abs=0.0005 * (len(inside) + 1))


def test_an_odd_layer_stands_out(open_parts: OpenParts) -> None:
    kernels = [
        replace(one, length_ns=2 * one.length_ns) if one.layer == "layers.7" else one for one in kernels_of_step()
    ]
    page = open_flame(open_parts, break_down([kernels], [WALL_NS]))
    row = page.locator(".modules tbody tr").first
    assert "odd" in (row.get_attribute("class") or "")
    assert row.locator("path.odd").get_attribute("d", timeout=1000).count("M") == 1  # type: ignore[union-attr]
    row.hover()
    assert "(layers.7)" in page.inner_text("#tip")


def test_two_runs_have_a_flame_view_each(open_parts: OpenParts) -> None:
    faster = [replace(kernel, length_ns=kernel.length_ns // 2 + 1) for kernel in kernels_of_step() if kernel.layer]
    page = open_flame(open_parts, break_down([kernels_of_step(), faster], [WALL_NS, WALL_NS]))
    second = picture(page, CANVAS)
    assert page.locator(".flame [aria-pressed=true]").inner_text() == "B"
    page.locator(".flame").get_by_role("button", name="A", exact=True).click()
    assert picture(page, CANVAS) != second
    headers = page.locator(".modules th").all_inner_texts()
    assert headers == ["module", "", "A", "B", "change"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_empty_and_unknown_names_are_drawn(open_parts: OpenParts, scheme: str) -> None:
    nowhere = [replace(kernel, layer="", module="") for kernel in kernels_of_step()]
    part = break_down([nowhere], [WALL_NS])
    page = open_parts(msgspec.structs.replace(part, tree=None), width=420, color_scheme=scheme)
    page.locator(CANVAS).scroll_into_view_if_needed()
    wait_for_frame(page)
    assert count_colours(page, CANVAS) > 8
    assert page.get_by_role("button", name="Unfold layers").count() == 0


def test_print_has_the_flame_view_in_the_light_theme(open_parts: OpenParts) -> None:
    page = open_parts(break_down([kernels_of_step()], [WALL_NS]), width=900, color_scheme="dark")
    page.locator(CANVAS).scroll_into_view_if_needed()
    dark = picture(page, CANVAS)
    page.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    assert picture(page, CANVAS) != dark
    page.emulate_media(media="print")
    assert page.is_hidden(".flame .search")
    assert page.is_visible(CANVAS)

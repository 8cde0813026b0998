"""Charts of several runs, in a real browser: aligned steps and memory, and trends."""

import pytest

from stepscope.render.drawing.aligned_steps import cut_blocks
from stepscope.render.drawing.svg import width_of
from tests.browser.chart_views import ask, look_at, wait_for_chart
from tests.browser.conftest import Open
from tests.unit.render.comparison_samples import aligned_memory, aligned_steps
from tests.unit.render.report_samples import many_runs, two_runs


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1280, "dark")])
@pytest.mark.parametrize("sample", [two_runs, many_runs])
def test_charts_fit_the_page(open_report: Open, sample: type, width: int, scheme: str) -> None:
    page = open_report(sample(), width=width, color_scheme=scheme)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    boxes = page.eval_on_selector_all(
        "figure.aligned .drawing text",
        """(texts) => texts.filter((one) => one.getClientRects().length).map((one) => {
          const { left, right } = one.getBoundingClientRect();
          return { text: one.textContent, left, right };
        })""",
    )
    assert len(boxes) > 20
    for box in boxes:
        assert box["left"] >= 0, box
        assert box["right"] <= width, box


def test_no_text_is_wider_than_the_room_that_was_kept_for_it(open_report: Open) -> None:
    page = open_report(two_runs(), width=1280)
    texts = ("medium + bf16 + naive", "0123456789", "GEMM 34.5 → 4.49 ms (−13%)", "communication", "fp8, 1.98 PFLOP/s")
    widths = page.evaluate(
        """(texts) => {
          const context = document.createElement("canvas").getContext("2d");
          context.font = "100px 'DejaVu Sans'";
          return texts.map((text) => context.measureText(text).width);
        }""",
        texts,
    )
    for text, width in zip(texts, widths, strict=True):
        assert 0.5 * width_of(text, 100) < width <= width_of(text, 100), text


def test_a_place_shows_both_times_and_the_change(open_report: Open) -> None:
    page = open_report(two_runs(), width=1280)
    blocks = cut_blocks(aligned_steps())
    slow = next(at for at, block in enumerate(blocks) if block.places[0].name == "layer 2 attention")
    look_at(page, "aligned", slow)
    tip = page.locator("#tip").inner_text()
    assert "forward, layer 2 attention" in tip
    assert "A: 0.900 ms: GEMM 0.450 ms" in tip
    assert "B: 1.20 ms" in tip
    assert "+0.300 ms" in tip
    page.locator("figure.aligned .plot").first.focus()
    page.keyboard.press("ArrowRight")
    assert "forward" in page.locator("#said").inner_text()
    assert ask(page, "aligned", "chart.marks.length") == len(blocks)


def test_a_column_of_memory_shows_both_sizes(open_report: Open) -> None:
    page = open_report(two_runs(), width=1280)
    figure = page.locator("#changes-memory")
    figure.scroll_into_view_if_needed()
    wait_for_chart(page, "#changes-memory")
    place = figure.evaluate(f"(one) => one.chart.placeOf({aligned_memory().peak(0)})")
    page.mouse.move(place["x"], place["y"])
    tip = page.locator("#tip").inner_text()
    assert "backward, at 0%" in tip
    assert "A: 5.00 GiB: activations 4.00 GiB, parameters 1.00 GiB" in tip
    assert "−2.00 GiB" in tip


def test_a_run_of_a_trend_shows_its_verdict(open_report: Open) -> None:
    page = open_report(many_runs(), width=1280)
    look_at(page, "aligned", 4)
    tip = page.locator("#tip").inner_text()
    assert "5: run with the name 4" in tip
    assert "69.0 ms (58.9 ms to 62.9 ms)" in tip
    assert "slower" in tip
    assert page.locator(".advice").count() == 0


def test_charts_are_there_without_scripts(open_report: Open) -> None:
    page = open_report(many_runs(), width=1280, java_script_enabled=False)
    assert page.locator("figure.aligned svg.drawing:visible").count() == 2

"""The page of a run recorded on an H200, in a real browser: every chart is drawn from real data."""

from pathlib import Path

import pytest

from stepscope.api.inputs import read_runs
from stepscope.explain.story import tell, tell_both
from stepscope.render.site import write_site
from tests.browser.chart_views import CANVASES, DRAWINGS
from tests.browser.conftest import OpenFile, wait_for_frame

RECORDED = Path(__file__).parents[2] / "bench/results/reports_h200/small-fp32"
FEWEST_COLOURS = 8  # an empty chart has fewer: background, grid, two text colours and their edges

_COUNT_COLOURS = """(canvas) => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size;
}"""


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (420, "dark")])
def test_every_chart_of_a_recorded_run_is_drawn(open_file: OpenFile, tmp_path: Path, width: int, scheme: str) -> None:
    (run,) = read_runs([RECORDED], command="stepscope report", cached=False)
    target = tmp_path / "report.html"
    target.write_text(write_site(tell(run)), encoding="utf-8")
    page = open_file(target, width=width, color_scheme=scheme)
    figures = page.locator("figure.chart")
    assert {*CANVASES, *DRAWINGS, "breakdown", "bars"} <= set(
        figures.evaluate_all("(all) => all.map((one) => one.dataset.kind)")
    )
    for figure in figures.all():
        figure.scroll_into_view_if_needed()
        wait_for_frame(page)
        key = figure.get_attribute("id")
        assert figure.locator(".body > *").count() > 0, key
        # The front canvas is empty until the pointer is over the chart.
        for canvas in figure.locator("canvas:not(.front)").all():
            assert canvas.evaluate(_COUNT_COLOURS) >= FEWEST_COLOURS, key
        box = figure.locator("[role=application]")
        assert box.get_attribute("aria-label"), key
        if figure.get_attribute("data-kind") not in (*CANVASES, "breakdown"):
            assert figure.locator("svg.drawing:visible .mark").count() > 0, key
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width


def test_headlines_fit_two_lines(open_file: OpenFile, tmp_path: Path) -> None:
    runs = read_runs([RECORDED, RECORDED.parent / "small-fast"], command="stepscope report", cached=False)
    for number, report in enumerate((tell(runs[0]), tell(runs[1]), tell_both(*runs))):
        target = tmp_path / f"{number}.html"
        target.write_text(write_site(report), encoding="utf-8")
        page = open_file(target, width=1440)
        lines = page.locator(".sentence").evaluate(
            "(one) => one.clientHeight / parseFloat(getComputedStyle(one).lineHeight)"
        )
        assert lines < 2.5, report.sentence

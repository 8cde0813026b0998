"""A run in a notebook, in a real browser: the page is in a frame, its scripts run, and nothing is fetched."""

from pathlib import Path

import stepscope
from tests.browser.conftest import OpenFile

ROOT = Path(__file__).parents[2]


def test_run_and_figure_are_shown_in_frames(open_file: OpenFile, tmp_path: Path) -> None:
    run = stepscope.load(ROOT / "docs/examples/trace.json.gz", cache=False)
    memory = stepscope.load(ROOT / "bench/results/memory_h200/small-train-fp32")
    target = tmp_path / "notebook.html"
    shown = (run, memory.figure(), run.table("classes"))
    target.write_text("<!DOCTYPE html><meta charset='utf-8'>" + "".join(one._repr_html_() for one in shown))
    page = open_file(target, width=1200)
    report, picture = page.frames[1:]
    assert report.locator("h1").count() == 1
    figure = report.locator("figure.lanes")
    figure.scroll_into_view_if_needed()
    report.wait_for_function("(figure) => figure.chart", arg=figure.element_handle())
    assert picture.locator("figure.timeline canvas").count() > 0
    assert page.locator("body > div table tbody tr").count() == run.classes.height

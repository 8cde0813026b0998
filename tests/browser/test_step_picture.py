"""The picture of the step on the first screen, in a real browser."""

import pytest

from stepscope.render.drawing.step import describe_picture, list_segments
from tests.browser.chart_views import ask, look_at
from tests.browser.conftest import Open
from tests.unit.render.report_samples import empty, hostile, one_run, two_runs


def test_picture_is_between_the_tiles_and_the_cards(open_report: Open) -> None:
    page = open_report(one_run(), width=1280)
    tops = [page.locator(name).first.bounding_box() for name in (".facts", "figure.step", ".soundness", ".cards")]
    places = [box["y"] for box in tops if box]
    assert len(places) == 4
    assert places == sorted(places)
    assert places[1] < 700


@pytest.mark.parametrize("width", [360, 1280])
def test_texts_stay_inside_and_apart(open_report: Open, width: int) -> None:
    page = open_report(two_runs(), width=width)
    boxes = page.eval_on_selector_all(
        "figure.step .drawing text",
        """(texts) => texts.filter((one) => one.getClientRects().length).map((one) => {
          const { left, right, top, bottom } = one.getBoundingClientRect();
          return { text: one.textContent, left, right, top, bottom };
        })""",
    )
    assert len(boxes) > 15
    for box in boxes:
        assert box["left"] >= 0, box
        assert box["right"] <= width, box
    for at, one in enumerate(boxes):
        for other in boxes[at + 1 :]:
            apart = one["right"] <= other["left"] + 1 or other["right"] <= one["left"] + 1
            # Lines of one label are closer than their boxes are high.
            apart = apart or one["bottom"] <= other["top"] + 4 or other["bottom"] <= one["top"] + 4
            assert apart, (one, other)


def test_a_part_shows_its_time(open_report: Open) -> None:
    report = one_run()
    page = open_report(report, width=1280)
    assert report.picture is not None
    segments = list_segments(report.picture)
    idle = next(at for at, segment in enumerate(segments) if not segment.name)
    look_at(page, "step", idle)
    tip = page.locator("#tip").inner_text()
    assert "backward, idle" in tip
    assert "of the step" in tip
    assert "of backward" in tip
    page.locator("figure.step .plot").focus()
    page.keyboard.press("ArrowRight")
    assert "of the step" in page.locator("#said").inner_text()
    assert ask(page, "step", "chart.marks.length") == len(segments)


def test_picture_is_told_to_those_who_do_not_see_it(open_report: Open) -> None:
    report = two_runs()
    assert report.picture is not None
    page = open_report(report)
    assert page.locator("figure.step .unseen").first.text_content() == describe_picture(report.picture).replace(
        " ms", "\u00a0ms"
    )


def test_idle_time_is_visible_in_both_themes_and_sizes(open_report: Open) -> None:
    for width in (360, 1280):
        for scheme in ("light", "dark"):
            page = open_report(one_run(), width=width, color_scheme=scheme)
            shown = page.locator("figure.step .drawing:visible")
            assert shown.count() == 1
            fills = shown.locator("[fill^='url(#idle']").count()
            assert fills == 2  # one part of the bar and its sign in the legend
            name = shown.locator("[fill^='url(#idle']").first.get_attribute("fill")
            assert name
            assert shown.locator(f"pattern{name[4:-1]}").count() == 1


def test_empty_and_hostile_pictures_open(open_report: Open) -> None:
    open_report(empty())
    page = open_report(hostile(), width=360)
    assert page.evaluate("() => window.hacked") is None
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360

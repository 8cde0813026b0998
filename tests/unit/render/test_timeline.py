"""Timelines as charts and as pages: the peak survives, pieces stay in place, and names stay text."""

import base64
import hashlib
import json
import re
from collections import defaultdict
from html import unescape
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from stepscope.findings import Area, Axis, Piece, Stretch, Timeline
from stepscope.render.drawing.axes import find_ticks
from stepscope.render.drawing.svg import Text, width_of
from stepscope.render.drawing.timeline import WIDTH, list_heights, name_pieces, set_scene
from stepscope.render.drawing.timeline_layout import count_told_apart, find_peak, lay_out, place_stretches
from stepscope.render.figures import draw, save
from stepscope.render.formats import clean
from stepscope.render.site import write_chart_page

from .timelines import AREAS, GIB, HOSTILE, busy_timeline, hostile_timeline, training_step


def svg_texts(timeline: Timeline, detail: float = 0.1) -> list[str]:
    elements = re.findall(r"<text[^>]*>(.*?)</text>", draw(timeline, ".svg", detail=detail).decode(), re.DOTALL)
    return [unescape(re.sub(r"<[^>]*>", " ", element).strip()) for element in elements]


def embedded(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match
    data: dict[str, Any] = json.loads(match[1])["exhibits"]["chart"]
    return data


def emptied(timeline: Timeline) -> Timeline:
    areas = tuple(Area(name=area.name, values=()) for area in timeline.areas)
    return msgspec.structs.replace(timeline, times=(), areas=areas, stretches=(), pieces=(), line=None)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return svg_texts(training_step())


def test_merging_slices_keeps_the_peak_exactly() -> None:
    timeline = busy_timeline(num_slices=5000, num_pieces=0)
    peak = find_peak(timeline)
    assert peak
    layout = lay_out(timeline, num_told_apart=0, most_columns=300, least_size=0)
    assert layout.high.shape == (len(timeline.areas), 300)
    assert layout.high[-1].max() == peak.value
    assert peak.slice in layout.slices


def test_a_column_shows_one_slice_and_not_a_mixture() -> None:
    timeline = busy_timeline(num_slices=1000, num_pieces=0)
    layout = lay_out(timeline, num_told_apart=0, most_columns=77, least_size=0)
    for column, index in enumerate(layout.slices):
        heights = [area.values[index] for area in timeline.areas]
        assert list(layout.high[:, column] - layout.low[:, column]) == heights


def test_pieces_stay_in_their_area_and_do_not_overlap() -> None:
    timeline = busy_timeline(num_slices=400, num_pieces=300)
    layout = lay_out(timeline, num_told_apart=300, most_columns=400, least_size=0)
    assert len(layout.shapes) > 200
    intervals: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for shape in layout.shapes:
        area, columns = shape.piece.area, slice(shape.first, shape.first + len(shape.low))
        assert (shape.low >= layout.low[area, columns]).all()
        assert (shape.high <= layout.high[area, columns]).all()
        assert (shape.high - shape.low <= shape.piece.size).all()
        for offset, interval in enumerate(zip(shape.low.tolist(), shape.high.tolist(), strict=True)):
            intervals[area, shape.first + offset].append(interval)
    assert max(map(len, intervals.values())) > 1
    for column in intervals.values():
        assert all(below[1] <= above[0] for below, above in pairwise(sorted(column)))


def test_a_piece_larger_than_its_area_is_cut_to_it() -> None:
    area = Area(name="a", values=(5, 5, 0))
    piece = Piece(area=0, start=0, end=3, size=9, label="p")
    axis = Axis(label="")
    timeline = Timeline(title="", subtitle="", x=axis, y=axis, times=(0, 1, 2), areas=(area,), pieces=(piece,))
    (shape,) = lay_out(timeline, num_told_apart=1, most_columns=9, least_size=0).shapes
    assert list(shape.high) == [5, 5, 0]


def test_detail_is_the_share_of_the_largest_pieces() -> None:
    timeline = training_step()
    assert [count_told_apart(timeline, share) for share in (0, 0.1, 0.5, 1)] == [0, 14, 67, 134]
    few = msgspec.structs.replace(timeline, pieces=timeline.pieces[:3])
    assert count_told_apart(few, 0.01) == 1


@pytest.mark.parametrize("detail", [-0.1, 1.1, 10, float("nan")])
def test_detail_outside_zero_to_one_is_rejected(detail: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        draw(training_step(), ".svg", detail=detail)


def test_more_detail_draws_more_pieces() -> None:
    outlines = [draw(training_step(), ".svg", detail=detail).count(b"<path") for detail in (0, 0.1, 1)]
    assert outlines[0] < outlines[1] < outlines[2]


def test_chart_has_title_axes_and_names(texts: list[str]) -> None:
    timeline = training_step()
    for expected in (timeline.title, timeline.subtitle, *timeline.notes, "time (ms)", "active memory (GiB)"):
        assert expected in texts
    assert {"forward", "backward", "optimizer", "step 3", "reserved"} <= set(texts)
    assert texts[texts.index("logits") + 1] == "1.46 GiB"


def test_the_peak_is_written_with_its_time(texts: list[str]) -> None:
    assert "peak 19.1 GiB at 60.0 ms" in texts


def test_legend_starts_at_the_top_of_the_stack(texts: list[str]) -> None:
    assert [text for text in texts if text in AREAS] == list(AREAS[::-1])


def test_the_legend_adds_up_to_the_peak() -> None:
    timeline = training_step()
    scene = set_scene(timeline, 0)
    assert scene
    assert sum(area.values[scene.peak.slice] for area in timeline.areas) == scene.peak.value
    values = [value for _, _, value in list_heights(scene)]
    assert values == ["1.46 GiB", "9.71 GiB", "0 B", "5.25 GiB", "2.62 GiB", "20.0 GiB"]


def test_heights_have_round_ticks_from_zero(texts: list[str]) -> None:
    assert {"0", "5", "10", "15", "20"} <= set(texts)
    assert find_ticks(0, 0.07) == [0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07]
    assert find_ticks(0, 3e11, 4) == [0, 1e11, 2e11, 3e11]


@pytest.mark.parametrize("detail", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("timeline", [training_step(), busy_timeline(num_slices=900, num_pieces=400)])
def test_no_two_names_overlap(timeline: Timeline, detail: float) -> None:
    scene = set_scene(timeline, count_told_apart(timeline, detail))
    assert scene
    names, unnamed = name_pieces(scene)
    assert names or unnamed
    for one, other in combinations(map(_box, names), 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


def _box(text: Text) -> tuple[float, float, float, float]:
    half = width_of(text.text, text.size) / 2
    return text.x - half, text.y - text.size / 2, text.x + half, text.y + text.size / 2


def test_enclosing_stretches_are_further_out() -> None:
    lanes = {stretch.label: lane for stretch, lane in place_stretches(training_step())}
    assert lanes == {"forward": 0, "backward": 0, "optimizer": 0, "step 3": 1}


def test_stretches_without_room_are_shortened_and_explained() -> None:
    timeline = training_step()
    phases = ("forward", "backward") * 20
    stretches = tuple(Stretch(label=label, start=15 * at, end=15 * at + 15) for at, label in enumerate(phases))
    texts = svg_texts(msgspec.structs.replace(timeline, stretches=stretches))
    assert texts.count("f") == 20
    assert "Phases at the top: b backward, f forward." in texts


def test_single_slice_fills_the_chart_and_has_one_tick() -> None:
    axis = Axis(label="time", unit="ms")
    areas = (Area(name="weights", values=(3 * GIB,)), Area(name="cache", values=(GIB,)))
    timeline = Timeline(title="t", subtitle="", x=axis, y=Axis(label="memory", unit="bytes"), times=(7.0,), areas=areas)
    scene = set_scene(timeline, 0)
    assert scene
    assert [scene.x(edge) for edge in scene.layout.edges] == [0, WIDTH]
    assert "peak 4.00 GiB at 7.00 ms" in svg_texts(timeline)


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_an_empty_timeline_says_so(suffix: str) -> None:
    assert b"Nothing to draw." in draw(emptied(training_step()), suffix)


def test_other_heights_keep_their_unit() -> None:
    timeline = msgspec.structs.replace(training_step(), y=Axis(label="tokens", unit="k"))
    assert "tokens (k)" in svg_texts(timeline)
    assert embedded(write_chart_page(timeline, 0.1))["bytes"] is False


def test_png_and_pdf_have_their_format(tmp_path: Path) -> None:
    for name, start in (("t.png", b"\x89PNG\r\n\x1a\n"), ("t.PDF", b"%PDF-")):
        save(training_step(60), tmp_path / name, detail=1)
        assert (tmp_path / name).read_bytes().startswith(start)


def test_hostile_names_are_drawn_as_text() -> None:
    svg = draw(hostile_timeline(), ".svg", detail=1).decode()
    assert "<script" not in svg
    assert "<img" not in svg
    assert "\u202e" not in svg
    assert len(svg) < 300_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layers.0 (é, 中)", "layers.0 (é, 中)"),
        ("a\u202eb", "a\\u202eb"),
        ("a\nb\ud800", "a\\u000ab\\ud800"),
        ("e\u0301", "e\\u0301"),
        ("x" * 1_000_000, "x" * 26 + "…" + "x" * 13),
    ],
)
def test_text_is_shortened_and_made_visible(text: str, expected: str) -> None:
    assert clean(text, 40) == expected


def test_page_runs_only_its_own_script() -> None:
    page = write_chart_page(hostile_timeline(), 0.1)
    match = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert match
    policy = unescape(match[1])
    script, style = (
        re.search(r"<script>(.*?)</script>", page, re.DOTALL),
        re.search(r"<style>(.*?)</style>", page, re.DOTALL),
    )
    assert script
    assert style
    for text, kind in ((script[1], "script-src"), (style[1], "style-src")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert len(re.findall(r"<script", page)) == 2
    assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|document\.write|\beval\b", page)


def test_hostile_names_stay_inside_the_data_of_the_page() -> None:
    page = write_chart_page(hostile_timeline(), 0.1)
    assert "<img" not in page
    assert "\u202e" not in page
    assert any(HOSTILE in text for text in embedded(page)["strings"])
    assert len(page) < 150_000


def test_page_has_every_height_exactly() -> None:
    timeline = training_step()
    data = embedded(write_chart_page(timeline, 0.25))
    assert data["detail"] == 0.25
    for area, packed in zip((*timeline.areas, timeline.line), (*data["areas"], data["line"]), strict=True):
        assert area
        assert (np.cumsum(packed["steps"]) * data["grain"]).tolist() == list(area.values)
    pieces = data["pieces"]
    assert [size * data["grain"] for size in pieces["size"]] == [piece.size for piece in timeline.pieces]
    assert [data["strings"][at] for at in pieces["label"]] == [piece.label for piece in timeline.pieces]
    assert data["times"] == pytest.approx(timeline.times, abs=1e-3)


def test_a_large_page_stays_small() -> None:
    timeline = busy_timeline(num_slices=8192, num_pieces=5000)
    assert len(write_chart_page(timeline, 0.1)) < 1_500_000

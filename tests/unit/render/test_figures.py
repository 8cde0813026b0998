"""Figures as files: their content, and that no partial file is left."""

import re
import struct
import zlib
from html import unescape
from pathlib import Path

import msgspec
import pytest

from stepscope.errors import StepscopeError
from stepscope.findings import Axis, Figure, Point
from stepscope.render.drawing.colours import assign_colours
from stepscope.render.drawing.lines import arrange, shape_of
from stepscope.render.figures import SUFFIXES, check_figure, draw, save

from .examples import CONTEXTS, PRECISIONS, SIZES, bench_figure


def svg_texts(figure: Figure) -> list[str]:
    """Return every text of the figure, in drawing order."""
    return [unescape(text) for text in re.findall(r"<text[^>]*>(.*?)</text>", draw(figure, ".svg").decode())]


# Return the lower and upper end of the bar of a spread.
SPREAD = r'<line x1="[\d.]+" y1="([\d.]+)" x2="[\d.]+" y2="([\d.]+)" stroke="[^"]+" stroke-width="1.5"/>'


def figure_of(points: list[Point], *, log: bool = True) -> Figure:
    axis = Axis(label="x", log=log)
    return Figure(title="t", subtitle="", x=axis, y=Axis(label="y", log=log), points=tuple(points))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return svg_texts(bench_figure())


def test_png_has_two_panels_at_double_resolution(tmp_path: Path) -> None:
    save(bench_figure(), tmp_path / "step.PNG")
    content = (tmp_path / "step.PNG").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    assert 1400 < width < 2400
    assert 600 < height < 1200


def test_pdf_is_a_pdf(tmp_path: Path) -> None:
    save(bench_figure(), tmp_path / "step.pdf")
    content = (tmp_path / "step.pdf").read_bytes()
    assert content.startswith(b"%PDF-")
    assert content.rstrip().endswith(b"%%EOF")


def test_svg_names_titles_axes_panels_and_series(texts: list[str]) -> None:
    figure = bench_figure()
    panels = [f"precision: {precision}" for precision in PRECISIONS]
    for expected in (
        figure.title,
        figure.subtitle,
        "context (tokens)",
        "step time (ms)",
        "size",
        *panels,
        *SIZES,
    ):
        assert expected in texts


def test_contexts_are_labelled_exactly_once_per_panel(texts: list[str]) -> None:
    contexts = [f"{context:,}" for context in CONTEXTS]
    assert [text for text in texts if text in contexts] == contexts * len(PRECISIONS)


def test_a_log_axis_has_round_ticks(texts: list[str]) -> None:
    ticks = [text for text in texts if re.fullmatch(r"[\d,]*0", text)]
    assert ticks == ["10", "30", "100", "300", "1,000"] * len(PRECISIONS)


def test_series_and_panels_are_in_order_of_appearance(texts: list[str]) -> None:
    assert [text for text in texts if text in SIZES] == list(SIZES)
    assert [text for text in texts if text.startswith("precision")] == ["precision: fp32", "precision: bf16"]


def test_every_point_is_a_mark_and_every_spread_a_bar() -> None:
    svg = draw(bench_figure(), ".svg").decode()
    num_points = len(bench_figure().points)
    assert len(re.findall('class="mark"', svg)) == num_points
    assert len(re.findall(SPREAD, svg)) == num_points


def test_points_without_spread_have_no_bar() -> None:
    points = [Point(panel="", series="s", x=x, y=x) for x in (1.0, 2.0)]
    points.append(Point(panel="", series="s", x=3, y=3, low=2))
    points.append(Point(panel="", series="s", x=4, y=4, low=3, high=5))
    svg = draw(figure_of(points), ".svg").decode()
    assert len(re.findall(SPREAD, svg)) == 1


def test_a_spread_that_reaches_zero_runs_down_to_the_frame_of_a_log_axis() -> None:
    svg = draw(figure_of([Point(panel="", series="s", x=1, y=2, low=-1, high=3)]), ".svg").decode()
    ((bottom, top),) = re.findall(SPREAD, svg)
    assert float(bottom) == 280
    assert float(top) < 60


@pytest.mark.parametrize(("series", "has_legend"), [("", False), ("naive", True)])
def test_a_single_nameless_series_needs_no_legend(series: str, has_legend: bool) -> None:
    svg = draw(figure_of([Point(panel="", series=series, x=1, y=2)]), ".svg").decode()
    assert ('class="legend"' in svg) == has_legend


def test_long_subtitle_does_not_widen_the_chart() -> None:
    short = figure_of([Point(panel="", series="naive", x=1, y=2)])
    long = msgspec.structs.replace(short, subtitle="many words " * 30)
    widths = [float(re.findall(r'width="([\d.]+)"', draw(f, ".svg").decode())[0]) for f in (short, long)]
    assert widths[1] < widths[0] + 40


def test_more_series_than_colours_differ_by_shape() -> None:
    points = [Point(panel="", series=f"s{i}", x=1, y=i + 1) for i in range(12)]
    figure = figure_of(points)
    colours, lines = assign_colours([figure]), arrange(figure)
    assert len({(colours[name], shape_of(lines, name)) for name in lines.series}) == 12


def test_undrawable_points_are_counted_in_the_chart() -> None:
    points = [
        Point(panel="a", series="s", x=1, y=0),
        Point(panel="a", series="s", x=2, y=float("nan")),
        Point(panel="a", series="s", x=4, y=5, low=-1, high=9),
        Point(panel="a", series="s", x=8, y=6),
    ]
    joined = " ".join(svg_texts(figure_of(points)))
    assert "2 of 4 points not drawn" in joined
    assert "3 of 4" not in joined
    assert "not drawn" not in " ".join(svg_texts(figure_of(points[2:], log=False)))


def test_a_figure_without_points_says_so() -> None:
    assert "No points to draw." in svg_texts(figure_of([]))


def test_many_powers_of_two_are_thinned_and_not_rounded() -> None:
    points = [Point(panel="", series="s", x=2**i, y=5) for i in range(7, 17)]
    shown = [text for text in svg_texts(figure_of(points)) if re.fullmatch(r"[\d,]{3,}", text)]
    assert shown == ["128", "512", "2,048", "8,192", "32,768"]


def test_many_other_values_get_round_ticks() -> None:
    points = [Point(panel="", series="s", x=7.3 * i, y=5) for i in range(1, 100)]
    assert {"10", "30", "100", "300"} <= set(svg_texts(figure_of(points)))


def test_five_panels_each_have_their_axes() -> None:
    points = [Point(panel=f"p{i}", series="s", x=x, y=x) for i in range(5) for x in (128, 256)]
    drawn = svg_texts(figure_of(points))
    assert drawn.count("x") == 5
    assert [text for text in drawn if text.startswith("p")] == [f"p{i}" for i in range(5)]


def test_single_point_is_between_labelled_ticks() -> None:
    drawn = svg_texts(figure_of([Point(panel="", series="", x=512, y=33.3, low=30, high=35)]))
    assert "512" in drawn
    assert {"30", "32", "34"} <= set(drawn)


def test_page_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script>"
    points = (Point(panel="", series=name, x=1, y=1),)
    figure = msgspec.structs.replace(bench_figure(), title="a < b & c", points=points)
    save(figure, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert re.findall(r"<(script|link|iframe|object)\b[^>]*", page) == ["script", "script"]
    assert page.count("</script>") == 2
    assert "<title>a &lt; b &amp; c</title>" in page
    assert "\\u003c/script>\\u003cscript>alert(1)" in page
    assert len(page) < 120_000
    assert not re.search(r"""(?:src|href)\s*=\s*["']?https?://|\bimport\s*\(?["']https?://""", page)


@pytest.mark.parametrize("name", ["step.jpg", "step", "step.png.gz"])
def test_unsupported_suffix_lists_the_supported_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(StepscopeError) as caught:
        save(bench_figure(), tmp_path / name)
    assert all(suffix in str(caught.value) for suffix in SUFFIXES)
    assert list(tmp_path.iterdir()) == []


def test_draw_rejects_an_unsupported_suffix() -> None:
    with pytest.raises(ValueError, match=r"\.gif"):
        draw(figure_of([]), ".gif")


def test_missing_directory_hints_at_mkdir(tmp_path: Path) -> None:
    with pytest.raises(StepscopeError) as caught:
        save(bench_figure(), tmp_path / "absent" / "step.png")
    assert caught.value.hint == f"mkdir -p {tmp_path / 'absent'}"


def test_unwritable_directory_is_named() -> None:
    with pytest.raises(StepscopeError, match="cannot write") as caught:
        save(figure_of([]), Path("/proc/step.svg"))
    assert caught.value.hint


def test_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    taken = tmp_path / "step.svg"
    taken.mkdir()
    with pytest.raises(StepscopeError, match="is a directory"):
        save(figure_of([]), taken)
    assert list(tmp_path.iterdir()) == [taken]


def test_foreign_file_is_only_overwritten_with_force(tmp_path: Path) -> None:
    path = tmp_path / "step.svg"
    path.touch()
    check_figure(path, force=True)
    with pytest.raises(StepscopeError) as caught:
        check_figure(path, force=False)
    assert "--force" in caught.value.hint


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_our_figures_are_recognized_by_content(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"step{suffix}"
    save(bench_figure(), path)
    check_figure(path, force=False)
    path.write_bytes(path.read_bytes().replace(b"stepscope", b"somewhere"))
    with pytest.raises(StepscopeError, match="exists"):
        check_figure(path, force=False)


def test_the_mark_of_a_png_is_a_valid_chunk(tmp_path: Path) -> None:
    content = draw(bench_figure(), ".png")
    names, place = [], 8
    while place < len(content):
        size = int.from_bytes(content[place : place + 4], "big")
        name, data = content[place + 4 : place + 8], content[place + 8 : place + 8 + size]
        assert zlib.crc32(name + data) == int.from_bytes(content[place + 8 + size : place + 12 + size], "big")
        names.append(name)
        place += 12 + size
    assert names[:2] == [b"IHDR", b"tEXt"]
    assert names[-1] == b"IEND"


def test_mark_of_a_pdf_keeps_its_offsets() -> None:
    content = draw(bench_figure(), ".pdf")
    table = int(content.rsplit(b"startxref", 1)[1].split()[0])
    assert content[table : table + 4] == b"xref"
    assert content.endswith(b"%%EOF")


def test_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    path = tmp_path / "step.svg"
    save(figure_of([]), path)
    save(bench_figure(), path)
    assert bench_figure().title in path.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [path]

"""A report as files for a paper: every part has a file in the right format, and no foreign file is lost."""

import csv
import errno
import io
import os
import re
import struct
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from stepscope.errors import StepscopeError
from stepscope.explain.story.sections.breakdown import tabulate_dimensions
from stepscope.findings import Bars, Column, Exhibit, Report, Section, Table
from stepscope.render import export as export_module
from stepscope.render.drawing import draw_part
from stepscope.render.drawing.bars import chart_dimensions
from stepscope.render.drawing.lanes import place_spans
from stepscope.render.export import check_folder, export
from stepscope.render.paper import collect, name_apart, tidy
from tests.unit.render import report_samples
from tests.unit.render.report_parts import (
    Kernel,
    ask,
    break_down,
    categories_table,
    draw_roofline,
    kernels_of_step,
    lay_lanes,
)

FIGURES = {
    "step",
    "step-timeline",
    "breakdown-class",
    "breakdown-phase",
    "breakdown-module",
    "breakdown-op",
    "roofline",
    "memory-timeline",
    "attention",
    "ranks",
}
TABLES = {
    "facts",
    "findings",
    "breakdown-class",
    "breakdown-phase",
    "breakdown-module",
    "breakdown-op",
    "breakdown-kernel",
    "memory-categories",
    "memory-largest",
    "questions",
    "questions-1",
    "versions",
}


def report_of(*parts: Table | Bars) -> Report:
    """A small report: writing only tables is fast."""
    exhibits = tuple(Exhibit(key=f"part-{at}", part=part) for at, part in enumerate(parts))
    section = Section(key="parts", title="Parts", exhibits=exhibits)
    return msgspec.structs.replace(report_samples.one_run(), sections=(section,))


def texts_of(svg: bytes) -> list[str]:
    return [
        "".join(element.itertext()) for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("}text")
    ]


def list_files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("export") / "paper"
    export(report_samples.one_run(), place)
    return place


def test_every_part_has_its_files(folder: Path) -> None:
    figures = {f"figures/{key}{suffix}" for key in FIGURES for suffix in (".png", ".svg", ".pdf")}
    tables = {f"tables/{key}{suffix}" for key in TABLES for suffix in (".md", ".tex", ".csv")}
    assert set(list_files(folder)) == figures | tables | {"README.md", ".stepscope-export"}


def test_figures_have_the_format_of_their_suffix(folder: Path) -> None:
    for key in FIGURES:
        png = (folder / f"figures/{key}.png").read_bytes()
        assert png.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", png[16:24])
        root = ElementTree.fromstring((folder / f"figures/{key}.svg").read_bytes())
        assert width == pytest.approx(3 * float(root.attrib["width"]), abs=3)
        # None is wider than type of 12 can be read in on a page, or longer than a page.
        assert 300 < float(root.attrib["width"]) < 1100
        assert 90 < height / 3 < 1100
        pdf = (folder / f"figures/{key}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF-")
        assert pdf.rstrip().endswith(b"%%EOF")


def test_the_timeline_names_phases_layers_and_classes(folder: Path) -> None:
    texts = texts_of((folder / "figures/step-timeline.svg").read_bytes())
    assert {"One step as it ran", "forward", "backward", "optimizer", "time (ms)", "stream 7"} <= set(texts)
    assert {"5", "7"} <= set(texts)  # layers, by their numbers: their names have no room
    assert any(re.fullmatch(r"GEMM \d+\.\d%", text) for text in texts)


def test_bars_have_their_values(folder: Path) -> None:
    texts = texts_of((folder / "figures/breakdown-class.svg").read_bytes())
    own = sum(kernel.length_ns * kernel.count for kernel in kernels_of_step() if kernel.kind == "GEMM") / 1e6
    assert any(text.startswith(f"{own:.2f} ms, ") for text in texts)
    assert {"3.90 ms", "2.90 ms", "hidden", "exposed"} <= set(texts_of((folder / "figures/ranks.svg").read_bytes()))


def test_the_roofline_lists_its_largest_points(folder: Path) -> None:
    texts = texts_of((folder / "figures/roofline.svg").read_bytes())
    assert "mm 2048×768 · 768×3072" in texts
    assert "bf16 tensor cores, 989 TFLOP/s" in texts
    assert texts.count("8") == 2  # at the point and in the list


def test_csv_reads_back_in_full_precision(folder: Path) -> None:
    rows = list(csv.reader(io.StringIO((folder / "tables/memory-largest.csv").read_bytes().decode())))
    table = categories_table(60)
    assert rows[0] == [column.key for column in table.columns]
    assert [tuple(row) for row in rows[1:]] == [tuple(map(str, row)) for row in table.rows]


def test_facts_are_raw_for_programs_and_formatted_for_people(folder: Path) -> None:
    rows = {row["key"]: row for row in csv.DictReader(io.StringIO((folder / "tables/facts.csv").read_text()))}
    assert rows["mfu"]["value"] == "0.0631"
    assert rows["mfu"]["shown"] == "6.3%"
    assert "0.0631" not in (folder / "tables/facts.md").read_text()


def test_latex_has_a_label_and_no_float_longer_than_a_page(folder: Path) -> None:
    source = (folder / "tables/memory-largest.tex").read_text()
    assert source.endswith("  \\label{tab:memory-largest}\n\\end{table}\n")
    assert source.count(r"\\") == 41
    assert "First 40 of 60 rows" in source


def test_sentences_become_paragraphs_in_latex(folder: Path) -> None:
    source = (folder / "tables/questions.tex").read_text()
    assert re.search(r"\\begin\{tabular\}\{p\{0\.\d\d\\linewidth\}lp\{0\.\d\d\\linewidth\}\}", source)
    # `\\` would end a line of the paragraph and not the row.
    assert r"\\" not in source
    assert source.count(r"\tabularnewline") == 1 + len(ask().questions)


def test_the_readme_names_every_file_and_how_it_was_made(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    report = report_samples.one_run()
    assert report.sentence in text
    for key in FIGURES:
        assert f"`figures/{key}`" in text
    for key in TABLES:
        assert f"`tables/{key}`" in text
    assert report.commands[0].text in text
    assert report.sections[0].lead in text
    assert r"\includegraphics[width=\linewidth]{figures/step.pdf}" in text
    assert "precision: the stage was not run" in text


def test_each_of_two_runs_has_a_file() -> None:
    drawings, listings = collect(tidy(report_samples.two_runs()))
    keys = [drawing.key for drawing in drawings]
    assert {"step-timeline-a", "step-timeline-b", "memory-a", "changes"} <= set(keys)
    assert "memory-b" not in keys  # B has none
    titles = {drawing.key: drawing.title for drawing in drawings}
    assert titles["step-timeline-b"] == "B: One step as it ran"
    assert {"categories-a", "categories-b"} <= {listing.key for listing in listings}


def test_breakdown_of_two_runs_shows_the_change() -> None:
    before = [Kernel(kind="GEMM", phase="forward", layer="layers.0", module="m", name="mm", length_ns=3_000_000)]
    tables = dict(tabulate_dimensions(break_down([before, before * 2], [4e6, 8e6])))
    columns = [column.key for column in tables["class"].columns]
    row = dict(zip(columns, tables["class"].rows[0], strict=True))
    assert (row["ms_a"], row["ms_b"], row["change_ms"]) == (3.0, 6.0, 3.0)


def test_bars_of_modules_are_sorted_by_time_and_fold_alike_layers() -> None:
    bars = {one.key: one.bars for one in chart_dimensions(break_down([kernels_of_step()], [6e7]))}
    labels, times = bars["module"].labels, bars["module"].values[0]
    assert "12 × layers.*.attention.qkv" in labels
    assert list(times) == sorted(times, key=lambda time: -(time or 0))
    assert sum(time or 0 for time in times) == pytest.approx(sum(time or 0 for time in bars["class"].values[0]))


def test_short_kernels_are_as_high_as_their_share_of_the_time() -> None:
    kernels = [Kernel(kind="GEMM", phase="forward", layer="", module="", name="mm", length_ns=1_000, count=2000)]
    lanes = lay_lanes(kernels, gap_ns=3_000)
    boxes = place_spans(lanes, lanes.tracks[-1], 600.0, 1.5)
    assert 300 < len(boxes) <= 400
    assert sum(box.high - box.low for box in boxes) / len(boxes) == pytest.approx(0.25, abs=0.01)
    assert not any(box.name for box in boxes)


def test_many_kernels_make_few_marks() -> None:
    kernels = [kernel for _ in range(60) for kernel in kernels_of_step()]
    assert draw_part(lay_lanes(kernels)).count("<rect") < 4000


def test_undrawable_points_are_noted() -> None:
    roofline = draw_roofline()
    broken = msgspec.structs.replace(roofline.points[0], intensity=float("nan"))
    texts = texts_of(draw_part(msgspec.structs.replace(roofline, points=(broken, *roofline.points[1:]))).encode())
    assert any(text.startswith("1 of 8 points not drawn") for text in texts)


def test_empty_report_still_has_figures_and_tables() -> None:
    drawings, listings = collect(tidy(report_samples.empty()))
    assert len(drawings) == 9
    for drawing in drawings:
        assert ElementTree.fromstring(drawing.draw()).tag.endswith("}svg")
    assert len(listings) == 9


@pytest.fixture(scope="module")
def hostile_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hostile report: all tables, and one figure of each kind."""
    report = report_samples.hostile()
    kinds: set[str] = set()
    sections = []
    for section in report.sections:
        kept = []
        for exhibit in section.exhibits:
            kind = type(exhibit.part).__name__
            if kind not in kinds or kind in ("Table", "Questions"):
                kept.append(exhibit)
                kinds.add(kind)
        sections.append(msgspec.structs.replace(section, exhibits=tuple(kept)))
    place = tmp_path_factory.mktemp("hostile") / "inner" / "paper"
    place.parent.mkdir()
    export(msgspec.structs.replace(report, sections=tuple(sections)), place)
    return place


def test_hostile_names_are_harmless(hostile_folder: Path) -> None:
    assert [path.name for path in hostile_folder.parent.iterdir()] == ["paper"]
    assert [path.name for path in hostile_folder.parent.parent.iterdir()] == ["inner"]
    for path in hostile_folder.rglob("*.svg"):
        root = ElementTree.fromstring(path.read_bytes())
        assert not [element for element in root.iter() if element.tag.endswith(("}script", "}image", "}a"))]
        assert not [name for element in root.iter() for name in element.attrib if name.startswith("on")]
        assert path.stat().st_size < 1_000_000
    for path in hostile_folder.rglob("*.md"):
        text = path.read_text()
        outside_code = re.sub(r"^ {6}.*$", "", text, flags=re.MULTILINE)  # commands are indented as code
        assert not re.search(r"(?<!\\)<(script|img)", outside_code), path.name
        assert len(text) < 2_000_000
    for path in (path for path in hostile_folder.rglob("*") if path.is_file() and path.suffix not in (".png", ".pdf")):
        assert not re.search("[\u202a-\u202e\u2066-\u2069\x00\x1b\u200b]", path.read_text()), path.name
        assert "/home/eve" not in path.read_text(), path.name


def test_hostile_names_stay_inside_their_cells_in_latex(hostile_folder: Path) -> None:
    for path in (hostile_folder / "tables").glob("*.tex"):
        source = path.read_text()
        assert source.count(r"\begin{") == source.count(r"\end{") == 2
        assert all(character.isascii() or character in "…×" for character in source), path.name
        assert max(map(len, source.splitlines())) < 20_000


def test_keys_become_file_names() -> None:
    keys = ["../../etc/passwd", "/abs", "A" * 1000, "..", "", "a b", "a-b", "a\nb"]
    names = name_apart(keys)
    assert names[0] == "etc-passwd"
    assert names[3:] == ["part", "part-2", "a-b", "a-b-2", "a-b-3"]
    assert all(re.fullmatch(r"[a-z0-9-]{1,70}", name) for name in names)


def test_a_second_export_replaces_the_first(tmp_path: Path) -> None:
    place = tmp_path / "paper"
    export(report_of(categories_table()), place)
    assert (place / "tables/part-0.csv").exists()
    files = export(report_of(), place)
    assert not (place / "tables/part-0.csv").exists()
    assert sorted(path.relative_to(place).as_posix() for path in files) == list_files(place)[1:]
    assert [path.name for path in tmp_path.iterdir()] == ["paper"]


@pytest.mark.parametrize("name", ["thesis.tex", "tables/mine.csv", "figures/own/plot.py", ".git/HEAD"])
def test_foreign_files_are_never_touched(tmp_path: Path, name: str) -> None:
    place = tmp_path / "paper"
    export(report_of(), place)
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).write_text("work of months")
    with pytest.raises(StepscopeError, match="not part of an export") as caught:
        check_folder(place)
    assert name.split("/")[0] in str(caught.value)
    assert (place / name).read_text() == "work of months"


def test_foreign_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Mine")
    with pytest.raises(StepscopeError, match=r"not part of an export: `README\.md`"):
        check_folder(tmp_path)
    with pytest.raises(StepscopeError, match="not a directory"):
        check_folder(tmp_path / "README.md")
    with pytest.raises(StepscopeError, match="directory not found") as caught:
        check_folder(tmp_path / "a" / "b")
    assert caught.value.hint == f"mkdir -p {tmp_path / 'a'}"


def test_pipe_instead_of_the_file_list_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".stepscope-export")
    with pytest.raises(StepscopeError, match=r"\.stepscope-export"):
        check_folder(tmp_path)


def test_empty_directory_is_filled(tmp_path: Path) -> None:
    inode = tmp_path.stat().st_ino
    export(report_of(), tmp_path)
    assert (tmp_path / "README.md").exists()
    assert tmp_path.stat().st_ino == inode


def test_missing_drawing_library_is_reported_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "find_spec", {"vl_convert": None}.get)
    with pytest.raises(StepscopeError, match="not installed"):
        check_folder(tmp_path / "paper")


@pytest.mark.parametrize("had_one", [False, True])
def test_full_disk_keeps_the_earlier_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, had_one: bool) -> None:
    place = tmp_path / "paper"
    if had_one:
        export(report_of(), place)
    before = list_files(tmp_path)

    def fail(*args: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    # The last file to be written: all others exist by then.
    monkeypatch.setattr(export_module, "_describe", fail)
    with pytest.raises(StepscopeError, match="No space left on device") as caught:
        export(report_of(categories_table()), place)
    assert caught.value.detail == "nothing was written"
    assert list_files(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == (["paper"] if had_one else [])


def test_characters_unknown_to_latex_are_spelled_out(tmp_path: Path) -> None:
    columns = (Column(key="name", label="name"),)
    table = Table(title="Größe", columns=columns, rows=(("层 × é\N{SNOWMAN}",),))
    export(report_of(table), tmp_path / "paper")
    source = (tmp_path / "paper/tables/part-0.tex").read_text()
    assert "U+5C42 $\\times$ éU+2603" in source
    assert "Größe" in source
    assert "层" in (tmp_path / "paper/tables/part-0.md").read_text()


def test_text_after_many_numbers_is_cleaned() -> None:
    assert tidy((*range(20), "/home/eve/x")) == (*range(20), "~/x")
    numbers = tuple(range(20))
    assert tidy(numbers) is numbers

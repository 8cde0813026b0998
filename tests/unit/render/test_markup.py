"""Markdown and LaTeX round trips: a Markdown parser and a small LaTeX reader must return the original cells."""

import re
from itertools import pairwise

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from stepscope.findings import Column, Table
from stepscope.render.formats import Format, visible
from stepscope.render.tables import render

from .examples import bench_table

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
TRICKY = [
    "a|b",
    r"a\|b",
    "trailing\\",
    r"\\|",
    "void k<int, 4>(float*)",
    "*bold* _it_ __b__ snake_case `code`",
    "[link](x) ![i](y) ~~gone~~ $x$ &amp; <br>",
    "# not a heading",
    "two\nlines",
    "100 % & #1 {x} ~ ^ 50$",
    "1.5× ± 2 µs – 日本",
    "--compile -- -",
    "[0] *",
    "",
]


def one_cell(text: str) -> Table:
    return Table(title=text, columns=(Column(key="k", label=text), Column(key="v", label="v")), rows=((text, "end"),))


def printed(text: str) -> str:
    """Return a cell as a reader sees it: one line, without unprintable characters."""
    joined = " ".join(text.split())
    return visible(joined)


def read_markdown(source: str) -> list[str]:
    """Return the plain text of every inline run, as GitHub shows it."""
    tokens = PARSER.parse(source)
    runs = [token.children or [] for token in tokens if token.type == "inline"]
    for run in runs:
        assert {child.type for child in run} <= {"text", "text_special", "strong_open", "strong_close"}
    return ["".join(child.content for child in run) for run in runs]


@pytest.mark.parametrize("text", TRICKY)
def test_tricky_cells_read_back_from_markdown(text: str) -> None:
    assert read_markdown(render(one_cell(text), Format.MD))[-4:] == [printed(text), "v", printed(text), "end"]


@given(st.text(max_size=30))
@example(r"\|")
@example("_")
@example("a_*_b")
def test_any_cell_reads_back_from_markdown(text: str) -> None:
    assert read_markdown(render(one_cell(text), Format.MD))[-4:] == [printed(text), "v", printed(text), "end"]


@pytest.mark.parametrize("note", ["# one", "- two", "+ three", "4. four", "5) five", "a | b", "=== six"])
def test_notes_are_one_flat_list(note: str) -> None:
    table = msgspec.structs.replace(bench_table(), notes=(note, "last"))
    source = render(table, Format.MD)
    kinds = [token.type for token in PARSER.parse(source)]
    assert kinds.count("bullet_list_open") == 1
    assert kinds.count("list_item_open") == 2
    assert "heading_open" not in kinds
    assert "ordered_list_open" not in kinds
    assert read_markdown(source)[-2:] == [note, "last"]


def test_markdown_aligns_numbers_right_and_text_left() -> None:
    lines = render(bench_table(), Format.MD).splitlines()
    assert lines[0] == "**One training step of five models on one H200**"
    rule = [cell.strip() for cell in lines[3].strip("|").split("|")]
    assert [cell.endswith(":") for cell in rule] == [False, True, False, *[True] * 9, False]
    assert all(len(a) == len(b) for a, b in pairwise(lines[2:43]))


def test_an_empty_table_is_still_a_markdown_table() -> None:
    source = render(msgspec.structs.replace(bench_table(), rows=()), Format.MD)
    assert "table_open" in [t.type for t in PARSER.parse(source)]
    assert "(no rows)" in source


LATEX_WORDS = {
    r"\textbackslash{}": "\\",
    r"\textasciitilde{}": "~",
    r"\textasciicircum{}": "^",
    r"\textless{}": "<",
    r"\textgreater{}": ">",
    r"\textbar{}": "|",
    r"\textasciigrave{}": "`",
    r"\textendash{}": "–",
    r"\textemdash{}": "—",
    r"$\times$": "×",
    r"$\pm$": "±",
    r"$\mu$": "µ",
    r"\{": "{",
    r"\}": "}",
    r"\%": "%",
    r"\_": "_",
    r"\&": "&",
    r"\#": "#",
    r"\$": "$",
    "{[}": "[",
    "{*}": "*",
    "{}": "",
    "''": '"',
    "$-$": "-",
}
LATEX_TOKEN = re.compile("|".join(map(re.escape, sorted(LATEX_WORDS, key=len, reverse=True))))


def read_latex(source: str) -> str:
    """Undo the escapes; everything that LaTeX would read as markup must be escaped."""
    assert not re.search(r"[\\{}%_&#$~^<>|\"`\[*]|--", LATEX_TOKEN.sub("x", source)), source
    return LATEX_TOKEN.sub(lambda match: LATEX_WORDS[match[0]], source)


def latex_row(table: Table) -> str:
    """Return the only row of a table, between its lines."""
    (row,) = re.findall(r"\\midrule\n    (.*) \\\\\n    \\bottomrule", render(table, Format.LATEX))
    return str(row)


@given(st.text(st.sampled_from('aZ5 .,:-?!()]=+/@;\\{}%_&#$~^<>|"`[*–—×±µ'), max_size=20))
@example("--compile")
@example("-–-—-")
@example("\\\\%")
def test_any_cell_reads_back_from_latex(text: str) -> None:
    row = latex_row(one_cell(text))
    cell = row.removesuffix(" & end")
    if printed(text) == "–":
        assert cell == "--"
    else:
        assert read_latex(cell) == printed(text)


@pytest.mark.parametrize(
    ("character", "written"),
    [
        ("%", r"\%"),
        ("_", r"\_"),
        ("&", r"\&"),
        ("#", r"\#"),
        ("$", r"\$"),
        ("~", r"\textasciitilde{}"),
        ("^", r"\textasciicircum{}"),
        ("\\", r"\textbackslash{}"),
        ("×", r"$\times$"),
        ("±", r"$\pm$"),
        ("–", r"\textendash{}"),
        ("µ", r"$\mu$"),
        ("μ", r"$\mu$"),
        ("≤", r"$\leq$"),
        ("…", r"\ldots{}"),
        ("\x07", r"\textbackslash{}u0007"),
    ],
)
def test_special_characters_are_escaped_everywhere_in_latex(character: str, written: str) -> None:
    text = f"a{character}b"
    source = render(msgspec.structs.replace(one_cell(text), notes=(text,)), Format.LATEX)
    assert source.count(f"a{written}b") == 4
    assert text not in source.replace(f"a{written}b", "")


def test_latex_is_a_complete_booktabs_table() -> None:
    source = render(bench_table(), Format.LATEX)
    skeleton = re.findall(r"\\(?:begin|end)\{\w+\}|\\(?:top|mid|bottom)rule|\\caption|\\footnotesize", source)
    assert skeleton == [
        r"\begin{table}",
        r"\caption",
        r"\begin{tabular}",
        r"\toprule",
        r"\midrule",
        r"\bottomrule",
        r"\end{tabular}",
        r"\footnotesize",
        r"\footnotesize",
        r"\end{table}",
    ]
    assert r"\begin{tabular}{lrlrrrrrrrrrl}" in source
    assert r"1.00$\times$" in source
    assert r"2.2\%" in source
    rows = [line for line in source.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 41
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {12}


def test_a_negative_number_has_a_minus_sign_in_latex() -> None:
    columns = (Column(key="delta_ms", label="delta ms", kind="ms"),)
    assert latex_row(Table(title="t", columns=columns, rows=((-1.5,),))) == "$-$1.50"


def test_empty_latex_table_keeps_its_lines() -> None:
    source = render(msgspec.structs.replace(bench_table(), rows=()), Format.LATEX)
    assert "\\midrule\n    \\bottomrule" in source
    assert r"{\footnotesize (no rows)\par}" in source

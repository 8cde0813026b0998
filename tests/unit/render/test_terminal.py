"""Tables in a terminal: alignment, and how they are made to fit."""

from html import unescape

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from stepscope.findings import Advice, Cell, Column, Finding, Page, Report, Table
from stepscope.render.formats import Format
from stepscope.render.site import write_site
from stepscope.render.tables import render
from stepscope.render.terminal import render_page, summarize_report

from .examples import bench_table
from .report_samples import empty, hostile, one_run, partial, two_runs


def lines_of(table: Table, *, width: int | None = None, detail: bool = False) -> list[str]:
    return render(table, Format.TEXT, width=width, detail=detail).splitlines()


def kernel_table(name: str, num_rows: int = 1) -> Table:
    columns = (Column(key="kernel", label="kernel"), Column(key="total_ms", label="total ms", kind="ms"))
    rows = tuple((f"{name}{row}", 1.5) for row in range(num_rows))
    return Table(title="Kernels", columns=columns, rows=rows)


def test_the_whole_layout() -> None:
    table = Table(
        title="Two steps",
        columns=(
            Column(key="size", label="size"),
            Column(key="step_ms", label="step ms", kind="ms"),
            Column(key="speedup", label="vs fp32", kind="ratio"),
            Column(key="sd_ms", label="sd ms", kind="ms", detail=True),
        ),
        rows=(("small", 0.5, 1.0, 0.1), ("xl", 1234.5, 12.34, 0.1), ("2.7B", None, None, None)),
        notes=("Measured twice.",),
    )
    assert lines_of(table) == [
        "Two steps",
        "",
        "size     step ms  vs fp32",
        "─────────────────────────",
        "small      0.500    1.00×",
        "xl     1,234       12.34×",
        "2.7B           –        –",
        "",
        "Measured twice.",
    ]


def test_detail_columns_are_shown_on_request_only() -> None:
    assert "p20" not in "\n".join(lines_of(bench_table()))
    assert "p20" in "\n".join(lines_of(bench_table(), detail=True))


def test_table_of_detail_columns_shows_them() -> None:
    table = Table(title="t", columns=(Column(key="a", label="alpha", detail=True),), rows=(("x",),))
    assert "alpha" in lines_of(table)


@pytest.mark.parametrize("detail", [False, True])
@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int, detail: bool) -> None:
    assert max(map(cell_len, lines_of(bench_table(), width=width, detail=detail))) <= width


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_narrow_tables_keep_every_number(width: int) -> None:
    natural = "\n".join(lines_of(bench_table())).split()
    narrow = set("\n".join(lines_of(bench_table(), width=width)).split())
    assert set(natural) - narrow - set("".join(natural)) <= {"─" * 134}


def test_labels_wrap_before_anything_else_changes() -> None:
    lines = lines_of(bench_table(), width=120)
    header = lines[2:4]
    assert header[0].split() == ["forward", "backward", "optimizer", "peak", "vs"]
    assert " ".join(header[1].split()) == (
        "size context precision ms ms ms step ms tokens/s TFLOP/s MFU memory fp32 notes"
    )


def test_remarks_stay_in_their_rows_where_breaking_labels_is_enough() -> None:
    lines = lines_of(bench_table(), width=120)
    assert lines[5].endswith("  spread 12 %")
    assert "[1]" not in "\n".join(lines)


def test_long_remarks_move_below_a_split_table_too() -> None:
    rows = tuple((*row[:-1], "CUDA out of memory: tried to allocate 12 GiB") for row in bench_table().rows)
    lines = lines_of(msgspec.structs.replace(bench_table(), rows=rows), width=70)
    assert "[1] CUDA out of memory: tried to allocate 12 GiB" in lines
    assert sum(line.endswith("  [1]") for line in lines) == len(rows)


def test_long_remarks_move_below_under_one_number_each() -> None:
    remark = "CUDA out of memory: tried to allocate 12 GiB"
    columns = (
        Column(key="size", label="size"),
        Column(key="step_ms", label="step ms", kind="ms"),
        Column(key="notes", label="notes"),
    )
    rows = (
        ("a", 1.0, ""),
        ("b", None, remark),
        ("c", None, remark),
        ("d", 2.0, "ok"),
        ("e", 2.0, "other remark"),
    )
    lines = lines_of(Table(title="t", columns=columns, rows=rows), width=40)
    assert lines[5:10] == [
        "a     1.00",
        "b        –  [1]",
        "c        –  [1]",
        "d     2.00  ok",
        "e     2.00  [2]",
    ]
    assert " ".join(lines[11:]).split() == f"[1] {remark} [2] other remark".split()


def test_remarks_that_differ_in_every_row_are_names_and_stay() -> None:
    columns = (Column(key="total_ms", label="ms", kind="ms"), Column(key="kernel", label="kernel"))
    rows = tuple((1.0, f"kernel_{'x' * 40}_{row}") for row in range(12))
    lines = lines_of(Table(title="t", columns=columns, rows=rows), width=40)
    assert len(lines) == 4 + 12
    assert lines[-1].endswith("x_11")


def test_long_names_are_shortened_in_the_middle_and_numbers_are_not() -> None:
    row = lines_of(kernel_table("void at::native::" + "vectorized_" * 20 + "kernel"), width=60)[-1]
    assert cell_len(row) <= 60
    assert row.startswith("void at::native::")
    assert "…" in row
    assert row.endswith("kernel0   1.50")


def test_two_long_texts_are_both_shortened() -> None:
    columns = tuple(Column(key=k, label=k) for k in ("kernel", "operator", "class"))
    table = Table(title="t", columns=columns, rows=(("k" * 90, "o" * 90, "GEMM"),))
    assert max(map(cell_len, lines_of(table, width=70))) <= 70


def test_blocks_repeat_the_columns_that_name_the_row() -> None:
    text = render(bench_table(), Format.TEXT, width=80, detail=True)
    blocks = [part for part in text.split("\n\n") if "─" in part]
    assert len(blocks) >= 2
    assert all("small       128  fp32" in block for block in blocks)
    widths = [max(map(cell_len, block.splitlines())) for block in blocks]
    assert max(widths) - min(widths) < 20


def test_names_as_wide_as_the_terminal_are_not_repeated() -> None:
    columns = tuple(Column(key=f"c{i}", label=f"column{i}") for i in range(8))
    table = Table(title="t", columns=columns, rows=(tuple(f"value_number_{i}" for i in range(8)),))
    lines = lines_of(table, width=60)
    assert max(map(cell_len, lines)) <= 60
    assert all(any(f"value_number_{i}" in line for line in lines) for i in range(8))


def test_long_notes_and_titles_wrap_at_the_terminal() -> None:
    table = msgspec.structs.replace(kernel_table("k"), notes=("word " * 40,), title="title " * 20)
    assert max(map(cell_len, lines_of(table, width=50))) <= 50


def test_wide_characters_take_two_columns() -> None:
    table = msgspec.structs.replace(kernel_table("k"), rows=(("日本", 1.0), ("abcd", 2.0)))
    *_, japanese, ascii_row = lines_of(table)
    assert cell_len(japanese) == cell_len(ascii_row)


def test_an_escape_sequence_does_not_reach_the_terminal() -> None:
    table = kernel_table("evil\x1b[31m\nname\u202e")
    text = render(table, Format.TEXT)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert len(text.splitlines()) == 5


@pytest.mark.parametrize("width", [None, 40])
def test_an_empty_table_says_so(width: int | None) -> None:
    table = msgspec.structs.replace(bench_table(), rows=())
    text = render(table, Format.TEXT, width=width)
    assert "(no rows)" in text
    assert "tokens/s" in text


def test_table_without_columns_is_only_a_title() -> None:
    assert lines_of(Table(title="Nothing", columns=(), rows=())) == ["Nothing", "", "(no rows)"]


cells = st.one_of(st.none(), st.text(max_size=60), st.floats(), st.integers(-(10**15), 10**15))


@given(pairs=st.lists(st.tuples(cells, cells), max_size=6), width=st.integers(1, 100))
def test_any_cell_at_any_width_gives_one_line_per_row_and_block(pairs: list[tuple[Cell, Cell]], width: int) -> None:
    columns = (Column(key="a", label="a"), Column(key="b", label="b", kind="ms"), Column(key="c", label="c"))
    rows = tuple((f"row{index}", *pair) for index, pair in enumerate(pairs))
    lines = lines_of(Table(title="", columns=columns, rows=rows), width=width)
    num_blocks = sum(line != "" and set(line) == {"─"} for line in lines)
    starts = [line.split()[0] for line in lines if line.startswith("row")]
    assert num_blocks >= 1
    assert starts == [row[0] for row in rows] * num_blocks


def test_a_page_lists_fixes_to_paste_and_then_remarks() -> None:
    fixable = Finding(
        code="SS007",
        title="Optimizer launches 888 kernels per step",
        evidence="the update takes 3 ms",
        action="Use `fused=True`",
        fix="with x:\n    step()",
        saving_ns=9_010_000,
        share=0.148,
    )
    remark = Finding(code="SS014", title="3 kernels take 72% of the GPU time", evidence="a, b, c", action="Look")
    again = msgspec.structs.replace(fixable, code="SS008", title="t", saving_ns=None)
    page = Page(headline="h", tables=(), findings=(fixable, again, remark))
    assert render_page(page, width=100).splitlines()[2:] == [
        "Findings (to explain one: stepscope rule SS007)",
        "SS007  Optimizer launches 888 kernels per step (saves about 9.01 ms, 14.8%)",
        "       the update takes 3 ms",
        "       Use `fused=True`:",
        "         with x:",
        "             step()",
        "SS008  t",
        "       the update takes 3 ms",
        "       Same fix as SS007",
        "",
        "Remarks",
        "SS014  3 kernels take 72% of the GPU time: a, b, c. Look",
    ]
    joined = (
        msgspec.structs.replace(fixable, joint_ns=9_010_000, joint_share=0.148, also=(again,)),
        msgspec.structs.replace(
            fixable, code="SS009", fix="a", saving_ns=2_000_000, joint_ns=500_000, joint_share=0.01
        ),
    )
    shown = render_page(msgspec.structs.replace(page, findings=joined), width=100)
    assert "All fixes together save about 9.51 ms, 15.8%. Savings overlap: they do not add up." in shown
    assert "Also explains this time (SS008): t\nSS009" in shown
    assert "(saves about 2.00 ms, 14.8%; 0.50 ms once the fixes above are in)" in shown
    assert "(saves nothing alone; 0.50 ms once the fixes above are in, which shift the bottleneck)" in render_page(
        msgspec.structs.replace(page, findings=(msgspec.structs.replace(joined[1], saving_ns=0, share=0.0),)), width=100
    )
    stalls = msgspec.structs.replace(remark, saving_ns=2_000_000, share=0.1)
    assert "3 kernels take 72% of the GPU time (saves up to 2.00 ms, 10.0%): a, b, c." in render_page(
        msgspec.structs.replace(page, findings=(stalls,)), width=100
    )
    short = msgspec.structs.replace(fixable, fix="step()")
    shown = render_page(msgspec.structs.replace(page, findings=(short,)), width=100)
    assert "       Use `fused=True`: step()\n" in shown
    assert "Findings" not in render_page(msgspec.structs.replace(page, findings=(remark,)), width=100)
    assert render_page(msgspec.structs.replace(page, findings=()), width=100).endswith("No findings\n")


# --- a report in a few lines ----------------------------------------------------------------------------------------


def test_summary_repeats_the_page() -> None:
    report = one_run()
    headline, step, findings, quality = summarize_report(report)
    page = unescape(write_site(report)).replace("\xa0", " ")
    assert headline == report.sentence
    assert step.startswith("step: 60.9 ms, GPU busy ")
    assert step.partition(", ")[2] in page
    cards = [one.finding for one in report.advice or () if not one.finding.is_remark]
    assert all(one.title in findings for one in cards[:3])
    assert "−27.9 ms" in findings
    assert "−27.9 ms" in page
    assert findings.endswith(f"; {len(cards) - 3} more")
    assert quality == f"quality: unreliable. {report.soundness.sentence}"


def test_summary_has_the_joint_saving_of_the_page() -> None:
    report = one_run()
    cards = [one for one in report.advice or () if not one.finding.is_remark]
    adds = [{"joint_ns": ns, "joint_share": ns / 60.91e6} for ns in (20_000_000, 1_500_000)]
    joined = tuple(
        msgspec.structs.replace(one, finding=msgspec.structs.replace(one.finding, **added))
        for one, added in zip(cards, adds, strict=False)
    )
    told = msgspec.structs.replace(report, advice=joined)
    assert summarize_report(told)[2].endswith("; all fixes −21.5 ms")
    assert "−21.5 ms" in write_site(told)
    assert "all fixes" not in summarize_report(msgspec.structs.replace(report, advice=joined[:1]))[2]


def test_summary_says_that_a_fix_saves_nothing_alone() -> None:
    finding = Finding(code="SS005", title="fp32 without tensor cores", evidence="e", fix="f", saving_ns=0, joint_ns=9)
    report = msgspec.structs.replace(one_run(), advice=(Advice(finding=finding),))
    assert summarize_report(report)[2] == "findings: fp32 without tensor cores (saves nothing alone)"


def test_summary_of_two_runs_has_both_steps() -> None:
    step = summarize_report(two_runs())[1]
    assert step.startswith("step: A: 141.6 ms, GPU busy ")
    assert "; B: 60.9 ms, GPU busy " in step


@pytest.mark.parametrize("report", [partial(), empty(), hostile()], ids=["partial", "empty", "hostile"])
def test_summary_is_four_printable_lines(report: Report) -> None:
    lines = summarize_report(report)
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines)


def test_summary_says_why_findings_are_missing() -> None:
    report = one_run()
    assert summarize_report(msgspec.structs.replace(report, advice=()))[2] == "findings: none"
    without = msgspec.structs.replace(report, advice=None, picture=None)
    assert summarize_report(without)[2] == "findings: none, this run has no kernel trace"
    assert "peak memory 4.83 GiB" in summarize_report(without)[1]

"""The page of a report as text: its content without a script, and that hostile text cannot escape."""

import base64
import hashlib
import json
import re
from html import unescape
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.files import is_ours
from stepscope.findings import (
    CHANGES,
    Advice,
    Copyable,
    Exhibit,
    Fact,
    Finding,
    Missing,
    Part,
    Report,
    Section,
    SideBySide,
)
from stepscope.render.drawing.colours import assign_colours, choose_ink, colour_of
from stepscope.render.formats import COPYABLE, clean, hide_private
from stepscope.render.site import write_site
from stepscope.render.site.packing import pack_breakdown
from tests.unit.render.report_parts import ask, break_down, categories_table, draw_attention, kernels_of_step
from tests.unit.render.report_samples import HOSTILE, empty, hostile, huge, many_runs, one_run, partial, two_runs

_VOID = {"meta", "input", "br"}
# The attributes allowed on our pages: none that run code, style or fetch.
_ATTRIBUTES = {
    "aria-hidden", "aria-label", "aria-labelledby", "aria-pressed", "charset", "class", "content", "data-fact",
    "data-key", "data-kind", "data-theme", "data-v", "dir", "hidden", "href", "http-equiv", "id", "lang", "max", "name",
    "placeholder", "role", "scope", "tabindex", "type", "value",
    # Attributes of drawings.
    "cx", "cy", "data-group", "data-mark", "fill", "fill-opacity", "font-size", "font-weight", "height", "paint-order",
    "min", "patterntransform", "patternunits",
    "points", "r", "step", "stroke", "stroke-dasharray", "stroke-linejoin", "stroke-width", "text-anchor",
    "viewbox", "width", "x", "x1", "x2", "y", "y1", "y2",
}  # fmt: skip


class Reader(HTMLParser):
    """The elements of a page, checked to be closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def visible(page: str) -> str:
    """Return the text of a page without a script, on one line."""
    body = re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", body)))


@pytest.mark.parametrize("sample", [one_run, two_runs, many_runs, partial, empty, huge, hostile])
def test_page_is_well_formed_and_has_no_inline_code(sample: Any) -> None:
    reader = Reader(write_site(sample()))
    assert [tag for tag, _ in reader.tags].count("script") == 2
    assert {name for _, attributes in reader.tags for name in attributes} <= _ATTRIBUTES
    hrefs = [attributes["href"] or "" for _, attributes in reader.tags if "href" in attributes]
    assert all(href.startswith("#") for href in hrefs)
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {href[1:] for href in hrefs} <= set(ids)


def test_the_first_screen_needs_no_script() -> None:
    report = one_run()
    text = visible(write_site(report))
    for expected in (
        report.title,
        report.sentence,
        "60.9 ms",
        "4.83 GiB",
        "33,624",
        "Launch-bound: the GPU is idle 79% of the step",
        "−27.9 ms · 45.8% of the step",
        "Show 2 more",
        "stepscope rule SS001",
        "Charts, search and sorting need JavaScript.",
        "Unreliable. The steps spread over 18% of the median.",
    ):
        assert expected in text


def test_a_comparison_shows_both_values_and_their_ratio() -> None:
    text = visible(write_site(two_runs()))
    assert "60.9 ms from 141.6 ms 0.43×" in text
    assert "the host from the GPU tokens" not in text
    odd = (
        Fact(key="step", label="step", value=1.5, kind="ms", before=0.0),
        Fact(key="x", label="x", value=None, before=2),
    )
    assert "1.50 ms from 0 ms" in visible(write_site(msgspec.structs.replace(two_runs(), facts=odd)))


def test_a_page_names_only_its_own_script_and_style_in_its_policy() -> None:
    page = write_site(one_run())
    policy = unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1])  # type: ignore[index]
    for tag in ("style", "script"):
        body = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert len(body) == 1
        digest = base64.b64encode(hashlib.sha256(body[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_hostile_names_stay_text_and_short() -> None:
    page = write_site(hostile())
    reader = Reader(page)
    assert not [tag for tag, _ in reader.tags if tag in ("img", "iframe", "b")]
    assert {(attributes["class"] or "").split()[0] for tag, attributes in reader.tags if tag == "svg"} <= {
        "drawing",
        "sign",
    }
    assert HOSTILE[0] in visible(page)
    assert "A" * (COPYABLE + 1) not in page
    assert "A" * 2_000 not in re.sub(r"<pre.*?</pre>", "", page, flags=re.DOTALL)  # text to copy can be longer
    assert not re.search("[\x00-\x08\x0e-\x1f\u200b\u202a-\u202e\u2066-\u2069]", page)
    assert "/home/eve" not in page
    assert "~/secret/model.py" in visible(page)
    assert len(page) < 2_000_000


def test_data_round_trips() -> None:
    report = one_run()
    data = data_of(write_site(report))
    keys = {exhibit.key for section in report.sections for exhibit in section.exhibits}
    assert set(data["exhibits"]) == {"step-picture", *keys} - {
        "memory-categories",
        "memory-largest",
        "questions",
        "versions",
    }
    packed = data["exhibits"]["breakdown"]
    part = next(section for section in report.sections if section.key == "time").exhibits[0].part
    assert packed["times"][0] == [round(time) for time in part.times_ns[0]]  # type: ignore[union-attr]
    assert [dimension["key"] for dimension in packed["dimensions"]] == ["class", "phase", "module", "op", "kernel"]
    assert list(zip(*packed["places"], strict=True)) == list(part.places)  # type: ignore[union-attr]


def test_parts_of_a_pair_have_their_own_keys() -> None:
    page = write_site(two_runs())
    exhibits = data_of(page)["exhibits"]
    assert {"step-timeline-a", "step-timeline-b", "memory-a"} <= set(exhibits)
    assert "memory-b" not in exhibits
    assert "Not measured in this run." in visible(page)


def test_titles_of_a_pair_are_not_repeated() -> None:
    tables = [msgspec.structs.replace(categories_table(2), title=f"Error: {name}") for name in ("small", "large")]
    pair = SideBySide(title="A: Error: small; B: Error: large", runs=("A", "B"), parts=tuple(tables))
    section = Section(key="precision", title="Precision", exhibits=(Exhibit(key="pair", part=pair),))
    page = write_site(msgspec.structs.replace(one_run(), sections=(section,)))
    assert re.findall(r"<h3>(.*?)</h3>", page[page.index('class="pair"') :]) == ["Error", "small", "large"]


def test_a_question_to_both_runs_is_asked_once() -> None:
    page = write_site(two_runs())
    text = visible(page[page.index('<div class="questions both">') :])
    assert text.count("Which kernel takes most of the forward pass?") == 1
    assert text.count("It runs 49 times per step") == 2
    assert "How much of the step is communication? A The recording is of one rank." in text
    assert "B Not measured in this run." in text


def test_infinities_do_not_break_the_data() -> None:
    report = one_run()
    sections = []
    for section in report.sections:
        exhibits = [
            msgspec.structs.replace(
                exhibit, part=msgspec.structs.replace(exhibit.part, values=((float("nan"), 2.0), (float("inf"), None)))
            )
            for exhibit in section.exhibits
            if exhibit.key == "ranks"
        ]
        sections.append(msgspec.structs.replace(section, exhibits=tuple(exhibits)))
    page = write_site(msgspec.structs.replace(report, sections=tuple(sections)))
    said = [mark["lines"][1] for mark in data_of(page)["exhibits"]["ranks"]["marks"]]
    assert said == ["hidden: –", "hidden: 2.00 ms", "exposed: –", "exposed: –"]
    assert not re.search(r"\b(NaN|Infinity)\b", re.sub(r"<script>.*", "", page, flags=re.DOTALL))


def table_page(num_rows: int) -> str:
    exhibit = Exhibit(key="rows", part=categories_table(num_rows))
    section = Section(key="memory", title="Memory", exhibits=(exhibit,))
    page = write_site(msgspec.structs.replace(one_run(), sections=(section,)))
    start = page.index('<figure class="table"')
    return page[start : page.index("</figure>", start)]


def test_a_table_keeps_raw_values_for_sorting_and_is_written_once() -> None:
    table = table_page(5)
    raw = (9_710 - 37) << 20
    assert f'<td class="number" data-v="{raw}">9.45 GiB</td>' in table
    assert "<td>activations</td>" in table
    assert 'class="long"' not in table
    assert '<th scope="col" class="detail">' in table
    assert ">Show more columns<" in table
    page = write_site(one_run())
    assert page.count("part 37") == 1


@pytest.mark.parametrize(
    ("num_rows", "has_search", "is_tall"), [(15, False, False), (16, True, False), (31, True, True)]
)
def test_long_tables_get_a_search_box_and_scroll(num_rows: int, has_search: bool, is_tall: bool) -> None:
    table = table_page(num_rows)
    assert ('class="search"' in table) is has_search
    assert ('class="scroll tall"' in table) is is_tall


def test_missing_parts_are_explained() -> None:
    text = visible(write_site(one_run()))
    assert "precision : the stage was not run. stepscope precision --size small" in text
    assert "incomplete" not in text
    text = visible(write_site(partial()))
    assert "This report is incomplete." in text
    assert "No findings: this run has no kernel trace." in text
    assert "No findings: no rule found time to save." in visible(write_site(empty()))
    alone = msgspec.structs.replace(empty(), picture=None)
    assert "No findings. Most rules need a GPU trace." in visible(write_site(alone))


def test_long_command_of_a_missing_part_is_complete() -> None:
    command = "stepscope report " + " ".join(f"--set name_{n}=1" for n in range(60))
    section = Section(
        key="not-measured", title="Not measured", missing=(Missing(what="it", why="no", command=command),)
    )
    assert command in visible(write_site(msgspec.structs.replace(one_run(), sections=(section,))))


def test_a_fix_is_copied_exactly() -> None:
    code = 'if x < 1:\n    print("a  b")'
    finding = Finding(code="SS001", title="t", evidence="e", fix="f", saving_ns=None)
    advice = (
        Advice(finding=finding, fixes=(Copyable(label="", text=code), Copyable(label="", text="run  --a-b `x`"))),
    )
    page = write_site(msgspec.structs.replace(one_run(), advice=advice, commands=()))
    texts = [
        unescape(re.sub(r"<[^>]*>", "", found)) for found in re.findall(r"<code>(.*?)</code></pre>", page, re.DOTALL)
    ]
    assert texts[:2] == [code, "run  --a-b `x`"]
    assert "Saving not estimated" in visible(page)
    advice = (Advice(finding=msgspec.structs.replace(finding, saving_ns=0, share=0.0)),)
    assert "No saving on its own" in visible(write_site(msgspec.structs.replace(one_run(), advice=advice)))


def test_cards_say_what_all_fixes_save_together() -> None:
    smaller = Finding(code="SS003", title="the smaller one", evidence="e", fix="f")
    advice = tuple(
        Advice(
            finding=Finding(
                code="SS001",
                title="t",
                evidence="e",
                fix="f",
                saving_ns=3_000_000,
                share=0.3,
                joint_ns=adds,
                joint_share=adds / 1e7,
                also=also,
            )
        )
        for adds, also in ((3_000_000, (smaller,)), (1_000_000, ()))
    )
    page = visible(write_site(msgspec.structs.replace(one_run(), advice=advice)))
    (joint,) = re.findall(r"All fixes together: about\s+−([\d.]+) ms\s+· (\S+)% of the step", page)
    assert tuple(map(float, joint)) == (4, 40)
    assert len(re.findall(r"1(?:\.0+)? ms once the fixes above are in", page)) == 1
    assert "the smaller one" in page


def test_remarks_are_a_list_after_the_cards() -> None:
    remark = Finding(code="SS014", title="3 kernels take 72% of the GPU time", evidence="a, b, c", action="Run `x`")
    card = Finding(code="SS007", title="t", evidence="e", action="Use `fused=True`", fix="code")
    look_up = Copyable(label="more", text="stepscope kernel a")
    report = msgspec.structs.replace(
        one_run(), advice=(Advice(finding=card), Advice(finding=remark, fixes=(look_up,))), commands=()
    )
    page = write_site(report)
    assert page.count('<article class="card">') == 1
    assert "Use <code>fused=True</code>" in page
    (listed,) = re.findall(r'<section class="remarks".*?</section>', page, re.DOTALL)
    assert listed.count("<li>") == 1
    assert "3 kernels take 72% of the GPU time" in listed
    assert "stepscope rule SS014" in listed
    assert "stepscope kernel a" in visible(listed)
    assert page.index("remarks-title") > page.index("card")
    alone = write_site(msgspec.structs.replace(report, advice=(Advice(finding=remark),)))
    assert "advice-title" not in alone


def test_backticks_become_code_and_nothing_else_does() -> None:
    report = msgspec.structs.replace(one_run(), sentence="`a<b>` costs `most")
    assert '<p class="sentence"><code>a&lt;b&gt;</code> costs `most</p>' in write_site(report)


def test_titles_of_findings_have_code_and_names_keep_their_case() -> None:
    finding = Finding(code="SS027", title="`zero_grad` fills", evidence="`torch.save` takes 1 s", fix="f")
    other = msgspec.structs.replace(finding, title="`other` time", evidence="it takes 1 s")
    advice = (Advice(finding=msgspec.structs.replace(finding, also=(other,))), Advice(finding=other))
    page = write_site(msgspec.structs.replace(one_run(), advice=advice))
    assert "<h3><code>zero_grad</code> fills</h3>" in page
    assert "<li><code>other</code> time" in page
    # The style sheet capitalizes the first letter of the others.
    assert '<p class="evidence verbatim"><code>torch.save</code>' in page
    assert '<p class="evidence">it takes' in page


def test_a_flag_is_not_broken_into_two_lines() -> None:
    long = f"--{'a' * 40}"
    report = msgspec.structs.replace(one_run(), sentence=f"use --fuse (`x --preset fast`), or {long}")
    flags = '<span class="flag">--fuse</span> (<code>x <span class="flag">--preset</span> fast</code>)'
    assert f'"sentence">use {flags}, or {long}</p>' in write_site(report)


def test_a_unit_stays_with_its_number() -> None:
    report = msgspec.structs.replace(one_run(), sentence="79% of 60.9 ms and 4.83 GiB, 3 steps")
    assert '"sentence">79% of 60.9&nbsp;ms and 4.83&nbsp;GiB, 3 steps</p>' in write_site(report)


def test_page_is_recognized_by_its_generator(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(write_site(msgspec.structs.replace(one_run(), title="x" * 10_000)), encoding="utf-8")
    assert is_ours(path)
    path.write_text("<!DOCTYPE html><title>stepscope</title>", encoding="utf-8")
    assert not is_ours(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/eve/model.py", "~/model.py"),
        ("file:///Users/Eve/x", "file://~/x"),
        ("PATH=/home/eve:/usr/bin", "PATH=~:/usr/bin"),
        ("/nfs/cluster/home/eve", "~"),
        (r"C:\Users\Eve Miller\model.py, line 3", r"~\model.py, line 3"),
        ("c:/Users/eve", "~"),
        ("at /root/train.py and /root", "at ~/train.py and ~"),
        ("--data '/home/eve/my data/x.bin'", "--data ~/'my data/x.bin'"),
        ("'/root/my data' and '/home/eve/x.py'", "~/'my data' and '~/x.py'"),
        ("/home/eve/{a,b}.py {/export/home/eve}", "~/{a,b}.py {~}"),
        ("/a/b/c/d/e/f/g/home/eve/x", "~/x"),
        ("{0,8}/home/eve {'path': '/home/eve/x'}", "{0,8}~ {'path': '~/x'}"),
        ("-I/home/eve/include -L/homes/eve/lib /home2/eve ~eve/x Eve::~Eve()", "-I~/include -L~/lib ~ ~/x Eve::~Eve()"),
        ("USER=eve HOME=/home/eve MY_API_KEY=abc, HF_TOKEN=d x=4", "USER=… HOME=~ MY_API_KEY=…, HF_TOKEN=… x=4"),
        ("/rooted /usr/root src/home/page ~/home/x", "/rooted /usr/root src/home/page ~/home/x"),
    ],
)
def test_home_directories_and_environment_values_are_hidden(text: str, expected: str) -> None:
    assert hide_private(text) == expected


def test_clean_text_is_short_and_visible() -> None:
    assert clean("a\u202eb\x00\n") == "a\\u202eb\\u0000\\u000a"
    assert clean("a\nb", lines=True) == "a\nb"
    assert clean("begin" + "x" * 1_000 + "end", 20) == "beginxxxxxxxx…xxxend"
    assert len(clean("\u202e" * 1_000, 50)) == 50
    # A home directory at the cut does not leave a part of its name.
    assert "eve" not in clean("A" * 1_000 + "/home/eve " * 500, 207)


def parts_of(report: Report) -> list[Part]:
    return [exhibit.part for section in report.sections for exhibit in section.exhibits]


def test_colours_are_the_same_everywhere_and_differ_in_one_exhibit() -> None:
    assert colour_of("GEMM")[0] == "#0072B2"
    report = one_run()
    pairs = assign_colours(parts_of(report))
    assert pairs["GEMM"] == colour_of("GEMM")
    series = [pairs[name] for name in draw_attention().series]
    assert len(set(series)) == 3
    categories = ("parameters", "optimizer state", "gradients", "activations", "temporaries", "workspaces", "other")
    assert len({colour_of(name) for name in categories}) == len(categories)


def test_lines_of_a_chart_have_colours_that_differ_at_a_glance() -> None:
    """Eight are the most that a trend shows. Sky blue and a pale blue differ by 50, summed over channels."""
    taken: list[tuple[str, str]] = []
    for _ in range(8):
        taken.append(colour_of("a line", taken))
    for theme in (0, 1):
        channels = [[int(pair[theme][at : at + 2], 16) for at in (1, 3, 5)] for pair in taken]
        for one, other in combinations(channels, 2):
            assert sum(abs(a - b) for a, b in zip(one, other, strict=True)) > 50, (theme, one, other)


def contrast(colour: str, paper: str) -> float:
    def luminance(text: str) -> float:
        channels = [int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(colour), luminance(paper)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_is_readable_in_both_themes() -> None:
    style = re.search(r"<style>(.*?)</style>", write_site(empty()), re.DOTALL)[1]  # type: ignore[index]
    blocks = re.findall(r":root[^{]*\{([^}]*--paper[^}]*)\}", style)
    assert len(blocks) == 3
    for block in blocks:
        colours = dict(re.findall(r"--([\w-]+):(#[0-9a-f]{6})", block))
        for name in ("ink", "soft", "faint", "accent", "good", "doubt"):
            assert contrast(colours[name], colours["paper"]) >= 4.5, name
            assert contrast(colours[name], colours["sunk"]) >= 4.5, name
            if name != "doubt":
                assert contrast(colours[name], colours["accent-soft"]) >= 4.5, name
    assert blocks[1].split() == blocks[2].split()


def test_text_is_readable_on_every_colour() -> None:
    for pair in assign_colours([*parts_of(one_run()), *parts_of(two_runs())]).values():
        for colour in pair:
            assert contrast(choose_ink(colour), colour) >= 4.5, colour


def test_notes_are_complete() -> None:
    note = "of `peak`, " + "which is what the data sheet says of dense matrices " * 3 + "at 4.5 ms"
    fact = msgspec.structs.replace(one_run().facts[0], note=note)
    page = write_site(msgspec.structs.replace(one_run(), facts=(fact,)))
    written = note.replace("`peak`", "<code>peak</code>").replace("4.5 ms", "4.5&nbsp;ms")
    assert f'<dd class="note">{written}</dd>' in page


def test_counts_of_a_step_keep_enough_digits_to_divide_by() -> None:
    rare = msgspec.structs.replace(
        break_down([kernels_of_step()[:1]], [1e6]), counts=((1 / 300,),), times_ns=((2_000 / 300,),)
    )
    assert pack_breakdown(rare)["counts"] == [[0.003333]]


def test_only_what_scrolls_by_itself_is_a_place() -> None:
    beside = SideBySide(title="Sizes", runs=("A", "B"), parts=(categories_table(60), categories_table(60)))
    exhibits = (Exhibit(key="short", part=categories_table(5)), Exhibit(key="both", part=beside))
    section = Section(key="sizes", title="Sizes", exhibits=exhibits)
    page = write_site(msgspec.structs.replace(one_run(), sections=(section,)))
    names = re.findall(r'role="region" aria-label="([^"]*)"', page)
    title = categories_table(60).title
    assert names == [f"{title}, run A", f"{title}, run B"]


def test_questions_have_their_title() -> None:
    asked = msgspec.structs.replace(ask(), title="Asked of this run")
    section = Section(key="questions", title="Questions", exhibits=(Exhibit(key="asked", part=asked),))
    page = write_site(msgspec.structs.replace(one_run(), sections=(section,)))
    assert '<div class="questions" id="asked"><div class="titled"><h3>Asked of this run</h3>' in page


def test_a_large_report_stays_small() -> None:
    report: Report = huge()
    assert len(write_site(report).encode()) < 2_500_000


def test_remarks_alone_come_with_the_absence_of_findings() -> None:
    remark = Advice(finding=Finding(code="SS014", title="A remark", evidence="it is so"))
    text = visible(write_site(msgspec.structs.replace(empty(), advice=(remark,))))
    assert "No findings: no rule found time to save." in text
    assert text.index("No findings") < text.index("A remark")


def test_comparison_starts_with_what_changed_and_cards_name_their_run() -> None:
    report = two_runs()
    changes = Section(key=CHANGES, title="What changed", lead="This changed.")
    page = write_site(msgspec.structs.replace(report, sections=(changes, *report.sections[1:])))
    assert page.count("This changed.") == 1
    assert (
        page.index("This changed.")
        < page.index('class="advice"')
        < page.index(f'id="section-{report.sections[1].key}"')
    )
    assert f"What would save most in {report.runs[1]}" in visible(page)
    assert "What would save most in" not in visible(write_site(one_run()))


def test_times_of_several_devices_say_so() -> None:
    breakdown = break_down([kernels_of_step()], [1e9])
    assert pack_breakdown(msgspec.structs.replace(breakdown, num_devices=2))["numDevices"] == 2

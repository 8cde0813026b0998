"""The page of a report in a real browser: it opens from a file, responds to pointer and keys, and never runs code from
a name. Screenshots are saved to the directory in STEPSCOPE_SCREENSHOTS."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stepscope.findings import Advice, Breakdown, Column, Copyable, Exhibit, Fact, Finding, Report, Section, Table
from stepscope.render.site import write_site
from tests.browser.conftest import OpenFile, wait_for_frame
from tests.unit.render.report_parts import WALL_NS, break_down, categories_table, kernels_of_step
from tests.unit.render.report_samples import HOSTILE, empty, hostile, huge, one_run, partial, two_runs
from tests.unit.render.test_site import contrast

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

Open = Callable[..., "Page"]


@pytest.fixture
def open_page(open_file: OpenFile, tmp_path: Path) -> Open:
    def open_report(report: Report, **options: Any) -> "Page":
        target = tmp_path / "report.html"
        target.write_text(write_site(report), encoding="utf-8")
        return open_file(target, **options)

    return open_report


def show(page: "Page", selector: str) -> "Locator":
    """Scroll to a part of the page, which builds it."""
    found = page.locator(selector).first
    found.scroll_into_view_if_needed()
    wait_for_frame(page)
    return found


def show_all(page: "Page") -> None:
    for figure in page.locator("figure.chart").all():
        figure.scroll_into_view_if_needed()
        wait_for_frame(page)
    page.evaluate("() => scrollTo({ top: 0, behavior: 'instant' })")
    wait_for_frame(page)


def bars_of(page: "Page", dimension: str) -> list[str]:
    return page.locator(f"[data-dimension={dimension}] .choice .name").all_inner_texts()


def choose(page: "Page", dimension: str, name: str) -> None:
    page.locator(f"[data-dimension={dimension}] .choice", has_text=name).first.click()


def show_all_kernels(page: "Page") -> None:
    page.locator(".kernels").get_by_role("button", name="Show all").click()


def kernels_of(page: "Page") -> list[str]:
    return page.locator(".kernels tbody .name").all_inner_texts()


def check_drawn(page: "Page", width: int) -> None:
    show_all(page)
    for figure in page.locator("figure.chart").all():
        assert figure.locator(".body > *").count() > 0, figure.get_attribute("id")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 900, 1440])
@pytest.mark.parametrize("sample", [one_run, two_runs])
def test_every_chart_is_drawn_in_both_themes_at_three_widths(
    open_page: Open, tmp_path: Path, sample: Any, width: int, scheme: str
) -> None:
    folder = Path(os.environ.get("STEPSCOPE_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    page = open_page(sample(), width=width, color_scheme=scheme)
    check_drawn(page, width)
    target = folder / f"{sample.__name__}-{width}-{scheme}.png"
    target.unlink(missing_ok=True)
    page.screenshot(path=target, full_page=True)
    assert target.stat().st_size > 50_000


def test_remark_with_long_code_fits_a_narrow_window(open_page: Open) -> None:
    remark = Finding(code="SS019", title="t", evidence="e", action="a")
    fix = Copyable(label="", text="with a_context_manager_that_has_a_long_name(with_stack=True) as it:\n    step()")
    advice = (Advice(finding=remark, fixes=(fix,)),)
    check_drawn(open_page(msgspec.structs.replace(one_run(), advice=advice), width=360), 360)


@pytest.mark.parametrize("sample", [partial, empty])
def test_sparse_page_fits_its_window(open_page: Open, sample: Any) -> None:
    check_drawn(open_page(sample(), width=420), 420)


def test_selection_narrows_all_other_lists(open_page: Open) -> None:
    page = open_page(one_run(), width=1440)
    show(page, "figure.breakdown")
    assert page.inner_text(".told") == "8.03 ms of 60.9 ms: all kernels"
    assert bars_of(page, "phase") == ["forward", "loss", "backward", "optimizer"]
    assert "idle 52.9 ms" in page.inner_text(".wall")
    choose(page, "class", "attention")
    assert page.inner_text(".told") == "0.718 ms of 60.9 ms: attention kernels"
    assert bars_of(page, "phase") == ["forward", "backward"]
    # The dimension itself still shows its other values.
    assert "GEMM" in bars_of(page, "class")
    assert len(kernels_of(page)) == 2
    choose(page, "phase", "forward")
    assert page.inner_text(".told") == "0.224 ms of 60.9 ms: attention kernels of forward"
    assert kernels_of(page) == ["flash attention forward bf16, head 64"]
    assert bars_of(page, "class")[0] == "GEMM"
    chips = page.locator(".chip")
    assert chips.all_inner_texts() == ["class\nattention\n×", "phase\nforward\n×"]
    chips.first.click()
    assert page.locator(".chip").count() == 1
    assert len(kernels_of(page)) > 5
    page.get_by_role("button", name="Clear all").click()
    assert page.inner_text(".told") == "8.03 ms of 60.9 ms: all kernels"


def open_breakdown(open_page: Open, part: Breakdown, **options: Any) -> "Page":
    section = Section(key="time", title="Time", exhibits=(Exhibit(key="breakdown", part=part),))
    page = open_page(msgspec.structs.replace(one_run(), sections=(section,)), **options)
    show(page, "figure.breakdown")
    return page


def test_table_of_many_columns_fits_a_wide_window(open_page: Open) -> None:
    columns = tuple(Column(key=f"c{at}", label=f"column {at}", kind="ms") for at in range(13))
    table = Table(title="Wide", columns=columns, rows=((123.4,) * len(columns),))
    section = Section(key="wide", title="Wide ones", exhibits=(Exhibit(key="wide", part=table),))
    page = open_page(msgspec.structs.replace(one_run(), sections=(section,)), width=1440)
    box = page.locator("#wide .scroll")
    assert box.evaluate("(box) => box.scrollWidth <= box.clientWidth")


@pytest.mark.parametrize("width", [1200, 900, 390])
def test_a_number_at_the_top_stays_on_one_line(open_page: Open, width: int) -> None:
    facts = tuple(Fact(key=f"f{at}", label="tokens per second", value=1_140_263, kind="count") for at in range(6))
    page = open_page(msgspec.structs.replace(one_run(), facts=facts), width=width)
    lines = "(value) => value.clientHeight / parseFloat(getComputedStyle(value).lineHeight)"
    values = page.locator(".fact .value")
    assert [round(values.nth(at).evaluate(lines)) for at in range(6)] == [1] * 6
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_lines_of_code_in_a_card_wrap(open_page: Open) -> None:
    code = "loss = model(x)\nloss.backward()  # a comment that says what matters and is longer than a card is wide"
    finding = Finding(code="SS001", title="Slow", evidence="it is", fix=code, saving_ns=10)
    advice = Advice(finding=finding, fixes=(Copyable(label="in your own code", text=code),))
    page = open_page(msgspec.structs.replace(one_run(), advice=(advice,)), width=1440)
    box = page.locator(".card pre")
    assert box.evaluate("(box) => box.scrollWidth <= box.clientWidth")


def test_overlapping_kernels_are_not_shares_of_the_step(open_page: Open) -> None:
    page = open_breakdown(open_page, break_down([kernels_of_step()], [5_000_000]))
    assert page.inner_text(".told") == "all kernels take 8.03 ms in a step of 5.00 ms"
    page.locator(".wall i").first.hover()
    assert "of the step" not in page.inner_text("#tip")
    choose(page, "phase", "optimizer")
    assert page.inner_text(".told") == "kernels of optimizer take 2.20 ms in a step of 5.00 ms"


def test_kernels_of_two_runs_on_several_gpus_are_not_the_subject_of_a_sentence(open_page: Open) -> None:
    part = break_down([kernels_of_step(), kernels_of_step()[:30]], [5_000_000, 900_000])
    page = open_breakdown(open_page, msgspec.structs.replace(part, num_devices=2, unit="trace"))
    said = "all kernels on 2 GPUs: A 8.03 ms in a trace of 5.00 ms, B 0.413 ms in a trace of 0.900 ms"
    assert page.inner_text(".told") == said
    assert page.inner_text(".modules h4") == "Module ms in the trace, alike layers folded"


@pytest.mark.parametrize("num_steps", [3, 300])
def test_the_mean_of_one_call_in_several_steps_is_its_length(open_page: Open, num_steps: int) -> None:
    part = break_down([kernels_of_step()[:1]], [WALL_NS])
    once = {"times_ns": ((1_001 / num_steps,),), "shortest_ns": ((1_001.0,),), "longest_ns": ((1_001.0,),)}
    part = msgspec.structs.replace(part, counts=((1 / num_steps,),), **once)
    page = open_breakdown(open_page, part)
    cells = page.locator(".kernels tbody td.number").all_inner_texts()
    assert cells[2:] == ["0.3" if num_steps == 3 else "0.00333", "1.00", "1.00", "1.00"]


def test_cpu_page_says_operators_everywhere(open_page: Open) -> None:
    report = one_run()
    sections = tuple(
        msgspec.structs.replace(section, exhibits=tuple(map(_on_cpu, section.exhibits))) for section in report.sections
    )
    page = open_page(msgspec.structs.replace(report, sections=sections), width=1440)
    show_all(page)
    assert "all operators" in page.inner_text(".told")
    assert "outside operators 52.9 ms" in page.inner_text(".wall")
    page.hover("figure.roofline ol.points li")
    assert "of all operator time" in page.inner_text("#tip")


def _on_cpu(exhibit: Exhibit) -> Exhibit:
    if not isinstance(exhibit.part, Breakdown):
        return exhibit
    return Exhibit(key=exhibit.key, part=msgspec.structs.replace(exhibit.part, what="operators"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_on_coloured_bars_has_the_better_contrast(open_page: Open, scheme: str) -> None:
    page = open_page(one_run(), width=1440, color_scheme=scheme)
    show(page, "figure.breakdown")
    script = """(pieces) => pieces.filter((piece) => piece.style.color).map((piece) => {
      const style = getComputedStyle(piece);
      return [style.color, style.backgroundColor].map((text) => text.match(/\\d+/g).map(Number));
    })"""
    for colours in page.eval_on_selector_all(".wall i", script):
        ink, fill = ("#" + "".join(f"{channel:02x}" for channel in colour) for colour in colours)
        assert contrast(ink, fill) == max(contrast("#14171c", fill), contrast("#ffffff", fill))


def test_unselected_bars_stay_readable(open_page: Open) -> None:
    page = open_page(one_run(), width=1440)
    show(page, "figure.breakdown")
    choose(page, "class", "attention")
    apart = page.locator(".choice.apart").first
    assert apart.evaluate("(one) => getComputedStyle(one).opacity") == "1"
    assert apart.locator(".track i").first.evaluate("(one) => getComputedStyle(one).opacity") == "0.4"


def test_kernel_table_is_one_tab_stop(open_page: Open) -> None:
    page = open_page(one_run(), width=1440)
    show(page, "figure.breakdown")
    page.focus(".kernels .search")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    rows = page.get_by_role("grid").locator("tbody tr")
    stops = rows.evaluate_all("(rows) => rows.flatMap((row, at) => (row.tabIndex === 0 ? [at] : []))")
    assert stops == [1]
    page.keyboard.press("Enter")
    selected = rows.evaluate_all("(rows) => rows.map((row) => row.getAttribute('aria-selected'))")
    assert selected.count("true") == 1
    assert selected.count("false") == len(selected) - 1


def test_unknown_dimensions_are_named_and_not_shown(open_page: Open) -> None:
    nowhere = [replace(kernel, layer="unknown", module="") for kernel in kernels_of_step()]
    page = open_breakdown(open_page, break_down([nowhere], [WALL_NS]))
    assert page.locator(".dimension h4").all_text_contents() == ["Class", "Phase", "Operator"]
    assert page.inner_text(".help.unknown") == "Not in this recording: modules."
    assert page.locator(".modules").count() == 0


def test_selecting_a_kernel_shows_its_details(open_page: Open) -> None:
    page = open_page(one_run(), width=1440)
    show(page, "figure.breakdown")
    show(page, ".kernels")
    show_all_kernels(page)
    page.locator(".kernels tbody tr", has_text="gelu").click()
    assert bars_of(page, "class")[0] == "elementwise"
    assert len(bars_of(page, "class")) == 1
    assert "vectorized_elementwise_kernel" in page.inner_text(".decoded")
    page.keyboard.press("Escape")
    assert page.is_hidden(".decoded")


def test_button_shows_all_bars_of_a_dimension(open_page: Open) -> None:
    kernels = [replace(kernel, kind=f"class {at}") for at, kernel in enumerate(kernels_of_step()[:30])]
    page = open_breakdown(open_page, break_down([kernels], [WALL_NS]), width=1440)
    before = len(bars_of(page, "class"))
    button = page.locator("[data-dimension=class] .quiet")
    assert button.inner_text() == "Show all 30"
    button.click()
    assert before == 8
    assert len(bars_of(page, "class")) == 30
    assert button.inner_text() == "Show fewer"


def test_kernels_are_searched_and_sorted(open_page: Open) -> None:
    page = open_page(one_run(), width=1440)
    page.keyboard.press("/")
    assert page.evaluate("() => document.activeElement.matches('.kernels .search')")
    page.keyboard.type("LAYER norm")
    assert kernels_of(page) == ["layer norm backward bf16", "layer norm forward bf16"]
    assert page.inner_text(".kernels .found") == "2 of 17 kernels"
    # The search includes the full name.
    page.fill(".kernels .search", "vectorized_elementwise_kernel<4, at::native::gelu")
    assert kernels_of(page) == ["gelu bf16, vectorized ×8"]
    page.keyboard.press("Escape")
    assert page.input_value(".kernels .search") == ""
    header = page.locator(".kernels th", has_text="count")
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    assert kernels_of(page)[0] == "cast to bf16, vectorized ×8"
    header.locator("button").press("Enter")
    assert header.get_attribute("aria-sort") == "ascending"
    page.locator(".kernels th.name button").click()
    assert kernels_of(page)[0] == "AdamW, many tensors"


def test_search_says_when_a_filter_hides_matches(open_page: Open) -> None:
    page = open_page(one_run(), width=1440)
    show(page, "figure.breakdown")
    choose(page, "phase", "backward")
    page.fill(".kernels .search", "layer norm")
    assert kernels_of(page) == ["layer norm backward bf16"]
    hidden = page.locator(".hidden-matches")
    assert hidden.inner_text() == "1 match hidden by the filter backward Clear"
    choose(page, "class", "norm")
    page.fill(".kernels .search", "bf16")
    assert hidden.inner_text().endswith("matches hidden by the filters norm, backward Clear")
    hidden.get_by_role("button", name="Clear").click()
    assert hidden.inner_text() == ""
    assert len(kernels_of(page)) == 15
    # Without a search nothing is hidden unexpectedly, and without a filter nothing is hidden at all.
    page.fill(".kernels .search", "")
    choose(page, "phase", "backward")
    assert hidden.inner_text() == ""


def test_a_kernel_under_the_pointer_or_in_focus_shows_its_full_name(open_page: Open) -> None:
    page = open_page(one_run(), width=1440)
    show(page, "figure.breakdown")
    show(page, ".kernels")
    show_all_kernels(page)
    page.locator(".kernels tbody tr", has_text="gelu").hover()
    assert "vectorized_elementwise_kernel" in page.inner_text("#tip")
    page.mouse.move(5, 5)
    assert page.is_hidden("#tip")
    page.focus(".kernels .search")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    second = page.locator(".kernels tbody tr").nth(1)
    assert second.evaluate("(row) => row === document.activeElement")
    assert second.locator(".name").inner_text() in page.inner_text("#tip")


def test_bars_are_walked_and_chosen_by_keys(open_page: Open) -> None:
    page = open_page(one_run(), width=1440)
    show(page, "figure.breakdown")
    page.locator("[data-dimension=class] .choice").first.focus()
    focused = "() => document.activeElement.closest('.choice')?.querySelector('.name').textContent"
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) == "optimizer"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == "loss"  # the second phase
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    assert page.inner_text(".told") == "2.20 ms of 60.9 ms: kernels of optimizer"
    # The selected bar keeps the focus, although the list was rebuilt.
    assert page.evaluate(focused) == "optimizer"
    page.keyboard.press("Escape")
    assert "all kernels" in page.inner_text(".told")


def test_two_runs_show_their_difference(open_page: Open) -> None:
    page = open_page(two_runs(), width=1440)
    show(page, "figure.breakdown")
    assert re.fullmatch(r"A 8.03 ms of 141.6 ms, B [\d.]+ ms of 60.9 ms: all kernels", page.inner_text(".told"))
    assert page.locator(".wall").count() == 2
    headers = [header.split("\n")[0].strip(" ↓") for header in page.locator(".kernels th").all_inner_texts()]
    assert headers == ["kernel", "A ms", "B ms", "change ms", "A count", "B count"]
    differences = page.locator(".kernels td.difference").all_inner_texts()
    sizes = [abs(float(text.replace("−", "-").replace("+", ""))) for text in differences]
    assert sizes == sorted(sizes, reverse=True)
    assert any(text.startswith("+") for text in differences)
    assert any(text.startswith("−") for text in differences)


def test_a_table_is_sorted_by_value_and_searched(open_page: Open) -> None:
    page = open_page(one_run())
    # A long table that does not come first in its section is closed.
    assert page.locator("#memory-largest table").is_hidden()
    page.click("#memory-largest > summary")
    table = show(page, "#memory-largest")
    first = table.locator("tbody tr:visible td").first
    table.get_by_role("button", name="tensors").click()
    assert first.inner_text() == "part 59"
    table.get_by_role("button", name="at the peak").press("Enter")
    assert first.inner_text() == "activations"
    table.get_by_role("button", name="at the peak").press("Enter")
    assert first.inner_text() == "part 59"
    table.locator(".search").fill("part 1")
    assert table.locator(".found").inner_text() == "10 of 60 rows"
    assert table.locator("tbody tr:visible").count() == 10
    page.keyboard.press("Escape")
    assert table.locator("tbody tr:visible").count() == 60
    assert not table.get_by_role("button", name="where").is_visible()
    table.get_by_role("button", name="Show more columns").click()
    assert table.get_by_role("button", name="where").is_visible()
    table.get_by_role("button", name="Show fewer columns").click()
    assert not table.get_by_role("button", name="where").is_visible()


def open_table(open_page: Open, num_rows: int, **options: Any) -> "Page":
    exhibits = (Exhibit(key="rows", part=categories_table(num_rows)),)
    section = Section(key="memory", title="Memory", exhibits=exhibits)
    return open_page(msgspec.structs.replace(one_run(), sections=(section,)), **options)


def test_long_table_shows_eight_rows_until_all_are_asked_for(open_page: Open) -> None:
    page = open_table(open_page, 37)
    rows = page.locator("#rows tbody tr:visible")
    button = page.locator("#rows .all-rows")
    assert rows.count() == 8
    button.click()
    assert button.inner_text() == "Show fewer"
    assert rows.count() == 37
    button.press("Enter")
    assert button.inner_text() == "Show all 37 rows"
    assert rows.count() == 8
    # A search finds folded rows too, and sorting brings others to the top.
    page.fill("#rows .search", "part 3")
    assert rows.count() == 7
    assert rows.last.locator("td").first.inner_text() == "part 36"
    assert button.is_hidden()
    page.keyboard.press("Escape")
    page.locator("#rows").get_by_role("button", name="tensors").click()
    assert rows.count() == 8
    assert rows.first.locator("td").first.inner_text() == "part 36"
    page.emulate_media(media="print")
    assert rows.count() == 37
    assert button.is_hidden()


def test_short_table_has_no_button_and_no_script_hides_no_rows(open_page: Open) -> None:
    assert open_table(open_page, 8).locator("#rows .all-rows").count() == 0
    page = open_table(open_page, 37, java_script_enabled=False)
    assert page.locator("#rows tbody tr:visible").count() == 37
    assert page.locator("#rows .all-rows").is_hidden()


@pytest.mark.parametrize("has_script", [True, False])
def test_hint_opens_by_keyboard_with_or_without_a_script(open_page: Open, has_script: bool) -> None:
    page = open_page(one_run(), width=1440, java_script_enabled=has_script)
    hint = page.locator("#section-roofline .hint")
    lines = hint.locator("li:not(.for-touch)")
    assert hint.locator("li:visible").count() == 0
    mark = hint.locator("summary")
    # The mark keeps its place next to the title.
    script = "(mark) => mark.getBoundingClientRect().top - mark.closest('section').getBoundingClientRect().top"
    before = mark.evaluate(script)
    assert before < 10
    mark.focus()
    page.keyboard.press("Enter")
    assert hint.locator("li:visible").count() == lines.count() > 2
    assert mark.evaluate(script) == before
    page.emulate_media(media="print")
    assert hint.locator("li:visible").count() == 0
    page.emulate_media(media="screen")
    mark.focus()
    page.keyboard.press("Escape" if has_script else "Enter")
    assert hint.locator("li:visible").count() == 0


@pytest.mark.parametrize("sample", [one_run, two_runs])
def test_every_chart_but_bars_has_one_hint_next_to_its_title(open_page: Open, sample: Any) -> None:
    page = open_page(sample(), width=1440)
    script = """(figures) => figures.map((figure) => [figure, figure.closest(".pair"), figure.closest(".section")]
      .filter((place) => place?.querySelector(":scope > .titled .hint, :scope > figcaption .hint")).length)"""
    counts = page.eval_on_selector_all("figure.chart:not(.bars)", script)
    assert counts == [1] * len(counts)
    assert len(counts) > 4
    assert page.locator(".bars .hint").count() == 0


def test_a_thousand_kernels_load_in_batches(open_page: Open) -> None:
    page = open_page(huge())
    show(page, "figure.breakdown")
    show(page, ".kernels")
    assert page.locator(".kernels tbody tr").count() == 8
    show_all_kernels(page)
    assert page.locator(".kernels tbody tr").count() == 200
    page.get_by_role("button", name="Show 200 more").click()
    assert page.locator(".kernels tbody tr").count() == 400
    page.get_by_role("button", name="Show fewer").click()
    assert page.locator(".kernels tbody tr").count() == 8
    page.fill(".kernels .search", "variant 39")
    assert 8 < page.locator(".kernels tbody tr").count() <= 200


def test_theme_button_cycles_and_auto_follows_the_system(open_page: Open) -> None:
    page = open_page(one_run(), color_scheme="light")
    show(page, "figure.breakdown")
    paper = "() => getComputedStyle(document.body).backgroundColor"
    dot = "() => document.querySelector('[data-dimension=class] .dot').style.background"
    light, light_dot = page.evaluate(paper), page.evaluate(dot)
    page.emulate_media(color_scheme="dark")
    wait_for_frame(page)
    dark, dark_dot = page.evaluate(paper), page.evaluate(dot)
    assert dark != light
    assert dark_dot != light_dot
    for name, expected in (("light", light), ("dark", dark), ("auto", dark)):
        page.click("#theme")
        assert page.inner_text("#theme") == f"Theme: {name}"
        assert page.evaluate(paper) == expected
    assert page.evaluate(dot) == dark_dot


def test_a_fix_is_copied(open_page: Open) -> None:
    page = open_page(one_run(), permissions=["clipboard-read", "clipboard-write"])
    card = page.locator(".card").first
    card.locator(".copy").first.click()
    page.wait_for_function("() => document.querySelector('.card .copy').textContent === 'Copied'")
    text = page.evaluate("() => navigator.clipboard.readText()")
    assert text == one_run().advice[0].fixes[0].text  # type: ignore[index]


def test_fix_is_selected_without_a_clipboard(open_page: Open) -> None:
    page = open_page(one_run())
    page.evaluate("() => { delete Navigator.prototype.clipboard; document.execCommand = () => false; }")
    page.locator(".card .copy").first.click()
    page.wait_for_function("() => document.querySelector('.card .copy').textContent.includes('Ctrl+C')")
    assert page.evaluate("() => getSelection().toString()") == one_run().advice[0].fixes[0].text  # type: ignore[index]


def test_current_section_is_marked(open_page: Open) -> None:
    page = open_page(one_run(), width=1440)
    current = page.locator("nav [aria-current]")
    assert current.inner_text() == "Summary"
    # Charts built during the jump must not push the section away.
    page.locator("nav a", has_text="Roofline").click()
    page.wait_for_function("() => document.querySelector('nav [aria-current]').textContent === 'Roofline'")
    page.keyboard.press("End")
    page.wait_for_function("() => document.querySelector('nav [aria-current]').textContent === 'Environment'")


def test_text_is_visible_without_a_script(open_page: Open) -> None:
    page = open_page(one_run(), java_script_enabled=False)
    assert page.is_visible(".sentence")
    assert page.is_visible("#memory-categories td >> text=activations")
    assert page.is_hidden("#theme")


@pytest.mark.parametrize("width", [420, 1440])
def test_hostile_names_are_inert(open_page: Open, width: int) -> None:
    page = open_page(hostile(), width=width)
    show_all(page)
    page.keyboard.press("/")
    page.keyboard.type("hacked")
    for row in page.locator(".kernels tbody tr").all()[:6]:
        row.hover()
        row.click()
    for choice in page.locator(".choice").all()[:3]:
        choice.click()
    assert page.evaluate("() => window.hacked") is None
    assert page.locator("img, iframe").count() == 0
    assert page.locator("script").count() == 2
    assert HOSTILE[0] in page.inner_text("main")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width


def test_print_shows_all_charts_in_the_light_theme(open_page: Open) -> None:
    page = open_page(one_run(), color_scheme="dark")
    page.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    assert page.locator("figure.chart .body:empty").count() == 0
    assert page.evaluate("() => document.documentElement.dataset.theme") == "light"
    page.evaluate("() => dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("() => document.documentElement.dataset.theme") == "auto"
    page.emulate_media(media="print")
    assert page.is_hidden("nav")

"""Tables and pages for the terminal: aligned columns and decimal points, one line under the header, no boxes.

A terminal wraps lines that are too long, and columns no longer line up. So a table with a given width is made to fit in
four steps, the least harmful first, and stops as soon as it fits:

1. labels wrap over several header lines, so that a column is as wide as its values;
2. long remarks in the last column move below the table as numbered notes, equal remarks under one number;
3. the longest text column is shortened in the middle, where kernel names differ least (CSV and JSON have all of it);
4. the columns are split into blocks below each other, each repeating the columns that name the row.

No number is ever dropped, and after step 4 only a single cell can be too wide. Rejected: wrapping cells, which makes
uneven rows that are hard to scan and to search; and dropping columns, which hides what the user asked for. Without a
width (a pipe, a file) the table has its natural width.
"""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from rich.cells import cell_len, set_cell_size

from stepscope.findings import Advice, Finding, MemoryCard, Page, Report, Table, joint_saving
from stepscope.render.formats import VERDICTS, visible
from stepscope.render.numbers import Lane, Sheet, format_effect, format_value, lay_out, one_line, say_split, split_step

_GAP = "  "
_ON_A_PAGE = 3  # findings
_NOTHING_ALONE = "saves nothing alone"
_PAIR = 2  # runs that are compared in depth; more have no findings
_LEAST_TEXT = 24  # the least width of a text column
_MOST_REMARKS = 9  # more distinct texts than this are names rather than remarks, and stay in their rows
_PLAIN_NUMBER = re.compile(r"(-?[\d,]+)((?:\.\d+)?[%×]?\??)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Lanes next to each other with their header lines, and the remarks moved below them."""

    lanes: tuple[Lane, ...]
    headers: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()

    @property
    def widths(self) -> list[int]:
        columns = zip(self.lanes, self.headers, strict=True)
        return [max(map(cell_len, (*lane.cells, *header)), default=0) for lane, header in columns]

    @property
    def width(self) -> int:
        return sum(self.widths) + len(_GAP) * (len(self.lanes) - 1)


def render_text(sheet: Sheet, width: int | None) -> str:
    """Return the sheet as lines of at most `width` characters, if its cells allow it."""
    lanes = tuple(_align_points(lane) for lane in sheet.lanes)
    natural = _Block(lanes=lanes, headers=tuple((lane.label,) for lane in lanes))
    blocks = [natural] if width is None else _fit(natural, width)
    notes = [*(remark for block in blocks for remark in block.remarks), *sheet.notes]
    parts = [_wrap(sheet.title, width), *(_draw(block) for block in blocks)]
    parts.append("\n".join(_wrap(note, width) for note in notes))
    return "\n\n".join(part for part in parts if part) + "\n"


def _align_points(lane: Lane) -> Lane:
    """Pad numbers on the right so that their decimal points align once right-aligned."""
    if lane.is_text:
        return lane
    matches = [_PLAIN_NUMBER.fullmatch(cell) for cell in lane.cells]
    longest = max((len(match[2]) for match in matches if match), default=0)
    cells = [
        cell + " " * (longest - len(match[2])) if match else cell
        for cell, match in zip(lane.cells, matches, strict=True)
    ]
    return replace(lane, cells=tuple(cells))


def _fit(block: _Block, width: int) -> list[_Block]:
    """Apply the four steps of the module docstring."""
    if block.width <= width:
        return [block]
    narrow = _break_labels(block)
    if narrow.width <= width:
        return [narrow]
    moved = _move_remarks(narrow)
    # If numbering is not enough, short remarks stay in their rows, and only long ones move below.
    if moved.width <= width or narrow.widths[-1] > _LEAST_TEXT:
        narrow = moved
    short = _shorten_texts(narrow, width)
    return [short] if short.width <= width else _split(short, width)


def _break_labels(block: _Block) -> _Block:
    headers: list[tuple[str, ...]] = []
    for lane in block.lanes:
        longest_word = max(map(len, lane.label.split()), default=1)
        room = max(longest_word, *map(cell_len, lane.cells), 1)
        headers.append(tuple(textwrap.wrap(lane.label, room, break_on_hyphens=False)) or ("",))
    return replace(block, headers=tuple(headers))


def _move_remarks(block: _Block) -> _Block:
    """Number the texts of the last column and move them below the table, if they are longer than their number."""
    *others, last = block.lanes
    marker_width = len("[1]")
    texts = dict.fromkeys(cell for cell in last.cells if cell_len(cell) > marker_width)
    if not others or not last.is_text or len(texts) > _MOST_REMARKS:
        return block
    markers = {text: f"[{number}]" for number, text in enumerate(texts, start=1)}
    cells = tuple(markers.get(cell, cell) for cell in last.cells)
    remarks = tuple(f"{marker} {text}" for text, marker in markers.items())
    return replace(block, lanes=(*others, replace(last, cells=cells)), remarks=remarks)


def _shorten_texts(block: _Block, width: int) -> _Block:
    """Shorten the text columns, longest first, until the table fits or they reach their minimum."""
    lanes, widths, excess = list(block.lanes), block.widths, block.width - width
    for index in sorted(range(len(lanes)), key=lambda i: -widths[i]):
        room = max(_LEAST_TEXT, widths[index] - excess)
        if lanes[index].is_text and excess > 0 and room < widths[index]:
            lanes[index] = replace(lanes[index], cells=tuple(_shorten(cell, room) for cell in lanes[index].cells))
            excess -= widths[index] - room
    return replace(block, lanes=tuple(lanes))


def _shorten(text: str, room: int) -> str:
    if cell_len(text) <= room:
        return text
    half = (room - 1) // 2
    head, tail = set_cell_size(text, room - 1 - half), set_cell_size(text[::-1], half)[::-1]
    return f"{head}…{tail}"


def _split(block: _Block, width: int) -> list[_Block]:
    """Return as few blocks as possible, of similar width, each starting with the columns that name the row."""
    widths = block.widths
    keys = [index for index, lane in enumerate(block.lanes) if lane.names_row]
    if sum(widths[index] for index in keys) > width // 2:
        keys = keys[:1]
    fewest = len(_group(widths, keys, width))
    # The smallest limit that needs no more blocks: a full block above one with a single column looks broken.
    narrowest = next(limit for limit in range(width + 1) if len(_group(widths, keys, limit)) == fewest)
    blocks = [_pick(block, [*keys, *group]) for group in _group(widths, keys, narrowest)]
    return [*blocks[:-1], replace(blocks[-1], remarks=block.remarks)]


def _group(widths: Sequence[int], keys: Sequence[int], limit: int) -> list[list[int]]:
    """Return the columns that are not keys, in order, in groups that fit into `limit` together with the keys."""
    groups: list[list[int]] = [[]]
    for index in range(len(keys), len(widths)):
        columns = [*keys, *groups[-1], index]
        if groups[-1] and sum(widths[i] + len(_GAP) for i in columns) - len(_GAP) > limit:
            groups.append([])
        groups[-1].append(index)
    return groups


def _pick(block: _Block, indices: Sequence[int]) -> _Block:
    return _Block(lanes=tuple(block.lanes[i] for i in indices), headers=tuple(block.headers[i] for i in indices))


def _draw(block: _Block) -> str:
    height = max(map(len, block.headers), default=0)
    # Labels with fewer lines are at the bottom, next to their values.
    padded = [("",) * (height - len(header)) + header for header in block.headers]
    header_rows = list(zip(*padded, strict=True))
    rows = list(zip(*(lane.cells for lane in block.lanes), strict=True))
    lines = [_draw_row(block, row) for row in header_rows]
    lines.append("─" * block.width)
    lines += [_draw_row(block, row) for row in rows]
    return "\n".join(lines) if block.lanes else ""


def _draw_row(block: _Block, cells: Sequence[str]) -> str:
    padded = []
    for lane, width, cell in zip(block.lanes, block.widths, cells, strict=True):
        space = " " * (width - cell_len(cell))
        padded.append(cell + space if lane.is_text else space + cell)
    return _GAP.join(padded).rstrip()


def _wrap(text: str, width: int | None) -> str:
    if width is None:
        return text
    return "\n".join(textwrap.wrap(text, max(width, _LEAST_TEXT), subsequent_indent="  "))


# --- pages ----------------------------------------------------------------------------------------------------------


def render_page(page: Page, *, width: int | None) -> str:
    """Return a page as text: the headline, the tables, and the findings with their fixes."""
    parts = ["\n".join(one_line(line) for line in page.headline.splitlines())]
    # Tables often repeat their notes; only the last table of a page shows them.
    parts += [
        render_text(lay_out(_quiet(table, page.tables[-1]), detail=False), width).rstrip("\n") for table in page.tables
    ]
    if page.findings is not None:
        parts.append(_render_findings(page.findings, width))
    return "\n\n".join(parts) + "\n"


def _quiet(table: Table, last: Table) -> Table:
    notes = table.notes if table is last else tuple(note for note in table.notes if note not in last.notes)
    return msgspec.structs.replace(table, notes=notes)


def _render_findings(findings: tuple[Finding, ...], width: int | None) -> str:
    if not findings:
        return "No findings"
    cards = [one for one in findings if not one.is_remark]
    remarks = [one for one in findings if one.is_remark]
    how = f"(to explain one: stepscope rule {findings[0].code})"
    lines = [f"Findings {how}"] if cards else []
    lines += _write_joint(cards)
    printed: dict[str, str] = {}
    for one in cards[:_ON_A_PAGE]:
        lines.append(f"{one.code}  {_name_finding(one)}")
        lines.extend(_indented(one.evidence, width))
        if one.fix in printed:
            lines.append(f"       Same fix as {printed[one.fix]}")
            continue
        printed[one.fix] = one.code
        lines.extend(_write_fix(one, width))
        for other in one.also:
            lines.extend(_indented(f"Also explains this time ({other.code}): {other.title}", width))
            if other.fix not in printed:
                lines.extend(_write_fix(other, width))
    if len(cards) > _ON_A_PAGE:
        lines.append(f"{len(cards) - _ON_A_PAGE} more: --table findings --detail")
    if remarks:
        lines += ["", "Remarks"] if cards else [f"Remarks {how}"]
    for one in remarks:
        sentence = f"{_name_finding(one)}: {one.evidence}" + (f". {one.action}" if one.action else "")
        first, *rest = _indented(sentence, width)
        lines += [f"{one.code}  {first.strip()}", *rest]
    return "\n".join(lines)


def _write_fix(finding: Finding, width: int | None) -> list[str]:
    """Return the action and its fix, on one line if it fits. Code is for pasting, so its lines are not wrapped."""
    code = [visible(line) for line in finding.fix.splitlines()]
    together = f"       {finding.action}: {code[0]}"
    if len(code) == 1 and len(together) <= (width or 120):
        return [together]
    return [*_indented(f"{finding.action}:", width), *(f"         {line}" for line in code)]


def _write_joint(cards: Sequence[Finding]) -> list[str]:
    """Return what all fixes save together, if there are several."""
    joint = joint_saving(cards)
    if joint is None or sum(one.joint_ns is not None for one in cards) < 2:
        return []
    saved = f"{joint.saving_ns / 1e6:,.2f} ms, {format_value('share', joint.share)}"
    overlap = " Savings overlap: they do not add up." if joint.overlaps else ""
    return [f"All fixes together save about {saved}.{overlap}"]


def _name_finding(finding: Finding) -> str:
    """Return the title with the saving, and with what it adds to the joint saving if that differs."""
    if not finding.saving_ns and not finding.joint_ns:
        return finding.title + _say_saving(finding)
    share = f", {format_value('share', finding.share)}" if finding.share else ""
    about = "up to" if finding.is_remark else "about"
    saved = f"saves {about} {finding.saving_ns / 1e6:,.2f} ms{share}" if finding.saving_ns else _NOTHING_ALONE
    adds = f"{(finding.joint_ns or 0) / 1e6:,.2f}"
    if finding.joint_ns is not None and adds != f"{(finding.saving_ns or 0) / 1e6:,.2f}":
        saved += f"; {adds} ms {finding.say_after}"
    return f"{finding.title} ({saved})"


def _indented(text: str, width: int | None) -> list[str]:
    wrapped = [textwrap.wrap(one_line(line), max(40, (width or 120) - 7)) or [""] for line in text.splitlines()]
    return ["       " + line for lines in wrapped for line in lines]


def summarize_report(report: Report) -> tuple[str, ...]:
    """Return a report in four lines: the headline, step time with its busy and idle part, the findings that save most,
    and the measurement quality; a line about memory comes before the last one if it was predicted. They repeat what the
    page says, with the same digits."""
    quality = f"quality: {VERDICTS[report.soundness.verdict].lower()}. {report.soundness.sentence}"
    memory = [_summarize_memory(report.memory_card)] if report.memory_card is not None else []
    findings = [_summarize_findings(report.advice)] if len(report.runs) <= _PAIR else []
    lines = (report.sentence, _summarize_step(report), *findings, *memory, quality)
    return tuple(map(one_line, lines))


def _summarize_step(report: Report) -> str:
    picture = report.picture
    if picture is None:
        return (
            "; ".join(f"{fact.label} {format_value(fact.kind, fact.value)}" for fact in report.facts) or "no step timed"
        )
    told = [
        f"{f'{run}: ' if run else ''}{split_step(bar)[0]}, {say_split(bar)}"
        for run, bar in zip(picture.runs, picture.bars, strict=True)
        if bar is not None
    ]
    is_step = any(bar is not None and bar.is_step for bar in picture.bars)
    return f"{'step' if is_step else 'trace'}: {'; '.join(told)}"


def _say_saving(finding: Finding) -> str:
    if finding.saving_bytes is not None:
        alone = "" if finding.is_enough else ", not enough alone"
        return f" (−{format_value('bytes', finding.saving_bytes)}{alone})"
    if finding.saving_ms is None:
        return ""
    return f" (−{format_value('ms', finding.saving_ms)})" if finding.saving_ns else f" ({_NOTHING_ALONE})"


def _summarize_memory(card: MemoryCard) -> str:
    peak = card.sentences[0].removeprefix("Peak memory: ").removesuffix(".")
    changes = [f"{one.title}: {', '.join(format_effect(one))}" for one in card.lines if not one.note][:_ON_A_PAGE]
    limits = [one.title for one in card.lines if one.note]
    return f"memory: {'; '.join((peak, *changes, *limits))}"


def _summarize_findings(advice: tuple[Advice, ...] | None) -> str:
    if advice is None:
        return "findings: none, this run has no kernel trace"
    cards = [one.finding for one in advice if not one.finding.is_remark]
    if not cards:
        return "findings: none"
    savings = [_say_saving(one) for one in cards]
    named = [f"{one.title}{saving}" for one, saving in zip(cards, savings, strict=True)][:_ON_A_PAGE]
    more = f"; {len(cards) - len(named)} more" if len(cards) > len(named) else ""
    joint, num_joint = joint_saving(cards), sum(one.joint_ns is not None for one in cards)
    total = f"; all fixes −{format_value('ms', joint.saving_ns / 1e6)}" if joint and num_joint > 1 else ""
    return f"findings: {'; '.join(named)}{more}{total}"

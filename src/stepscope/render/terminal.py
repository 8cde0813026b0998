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

from stepscope.findings import Finding, Page, Table
from stepscope.render.formats import visible
from stepscope.render.numbers import Lane, Sheet, format_value, lay_out, one_line

_GAP = "  "
_ON_A_PAGE = 3  # findings
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
    lines = ["Findings"] if cards else []
    printed: dict[str, str] = {}
    for one in cards[:_ON_A_PAGE]:
        lines.append(_head_finding(one))
        lines.extend(_indented(one.evidence, width))
        if one.fix in printed:
            lines.append(f"       Same fix as {printed[one.fix]}")
            continue
        printed[one.fix] = one.code
        lines.extend(_indented(f"{one.action}:", width))
        # A command or code is for pasting: it keeps its lines.
        lines.extend(f"         {visible(line)}" for line in one.fix.splitlines())
    if len(cards) > _ON_A_PAGE:
        lines.append(f"{len(cards) - _ON_A_PAGE} more: --table findings --detail")
    if remarks:
        lines += ["", "Remarks"] if cards else ["Remarks"]
    for one in remarks:
        lines.append(_head_finding(one))
        lines.extend(_indented(one.evidence, width))
        lines.extend(_indented(one.action, width) if one.action else ())
    lines += ["", f"To explain a finding: stepscope rule {findings[0].code}"]
    return "\n".join(lines)


def _head_finding(finding: Finding) -> str:
    if not finding.saving_ns:
        return f"{finding.code}  {finding.title}"
    share = f", {format_value('share', finding.share)}" if finding.share else ""
    return f"{finding.code}  {finding.title} (saves about {finding.saving_ns / 1e6:,.2f} ms per step{share})"


def _indented(text: str, width: int | None) -> list[str]:
    wrapped = [textwrap.wrap(one_line(line), max(40, (width or 120) - 7)) or [""] for line in text.splitlines()]
    return ["       " + line for lines in wrapped for line in lines]

"""A page for the terminal: what it is about, tables, and findings with what to do."""

import textwrap

import msgspec

from stepscope.findings import Finding, Page, Table
from stepscope.report.formats import Format
from stepscope.report.sheet import one_line
from stepscope.report.tables import render

_ON_A_PAGE = 3


def render_page(page: Page, *, width: int | None) -> str:
    parts = ["\n".join(one_line(line) for line in page.headline.splitlines())]
    # Notes repeat from table to table; on a page the last one says it for all.
    parts += [render(_quiet(table, page.tables[-1]), Format.TEXT, width=width).rstrip("\n") for table in page.tables]
    if page.findings is not None:
        parts.append(_render_findings(page.findings, width))
    return "\n\n".join(parts) + "\n"


def _quiet(table: Table, last: Table) -> Table:
    notes = table.notes if table is last else tuple(note for note in table.notes if note not in last.notes)
    return msgspec.structs.replace(table, notes=notes)


def _render_findings(findings: tuple[Finding, ...], width: int | None) -> str:
    if not findings:
        return "Findings: nothing that stands out"
    lines = ["Findings"]
    for one in findings[:_ON_A_PAGE]:
        saving = f"saves about {one.saving_ns / 1e6:,.2f} ms a step" if one.saving_ns else "no saving estimated"
        share = f" ({one.share:.1%})" if one.share else ""
        lines.append(f"{one.code}  {one.title}: {saving}{share}")
        lines.extend(_indented(one.evidence, width))
        lines.extend(_indented(f"fix: {one.fix}", width))
    if len(findings) > _ON_A_PAGE:
        lines.append(f"{len(findings) - _ON_A_PAGE} more: --table findings --detail")
    lines.append(f"What a finding means: stepscope rule {findings[0].code}")
    return "\n".join(lines)


def _indented(text: str, width: int | None) -> list[str]:
    wrapped = [textwrap.wrap(one_line(line), max(40, (width or 120) - 7)) or [""] for line in text.splitlines()]
    return ["       " + line for lines in wrapped for line in lines]

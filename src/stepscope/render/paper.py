"""The figures and tables of a report for a paper, and their file names.

Every chart on the page becomes a figure, and every list a table. Text may come from any trace, so all of it goes
through `tidy` first: home directories hidden, nothing invisible, nothing too long.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from string import ascii_lowercase
from typing import Any

import msgspec

from stepscope.explain.story.sections.breakdown import tabulate_dimensions
from stepscope.findings import (
    Advice,
    Bars,
    Breakdown,
    Cell,
    Column,
    Figure,
    MemoryCard,
    OfSeveral,
    Part,
    Questions,
    Report,
    Roofline,
    SideBySide,
    StepPicture,
    Table,
    Timeline,
)
from stepscope.render.drawing import draw_part
from stepscope.render.drawing.bars import chart_dimensions, draw_bars
from stepscope.render.formats import COPYABLE, NAME, clean
from stepscope.render.numbers import format_value

_MOST_KEY = 60
# Names that code looks up, not text to read.
_KEPT = ("key", "kind", "verdict")
_MS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A figure to draw. `section` is the index of its section in the report, None for the summary."""

    key: str
    title: str
    section: int | None
    draw: Callable[[], str]  # as SVG


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    key: str
    title: str
    section: int | None
    table: Table


def collect(report: Report) -> tuple[list[Drawing], list[Listing]]:
    """Return all figures and tables of a tidy report, each under a unique name."""
    found: list[Drawing | Listing] = [_list("facts", None, _tabulate_facts(report))]
    if report.advice is not None:
        found.append(_list("findings", None, _tabulate_advice(report.advice)))
    if report.memory_card is not None:
        found.append(_list("memory-advice", None, _tabulate_memory(report.memory_card)))
    found += _take("step", None, report.picture)
    for place, section in enumerate(report.sections):
        for exhibit in section.exhibits:
            found += _take(exhibit.key, place, exhibit.part)
    drawings = [piece for piece in found if isinstance(piece, Drawing)]
    listings = [piece for piece in found if isinstance(piece, Listing)]
    drawn, listed = name_apart([piece.key for piece in drawings]), name_apart([piece.key for piece in listings])
    return (
        [replace(piece, key=key) for piece, key in zip(drawings, drawn, strict=True)],
        [replace(piece, key=key) for piece, key in zip(listings, listed, strict=True)],
    )


def name_apart(keys: Sequence[str]) -> list[str]:
    """Return the keys as file names: none leaves its directory, and none occurs twice."""
    names: list[str] = []
    for key in keys:
        plain = re.sub(r"[^a-z0-9]+", "-", key[:_MOST_KEY].lower()).strip("-") or "part"
        others = (f"{plain}-{number}" for number in count(2))
        names.append(plain if plain not in names else next(name for name in others if name not in names))
    return names


def tidy(value: Any, most: int = COPYABLE) -> Any:
    """Return the same value with all text safe to share, and at most `most` characters long."""
    if isinstance(value, str):
        return clean(value, most, lines=True)
    if isinstance(value, tuple):
        # Columns of numbers are not checked: there are millions of them.
        return tuple(tidy(item, most) for item in value) if _holds_text(value) else value
    if isinstance(value, msgspec.Struct):
        limit = NAME if isinstance(value, Figure | Bars | Roofline | StepPicture | Timeline | OfSeveral) else most
        fields = {name: getattr(value, name) for name in value.__struct_fields__ if name not in _KEPT}
        return msgspec.structs.replace(value, **{name: tidy(field, limit) for name, field in fields.items()})
    return value


def _holds_text(items: tuple[Any, ...]) -> bool:
    return any(issubclass(kind, str | tuple | msgspec.Struct) for kind in set(map(type, items)))


def _take(key: str, section: int | None, part: Part | None) -> Iterable[Drawing | Listing]:
    match part:
        case None:
            return
        case Table():
            yield _list(key, section, part)
        case Breakdown():
            yield from _take_breakdown(key, section, part)
        case Questions():
            yield _list(key, section, _tabulate_questions(part))
            for number, question in enumerate(part.questions, start=1):
                if question.evidence is not None:
                    yield _list(f"{key}-{number}", section, question.evidence)
        case SideBySide():
            for letter, run, inner in zip(ascii_lowercase, part.runs, part.parts, strict=False):
                if inner is not None:
                    named = msgspec.structs.replace(inner, title=f"{run}: {inner.title}")
                    yield from _take(f"{key}-{letter}", section, named)
        case _:
            yield Drawing(key=key, title=part.title, section=section, draw=partial(draw_part, part))


def _take_breakdown(key: str, section: int | None, breakdown: Breakdown) -> Iterable[Drawing | Listing]:
    for chart in chart_dimensions(breakdown):
        yield Drawing(key=f"{key}-{chart.key}", title=chart.bars.title, section=section, draw=partial(draw_bars, chart))
    for dimension, table in tabulate_dimensions(breakdown):
        yield _list(f"{key}-{dimension}", section, table)


def _list(key: str, section: int | None, table: Table) -> Listing:
    return Listing(key=key, title=table.title, section=section, table=table)


def _tabulate_facts(report: Report) -> Table:
    """The main figures, formatted for readers, and raw with their kind for programs."""
    has_before = any(fact.before is not None for fact in report.facts)
    columns = (
        Column(key="key", label="key", detail=True),
        Column(key="what", label="what"),
        *((Column(key="shown_a", label="A"), Column(key="shown", label="B")) if has_before else ()),
        *(() if has_before else (Column(key="shown", label="value"),)),
        Column(key="note", label="note"),
        *((Column(key="value_a", label="raw value of A", detail=True),) if has_before else ()),
        Column(key="value", label="raw value", detail=True),
        Column(key="kind", label="kind", detail=True),
    )
    rows: list[tuple[Cell, ...]] = []
    for fact in report.facts:
        before = (format_value(fact.kind, fact.before),) if has_before else ()
        raw = (fact.before,) if has_before else ()
        shown = format_value(fact.kind, fact.value)
        rows.append((fact.key, fact.label, *before, shown, fact.note, *raw, fact.value, fact.kind))
    notes = [note for note in (report.sentence, report.soundness.sentence) if note]
    return Table(title=report.title, columns=columns, rows=tuple(rows), notes=tuple(notes))


def _tabulate_advice(advice: Sequence[Advice]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for one in advice:
        finding = one.finding
        saving, adds = (None if ns is None else ns / _MS for ns in (finding.saving_ns, finding.joint_ns))
        fixes = "\n".join(f"{fix.label}: {fix.text}" for fix in one.fixes)
        saved = (saving, finding.share, adds, finding.saving_bytes)
        rows.append((finding.code, finding.title, *saved, finding.action, finding.evidence, fixes))
    return Table(
        title="Findings",
        columns=(
            Column(key="code", label="code"),
            Column(key="finding", label="finding"),
            Column(key="saving_ms", label="saving ms", kind="ms"),
            Column(key="share", label="share of step", kind="share"),
            Column(key="adds_ms", label="ms once the fixes above are in", kind="ms"),
            Column(key="saving_bytes", label="memory saved", kind="bytes", detail=True),
            Column(key="fix", label="what to do"),
            Column(key="evidence", label="evidence", detail=True),
            Column(key="to_copy", label="code to copy", detail=True),
        ),
        rows=tuple(rows),
    )


def _tabulate_memory(card: MemoryCard) -> Table:
    return Table(
        title="What would save memory",
        columns=(
            Column(key="change", label="change"),
            Column(key="saving_bytes", label="memory saved", kind="bytes"),
            Column(key="adds_ms", label="ms added to the step", kind="ms"),
            Column(key="memory_is", label="memory is"),
            Column(key="finding", label="time is that of", detail=True),
            Column(key="note", label="note"),
            Column(key="command", label="command", detail=True),
        ),
        rows=tuple(
            (
                one.title,
                one.saving_bytes,
                None if one.adds_ns is None else one.adds_ns / _MS,
                "measured" if one.is_measured else "predicted",
                one.finding or None,
                one.note or None,
                one.command,
            )
            for one in card.lines
        ),
        notes=(*card.sentences, *card.notes),
    )


def _tabulate_questions(part: Questions) -> Table:
    rows = tuple(
        (one.question, one.figure or None, one.answer, one.command, "yes" if one.is_answered else "no")
        for one in part.questions
    )
    return Table(
        title=part.title,
        columns=(
            Column(key="question", label="question"),
            Column(key="figure", label="figure"),
            Column(key="answer", label="answer"),
            Column(key="command", label="command", detail=True),
            Column(key="is_answered", label="answered", detail=True),
        ),
        rows=rows,
    )

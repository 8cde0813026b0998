"""The sections of a report of two runs: one picture of both where there is such a thing, else side by side."""

from collections.abc import Sequence

import msgspec

from stepscope.explain.story.run import SECTIONS
from stepscope.explain.story.sections.breakdown import break_down
from stepscope.explain.story.sections.roofline_chart import draw_roofline
from stepscope.explain.story.sources import Materials
from stepscope.findings import Beside, Cell, Column, Exhibit, Missing, Part, Section, Table

_RUNS = ("A", "B")


def put_beside(key: str, a: Materials, b: Materials) -> Section:
    """A run of one rank has no section of ranks; every other section is there for every run."""
    pair = [SECTIONS[key](one) if key != "ranks" or len(one.ranks) > 1 else None for one in (a, b)]
    known = [section for section in pair if section is not None]
    exhibits = dict.fromkeys(exhibit.key for section in known for exhibit in section.exhibits)
    joined = [Exhibit(key=one, part=_join(one, _parts(pair, one), a, b)) for one in exhibits]
    return Section(
        key=key,
        title=known[0].title,
        lead=_join_leads(pair),
        exhibits=tuple(joined),
        missing=join_missing(*(section.missing if section else () for section in pair)),
    )


def _parts(pair: Sequence[Section | None], key: str) -> tuple[Part | None, ...]:
    found = [{exhibit.key: exhibit.part for exhibit in section.exhibits} if section else {} for section in pair]
    return tuple(parts.get(key) for parts in found)


def _join(key: str, parts: tuple[Part | None, ...], a: Materials, b: Materials) -> Part:
    profiles = [one.profile for one in (a, b) if one.profile is not None]
    steps = [one.profile_step_ns for one in (a, b) if one.profile_step_ns is not None]
    if key == "breakdown" and len(profiles) == 2:
        return break_down(profiles, _RUNS, steps)
    if key == "roofline" and len(profiles) == 2:
        drawn = draw_roofline(profiles, _RUNS)
        if not isinstance(drawn, Missing):  # two devices have two roofs
            return drawn
    if key == "environment-table":
        return _join_tables(parts)
    titles = {run: part.title for run, part in zip(_RUNS, parts, strict=True) if part is not None}
    title = "; ".join(f"{run}: {one}" for run, one in titles.items())
    return Beside(
        title=next(iter(titles.values())) if len(set(titles.values())) == 1 else title, runs=_RUNS, parts=parts
    )


def _join_tables(parts: tuple[Part | None, ...]) -> Table:
    """Two tables of what and value as one, with a column a run."""
    tables = [part if isinstance(part, Table) else None for part in parts]
    values = [_gather(table) if table else {} for table in tables]
    names = dict.fromkeys(name for one in values for name in one)
    rows: tuple[tuple[Cell, ...], ...] = tuple((name, values[0].get(name), values[1].get(name)) for name in names)
    title = next(table.title for table in tables if table)
    columns = (Column(key="what", label="what"), Column(key="a", label="A"), Column(key="b", label="B"))
    return Table(title=title, columns=columns, rows=rows)


def _gather(table: Table) -> dict[str, Cell]:
    """Rows of one name are one, with all their values."""
    found: dict[str, list[Cell]] = {}
    for name, value in table.rows:
        found.setdefault(str(name), []).append(value)
    return {name: each[0] if len(each) == 1 else ", ".join(map(str, each)) for name, each in found.items()}


def _join_leads(pair: Sequence[Section | None]) -> str:
    leads = [section.lead if section else "" for section in pair]
    if leads[0] == leads[1]:
        return leads[0]
    return "\n".join(f"{run}: {lead}" for run, lead in zip(_RUNS, leads, strict=True) if lead)


def join_missing(a: Sequence[Missing], b: Sequence[Missing]) -> tuple[Missing, ...]:
    """What both lack is said once."""
    both = [one for one in a if one in b]
    apart = [
        msgspec.structs.replace(one, why=f"{run}: {one.why}")
        for run, missing in zip(_RUNS, (a, b), strict=True)
        for one in missing
        if one not in both
    ]
    return (*both, *apart)

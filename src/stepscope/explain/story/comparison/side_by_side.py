"""The sections of a comparison: one chart of both runs where that is possible, else the two next to each other."""

from collections.abc import Sequence

import msgspec

from stepscope.explain.story.commands import find_case
from stepscope.explain.story.run import SECTIONS, is_shown
from stepscope.explain.story.sections.breakdown import break_down
from stepscope.explain.story.sections.environment_facts import find_device, find_torch_version
from stepscope.explain.story.sections.roofline_chart import draw_roofline
from stepscope.explain.story.sources import Materials
from stepscope.explain.trace.run_labels import RunIdentity, label_pair
from stepscope.findings import Cell, Column, Exhibit, Missing, Part, Section, SideBySide, Table

Labels = tuple[str, str]


def label_sides(a: Materials, b: Materials) -> Labels:
    """What a comparison calls its two runs."""
    return label_pair(identify_run(a), identify_run(b))


def identify_run(materials: Materials) -> RunIdentity:
    return RunIdentity(
        name=materials.name,
        case=find_case(materials),
        device=find_device(materials),
        torch=find_torch_version(materials),
    )


def put_side_by_side(key: str, a: Materials, b: Materials, labels: Labels) -> Section:
    """One section of both runs. Only a run with several ranks has a section `ranks`; both have every other one."""
    pair = [SECTIONS[key](one) if is_shown(key, one) else None for one in (a, b)]
    known = [section for section in pair if section is not None]
    exhibits = dict.fromkeys(exhibit.key for section in known for exhibit in section.exhibits)
    absent = [section.missing if section else () for section in pair]
    joined = [Exhibit(key=one, part=_join(one, _parts(pair, one), (a, b), labels)) for one in exhibits]
    return Section(
        key=key,
        title=known[0].title,
        lead=_join_leads(pair, labels),
        exhibits=tuple(joined),
        missing=join_missing(absent[0], absent[1], labels),
    )


def _parts(pair: Sequence[Section | None], key: str) -> tuple[Part | None, ...]:
    found = [{exhibit.key: exhibit.part for exhibit in section.exhibits} if section else {} for section in pair]
    return tuple(parts.get(key) for parts in found)


def _join(key: str, parts: tuple[Part | None, ...], runs: tuple[Materials, Materials], labels: Labels) -> Part:
    profiles = [one.profile for one in runs if one.profile is not None]
    if key == "breakdown" and len(profiles) == 2:
        return break_down(profiles, labels)
    if key == "roofline" and len(profiles) == 2:
        drawn = draw_roofline(profiles, labels)
        if not isinstance(drawn, Missing):  # two devices need two charts
            return drawn
    if key == "environment-table":
        return _join_tables(parts, labels)
    titles = {label: part.title for label, part in zip(labels, parts, strict=True) if part is not None}
    title = "; ".join(f"{label}: {one}" for label, one in titles.items())
    return SideBySide(
        title=next(iter(titles.values())) if len(set(titles.values())) == 1 else title, runs=labels, parts=parts
    )


def _join_tables(parts: tuple[Part | None, ...], labels: Labels) -> Table:
    """Two tables of names and values as one table with a column per run."""
    tables = [part if isinstance(part, Table) else None for part in parts]
    values = [_gather(table) if table else {} for table in tables]
    names = dict.fromkeys(name for one in values for name in one)
    rows: tuple[tuple[Cell, ...], ...] = tuple((name, values[0].get(name), values[1].get(name)) for name in names)
    title = next(table.title for table in tables if table)
    columns = (Column(key="what", label=""), Column(key="a", label=labels[0]), Column(key="b", label=labels[1]))
    return Table(title=title, columns=columns, rows=rows)


def _gather(table: Table) -> dict[str, Cell]:
    """The value of each name; several values of one name are joined."""
    found: dict[str, list[Cell]] = {}
    for name, value in table.rows:
        found.setdefault(str(name), []).append(value)
    return {name: each[0] if len(each) == 1 else ", ".join(map(str, each)) for name, each in found.items()}


def _join_leads(pair: Sequence[Section | None], labels: Labels) -> str:
    leads = [section.lead if section else "" for section in pair]
    if leads[0] == leads[1]:
        return leads[0]
    return "\n".join(f"{label}: {lead}" for label, lead in zip(labels, leads, strict=True) if lead)


def join_missing(a: Sequence[Missing], b: Sequence[Missing], labels: Labels) -> tuple[Missing, ...]:
    """What both runs lack comes once."""
    both = [one for one in a if one in b]
    apart = [
        msgspec.structs.replace(one, why=f"{label}: {one.why}")
        for label, missing in zip(labels, (a, b), strict=True)
        for one in missing
        if one not in both
    ]
    return (*both, *apart)

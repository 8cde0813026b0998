"""Trials as tables, by class and kind of evidence and by forgery, for the terminal and for the docs."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from attack.forgery import Forgery
from attack.trial import FORGERIES, HONEST, Trial
from stepscope.findings import Cell, Column, Table
from stepscope.render.formats import Format
from stepscope.render.tables import render

START, END = "<!-- attacks: start -->", "<!-- attacks: end -->"
_FAILURES = ("crashed", "too slow", "too large")
_COUNTS = (
    Column(key="tried", label="tried", kind="count"),
    Column(key="refuted", label="refuted", kind="count"),
    Column(key="cannot_tell", label="cannot tell", kind="count"),
    Column(key="consistent", label="consistent", kind="count"),
)


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All trials of a run, with what is needed to repeat it."""

    commit: str
    command: str
    minutes: float
    trials: tuple[Trial, ...]

    @property
    def forged(self) -> list[Trial]:
        return [one for one in self.trials if not one.what.startswith(HONEST)]

    @property
    def honest(self) -> list[Trial]:
        return [one for one in self.trials if one.what.startswith(HONEST)]

    @property
    def passed(self) -> list[Trial]:
        """Forgeries that must be detected and were not, or that stepscope failed on."""
        return [
            one for one in self.forged if one.outcome in _FAILURES or (_must_fail(one) and one.outcome == "consistent")
        ]

    @property
    def wronged(self) -> list[Trial]:
        """True claims that were refuted, or that stepscope failed on."""
        return [one for one in self.honest if one.outcome in (*_FAILURES, "refuted", "rejected")]


def _must_fail(trial: Trial) -> bool:
    return FORGERIES[trial.what].promise == "detected"


def _count(trials: Sequence[Trial]) -> tuple[Cell, ...]:
    """A file that is rejected counts as refuted: it does not pass, and the error says why. So does a crash, which is
    listed below the table."""
    found = Counter(one.outcome for one in trials)
    consistent, undecided = found["consistent"], found["cannot tell"]
    failed = sum(found[one] for one in _FAILURES)
    return len(trials), len(trials) - consistent - undecided - failed, undecided, consistent


def class_table(results: Results) -> Table:
    groups: dict[tuple[str, str, str], list[Trial]] = {}
    for one in results.forged:
        forgery = FORGERIES[one.what]
        groups.setdefault((forgery.family, forgery.promise, one.kind), []).append(one)
    rows = [(*key, *_count(trials)) for key, trials in groups.items()]
    columns = (
        Column(key="class", label="class"),
        Column(key="promise", label="promise"),
        Column(key="evidence", label="evidence"),
        *_COUNTS,
    )
    return Table(title="Forgeries by class", columns=columns, rows=tuple(sorted(rows, key=_order)))


def _order(row: Sequence[Cell]) -> tuple[int, str, str]:
    families = list(dict.fromkeys(one.family for one in FORGERIES.values()))
    return families.index(str(row[0])), str(row[1]), str(row[2])


def forgery_table(results: Results, promise: str) -> Table:
    rows = []
    for name, forgery in FORGERIES.items():
        trials = [one for one in results.forged if one.what == name]
        if forgery.promise == promise:
            why = (forgery.argument,) if promise == "undetectable" else ()
            rows.append((forgery.family, name, forgery.sentence, *why, *_count(trials)))
    columns = (
        Column(key="class", label="class"),
        Column(key="forgery", label="forgery"),
        Column(key="what", label="what it does"),
        *((Column(key="why", label="why nothing shows it"),) if promise == "undetectable" else ()),
        *_COUNTS,
    )
    title = "Forgeries that must be detected" if promise == "detected" else "Forgeries that cannot be detected"
    return Table(title=title, columns=columns, rows=tuple(rows))


def honest_table(results: Results) -> Table:
    groups: dict[str, list[Trial]] = {}
    for one in results.honest:
        groups.setdefault(one.what.removeprefix(f"{HONEST}: "), []).append(one)
    columns = (Column(key="claim", label="true claim"), *_COUNTS)
    rows = tuple((what, *_count(trials)) for what, trials in groups.items())
    return Table(title="True claims", columns=columns, rows=rows)


def list_failures(trials: Iterable[Trial]) -> str:
    """Return one line per trial, with the command that repeats it."""
    lines = [
        f"{one.outcome:11}  {one.what} on {one.file} ({one.seconds:.1f} s, {one.peak_bytes / 1e6:,.0f} MB)\n"
        f"             python bench/attacks.py --only '{one.what}' --file {one.file}\n"
        f"             {one.why.splitlines()[-1] if one.why else ''}"
        for one in trials
    ]
    return "\n".join(lines)


# --- Docs


def make_section(results: Results) -> str:
    """Return what docs/trust.md has between its markers."""
    parts = [
        f"{len(results.forged):,} forged files, {len(results.honest):,} true claims; commit `{results.commit}`, "
        f"`{results.command}`.",
        render(class_table(results), Format.MD).strip(),
        render(forgery_table(results, "detected"), Format.MD).strip(),
        render(forgery_table(results, "undetectable"), Format.MD).strip(),
        render(honest_table(results), Format.MD).strip(),
    ]
    return "\n\n".join(parts)


def write_section(page: Path, section: str) -> None:
    text = page.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(START)}.*?{re.escape(END)}", re.DOTALL)
    assert len(pattern.findall(text)) == 1, f"{page} needs the markers {START} and {END} once"
    page.write_text(pattern.sub(lambda _: f"{START}\n{section}\n{END}", text), encoding="utf-8")


def listed_forgeries(page: Path) -> list[tuple[str, str, str]]:
    """Return class, name and sentence of every forgery in the tables of the page."""
    text = page.read_text(encoding="utf-8").partition(START)[2].partition(END)[0]
    rows = [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in text.splitlines()]
    return [(row[0], row[1], row[2]) for row in rows if len(row) > 2 and row[1] in FORGERIES]


def expected_forgeries() -> list[tuple[str, str, str]]:
    def row(forgery: Forgery) -> tuple[str, str, str]:
        return forgery.family, forgery.name, forgery.sentence

    detected = [row(one) for one in FORGERIES.values() if one.promise == "detected"]
    return [*detected, *(row(one) for one in FORGERIES.values() if one.promise == "undetectable")]

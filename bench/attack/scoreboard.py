"""Trials as tables, by class and kind of evidence and by forgery, for the terminal and for the docs."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from attack.trial import FORGERIES, HONEST, Outcome, Trial
from stepscope.findings import Cell, Column, Table
from stepscope.render.formats import Format
from stepscope.render.tables import render
from stepscope.units import count_noun

_FAILURES: tuple[Outcome, ...] = ("crashed", "too slow", "too large")
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
        groups.setdefault(one.what.removeprefix(f"{HONEST}: ").partition(", ")[0], []).append(one)
    columns = (Column(key="claim", label="true claim"), *_COUNTS)
    rows = tuple((what, *_count(trials)) for what, trials in groups.items())
    return Table(title="True claims", columns=columns, rows=rows)


def list_failures(trials: Iterable[Trial]) -> str:
    """Return what passed on which files, with a command that repeats it and the reason of the first."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for one in trials:
        groups.setdefault((one.what, one.outcome), []).append(one)
    return "\n".join(
        f"- {what}: {outcome} on {count_noun(len(ones), 'file')}: {', '.join(one.file for one in ones)}\n"
        f"  python bench/attacks.py --only '{what}' --file {ones[0].file}\n"
        f"  {ones[0].why.strip().splitlines()[-1] if ones[0].why else ''}"
        for (what, outcome), ones in groups.items()
    )


# --- Docs
#
# A page has a pair of markers for each part: `<!-- attacks: classes -->` and `<!-- attacks: end of classes -->`.


def make_parts(results: Results) -> dict[str, str]:
    """Return the generated parts of docs/trust.md."""
    said = f"{len(results.forged):,} forged files and {len(results.honest):,} true claims, at commit `{results.commit}`"
    tables = {
        "classes": class_table(results),
        "undetectable": forgery_table(results, "undetectable"),
        "true claims": honest_table(results),
        "detected": forgery_table(results, "detected"),
    }
    parts = {name: _trim(render(table, Format.MD)) for name, table in tables.items()}
    return {**parts, "classes": f"{said}:\n\n{parts['classes']}"}


def _trim(table: str) -> str:
    """Return the rows of a Markdown table without its title, which the page has as a heading."""
    return "\n".join(line for line in table.splitlines() if line.startswith("|"))


def _find(name: str) -> re.Pattern[str]:
    start, end = (re.escape(f"<!-- attacks: {what}{name} -->") for what in ("", "end of "))
    return re.compile(f"(?<={start}\n)(.*?)(?={end})", re.DOTALL)


def write_parts(page: Path, parts: Mapping[str, str]) -> None:
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        assert len(_find(name).findall(text)) == 1, f"{page} needs the markers of `{name}` once"
        before, _, after = _find(name).split(text)
        text = f"{before}\n{part}\n\n{after}"
    page.write_text(text, encoding="utf-8")


def listed_forgeries(page: Path) -> dict[str, tuple[str, str, str]]:
    """Return promise, class and sentence of every forgery in the tables of a page."""
    text = page.read_text(encoding="utf-8")
    found = {}
    for promise in ("detected", "undetectable"):
        (part,) = _find(promise).findall(text)
        for line in part.splitlines():
            cells = [cell.strip() for cell in line.split(" | ")]
            if len(cells) > 2 and cells[1] in FORGERIES:
                found[cells[1]] = (promise, cells[0].removeprefix("| "), cells[2])
    return found

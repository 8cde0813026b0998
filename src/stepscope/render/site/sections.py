"""The sections of a page as HTML: the lead, the exhibits, and a box for each one that was not measured."""

from collections.abc import Iterable
from html import escape
from itertools import groupby

import msgspec

from stepscope.findings import (
    Bars,
    Breakdown,
    Copyable,
    Figure,
    Lanes,
    Missing,
    Part,
    Question,
    Questions,
    Report,
    Roofline,
    Section,
    SideBySide,
    StepPicture,
    Table,
    Timeline,
)
from stepscope.findings.compared import AlignedMemory, AlignedSteps, Trend
from stepscope.render.drawing import Drawable
from stepscope.render.drawing.colours import Palette
from stepscope.render.formats import COPYABLE
from stepscope.render.site.charts import write_body
from stepscope.render.site.hints import write_hint
from stepscope.render.site.html import MOST_OPEN, markup, prose, write_notes, write_summary, write_table
from stepscope.render.site.opening import write_copyable

KINDS: dict[type, str] = {
    Lanes: "lanes",
    Breakdown: "breakdown",
    Roofline: "roofline",
    Figure: "figure",
    Timeline: "timeline",
    Bars: "bars",
    StepPicture: "step",
    AlignedSteps: "aligned",
    AlignedMemory: "aligned",
    Trend: "aligned",
}

PICTURE = "step-picture"  # the key of the picture of the step
_NOT_KNOWN = "Not measured in this run."


def write_navigation(report: Report) -> str:
    links = "".join(
        f'<li><a href="#section-{escape(section.key)}">{markup(section.title, 60)}</a></li>'
        for section in report.sections
    )
    return (
        '<nav class="sections" aria-label="Sections"><a class="brand" href="#top">stepscope</a>'
        f'<ul><li><a href="#top">Summary</a></li>{links}</ul>'
        '<button type="button" id="theme" class="quiet" hidden>Theme: auto</button></nav>'
    )


def write_picture(report: Report, palette: Palette) -> str:
    """Return the picture of the step; empty if there is none."""
    return write_chart(report.picture, PICTURE, "", palette) if report.picture is not None else ""


def write_sections(sections: Iterable[Section], palette: Palette) -> str:
    return "\n".join(_write_section(section, palette) for section in sections)


def _write_section(section: Section, palette: Palette) -> str:
    key = f"section-{escape(section.key)}"  # not the plain key, which may be the id of an exhibit
    lead = "".join(f'<p class="lead">{prose(line)}</p>' for line in section.lead.split("\n") if line)
    exhibits = "\n".join(_write_exhibits(section, palette))
    missing = "".join(map(_write_missing, section.missing))
    return f"""<section class="section" id="{key}" aria-labelledby="{key}-title">
<div class="titled"><h2 id="{key}-title">{markup(section.title)}</h2>{_write_section_hint(section)}</div>
{lead}
{exhibits}
{missing}
</section>"""


def _write_section_hint(section: Section) -> str:
    """The hint of a chart whose title is left out because the section has the same one."""
    hints = (_find_hint(one.part) for one in section.exhibits if one.part.title == section.title)
    return next(filter(None, hints), "")


def _find_hint(part: Part | None) -> str:
    match part:
        case None | Table() | Questions():
            return ""
        case SideBySide():
            untitled = (inner for inner in part.parts if inner is not None and inner.title == part.title)
            return next(filter(None, map(_find_hint, untitled)), "")
        case _:
            return write_hint(part)


def _write_exhibits(section: Section, palette: Palette) -> Iterable[str]:
    """Tables that follow one another share a box, where narrow ones are side by side. A long table is closed unless it
    comes first."""
    first = section.exhibits[:1]
    for is_table, exhibits in groupby(section.exhibits, key=lambda exhibit: isinstance(exhibit.part, Table)):
        written = "\n".join(
            write_part(
                exhibit.part,
                exhibit.key,
                section.title,
                palette,
                is_closed=exhibit not in first and _is_long(exhibit.part),
            )
            for exhibit in exhibits
        )
        yield f'<div class="tables">{written}</div>' if is_table else written


def _is_long(part: Part | None) -> bool:
    if isinstance(part, SideBySide):
        return any(map(_is_long, part.parts))
    return isinstance(part, Table) and len(part.rows) > MOST_OPEN


def _write_missing(missing: Missing) -> str:
    """Return one line: what, why, and the command that measures it."""
    command = f" <code>{markup(missing.command, COPYABLE)}</code>" if missing.command else ""
    return f'<p class="missing"><strong>{prose(missing.what)}</strong>: {prose(missing.why)}.{command}</p>'


def write_part(
    part: Part,
    key: str,
    above: str,
    palette: Palette,
    run: str = "",
    *,
    is_closed: bool = False,
    is_whole: bool = False,
) -> str:
    """Return a part as HTML. A title that repeats the one `above` it is left out; `run` names the run of a part that
    is next to another run's. A table that `is_closed` shows only its title, and one that `is_whole` all rows."""
    match part:
        case Table():
            titled = part.title != above
            return write_table(part, escape(key), titled=titled, run=run, is_closed=is_closed, is_whole=is_whole)
        case Questions():
            return _write_questions(part, escape(key), above)
        case SideBySide():
            return _write_side_by_side(part, key, above, palette, is_closed=is_closed)
        case _:
            return write_chart(part, escape(key), above, palette)


def write_chart(part: Drawable | Breakdown, key: str, above: str, palette: Palette) -> str:
    title = _write_title(part.title, above, write_hint(part))
    subtitle = part.subtitle if isinstance(part, Figure | Timeline) else ""
    below = f"<p>{prose(subtitle)}</p>" if subtitle else ""
    caption = f"<figcaption>{title}{below}</figcaption>" if title or below else ""
    notes = "" if isinstance(part, Figure) else write_notes(part.notes)
    kind = KINDS[type(part)]
    body = "" if isinstance(part, Breakdown) else write_body(part, palette)
    return (
        f'<figure class="chart {kind}" id="{key}" data-kind="{kind}" data-key="{key}">{caption}'
        f'<div class="body">{body}</div>{notes}</figure>'
    )


def _write_questions(questions: Questions, key: str, above: str) -> str:
    title = _write_title(questions.title, above)
    items = "".join(map(_write_question, questions.questions))
    return f'<div class="questions" id="{key}">{title}{items}</div>'


def _write_title(title: str, above: str, hint: str = "") -> str:
    return f'<div class="titled"><h3>{markup(title)}</h3>{hint}</div>' if title and title != above else ""


def _write_question(question: Question) -> str:
    state = "" if question.is_answered else " unanswered"
    return (
        f'<article class="question{state}"><h3>{prose(question.question)}</h3>'
        f"<div>{_write_answer(question)}</div></article>"
    )


def _write_answer(question: Question) -> str:
    figure = f'<p class="figure">{markup(question.figure)}</p>' if question.figure else ""
    evidence = ""
    if question.evidence is not None:
        table = write_table(question.evidence, "", titled=False)
        evidence = f"<details><summary>Evidence</summary>{table}</details>"
    command = write_copyable(Copyable(label="", text=question.command)) if question.command else ""
    return f'{figure}<p class="answer">{prose(question.answer)}</p>{command}{evidence}'


def _name_once(pair: SideBySide) -> SideBySide:
    """Return the pair with the common start of its titles, up to a colon, as its title, and the rest at each run."""
    titles = {part.title for part in pair.parts if part is not None}
    heads = {title.partition(": ")[0] for title in titles}
    if len(titles) < 2 or len(heads) > 1:
        return pair
    parts = tuple(part and msgspec.structs.replace(part, title=part.title.partition(": ")[2]) for part in pair.parts)
    return SideBySide(title=heads.pop(), runs=pair.runs, parts=parts)


def _write_side_by_side(pair: SideBySide, key: str, above: str, palette: Palette, *, is_closed: bool) -> str:
    pair = _name_once(pair)
    title = _write_title(pair.title, above, _find_hint(pair))
    asked = [part if isinstance(part, Questions) else None for part in pair.parts]
    if any(asked):
        return f'<div class="pair" id="{escape(key)}">{title}{_write_both_answers(pair.runs, asked)}</div>'
    alone = " alone" if sum(part is not None for part in pair.parts) < 2 else ""
    columns = []
    for number, (run, part) in enumerate(zip(pair.runs, pair.parts, strict=True)):
        inner = f'<p class="quiet">{_NOT_KNOWN}</p>'
        if part is not None:
            inner = write_part(part, name_inner(key, number), pair.title, palette, run, is_whole=is_closed)
        columns.append(f'<div class="side"><p class="run">{markup(run)}</p>{inner}</div>')
    sides = f'<div class="sides{alone}">{"".join(columns)}</div>'
    if is_closed and pair.title:
        most = max(len(part.rows) for part in pair.parts if isinstance(part, Table))
        return f'<details class="fold pair" id="{escape(key)}">{write_summary(pair.title, most)}{sides}</details>'
    return f'<div class="pair" id="{escape(key)}">{title}{sides}</div>'


def _write_both_answers(runs: tuple[str, ...], asked: list[Questions | None]) -> str:
    """Each question once, with the answers of both runs next to each other."""
    by_run = [{question.question: question for question in part.questions} if part else {} for part in asked]
    articles = []
    for text in dict.fromkeys(text for questions in by_run for text in questions):
        answers = "".join(
            f'<div class="side"><p class="run">{markup(run)}</p>{_write_one_of_both(questions.get(text))}</div>'
            for run, questions in zip(runs, by_run, strict=True)
        )
        articles.append(f'<article class="question"><h3>{prose(text)}</h3><div class="sides">{answers}</div></article>')
    return f'<div class="questions both">{"".join(articles)}</div>'


def _write_one_of_both(question: Question | None) -> str:
    if question is None:
        return f'<p class="quiet">{_NOT_KNOWN}</p>'
    return (
        _write_answer(question) if question.is_answered else f'<div class="unanswered">{_write_answer(question)}</div>'
    )


def name_inner(key: str, number: int) -> str:
    """Return the key of a part that is next to another run's."""
    return f"{key}-{'abcdefgh'[number]}"


def write_footer(report: Report) -> str:
    commands = "".join(map(write_copyable, report.commands))
    again = f'<h2>Reproduce this report</h2><div class="commands">{commands}</div>' if commands else ""
    version = f" {markup(report.version, 60)}" if report.version else ""
    return f'<footer class="footer">{again}<p class="version">Made with stepscope{version}.</p></footer>'

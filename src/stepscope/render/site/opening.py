"""The first screen: the step in one sentence, the main figures, the measurement quality and the findings."""

import re
from collections.abc import Sequence

from stepscope.findings import (
    Advice,
    Cell,
    Copyable,
    Fact,
    MemoryCard,
    MemoryLine,
    Report,
    Soundness,
    joint_saving,
)
from stepscope.render.formats import COPYABLE, VERDICTS
from stepscope.render.numbers import format_effect, format_value
from stepscope.render.site.html import markup, prose, write_notes

_PAIR = 2  # runs that are compared in depth
_CARDS, _MOST_WORDS = 3, 80  # cards that are open; characters of a figure's label
_MARKS = {"sound": "✓", "doubtful": "!", "unknown": "?"}


def write_opening(report: Report, picture: str) -> str:
    """Return the first screen without findings. `picture` is the picture of the step as HTML, or empty."""
    strip = (
        '<p class="strip" role="note"><strong>This report is incomplete.</strong> It was interrupted or is still '
        "being generated. Each missing part says how to get it.</p>"
    )
    return f"""<header class="opening" id="top">
{strip if report.is_partial else ""}
<h1>{markup(report.title) or "Training step"}</h1>
<p class="subtitle">{prose(report.subtitle)}</p>
<p class="sentence">{prose(report.sentence)}</p>
{_write_facts(report.facts)}
{picture}
{_write_soundness(report.soundness)}
</header>"""


def _write_facts(facts: tuple[Fact, ...]) -> str:
    if not facts:
        return ""
    return f'<dl class="facts">{"".join(map(_write_fact, facts))}</dl>'


def _write_fact(fact: Fact) -> str:
    before = ""
    if fact.before is not None:
        ratio = _ratio(fact.value, fact.before) if fact.is_comparable else ""
        change = f' <span class="ratio">{ratio}</span>' if ratio else ""
        before = f'<dd class="before"><span>from {_figure(fact, fact.before)}</span>{change}</dd>'
    note = f'<dd class="note">{prose(fact.note)}</dd>' if fact.note else ""
    wordy = " wordy" if isinstance(fact.value, str) else ""
    return (
        f'<div class="fact" data-fact="{markup(fact.key)}"><dt>{markup(fact.label, _MOST_WORDS)}</dt>'
        f'<dd class="value{wordy}">{_figure(fact, fact.value)}</dd>{before}{note}</div>'
    )


def _figure(fact: Fact, value: Cell) -> str:
    """Return the number with its unit in smaller type."""
    number, space, unit = format_value(fact.kind, value).partition(" ")
    if isinstance(value, str) or not unit:
        return markup(f"{number}{space}{unit}", _MOST_WORDS)
    return f"{markup(number)}<small> {markup(unit)}</small>"


def _ratio(value: Cell, before: Cell) -> str:
    """Return B's value as a multiple of A's, where both are numbers."""
    if isinstance(value, str) or isinstance(before, str) or value is None or not before:
        return ""
    return format_value("ratio", value / before)


def _write_soundness(soundness: Soundness) -> str:
    mark = f'<span class="mark" aria-hidden="true">{_MARKS[soundness.verdict]}</span>'
    line = f"{mark}<strong>{VERDICTS[soundness.verdict]}.</strong> {prose(soundness.sentence)}"
    if not soundness.details:
        return f'<p class="soundness {soundness.verdict}">{line}</p>'
    details = "".join(f"<li>{prose(detail)}</li>" for detail in soundness.details)
    return (
        f'<details class="soundness {soundness.verdict}"><summary>{line}<span class="more">Details</span>'
        f"</summary><ul>{details}</ul></details>"
    )


def write_advice(report: Report) -> str:
    """Return the findings, the card about memory and the remarks. Those of a comparison are about its second run, and
    say so; more than two runs have none."""
    if len(report.runs) > _PAIR:
        return ""
    run = report.runs[1] if len(report.runs) > 1 else ""
    cards = [one for one in report.advice or () if not one.finding.is_remark]
    remarks = [one for one in report.advice or () if one.finding.is_remark]
    shown = _write_cards(cards, run) if cards else f'<p class="quiet">{_explain_no_cards(report)}</p>'
    memory = _write_memory_card(report.memory_card, run) if report.memory_card is not None else ""
    return shown + memory + (_write_remarks(remarks, run) if remarks else "")


def _explain_no_cards(report: Report) -> str:
    if report.advice is None:
        return "No findings: this run has no kernel trace."
    bars = report.picture.bars if report.picture else ()
    on_gpu = any(bar is not None and bar.device != "CPU" for bar in bars)
    return "No findings: no rule found time to save." if on_gpu else "No findings. Most rules need a GPU trace."


def _write_cards(advice: Sequence[Advice], run: str) -> str:
    first, rest = advice[:_CARDS], advice[_CARDS:]
    cards = "".join(map(_write_card, first))
    others = f'<div class="cards">{"".join(map(_write_card, rest))}</div>'
    more = f'<details class="more-advice"><summary>Show {len(rest)} more</summary>{others}</details>' if rest else ""
    return (
        '<section class="advice" aria-labelledby="advice-title">'
        f'<h2 id="advice-title">What would save most{_of_run(run)}</h2>{_write_joint(advice)}'
        f'<div class="cards">{cards}</div>{more}</section>'
    )


def _of_run(run: str) -> str:
    return f" in {markup(run, _MOST_WORDS)}" if run else ""


def _write_joint(advice: Sequence[Advice]) -> str:
    """Return what all fixes save together, if there are several."""
    findings = [one.finding for one in advice]
    joint = joint_saving(findings)
    if joint is None or sum(one.joint_ns is not None for one in findings) < 2:
        return ""
    overlap = " Savings overlap: they do not add up." if joint.overlaps else ""
    return (
        f'<p class="joint">All fixes together: about <strong>−{format_value("ms", joint.saving_ns / 1e6)}</strong> · '
        f"{format_value('share', joint.share)} of the {findings[0].unit}.{overlap}</p>"
    )


def _write_card(advice: Advice) -> str:
    finding = advice.finding
    share = finding.share or 0.0
    saving = '<p class="saving"><span class="unsure">Saving not estimated</span></p>'
    adds = ""
    if finding.joint_ns is not None and finding.joint_ns != finding.saving_ns:
        adds = f" · {format_value('ms', finding.joint_ns / 1e6)} {finding.say_after}"
    if finding.saving_ns == 0:
        saving = f'<p class="saving"><span class="unsure">No saving on its own{adds}</span></p>'
    elif finding.saving_ns is not None:
        per_cent = (
            f" · {format_value('share', finding.share)} of the {finding.unit}" if finding.share is not None else ""
        )
        per_cent += ' · <span class="measured">measured</span>' if finding.is_measured else ""
        saved = format_value("ms", finding.saving_ns / 1e6)
        saving = (
            f'<p class="saving"><strong>−{saved}</strong>{per_cent}{adds}</p>'
            f'<progress class="meter" max="1" value="{min(max(share, 0.0), 1.0):.4f}" aria-hidden="true"></progress>'
        )
    elif finding.saving_bytes is not None:
        enough = "enough for a whole step" if finding.is_enough else "not enough alone"
        saved = format_value("bytes", finding.saving_bytes)
        saving = f'<p class="saving"><strong>−{saved}</strong> · {enough}</p>'
    fixes = "".join(map(write_copyable, advice.fixes[:1]))
    if advice.fixes[1:]:
        others = "".join(map(write_copyable, advice.fixes[1:]))
        fixes += f'<details class="others"><summary>Other fixes</summary>{others}</details>'
    action = f'<p class="fix">{prose(finding.action)}</p>' if finding.action else ""
    same = "".join(f"<li>{prose(one.title)} <code>{markup(one.code, 20)}</code></li>" for one in finding.also)
    verbatim = " verbatim" if finding.evidence.startswith("`") else ""
    also = f'<div class="also"><p>Also explains this time:</p><ul>{same}</ul></div>' if same else ""
    return f"""<article class="card">
<h3>{prose(finding.title)}</h3>
{saving}
<p class="evidence{verbatim}">{prose(finding.evidence)}</p>
{also}
{action}
{fixes}
<p class="rule"><code>stepscope rule {markup(finding.code, 20)}</code></p>
</article>"""


def _write_memory_card(card: MemoryCard, run: str) -> str:
    sentences = "".join(f"<p>{prose(one)}</p>" for one in card.sentences)
    lines = "".join(map(_write_memory_line, card.lines))
    nothing = '<p class="unsure">No change that was tried saves much memory.</p>'
    return (
        '<section class="advice" aria-labelledby="memory-advice-title">'
        f'<h2 id="memory-advice-title">What would save memory{_of_run(run)}</h2>'
        f'<article class="card memory-card"><div class="evidence">{sentences}</div>'
        f"{f'<ul>{lines}</ul>' if lines else nothing}"
        f"{write_copyable(Copyable(label='search further', text=card.command))}{write_notes(card.notes)}"
        "</article></section>"
    )


def _write_memory_line(line: MemoryLine) -> str:
    if line.note:
        said = f"{prose(line.note)} · predicted"
    else:
        saved, *others = format_effect(line)
        said = " · ".join((f"<strong>{markup(saved)}</strong>", *map(markup, others)))
    fix = write_copyable(Copyable(label="", text=line.command))
    return f'<li><div><h3>{markup(line.title)}</h3><p class="saving">{said}</p></div>{fix}</li>'


def _write_remarks(advice: Sequence[Advice], run: str) -> str:
    """Return the findings that cannot be fixed by pasting something, as a list."""
    return (
        '<section class="remarks" aria-labelledby="remarks-title">'
        f'<h2 id="remarks-title">Remarks{f" on {markup(run, _MOST_WORDS)}" if run else ""}</h2>'
        f"<ul>{''.join(map(_write_remark, advice))}</ul></section>"
    )


def _write_remark(advice: Advice) -> str:
    finding = advice.finding
    unit = "per step" if finding.unit == "step" else "of the trace"
    saving = f" (up to {format_value('ms', finding.saving_ns / 1e6)} {unit})" if finding.saving_ns else ""
    action = f" {prose(finding.action)}." if finding.action else ""
    more = "".join(map(write_copyable, advice.fixes))
    return (
        f"<li><strong>{markup(finding.title)}</strong>{saving}: {prose(finding.evidence)}.{action} "
        f'<code class="rule">stepscope rule {markup(finding.code, 20)}</code>{more}</li>'
    )


def write_copyable(copyable: Copyable) -> str:
    """Return text with a copy button. The button needs the script; without it the text can be selected."""
    code = markup(copyable.text, COPYABLE, lines=True)
    is_code = "\n" in code
    if not is_code:
        # Break a command only between words: browsers would break it after the hyphens of a flag.
        code = re.sub(r"\S+", r"<span>\g<0></span>", code)
    label = f'<span class="label">{markup(copyable.label)}</span>' if copyable.label else ""
    return (
        f'<div class="copyable{" lines" if is_code else ""}">{label}<pre tabindex="0"><code>{code}</code></pre>'
        '<button type="button" class="copy" hidden>Copy</button></div>'
    )

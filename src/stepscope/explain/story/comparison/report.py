"""Two runs as one report: what changed in the step, why, and everything else side by side.

The first run is the baseline and the second the new one: a ratio above 1 is a speedup. Runs are labelled by what
differs between them. Whether two times differ is decided from their samples (`compare.judge`); if that is impossible,
the headline says why.
"""

from typing import Literal

from stepscope import __version__
from stepscope.explain.model_names import name_model
from stepscope.explain.story.commands import find_case, list_commands
from stepscope.explain.story.comparison.changes import DECIDES_WORK, show_changes, tell_settings
from stepscope.explain.story.comparison.side_by_side import Labels, label_sides, put_side_by_side
from stepscope.explain.story.comparison.step_verdict import judge_steps, say_change_of, say_doubt
from stepscope.explain.story.memory_card import make_memory_card
from stepscope.explain.story.missing import gather_missing
from stepscope.explain.story.opening import MOST_HEADLINE, SEPARATOR, Opening, list_facts, say_what_matters, subtitle_of
from stepscope.explain.story.run import SECTIONS, is_shown, list_advice
from stepscope.explain.story.sections.environment_facts import find_device
from stepscope.explain.story.sections.step_picture import draw_steps
from stepscope.explain.story.soundness import judge
from stepscope.explain.story.sources import Materials, share_peaks
from stepscope.explain.trace.comparability import compare_circumstances
from stepscope.explain.trace.compare import Verdict
from stepscope.findings import Copyable, Fact, Report, Soundness
from stepscope.units import clip, say_factor, say_percent, say_size, say_time

_FACTS = ("step", "memory", "bound", "mfu", "busy", "tokens")
_SHORT = 80  # characters of a note in one line


def tell_both(a: Materials, b: Materials) -> Report:
    """`advice` and the card about memory are for the second run: what is left to gain."""
    a, b = share_peaks(a), share_peaks(b)
    openings, labels = (Opening(a), Opening(b)), label_sides(a, b)
    shown = [key for key in SECTIONS if is_shown(key, a) or is_shown(key, b)]
    picture = draw_steps([a.profile, b.profile], labels)
    advice = list_advice(b)
    sections = (show_changes(a, b, labels), *(put_side_by_side(key, a, b, labels) for key in shown))
    return Report(
        title=_title(a, b, labels),
        subtitle=_say_where(a, b, labels),
        runs=labels,
        sentence=say_change(*openings, labels),
        facts=_pair_facts(*openings, labels),
        picture=picture,
        advice=advice,
        memory_card=make_memory_card(openings[1], advice or ()),
        soundness=_judge_both(*openings, labels),
        sections=gather_missing(sections),
        commands=_pair_commands(a, b, labels),
        version=__version__,
        is_partial=a.is_partial or b.is_partial,
    )


def _title(a: Materials, b: Materials, labels: Labels) -> str:
    """Both labels, and the model if both runs have the same one."""
    cases = [case for one in (a, b) if (case := find_case(one)) is not None]
    models = {name_model(case.workload.model) for case in cases}
    sides = f"{labels[1]} vs {labels[0]}"
    return f"{models.pop()}: {sides}" if len(cases) == 2 and len(models) == 1 else sides


def _say_where(a: Materials, b: Materials, labels: Labels) -> str:
    """The parts that both subtitles share, then what only one has."""
    pair = [subtitle_of(one).split(SEPARATOR) for one in (a, b)]
    both = [part for part in pair[0] if part in pair[1]]
    own = [
        f"{label}: {', '.join(rest)}"
        for label, parts in zip(labels, pair, strict=True)
        if (rest := [part for part in parts if part and part not in both])
    ]
    return SEPARATOR.join(part for part in (*both, *own) if part)


def _pair_commands(a: Materials, b: Materials, labels: Labels) -> tuple[Copyable, ...]:
    """Commands that made both runs come once, first."""
    pair = list_commands(a), list_commands(b)
    both = [one for one in pair[0] if one in pair[1]]
    apart = [
        Copyable(label=f"{label}: {one.label}", text=one.text)
        for label, commands in zip(labels, pair, strict=True)
        for one in commands
        if one not in both
    ]
    return (*both, *apart)


# --- The headline -----------------------------------------------------------------------------------------------------


def say_change(a: Opening, b: Opening, labels: Labels) -> str:
    """The step times of both runs if both are known, else what matters about each; two lines at most."""
    steps, peaks = (a.step_ns, b.step_ns), (a.peak_bytes, b.peak_bytes)
    sides = f"{labels[1]} vs {labels[0]}"
    times = a.materials.step_times, b.materials.step_times
    if steps[0] and steps[1]:
        parts = [f"{sides}: {_say_steps(steps[0], steps[1], judge_steps(*times), say_doubt(*times))}"]
        if peaks[0] and peaks[1] and a.is_of_process == b.is_of_process:
            parts.append(f", {_say_memory(peaks[0], peaks[1])}")
    elif peaks[0] and peaks[1] and not steps[0] and not steps[1] and not _failed(a) and not _failed(b):
        parts = [f"{sides}: {_say_peaks(peaks[0], peaks[1])}; no step times"]
    elif a.trace_ns and b.trace_ns and not steps[0] and not steps[1]:
        parts = [f"{sides}: {say_time(b.trace_ns)} vs {say_time(a.trace_ns)} in the trace, no steps marked"]
    else:
        return " ".join(_say_alone(one, label) for one, label in zip((b, a), reversed(labels), strict=True))
    said = ""
    for part in (*parts, _say_other_work(a, b, labels)):
        said += part if len(f"{said}{part}.") <= MOST_HEADLINE else ""
    return f"{said}."


def _say_alone(opening: Opening, label: str) -> str:
    """What matters about one run in half a headline, without its last clauses if they do not fit."""
    room, said = (MOST_HEADLINE - 3) // 2, say_what_matters(opening)
    shorter = (f"{label}: {clauses}" for clauses in (said, said.partition("; ")[0], said.partition(", ")[0]))
    return f"{next((one for one in shorter if len(one) <= room), clip(f'{label}: {said}', room))}."


def _failed(opening: Opening) -> bool:
    return bool(opening.materials.bench) and opening.materials.bench[0].measurement is None


def _say_steps(a_ns: float, b_ns: float, verdict: Verdict, doubt: str) -> str:
    """`doubt` is the reason if `verdict` is `cannot tell`."""
    a, b = say_time(a_ns), say_time(b_ns)
    reason = f" ({doubt})" if verdict == "cannot tell" else ""
    if a == b:
        return f"both take {b} per step{reason}"
    if verdict in ("same", "noise"):
        return f"{b} vs {a} per step, within noise"
    return f"{b} vs {a} per step, {say_change_of(a_ns, b_ns)}{reason}"


def _say_memory(a_bytes: int, b_bytes: int) -> str:
    a, b = say_size(a_bytes), say_size(b_bytes)
    return f"peak memory {b} vs {a}" if a != b else f"peak memory {b}"


def _say_peaks(a_bytes: int, b_bytes: int) -> str:
    a, b = say_size(a_bytes), say_size(b_bytes)
    if a == b:
        return f"peak memory {b} in both"
    if b_bytes >= 2 * a_bytes:
        return f"peak memory {b} vs {a}, {say_factor(b_bytes / a_bytes)} as much"
    return (
        f"peak memory {b} vs {a}, {say_percent(abs(b_bytes / a_bytes - 1))} {'less' if b_bytes < a_bytes else 'more'}"
    )


def _say_other_work(a: Opening, b: Opening, labels: Labels) -> str:
    """Differences in work or device that the labels do not show: a factor is not a speedup then."""
    remarks = [
        f"{name} {one} → {other}"
        for name, one, other in tell_settings(a.materials, b.materials)
        if name in DECIDES_WORK and one and other and not (one in labels[0] and other in labels[1])
    ]
    return f"; also different: {', '.join(remarks)}" if remarks else ""


# --- Facts and measurement quality ------------------------------------------------------------------------------------


def _pair_facts(a: Opening, b: Opening, labels: Labels) -> tuple[Fact, ...]:
    """The second run's facts, each with the first run's value, in the order of a single run."""
    before, after = ({fact.key: fact for fact in list_facts(one)} for one in (a, b))
    keys = sorted({*before, *after}, key=lambda key: (_FACTS.index(key) if key in _FACTS else len(_FACTS), key))
    incomparable = _find_incomparable(a, b)
    return tuple(_pair(before.get(key), after.get(key), labels, is_comparable=key not in incomparable) for key in keys)


def _find_incomparable(a: Opening, b: Opening) -> set[str]:
    """Facts that are shares of different totals, or were measured in different ways."""
    found = {"memory"} if a.is_of_process != b.is_of_process else set()
    precisions = {one.mfu[1] for one in (a, b) if one.mfu}
    if len(precisions) > 1 or _differing_devices(a.materials, b.materials):
        found.add("mfu")
    return found


def _pair(before: Fact | None, after: Fact | None, labels: Labels, *, is_comparable: bool) -> Fact:
    known = after or before
    assert known is not None, "every key comes from one of the two"
    is_same = before is not None and before.kind == known.kind and before.label == known.label
    return Fact(
        key=known.key,
        label=known.label,
        value=after.value if after else None,
        kind=known.kind,
        note=_join_notes(_shorten_note(before), _shorten_note(after), labels),
        before=before.value if before is not None and (is_same or known.kind == "text") else None,
        is_comparable=is_comparable,
    )


def _shorten_note(fact: Fact | None) -> str:
    """Return what was measured. The spread of two step times does not fit a tile; the measurement quality has it."""
    if fact is None:
        return "unknown"
    return fact.note.split("; ")[0] if fact.key == "step" else fact.note


def _join_notes(before: str, after: str, labels: Labels) -> str:
    """What both notes say comes once, then what only one says; long notes become sentences."""
    clauses = [note.split("; ") for note in (before, after)]
    both = [clause for clause in clauses[0] if clause in clauses[1]]
    own = [
        f"{label}: {said}"
        for label, of_run in zip(labels, clauses, strict=True)
        if (said := "; ".join(clause for clause in of_run if clause not in both))
    ]
    parts = [*both, *own]
    joined = "; ".join(parts)
    return joined if len(joined) <= _SHORT else f"{'. '.join(parts)}."


def _judge_both(a: Opening, b: Opening, labels: Labels) -> Soundness:
    """The worse verdict of the two. Differences in their circumstances come first."""
    one, other = judge(a), judge(b)
    verdicts = {one.verdict, other.verdict}
    profiles = a.materials.profile, b.materials.profile
    remarks = compare_circumstances(profiles[0], profiles[1], labels) if profiles[0] and profiles[1] else ()
    devices = _differing_devices(a.materials, b.materials)
    order: tuple[Literal["doubtful", "unknown", "sound"], ...] = ("doubtful", "unknown", "sound")
    # The run that decides the verdict comes first.
    pair = sorted(zip(labels, (one, other), strict=True), key=lambda run: order.index(run[1].verdict))
    said = one.sentence if one.sentence == other.sentence else " ".join(f"{run}: {of.sentence}" for run, of in pair)
    if devices:
        said = f"{devices} {said}"
    weakest = "doubtful" if devices else next(verdict for verdict in order if verdict in verdicts)
    shared = [line for line in one.details if line in other.details]
    own = [
        f"{label}: {line}"
        for label, judged in zip(labels, (one, other), strict=True)
        for line in judged.details
        if line not in shared
    ]
    return Soundness(verdict=weakest, sentence=said, details=tuple(dict.fromkeys((*remarks, *shared, *own))))


def _differing_devices(a: Materials, b: Materials) -> str:
    one, other = find_device(a), find_device(b)
    return f"The runs used different devices: {one} and {other}." if one and other and one != other else ""

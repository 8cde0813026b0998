"""Two runs as one report: what B does to a step of A's, why, and everything else side by side.

A is what was before and B what is now: a ratio above one is B's gain. Whether two times differ is asked of their
samples (`compare.judge`), and where that cannot be told the sentence says so instead of the ratio alone.
"""

from typing import Literal

from stepscope import __version__
from stepscope.explain.story.commands import list_commands
from stepscope.explain.story.comparison.changes import DECIDES_WORK, show_changes, tell_settings
from stepscope.explain.story.comparison.side_by_side import put_beside
from stepscope.explain.story.opening import Opening, list_facts, say_run, subtitle_of, title_of
from stepscope.explain.story.run import SECTIONS, list_advice
from stepscope.explain.story.sections.environment_facts import find_environment
from stepscope.explain.story.soundness import judge
from stepscope.explain.story.sources import Materials
from stepscope.explain.trace.comparability import compare_circumstances
from stepscope.explain.trace.compare import Verdict
from stepscope.explain.trace.compare import judge as judge_samples
from stepscope.findings import Copyable, Fact, Report, Soundness
from stepscope.units import say_percent, say_size, say_time

RUNS = ("A", "B")
_FACTS = ("step", "memory", "bound", "mfu", "busy", "tokens")
_SHORT = 80  # characters of a note in one line
_FEW_TIMES = 1.1  # below it a factor is said in per cent


def tell_both(a: Materials, b: Materials) -> Report:
    """`advice` is on B: what is still to gain."""
    openings = Opening(a), Opening(b)
    shown = [key for key in SECTIONS if key != "ranks" or len(a.ranks) > 1 or len(b.ranks) > 1]
    return Report(
        title=f"{title_of(a)} → {title_of(b)}",
        subtitle=_say_where(a, b),
        runs=RUNS,
        sentence=say_change(*openings),
        facts=_pair_facts(*openings),
        advice=list_advice(b),
        soundness=_judge_both(*openings),
        sections=(show_changes(a, b), *(put_beside(key, a, b) for key in shown)),
        commands=_pair_commands(a, b),
        version=__version__,
        is_partial=a.is_partial or b.is_partial,
    )


def _say_where(a: Materials, b: Materials) -> str:
    one, other = subtitle_of(a), subtitle_of(b)
    return (
        one
        if one == other
        else " | ".join(f"{run}: {said}" for run, said in zip(RUNS, (one, other), strict=True) if said)
    )


def _pair_commands(a: Materials, b: Materials) -> tuple[Copyable, ...]:
    """What made both stands once, first."""
    pair = list_commands(a), list_commands(b)
    both = [one for one in pair[0] if one in pair[1]]
    apart = [
        Copyable(label=f"{run}: {one.label}", text=one.text)
        for run, commands in zip(RUNS, pair, strict=True)
        for one in commands
        if one not in both
    ]
    return (*both, *apart)


# --- The sentence -----------------------------------------------------------------------------------------------------


def say_change(a: Opening, b: Opening) -> str:
    """What B's step takes instead of A's, as far as both are known; else each run in its own sentence."""
    steps, peaks = (a.step_ns, b.step_ns), (a.peak_bytes, b.peak_bytes)
    if steps[0] and steps[1]:
        is_alike = _is_of_process(a) == _is_of_process(b)
        memory = f", {_say_memory(peaks[0], peaks[1])}" if peaks[0] and peaks[1] and is_alike else ""
        said = f"{_say_steps(steps[0], steps[1], judge_steps(a, b), say_doubt(a, b))}{memory}"
    elif peaks[0] and peaks[1] and not steps[0] and not steps[1] and not _failed(a) and not _failed(b):
        said = f"B holds {_say_peaks(peaks[0], peaks[1])} at its peak; how long their steps take is not recorded"
    else:
        return f"A: {say_run(a)} B: {say_run(b)}"
    return f"{said}{_say_other_work(a, b)}."


def _failed(opening: Opening) -> bool:
    return bool(opening.materials.bench) and opening.materials.bench[0].measurement is None


def _say_steps(a_ns: float, b_ns: float, verdict: Verdict, doubt: str) -> str:
    """`doubt` is why it cannot be told whether they differ, where that is so."""
    a, b = say_time(a_ns), say_time(b_ns)
    reason = f" ({doubt})" if verdict == "cannot tell" else ""
    if a == b:
        return f"B's step takes {b}, as A's does{reason}"
    if verdict in ("same", "noise"):
        return f"B's step takes {b} and A's {a}, a difference within noise"
    return f"B's step takes {b} instead of {a}, {_say_factor(a_ns, b_ns)}{reason}"


def judge_steps(a: Opening, b: Opening) -> Verdict:
    """A recorder lengthens what the host does, so a step while recorded and one without the recorder differ even where
    nothing changed. Two figures are compared only where one kind of clock made both, and by the steps that they are
    made of."""
    samples = a.materials.step_samples, b.materials.step_samples
    if a.materials.clock_kind != b.materials.clock_kind or not all(samples):
        return "cannot tell"
    return judge_samples(*samples)


def say_doubt(a: Opening, b: Opening) -> str:
    """Why it cannot be told whether two steps differ, where `judge_steps` says so."""
    clocks = a.materials.clock_kind, b.materials.clock_kind
    if clocks[0] == clocks[1]:
        return "too few steps to tell it from noise"
    if "recorded" not in clocks:
        return "one by bench, the other by profile's own clock"
    recorded, other = ("A", "B") if clocks[0] == "recorded" else ("B", "A")
    return f"{recorded}'s was timed while recorded, which takes time, {other}'s without the recorder"


def _say_factor(a_ns: float, b_ns: float) -> str:
    factor = max(a_ns, b_ns) / min(a_ns, b_ns)
    if factor < _FEW_TIMES:
        return f"{say_percent(abs(b_ns / a_ns - 1))} {'less' if b_ns < a_ns else 'more'}"
    return f"{factor:.3g} times as {'fast' if b_ns < a_ns else 'long'}"


def _say_memory(a_bytes: int, b_bytes: int) -> str:
    a, b = say_size(a_bytes), say_size(b_bytes)
    return f"with {b} instead of {a}" if a != b else f"with {b} as before"


def _say_peaks(a_bytes: int, b_bytes: int) -> str:
    a, b = say_size(a_bytes), say_size(b_bytes)
    if a == b:
        return f"{b}, as A does,"
    if b_bytes >= 2 * a_bytes:
        return f"{b} instead of {a}, {b_bytes / a_bytes:.3g} times as much,"
    return f"{b} instead of {a}, {say_percent(abs(b_bytes / a_bytes - 1))} {'less' if b_bytes < a_bytes else 'more'},"


def _say_other_work(a: Opening, b: Opening) -> str:
    """Where the two do not do the same, or not on the same device, a factor says less than it seems to."""
    remarks = [
        f"{name} {one} → {other}"
        for name, one, other in tell_settings(a.materials, b.materials)
        if name in DECIDES_WORK and one and other
    ]
    return f"; the two are not alike: {', '.join(remarks)}" if remarks else ""


# --- Facts and how sound they are -------------------------------------------------------------------------------------


def _pair_facts(a: Opening, b: Opening) -> tuple[Fact, ...]:
    """B's, each with A's value before it, in the order in which a run alone has them."""
    before, after = ({fact.key: fact for fact in list_facts(one)} for one in (a, b))
    keys = sorted({*before, *after}, key=lambda key: (_FACTS.index(key) if key in _FACTS else len(_FACTS), key))
    incomparable = _find_incomparable(a, b)
    return tuple(_pair(before.get(key), after.get(key), is_comparable=key not in incomparable) for key in keys)


def _find_incomparable(a: Opening, b: Opening) -> set[str]:
    """Facts that are shares of different wholes, or were measured in different ways."""
    found = {"memory"} if _is_of_process(a) != _is_of_process(b) else set()
    precisions = {one.mfu[1] for one in (a, b) if one.mfu}
    if len(precisions) > 1 or _differing_devices(a.materials, b.materials):
        found.add("mfu")
    return found


def _is_of_process(opening: Opening) -> bool:
    """Whether the peak is all memory of the process, and not what an allocator handed out."""
    row, memory = opening.materials.timed_row, opening.materials.memory
    if row is None or row.measurement is None or (memory is not None and memory.peak_bytes == opening.peak_bytes):
        return False
    return row.measurement.peak_kind == "rss above start"


def _pair(before: Fact | None, after: Fact | None, *, is_comparable: bool) -> Fact:
    known = after or before
    assert known is not None, "a key comes from one of the two"
    is_same = before is not None and before.kind == known.kind and before.label == known.label
    return Fact(
        key=known.key,
        label=known.label,
        value=after.value if after else None,
        kind=known.kind,
        note=_join_notes(before.note if before else "not known", after.note if after else "not known"),
        before=before.value if before is not None and (is_same or known.kind == "text") else None,
        is_comparable=is_comparable,
    )


def _join_notes(before: str, after: str) -> str:
    """What both say once, then what each says; in sentences of their own where they are long."""
    clauses = [note.split("; ") for note in (before, after)]
    both = [clause for clause in clauses[0] if clause in clauses[1]]
    own = [
        f"{run}: {said}"
        for run, of_run in zip(RUNS, clauses, strict=True)
        if (said := "; ".join(clause for clause in of_run if clause not in both))
    ]
    parts = [*both, *own]
    joined = "; ".join(parts)
    return joined if len(joined) <= _SHORT else f"{'. '.join(parts)}."


def _judge_both(a: Opening, b: Opening) -> Soundness:
    """As sound as the weaker of the two. What of their circumstances differs stands first."""
    one, other = judge(a), judge(b)
    verdicts = {one.verdict, other.verdict}
    profiles = a.materials.profile, b.materials.profile
    remarks = compare_circumstances(profiles[0], profiles[1]) if profiles[0] and profiles[1] else ()
    devices = _differing_devices(a.materials, b.materials)
    said = one.sentence if one.sentence == other.sentence else f"A: {one.sentence} B: {other.sentence}"
    if devices:
        said = f"{devices} {said}"
    order: tuple[Literal["doubtful", "unknown", "sound"], ...] = ("doubtful", "unknown", "sound")
    weakest = "doubtful" if devices else next(verdict for verdict in order if verdict in verdicts)
    details = (*remarks, *(f"A: {line}" for line in one.details), *(f"B: {line}" for line in other.details))
    return Soundness(verdict=weakest, sentence=said, details=tuple(dict.fromkeys(details)))


def _differing_devices(a: Materials, b: Materials) -> str:
    one, other = (_device_of(materials) for materials in (a, b))
    return f"The runs are of different devices: A of {one}, B of {other}." if one and other and one != other else ""


def _device_of(materials: Materials) -> str:
    environment = find_environment(materials)
    if environment is not None:
        return environment.driver_name
    for one in (materials.profile, materials.memory):
        if one is not None and one.recording.manifest.device:
            return one.recording.manifest.device
    return ""

"""The changes to a step as text, for people who print an `OptimisedStep` in a notebook or a script."""

from collections.abc import Sequence

from stepscope.fast.ladder import Rung
from stepscope.units import say_digits, say_factor

_HEADER = ("change", "status", "step", "gain", "check")
_NOTHING = "–"


def summarise_rungs(rungs: Sequence[Rung]) -> str:
    """A line per rung, then what was replaced and what not, then the whole gain."""
    lines = [_HEADER]
    before: float | None = None
    for rung in rungs:
        lines.append((rung.title, rung.status, _say_step(rung), _say_gain(rung, before), _say_check(rung)))
        if rung.status in ("start", "kept") and rung.step_ms is not None:
            before = rung.step_ms
    notes = list(dict.fromkeys(note for rung in rungs for note in _notes_of(rung)))
    return "\n".join([*_align(lines), *(["", *notes] if notes else []), *_say_total(rungs)])


def _align(lines: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _notes_of(rung: Rung) -> list[str]:
    is_reason = rung.status in ("not applied", "failed")
    return [f"{rung.name}: {note}" if is_reason and note == rung.notes[-1] else note for note in rung.notes]


def _say_step(rung: Rung) -> str:
    return _NOTHING if rung.step_ms is None else f"{say_digits(rung.step_ms)} ms"


def _say_gain(rung: Rung, before: float | None) -> str:
    if rung.step_ms is None or before is None:
        return _NOTHING
    gain = before - rung.step_ms
    return f"{'−' if gain >= 0 else '+'}{say_digits(abs(gain))} ms"


def _say_check(rung: Rung) -> str:
    """The gradient closest to its limit: its error, and that of the original step."""
    worst = rung.accuracy
    if worst is None:
        return _NOTHING
    verdict = "passes" if worst.passes else "fails"
    return f"{verdict}: {worst.error:.1e} in {worst.parameter}, {worst.plain_error:.1e} before, against {worst.truth}"


def _say_total(rungs: Sequence[Rung]) -> list[str]:
    times = [rung.step_ms for rung in rungs if rung.status in ("start", "kept") and rung.step_ms is not None]
    if len(times) < 2 or rungs[0].status != "start":
        return []
    return [
        "",
        f"{say_digits(times[0])} ms per step before, {say_digits(times[-1])} ms after: "
        f"{say_factor(times[0] / times[-1])} faster",
    ]

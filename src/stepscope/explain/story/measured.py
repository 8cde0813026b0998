"""Findings that were measured rather than estimated: the same run with another setting, timed for this page.

`bench` may have timed variants of the run, such as another precision, and the attention stage times implementations in
the shape of the run. What is clearly faster there is a finding with the measured saving; an estimated finding about the
same setting becomes part of it. The page's step is that of the profile, and `bench` ran separately, so a measured
saving is the measured ratio applied to the page's step. So is what `stepscope optimise` measured.

Medians of two timings differ even if nothing does: on a busy machine, attention was "115× faster" in one run and 4.1×
in the next. So a finding needs timings that do not overlap, and states the ratio that holds given their spread.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from stepscope.explain.commands import write_command, write_flags
from stepscope.explain.experiments.attention_tables import Timing, summary_ms
from stepscope.explain.experiments.bench_tables import step_ms
from stepscope.explain.experiments.optimise_tables import PYTHON_LINE, write_fast_command
from stepscope.explain.rules.joint import rank
from stepscope.explain.rules.rule import IDLE_ENOUGH
from stepscope.explain.statistics import Statistics
from stepscope.explain.story.commands import find_case
from stepscope.explain.story.sources import Materials, is_same_run
from stepscope.findings import Finding
from stepscope.recording.rows.attention_case import AttentionRow
from stepscope.recording.rows.bench import Doubt
from stepscope.recording.rows.optimisation import MeasuredChange
from stepscope.spec import RUN_SETTINGS, ModelShape, Workload
from stepscope.units import say_factor, say_percent, say_time

# Settings that may make a step of the same model and batch faster, each with the rules about it. The first is that of a
# measured finding.
RULES_OF_SETTING = {
    "precision": ("SS005",),
    "attention": ("SS004",),
    "compile": ("SS003", "SS001", "SS006", "SS008"),
    "graph": ("SS001",),
    "optimizer": ("SS007",),
    "checkpoint": ("SS013",),
}
_WORDS = (
    "a",
    "activation",
    "eager",
    "flash",
    "naive",
    "no",
    "optimizer",
    "separate",
)  # written with a capital at the start of a title
_WORTH_SAYING = 0.01  # of the step
_CONSPICUOUS = 1.2  # ratio of medians; a reader expects an explanation why no finding has it
_STEADY = 0.05  # if the ratio varies less than this, it is that of the medians
# Warnings about the machine while it ran: repetitions may all be slower than they should.
_DISTURBED = ("shared", "throttled", "spread", "few")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """The timings of a setting and of another one, in milliseconds. `is_disturbed` if the machine may have slowed
    either down."""

    before: Statistics
    after: Statistics
    is_disturbed: bool

    @property
    def is_certain(self) -> bool:
        """Whether the second one is faster by more than both vary. A single repetition says nothing about that."""
        is_noisy = any(one.is_interrupted or one.sd is None for one in (self.before, self.after))
        return self._least_ms > self.after.p80 and not is_noisy

    @property
    def _least_ms(self) -> float:
        """What the slower one takes at least. Other processes only add time, so the fastest repetition is the closest
        to an idle machine."""
        return self.before.min if self.is_disturbed else self.before.p20

    @property
    def _is_steady(self) -> bool:
        return self.ratio <= (1 + _STEADY) * self._least_ms / self.after.p80

    @property
    def ratio(self) -> float:
        """That of the medians."""
        return self.before.median / self.after.median

    @property
    def times(self) -> tuple[float, float]:
        """The two times in milliseconds whose ratio and difference hold."""
        return (self.before.median, self.after.median) if self._is_steady else (self._least_ms, self.after.p80)

    def say_ratio(self) -> str:
        before, after = self.times
        return say_factor(before / after) if self._is_steady else f"at least {say_factor(before / after)}"

    def say_withheld(self, old: str, new: str) -> str:
        """Return why no finding says that the second one is faster."""
        return (
            f"{new} may be faster than {old}, but the timings vary too much to say so: {_say_range(self.after)} with "
            f"{new}, {_say_range(self.before)} with {old}"
        )


def _say_range(timed: Statistics) -> str:
    return f"{say_time(timed.min * 1e6)} to {say_time(timed.max * 1e6)}"


def _say_typical(timed: Statistics) -> str:
    """The median, and the middle 60% if it is wide."""
    median = say_time(timed.median * 1e6)
    is_wide = timed.spread > _STEADY
    return f"{median} (p20 to p80: {say_time(timed.p20 * 1e6)} to {say_time(timed.p80 * 1e6)})" if is_wide else median


def _is_disturbed(*doubts: Doubt) -> bool:
    return any(doubt.code in _DISTURBED for doubt in doubts)


def find_measured(materials: Materials) -> tuple[Finding, ...]:
    """Return what was measured to be faster, the largest saving first and at most one finding per setting."""
    tried = tuple(_find_optimised(materials))
    known = {one.code for one in tried}  # those of the whole step, one on top of the other, say more
    others = (*_find_variants(materials), *_find_attention(materials))
    found = [*tried, *(one for one in others if one.code not in known)]
    found.sort(key=lambda one: (-(one.share or 0.0), one.code))
    best = {one.code: one for one in reversed(found)}
    return tuple(one for one in found if best[one.code] is one and (one.share or 0.0) >= _WORTH_SAYING)


def say_withheld(materials: Materials) -> Iterator[str]:
    """Yield a sentence per setting that looks clearly faster, and whose timings vary too much for a finding."""
    for own, other, pair in _pair_variants(materials):
        if not pair.is_certain and pair.ratio >= _CONSPICUOUS:
            yield pair.say_withheld(*_name_both(own, other))
    workload, pairs = _pair_attention(materials)
    if workload is not None and pairs and not any(pair.is_certain for pair in pairs.values()):
        value = max(pairs, key=lambda one: pairs[one].ratio)
        if pairs[value].ratio >= _CONSPICUOUS:
            yield pairs[value].say_withheld(_name("attention", workload.attention), _name("attention", value))


def _find_variants(materials: Materials) -> Iterable[Finding]:
    if materials.step_ns is None:
        return
    for workload, other, pair in _pair_variants(materials):
        if not pair.is_certain:
            continue
        old, new = _name_both(workload, other)
        before_ms, after_ms = pair.times
        yield _write(
            workload,
            _differences(workload, other) or {},
            title=f"{_begin(new)} is {pair.say_ratio()} faster than {old}",
            evidence=(
                f"bench timed {_say_typical(pair.before)} per step with {old} and {_say_typical(pair.after)} with {new}"
            ),
            step_ns=materials.step_ns,
            share=1 - after_ms / before_ms,
        )


def _pair_variants(materials: Materials) -> Iterator[tuple[Workload, Workload, _Pair]]:
    """Yield the workload of the run, one that differs in a single setting, and the timings of both."""
    row = materials.timed_row
    before = step_ms(row) if row else None
    if row is None or before is None:
        return
    for other in materials.bench[1:]:
        after, changes = step_ms(other), _differences(row.case.workload, other.case.workload)
        same_device = other.environment.driver_name == row.environment.driver_name
        if after is not None and changes is not None and same_device:
            is_disturbed = _is_disturbed(*row.doubts, *other.doubts)
            pair = _Pair(before=before, after=after, is_disturbed=is_disturbed)
            yield row.case.workload, other.case.workload, pair


def _name_both(workload: Workload, other: Workload) -> tuple[str, str]:
    ((setting, value),) = (_differences(workload, other) or {}).items()
    return _name(setting, getattr(workload, setting)), _name(setting, value)


def _differences(workload: Workload, other: Workload) -> dict[str, object] | None:
    """Return the one setting that `other` changes, None if it changes another or several."""
    names = [name for name in ("model", *RUN_SETTINGS) if name not in ("device", "seed")]
    changes = {name: getattr(other, name) for name in names if getattr(other, name) != getattr(workload, name)}
    return changes if len(changes) == 1 and changes.keys() <= RULES_OF_SETTING.keys() else None


def _name(setting: str, value: object) -> str:
    match setting, value:
        case "compile", _:
            return "torch.compile" if value else "eager code"
        case "graph", _:
            return "a captured step" if value else "separate launches"
        case "attention", _:
            return f"{value} attention"
        case "optimizer", _:
            return f"optimizer {value}"
        case "checkpoint", "none":
            return "no activation checkpointing"
        case "checkpoint", _:
            return "activation checkpointing"
        case _:
            return str(value)


def _begin(name: str) -> str:
    """Return the name for the start of a title. Identifiers such as `bf16` stay as they are."""
    return name[0].upper() + name[1:] if name.split()[0] in _WORDS else name


def _find_attention(materials: Materials) -> Iterable[Finding]:
    workload, pairs = _pair_attention(materials)
    certain = {value: pair for value, pair in pairs.items() if pair.is_certain}
    if workload is None or not certain or materials.step_ns is None:
        return
    value = max(certain, key=lambda one: certain[one].ratio)
    pair, calls = certain[value], _attention_calls(workload)
    old, new = _name("attention", workload.attention), _name("attention", value)
    before_ms, after_ms = pair.times
    yield _write(
        workload,
        {"attention": value},
        title=f"{_begin(new)} is {pair.say_ratio()} faster than {old}",
        evidence=(
            f"timed in the shape of this run: {_say_typical(pair.before)} per layer with {old}, "
            f"{_say_typical(pair.after)} with {new}, {calls} times per step"
        ),
        step_ns=materials.step_ns,
        share=(before_ms - after_ms) * 1e6 * calls / materials.step_ns,
    )


def _pair_attention(materials: Materials) -> tuple[Workload | None, dict[str, _Pair]]:
    """Return the timings of the run's attention with those of each other value of `--attention`. Attention alone was
    timed, so what it saves is saved in the step only where the GPU is the limit."""
    nothing: tuple[None, dict[str, _Pair]] = (None, {})
    row, profile = materials.timed_row, materials.profile
    case = row.case if row else profile.recording.manifest.case if profile else None
    if case is None or profile is None or materials.step_ns is None or profile.clock.idle_share > IDLE_ENOUGH:
        return nothing
    workload = case.workload
    if not isinstance(workload.model, ModelShape):
        return nothing
    rows = _attention_rows(materials.attention, workload)
    own = rows.pop(workload.attention or "", None)
    if own is None:
        return nothing
    before, doubts = own
    # Attention that takes longer than the step was timed under other conditions.
    if before.median * 1e6 * _attention_calls(workload) > materials.step_ns:
        return nothing
    return workload, {
        value: _Pair(before=before, after=after, is_disturbed=_is_disturbed(*doubts, *others))
        for value, (after, others) in rows.items()
    }


def _attention_calls(workload: Workload) -> int:
    """Return how often a step of the built-in model computes attention."""
    assert isinstance(workload.model, ModelShape), "the layers of other models are unknown"
    return workload.model.num_layers * workload.batch // workload.micro_batch


# The rule of each change of `stepscope optimise`, and what the changes of a rule are called. Others fuse kernels.
_RULE_OF_CHANGE = {"operations": "SS004", "attention": "SS004", "graph": "SS001", "optimizer": "SS007"}
_CHANGES_OF_RULE = {
    "SS001": "CUDA graphs make",
    "SS003": "torch.compile and fused kernels make",
    "SS004": "Faster attention makes",
    "SS007": "AdamW in one launch makes",
}


def _find_optimised(materials: Materials) -> Iterable[Finding]:
    """What `stepscope optimise` measured, in a run of its own. Its changes come one after another, so their gains add
    up."""
    report, run = materials.optimisation, find_case(materials)
    if report is None or run is None or materials.step_ns is None or not is_same_run(report.case, run):
        return
    changes: dict[str, list[MeasuredChange]] = {}
    for change in report.kept:
        changes.setdefault(_RULE_OF_CHANGE.get(change.name, "SS003"), []).append(change)
    workload = report.case.workload
    is_builtin = isinstance(workload.model, ModelShape)
    for code, kept in changes.items():
        times = [(report.before_ns(one) or 0, one.step_ns or 0) for one in kept]
        share = sum(before - after for before, after in times) / (report.start_ns or 1)
        steps = [
            f"{one.title}: {say_time(before)} → {say_time(after)}"
            for one, (before, after) in zip(kept, times, strict=True)
        ]
        said = f"in a run of its own, each change on top of those before it: {'; '.join(steps)}"
        yield Finding(
            code=code,
            title=f"{_CHANGES_OF_RULE[code]} the step {say_percent(share)} shorter",
            evidence=f"measured by stepscope optimise, {said}",
            action="Run with `--preset fast`"
            if is_builtin
            else "Train with the step that `stepscope.optimise` returns",
            fix=write_fast_command(workload, "report") if is_builtin else PYTHON_LINE,
            saving_ns=round(share * materials.step_ns),
            share=share,
            joint_share=share,
            is_measured=True,
        )


def _attention_rows(
    rows: Sequence[AttentionRow], workload: Workload
) -> dict[str, tuple[Statistics, tuple[Doubt, ...]]]:
    """Return the timing of one attention and its warnings by value of `--attention`. Times of Python instead of kernels
    are left out."""
    timing: Timing = "forward" if workload.mode == "inference" else "both"
    found: dict[str, tuple[Statistics, tuple[Doubt, ...]]] = {}
    for row in rows:
        case, summary = row.case, summary_ms(row, timing)
        same = (case.batch, case.length, case.precision) == (
            workload.micro_batch,
            workload.context,
            workload.precision,
        )
        if summary is None or not same or any(doubt.code == "host-bound" for doubt in row.doubts):
            continue
        kind = {"triton": "flash", "hopper": "flash"}.get(case.implementation, case.implementation.split("-")[0])
        if kind not in found or summary.median < found[kind][0].median:
            found[kind] = summary, row.doubts
    return {kind: one for kind, one in found.items() if kind in ("naive", "sdpa", "flash")}


def _write(
    workload: Workload, changes: dict[str, object], *, title: str, evidence: str, step_ns: float, share: float
) -> Finding:
    (setting,) = changes
    return Finding(
        code=RULES_OF_SETTING[setting][0],
        title=title,
        evidence=evidence,
        action=f"Run with `{write_flags(workload, changes)}`",
        fix=write_command("report", msgspec.structs.replace(workload, **changes)),
        saving_ns=round(share * step_ns),
        share=share,
        is_measured=True,
    )


def add_measured(findings: Sequence[Finding], measured: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings with the measured ones, ranked. Estimated findings about the same setting belong to the
    measured one. What the others add shrinks: they save their part of the time that is left."""
    rest, left, estimated = list(findings), 1.0, 0.0
    joined: list[Finding] = []
    for one in measured:
        adds = (one.share or 0.0) * left if one.joint_share is None else min(one.joint_share, left)
        left -= adds
        same = {code for codes in RULES_OF_SETTING.values() if one.code in codes for code in codes}
        cards = [card for card in rest if same & _codes(card)]
        rest = [_drop(card, same) for card in rest if card not in cards]
        estimated += sum(card.joint_share or 0.0 for card in cards)
        also = tuple(part for card in cards for part in (msgspec.structs.replace(card, also=()), *card.also))
        step_ns = (one.saving_ns or 0) / (one.share or 1.0)
        joined.append(msgspec.structs.replace(one, joint_ns=round(adds * step_ns), joint_share=adds, also=also))
    scale = min(1.0, left / max(1e-9, 1 - estimated))
    return rank([*joined, *(_shrink(one, scale) for one in rest)])


def _codes(card: Finding) -> set[str]:
    """Return the codes of the findings that the card's fix solves."""
    return {card.code, *(one.code for one in card.also if one.fix == card.fix)}


def _drop(card: Finding, codes: set[str]) -> Finding:
    """Return the card without the other fix that was measured."""
    return msgspec.structs.replace(card, also=tuple(one for one in card.also if one.code not in codes))


def _shrink(card: Finding, scale: float) -> Finding:
    if card.joint_ns is None or card.joint_share is None:
        return card
    return msgspec.structs.replace(card, joint_ns=round(card.joint_ns * scale), joint_share=card.joint_share * scale)

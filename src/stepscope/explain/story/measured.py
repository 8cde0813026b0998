"""Findings that were measured rather than estimated: the same run with another setting, timed for this page.

`bench` may have timed variants of the run, such as another precision, and the attention stage times implementations in
the shape of the run. What is clearly faster there is a finding with the measured saving; an estimated finding about the
same setting becomes part of it. The page's step is that of the profile, and `bench` ran separately, so a measured
saving is the measured ratio applied to the page's step. So is what `stepscope optimise` measured.
"""

from collections.abc import Iterable, Sequence

import msgspec

from stepscope.explain.commands import write_command, write_flags
from stepscope.explain.experiments.attention_tables import Timing, summary_ms
from stepscope.explain.experiments.bench_tables import step_ms
from stepscope.explain.experiments.optimise_tables import PYTHON_LINE, write_fast_command
from stepscope.explain.rules.joint import rank
from stepscope.explain.rules.rule import IDLE_ENOUGH
from stepscope.explain.story.commands import find_case
from stepscope.explain.story.sources import Materials, is_same_run
from stepscope.findings import Finding
from stepscope.recording.rows.attention_case import AttentionRow
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


def find_measured(materials: Materials) -> tuple[Finding, ...]:
    """Return what was measured to be faster, the largest saving first and at most one finding per setting."""
    tried = tuple(_find_optimised(materials))
    known = {one.code for one in tried}  # those of the whole step, one on top of the other, say more
    others = (*_find_variants(materials), *_find_attention(materials))
    found = [*tried, *(one for one in others if one.code not in known)]
    found.sort(key=lambda one: (-(one.share or 0.0), one.code))
    best = {one.code: one for one in reversed(found)}
    return tuple(one for one in found if best[one.code] is one and (one.share or 0.0) >= _WORTH_SAYING)


def _find_variants(materials: Materials) -> Iterable[Finding]:
    row = materials.timed_row
    before = step_ms(row) if row else None
    if row is None or before is None or materials.step_ns is None:
        return
    for other in materials.bench[1:]:
        after, changes = step_ms(other), _differences(row.case.workload, other.case.workload)
        same_device = other.environment.driver_name == row.environment.driver_name
        # Beyond the spread of both.
        if after is None or changes is None or not same_device or after.p80 >= before.p20:
            continue
        ((setting, value),) = changes.items()
        old, new = _name(setting, getattr(row.case.workload, setting)), _name(setting, value)
        yield _write(
            row.case.workload,
            changes,
            title=f"{_begin(new)} is {say_factor(before.median / after.median)} faster than {old}",
            evidence=(
                f"bench timed {say_time(before.median * 1e6)} per step with {old} and "
                f"{say_time(after.median * 1e6)} with {new}"
            ),
            step_ns=materials.step_ns,
            share=1 - after.median / before.median,
        )


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
    """Attention alone was timed, so its saving is one of the step only where the GPU is the limit."""
    row, profile = materials.timed_row, materials.profile
    case = row.case if row else profile.recording.manifest.case if profile else None
    if case is None or profile is None or materials.step_ns is None or profile.clock.idle_share > IDLE_ENOUGH:
        return
    workload, model = case.workload, case.workload.model
    if not isinstance(model, ModelShape):
        return
    times = _attention_times(materials.attention, workload)
    before_ns = times.pop(workload.attention or "", None)
    if before_ns is None or not times:
        return
    value = min(times, key=times.__getitem__)
    calls = model.num_layers * workload.batch // workload.micro_batch
    # Attention that takes longer than the step was timed under other conditions.
    if times[value] >= before_ns or before_ns * calls > materials.step_ns:
        return
    names = _name("attention", value), _name("attention", workload.attention)
    yield _write(
        workload,
        {"attention": value},
        title=f"{_begin(names[0])} is {say_factor(before_ns / times[value])} faster than {names[1]}",
        evidence=(
            f"timed in the shape of this run: {say_time(before_ns)} per layer with {names[1]}, "
            f"{say_time(times[value])} with {names[0]}, {calls} times per step"
        ),
        step_ns=materials.step_ns,
        share=(before_ns - times[value]) * calls / materials.step_ns,
    )


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


def _attention_times(rows: Sequence[AttentionRow], workload: Workload) -> dict[str, float]:
    """Return the time of one attention in nanoseconds by value of `--attention`. Times of Python instead of kernels are
    left out."""
    timing: Timing = "forward" if workload.mode == "inference" else "both"
    times: dict[str, float] = {}
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
        times[kind] = min(times.get(kind, summary.median * 1e6), summary.median * 1e6)
    return {kind: ns for kind, ns in times.items() if kind in ("naive", "sdpa", "flash")}


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

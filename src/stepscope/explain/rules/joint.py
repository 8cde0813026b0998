"""Findings together: what all fixes save in one replay, which findings are one, and which comes first.

Fixes overlap. A faster kernel saves nothing where another fix removes it, and CPU time can be saved once. So savings
are not added up: fixes are accepted one after the other, the one that saves most first, and each counts what it adds to
a replay that has all fixes before it. These parts add up to the joint saving.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce

import msgspec

from stepscope.explain.rules.evidence import WORTH_EXPLAINING, WORTH_SAYING, Gain, StepEvidence, ms
from stepscope.explain.rules.replay import Change
from stepscope.findings import Finding

# A finding that adds less than this share of its own saving to that of larger ones is about the same time.
_ADDS_LITTLE = 0.1
_MOST_OF_STEP = 0.5
# Findings that come first from a smaller share on. Waiting for input is not work of the model: nothing else gets faster
# by fixing something else first, and the fix is a few arguments.
_LEADS_FROM = {"SS012": 0.25}
_UNKNOWN_SAVING = 0.5  # of what a finding is about: more than nothing, and less than an estimate of all of it


@dataclass(slots=True)
class _Fix:
    """One fix, the finding that gains most from it, and the other findings about the same time. `own_ns` is its saving
    alone, `replayed_ns` that of its change in the replay: they differ if a rule knows better than the replay."""

    finding: Finding
    change: Change
    own_ns: float
    replayed_ns: float
    also: list[Finding] = field(default_factory=list)
    adds_ns: float = 0.0


def join(evidence: StepEvidence, found: Iterable[tuple[Finding, Gain | None]]) -> list[Finding]:
    """Return the findings with `joint_ns` and `also`. Findings with the same fix are one finding, and a finding that
    adds next to nothing to the saving of a larger one belongs to that one. Remarks and findings without an estimate
    stay as they are; a fix that saves next to nothing, alone or after the others, is left out."""
    rest: list[Finding] = []
    by_fix: dict[str, list[tuple[Finding, Gain]]] = {}
    unseen = evidence.replay.unchanged()
    for finding, gain in found:
        if finding.is_remark or finding.saving_ns is None:
            rest.append(finding)
        else:
            seen = gain or Gain(gpu_ns=0.0, step_ns=0.0, change=unseen)
            by_fix.setdefault(finding.fix, []).append((finding, seen))
    accepted = _accept(evidence, [_merge(evidence, same) for same in by_fix.values()])
    least = WORTH_SAYING * evidence.step_ns
    joined = [
        msgspec.structs.replace(
            fix.finding,
            joint_ns=round(fix.adds_ns),
            joint_share=fix.adds_ns / evidence.step_ns,
            also=tuple(fix.also),
        )
        for fix in accepted
        if max(fix.own_ns, fix.adds_ns, (fix.finding.about or 0.0) * evidence.step_ns) >= least
    ]
    return [*joined, *rest]


def _merge(evidence: StepEvidence, same: Sequence[tuple[Finding, Gain]]) -> _Fix:
    """Return the findings that one fix solves as one: its saving is that of all of them."""
    (lead, gain), *others = sorted(same, key=lambda one: -(one[0].saving_ns or 0))
    own_ns = float(lead.saving_ns or 0)
    if others:
        gain = evidence.gain(reduce(Change.joined, (other.change for _, other in others), gain.change))
        more_ns = gain.step_ns - own_ns
        own_ns = max(own_ns, gain.step_ns)
        said = lead.evidence
        if more_ns >= WORTH_EXPLAINING * own_ns:  # the evidence is about the lead alone
            said += f"; {ms(more_ns)} of the saving comes from the findings below, which have the same fix"
        lead = msgspec.structs.replace(lead, evidence=said, saving_ns=round(own_ns), share=own_ns / evidence.step_ns)
    return _Fix(lead, gain.change, own_ns, gain.step_ns, also=[finding for finding, _ in others])


def _accept(evidence: StepEvidence, fixes: Sequence[_Fix]) -> list[_Fix]:
    """Return the fixes that each save time of their own, the largest addition first, with what each adds. Findings
    that lead go first, so that smaller ones become part of them and not the other way round.

    A fix seldom adds more than it saves alone, so an addition that is known to be at least as large as what the others
    may add is the largest: most fixes are replayed once or twice.
    """
    together, replayed_ns, left_ns = evidence.replay.unchanged(), 0.0, float(evidence.step_ns)
    accepted: list[_Fix] = []
    # What it may add, after how many fixes it was replayed, and the gain with them.
    waiting = [(fix.own_ns, -1, 0.0, fix) for fix in fixes]
    while waiting:
        waiting.sort(key=lambda one: (not leads(one[-1].finding), -one[0]))
        may_add_ns, replayed_after, with_it_ns, fix = waiting.pop(0)
        if replayed_after != len(accepted):
            both = together.joined(fix.change)
            with_it_ns = max(replayed_ns, evidence.gain(both).step_ns)
            may_add_ns = _scale(fix, with_it_ns - replayed_ns, left_ns / evidence.step_ns)
            may_add_ns = max(0.0, min(may_add_ns, left_ns - _computing_ns(evidence, both)))
            waiting.append((may_add_ns, len(accepted), with_it_ns, fix))
        elif accepted and may_add_ns < _ADDS_LITTLE * fix.own_ns:
            _find_larger(evidence, accepted, fix).also += [fix.finding, *fix.also]
        else:
            fix.adds_ns = may_add_ns
            together, replayed_ns, left_ns = together.joined(fix.change), with_it_ns, left_ns - fix.adds_ns
            accepted.append(fix)
    return accepted


def _computing_ns(evidence: StepEvidence, change: Change) -> float:
    """Return how long a step computes with a change: no fix saves more than the rest."""
    computes = (evidence.kernels["class"] != "communication").to_numpy()
    faster = float(change.time_ns[computes].sum()) / max(1.0, float(evidence.durations[computes].sum()))
    return evidence.model_ns * faster


def _scale(fix: _Fix, gain_ns: float, left: float) -> float:
    """Return what a fix adds if its change adds `gain_ns` in the replay. What its rule knows beyond the replay counts
    for the share of the step that is `left`."""
    if fix.own_ns < fix.replayed_ns:
        return gain_ns * fix.own_ns / fix.replayed_ns
    return gain_ns + (fix.own_ns - fix.replayed_ns) * left


def _find_larger(evidence: StepEvidence, accepted: Sequence[_Fix], fix: _Fix) -> _Fix:
    """Return the accepted fix that leaves least for `fix` to save."""
    if len(accepted) == 1:
        return accepted[0]
    left = [evidence.gain(one.change.joined(fix.change)).step_ns - one.replayed_ns for one in accepted]
    return accepted[left.index(min(left))]


def rank(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings with a fix first, then remarks, each by how much they matter to this step.

    That is what the finding adds to the joint saving, as a share of the step. Where that is not known, it is half of
    the share of the step that the finding is about. If a finding is about most of the step, it is that share: if 64% of
    a step is communication, communication comes first, even if the estimate of what can be hidden is small. An expert
    would say that first as well.
    """
    weighed, least = [], {False: math.inf, True: math.inf}
    for one in findings:
        weight = _weight(one)
        # A joint saving is what a fix adds to those that `join` accepted before it: it is never above them.
        if one.joint_ns is not None:
            weight = least[one.is_measured] = min(weight, least[one.is_measured])
        weighed.append((one.is_remark, -weight, one))
    return tuple(one for *_, one in sorted(weighed, key=lambda entry: entry[:2]))


def _weight(finding: Finding) -> float:
    about = finding.about or 0.0
    share = finding.share if finding.joint_share is None else finding.joint_share
    if leads(finding):
        return max(share or 0.0, about)
    return _UNKNOWN_SAVING * about if share is None else share


def leads(finding: Finding) -> bool:
    """Whether a finding is about so much of the step that it comes before those that save more."""
    return (finding.about or 0.0) > _LEADS_FROM.get(finding.code, _MOST_OF_STEP)

"""The rules, and the findings of a profile: `find(profile)`.

Savings are per step and come from a replay of the recording (`replay.py`): GPU time that is hidden behind a slow CPU is
not counted. Savings do not add up, because two rules may point at the same kernels: `joint.py` replays all fixes
together.
"""

from contextlib import suppress

import msgspec

from stepscope.errors import StepscopeError, nearest
from stepscope.explain.commands import write_command, write_flags
from stepscope.explain.ranks.lateness import RankTimes
from stepscope.explain.rules import (
    copies,
    experts,
    fusion,
    gemm,
    host,
    naive_attention,
    out_of_memory,
    remarks,
    step,
    tiles,
)
from stepscope.explain.rules.evidence import StepEvidence
from stepscope.explain.rules.joint import join, rank
from stepscope.explain.rules.loop import loading, training_loop
from stepscope.explain.rules.rule import THROUGHPUT, Hit, Rule, workload_of
from stepscope.explain.rules.strategies import communication, late_rank
from stepscope.explain.trace.profile import Profile, code_digest
from stepscope.files import decode as decode_file
from stepscope.files import read_plain, write_atomically
from stepscope.findings import Column, Finding, Table

_MODULES = (
    *(host, loading, fusion, naive_attention, gemm, tiles, step, copies, experts),
    *(communication, late_rank, training_loop, remarks, out_of_memory),
)
RULES: dict[str, Rule] = {
    rule.code: rule for rule in sorted((rule for one in _MODULES for rule in one.RULES), key=lambda rule: rule.code)
}

__all__ = ["RULES", "Rule", "describe_rule", "find", "find_once", "find_rule", "tabulate_rules"]


def find(profile: Profile, rank_times: RankTimes | None = None) -> tuple[Finding, ...]:
    """Return the findings of a profile in the order of `rank`. `rank_times` compares it with the other ranks of its
    run."""
    evidence = StepEvidence(profile=profile, rank_times=rank_times)
    if not evidence.kernels.height:
        return ()
    rules = [rule for rule in RULES.values() if rule.on_cpu or not profile.on_cpu]
    hits = [(rule, hit) for rule in rules if (hit := rule.check(evidence)) is not None]
    return rank(join(evidence, [(_make_finding(evidence, rule, hit), hit.gain) for rule, hit in hits]))


def find_once(profile: Profile, rank_times: RankTimes | None = None) -> tuple[Finding, ...]:
    """Return what `find` does. The findings of a large recording on its own are kept next to it and read back."""
    is_kept = profile.kept_in is not None and rank_times is None
    path = profile.kept_in / f"findings-{code_digest()}.json" if profile.kept_in and is_kept else None
    if path is not None:
        with suppress(OSError, msgspec.DecodeError):  # missing or damaged: computed again below
            return decode_file(read_plain(path), tuple[Finding, ...])
    found = find(profile, rank_times)
    if path is not None:
        with suppress(OSError):  # a full disk only costs time on the next call
            write_atomically(path, msgspec.json.encode(found))
    return found


def find_rule(code: str) -> Rule:
    number = code.upper().removeprefix("SS")
    found = RULES.get(f"SS{number:0>3}")
    if found is None:
        close = nearest(code.upper(), RULES)
        raise StepscopeError(
            f"unknown rule: `{code[:60]}`",
            detail=f"expected SS001 to {max(RULES)}",
            hint=f"stepscope rule {close}" if close else "stepscope rule",
        )
    return found


def tabulate_rules() -> Table:
    columns = (Column(key="code", label="code"), Column(key="title", label="finding"))
    return Table(title="Rules", columns=columns, rows=tuple((rule.code, rule.title) for rule in RULES.values()))


def describe_rule(rule: Rule) -> Table:
    """Return a rule's page as a table of two columns, for every output format."""
    columns = (Column(key="field", label=rule.code), Column(key="text", label=rule.title))
    rows = (
        ("what it means", rule.meaning),
        ("what to do", rule.action),
        ("your own code", rule.own[0]),
        *(("", line) for line in rule.own[1:]),
        ("built-in model", rule.builtin),
        ("how it is detected", rule.seen),
        ("estimated saving", rule.saving),
    )
    return Table(title="", columns=columns, rows=rows)


def _make_finding(evidence: StepEvidence, rule: Rule, hit: Hit) -> Finding:
    action, fix = _choose_fix(evidence, rule, hit)
    # More work per step takes longer: the saving is that of another fix.
    saving = None if hit.saving_ns is None or THROUGHPUT in action else round(min(hit.saving_ns, evidence.step_ns))
    return Finding(
        code=rule.code,
        title=evidence.clock.reword(hit.title or rule.title),
        evidence=evidence.clock.reword(hit.evidence),
        action=action,
        fix=fix,
        saving_ns=saving,
        share=None if saving is None else saving / evidence.step_ns,
        about=None if hit.about_ns is None else min(1.0, hit.about_ns / evidence.step_ns),
        unit="step" if evidence.clock.has_steps else "trace",
    )


def _choose_fix(evidence: StepEvidence, rule: Rule, hit: Hit) -> tuple[str, str]:
    """Return what to do and the code or command for it. The built-in model cannot be edited: if no setting fixes the
    finding there, it is a remark."""
    action = rule.action if hit.action is None else hit.action
    paste = rule.paste if hit.paste is None else hit.paste
    if not evidence.is_builtin or rule.change is None or hit.paste == "":
        return (action, "" if evidence.is_builtin else paste)
    manifest = evidence.profile.recording.manifest
    workload, changes = workload_of(manifest), rule.change(manifest)
    if not changes:
        return ("", "")
    command = write_command("profile", msgspec.structs.replace(workload, **changes))
    more = f", {THROUGHPUT}" if "batch" in changes else ""
    return (f"Run with `{write_flags(workload, changes)}`{more}", command)

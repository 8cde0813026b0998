"""What costs time, and what to do about it: `find(profile)`.

Savings are of one step and replayed (`replay.py`), so that GPU time which the host's pace hides is not promised. They
do not add up: two rules may address the same kernels.
"""

from contextlib import suppress

import msgspec

from stepscope.errors import StepscopeError, nearest
from stepscope.explain.rules import fusion, host, naive_attention, step
from stepscope.explain.rules import gemm as gemm
from stepscope.explain.rules.evidence import StepEvidence
from stepscope.explain.rules.rule import Hit, Rule
from stepscope.explain.trace.profile import Profile, code_digest
from stepscope.files import decode as decode_file
from stepscope.files import read_plain, write_atomically
from stepscope.findings import Column, Finding, Table

_MODULES = (host, fusion, naive_attention, gemm, step)
RULES: dict[str, Rule] = {
    rule.code: rule for rule in sorted((rule for one in _MODULES for rule in one.RULES), key=lambda rule: rule.code)
}

__all__ = ["RULES", "Rule", "describe_rule", "find", "find_once", "find_rule", "tabulate_rules"]


def find(profile: Profile) -> tuple[Finding, ...]:
    """What was found, the largest saving first; what has none to name comes last."""
    evidence = StepEvidence(profile=profile)
    if not evidence.kernels.height:
        return ()
    rules = [rule for rule in RULES.values() if rule.on_cpu or not profile.on_cpu]
    hits = [(rule, hit) for rule in rules if (hit := rule.check(evidence)) is not None]
    findings = [_make_finding(evidence, rule, hit) for rule, hit in hits]
    return tuple(sorted(findings, key=lambda one: (one.saving_ns is None, -(one.saving_ns or 0), one.code)))


def find_once(profile: Profile) -> tuple[Finding, ...]:
    """The same; those of a large recording are looked for once and kept next to it."""
    path = profile.kept_in / f"findings-{code_digest()}.json" if profile.kept_in else None
    if path is not None:
        with suppress(OSError, msgspec.DecodeError):  # not there yet, or damaged: looked for below
            return decode_file(read_plain(path), tuple[Finding, ...])
    found = find(profile)
    if path is not None:
        with suppress(OSError):  # a full disk costs the next look some time, and nothing else
            write_atomically(path, msgspec.json.encode(found))
    return found


def find_rule(code: str) -> Rule:
    found = RULES.get(code.upper())
    if found is None:
        close = nearest(code.upper(), RULES)
        raise StepscopeError(
            f"no rule has the code `{code[:60]}`",
            detail=f"expected SS001 to {max(RULES)}",
            hint=f"stepscope rule {close}" if close else "stepscope rule",
        )
    return found


def tabulate_rules() -> Table:
    columns = (Column(key="code", label="code"), Column(key="title", label="what it finds"))
    return Table(title="Rules", columns=columns, rows=tuple((rule.code, rule.title) for rule in RULES.values()))


def describe_rule(rule: Rule) -> Table:
    """A rule's page as a table of two columns, for every format."""
    columns = (Column(key="field", label=rule.code), Column(key="text", label=rule.title))
    rows = (
        ("what it means", rule.meaning),
        ("how it is seen", rule.seen),
        ("the saving", rule.saving),
        ("built-in model", rule.builtin),
        *(("your own" if not place else "", line) for place, line in enumerate(rule.own)),
    )
    return Table(title="", columns=columns, rows=rows)


def _make_finding(evidence: StepEvidence, rule: Rule, hit: Hit) -> Finding:
    saving = None if hit.saving_ns is None else round(min(hit.saving_ns, evidence.step_ns))
    return Finding(
        code=rule.code,
        title=rule.title,
        evidence=hit.evidence,
        fix=rule.builtin if evidence.is_builtin else rule.own[0].removeprefix("# "),
        saving_ns=saving,
        share=None if saving is None else saving / evidence.step_ns,
    )

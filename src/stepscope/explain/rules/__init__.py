"""What costs time, and what to do about it: `find(profile)`.

Each rule is a check with a stable code and a page. Savings are of one step and replayed (`replay.py`), so that GPU time
which the host's pace hides is not promised. They do not add up: two rules may address the same kernels.
"""

from stepscope.errors import StepscopeError, nearest
from stepscope.explain.rules import attention, fusion, host, products
from stepscope.explain.rules import step as whole
from stepscope.explain.rules.evidence import Evidence
from stepscope.explain.rules.pages import PAGES, RulePage
from stepscope.explain.rules.types import Hit, Rule
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Column, Finding, Table

RULES: tuple[Rule, ...] = tuple(
    sorted((*host.RULES, *fusion.RULES, *attention.RULES, *products.RULES, *whole.RULES), key=lambda rule: rule.code)
)

__all__ = ["PAGES", "RULES", "RulePage", "describe_rule", "find", "rule_page", "tabulate_rules"]


def find(profile: Profile) -> tuple[Finding, ...]:
    """What was found, the largest saving first; what has none to name comes last."""
    evidence = Evidence(profile=profile)
    if not evidence.kernels.height:
        return ()
    rules = [rule for rule in RULES if rule.on_cpu or not profile.on_cpu]
    hits = [(rule, hit) for rule in rules if (hit := rule.check(evidence)) is not None]
    findings = [_make_finding(evidence, rule, hit) for rule, hit in hits]
    return tuple(sorted(findings, key=lambda one: (one.saving_ns is None, -(one.saving_ns or 0), one.code)))


def rule_page(code: str) -> RulePage:
    found = PAGES.get(code.upper())
    if found is None:
        close = nearest(code.upper(), PAGES)
        raise StepscopeError(
            f"no rule has the code `{code[:60]}`",
            detail=f"expected SS001 to {max(PAGES)}",
            hint=f"stepscope rule {close}" if close else "stepscope rule",
        )
    return found


def tabulate_rules() -> Table:
    columns = (Column(key="code", label="code"), Column(key="title", label="what it finds"))
    rows = tuple((page.code, page.title) for page in PAGES.values())
    return Table(title="Rules", columns=columns, rows=rows)


def describe_rule(page: RulePage) -> Table:
    """A page as a table of two columns, for every format."""
    columns = (Column(key="field", label=page.code), Column(key="text", label=page.title))
    lines = page.own.splitlines()
    rows = (
        ("what it means", page.meaning),
        ("how it is seen", page.seen),
        ("the saving", page.saving),
        ("built-in model", page.builtin),
        *(("your own" if not place else "", line) for place, line in enumerate(lines)),
    )
    return Table(title="", columns=columns, rows=rows)


def _make_finding(evidence: Evidence, rule: Rule, hit: Hit) -> Finding:
    page = PAGES[rule.code]
    saving = None if hit.saving_ns is None else round(min(hit.saving_ns, evidence.step_ns))
    return Finding(
        code=rule.code,
        title=page.title,
        evidence=hit.evidence,
        fix=page.builtin if evidence.is_builtin else page.own.splitlines()[0].removeprefix("# "),
        saving_ns=saving,
        share=None if saving is None else saving / evidence.step_ns,
    )

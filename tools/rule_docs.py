"""Writes what docs/rule.md says of each rule, from the rules themselves: `python tools/rule_docs.py`.

The page has two parts between comments, the list of all rules and a section for each; the rest is written by hand.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from stepscope.explain.rules import RULES, Rule

PAGE = Path(__file__).parents[1] / "docs/rule.md"
_WIDTH = 120


def fill_in(page: str) -> str:
    """The page with both parts as the rules are now."""
    for name, lines in (("rules", _list_rules()), ("pages", _describe_rules())):
        start, end = f"<!-- {name}: written by tools/rule_docs.py -->\n", f"<!-- end of {name} -->\n"
        before, found, rest = page.partition(start)
        _, closed, after = rest.partition(end)
        assert found, f"docs/rule.md has no part `{name}`"
        assert closed, f"the part `{name}` of docs/rule.md has no end"
        page = "".join((before, start, *(f"{line}\n" for line in lines), end, after))
    return page


def _list_rules() -> Iterator[str]:
    yield "| code | what it finds | for the built-in model |"
    yield "| --- | --- | --- |"
    for rule in RULES.values():
        yield f"| {rule.code} | {rule.title} | {_mark_flags(rule.builtin)} |"


def _describe_rules() -> Iterator[str]:
    for rule in RULES.values():
        yield from _describe_rule(rule)


def _describe_rule(rule: Rule) -> Iterator[str]:
    yield f"### {rule.code}: {rule.title}"
    yield ""
    for lead, text in (
        ("", rule.meaning),
        ("**How it is seen.** ", rule.seen),
        ("**The saving.** ", rule.saving),
        ("**Built-in model.** ", _mark_flags(rule.builtin)),
    ):
        yield textwrap.fill(f"{lead}{text}", _WIDTH, break_long_words=False, break_on_hyphens=False)
        yield ""
    yield "```text"  # not `python`, which ruff would lay out differently
    yield from rule.own
    yield "```"
    yield ""


def _mark_flags(text: str) -> str:
    """Flags and commands as code."""
    return re.sub(
        r"--[a-z-]+(?: (?!or\b)[a-z0-9-]+(?=[ ,]|$))?|stepscope (?:doctor|kernel NAME)",
        lambda found: f"`{found[0]}`",
        text,
    )


if __name__ == "__main__":
    PAGE.write_text(fill_in(PAGE.read_text()))

"""Generate the parts of docs/rule.md that describe the rules: `python tools/rule_docs.py`.

The page has two generated parts between comments: the list of rules and a section per rule. The rest is written by
hand.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from stepscope.explain.rules import RULES, Rule

PAGE = Path(__file__).parents[1] / "docs/rule.md"
_WIDTH = 120


def fill_in(page: str) -> str:
    """Return the page with both parts generated from the current rules."""
    for name, lines in (("rules", _list_rules()), ("pages", _describe_rules())):
        start, end = f"<!-- {name}: written by tools/rule_docs.py -->\n", f"<!-- end of {name} -->\n"
        before, found, rest = page.partition(start)
        _, closed, after = rest.partition(end)
        assert found, f"docs/rule.md has no part `{name}`"
        assert closed, f"the part `{name}` of docs/rule.md has no end"
        page = "".join((before, start, *(f"{line}\n" for line in lines), end, after))
    return page


def _list_rules() -> Iterator[str]:
    yield "| code | finding | what to do |"
    yield "| --- | --- | --- |"
    for rule in RULES.values():
        yield f"| [{rule.code}](#{rule.code.lower()}) | {rule.title} | {rule.action} |"


def _describe_rules() -> Iterator[str]:
    for rule in RULES.values():
        yield from _describe_rule(rule)


def _describe_rule(rule: Rule) -> Iterator[str]:
    yield f"### {rule.code}"
    yield ""
    yield from _fill(f"**{rule.title}.** {rule.meaning}")
    yield from _fill(f"**Fix.** {rule.action}:")
    yield "```text"  # not `python`: ruff would reformat it
    yield from rule.own
    yield "```"
    yield ""
    yield from _fill(f"**Built-in model.** {_mark_flags(rule.builtin)}.")
    yield from _fill(f"**How it is detected.** {rule.seen}")
    yield from _fill(f"**Estimated saving.** {rule.saving}")


def _fill(paragraph: str) -> Iterator[str]:
    yield textwrap.fill(paragraph, _WIDTH, break_long_words=False, break_on_hyphens=False)
    yield ""


def _mark_flags(text: str) -> str:
    """Mark flags and commands as code."""
    return re.sub(
        r"--[a-z-]+(?: (?!or\b)[a-z0-9-]+(?=[ ,]|$))?|stepscope (?:doctor|kernel NAME)",
        lambda found: f"`{found[0]}`",
        text,
    )


if __name__ == "__main__":
    PAGE.write_text(fill_in(PAGE.read_text()))

"""Every relative link in the documentation leads somewhere, as a code host resolves it: to a file, and to a heading."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "bench").rglob("*.md"))


def parse_links(text: str) -> Iterator[str]:
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        for inline in token.children or []:
            target = inline.attrGet("href") or inline.attrGet("src")
            if target is not None:
                yield str(target)


def list_anchors(text: str) -> set[str]:
    """The anchors that a code host gives the headings of a page; a repeated heading gets a number."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    seen: Counter[str] = Counter()
    anchors = set()
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            words = "".join(child.content for child in inline.children or [])
            slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return anchors


def find_dead_links(page: Path) -> list[str]:
    dead = []
    for link in parse_links(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and anchor not in list_anchors(target.read_text(encoding="utf-8"))):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert find_dead_links(page) == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Title\n\n## `--flag`, and more\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md) [b](other.md#--flag-and-more) [c](other.md#twice-1) [d](#here) [e](https://x.org/#y)\n\n"
        "| [f](gone.md) | [g](other.md#gone) |\n| --- | --- |\n| [h](#gone) | ![i](gone.png) |\n\n"
        "```\n[j](gone.md)\n```\n"
    )
    assert find_dead_links(page) == ["gone.md", "other.md#gone", "#gone", "gone.png"]


def test_every_page_is_in_the_navigation() -> None:
    linked = set(parse_links((ROOT / "docs/index.md").read_text(encoding="utf-8")))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages <= linked

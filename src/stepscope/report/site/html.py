"""HTML from the texts of a report, and what a page has in itself instead of fetching it: its style, its script and its
data, and the policy that lets in nothing else."""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources

from stepscope.report.formats import NAME, PROSE, clean

_QUOTED = re.compile(r"`([^`]{1,200})`")
_UNIT_APART = re.compile(r"(?<=\d) (?=(?:%|ns|[µm]?s|[KMGT]?i?B|×)(?![\w]))")


def markup(text: str, most: int = NAME, *, lines: bool = False) -> str:
    """Clean text for HTML, in elements and in attributes."""
    return escape(clean(text, most, lines=lines))


def prose(text: str, most: int = PROSE) -> str:
    """Sentences for HTML, with what stands in `backticks` set as code, and units kept on the line of their number."""
    return _QUOTED.sub(r"<code>\1</code>", _UNIT_APART.sub("&nbsp;", markup(text, most)))


def join_styles(names: Iterable[str]) -> str:
    return "".join(map(_read, names))


def join_scripts(names: Iterable[str]) -> str:
    """The scripts in this order in one function, so that they share names with each other and with nobody else."""
    return "".join(('(() => {\n"use strict";\n', *map(_read, names), "})();\n"))


def write_policy(script: str, style: str) -> str:
    """For an attribute: only this script and this style, and nothing from anywhere."""
    allowed = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    return escape(f"{allowed}; base-uri 'none'; form-action 'none'")


def embed(data: Mapping[str, object]) -> str:
    """JSON for a script element: only `<` can end one or open a comment, and JSON may spell it out."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _read(name: str) -> str:
    return resources.files("stepscope.report.site").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"

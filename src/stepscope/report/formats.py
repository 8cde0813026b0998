"""The formats of a table, and text that is safe to print. Apart from rendering, so that `--help` need not load it."""

import re
import unicodedata
from enum import StrEnum

# Everything but letters of ASCII, line ends and tabs is looked up.
_SUSPECT = re.compile(r"[^\n\t -~]")
# Controls, signs that turn the direction of text or are not seen, halves of pairs, and line ends of other systems.
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


class Format(StrEnum):
    """What `--format` accepts."""

    TEXT = "text"
    MD = "md"
    LATEX = "latex"
    CSV = "csv"
    JSON = "json"


def visible(text: str) -> str:
    """Text with names from somebody's file in it, with nothing that a terminal obeys or that hides what is there: such
    characters are written as JSON escapes them, so that JSON stays what it was."""
    return _SUSPECT.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    if unicodedata.category(character) not in _UNSEEN:
        return character
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))

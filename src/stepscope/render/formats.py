"""The formats of a table, and text that is safe to print and to share. Apart from rendering, so that `--help` need not
load it.

A terminal gets nothing that it would obey (`visible`). A page or a file for others gets nothing but through `clean`:
home folders become `~`, what cannot be seen or turns the line around is spelt out, and what is endless is cut in its
middle, as both ends of a kernel's name say something.
"""

import re
import unicodedata
from enum import StrEnum

# Everything but letters of ASCII, line ends and tabs is looked up.
_SUSPECT = re.compile(r"[^\n\t -~]")
# Controls, signs that turn the direction of text or are not seen, halves of pairs, and line ends of other systems.
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")

NAME, PROSE, COPYABLE = 240, 1_200, 20_000  # characters that a text of each kind may have
# Looked at of a text at either end beyond what is kept, so that no half of a home folder is left at the cut.
_MARGIN = 4_096
# A folder of homes may lie below others (/export/home, /nfs/cluster/home).
_UNIX_HOME = r"(?:/[\w.-]+){0,8}/(?:homes?\d*|Users)/[^/\\\s\"'`<>|:;,(){}\[\]]+"
# Names on Windows may have spaces, and then a separator must follow, or the rest of the sentence would be taken for the
# name.
_HOMES = re.compile(
    rf"(?:(?<![\w~.])|(?<=-[A-Za-z])){_UNIX_HOME}"  # a compiler's flag stands before it without a space
    r"|(?<![\w~])~[A-Za-z_][\w.-]*(?=/)"
    r"|(?<![A-Za-z])[A-Za-z]:[\\/]{1,2}Users[\\/]{1,2}(?:[^\\/:*?\"<>|\r\n]{1,64}(?=[\\/])|[^\\/\s:*?\"'<>|]+)"
    r"|(?<![\w~./-])/root(?![\w.-])",
    re.IGNORECASE,
)
# A word that a shell needs quotes for, because of what comes after the home.
_QUOTED = re.compile(rf"(?<![\w'])'(?:{_UNIX_HOME}|/root)/([^'\n]*[^\w'\n@%+=:,./-][^'\n]*)'")
# Variables that name a person or a machine, or hold a secret. Others are left: kernels have arguments of that form.
_VARIABLE = re.compile(
    r"\b((?:USER|USERNAME|LOGNAME|HOME|HOST|HOSTNAME|MAIL|\w*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)\w*)=)"
    r"(?!~)[^\s,;\"'<>]+"
)


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


def hide_private(text: str) -> str:
    """The text with `~` in place of every home folder, outside of a shell's quotes, within which it is no home; and
    without the values of variables that are nobody else's business."""
    if "/" in text or "\\" in text:
        text = _HOMES.sub("~", _QUOTED.sub(r"~/'\1'", text))
    return _VARIABLE.sub(r"\1…", text) if "=" in text else text


def clean(text: str, most: int = NAME, *, lines: bool = False) -> str:
    """At most so many characters, all of them visible. `lines` keeps breaks between lines."""
    looked_at = most + _MARGIN
    if len(text) > 2 * looked_at:
        text = f"{text[:looked_at]}…{text[-looked_at:]}"
    shown = cut(hide_private(text), most)
    if shown.isascii() and shown.isprintable():
        return shown
    return cut("".join(_spell(character, lines=lines) for character in shown), most)


def cut(text: str, most: int) -> str:
    """The text, or its beginning and its end with … between."""
    if len(text) <= most:
        return text
    tail = (most - 1) // 3
    return f"{text[: most - 1 - tail]}…{text[-tail:]}"


def _spell(character: str, *, lines: bool) -> str:
    if lines and character in "\n\t":
        return character
    # Marks that combine pile up without end above a letter, so they are spelt out like what cannot be seen.
    if character.isprintable() and unicodedata.category(character) not in ("Mn", "Me"):
        return character
    return f"\\u{ord(character):04x}"

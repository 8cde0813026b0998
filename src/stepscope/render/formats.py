"""The formats of a table, and text that is safe to print and to share. Separate from rendering, so that `--help` does
not load it.

`visible` removes everything that a terminal would obey. Text for a page or a shared file goes through `clean`: home
directories become `~`, invisible characters and ones that reverse text are spelled out, and long text is cut in the
middle, because both ends of a kernel's name matter.
"""

import re
import unicodedata
from enum import StrEnum

# Everything but ASCII letters, line ends and tabs is checked.
_SUSPECT = re.compile(r"[^\n\t -~]")
# Control characters, characters that reverse text or are invisible, lone surrogates, and line ends of other systems.
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")

# The measurement quality in words.
VERDICTS = {"sound": "Reliable", "doubtful": "Unreliable", "unknown": "Measurement quality unknown"}
NAME, PROSE, COPYABLE = 240, 1_200, 20_000  # the most characters of each kind of text
# Extra characters to read beyond the cut at either end, so that no half of a home directory remains.
_MARGIN = 4_096
# Home directories can be below others (/export/home, /nfs/cluster/home).
_UNIX_HOME = r"(?:/[\w.-]+){0,8}/(?:homes?\d*|Users)/[^/\\\s\"'`<>|:;,(){}\[\]]+"
# Windows names can have spaces. Then a separator must follow, or the rest of the sentence would count as the name.
_HOMES = re.compile(
    rf"(?:(?<![\w~.])|(?<=-[A-Za-z])){_UNIX_HOME}"  # a compiler flag can precede it without a space
    r"|(?<![\w~])~[A-Za-z_][\w.-]*(?=/)"
    r"|(?<![A-Za-z])[A-Za-z]:[\\/]{1,2}Users[\\/]{1,2}(?:[^\\/:*?\"<>|\r\n]{1,64}(?=[\\/])|[^\\/\s:*?\"'<>|]+)"
    r"|(?<![\w~./-])/root(?![\w.-])",
    re.IGNORECASE,
)
# A word that needs shell quotes because of what follows the home directory.
_QUOTED = re.compile(rf"(?<![\w'])'(?:{_UNIX_HOME}|/root)/([^'\n]*[^\w'\n@%+=:,./-][^'\n]*)'")
# Variables that name a person or a machine, or hold a secret. Others stay: kernels have arguments of this form.
_VARIABLE = re.compile(
    r"\b((?:USER|USERNAME|LOGNAME|HOME|HOST|HOSTNAME|MAIL|\w*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)\w*)=)"
    r"(?!~)[^\s,;\"'<>]+"
)


class Format(StrEnum):
    """The values of `--format`."""

    TEXT = "text"
    MD = "md"
    LATEX = "latex"
    CSV = "csv"
    JSON = "json"


def visible(text: str) -> str:
    """Return text from an untrusted file without characters that a terminal obeys or that hide others. They become JSON
    escapes, so that JSON keeps its meaning."""
    return _SUSPECT.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    if unicodedata.category(character) not in _UNSEEN:
        return character
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def hide_private(text: str) -> str:
    """Return the text with `~` for every home directory, except inside shell quotes, where `~` does not work; and
    without the values of private environment variables."""
    if "/" in text or "\\" in text:
        text = _HOMES.sub("~", _QUOTED.sub(r"~/'\1'", text))
    return _VARIABLE.sub(r"\1…", text) if "=" in text else text


def clean(text: str, most: int = NAME, *, lines: bool = False) -> str:
    """Return at most `most` characters, all of them visible. `lines` keeps line breaks."""
    looked_at = most + _MARGIN
    if len(text) > 2 * looked_at:
        text = f"{text[:looked_at]}…{text[-looked_at:]}"
    shown = cut(hide_private(text), most)
    if shown.isascii() and shown.isprintable():
        return shown
    return cut("".join(_spell(character, lines=lines) for character in shown), most)


def cut(text: str, most: int) -> str:
    """Return the text, or its start and end with … in between."""
    if len(text) <= most:
        return text
    tail = (most - 1) // 3
    return f"{text[: most - 1 - tail]}…{text[-tail:]}"


def _spell(character: str, *, lines: bool) -> str:
    if lines and character in "\n\t":
        return character
    # Combining marks can pile up without limit on one letter, so they are spelled out like invisible characters.
    if character.isprintable() and unicodedata.category(character) not in ("Mn", "Me"):
        return character
    return f"\\u{ord(character):04x}"

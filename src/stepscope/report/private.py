"""What a page or a file for others does not say: whose home folder something lay in."""

import re

# A folder of homes may lie below others (/export/home, /nfs/cluster/home).
_UNIX_HOME = r"(?:/[\w.-]+){0,8}/(?:home|Users)/[^/\\\s\"'`<>|:;,(){}\[\]]+"
# Names on Windows may have spaces, and then a separator must follow, or the rest of the sentence would be taken for the
# name.
_HOMES = re.compile(
    rf"(?<![\w~.]){_UNIX_HOME}"
    r"|(?<![A-Za-z])[A-Za-z]:[\\/]{1,2}Users[\\/]{1,2}(?:[^\\/:*?\"<>|\r\n]{1,64}(?=[\\/])|[^\\/\s:*?\"'<>|]+)"
    r"|(?<![\w~./-])/root(?![\w.-])",
    re.IGNORECASE,
)
# A word that a shell needs quotes for, because of what comes after the home.
_QUOTED = re.compile(rf"(?<![\w'])'(?:{_UNIX_HOME}|/root)/([^'\n]*[^\w'\n@%+=:,./-][^'\n]*)'")


def hide_homes(text: str) -> str:
    """The text with `~` in place of every home folder, and outside of a shell's quotes, within which it is no home."""
    if "/" not in text and "\\" not in text:
        return text
    return _HOMES.sub("~", _QUOTED.sub(r"~/'\1'", text))

"""What a page or a file for others does not say: whose home folder something lay in, and what an environment held."""

import re

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


def hide_private(text: str) -> str:
    """The text with `~` in place of every home folder, outside of a shell's quotes, within which it is no home; and
    without the values of variables that are nobody else's business."""
    if "/" in text or "\\" in text:
        text = _HOMES.sub("~", _QUOTED.sub(r"~/'\1'", text))
    return _VARIABLE.sub(r"\1…", text) if "=" in text else text

"""The formats of a table. Apart from the rendering, so that `--help` need not load it."""

from enum import StrEnum


class Format(StrEnum):
    """What `--format` accepts."""

    TEXT = "text"
    MD = "md"
    LATEX = "latex"
    CSV = "csv"
    JSON = "json"

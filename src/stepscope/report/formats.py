"""The formats of a table. Apart from the rendering, so that `--help` need not load it."""

from enum import StrEnum


class PageFormat(StrEnum):
    """What `--format` accepts where the result is a page and not a table."""

    TEXT = "text"
    JSON = "json"


class Format(StrEnum):
    """What `--format` accepts."""

    TEXT = "text"
    MD = "md"
    LATEX = "latex"
    CSV = "csv"
    JSON = "json"

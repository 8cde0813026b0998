"""Checks of arguments that several functions of the API share. A wrong argument is a `ValueError`, raised before
anything is read or run. The command line has parsers of its own, so that its errors name flags."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from stepscope.api.display import StrPath


def require_choice(argument: str, value: object, choices: object) -> None:
    """`choices` is a `Literal` type, or the names themselves."""
    names = tuple(choices) if isinstance(choices, Sequence) else get_args(choices)
    if value not in names:
        raise ValueError(f"unknown {argument}: {value!r}; expected one of {', '.join(names)}")


def require_choices(argument: str, values: object, choices: object) -> None:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"{argument} takes a list of names, got {values!r}")
    for value in values:
        require_choice(argument, value, choices)


def require_count(argument: str, value: object) -> None:
    """A whole number from 1 to a billion, or None where there is a default."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9):
        raise ValueError(f"{argument} takes a whole number of at least 1, got {value!r}")


def require_amount(argument: str, value: object, *, least: float = 0.0, or_equal: bool = True) -> None:
    """A finite number of at least `least`, or above it; None where there is a default."""
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    fits = isinstance(value, int | float) and (value > least or (or_equal and value == least))
    if not is_number or not fits:
        raise ValueError(f"{argument} takes a number {'of at least' if or_equal else 'above'} {least:g}, got {value!r}")


def as_folder(argument: str, value: StrPath) -> Path:
    """An empty text would be the current folder."""
    if not str(value):
        raise ValueError(f"{argument} takes a folder, got an empty text")
    return Path(value)

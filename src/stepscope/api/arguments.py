"""Argument checks that several API functions share. A wrong argument raises `ValueError` before anything is read or
run. The command line has its own parsers, whose errors name flags."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

from stepscope.api.display import StrPath
from stepscope.spec import SETTINGS, SpecError, flag_of

_FLAG = re.compile(r"(--[a-z][a-z-]*)(?: ([^\s,`]+))?")
_PARAMETERS = {flag_of(name): name for name in (*SETTINGS, "set")}


@contextmanager
def naming_parameters() -> Iterator[None]:
    """Let a SpecError name parameters instead of flags: `--num-heads 4` becomes `num_heads=4`."""
    try:
        yield
    except SpecError as error:
        for part in ("message", "detail", "hint"):
            setattr(error, part, _FLAG.sub(_as_parameter, getattr(error, part)))
        raise


def _as_parameter(match: re.Match[str]) -> str:
    flag, value = match[1], match[2]
    if flag not in _PARAMETERS:
        return match[0]
    if value is None:
        return _PARAMETERS[flag]
    if flag == "--set" and "=" in value:
        name, _, value = value.partition("=")
        return f"set={{{name!r}: {_as_literal(value)}}}"
    return f"{_PARAMETERS[flag]}={_as_literal(value)}"


def _as_literal(value: str) -> str:
    return value if value.isdecimal() else repr(value)


def require_choice(argument: str, value: object, choices: object) -> None:
    """Raise ValueError unless `value` is one of `choices`: a `Literal` type, or a sequence of names."""
    names = tuple(choices) if isinstance(choices, Sequence) else get_args(choices)
    if value not in names:
        raise ValueError(f"unknown {argument}: {value!r}; expected one of {', '.join(names)}")


def require_choices(argument: str, values: object, choices: object) -> None:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"{argument} must be a list of names, got {values!r}")
    for value in values:
        require_choice(argument, value, choices)


def require_count(argument: str, value: object) -> None:
    """Raise ValueError unless `value` is an integer from 1 to a billion, or None for the default."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9):
        raise ValueError(f"{argument} must be an integer of at least 1, got {value!r}")


def require_amount(argument: str, value: object, *, least: float = 0.0, or_equal: bool = True) -> None:
    """Raise ValueError unless `value` is a finite number of at least `least`, or above it, or None for the default."""
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    fits = isinstance(value, int | float) and (value > least or (or_equal and value == least))
    if not is_number or not fits:
        raise ValueError(
            f"{argument} must be a number {'of at least' if or_equal else 'above'} {least:g}, got {value!r}"
        )


def as_folder(argument: str, value: StrPath) -> Path:
    """The path of a directory. An empty string raises ValueError, because it would mean the current directory."""
    if not str(value):
        raise ValueError(f"{argument} must be a directory, got an empty string")
    return Path(value)

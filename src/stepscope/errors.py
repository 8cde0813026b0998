"""The errors that users see, and the exit codes.

Anything a user can cause is a `StepscopeError`: what went wrong, with the offending value in backticks, what was
expected, and a hint that is a command to type. `cli.main` catches it and prints it without a traceback. A bad argument
in library code is a `ValueError`, and a bug in stepscope is an assertion.
"""

import difflib
from collections.abc import Iterable
from enum import IntEnum


class Exit(IntEnum):
    """The exit codes. Scripts rely on them, so they never change."""

    OK = 0
    GATE_FAILED = 1  # a gate the user asked for: a regression, a refuted claim
    BAD_INPUT = 2
    UNDECIDED = 3  # the evidence cannot answer the question
    OUR_MISTAKE = 70  # a bug in stepscope; the question is not answered
    INTERRUPTED = 130


class StepscopeError(Exception):
    """An error that the user can fix. `detail` says what was expected; `hint` is a command to type next."""

    def __init__(self, message: str, *, detail: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.message]
        lines += [f"  {line}" for line in self.detail.splitlines()]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The word in `known` that is closest to `word`, or None if none is close."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None

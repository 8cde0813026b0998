"""Flags' texts as values, for grids that are not made of a workload's settings."""

from collections.abc import Callable
from typing import TypeVar

from stepscope.spec import SpecError
from stepscope.spec.settings import flag_of

T = TypeVar("T")


def several(parse: Callable[[str, str], T]) -> Callable[[str, str], tuple[T, ...]]:
    """Values separated by commas, each as `parse` has it from the flag's name and its text."""

    def parse_all(name: str, text: str) -> tuple[T, ...]:
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise SpecError(f"an empty value in `{flag_of(name)} {text}`", detail="expected values separated by commas")
        return tuple(parse(name, part) for part in parts)

    return parse_all


def number(kind: Callable[[str], T]) -> Callable[[str, str], T]:
    def parse(name: str, text: str) -> T:
        try:
            return kind(text.replace("_", ""))
        except ValueError:
            raise SpecError(f"`{flag_of(name)}`: not a number: `{text}`", hint="digits only, such as 1024") from None

    return parse


def word(_name: str, text: str) -> str:
    return text

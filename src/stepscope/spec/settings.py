"""Settings: each one is declared next to its field, and everything else is derived from the declaration.

    batch: Annotated[int, Setting(help="Sequences per step.", in_case="always", in_title="always")] = 4

This gives the flag, the TOML key, the grid axis, the parser, the help text, the table column with its label, the
wording in titles and sentences, and the flag in a command that reproduces a run. `declared` reads the rest from the
field's type and default: an integer has the metavar `N`, and a literal its choices.
"""

import math
import re
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from stepscope.errors import StepscopeError, nearest
from stepscope.units import GIB, KIB, MIB

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Mode = Literal["inference", "forward", "forward-backward", "train"]
Optimizer = Literal["adamw", "adamw-torch", "adamw-fused", "adamw-onelaunch", "sgd"]
# `single` is one process without collectives. The next four are data parallel; `fsdp` also shards the weights.
Strategy = Literal["single", "naive", "flat", "overlap", "bucketed", "fsdp"]
TOO_LARGE = 2**48  # bytes, tokens or seeds; larger values overflow later
Scalar = bool | int | float | str
When = Literal["always", "changed", "never"]


class SpecError(StepscopeError, ValueError):
    """An invalid workload. It is also a ValueError, for workloads built in Python."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that users can change. `parse` turns the text of a flag into the value that TOML would give.

    In `phrase` and `word`, `{}` is the value and `{s}` the plural ending.
    """

    help: str
    name: str = ""
    metavar: str = ""
    parse: Callable[[str], Scalar | None] = str
    default: Scalar | None = None
    choices: tuple[str, ...] = ()
    is_switch: bool = False
    # The label and kind of its table column.
    label: str = ""
    kind: Literal["text", "count", "bytes"] = "text"
    # The value that others are compared with.
    baseline: Scalar | None = None
    # The value that means none, shown as an empty cell.
    absent: Scalar | None = None
    # The wording in titles and sentences, and the shorter one in case names. "changed": only if not the default.
    phrase: str = ""
    word: str = ""
    in_case: When = "changed"
    in_title: When = "changed"
    # Whether it changes the program that runs, so that the title of a page mentions it.
    is_extra: bool = False
    # The modes in which it has an effect.
    modes: tuple[Mode, ...] = get_args(Mode)
    # Whether it has an effect in `stepscope precision`. A step there is a forward and a few backward passes without
    # compilation, so some settings would change nothing or hide module outputs.
    in_precision: bool = True

    def read(self, owner: object) -> Scalar | None:
        """The value as a table cell; None if there is none or `owner` does not have the setting."""
        return self.show(getattr(owner, self.name, None))

    def show(self, value: Scalar | None) -> Scalar | None:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return None if value == self.absent else value

    def say(self, value: Scalar | None, template: str = "") -> str:
        """The value as text, by `template` or else by `phrase`."""
        shown = f"{value / 1e9:g} GB" if self.kind == "bytes" and isinstance(value, int) else value
        return (template or self.phrase).format(shown, s="" if value == 1 else "s")


def declared(struct: type[msgspec.Struct]) -> dict[str, Setting]:
    """The settings among the fields of a struct, by name, completed from their types and defaults."""
    return {
        field.name: complete(found, field.name, base, None if field.required else field.default)
        for field in msgspec.structs.fields(struct)
        if get_origin(field.type) is Annotated
        for base, found in [get_args(field.type)]
        if isinstance(found, Setting)
    }


_METAVARS: dict[object, str] = {int: "N", bool: "yes|no", str: "TEXT"}


def complete(setting: Setting, name: str, kind: object = str, default: Any = None) -> Setting:
    """Return the setting with its name, and with everything that can be derived filled in."""
    kind = _without_none(kind)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    label = setting.label or name.replace("_", " ")
    phrase = setting.phrase or f"{label} {{}}"
    is_count = kind is int and setting.kind == "text"
    return msgspec.structs.replace(
        setting,
        name=name,
        metavar=setting.metavar or "|".join(choices) or _METAVARS[kind],
        parse=setting.parse if setting.parse is not str else _parser(name, kind, choices),
        default=default,
        choices=choices,
        is_switch=kind is bool,
        label=label,
        kind="count" if is_count else setting.kind,
        phrase=phrase,
        word=setting.word or phrase,
    )


def _without_none(kind: object) -> object:
    if get_origin(kind) not in (Union, UnionType):
        return kind
    (kind,) = (one for one in get_args(kind) if one is not type(None))
    return kind


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


# --- Parsing ----------------------------------------------------------------------------------------------------------


def _parser(name: str, kind: object, choices: tuple[str, ...]) -> Callable[[str], Scalar | None]:
    def parse_choice(text: str) -> str:
        require_choice(name, text, choices)
        return text

    if choices:
        return parse_choice
    return parse_integer if kind is int else parse_yes_or_no if kind is bool else str


def parse_integer(text: str) -> int:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise SpecError(f"not an integer: `{text}`", hint="digits only, such as 1024") from None


def parse_yes_or_no(text: str) -> bool:
    if text.lower() in ("yes", "true", "on", "1"):
        return True
    if text.lower() in ("no", "false", "off", "0"):
        return False
    raise SpecError(f"expected yes or no, got `{text}`")


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1024 * GIB}


def parse_limit(text: str) -> int | None:
    return None if text.lower() == "none" else parse_bytes(text)


def parse_bytes(text: str) -> int:
    """Parse an amount of memory: `24GB` is 24 · 10⁹ bytes, and `24GiB` is 24 · 2³⁰."""
    match = re.fullmatch(r"([\d._]+)\s*([KMGT]?i?B)?", text.strip(), re.IGNORECASE)
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or not math.isfinite(number):
        raise SpecError(f"not a memory size: `{text}`", detail="expected a number and a unit", hint="24GB, 512MiB")
    return round(number * _UNITS[(match[2] or "B").upper()])


# --- Checks -----------------------------------------------------------------------------------------------------------


def require_choice(name: str, value: str, options: tuple[str, ...]) -> None:
    """Raise SpecError for an unknown choice. Workloads built in Python do not pass through a parser."""
    if value not in options:
        close = nearest(str(value), options)
        raise SpecError(
            f"unknown {name}: `{value}`",
            detail=f"expected one of {', '.join(options)}",
            hint=f"did you mean `{close}`?" if close else "",
        )


def require_positive(name: str, value: int, *, too_large: int = TOO_LARGE) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise SpecError(f"{name} must be an integer, got `{value}`", hint=f"{flag_of(name)} 1")
    if value < 1:
        raise SpecError(f"{name} must be at least 1, got `{value}`", hint=f"{flag_of(name)} 1")
    if value >= too_large:
        raise SpecError(
            f"{name} `{value}` is too large", detail=f"expected less than {too_large:,}", hint=f"{flag_of(name)} 1"
        )

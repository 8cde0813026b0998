"""What a setting is: a declaration next to a field, from which everything else about the setting follows.

    batch: Annotated[int, Setting(help="Sequences in a step.", in_case="always", in_title="always")] = 4

The flag, the TOML key, the axis of a grid, the parser, the help text, the column of a table and its label, the words
for it in a title or a sentence, and the flag in a command that reproduces a run: none of these is written anywhere
else. What the field's type and default already say (an integer is written `N`, a choice has these words) is read from
them by `declared`.
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
Optimizer = Literal["adamw", "adamw-torch", "adamw-fused", "sgd"]
# `single` is one process and no collective. The next four are ways of data parallelism; `fsdp` shards the weights.
Strategy = Literal["single", "naive", "flat", "overlap", "bucketed", "fsdp"]
TOO_LARGE = 2**48  # bytes, tokens or seeds; what is larger overflows somewhere below
Scalar = bool | int | float | str
When = Literal["always", "changed", "never"]


class SpecError(StepscopeError, ValueError):
    """A workload that cannot be. A ValueError too, for those who build workloads in Python."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One name that a user may set. `parse` turns a flag's text into the value that TOML would have given.

    In `phrase` and `word`, `{}` stands for the value and `{s}` for the ending of a plural.
    """

    help: str
    name: str = ""
    metavar: str = ""
    parse: Callable[[str], Scalar | None] = str
    default: Scalar | None = None
    choices: tuple[str, ...] = ()
    is_switch: bool = False
    # Of its column in tables of cases.
    label: str = ""
    kind: Literal["text", "count", "bytes"] = "text"
    # The value that the times of others are compared with.
    baseline: Scalar | None = None
    # The value that stands for none: an empty cell.
    absent: Scalar | None = None
    # In a title or a sentence, and in a case's name where that has a shorter word. "changed" is from the default.
    phrase: str = ""
    word: str = ""
    in_case: When = "changed"
    in_title: When = "changed"
    # Whether it makes another program of the model, which the title of a page then says.
    is_extra: bool = False
    # The modes in which it has an effect, where those are not all.
    modes: tuple[Mode, ...] = get_args(Mode)
    # Whether it has an effect where precisions are compared. There a step is run once forward and once or a few times
    # backward, uncompiled: some settings would change nothing, or hide the modules whose outputs are looked at.
    in_precision: bool = True

    def read(self, owner: object) -> Scalar | None:
        """The value as a cell of a table; None where there is none, or `owner` has no such setting."""
        return self.show(getattr(owner, self.name, None))

    def show(self, value: Scalar | None) -> Scalar | None:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return None if value == self.absent else value

    def say(self, value: Scalar | None, template: str = "") -> str:
        """The value in words, by `template` or else as in a sentence."""
        shown = f"{value / 1e9:g} GB" if self.kind == "bytes" and isinstance(value, int) else value
        return (template or self.phrase).format(shown, s="" if value == 1 else "s")


def declared(struct: type[msgspec.Struct]) -> dict[str, Setting]:
    """The settings among a struct's fields by name, with what their types and defaults say filled in."""
    return {
        field.name: complete(found, field.name, base, None if field.required else field.default)
        for field in msgspec.structs.fields(struct)
        if get_origin(field.type) is Annotated
        for base, found in [get_args(field.type)]
        if isinstance(found, Setting)
    }


_METAVARS: dict[object, str] = {int: "N", bool: "yes|no", str: "TEXT"}


def complete(setting: Setting, name: str, kind: object = str, default: Any = None) -> Setting:
    """A setting with its name, and with what was left out of it."""
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


# --- Texts to values --------------------------------------------------------------------------------------------------


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
        raise SpecError(f"not a whole number: `{text}`", hint="digits only, such as 1024") from None


def parse_yes_or_no(text: str) -> bool:
    if text.lower() in ("yes", "true", "on", "1"):
        return True
    if text.lower() in ("no", "false", "off", "0"):
        return False
    raise SpecError(f"neither yes nor no: `{text}`")


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1024 * GIB}


def parse_limit(text: str) -> int | None:
    return None if text.lower() == "none" else parse_bytes(text)


def parse_bytes(text: str) -> int:
    """`24GB` is 24 · 10⁹ bytes and `24GiB` is 24 · 2³⁰, as everywhere outside of marketing."""
    match = re.fullmatch(r"([\d._]+)\s*([KMGT]?i?B)?", text.strip(), re.IGNORECASE)
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or not math.isfinite(number):
        raise SpecError(
            f"not an amount of memory: `{text}`", detail="expected a number and a unit", hint="24GB, 512MiB"
        )
    return round(number * _UNITS[(match[2] or "B").upper()])


# --- Checks -----------------------------------------------------------------------------------------------------------


def require_choice(name: str, value: str, options: tuple[str, ...]) -> None:
    """A workload made in Python passes through no parser; a word that nobody knows must not run as something else."""
    if value not in options:
        close = nearest(str(value), options)
        raise SpecError(
            f"unknown {name}: `{value}`",
            detail=f"expected one of {', '.join(options)}",
            hint=f"did you mean `{close}`?" if close else "",
        )


def require_positive(name: str, value: int, *, too_large: int = TOO_LARGE) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise SpecError(f"{name} `{value}` is not a whole number", hint=f"{flag_of(name)} 1")
    if value < 1:
        raise SpecError(f"{name} `{value}` is not positive", detail="expected 1 or more", hint=f"{flag_of(name)} 1")
    if value >= too_large:
        raise SpecError(
            f"{name} `{value}` is too large", detail="no machine has room for it", hint=f"{flag_of(name)} 1"
        )

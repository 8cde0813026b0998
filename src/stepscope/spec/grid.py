"""Grids: settings with several values each, from flags or from a file."""

import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from stepscope.files import read_plain
from stepscope.spec.choices import Scalar, SpecError, flag_of
from stepscope.spec.settings import SETTINGS, build_case, check_names
from stepscope.spec.workload import Case


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with one or more values each; the cases are their product, the first axis turning slowest. Cases that
    were made in Python are `listed` in place of settings."""

    axes: tuple[tuple[str, tuple[Scalar | None, ...]], ...] = ()
    arguments: tuple[tuple[str, tuple[Scalar, ...]], ...] = ()
    listed: tuple[Case, ...] = ()

    def cases(self) -> tuple[Case, ...]:
        """Every case once, in order; a value given twice counts once."""
        return tuple(dict.fromkeys(self.listed or (build_case(settings) for settings in self._points())))

    def _points(self) -> Iterator[dict[str, Scalar | Mapping[str, Scalar] | None]]:
        names = [name for name, _ in self.axes]
        arguments = [name for name, _ in self.arguments]
        for values in itertools.product(*(values for _, values in self.axes)):
            for chosen in itertools.product(*(values for _, values in self.arguments)):
                yield {
                    **dict(zip(names, values, strict=True)),
                    "set": dict(zip(arguments, chosen, strict=True)),
                }

    def override(self, other: "Grid") -> "Grid":
        """This grid with `other`'s axes in place of its own: flags over a file."""
        assert not self.listed, "cases that are listed have no axes"
        return Grid(
            axes=tuple((dict(self.axes) | dict(other.axes)).items()),
            arguments=tuple((dict(self.arguments) | dict(other.arguments)).items()),
        )


def grid_from_flags(flags: Mapping[str, str], arguments: Sequence[str] = ()) -> Grid:
    """A grid from flags' texts (`{"size": "small,medium"}`) and `--set` pairs (`["depth=2,4"]`)."""
    check_names(flags)
    axes = tuple((name, tuple(_parse_flag(name, part) for part in _split(name, text))) for name, text in flags.items())
    pairs = [_parse_argument(pair) for pair in arguments]
    for name, _ in pairs:
        if [other for other, _ in pairs].count(name) > 1:
            raise SpecError(f"`--set {name}` twice", detail="several values stand in one", hint=f"--set {name}=1,2")
    return Grid(axes=axes, arguments=tuple(pairs))


def grid_from_toml(path: Path) -> Grid:
    """A grid from a file: the settings by name, a list for several values, and `[set]` for a model's arguments."""
    try:
        fields = tomllib.loads(read_plain(path).decode())
    except OSError as error:
        raise SpecError(f"cannot read the settings file: `{path}`", detail=error.strerror or "") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"not a TOML file: `{path}`", detail=str(error)) from None
    if not isinstance(fields.get("set", {}), dict):
        raise SpecError(f"`set` in `{path}` is not a table", hint="[set]")
    return grid_from_settings(fields)


def grid_from_settings(settings: Mapping[str, object]) -> Grid:
    """A grid from settings by name, a list for several values; `set` is a mapping of a model's arguments."""
    check_names(settings)
    arguments = settings.get("set", {})
    if not isinstance(arguments, Mapping):
        raise SpecError(f"`set` is not a mapping of arguments: `{arguments}`")
    return Grid(
        axes=tuple((name, _toml_values(name, value)) for name, value in settings.items() if name != "set"),
        arguments=tuple((name, _as_scalars(name, value)) for name, value in arguments.items()),
    )


def _toml_values(name: str, value: object) -> tuple[Scalar | None, ...]:
    """Texts go through the flag's parser, so that `"24GB"` and unknown words mean what they mean on the command
    line."""
    values: list[Scalar | None] = []
    for item in _as_scalars(name, value):
        values += [_parse_flag(name, part) for part in _split(name, item)] if isinstance(item, str) else [item]
    return tuple(values)


def _as_scalars(name: str, value: object) -> tuple[Scalar, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    for item in items:
        if not isinstance(item, bool | int | float | str):
            raise SpecError(f"`{name}` has a value that is neither a word nor a number: `{item}`")
    if not items:
        raise SpecError(f"`{name}` has no values", detail="an axis of a grid needs at least one")
    return tuple(items)


def _split(name: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise SpecError(f"an empty value in `{flag_of(name)} {text}`", detail="expected values separated by commas")
    return parts


def _parse_flag(name: str, text: str) -> Scalar | None:
    try:
        return SETTINGS[name].parse(text)
    except SpecError as error:
        raise SpecError(f"`{flag_of(name)}`: {error.message}", detail=error.detail, hint=error.hint) from None


def _parse_argument(pair: str) -> tuple[str, tuple[Scalar, ...]]:
    name, equals, text = pair.partition("=")
    if not equals or not name.isidentifier():
        raise SpecError(f"not an argument: `--set {pair}`", detail="expected name=value", hint="--set depth=4")
    return name, tuple(_parse_scalar(part) for part in _split("set", text))


def _parse_scalar(text: str) -> Scalar:
    """JSON's reading of a number or a boolean, and a plain word otherwise."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return value if isinstance(value, bool | int | float) else text

"""A case from flat settings, and grids of cases: settings with several values each, from flags or from a file."""

import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from stepscope.errors import nearest
from stepscope.files import read_plain
from stepscope.spec.settings import Scalar, Setting, SpecError, flag_of, require_positive
from stepscope.spec.workload import (
    OWN_MODEL_SETTINGS,
    RUN_SETTINGS,
    SETTINGS,
    SHAPE_SETTINGS,
    SIZES,
    TIMING_SETTINGS,
    Case,
    Factory,
    HuggingFace,
    ModelShape,
    Timing,
    Workload,
    parse_size,
)

T = TypeVar("T")
Settings = Mapping[str, Scalar | Mapping[str, Scalar] | None]


def build_case(settings: Settings) -> Case:
    """One case from flat settings, `set` being a mapping of arguments for a model of the user's own."""
    check_names(settings)
    model = _build_model(settings)
    workload = {name: settings[name] for name in RUN_SETTINGS if name in settings}
    if workload.get("context") == 0:  # in a workload it means that none was given
        require_positive("context", 0)
    if "checkpoint" in workload:
        workload["checkpoint"] = str(workload["checkpoint"])
    return Case(
        workload=_convert(workload | {"model": model}, Workload),
        timing=_convert({name: settings[name] for name in TIMING_SETTINGS if name in settings}, Timing),
    )


def _build_model(settings: Settings) -> ModelShape | Factory | HuggingFace:
    shaped = [name for name in SHAPE_SETTINGS if name in settings]
    own = [name for name in OWN_MODEL_SETTINGS if name in settings]
    arguments = settings.get("set", {})
    assert isinstance(arguments, Mapping)
    if own and (len(own) > 1 or shaped):
        other = (own[1:] or shaped)[0]
        raise SpecError(
            f"`{flag_of(own[0])}` and `{flag_of(other)}` together",
            detail="a shape belongs to the built-in model; your own takes arguments by --set",
            hint=f"{flag_of(own[0])} {settings[own[0]]} --set name=value",
        )
    if not own:
        if arguments:
            raise SpecError(
                "`--set` without a model of your own",
                detail="it gives arguments to a factory or overrides to a transformers config",
                hint="--model my_model:build --set depth=4",
            )
        return _build_shape({name: settings[name] for name in shaped})
    pairs = tuple(sorted(arguments.items()))
    if own == ["model"]:
        return _convert({"type": "factory", "target": settings["model"], "arguments": pairs}, Factory)
    return _convert({"type": "hf", "config": settings["hf"], "arguments": pairs}, HuggingFace)


def _build_shape(settings: Settings) -> ModelShape:
    fields = msgspec.structs.asdict(SIZES[parse_size(str(settings.get("size", "nano")))])
    fields |= {name: value for name, value in settings.items() if name != "size"}
    if "num_heads" in settings and "num_kv_heads" not in settings:
        fields["num_kv_heads"] = fields["num_heads"]
    return _convert(fields | {"type": "builtin"}, ModelShape)


def _convert(fields: Mapping[str, object], kind: type[T]) -> T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, SpecError):
            raise error.__cause__ from None
        raise SpecError(f"a setting of the wrong kind: {error}") from None


def check_names(settings: Iterable[str]) -> None:
    known = (*SETTINGS, "set")
    for name in settings:
        if name not in known:
            close = nearest(name, known)
            raise SpecError(
                f"unknown setting: `{name}`",
                detail=f"did you mean `{close}`?" if close else f"known: {', '.join(known)}",
                hint="stepscope bench --help",
            )


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
    axes = tuple(
        (name, tuple(parse_flag(SETTINGS[name], part) for part in split_values(name, text)))
        for name, text in flags.items()
    )
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
        values += (
            [parse_flag(SETTINGS[name], part) for part in split_values(name, item)] if isinstance(item, str) else [item]
        )
    return tuple(values)


def _as_scalars(name: str, value: object) -> tuple[Scalar, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    for item in items:
        if not isinstance(item, bool | int | float | str):
            raise SpecError(f"`{name}` has a value that is neither a word nor a number: `{item}`")
    if not items:
        raise SpecError(f"`{name}` has no values", detail="an axis of a grid needs at least one")
    return tuple(items)


def split_values(name: str, text: str) -> list[str]:
    """The values of a flag, which commas separate."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise SpecError(f"an empty value in `{flag_of(name)} {text}`", detail="expected values separated by commas")
    return parts


def parse_flag(setting: Setting, text: str) -> Scalar | None:
    """One value of a flag. What cannot be read is refused with the flag's name."""
    try:
        return setting.parse(text)
    except SpecError as error:
        raise SpecError(f"`{flag_of(setting.name)}`: {error.message}", detail=error.detail, hint=error.hint) from None


def _parse_argument(pair: str) -> tuple[str, tuple[Scalar, ...]]:
    name, equals, text = pair.partition("=")
    if not equals or not name.isidentifier():
        raise SpecError(f"not an argument: `--set {pair}`", detail="expected name=value", hint="--set depth=4")
    return name, tuple(_parse_scalar(part) for part in split_values("set", text))


def _parse_scalar(text: str) -> Scalar:
    """JSON's reading of a number or a boolean, and a plain word otherwise."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return value if isinstance(value, bool | int | float) else text

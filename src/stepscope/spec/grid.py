"""Build a case from flat settings, and grids of cases from flags, a TOML file or Python."""

import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from stepscope.errors import nearest
from stepscope.files import read_plain
from stepscope.spec.presets import SETTINGS, expand_preset
from stepscope.spec.settings import Scalar, Setting, SpecError, flag_of, require_positive
from stepscope.spec.workload import (
    OWN_MODEL_SETTINGS,
    RUN_SETTINGS,
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
    """Build one case from flat settings. `set` is a mapping of arguments for the user's own model."""
    check_names(settings)
    settings = expand_preset(settings)
    model = _build_model(settings)
    workload = {name: settings[name] for name in RUN_SETTINGS if name in settings}
    if workload.get("context") == 0:  # in a workload, 0 means that no context was given
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
        given = f"{flag_of(own[0])} {settings[own[0]]}"
        raise SpecError(
            f"`{flag_of(own[0])}` cannot be used with `{flag_of(other)}`",
            detail=""
            if own[1:]
            else "shape options are for the built-in model; use --set for arguments of your own model",
            hint=given if own[1:] else f"{given} --set name=value",
        )
    if not own:
        if arguments:
            raise SpecError(
                "`--set` requires `--model` or `--hf`",
                detail="it passes arguments to a factory, or overrides fields of a transformers config",
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
        raise SpecError(f"invalid setting: {error}") from None


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
    """Settings with one or more values each. Each combination is a case, and the first axis varies slowest. Cases built
    in Python are `listed` instead."""

    axes: tuple[tuple[str, tuple[Scalar | None, ...]], ...] = ()
    arguments: tuple[tuple[str, tuple[Scalar, ...]], ...] = ()
    listed: tuple[Case, ...] = ()

    def cases(self) -> tuple[Case, ...]:
        """All cases in order, without duplicates."""
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
        """Return this grid with the axes of `other` in place of its own, as flags override a file."""
        assert not self.listed, "listed cases have no axes"
        return Grid(
            axes=tuple((dict(self.axes) | dict(other.axes)).items()),
            arguments=tuple((dict(self.arguments) | dict(other.arguments)).items()),
        )


def grid_from_flags(flags: Mapping[str, str], arguments: Sequence[str] = ()) -> Grid:
    """Build a grid from the texts of flags (`{"size": "small,medium"}`) and `--set` pairs (`["depth=2,4"]`)."""
    check_names(flags)
    axes = tuple(
        (name, tuple(parse_flag(SETTINGS[name], part) for part in split_values(name, text)))
        for name, text in flags.items()
    )
    pairs = [_parse_argument(pair) for pair in arguments]
    for name, _ in pairs:
        if [other for other, _ in pairs].count(name) > 1:
            raise SpecError(
                f"`--set {name}` is given twice",
                detail="separate several values with commas",
                hint=f"--set {name}=1,2",
            )
    return Grid(axes=axes, arguments=tuple(pairs))


def grid_from_toml(path: Path) -> Grid:
    """Read a grid from a TOML file: settings by name, lists for several values, and `[set]` for model arguments."""
    try:
        fields = tomllib.loads(read_plain(path).decode())
    except OSError as error:
        raise SpecError(
            f"cannot read settings file: `{path}`", detail=error.strerror or "", hint="--config FILE.toml"
        ) from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"not a valid TOML file: `{path}`", detail=str(error)) from None
    if not isinstance(fields.get("set", {}), dict):
        raise SpecError(f"`set` in `{path}` is not a table", hint="[set]")
    return grid_from_settings(fields)


def grid_from_settings(settings: Mapping[str, object]) -> Grid:
    """Build a grid from settings by name, with lists for several values. `set` is a mapping of model arguments."""
    check_names(settings)
    arguments = settings.get("set", {})
    if not isinstance(arguments, Mapping):
        raise SpecError(f"`set` must be a mapping of argument names to values, got `{arguments}`")
    return Grid(
        axes=tuple((name, _toml_values(name, value)) for name, value in settings.items() if name != "set"),
        arguments=tuple((name, _as_scalars(name, value)) for name, value in arguments.items()),
    )


def _toml_values(name: str, value: object) -> tuple[Scalar | None, ...]:
    """The values of a setting. Strings go through the flag's parser, so `"24GB"` and unknown words are treated as on
    the command line."""
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
            raise SpecError(f"invalid value for `{name}`: `{item}`", detail="expected a string, a number or a boolean")
    if not items:
        raise SpecError(f"`{name}` has no values", detail="expected at least one")
    return tuple(items)


def split_values(name: str, text: str) -> list[str]:
    """The comma-separated values of a flag."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise SpecError(f"empty value in `{flag_of(name)} {text}`", detail="expected comma-separated values")
    return parts


def parse_flag(setting: Setting, text: str) -> Scalar | None:
    """Parse one value of a flag. The error for an invalid one names the flag."""
    try:
        return setting.parse(text)
    except SpecError as error:
        raise SpecError(f"`{flag_of(setting.name)}`: {error.message}", detail=error.detail, hint=error.hint) from None


def _parse_argument(pair: str) -> tuple[str, tuple[Scalar, ...]]:
    name, equals, text = pair.partition("=")
    if not equals or not name.isidentifier():
        raise SpecError(f"invalid argument: `--set {pair}`", detail="expected name=value", hint="--set depth=4")
    if re.search(r",\s*[A-Za-z_]\w*=", text):
        pairs = re.split(r",\s*(?=[A-Za-z_]\w*=)", pair)
        raise SpecError(
            f"`--set` takes one argument: `{pair}`",
            detail="commas separate values of the same argument",
            hint=" ".join(f"--set {one}" for one in pairs),
        )
    return name, tuple(_parse_scalar(part) for part in split_values("set", text))


def _parse_scalar(text: str) -> Scalar:
    """Parse a JSON number or boolean; anything else stays a string."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return value if isinstance(value, bool | int | float) else text

"""The flags that verbs share. Every setting of a workload is one, made from `spec.SETTINGS`, so that a new setting is a
flag, a TOML key and a line of help at once."""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from stepscope.cli.run_output import SHARE
from stepscope.errors import StepscopeError
from stepscope.recording.rows.bench import Retry
from stepscope.spec import (
    RUN_SETTINGS,
    SETTINGS,
    SHAPE_SETTINGS,
    Case,
    Grid,
    Setting,
    build_case,
    flag_of,
    grid_from_flags,
    grid_from_toml,
)

# What flags mean that stand alone.
_BARE_FLAGS = {flag_of(name): "yes" for name, setting in SETTINGS.items() if setting.is_switch}
_BARE_FLAGS["--retry"] = Retry.FAILED.value
RetryFlag = Annotated[
    Retry | None,
    typer.Option("--retry", help="Run failed cases again, or doubtful ones.  [failed, if no value is given]"),
]
_WITH_SHARES = ("memory", "explain")


def takes_grid(verb: Callable[..., None]) -> Callable[..., None]:
    """Gives a verb all settings as flags, plus `--config` and `--set`, and hands them over as its argument `grid`."""

    return _takes(verb, SETTINGS, _set())


def takes_workload(verb: Callable[..., None]) -> Callable[..., None]:
    """The same for a verb that trains the built-in model: nothing on how to time a step, nor on models of one's own."""
    return _takes(verb, {name: setting for name, setting in (SHAPE_SETTINGS | RUN_SETTINGS).items() if name != "mode"})


def _takes(verb: Callable[..., None], settings: Mapping[str, Setting], *more: inspect.Parameter) -> Callable[..., None]:
    def wrapper(**values: Any) -> None:
        flags = {name: values.pop(name) for name in settings}
        grid = grid_from_flags(
            {name: text for name, text in flags.items() if text is not None}, values.pop("set", None) or ()
        )
        config: Path | None = values.pop("config")
        verb(grid=grid_from_toml(config).override(grid) if config else grid, **values)

    own = [p for p in inspect.signature(verb).parameters.values() if p.name != "grid"]
    default = build_case({})
    parameters = [*own, _config(), *more, *(_flag(name, setting, default) for name, setting in settings.items())]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    wrapper.__doc__ = verb.__doc__
    wrapper.__name__ = verb.__name__
    return wrapper


def refuse_settings(grid: Grid, why: str) -> None:
    """A setting that would be ignored is an error: its user would read another figure than they asked for."""
    if grid != Grid():
        name = "set" if grid.arguments else grid.axes[0][0]
        raise StepscopeError(f"`{flag_of(name)}` does nothing here", detail=why, hint="leave it out")


def fill_bare_flags(arguments: Sequence[str]) -> list[str]:
    """`--compile` alone becomes `--compile=yes`: the flag is an axis, and an axis needs a value. So do `--retry`, and
    `--detail` of the verbs where it may be a share, unless one follows."""
    takes_share = bool(arguments) and arguments[0] in _WITH_SHARES
    filled = []
    for argument, following in itertools.pairwise([*arguments, "--"]):
        if argument in _BARE_FLAGS and following.startswith("-"):
            filled.append(f"{argument}={_BARE_FLAGS[argument]}")
        elif takes_share and argument == "--detail" and not SHARE.fullmatch(following):
            filled.append(f"{argument}=yes")
        else:
            filled.append(argument)
    return filled


def _flag(name: str, setting: Setting, default: Case) -> inspect.Parameter:
    value = getattr(default.workload, name, None) or getattr(default.timing, name, None)
    text = f"{setting.help}  [default: {value}]" if value and isinstance(value, int | str) else setting.help
    option = typer.Option(flag_of(name), help=text, metavar=setting.metavar)
    return _parameter(name, Annotated[str | None, option])


def _set() -> inspect.Parameter:
    option = typer.Option("--set", help="An argument for your own model; may be repeated.", metavar="NAME=VALUE")
    return _parameter("set", Annotated[list[str] | None, option])


def _config() -> inspect.Parameter:
    option = typer.Option("--config", help="Settings from a TOML file; flags win over it.", metavar="FILE")
    return _parameter("config", Annotated[Path | None, option])


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

"""The flags that verbs share. Every setting of a workload is one, made from `spec.SETTINGS`, so that a new setting is a
flag, a TOML key and a line of help at once."""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from stepscope.spec import (
    OWN_MODEL_SETTINGS,
    RUN_SETTINGS,
    SHAPE_SETTINGS,
    TIMING_SETTINGS,
    Setting,
    grid_from_flags,
    grid_from_toml,
)

_PANELS: tuple[tuple[str, Mapping[str, Setting]], ...] = (
    ("Built-in model", SHAPE_SETTINGS),
    ("Your own model", OWN_MODEL_SETTINGS),
    ("Workload (each may take several values, comma-separated)", RUN_SETTINGS),
    ("Timing (each may take several values, comma-separated)", TIMING_SETTINGS),
)
# Flags that mean `yes` when they stand alone.
_BARE_FLAGS = ("--compile", "--tie-embeddings")


def takes_grid(verb: Callable[..., None]) -> Callable[..., None]:
    """Gives a verb all settings as flags, plus `--config` and `--set`, and hands them over as its argument `grid`."""

    def wrapper(**values: Any) -> None:
        flags = {name: values.pop(name) for _, settings in _PANELS for name in settings}
        grid = grid_from_flags(
            {name: text for name, text in flags.items() if text is not None}, values.pop("set") or ()
        )
        config: Path | None = values.pop("config")
        verb(grid=grid_from_toml(config).override(grid) if config else grid, **values)

    own = [p for p in inspect.signature(verb).parameters.values() if p.name != "grid"]
    parameters = [
        *own,
        _config(),
        *(_flag(name, s, panel) for panel, group in _PANELS for name, s in group.items()),
    ]
    parameters.append(_set())
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    wrapper.__doc__ = verb.__doc__
    wrapper.__name__ = verb.__name__
    return wrapper


def fill_bare_flags(arguments: Sequence[str]) -> list[str]:
    """`--compile` alone becomes `--compile=yes`: the flag is an axis, and an axis needs a value."""
    filled = []
    for argument, following in itertools.pairwise([*arguments, "--"]):
        bare = argument in _BARE_FLAGS and following.startswith("-")
        filled.append(f"{argument}=yes" if bare else argument)
    return filled


def _flag(name: str, setting: Setting, panel: str) -> inspect.Parameter:
    option = typer.Option(
        "--" + name.replace("_", "-"), help=setting.help, metavar=setting.metavar, rich_help_panel=panel
    )
    return _parameter(name, Annotated[str | None, option])


def _set() -> inspect.Parameter:
    option = typer.Option(
        "--set",
        help="An argument for your own model; may be repeated.",
        metavar="NAME=VALUE",
        rich_help_panel=_PANELS[1][0],
    )
    return _parameter("set", Annotated[list[str] | None, option])


def _config() -> inspect.Parameter:
    option = typer.Option("--config", help="Settings from a TOML file; flags win over it.", metavar="FILE")
    return _parameter("config", Annotated[Path | None, option])


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

"""The options that verbs share. Workload settings become options through `spec.SETTINGS`, so a new setting gets its
flag, TOML key and help text from one declaration."""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from stepscope.cli.run_output import SHARE
from stepscope.errors import StepscopeError
from stepscope.recording.rows.bench import Retry
from stepscope.render.formats import Format
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

# The values of flags that are given without one.
_BARE_FLAGS = {flag_of(name): "yes" for name, setting in SETTINGS.items() if setting.is_switch}
_BARE_FLAGS["--retry"] = Retry.FAILED.value
RetryFlag = Annotated[
    Retry | None,
    typer.Option(
        "--retry", help="Rerun failed cases, or cases with unreliable timings.  [default without a value: failed]"
    ),
]
FormatFlag = Annotated[Format, typer.Option("--format", help="Output format.")]
DetailFlag = Annotated[bool, typer.Option("--detail", help="Show all columns.")]
_WITH_SHARES = ("memory", "explain")


def takes_grid(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb all settings as flags, plus `--config` and `--set`, and pass them to it as its argument `grid`."""
    return _takes(verb, SETTINGS, _set())


def takes_workload(verb: Callable[..., None]) -> Callable[..., None]:
    """Like `takes_grid`, for a verb that trains the built-in model: no timing settings and no custom models."""
    names = {"preset", *SHAPE_SETTINGS, *RUN_SETTINGS} - {"mode"}
    return _takes(verb, {name: setting for name, setting in SETTINGS.items() if name in names})


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
    """Raise StepscopeError if any setting was given: ignoring it would show results for something else."""
    if grid != Grid():
        name = "set" if grid.arguments else grid.axes[0][0]
        raise StepscopeError(f"`{flag_of(name)}` has no effect here", detail=why, hint=f"remove {flag_of(name)}")


def fill_bare_flags(arguments: Sequence[str]) -> list[str]:
    """Fill in the values of flags that may be given without one. `--compile` becomes `--compile=yes`, because an axis
    of a grid needs a value. `--retry` gets its default, and so does `--detail` in the verbs where it takes a share."""
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
    option = typer.Option("--set", help="Argument for your own model; repeatable.", metavar="NAME=VALUE")
    return _parameter("set", Annotated[list[str] | None, option])


def _config() -> inspect.Parameter:
    option = typer.Option("--config", help="Read settings from a TOML file; flags override it.", metavar="FILE")
    return _parameter("config", Annotated[Path | None, option])


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

"""What the experiment verbs share: options, running a sweep with progress, reading a results file, and the chart."""

import inspect
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from stepscope.cli.output import if_interrupted, say, show_tables, showing_stages
from stepscope.recording.rows.bench import Row
from stepscope.render.formats import Format
from stepscope.spec import Grid
from stepscope.spec.settings import declared, flag_of

if TYPE_CHECKING:
    from stepscope.findings import Figure
    from stepscope.jobs.experiments.sweep import SweepListener

T = TypeVar("T")
R = TypeVar("R", bound=Row)

OutFlag = Annotated[Path, typer.Option(metavar="DIR", help="Save results.jsonl here, and resume from it.")]
FromFlag = Annotated[
    Path | None, typer.Option("--from", metavar="FILE", help="Show a results file without running anything.")
]
ForceFlag = Annotated[bool, typer.Option("--force", help="Let --plot overwrite a file that stepscope did not write.")]
FreshFlag = Annotated[bool, typer.Option("--fresh", help="Measure everything again.")]
_TIMEOUT = typer.Option(metavar="SECONDS", min=0.001, max=1e7, help="Time limit per case.")
TimeoutFlag = Annotated[float | None, _TIMEOUT]
_SAVED = "finished cases are saved; run the same command again to resume"


def add_flags(
    verb: Callable[..., None],
    name: str,
    flags: Sequence[inspect.Parameter],
    make: Callable[[dict[str, Any]], object],
    *,
    first: bool = False,
) -> Callable[..., None]:
    """Give a verb `flags`, after its own or `first`. It receives what `make` builds from them as its argument
    `name`."""

    def wrapper(**values: Any) -> None:
        given = {flag.name: values.pop(flag.name) for flag in flags}
        verb(**{name: make(given)}, **values)

    own = [parameter for parameter in inspect.signature(verb).parameters.values() if parameter.name != name]
    parameters = [*flags, *own] if first else [*own, *flags]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    wrapper.__doc__ = verb.__doc__
    wrapper.__name__ = verb.__name__
    return wrapper


def flag(name: str, kind: Any, option: Any, default: object = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def takes_fields(grid: type[msgspec.Struct]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb the fields of a grid as flags. It receives the texts of those that were given as `texts`."""
    flags = []
    for name, setting in declared(grid).items():
        dashed = flag_of(name)
        if setting.is_switch:
            flags.append(flag(name, bool | None, typer.Option(f"{dashed}/--no-{dashed[2:]}", help=setting.help)))
        else:
            flags.append(flag(name, str | None, typer.Option(dashed, metavar=setting.metavar, help=setting.help)))

    def make(given: Mapping[str, Any]) -> dict[str, str]:
        words = {True: "yes", False: "no"}
        return {
            name: words[value] if isinstance(value, bool) else value
            for name, value in given.items()
            if value is not None
        }

    return lambda verb: add_flags(verb, "texts", flags, make, first=True)


def typed_command() -> str:
    return shlex.join(["stepscope", *sys.argv[1:]])


def read_results(path: Path, kind: type[R]) -> tuple[R, ...]:
    """The rows of a results file. Says on standard error which lines were skipped."""
    from stepscope.recording.rows.results_file import read_rows

    rows, left_out = read_rows(path, kind)
    for remark in left_out:
        say(remark)
    return rows


def watch_sweep(
    run: "Callable[[SweepListener], T]", outcome_of: Callable[[Any], str], describe: Callable[[Any], str] | None = None
) -> T:
    """Run a sweep and show its progress. `outcome_of` summarizes a finished row, and `describe` a case."""
    from stepscope.cli.progress import choose_listener
    from stepscope.explain.experiments.cases import describe_case

    with if_interrupted(_SAVED), choose_listener(outcome_of, describe or describe_case) as listener:
        return run(listener)


def draw_one(verb: str, kept: Path, plot: Path | None, draw: "Callable[[], Figure]", *, other: str) -> None:
    """Save the chart if `plot` names a file, and print the command that draws one, or one of the `other` quantity."""
    again = f"next: stepscope {verb} --from {shlex.quote(str(kept))}"
    if plot is None:
        say(f"{again} --plot {verb}.png")
        return
    from stepscope.render.figures import save

    save(draw(), plot)
    say(f"chart: {plot}")
    say(f"{again} --plot {other}.png --plot-of {other}")


def count(
    grid: Grid,
    folder: Path,
    *,
    command: str,
    force: bool,
    passes: int,
    metrics: str,
    kernel_class: str | None,
    format_: Format,
) -> None:
    """Run `stepscope profile --counters`. One case shows its kernels, and as text its totals too. A grid shows the
    totals of its cases."""
    from stepscope.explain.trace.counters import cases_table, choose_classes, kernels_table
    from stepscope.jobs.experiments.counter_sweep import Counters

    classes = choose_classes(kernel_class)
    job = Counters(folder=folder, command=command, force=force, passes=passes, metrics=metrics)
    with if_interrupted(_SAVED), showing_stages() as on_stage:
        cases = job.run(grid, on_stage, say)
    alone = cases[0].recording if len(cases) == 1 else None
    tables = [kernels_table(alone)] if alone is not None else []
    if alone is None or format_ is Format.TEXT:
        tables.append(cases_table(cases, classes))
    show_tables(tables, format_)
    first = next(case for case in cases if case.recording is not None)
    say(f"recording{'s' * (alone is None)}: {folder}")
    say(f"next: stepscope explain {shlex.quote(str(folder / first.name))} --table counters")

"""`stepscope compare`: what changed between recordings, or since a baseline."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stepscope.cli.baseline import StoreFlag
from stepscope.cli.options import FormatFlag
from stepscope.cli.output import say, show_tables
from stepscope.errors import Exit, StepscopeError
from stepscope.recording.baseline import METRICS, STORE, parse_metric
from stepscope.render.formats import Format

if TYPE_CHECKING:
    from stepscope.explain.gate.verdict import GateResult, PartsBy

By = Literal["phase", "class", "module", "kernel"]


def compare(
    recordings: Annotated[
        list[Path],
        typer.Argument(metavar="A B…", help="Recordings or bench results, or runs to compare with --baseline."),
    ],
    by: Annotated[By, typer.Option("--by", help="What to break the step down by.")] = "class",
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on", metavar="PERCENT", help="Exit with status 1 if another step is slower than A's by more."
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="NAME", help="Compare runs with this saved baseline instead.")
    ] = None,
    store: StoreFlag = STORE,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help=f"What --fail-on applies to: {', '.join(METRICS)}; repeatable.  [default: step]",
        ),
    ] = None,
    allow_different: Annotated[
        bool, typer.Option("--allow-different", help="Compare although device, torch version or settings differ.")
    ] = False,
    summary: Annotated[
        Path | None, typer.Option("--summary", metavar="FILE", help="Write the result as Markdown.")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write the result as JUnit XML.")
    ] = None,
    format_: FormatFlag = Format.TEXT,
    detail: Annotated[bool, typer.Option("--detail", help="Also show nanoseconds and full names.")] = False,
) -> None:
    """Show what changed between two recordings, the largest change first, and which changes are noise.

    A and B are directories that `stepscope profile` saved, or traces from PyTorch's profiler or Nsight Systems. Of two
    directories with a trace per rank, the first rank that both have is compared. More than two runs, and results of
    `stepscope bench`, are a table, each compared with the first.

    With --baseline, the recordings are repeated runs, compared with a baseline that `stepscope baseline save` made.
    Results of `stepscope bench` work too.
    """
    from stepscope.api.baselines import find_results
    from stepscope.api.run import load
    from stepscope.explain.trace.compare import parse_percent

    limit = None if fail_on is None else parse_percent(fail_on)
    if baseline is not None:
        from stepscope.api.baselines import check_baseline
        from stepscope.render.gate_files import check_files

        check_files([("--summary", summary), ("--junit", junit)])
        result = check_baseline(
            baseline,
            recordings,
            store=store,
            limit=limit,
            metrics=[parse_metric(one) for one in metric or METRICS[:1]],
            by=_require_stored(by),
            allow_different=allow_different,
        )
        _report(result, summary, junit, format_, detail=detail)
        return
    gated = {"--metric": metric, "--summary": summary, "--junit": junit, "--allow-different": allow_different}
    for flag in (name for name, value in gated.items() if value):
        raise StepscopeError(f"`{flag}` needs a baseline", hint=f"--baseline NAME {flag} …")
    if len(recordings) < 2:
        raise StepscopeError(
            f"got {len(recordings)} recording; expected at least two",
            hint="stepscope compare A B, or stepscope compare --baseline NAME RUN...",
        )
    if len(recordings) > 2 or all(find_results(one) is not None for one in recordings):
        _compare_many(recordings, by, limit, format_, detail=detail)
        return
    a, b = recordings
    comparison = load(a, cache=False).compare(load(b, cache=False), by=by)
    show_tables([comparison.table], format_, detail=detail)
    if limit is not None:
        say(comparison.verdict(limit))
        if comparison.is_slower(limit):
            raise typer.Exit(Exit.GATE_FAILED)
    elif by != "kernel":
        say(f"next: stepscope compare {shlex.quote(str(a))} {shlex.quote(str(b))} --by kernel")


def _compare_many(recordings: list[Path], by: By, limit: float | None, format_: Format, *, detail: bool) -> None:
    from stepscope.api.series_inputs import read_series
    from stepscope.explain.story.comparison.run_series import (
        find_slower,
        list_warnings,
        tabulate_parts,
        tabulate_runs,
        tabulate_settings,
    )

    if by not in ("class", "phase"):
        raise StepscopeError(
            f"more than two runs have no times by {by}",
            detail="expected class or phase",
            hint=f"stepscope compare A B --by {by}",
        )
    series = read_series(recordings)
    runs = tabulate_runs(series, warnings=list_warnings(series))
    tables = (runs, tabulate_parts(series, by), tabulate_settings(series))
    show_tables([table for table in tables if table is not None], format_, detail=detail)
    if limit is None:
        say(f"next: {shlex.join(['stepscope', 'report', *map(str, recordings)])}")
        return
    slower = find_slower(series, limit)
    for point in slower:
        name = ", ".join(filter(None, (series.labels[point.run], point.case.name)))
        say(f"FAIL: {name} {(point.ratio or 1.0) * 100 - 100:+.2f}%, limit +{limit * 100:g}%")
    if slower:
        raise typer.Exit(Exit.GATE_FAILED)
    say(
        f"pass: no step is slower than that of {series.labels[series.baseline]} by more than {limit * 100:g}% and noise"
    )


def _report(result: "GateResult", summary: Path | None, junit: Path | None, format_: Format, *, detail: bool) -> None:
    from stepscope.explain.gate.gate_tables import gate_tables
    from stepscope.render.gate_files import save_junit, save_summary

    show_tables(gate_tables(result), format_, detail=detail)
    if summary is not None:
        save_summary(result, summary)
    if junit is not None:
        save_junit(result, junit)
    for sentence in result.sentences:
        say(sentence)
    if result.refusals:
        say(f"hint: --allow-different, or save a baseline here: stepscope baseline save {result.name} RUN... --force")
    if result.outcome == "fail":
        raise typer.Exit(Exit.GATE_FAILED)
    if result.outcome == "cannot tell":
        raise typer.Exit(Exit.UNDECIDED)


def _require_stored(by: By) -> "PartsBy":
    if by == "class" or by == "phase":
        return by
    raise StepscopeError(
        f"a baseline has no times by {by}", detail="expected class or phase", hint=f"stepscope compare A B --by {by}"
    )

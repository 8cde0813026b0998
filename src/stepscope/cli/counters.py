"""`stepscope profile --counters`, from its flags to its tables."""

import shlex
from pathlib import Path

from stepscope.cli.output import say, show_tables, showing_stages
from stepscope.report.formats import Format
from stepscope.spec import Grid


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
    """One case shows its kernels, and in text its totals too; a grid shows the totals of its cases."""
    from stepscope.explain.trace.counters import cases_table, choose_classes, kernels_table
    from stepscope.jobs.experiments.counter_sweep import Counters

    classes = choose_classes(kernel_class)
    job = Counters(folder=folder, command=command, force=force, passes=passes, metrics=metrics)
    try:
        with showing_stages() as on_stage:
            cases = job.run(grid, on_stage, say)
    except KeyboardInterrupt:
        say("interrupted: cases that were done are kept, and the same command goes on")
        raise
    alone = cases[0].recording if len(cases) == 1 else None
    tables = [kernels_table(alone)] if alone is not None else []
    if alone is None or format_ is Format.TEXT:
        tables.append(cases_table(cases, classes))
    show_tables(tables, format_)
    first = next(case for case in cases if case.recording is not None)
    say(f"recording{'s' * (alone is None)}: {folder}")
    say(f"next: stepscope explain {shlex.quote(str(folder / first.name))} --table counters")

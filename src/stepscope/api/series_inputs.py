"""The input files of a comparison: one run or two as they are, and more of them reduced to the figures of each as it is
read. Results of `bench` with several cases are compared case by case.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from stepscope.api.inputs import Given, RunFiles, in_fp32, name_runs, ok_rows, open_sources, read_run, sort_files
from stepscope.api.run import Run
from stepscope.errors import StepscopeError
from stepscope.explain.experiments.cases import describe_case
from stepscope.explain.story import Materials, RunSeries
from stepscope.explain.story.comparison.run_figures import RunFigures, reduce_run
from stepscope.explain.story.comparison.run_series import TrendCase
from stepscope.explain.story.sections.environment_facts import find_started
from stepscope.explain.story.sources import plain_workload
from stepscope.explain.trace.run_labels import RunIdentity, label_runs
from stepscope.recording.rows.bench import BenchRow
from stepscope.recording.rows.results_file import read_rows
from stepscope.spec import Workload

Order = Literal["given", "time"]
_PAIR = 2  # runs that are compared in depth
_MOST_NAMED = 3  # files in an error
_MOST_CASE = 80  # characters of the name of a case


def read_sources(
    sources: Sequence[Path | Run], *, command: str, cached: bool, baseline: Path | None = None, order: Order = "given"
) -> list[Materials] | RunSeries:
    """Read the files of one run or two, or the figures of more. The first run is the baseline unless another one is
    named; of two runs, it comes first. `order` is that of the files, or of the times at which the runs began."""
    given = open_sources(sources, cached=cached)
    if sweeps := _find_sweeps(given):
        return _join_sweeps(sweeps, baseline, order)
    runs = sort_files(given)
    if len(runs) > _PAIR:
        del given  # so that a run is no longer in memory once it is reduced
        return _reduce_runs(runs, baseline, order)
    materials = name_runs(runs, command=command)
    if len(runs) == 1:
        for flag in [flag for flag, is_set in (("--baseline", baseline), ("--order", order != "given")) if is_set]:
            raise StepscopeError(
                f"`{flag}` needs several runs", detail="these files are one run", hint=f"remove {flag}"
            )
        return materials
    places = _order([find_started(one) for one in materials], [run.path for run in runs], order)
    first = _find_baseline([runs[place] for place in places], baseline)
    return [materials[places[first]], materials[places[1 - first]]]


def read_series(sources: Sequence[Path]) -> RunSeries:
    """Read the figures of several runs, the first of which is the baseline."""
    read = read_sources(sources, command="", cached=False)
    if isinstance(read, RunSeries):
        return read
    return RunSeries.of_runs([reduce_run(one) for one in read])


def _reduce_runs(runs: list[RunFiles], baseline: Path | None, order: Order) -> RunSeries:
    figures = []
    for run in runs:
        figures.append(reduce_run(replace(read_run(run), name=str(run.path))))
        _require_figures(figures[-1])
    _require_one_kind(figures)
    places = _order([one.started for one in figures], [run.path for run in runs], order)
    first = _find_baseline([runs[place] for place in places], baseline)
    return RunSeries.of_runs([figures[place] for place in places], first)


def _require_figures(figures: RunFigures) -> None:
    if figures.step is None and figures.peak_bytes is None and not figures.failure:
        raise StepscopeError(
            f"`{figures.path}` has no step time and no peak memory",
            detail="a comparison of more than two runs is a table of these",
            hint="pass recordings, `stepscope bench` results or directories of reports",
        )


def _require_one_kind(figures: Sequence[RunFigures]) -> None:
    """Steps and whole traces do not fit into one column."""
    timed = [one for one in figures if one.step is not None]
    without = [one for one in timed if not one.is_step]
    if without and len(without) < len(timed):
        raise StepscopeError(
            f"`{without[0].path}` does not mark its steps, but other runs do",
            detail="the length of a trace and the time of a step cannot be compared",
            hint="with profile(schedule=...) as prof: ...; prof.step()   # after each step",
        )


def _order(started: Sequence[str], paths: Sequence[Path], order: Order) -> list[int]:
    """The places of the runs in order."""
    if order == "given":
        return list(range(len(started)))
    for moment, path in zip(started, paths, strict=True):
        if not moment:
            raise StepscopeError(
                f"`{path}` does not say when it was recorded", hint="--order given, which is the order of the files"
            )
    return sorted(range(len(started)), key=lambda place: started[place])


def _find_baseline(runs: Sequence[RunFiles], baseline: Path | None) -> int:
    """The place of the run that has this file, or of the first run."""
    if baseline is None:
        return 0
    for place, run in enumerate(runs):
        if any(_is_same(one.path, baseline) for one in run.files):
            return place
    raise StepscopeError(
        f"`{baseline}` is not one of the runs",
        detail=f"expected one of {_list_paths([run.path for run in runs])}",
        hint=f"--baseline {runs[0].path}",
    )


def _is_same(path: Path, named: Path) -> bool:
    """A directory also names the results file in it."""
    return named.resolve() in (path.resolve(), path.parent.resolve() if path.suffix == ".jsonl" else None)


def _list_paths(paths: Sequence[Path]) -> str:
    shown = ", ".join(map(str, paths[:_MOST_NAMED]))
    return f"{shown} and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else shown


# --- Results of `bench` with several cases ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Sweep:
    """A results file: the newest row of each case."""

    file: Given
    rows: tuple[BenchRow, ...]


def _find_sweeps(given: Sequence[Given]) -> list[_Sweep]:
    """The results files to compare case by case; empty if the files are not only these, or each has one case. Two files
    of one case in several precisions are two runs."""
    if len(given) < _PAIR or any(one.kind != "bench rows" for one in given):
        return []
    sweeps = [_Sweep(file=one, rows=read_rows(one.path, BenchRow)[0]) for one in given]
    same = in_fp32 if len(given) == _PAIR else plain_workload
    if all(len({same(row.case) for row in ok_rows(one.rows, one.file.path)}) == 1 for one in sweeps):
        return []
    return sweeps


def _join_sweeps(sweeps: Sequence[_Sweep], baseline: Path | None, order: Order) -> RunSeries:
    paths = [one.file.path for one in sweeps]
    started = [min(row.started for row in one.rows) for one in sweeps]
    chosen = [sweeps[place] for place in _order(started, paths, order)]
    first = _find_baseline([RunFiles(others={"bench": one.file}) for one in chosen], baseline)
    rows = [{plain_workload(row.case): row for row in one.rows} for one in chosen]
    workloads = dict.fromkeys(workload for each in rows for workload in each)
    if all(sum(workload in each for each in rows) < _PAIR for workload in workloads):
        raise StepscopeError(
            "these files have no case in common",
            detail="; ".join(f"{one.file.path}: {describe_case(one.rows[0].case)}, …" for one in chosen[:_MOST_NAMED]),
            hint="measure the same cases: stepscope bench --out runs/bench-COMMIT",
        )
    names = _name_cases(list(workloads), rows)
    cases = tuple(
        TrendCase(
            name=name,
            figures=tuple(_reduce_row(each.get(workload), one) for each, one in zip(rows, chosen, strict=True)),
        )
        for workload, name in zip(workloads, names, strict=True)
    )
    labels = label_runs([RunIdentity(name=str(one.file.path)) for one in chosen])
    return RunSeries(labels=labels, cases=cases, baseline=first)


def _name_cases(workloads: Sequence[Workload], rows: Sequence[dict[Workload, BenchRow]]) -> tuple[str, ...]:
    """The cases by what differs between them."""
    found = [next(each[workload].case for each in rows if workload in each) for workload in workloads]
    return label_runs([RunIdentity(name=describe_case(case), case=case) for case in found], most=_MOST_CASE)


def _reduce_row(row: BenchRow | None, sweep: _Sweep) -> RunFigures | None:
    return None if row is None else reduce_run(Materials(name=str(sweep.file.path), bench=(row,)))

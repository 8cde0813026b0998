"""The input files of a report: what each one is, and which run it belongs to.

Traces define the runs: one run, runs to compare, or the ranks of one run. The directory of an earlier report is a
run of its own, and so is a run loaded in Python. Every other file goes to the first run that has no file of its kind
yet. Ambiguous input is an error that says what to type.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from stepscope.api.measure import MemoryResults
from stepscope.api.rank_files import Opened, are_ranks, describe_ranks, expand_ranks, open_file
from stepscope.api.run import Run, load
from stepscope.errors import StepscopeError
from stepscope.explain.experiments.cases import describe_case
from stepscope.explain.story.commands import find_case
from stepscope.explain.story.sources import Materials
from stepscope.findings import Missing
from stepscope.jobs.experiments.sweep import RESULTS_NAME
from stepscope.jobs.report import stages
from stepscope.jobs.report.data import is_data, read_state
from stepscope.loop.place import MEMORY_FOLDER, OOM_FOLDER, is_run
from stepscope.recording.rows import attention_case, bench, memory_summary, optimisation, precision_report
from stepscope.recording.rows.attention_case import AttentionRow
from stepscope.recording.rows.bench import BenchRow, CaseRow
from stepscope.recording.rows.precision_report import read_report
from stepscope.recording.rows.results_file import read_rows
from stepscope.recording.store import is_recording
from stepscope.spec import Case, with_precision
from stepscope.units import count_noun

R = TypeVar("R", bound=CaseRow)
Kind = Literal["data", "time", "memory", "bench rows", "memory rows", "attention rows", "precision", "optimisation"]

_PAIR = 2  # runs that are compared in depth
_MOST_RUNS = 100
_MOST_IN_MEMORY = 8  # recordings
_SNIFFED = 4096
_SCHEMA = re.compile(rb'\s*\{\s*"schema"\s*:\s*"([^"]{1,60})"')
_KINDS: dict[str, Kind] = {
    bench.SCHEMA: "bench rows",
    memory_summary.ROW_SCHEMA: "memory rows",
    attention_case.SCHEMA: "attention rows",
    precision_report.SCHEMA: "precision",
    optimisation.SCHEMA: "optimisation",
}
_ALSO_TAKEN = (
    "a results.jsonl from `stepscope bench`, `memory` or `attention`, a file written by `stepscope precision --out` or "
    "`stepscope optimise`, or the directory of an earlier report"
)
# The name of each kind in messages, and the report stage that it replaces.
_NAMES: dict[Kind, tuple[str, str]] = {
    "data": ("report directory", ""),
    "time": ("trace", "profile"),
    "memory": ("memory snapshot", "memory"),
    "bench rows": ("`stepscope bench` results file", "bench"),
    "memory rows": ("`stepscope memory` results file", "memory"),
    "attention rows": ("`stepscope attention` results file", "attention"),
    "precision": ("`stepscope precision` result", "precision"),
    "optimisation": ("`stepscope optimise` result", "optimise"),
}


@dataclass(frozen=True, kw_only=True)
class Given:
    """An input file and its kind."""

    path: Path
    kind: Kind
    run: Run | None = None  # for recordings
    is_whole: bool = False  # a complete run: loaded in Python, or a directory with the traces of its ranks


@dataclass(kw_only=True)
class RunFiles:
    """The files of one run."""

    data: Given | None = None
    recordings: list[Given] = field(default_factory=list)
    others: dict[str, Given] = field(default_factory=dict)  # by stage

    @property
    def files(self) -> list[Given]:
        return [*([self.data] if self.data else []), *self.recordings, *self.others.values()]

    @property
    def path(self) -> Path:
        """That of its first file."""
        return self.files[0].path


def open_sources(sources: Sequence[Path | Run], *, cached: bool) -> list[Given]:
    """Find out what each file is. Of many recordings, only the manifests stay in memory."""
    _refuse_twice([source for source in sources if isinstance(source, Path)])
    parts = [part for source in sources for part in _list_parts(source)]
    return [_look_at(part, cached=cached, keeps=len(parts) <= _MOST_IN_MEMORY) for part in parts]


def read_runs(sources: Sequence[Path | Run], *, command: str, cached: bool) -> list[Materials]:
    """Read files and loaded runs into the materials of each run."""
    return name_runs(sort_files(open_sources(sources, cached=cached)), command=command)


def name_runs(runs: Sequence[RunFiles], *, command: str) -> list[Materials]:
    """Read the files of all runs. Names that are not unique become paths."""
    named = [replace(read_run(run), command=command) for run in runs]
    if len({one.name for one in named}) < len(named):
        named = [replace(one, name=str(run.path)) for one, run in zip(named, runs, strict=True)]
    return named


def _list_parts(source: Path | Run) -> list[Path | Run]:
    """The directory of `stepscope run` has its ranks, and may have a recording of memory."""
    if isinstance(source, Run) or not is_run(source):
        return [source]
    if expand_ranks([source]) == [source] and is_recording(source / OOM_FOLDER):
        return [source / OOM_FOLDER]  # it ran out of memory before anything else was recorded
    return [source, *([source / MEMORY_FOLDER] if is_recording(source / MEMORY_FOLDER) else [])]


def _refuse_twice(paths: Sequence[Path]) -> None:
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise StepscopeError(f"`{path}` is given twice", hint="give each file once")
        seen.add(path.resolve())


# --- Kinds of files -------------------------------------------------------------------------------------------------


def _look_at(source: Path | Run, *, cached: bool, keeps: bool) -> Given:
    if isinstance(source, Run):
        return replace(_give(source), is_whole=True)
    path = source
    if is_data(path):
        return Given(path=path, kind="data")
    if path.is_dir() and (path / RESULTS_NAME).is_file():
        path = path / RESULTS_NAME
    if kind := _find_kind(path):
        return Given(path=path, kind=kind)
    if expand_ranks([path]) != [path]:
        return replace(_give(load(path, cache=cached)), path=path, is_whole=True)
    try:
        opened = open_file(path, cached=cached)
    except StepscopeError as error:
        raise _also_taken(error) from None
    if not opened.manifest.file:
        opened = opened.named(path.name)
    return _give(Run([opened if keeps else replace(opened, loaded=None, cached=cached)]))


def _give(run: Run) -> Given:
    return Given(path=run.files[0], kind="memory" if run.is_of_memory else "time", run=run)


def _also_taken(error: StepscopeError) -> StepscopeError:
    """Add the inputs that only a report accepts to an error that lists what was expected."""
    more = f"{error.detail}; or {_ALSO_TAKEN}" if "expected" in error.detail else error.detail
    return StepscopeError(error.message, detail=more, hint=error.hint)


def _find_kind(path: Path) -> Kind | None:
    """The kind of a stepscope document or results file, by its schema. None for other files and unreadable ones, for
    which the recording reader has the better error."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            found = _SCHEMA.match(file.read(_SNIFFED))
    except OSError:
        return None
    if found is None:
        return None
    schema = found[1].decode(errors="replace")
    if schema not in _KINDS and schema.startswith("stepscope."):
        raise StepscopeError(
            f"a report cannot show `{path}`",
            detail=f"its schema is `{schema}`; expected a recording, a trace, or one of {', '.join(_KINDS)}",
            hint="stepscope report --help",
        )
    return _KINDS.get(schema)


# --- Assigning files to runs ----------------------------------------------------------------------------------------


def sort_files(given: Sequence[Given]) -> list[RunFiles]:
    """Assign the files to runs. Raises StepscopeError if that is ambiguous."""
    runs = _make_runs(given)
    others = [one for one in given if one.kind not in ("data", "time")]
    has_runs = any(run.data or run.recordings for run in runs)
    if len(runs) > _PAIR:
        _require_one_each(runs, others)
    for one in others:
        name, stage = _NAMES[one.kind]
        free = [run for run in runs if stage not in run.others and not _has(run, stage)]
        if not free and len(runs) < _MOST_RUNS and not has_runs:
            free = [RunFiles()]
            runs += free
        if not free:
            raise StepscopeError(
                f"too many files: `{one.path}` is another {name}",
                detail="the run already has one" if len(runs) == 1 else f"all {len(runs)} runs already have one",
                hint="pass one file of each kind per run",
            )
        free[0].others[stage] = one
    return runs


def _require_one_each(runs: Sequence[RunFiles], others: Sequence[Given]) -> None:
    """Of several runs, which one a single file belongs to would be a guess."""
    for stage in dict.fromkeys(_NAMES[one.kind][1] for one in others):
        found = [one for one in others if _NAMES[one.kind][1] == stage]
        lacking = [run for run in runs if not _has(run, stage)]
        if len(found) != len(lacking):
            raise StepscopeError(
                f"cannot tell which run `{found[0].path}` belongs to",
                detail=f"{len(runs)} runs, and {count_noun(len(found), 'file')} of this kind",
                hint="pass one file of each kind per run, or only the runs",
            )


def _make_runs(given: Sequence[Given]) -> list[RunFiles]:
    """One run per trace and report directory, in the order given; traces of all ranks are one run."""
    recordings = [one for one in given if one.kind == "time"]
    folders = [one for one in given if one.kind == "data"]
    if _are_ranks(recordings) and not folders:
        return [RunFiles(recordings=recordings)]
    runs = [
        RunFiles(data=one) if one.kind == "data" else RunFiles(recordings=[one])
        for one in given
        if one.kind in ("data", "time")
    ]
    opened = _open_all(recordings)
    if len(runs) > _PAIR and opened and all((one.manifest.world_size or 1) > 1 for one in opened):
        raise StepscopeError(
            f"got {len(runs)} traces of ranks that are not the ranks of one run",
            detail=describe_ranks(opened),
            hint="pass the directory of each run, with the traces of all its ranks",
        )
    if len(runs) > _MOST_RUNS:
        raise StepscopeError(f"got {len(runs)} runs; expected at most {_MOST_RUNS}")
    return runs or [RunFiles()]


def _are_ranks(recordings: Sequence[Given]) -> bool:
    is_split = len(recordings) > 1 and not any(one.is_whole for one in recordings)
    return is_split and are_ranks([one.manifest for one in _open_all(recordings)])


def _open_all(recordings: Sequence[Given]) -> list[Opened]:
    return [replace(one.run.opened[0], path=one.path) for one in recordings if one.run is not None]


def _has(run: RunFiles, stage: str) -> bool:
    return run.data is not None and stage in read_state(run.data.path).done


# --- Reading a run --------------------------------------------------------------------------------------------------


def read_run(run: RunFiles) -> Materials:
    materials = _read_data(run.data.path) if run.data else Materials(name=_name(run.files[0]))
    if run.recordings:
        ranks = _sort_runs(run.recordings)
        profile = ranks[0].require_kernels()
        activities = tuple(activity for one in ranks for activity in one.activities) if len(ranks) > 1 else ()
        materials = replace(materials, profile=profile, ranks=activities)
    # In this order: a recording determines which case of a results file belongs to the run.
    readers: dict[str, Callable[[Given, Materials], Materials]] = {
        "memory": _add_memory,
        "bench": _add_bench,
        "precision": lambda one, to: replace(to, precision=read_report(one.path)),
        "attention": lambda one, to: replace(to, attention=ok_rows(read_rows(one.path, AttentionRow)[0], one.path)),
        "optimise": lambda one, to: replace(to, optimisation=optimisation.read_optimisation(one.path)),
    }
    for stage, read in readers.items():
        if stage in run.others:
            before, materials = materials, read(run.others[stage], materials)
            _check_device(run.others[stage], before, materials)
    present = {*run.others, *(["profile"] if run.recordings else [])}
    absent = {stage: missing for stage, missing in materials.absent.items() if stage not in present}
    return replace(materials, absent=absent)


def _check_device(one: Given, before: Materials, after: Materials) -> None:
    """Raise StepscopeError if the files of a run come from different devices, whose figures must not be mixed."""
    known = set(_devices(before))
    added = next((device for device in _devices(after) if device not in known), None)
    if known and added is not None:
        raise StepscopeError(
            f"`{one.path}` was measured on another device: `{added}`",
            detail=f"the other files of the run were measured on {', '.join(sorted(known))}",
            hint="pass files from one device; to compare two runs: stepscope report A B",
        )


def _devices(materials: Materials) -> Iterator[str]:
    """The device names, as the driver spells them."""
    for profile in (materials.profile, materials.memory):
        if profile is not None and profile.recording.manifest.device:
            yield profile.recording.manifest.device
    yield from (row.environment.driver_name for row in (*materials.bench, *materials.attention))
    for document in (materials.precision, materials.optimisation):
        if document is not None:
            yield document.environment.driver_name


def _sort_runs(recordings: Sequence[Given]) -> list[Run]:
    """The ranks of the recordings, in order."""
    ranks = [rank for one in recordings if one.run is not None for rank in one.run.ranks]
    return sorted(ranks, key=lambda one: one.rank or 0)


def _read_data(folder: Path) -> Materials:
    """The saved stages of an earlier report, and the reasons for the missing ones."""
    state = read_state(folder)
    materials = Materials(name=describe_case(state.case), absent=dict(state.absent))
    for stage in (*stages.ALL, *stages.ON_REQUEST):
        if stage.name in state.done:
            try:
                materials = stage.load(folder, state.done[stage.name], materials)
            except StepscopeError as error:
                lost = Missing(what=stage.what, why=error.message, command=state.command)
                materials.absent[stage.name] = lost
        elif stage.name not in state.absent and stage in stages.ALL:
            not_done = Missing(what=stage.what, why="this stage was not run", command=state.command)
            materials.absent[stage.name] = not_done
    if not state.done:
        raise StepscopeError(f"the report in `{folder}` has no finished stages", hint=state.command)
    return materials


def _add_memory(one: Given, materials: Materials) -> Materials:
    if one.run is not None:
        return replace(materials, memory=one.run.memory)
    results = MemoryResults.read(one.path)
    row = _choose_row(results.rows, one.path, find_case(materials))
    return replace(materials, memory=results.run(results.rows.index(row)).memory)


def _add_bench(one: Given, materials: Materials) -> Materials:
    """The row of the run, followed by those that differ from it only in precision."""
    rows = ok_rows(read_rows(one.path, BenchRow)[0], one.path)
    case = find_case(materials)
    if case is None and len({in_fp32(row.case) for row in rows}) == 1:
        case = rows[0].case
    chosen = _choose_row(rows, one.path, case)
    others = [row for row in rows if row is not chosen and in_fp32(row.case) == in_fp32(chosen.case)]
    return replace(materials, bench=(chosen, *others))


def in_fp32(case: Case) -> Case:
    """The case that all precisions of it share."""
    return msgspec.structs.replace(case, workload=with_precision(case.workload, "fp32"))


def ok_rows(rows: Sequence[Any], path: Path) -> tuple[Any, ...]:
    """The rows of cases that finished; there must be one."""
    done = tuple(row for row in rows if row.status == "ok")
    if not done:
        raise StepscopeError(f"`{path}` has no successful cases", detail=f"{rows[0].status}: {rows[0].reason}")
    return done


def _choose_row(rows: Sequence[R], path: Path, case: Case | None) -> R:
    """The row of the run: the one with its workload if that is known, or else the only row."""
    done: tuple[R, ...] = ok_rows(rows, path)
    fitting = [row for row in done if case is None or row.case.workload == case.workload]
    if len(fitting) == 1 or (fitting and case is not None):
        return fitting[-1]
    if case is not None:
        raise StepscopeError(
            f"`{path}` does not contain the recorded case",
            detail=f"the recording is {describe_case(case)}; the file has {_list_cases(done)}",
            hint=f"remove {path}",
        )
    raise StepscopeError(
        f"`{path}` has {len(done)} cases; a report shows one",
        detail=f"its cases: {_list_cases(done)}",
        hint=f"add a recording of the case to show: stepscope report RECORDING {path}",
    )


def _list_cases(rows: Sequence[CaseRow]) -> str:
    shown = [describe_case(row.case) for row in rows[:3]]
    return "; ".join(shown) + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")


def _name(one: Given) -> str:
    return one.path.name if one.run is None or len(one.run.ranks) > 1 else one.run.name

"""Measuring from Python: `bench`, `profile`, `memory` and `precision` run workloads and return the results.

A workload takes the same settings as the command line:

    stepscope.bench(stepscope.workload(size="small", context=1024, precision="bf16"))
    stepscope.bench(stepscope.grid(size="small", context=[256, 1024]), out="runs/bench")

Models run in separate processes, so torch is never imported here and an out-of-memory error costs one case. Nothing is
printed. `progress` is a function that receives lines of text, or a `SweepListener`, which follows a sweep case by case.
Results are kept only if `out` names a directory, from which the same call resumes. `command` is stored with the
results; by default it is the equivalent command line.
"""

import weakref
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import msgspec

from stepscope.api.arguments import (
    as_folder,
    naming_parameters,
    require_amount,
    require_choice,
    require_choices,
    require_count,
)
from stepscope.api.display import DataTable, Picture, PrecisionPart, StrPath, encode_document, write_table
from stepscope.errors import StepscopeError
from stepscope.explain.experiments.bench_tables import bench_figure, bench_table
from stepscope.explain.experiments.cases import describe_case
from stepscope.files import scratch_folder
from stepscope.jobs.experiments.memory_sweep import MemoryExperiment, choose_grid, recording_folder
from stepscope.jobs.experiments.sweep import BenchExperiment, Sweep, SweepListener, TextListener
from stepscope.jobs.workers.process import OnStage
from stepscope.recording.rows.bench import BenchRow, Retry, Row
from stepscope.recording.rows.memory_summary import MemoryRow
from stepscope.recording.rows.precision_report import PrecisionReport, read_report
from stepscope.recording.rows.results_file import read_rows
from stepscope.spec import (
    TIMING_SETTINGS,
    Case,
    Grid,
    Precision,
    SpecError,
    Timing,
    Workload,
    flag_of,
    for_precisions,
    grid_from_settings,
)

if TYPE_CHECKING:
    import polars as pl

    from stepscope.api.run import Run
    from stepscope.findings import Page

RetryChoice = Retry | Literal["failed", "doubtful"]
Progress = SweepListener | OnStage
# What the measuring functions accept. The command line passes a `Grid`.
Workloads = Workload | Iterable[Workload] | Grid | None

R = TypeVar("R", bound=Row)

_RECORD_AGAIN = "record it again with fresh=True, or --fresh on the command line"


# --- Workloads --------------------------------------------------------------------------------------------------------


def workload(**settings: object) -> Workload:
    """Return a workload, such as `workload(size="small", context=1024, precision="bf16")`, or one with your own model,
    such as `workload(model="my_model.py:build", set={"depth": 4})`. The settings are those of the command line; None
    means the default."""
    made = grid(**settings)
    if len(made) > 1:
        raise ValueError(f"expected one workload, got {len(made)}; use stepscope.grid for several")
    return made[0]


def grid(**settings: object) -> tuple[Workload, ...]:
    """Return one workload per combination of settings. Each setting is a value or a list of values; the first one
    varies slowest."""
    for name in settings:
        if name in TIMING_SETTINGS:
            raise SpecError(
                f"`{name}` is not a workload setting",
                detail="it controls timing; pass it to the function that measures",
                hint=f"stepscope.bench(workload, {name}=…)",
            )
    given = {name: value for name, value in settings.items() if value is not None}
    with naming_parameters():
        return tuple(case.workload for case in grid_from_settings(given).cases())


def make_grid(workloads: Workloads, **timing: int | str | None) -> Grid:
    """The cases to measure. None becomes the empty grid, for which each job has its own default."""
    given = {name: value for name, value in timing.items() if value is not None}
    for name, value in given.items():
        if not isinstance(value, int | str):
            raise ValueError(f"{name} must be a single value, got {value!r}")
    if workloads is None or isinstance(workloads, Grid):
        return (workloads or Grid()).override(grid_from_settings(given)) if given else workloads or Grid()
    if not isinstance(workloads, Workload | Iterable):
        raise ValueError(f"expected a stepscope.Workload, got {type(workloads).__name__}")
    listed = (workloads,) if isinstance(workloads, Workload) else tuple(workloads)
    if not listed:
        raise ValueError("expected at least one workload, got none")
    for one in listed:
        if not isinstance(one, Workload):
            raise ValueError(f"expected a stepscope.Workload, got {type(one).__name__}")
    with naming_parameters():
        clock: Timing = grid_from_settings(given).cases()[0].timing
    return Grid(listed=tuple(Case(workload=one, timing=clock) for one in listed))


def make_grid_of_one(workload: Workload | Grid | None) -> Grid:
    if workload is not None and not isinstance(workload, Workload | Grid):
        raise ValueError(f"expected one stepscope.Workload, got {type(workload).__name__}")
    return make_grid(workload)


def name_command(verb: str, grid: Grid) -> str:
    """The command to store with the results. For a single workload, it is the equivalent command line."""
    if not grid.listed:
        return f"stepscope {verb}"
    if len(grid.listed) > 1:
        return f"stepscope.{verb}(…), {len(grid.listed)} workloads"
    from stepscope.explain.commands import write_command

    (case,) = grid.listed
    usual = Timing()
    timing = [(name, getattr(case.timing, name)) for name in TIMING_SETTINGS]
    flags = [f"{flag_of(name)} {value}" for name, value in timing if value != getattr(usual, name)]
    return " ".join([write_command(verb, case.workload), *flags])


# --- Progress ---------------------------------------------------------------------------------------------------------


def _listen(progress: Progress | None) -> SweepListener:
    if progress is None or callable(progress):
        return TextListener(progress or _tell_nobody, describe_case)
    return progress


def _tell_nobody(_text: str) -> None:
    pass


# --- Results ----------------------------------------------------------------------------------------------------------


class CaseResults(Sequence[R], Generic[R]):
    """Measured cases, one row each. A row has a `case`, a `status` (`ok`, `oom`, `error`, …) with a `reason`, and the
    measurement. `remarks` lists the rows of a file that were skipped, with the reasons."""

    def __init__(self, rows: Sequence[R], remarks: Sequence[str] = ()) -> None:
        self.rows = tuple(rows)
        self.remarks = tuple(remarks)

    @property
    @abstractmethod
    def table(self) -> DataTable: ...

    @property
    def frame(self) -> "pl.DataFrame":
        """One row per case, with all settings and statistics, as a polars frame."""
        return self.table.frame

    @overload
    def __getitem__(self, index: int) -> R: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[R, ...]: ...

    def __getitem__(self, index: int | slice) -> R | tuple[R, ...]:
        return self.rows[index]

    def __iter__(self) -> Iterator[R]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        done = sum(row.status == "ok" for row in self.rows)
        return f"<{type(self).__name__}: {done} of {len(self.rows)} cases measured>"

    def _repr_html_(self) -> str:
        return write_table(self.table)


class BenchResults(CaseResults[BenchRow]):
    """The results of `bench`: step time, time per phase, throughput, MFU and peak memory."""

    @classmethod
    def read(cls, path: StrPath) -> "BenchResults":
        """Read a `results.jsonl` written by `stepscope bench`."""
        return cls(*read_rows(Path(path), BenchRow))

    @property
    def table(self) -> DataTable:
        return DataTable.of(bench_table(self.rows))

    @property
    def figure(self) -> Picture:
        return Picture(bench_figure(self.rows))


class MemoryResults(CaseResults[MemoryRow]):
    """The results of `memory`: one row per case, and in `folder` a recording of each successful case. A study compares
    the activation checkpointing options of one workload."""

    def __init__(
        self, rows: Sequence[MemoryRow], folder: Path, remarks: Sequence[str] = (), *, is_study: bool = False
    ) -> None:
        super().__init__(rows, remarks)
        self.folder = folder
        self._is_study = is_study

    @classmethod
    def read(cls, path: StrPath) -> "MemoryResults":
        """Read a `results.jsonl` written by `stepscope memory`, with the recordings next to it."""
        rows, remarks = read_rows(Path(path), MemoryRow)
        return cls(rows, Path(path).parent, remarks)

    def run(self, index: int = 0) -> "Run":
        """Return the recording of a case."""
        from stepscope.api.rank_files import Opened
        from stepscope.api.run import Run
        from stepscope.recording import store

        path = recording_folder(self.folder, self.rows[index].key)
        if not store.is_recording(path):
            raise StepscopeError(
                f"the recording of this case is missing: `{path}`",
                detail="its row is still in the results file, so tables work",
                hint=_RECORD_AGAIN,
            )
        try:
            run = Run([Opened.of(path, store.load(path))])
            assert run.memory
        except StepscopeError as error:
            raise StepscopeError(error.message, detail=error.detail, hint=_RECORD_AGAIN) from None
        return run

    @property
    def table(self) -> DataTable:
        return self.tables[0]

    @property
    def tables(self) -> tuple[DataTable, ...]:
        """The peaks of all cases, and the savings of lower precision if the cases differ only in precision."""
        from stepscope.explain.memory.grid import grid_table, is_study, precision_table, study_table

        if self._is_study or is_study(self.rows):
            return (DataTable.of(study_table(self.rows)),)
        compared = precision_table(self.rows)
        return tuple(map(DataTable.of, [grid_table(self.rows), *([compared] if compared else [])]))

    def compare_saved(self) -> tuple[DataTable, ...]:
        """Compare what is saved for backward in eager and compiled mode, for two cases that differ in nothing else."""
        from stepscope.explain.memory.saved import compare_saved

        pair = {row.case.workload.compile: place for place, row in enumerate(self.rows) if row.status == "ok"}
        if len(self.rows) != 2 or len(pair) != 2:
            raise StepscopeError(
                f"table `saved` needs one case, or one case eager and compiled; got {len(self.rows)} cases",
                hint="--table saved --compile no,yes, or compile=[False, True] in Python",
            )
        eager, compiled = (self.run(pair[value]).memory.recording.saved for value in (False, True))
        return tuple(map(DataTable.of, compare_saved(eager, compiled)))

    @property
    def figure(self) -> Picture:
        from stepscope.explain.memory.grid import grid_figure

        return Picture(grid_figure(self.rows))


class PrecisionResult:
    """The result of `precision`: the dtype of every tensor, and the error of each precision against float64. `report`
    is the document that `to_json` returns."""

    def __init__(self, report: PrecisionReport) -> None:
        self.report = report

    @classmethod
    def read(cls, path: StrPath) -> "PrecisionResult":
        """Read a file written by `stepscope precision --out`."""
        return cls(read_report(Path(path)))

    def table(self, name: PrecisionPart = "errors", *, detail: bool = False) -> DataTable:
        """Return a table of `stepscope precision --table`. `detail` shows a row per module instead of one per role."""
        from stepscope.explain.precision.precision_tables import make_table

        require_choice("table", name, PrecisionPart)
        return DataTable.of(make_table(self.report, name, detail=detail))

    def page(self, *, detail: bool = False) -> "Page":
        from stepscope.explain.precision.precision_tables import make_page

        return make_page(self.report, detail=detail)

    def to_json(self) -> str:
        """The document that `stepscope precision --format json` prints."""
        return encode_document(self.report)

    def to_dict(self) -> dict[str, Any]:
        return msgspec.json.decode(self.to_json(), type=dict[str, Any])

    def with_speeds(self, timed: Sequence[BenchRow]) -> "PrecisionResult":
        """Return the same result with speeds added, from `bench` rows for this model in fp32 and other precisions."""
        from stepscope.explain.precision.precision_tables import find_speeds

        return PrecisionResult(msgspec.structs.replace(self.report, speeds=find_speeds(timed, self.report.case)))

    def __repr__(self) -> str:
        runs = ", ".join(run.precision for run in self.report.comparison.runs)
        return f"<PrecisionResult {describe_case(self.report.case)!r}: {runs}>"

    def _repr_html_(self) -> str:
        return "".join(write_table(table) for table in self.page().tables)


# --- Measuring --------------------------------------------------------------------------------------------------------


def bench(
    workloads: Workloads = None,
    *,
    warmup: int | None = None,
    steps: int | None = None,
    memory_limit: int | str | None = None,
    out: StrPath | None = None,
    retry: RetryChoice | None = None,
    fresh: bool = False,
    timeout_s: float | None = None,
    predict: bool = False,
    skip_oom: bool = False,
    progress: Progress | None = None,
    command: str = "",
) -> BenchResults:
    """Time a training step of each workload, each in its own process.

    `out` is a directory for `results.jsonl`. Cases already in it do not run again, unless `fresh` is set or `retry`
    selects them (`failed`, or `doubtful` for unreliable timings). A failed case is a row with its status.
    `StepscopeError` is raised for problems that affect every case. `timeout_s` is per case. `predict` adds what
    `stepscope.plan` predicts for each case on this GPU, and `skip_oom` also leaves out those that cannot fit.
    """
    require_amount("timeout_s", timeout_s, or_equal=False)
    wanted = make_grid(workloads, warmup=warmup, steps=steps, memory_limit=memory_limit)
    with ExitStack() as stack:
        folder = as_folder("out", out) if out is not None else stack.enter_context(scratch_folder())
        sweep = Sweep(
            experiment=BenchExperiment(grid=wanted, predicts=predict, skips_oom=skip_oom),
            folder=folder,
            command=command or name_command("bench", wanted),
            retry=Retry(retry) if retry else None,
            fresh=fresh,
            timeout_s=timeout_s,
        )
        return BenchResults(sweep.run(_listen(progress)))


def memory(
    workloads: Workloads = None,
    *,
    steps: int | None = None,
    memory_limit: int | str | None = None,
    checkpoint_study: bool = False,
    snapshots: bool = False,
    out: StrPath | None = None,
    retry: RetryChoice | None = None,
    fresh: bool = False,
    timeout_s: float | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> MemoryResults:
    """Record every allocation of each workload's first steps.

    `checkpoint_study` compares the activation checkpointing options of one workload. `snapshots` keeps the memory
    snapshot of every case; the snapshot of a single case is always kept. Without `out`, the recordings are deleted
    together with the result object.
    """
    require_amount("timeout_s", timeout_s, or_equal=False)
    wanted = make_grid(workloads, steps=steps, memory_limit=memory_limit)
    with ExitStack() as stack:
        folder = as_folder("out", out) if out is not None else stack.enter_context(scratch_folder())
        sweep = Sweep(
            experiment=MemoryExperiment(grid=choose_grid(wanted, study=checkpoint_study), snapshots=snapshots),
            folder=folder,
            command=command or name_command("memory", wanted),
            retry=Retry(retry) if retry else None,
            fresh=fresh,
            timeout_s=timeout_s,
        )
        results = MemoryResults(sweep.run(_listen(progress)), folder, is_study=checkpoint_study)
        weakref.finalize(results, stack.pop_all().close)
        return results


def profile(
    workload: Workload | Grid | None = None,
    *,
    record_steps: int = 3,
    annotate: Sequence[str] = (),
    stacks: bool = False,
    out: StrPath | None = None,
    force: bool = False,
    progress: OnStage | None = None,
    command: str = "",
) -> "Run":
    """Record a few steps with PyTorch's profiler.

    `annotate` lists functions to annotate (`module:function`). `stacks` records Python call stacks, which slows the
    steps down. `out` is a directory for the recording; `force` overwrites one that another command made.
    """
    from stepscope.api.run import Run
    from stepscope.jobs.recorders.recording_job import ProfileJob

    require_count("record_steps", record_steps)
    wanted = make_grid_of_one(workload)
    with ExitStack() as stack:
        folder = as_folder("out", out) if out is not None else stack.enter_context(scratch_folder()) / "profile"
        job = ProfileJob(
            folder=folder,
            command=command or name_command("profile", wanted),
            force=force,
            steps=record_steps,
            functions=tuple(annotate),
            stacks=stacks,
        )
        recording = job.run(wanted, progress or _tell_nobody)
    return Run.of(recording, folder if out is not None else Path("profile"))


def precision(
    workload: Workload | Grid | None = None,
    *,
    precisions: Sequence[Precision] = (),
    bench: Sequence[BenchRow] = (),
    out: StrPath | None = None,
    force: bool = False,
    progress: OnStage | None = None,
    command: str = "",
) -> PrecisionResult:
    """Run one step in each precision that the device supports, or in `precisions`, and compare it with float64.

    A step is one forward and backward pass without compilation. The workload's own precision, mode, compilation,
    checkpointing and optimizer have no effect. `bench` takes timings to show next to the errors.
    """
    from stepscope.jobs.precision import PrecisionJob

    require_choices("precisions", precisions, Precision)
    wanted = make_grid_of_one(for_precisions(workload) if isinstance(workload, Workload) else workload)
    job = PrecisionJob(
        command=command or name_command("precision", wanted),
        out=None if out is None else Path(out),
        force=force,
        bench_rows=tuple(bench),
    )
    return PrecisionResult(job.run(wanted, progress or _tell_nobody, precisions=tuple(precisions)))

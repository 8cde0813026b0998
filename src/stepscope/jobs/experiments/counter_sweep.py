"""`stepscope profile --counters`: hardware counters of forward passes, for one case or a grid.

One case is a recording in the given directory. A grid is a directory with one recording per case, named after the
settings that vary. A recording appears only when it is complete, so the directories are the only state: a grid resumes
where it stopped, and a case that already has a recording with the same settings, versions and metrics is not counted
again.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import scratch_folder
from stepscope.jobs.experiments.sweep import (
    Experiment,
    Planned,
    PlannedCase,
    Results,
    Sweep,
    TextListener,
    Turn,
    plan_cases,
)
from stepscope.jobs.recorders.external import compress
from stepscope.jobs.recorders.nsight_compute import CaseRefusedError, choose_metrics, count_with_ncu, require_ncu
from stepscope.jobs.recorders.recording_job import check_folder, describe_run, versions_of
from stepscope.jobs.workers.process import OnStage, Workers, require_torch
from stepscope.measure.targets.ncu import MOST_LAYERS, NcuCounted, no_gpu, too_many_layers
from stepscope.recording.rows.bench import CaseRow, Row
from stepscope.spec import Case, Grid, ModelShape, grid_from_flags
from stepscope.units import count_noun

if TYPE_CHECKING:  # these load polars, which a bad flag should not have to wait for
    from stepscope.explain.trace.counters import CountedCase
    from stepscope.recording.store import Recording

MODES = ("inference", "forward")
_DEFAULT = {"size": "small", "num_layers": "2", "context": "256", "attention": "sdpa"}
_MODEL_SOURCE = "model source"


class _Named(NamedTuple):
    """A case and the name of its recording inside the grid's directory; empty if it is the only case."""

    name: str
    case: Case


class _PlannedCount(Planned, frozen=True, kw_only=True):
    name: str


class CountedRow(CaseRow, frozen=True, kw_only=True):
    """A counted case. It is never written as a row: the recording is the result."""

    schema: str = "stepscope.counters/1"
    name: str
    recording: Any = None


@dataclass(frozen=True, kw_only=True)
class CountersExperiment(Experiment[Case, CountedRow]):
    """Cases checked by `name_cases`, each in its own directory, or in the sweep's directory if there is only one."""

    named: Sequence[_Named]
    metrics: Sequence[str]

    row_type = CountedRow

    def open(self, folder: Path) -> AbstractContextManager[Results[CountedRow]]:
        return nullcontext(_Recordings(folder, self.metrics))

    def plan(self, workers: Workers, timeout_s: float | None) -> list[_PlannedCount]:  # noqa: ARG002
        """The workers that plan exit before anything is counted."""
        cases = [one.case for one in self.named]
        with Workers() as own:
            planned = plan_cases(cases, own, timeout_s)
        for plan in planned:
            if plan.environment.device == "cpu":
                raise no_gpu(cases[0].workload.device)
        if len(planned) < len(cases):
            raise StepscopeError(
                "two of these cases are identical on this machine", hint="give --device a single value"
            )
        return [
            _PlannedCount(**msgspec.structs.asdict(plan), name=one.name)
            for one, plan in zip(self.named, planned, strict=True)
        ]

    def run_group(self, turn: Turn[Case, CountedRow], workers: Workers) -> None:  # noqa: ARG002
        """A failure of the user's model costs its case; a failure of the machine ends the sweep."""
        one = turn.waiting[0]
        assert isinstance(one, _PlannedCount)
        turn.start()
        try:
            recording = self._count(one, turn)
        except CaseRefusedError as error:
            turn.finish("error", f"{error.message} {error.detail}".strip(), refusal=error)
        else:
            turn.finish("ok", recording=recording)

    def _count(self, planned: _PlannedCount, turn: Turn[Case, CountedRow]) -> "Recording":
        """Return the recording, which is saved by then."""
        from stepscope.recording.readers import ncu
        from stepscope.recording.store import save

        sweep, on_stage = turn.sweep, turn.listener.stage
        started = datetime.now(UTC)
        with scratch_folder() as scratch:
            csv, counted = count_with_ncu(planned.case, metrics=self.metrics, scratch=scratch, on_stage=on_stage)
            on_stage("reading the counters")
            recording = _describe(ncu.read(csv), planned, counted, command=sweep.command, started=started)
            folder = sweep.folder / planned.name
            save(recording, folder, raw=compress(csv), force=sweep.fresh, command=sweep.command)
        return recording


class _Recordings:
    """The recordings of a grid's cases, each in its directory."""

    damaged_bytes = 0

    def __init__(self, folder: Path, metrics: Sequence[str]) -> None:
        self._folder, self._metrics = folder, metrics

    def find(self, planned: PlannedCase[Any]) -> CountedRow | None:
        """Return the existing recording of a case of the grid, if there is one."""
        from stepscope.recording.store import is_recording, load

        assert isinstance(planned, _PlannedCount)
        folder = self._folder / planned.name
        if not planned.name or not is_recording(folder):
            return None
        recording = load(folder)
        if not _is_of(recording, planned, self._metrics):
            raise StepscopeError(
                f"`{folder}` already holds a different recording",
                detail="its settings, versions or metrics differ from the current ones",
                hint="--force to replace it, or --out DIR",
            )
        return CountedRow(
            key=planned.key,
            **msgspec.structs.asdict(planned),
            status="ok",
            started=recording.manifest.started,
            wall_s=0.0,
            command=recording.manifest.command,
            recording=recording,
        )

    def append(self, row: CountedRow) -> None:
        """Does nothing: the recording is already saved."""


class _CountListener(TextListener):
    """One line per case, and the current stage."""

    def __init__(self, job: "Counters", names: Sequence[str], on_stage: OnStage, on_done: OnStage) -> None:
        alone = job.folder.name
        self._labels = {name: f"[{n}/{len(names)}] {name or alone}" for n, name in enumerate(names, start=1)}
        self._on_done = on_done
        super().__init__(on_stage)

    def begin(self, planned: Sequence[PlannedCase[Any]], done: Sequence[Row], repaired_bytes: int) -> None:  # noqa: ARG002
        for row in done:
            assert isinstance(row, CountedRow)
            self._on_done(f"{self._labels[row.name]}: already counted; use --force to count it again")

    def start(self, planned: PlannedCase[Any]) -> None:
        assert isinstance(planned, _PlannedCount)
        self._case = self._labels[planned.name]

    def finish(self, row: Row) -> None:
        assert isinstance(row, CountedRow)
        kernels = (
            f"{count_noun(row.recording.kernels.height, 'kernel')} in {row.wall_s:.0f} s"
            if row.recording
            else row.reason
        )
        self._on_done(f"{self._labels[row.name]}: {kernels}")


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """How to count. `passes` is the number of forward passes per case; `choose_metrics` parses `metrics`."""

    folder: Path
    command: str
    force: bool = False
    passes: int = 1
    metrics: str = "few"

    def run(self, grid: Grid, on_stage: OnStage, on_done: Callable[[str], None]) -> "list[CountedCase]":
        """Return the cases in grid order. `on_done` receives one line per case."""
        from stepscope.explain.trace.counters import CountedCase

        metrics = choose_metrics(self.metrics)
        named = name_cases(grid, passes=self.passes)
        require_ncu()
        require_torch()
        self._check_folders(named)
        experiment = CountersExperiment(named=named, metrics=metrics)
        sweep = Sweep(experiment=experiment, folder=self.folder, command=self.command, fresh=self.force)
        rows = sweep.run(_CountListener(self, [one.name for one in named], on_stage, on_done))
        return [CountedCase(name=row.name, case=row.case, recording=row.recording, reason=row.reason) for row in rows]

    def _check_folders(self, named: Sequence[_Named]) -> None:
        """Check before anything runs. The directory of a grid may exist, with cases in it."""
        from stepscope.recording.store import is_recording

        if len(named) == 1:
            check_folder(self.folder, force=self.force, command=self.command)
            return
        if is_recording(self.folder) or (self.folder.exists() and not self.folder.is_dir()):
            raise StepscopeError(
                f"`{self.folder}` exists and cannot hold the {len(named)} recordings of a grid",
                hint="--out DIR",
            )
        for one in named:
            folder = self.folder / one.name
            if not is_recording(folder):
                check_folder(folder, force=self.force, command=self.command)


def name_cases(grid: Grid, *, passes: int) -> list[_Named]:
    """Return the checked cases of a grid, named after the settings with several values."""
    grid = _settle(grid)
    named: dict[Case, str] = {}
    for name, single in _points(grid):
        (case,) = single.cases()
        timing = msgspec.structs.replace(case.timing, steps=passes)
        named.setdefault(msgspec.structs.replace(case, timing=timing), name)
    for case in named:
        _check_case(case)
    if len(named) == 1:
        return [_Named("", case) for case in named]
    return [_Named(name, case) for case, name in named.items()]


def _settle(grid: Grid) -> Grid:
    """Return the grid with the defaults that are specific to counting."""
    if grid == Grid():
        grid = grid_from_flags(_DEFAULT)
    axes = dict(grid.axes)
    if "steps" in axes:
        raise StepscopeError(
            "`--steps` cannot be used with `--counters`",
            hint="use --record-steps 1 to set the number of counted passes",
        )
    return grid if "mode" in axes else grid.override(grid_from_flags({"mode": MODES[0]}))


def _points(grid: Grid) -> Iterator[tuple[str, Grid]]:
    """Return every point as a grid of its own. Duplicate names get a number."""
    axes = [[(name, value) for value in values] for name, values in grid.axes]
    arguments = [[(name, value) for value in values] for name, values in grid.arguments]
    varied = {name for name, values in (*grid.axes, *grid.arguments) if len(set(values)) > 1}
    taken: dict[str, int] = {}
    for chosen in itertools.product(*axes, *arguments):
        name = "_".join(f"{key}-{_as_folder(value)}" for key, value in chosen if key in varied)
        taken[name] = taken.get(name, 0) + 1
        pairs = tuple((key, (value,)) for key, value in chosen)
        single = Grid(axes=pairs[: len(axes)], arguments=pairs[len(axes) :])  # type: ignore[arg-type]
        yield name + (f"_{taken[name]}" if taken[name] > 1 else ""), single


def _as_folder(value: object) -> str:
    return re.sub(r"[^\w.+-]+", "-", str(value)).strip("-.")[:60]


def _check_case(case: Case) -> None:
    workload = case.workload
    if workload.mode not in MODES:
        raise StepscopeError(
            f"`--mode {workload.mode}` is not supported with `--counters`",
            detail="Nsight Compute takes 0.2 to 0.5 s per kernel, so only forward passes are counted",
            hint=f"use --mode {MODES[0]}, or record a trace: stepscope profile --mode {workload.mode}",
        )
    if isinstance(workload.model, ModelShape) and workload.model.num_layers > MOST_LAYERS:
        raise too_many_layers(workload.model.num_layers, "--num-layers 2")
    if workload.device == "cpu":
        raise no_gpu(workload.device)


def _is_of(recording: "Recording", planned: Planned, metrics: Sequence[str]) -> bool:
    manifest = recording.manifest
    return (
        manifest.case == planned.case
        and manifest.environment is not None
        and manifest.environment.identity == planned.environment.identity
        and manifest.versions.get(_MODEL_SOURCE) == planned.source
        and set(metrics) <= set(recording.counters["metric"])
    )


def _describe(
    recording: "Recording", planned: Planned, counted: NcuCounted, *, command: str, started: datetime
) -> "Recording":
    """Add what the CSV does not contain: the case, its environment, and the theoretical FLOPs of its operators."""
    versions = versions_of(planned.environment, planned.case.workload)
    if planned.source is not None:
        versions[_MODEL_SOURCE] = planned.source
    return describe_run(
        recording,
        planned,
        counted,
        file="",
        versions=versions,
        command=command,
        started=started.isoformat(timespec="seconds"),
        forward_flops=counted.forward_flops,
    )

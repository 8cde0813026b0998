"""`stepscope profile --counters`: hardware counters of forward passes, a case or a grid of them.

One case is a recording in the folder that was named; a grid is a folder with one recording a case, named after what
tells the cases apart. A recording appears when it is whole. So the folders are the only state: a grid goes on where it
stopped, and a case whose recording is there, of the same settings, versions and metrics, is not counted again.
"""

import gzip
import itertools
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import scratch_folder, writing
from stepscope.jobs.experiments.sweep import Planned, plan_cases
from stepscope.jobs.recorders.ncu import CaseRefusedError, choose_metrics, count_with_ncu, require_ncu
from stepscope.jobs.recorders.profile import check_folder
from stepscope.jobs.workers.process import Workers, require_torch
from stepscope.measure.targets.ncu import MOST_LAYERS, NcuCounted, no_gpu, too_many_layers
from stepscope.spec import Case, Grid, ModelShape, grid_from_flags

if TYPE_CHECKING:  # they load polars, which a bad flag need not wait for
    from stepscope.explain.trace.counters import CountedCase
    from stepscope.recording.store import Recording

OnStage = Callable[[str], None]
MODES = ("inference", "forward")
_DEFAULT = {"size": "small", "num_layers": "2", "context": "256", "attention": "sdpa"}
_MODEL_SOURCE = "model source"


class _Named(NamedTuple):
    """A case, and the recording's folder inside of the grid's; no name where it is the only one."""

    name: str
    case: Case


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """How to count. `passes` forward passes a case; `metrics` as `choose_metrics` reads them."""

    folder: Path
    command: str
    force: bool = False
    passes: int = 1
    metrics: str = "few"

    def run(self, grid: Grid, on_stage: OnStage, on_done: Callable[[str], None]) -> "list[CountedCase]":
        """The cases in the grid's order. What a user's model cannot do costs its case, if another case gets further;
        what the machine cannot do ends it. `on_done` hears of each case in a line."""
        from stepscope.explain.trace.counters import CountedCase

        metrics = choose_metrics(self.metrics)
        named = name_cases(grid, passes=self.passes)
        require_ncu()
        require_torch()
        self._check_folders(named)
        planned = _plan([one.case for one in named])
        kept = [self._find(one, plan, metrics) for one, plan in zip(named, planned, strict=True)]
        results: list[CountedCase] = []
        refusals: list[StepscopeError] = []
        for number, (one, plan, recording) in enumerate(zip(named, planned, kept, strict=True), start=1):
            label = f"[{number}/{len(named)}] {one.name or self.folder.name}"
            said, reason = "there already; --force counts it again", ""
            if recording is None:
                try:
                    recording, said = self._count(one, plan, metrics, partial(_tell, on_stage, label))
                except CaseRefusedError as error:
                    refusals.append(error)
                    said = reason = f"{error.message} {error.detail}".strip()
            on_done(f"{label}: {said}")
            results.append(CountedCase(name=one.name, case=plan.case, recording=recording, reason=reason))
        if len(refusals) == len(results):
            raise refusals[0]
        return results

    def _check_folders(self, named: Sequence[_Named]) -> None:
        """Before anything runs. A grid's folder may be there, with cases in it."""
        from stepscope.recording.store import is_recording

        if len(named) == 1:
            check_folder(self.folder, force=self.force, command=self.command)
            return
        if is_recording(self.folder) or (self.folder.exists() and not self.folder.is_dir()):
            raise StepscopeError(
                f"`{self.folder}` is there, and is no folder for the {len(named)} recordings of a grid",
                hint="another folder: --out FOLDER",
            )
        for one in named:
            folder = self.folder / one.name
            if not is_recording(folder):
                check_folder(folder, force=self.force, command=self.command)

    def _find(self, one: _Named, planned: Planned, metrics: Sequence[str]) -> "Recording | None":
        """The recording of a case of a grid, where it is there already."""
        from stepscope.recording.store import is_recording, load

        folder = self.folder / one.name
        if not one.name or self.force or not is_recording(folder):
            return None
        recording = load(folder)
        if _is_of(recording, planned, metrics):
            return recording
        raise StepscopeError(
            f"`{folder}` is a recording of something else",
            detail="its settings, versions or metrics are not those of now",
            hint="--force, or another folder: --out FOLDER",
        )

    def _count(
        self, one: _Named, planned: Planned, metrics: Sequence[str], on_stage: OnStage
    ) -> tuple["Recording", str]:
        """The recording, which is kept when this returns, and how it went in a few words."""
        from stepscope.recording.readers import ncu
        from stepscope.recording.store import save

        started = datetime.now(UTC)
        with scratch_folder() as scratch:
            csv, counted = count_with_ncu(planned.case, metrics=metrics, scratch=scratch, on_stage=on_stage)
            on_stage("reading the counters")
            recording = _describe(ncu.read(csv), planned, counted, command=self.command, started=started)
            save(recording, self.folder / one.name, raw=_compress(csv), force=self.force, command=self.command)
        seconds = (datetime.now(UTC) - started).total_seconds()
        return recording, f"{recording.kernels.height} kernels in {seconds:.0f} s"


def _tell(on_stage: OnStage, label: str, text: str) -> None:
    on_stage(f"{label}: {text}")


def name_cases(grid: Grid, *, passes: int) -> list[_Named]:
    """The cases of a grid, checked, with names made of the settings that have several values."""
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
    """The grid with what counting has other defaults for."""
    if grid == Grid():
        grid = grid_from_flags(_DEFAULT)
    axes = dict(grid.axes)
    if "steps" in axes:
        raise StepscopeError("`--steps` does nothing with `--counters`", hint="--record-steps 1 for the passes counted")
    return grid if "mode" in axes else grid.override(grid_from_flags({"mode": MODES[0]}))


def _points(grid: Grid) -> Iterator[tuple[str, Grid]]:
    """Every point as a grid of its own. Names that would be the same get a number."""
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
            f"mode `{workload.mode}` is too long to count",
            detail="Nsight Compute takes 0.2 to 0.5 s a kernel: counters are of forward passes, and training is traced",
            hint=f"--mode {MODES[0]}, or a trace: stepscope profile --mode {workload.mode}",
        )
    if isinstance(workload.model, ModelShape) and workload.model.num_layers > MOST_LAYERS:
        raise too_many_layers(workload.model.num_layers, "--num-layers 2")
    if workload.device == "cpu":
        raise no_gpu(workload.device)


def _plan(cases: Sequence[Case]) -> list[Planned]:
    with Workers() as workers:
        planned = plan_cases(cases, workers, None)
    for one in planned:
        if one.environment.device == "cpu":
            raise no_gpu(cases[0].workload.device)
    if len(planned) < len(cases):
        raise StepscopeError("two of these cases are the same here", hint="one value for --device")
    return planned


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
    """What the CSV cannot know: the case, where it ran, and what its operators are by the textbook."""
    environment = planned.environment
    versions = {
        name: value
        for name in ("python", "torch", "triton", "cuda", "driver", "stepscope")
        if (value := getattr(environment, name)) is not None
    }
    if planned.source is not None:
        versions[_MODEL_SOURCE] = planned.source
    return recording.with_manifest(
        file="",
        case=planned.case,
        environment=environment,
        device=environment.driver_name,
        versions=versions,
        command=command,
        started=started.isoformat(timespec="seconds"),
        parameters=counted.parameters,
        optimizer=counted.optimizer,
        forward_flops=counted.forward_flops,
        compiled=planned.case.workload.compile,
    )


def _compress(csv: Path) -> Path:
    """Nsight Compute's file as it came: most of its 300 columns are the device's properties, in every row again."""
    target = csv.with_name(csv.name + ".gz")
    with (
        writing(csv.parent, if_full="nothing was kept", hint="TMPDIR=FOLDER, on another disk"),
        csv.open("rb") as source,
        target.open("wb") as sink,
        gzip.GzipFile(filename="", fileobj=sink, mode="wb", mtime=0) as packed,
    ):
        shutil.copyfileobj(source, packed)
    return target

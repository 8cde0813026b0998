"""`stepscope report`: run the stages one by one and write everything about a workload to one page.

The page is written again after every stage, so that an interruption (Ctrl-C, a kill, a full disk) leaves a page of the
finished stages. Results are kept in a directory, and the same command resumes from there. A failed stage costs only its
own section; bad input is an error only if it shows before anything was measured.
"""

import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Protocol

import msgspec

from stepscope.errors import StepscopeError, nearest
from stepscope.explain.experiments.cases import brief, describe_case
from stepscope.explain.story.comparison.run_series import RunSeries
from stepscope.explain.story.sources import Materials
from stepscope.files import FullDiskError, check_target, write_atomically, writing
from stepscope.findings import STAGES, Missing, Report
from stepscope.jobs.experiments.sweep import Planned, look_at, place_cases, slug_of
from stepscope.jobs.recorders.recording_job import only_case
from stepscope.jobs.report import stages
from stepscope.jobs.report.data import State, check_data, open_data, write_state
from stepscope.jobs.report.stage import ReportStage, StageWork, UnavailableError
from stepscope.jobs.report.stages import other_precision
from stepscope.jobs.workers.process import InputRefusedError, Workers, require_torch
from stepscope.spec import Case, Grid, build_case, with_precision

DATA_FOLDER = Path("runs/report")
_INTERRUPTED = "the report was interrupted"
_NOT_YET = "not finished when this page was written"
_LONGEST_WHY = 400  # characters: errors of libraries can be very long


class Ending(Enum):
    """How a stage ended."""

    DONE = "done"
    REUSED = "reused"  # finished earlier
    FAILED = "failed"
    LEFT_OUT = "skipped"


class Watcher(Protocol):
    """Receives the progress of a report."""

    def plan(self, expected_s: Mapping[str, float]) -> None:
        """The stages that will run, and the expected seconds of each."""
        ...

    def start(self, stage: str) -> None: ...

    def doing(self, text: str) -> None: ...

    def finish(self, stage: str, ending: Ending, outcome: str) -> None: ...


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a report. `page` shows the finished stages, None if no page was written."""

    def __init__(self, page: Path | None, go_on: str) -> None:
        super().__init__()
        self.page = page
        self.go_on = go_on


@dataclass(frozen=True, kw_only=True)
class Made:
    """A finished report. `data` is the directory with its results. `report` is None if all stages failed and an
    existing page was kept."""

    report: Report | None
    data: Path
    num_done: int  # finished stages


# --- The page ---------------------------------------------------------------------------------------------------------


def check_page(path: Path, *, force: bool, inputs: Sequence[Path] = ()) -> None:
    """Raise unless `path` can be written: an earlier page is replaced, other files only with `force`, inputs never."""
    if path.is_dir():
        raise StepscopeError(f"`{path}` is a directory", hint=f"--out {path / 'report.html'}")
    if path.suffix.lower() != ".html":
        bare = path.with_suffix("")
        page = bare if bare.suffix.lower() == ".html" else path.with_suffix(".html")
        raise StepscopeError(
            f"unsupported file extension `{path.suffix or path.name}`: `{path}`",
            detail="expected a name that ends in .html",
            hint=f"--out {page}",
        )
    if path.exists() and any(one.exists() and one.samefile(path) for one in inputs):
        raise StepscopeError(f"`--out` would replace an input file: `{path}`", hint="--out FILE.html")
    check_target(path, force=force, flag="--out")


def tell_runs(runs: Sequence[Materials] | RunSeries, command: str = "") -> Report:
    """The report of one run, of two compared, or of many. `command` repeats a report of many."""
    from stepscope.explain.story import tell, tell_both, tell_many

    if isinstance(runs, RunSeries):
        return tell_many(runs, command)
    return tell(runs[0]) if len(runs) == 1 else tell_both(*runs)


def write_page(path: Path, runs: Sequence[Materials] | RunSeries, command: str = "") -> Report:
    """Write the page of these runs. It is written completely or not at all."""
    from stepscope.render.site import write_site

    report = tell_runs(runs, command)
    content = write_site(report).encode()
    with writing(path, if_full="nothing was written; free some space", hint="--out FILE.html"):
        write_atomically(path, content)
    return report


# --- The stages -------------------------------------------------------------------------------------------------------


def parse_stages(text: str) -> tuple[str, ...]:
    """The stages that `--without` names."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in STAGES:
            close = nearest(name, STAGES)
            raise StepscopeError(
                f"`--without`: unknown stage `{name}`",
                detail=f"expected one or more of {', '.join(STAGES)}",
                hint=f"--without {close}" if close else "",
            )
    if len(names) == len(STAGES):
        raise StepscopeError("`--without` leaves out every stage", hint="--without precision,attention")
    return names


def without_flags(words: Sequence[str], *flags: str) -> str:
    """A command without some of its flags, and without the value of `--without`."""
    kept: list[str] = []
    skip = False
    for word in words:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in flags:
            skip = name == "--without" and not equals
        else:
            kept.append(word)
    return shlex.join(kept)


@dataclass(frozen=True, kw_only=True)
class ReportJob:
    """A report that measures. `words` is the command line; `data` is None for the default directory. With `optimise`,
    it also tries to make the step faster."""

    page: Path
    words: Sequence[str]
    data: Path | None = None
    fresh: bool = False
    without: tuple[str, ...] = ()
    optimise: bool = False

    @property
    def go_on(self) -> str:
        """The command that resumes this report."""
        return without_flags(self.words, "--fresh")

    def _write_nothing(self, case: Case) -> Path | None:
        """Write an empty page unless there is one already."""
        if self.page.exists():
            return None
        missing = {stage.name: Missing(what=stage.what, why=_INTERRUPTED, command=self.go_on) for stage in stages.ALL}
        write_page(
            self.page,
            [Materials(name=describe_case(case), command=shlex.join(self.words), absent=missing, is_partial=True)],
        )
        return self.page

    def run(self, grid: Grid, watcher: Watcher) -> Made:
        """Run all stages. An empty grid means the default case."""
        require_torch()
        if self.data is not None:
            check_data(self.data)
        cases = _choose_cases(grid)
        with Workers() as workers:
            workers.start()
            try:
                watcher.doing("checking the device")
                planned, other = _plan(cases, workers)
            except KeyboardInterrupt:
                raise Interrupted(self._write_nothing(cases("cpu")), self.go_on) from None
            folder = self.data or DATA_FOLDER / slug_of(planned)
            command = shlex.join(self.words)
            with open_data(folder, planned, command=command) as state:
                work = StageWork(
                    folder=folder,
                    command=command,
                    planned=planned,
                    other=other,
                    workers=workers,
                    fresh=self.fresh,
                    on_stage=watcher.doing,
                )
                making = _Making(job=self, work=work, watcher=watcher, state=state)
                return making.run()


@dataclass(kw_only=True)
class _Making:
    """A report in progress: the results so far, and the waiting stages."""

    job: ReportJob
    work: StageWork
    watcher: Watcher
    state: State

    def run(self) -> Made:
        self._materials = Materials(name=describe_case(self.work.planned.case), command=shlex.join(self.job.words))
        self._absent: dict[str, Missing] = {}
        self._done: list[str] = []
        self._has_written = self._has_failed = False
        try:
            self._waiting = self._find_waiting()
            self.watcher.plan({stage.name: stage.expected_s(self.work) for stage in self._waiting})
            while self._waiting:
                self._run_one(self._waiting[0])
            self.watcher.doing("writing the page")
            report = self._write() if self._may_write() else None
        except KeyboardInterrupt:
            written = self._write_interrupted()
            raise Interrupted(self.job.page if written else None, self.job.go_on) from None
        return Made(report=report, data=self.work.folder, num_done=len(self._done))

    def _find_waiting(self) -> list[ReportStage]:
        """Load finished stages first, so that an interrupted page has all of them, and return the others."""
        waiting: list[ReportStage] = []
        chosen = [*stages.ALL, *(one for one in stages.ON_REQUEST if self._is_requested(one))]
        for place, stage in enumerate(chosen):
            self._waiting = [*waiting, *chosen[place:]]
            if stage.name in self.job.without:
                self._leave_out(stage, "skipped with --without", without_flags(self.job.words, "--without", "--fresh"))
            elif not self._reuse(stage):
                waiting.append(stage)
        return waiting

    def _is_requested(self, stage: ReportStage) -> bool:
        """Asked for now, or in an earlier run of the report that is being resumed."""
        return self.job.optimise or (stage.name in self.state.done and not self.job.fresh)

    def _leave_out(self, stage: ReportStage, why: str, command: str) -> None:
        self._absent[stage.name] = Missing(what=stage.what, why=why, command=command)
        self.watcher.finish(stage.name, Ending.LEFT_OUT, why)

    def _reuse(self, stage: ReportStage) -> bool:
        """Load a finished stage. Only the first key must match: a stage may hold more results than needed now."""
        keys = self.state.done.get(stage.name, ())
        if self.job.fresh or keys[:1] != stage.keys(self.work)[:1]:
            return False
        try:
            self._materials = stage.load(self.work.folder, keys, self._materials)
        except StepscopeError:  # gone or damaged: run again
            return False
        self._done.append(stage.name)
        self.watcher.finish(stage.name, Ending.REUSED, stage.tell(self._materials))
        return True

    def _run_one(self, stage: ReportStage) -> None:
        self.watcher.start(stage.name)
        try:
            self._materials, keys = stage.run(self.work, self._materials)
            self._keep(stage, keys)
        except UnavailableError as error:
            self._leave_out(stage, error.message, error.hint or f"stepscope {stage.name} --help")
            with suppress(StepscopeError):  # only a note in the directory, not worth losing the page
                self._note()
        except FullDiskError:  # not a result of this stage: the others could not be kept either
            raise
        except StepscopeError as error:
            if isinstance(error, InputRefusedError) and not self._done and not self._has_failed:
                raise
            self._fail(stage, error)
        else:
            self._done.append(stage.name)
            self.watcher.finish(stage.name, Ending.DONE, stage.tell(self._materials))
        self._waiting.pop(0)
        if self._waiting and self._may_write():
            self.watcher.doing("writing the page")
            self._write()

    def _fail(self, stage: ReportStage, error: StepscopeError) -> None:
        self._has_failed = True
        why = ": ".join(part for part in (error.message, error.detail) if part)
        command = error.hint if error.hint.startswith("stepscope ") else stage.command(self.work)
        self._absent[stage.name] = Missing(what=stage.what, why=textwrap.shorten(why, _LONGEST_WHY), command=command)
        with suppress(StepscopeError):  # only a note in the directory, not worth losing the page
            self._note()
        self.watcher.finish(stage.name, Ending.FAILED, brief(why))

    def _keep(self, stage: ReportStage, keys: tuple[str, ...]) -> None:
        self.state = msgspec.structs.replace(self.state, done=self.state.done | {stage.name: keys})
        self._note()

    def _note(self) -> None:
        self.state = msgspec.structs.replace(self.state, absent=dict(self._absent))
        write_state(self.work.folder, self.state)

    def _write(self, why: str = _NOT_YET) -> Report:
        waiting = {stage.name: Missing(what=stage.what, why=why, command=self.job.go_on) for stage in self._waiting}
        materials = replace(self._materials, absent=self._absent | waiting, is_partial=bool(waiting))
        report = write_page(self.job.page, [materials])
        self._has_written = True
        return report

    def _write_interrupted(self) -> bool:
        if self._may_write():
            self._write(_INTERRUPTED)
        return self._has_written

    def _may_write(self) -> bool:
        """Never replace an older page with an empty one."""
        return bool(self._done) or self._has_written or not self.job.page.exists()


def _choose_cases(grid: Grid) -> Callable[[str], Case]:
    """The single case of the settings, for a device."""
    if grid != Grid():
        case = only_case(grid)
        return lambda _: case
    return lambda device: build_case(
        {"size": "nano", "context": 128} if device == "cpu" else {"size": "small", "context": 256}
    )


def _plan(choose: Callable[[str], Case], workers: Workers) -> tuple[Planned, Planned]:
    """The case, and the same in the other common precision. The device is checked once for all stages."""
    first = choose("cpu")
    answer = look_at([first, _in_other_precision(first)], workers, None)
    case = choose(answer.environment.device)
    planned, other = place_cases((case, _in_other_precision(case)), answer)
    return planned, other


def _in_other_precision(case: Case) -> Case:
    precision = other_precision(case.workload.precision)
    return msgspec.structs.replace(case, workload=with_precision(case.workload, precision))

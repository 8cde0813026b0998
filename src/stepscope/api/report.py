"""`stepscope.report`: an HTML page about one run, or about several runs compared."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import get_args

from stepscope.api.arguments import require_choices
from stepscope.api.display import StrPath, write_frame
from stepscope.api.measure import make_grid, name_command
from stepscope.api.run import Run
from stepscope.api.series_inputs import Order, read_sources
from stepscope.errors import StepscopeError
from stepscope.findings import STAGES, Report
from stepscope.jobs.report.run import Ending, ReportJob, Watcher, check_page, tell_runs, write_page
from stepscope.jobs.workers.process import OnStage
from stepscope.spec import Grid, Workload

Source = Run | StrPath


class NothingMeasuredError(StepscopeError):
    """Every stage of a report failed. An existing page is unchanged."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ReportPage:
    """A report as one HTML page. `report` is its content as data: a sentence, facts, advice and sections. `path` is the
    file, or None if it was not written. `data` is the directory with the measurements."""

    report: Report
    path: Path | None = None
    data: Path | None = None
    num_done: int | None = None  # stages with results, if the report measured

    @property
    def html(self) -> str:
        from stepscope.render.site import write_site

        return write_site(self.report)

    def export(self, folder: StrPath) -> tuple[Path, ...]:
        """Write the figures and tables to files, for a paper. Overwrites only an earlier export."""
        from stepscope.render.export import check_folder, export

        check_folder(Path(folder))
        return export(self.report, Path(folder))

    @property
    def summary(self) -> str:
        """The page in five lines: headline, step time, findings, measurement quality, and its path if it has one."""
        from stepscope.render.terminal import summarize_report

        return "\n".join((*summarize_report(self.report), *([str(self.path)] if self.path else [])))

    def __str__(self) -> str:
        return self.summary

    def __repr__(self) -> str:
        where = f" in {str(self.path)!r}" if self.path else ""
        return f"<ReportPage {self.report.title!r}{where}>"

    def _repr_html_(self) -> str:
        return write_frame(self.html)


def report(
    source: Source | Sequence[Source] | Workload | Grid,
    out: StrPath | None = None,
    *,
    force: bool = False,
    cache: bool = True,
    baseline: StrPath | None = None,
    order: Order = "given",
    data: StrPath | None = None,
    without: Sequence[str] = (),
    optimise: bool = False,
    fresh: bool = False,
    progress: Watcher | OnStage | None = None,
    command: str | Sequence[str] = "",
) -> ReportPage:
    """Write an HTML page with everything known about a run.

    `source` is a run, or a file that `stepscope report` reads. Several files of one run make one page; two runs are
    compared in depth, and more as a table and a trend: with the first one unless `baseline` names another, in the given
    `order` or by the time they were recorded.

    A `Workload` is measured first: `bench`, `profile`, `memory`, `precision`, `attention` and `plan` run in this order,
    except those in `without`; with `optimise`, changes that may make the step faster are tried as well.
    Results are saved in `data` (default: `runs/report/CASE`), and the same call resumes from there unless `fresh` is
    set.

    `out` is an .html file, required if `source` is a workload. `force` overwrites a file that stepscope did not write.
    """
    words = ["stepscope", "report"] if not command else shlex.split(command) if isinstance(command, str) else command
    if isinstance(source, Workload | Grid):
        return _measure(
            source,
            out,
            force=force,
            data=data,
            without=without,
            optimise=optimise,
            fresh=fresh,
            progress=progress,
            words=words,
        )
    if not isinstance(source, Run | str | PathLike | Sequence):
        raise ValueError(f"source must be a run, a file or a workload, got {type(source).__name__}")
    several = [source] if isinstance(source, Run | str | PathLike) else list(source)
    if not several:
        raise ValueError("expected at least one run or file, got none")
    for one in several:
        if not isinstance(one, Run | str | PathLike):
            raise ValueError(f"expected a run or a file, got {type(one).__name__}")
    sources = [one if isinstance(one, Run) else Path(one) for one in several]
    path = None if out is None else Path(out)
    if path is not None:
        check_page(path, force=force, inputs=[one for one in sources if isinstance(one, Path)])
    files = [str(path) for one in sources for path in (one.files if isinstance(one, Run) else [one])]
    typed = shlex.join(words if command else [*words, *files])
    require_choices("order", [order], get_args(Order))
    chosen = None if baseline is None else Path(baseline)
    runs = read_sources(sources, command=typed, cached=cache, baseline=chosen, order=order)
    return ReportPage(report=tell_runs(runs, typed) if path is None else write_page(path, runs, typed), path=path)


def _measure(
    source: Workload | Grid,
    out: StrPath | None,
    *,
    force: bool,
    data: StrPath | None,
    without: Sequence[str],
    optimise: bool,
    fresh: bool,
    progress: Watcher | OnStage | None,
    words: Sequence[str],
) -> ReportPage:
    if out is None:
        raise ValueError("out is required to measure a workload, for example out='report.html'")
    require_choices("without", without, tuple(STAGES))
    if set(without) == set(STAGES):
        raise ValueError(f"without excludes every stage; keep at least one of {', '.join(STAGES)}")
    path, grid = Path(out), make_grid(source)
    check_page(path, force=force)
    job = ReportJob(
        page=path,
        words=words if not grid.listed else shlex.split(name_command("report", grid)),
        data=None if data is None else Path(data),
        fresh=fresh,
        without=tuple(without),
        optimise=optimise,
    )
    made = job.run(grid, _watch(progress))
    if made.report is None:
        raise NothingMeasuredError(f"every stage failed; `{path}` is unchanged")
    return ReportPage(report=made.report, path=path, data=made.data, num_done=made.num_done)


class _TextWatcher:
    """Passes progress to a function, one line of text at a time."""

    def __init__(self, tell: OnStage) -> None:
        self._tell = tell
        self._stage = ""

    def plan(self, expected_s: Mapping[str, float]) -> None:
        pass

    def start(self, stage: str) -> None:
        self._stage = f"{stage}: "

    def doing(self, text: str) -> None:
        self._tell(self._stage + text)

    def finish(self, stage: str, ending: Ending, outcome: str) -> None:
        self._tell(f"{stage}: {ending.value}, {outcome}")
        self._stage = ""


def _watch(progress: Watcher | OnStage | None) -> Watcher:
    if progress is None:
        return _TextWatcher(lambda _: None)
    return _TextWatcher(progress) if callable(progress) else progress

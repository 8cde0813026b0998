"""What a stage of a report is: its input, its results and where they are kept."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.explain.commands import write_command
from stepscope.explain.story.sources import Materials
from stepscope.findings import STAGES, STAGES_ON_REQUEST
from stepscope.jobs.experiments.sweep import RESULTS_NAME, C, Experiment, Planned, Sweep
from stepscope.jobs.workers.process import Workers
from stepscope.recording.rows.bench import Retry
from stepscope.recording.rows.results_file import R, read_rows


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """The input of a stage."""

    folder: Path
    command: str
    planned: Planned
    other: Planned  # the same in the other common precision
    workers: Workers
    fresh: bool
    on_stage: Callable[[str], None]

    @property
    def step_s(self) -> float:
        """The expected step time."""
        timing = self.planned.case.timing
        return (self.planned.expected_s - 1) / (timing.warmup + timing.steps)


class UnavailableError(StepscopeError):
    """A stage does not apply to this workload. The hint is a command that tells more."""


class ReportStage(ABC):
    """One stage. `findings.STAGES` has what it adds to the page, under its name."""

    name: str

    @property
    def what(self) -> str:
        return (STAGES | STAGES_ON_REQUEST)[self.name].makes

    def keys(self, work: StageWork) -> tuple[str, ...]:
        """The keys of its results; the first identifies the case."""
        return (work.planned.key,)

    def command(self, work: StageWork) -> str:
        """The command that runs only this stage."""
        return write_command(self.name, work.planned.case.workload)

    def expected_s(self, work: StageWork) -> float:
        return 5 + 20 * work.step_s

    @abstractmethod
    def load(self, folder: Path, keys: Sequence[str], materials: Materials, /) -> Materials:
        """Add kept results. Raises StepscopeError if they are gone or damaged."""

    @abstractmethod
    def run(self, work: StageWork, materials: Materials) -> tuple[Materials, tuple[str, ...]]:
        """Run the stage. Return the materials with its results, and their keys. Raises StepscopeError on failure."""

    @abstractmethod
    def tell(self, materials: Materials) -> str:
        """The result in a few words."""

    def sweep(self, work: StageWork, experiment: Experiment[C, R]) -> Sweep[C, R]:
        folder = work.folder / self.name
        return Sweep(experiment=experiment, folder=folder, command=work.command, retry=Retry.FAILED, fresh=work.fresh)

    def read_rows(self, folder: Path, kind: type[R], keys: Sequence[str]) -> tuple[R, ...]:
        path = folder / self.name / RESULTS_NAME
        rows = {row.key: row for row in read_rows(path, kind)[0]}
        if any(key not in rows for key in keys):
            raise StepscopeError(f"`{path}` no longer has the rows of this case")
        return tuple(rows[key] for key in keys)

"""`optimise_workload`: what `stepscope optimise` does, from Python. For your own model object there is
`stepscope.optimise`, which returns a step to train with."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.api.arguments import as_folder, require_choice
from stepscope.api.display import DataTable, OptimisePart, StrPath, encode_document, write_table
from stepscope.api.measure import make_grid_of_one, name_command
from stepscope.explain.experiments.cases import describe_case
from stepscope.explain.experiments.optimise_tables import make_table, optimise_page, say_result
from stepscope.jobs.optimise import OnChange, OptimisationJob
from stepscope.jobs.workers.process import OnStage
from stepscope.recording.rows.optimisation import MeasuredChange, OptimiseReport, read_optimisation
from stepscope.spec import Grid, Workload

if TYPE_CHECKING:
    from stepscope.findings import Page


class OptimiseResult:
    """The result of `optimise_workload`: the changes that were tried, and what each gained. `report` is the document
    that `to_json` returns, and `path` its file."""

    def __init__(self, report: OptimiseReport, path: Path | None = None) -> None:
        self.report, self.path = report, path

    @classmethod
    def read(cls, path: StrPath) -> "OptimiseResult":
        """Read a file written by `stepscope optimise`."""
        return cls(read_optimisation(Path(path)), Path(path))

    @property
    def changes(self) -> tuple[MeasuredChange, ...]:
        return self.report.changes

    @property
    def speedup(self) -> float | None:
        """The step time before, divided by that with all changes that were kept."""
        return self.report.speedup

    def table(self, name: OptimisePart = "changes") -> DataTable:
        """The changes with their gains, or the check of their gradients."""
        require_choice("table", name, OptimisePart)
        return DataTable.of(make_table(self.report, name))

    def page(self) -> "Page":
        return optimise_page(self.report)

    def to_json(self) -> str:
        """The document that `stepscope optimise --format json` prints."""
        return encode_document(self.report)

    def to_dict(self) -> dict[str, Any]:
        return msgspec.json.decode(self.to_json(), type=dict[str, Any])

    def __str__(self) -> str:
        return say_result(self.report)

    def __repr__(self) -> str:
        return f"<OptimiseResult {describe_case(self.report.case)!r}: {len(self.report.kept)} changes kept>"

    def _repr_html_(self) -> str:
        return "".join(write_table(table) for table in self.page().tables)


def optimise_workload(
    workload: Workload | Grid | None = None,
    *,
    out: StrPath | None = None,
    compiler: str = "inductor",
    progress: OnStage | None = None,
    on_change: OnChange = lambda _report, _change: None,
    command: str = "",
) -> OptimiseResult:
    """Try changes to the training step of a workload, one after another, and keep those that are right and faster.

    `out` is a directory for the result. `compiler` is a backend of `torch.compile`. `on_change` gets the result so far
    and the change that was just measured.
    """
    wanted = make_grid_of_one(workload)
    job = OptimisationJob(
        command=command or name_command("optimise", wanted),
        folder=None if out is None else as_folder("out", out),
        compiler=compiler,
    )
    return OptimiseResult(*job.run(wanted, progress or (lambda _: None), on_change))

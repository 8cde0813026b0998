"""A memory sweep: what one case costs the others."""

from pathlib import Path
from typing import Any, cast

from stepscope.jobs.experiments.memory_sweep import MemoryExperiment
from stepscope.jobs.experiments.sweep import Planned, Sweep
from stepscope.jobs.workers.messages import MemoryRecorded
from stepscope.jobs.workers.process import Ended, Workers
from stepscope.recording.memory.labels import SNAPSHOT_NAME, MemoryRun
from tests.unit.jobs.test_attention_job import Silent
from tests.unit.rows import row as make_row


class LeavesASnapshot:
    """Replaces the workers: reports success and writes these bytes as its snapshot."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def run(self, request: Any, **_: Any) -> Ended:
        (Path(request.folder) / SNAPSHOT_NAME).write_bytes(self._content)
        run = MemoryRun(step_ns=(1,), recorded_step_ns=(1,), watched_step_ns=(1,), parameters=1)
        return Ended(answer=MemoryRecorded(run=run), log=b"")


def test_unreadable_snapshot_costs_only_its_own_case(tmp_path: Path) -> None:
    row = make_row()
    planned = Planned(case=row.case, environment=row.environment, source=None)
    sweep = Sweep(experiment=MemoryExperiment(), folder=tmp_path, command="stepscope memory")
    workers = cast(Workers, LeavesASnapshot(b"\x80\x04."))
    (kept,) = sweep.run_planned([planned], workers, Silent())
    assert kept.status == "error"
    assert kept.summary is None
    assert not (tmp_path / "recordings").exists()

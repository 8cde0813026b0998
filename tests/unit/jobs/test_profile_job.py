"""The timings of a worker, as a recording keeps them."""

from pathlib import Path

import pytest

from stepscope.jobs.experiments.sweep import Planned
from stepscope.jobs.recorders.recording_job import describe_recording
from stepscope.recording import store
from stepscope.recording.rows.bench import RecordedRun
from stepscope.recording.store import Manifest, Overhead, Recording
from tests.unit.rows import row


def described(step_ns: tuple[int, ...], recorded_ns: tuple[int, ...]) -> Recording:
    one = row()
    run = RecordedRun(
        clock="host",
        phases_ns={},
        step_ns=step_ns,
        recorded_step_ns=recorded_ns,
        annotated_step_ns=(),
        parameters=1,
    )
    planned = Planned(case=one.case, environment=one.environment, source=None)
    recording = Recording(manifest=Manifest(source="pytorch profiler"))
    return describe_recording(recording, planned=planned, run=run, command="", started="")


@pytest.mark.parametrize(
    ("step_ns", "recorded_ns", "overhead"),
    [
        ((5, 7), (9,), Overhead(plain_ns=6, recorded_ns=9)),
        ((5,), (0,), Overhead(plain_ns=5)),
        ((), (9,), None),
        ((0, 0), (9,), None),
    ],
)
def test_recording_with_any_timings_can_be_read_again(
    tmp_path: Path, step_ns: tuple[int, ...], recorded_ns: tuple[int, ...], overhead: Overhead | None
) -> None:
    store.save(described(step_ns, recorded_ns), tmp_path / "kept")
    assert store.load(tmp_path / "kept").manifest.overhead == overhead

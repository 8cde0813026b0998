"""What a worker measured, as a recording keeps it."""

from pathlib import Path

import pytest

from stepscope.explain.trace.attribution import attribute_kernels
from stepscope.jobs.experiments.sweep import Planned
from stepscope.jobs.recorders.recording_job import describe_recording, read_traces
from stepscope.recording import store
from stepscope.recording.rows.bench import RAW_TRACE_NAME, RecordedRun
from stepscope.recording.store import Manifest, Overhead, Recording
from tests.unit.kineto_files import replayed_code, write_trace
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


def test_calls_of_compiled_code_are_kept_for_replays(tmp_path: Path) -> None:
    write_trace(tmp_path / RAW_TRACE_NAME, replayed_code(tmp_path))
    kernels = attribute_kernels(read_traces(tmp_path)).sort("start_ns")
    assert kernels["module"].to_list() == ["embedding", "head"]

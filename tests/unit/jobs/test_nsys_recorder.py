"""Recording under Nsight Systems, with a fake `nsys` that is as strict about its arguments as the real one."""

import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from stepscope.errors import StepscopeError
from stepscope.jobs.recorders import nsight_systems as recorder
from stepscope.measure.targets import TargetFailed, answer_path
from stepscope.measure.targets.nsys import NsysRecorded, NsysRequest
from stepscope.recording import store
from stepscope.recording.readers import nsys
from stepscope.recording.rows.bench import RecordedRun
from stepscope.spec import Case, build_case
from tests.unit.nsys_files import StandIn, training_step
from tests.unit.rows import ENVIRONMENT

CASE = build_case({"size": "nano", "device": "cuda:0"})
RUN = RecordedRun(
    clock="cuda events",
    phases_ns={"forward": (5,)},
    step_ns=(10,),
    recorded_step_ns=(),
    annotated_step_ns=(12,),
    parameters=1000,
)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    made = StandIn(folder, training_step().write(tmp_path / "made before.sqlite"))
    made.set(answer=msgspec.json.encode(NsysRecorded(run=RUN, environment=ENVIRONMENT)).decode())
    return made


def record(out: Path, case: Case = CASE, **more: object) -> recorder.NsysRun:
    return recorder.record_with_nsys(case, out_folder=out, **more)  # type: ignore[arg-type]


def test_case_is_recorded_and_exported(stand_in: StandIn, tmp_path: Path) -> None:
    stages: list[str] = []
    out = tmp_path / "100%here"
    run = record(out, functions=("my:function",), record_steps=2, on_stage=stages.append)
    assert run.recorded == NsysRecorded(run=RUN, environment=ENVIRONMENT)
    assert run.report == out / "report.nsys-rep"
    assert run.report.read_bytes() == b"report"
    assert nsys.read(run.exported).kernels.height == 2
    assert stages == ["recording under nsys", "exporting the report"]
    assert sorted(one.name for one in out.iterdir()) == ["report.nsys-rep", "report.sqlite", "request.json"]
    request = msgspec.json.decode((out / "request.json").read_bytes(), type=NsysRequest)
    assert request == NsysRequest(case=CASE, functions=("my:function",), record_steps=2)


def test_command_is_the_one_that_was_run(stand_in: StandIn, tmp_path: Path) -> None:
    run = record(tmp_path / "out")
    (_, given, rest), (verb, how, _) = stand_in.calls()
    assert given == {
        "--output": str(tmp_path / "out" / "report"),
        "--force-overwrite": "true",
        "--trace": "cuda,nvtx",
        "--cuda-graph-trace": "node",
        "--sample": "none",
        "--cpuctxsw": "none",
        "--capture-range": "cudaProfilerApi",
        "--capture-range-end": "stop",
        "--export": "none",
    }
    assert rest[0] == sys.executable
    assert (verb, how["--type"]) == ("export", "sqlite")
    assert shlex.split(run.typed)[1:] == list(run.command)[1:]
    (tmp_path / "out" / "report.nsys-rep").unlink()
    subprocess.run(run.command, check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "out" / "report.nsys-rep").exists()


@pytest.mark.parametrize(
    ("pytorch", "emits"),
    [
        (None, True),
        ("functions-trace", True),
        ("autograd-nvtx", False),
        ("autograd-shapes-nvtx,functions-trace", False),
    ],
)
def test_operators_are_emitted_once(stand_in: StandIn, tmp_path: Path, pytorch: str | None, emits: bool) -> None:
    record(tmp_path / "out", pytorch=pytorch, python_backtrace=True)
    given = stand_in.calls()[0][1]
    assert given.get("--pytorch") == pytorch
    assert (given["--python-backtrace"], given["--cudabacktrace"], given["--sample"]) == (
        "cuda",
        "kernel:0",
        "process-tree",
    )
    request = msgspec.json.decode((tmp_path / "out" / "request.json").read_bytes(), type=NsysRequest)
    assert request.emit_operators is emits


def test_unsupported_option_raises_before_nsys_runs(stand_in: StandIn, tmp_path: Path) -> None:
    with pytest.raises(StepscopeError, match="autograd-everything"):
        record(tmp_path / "out", pytorch="autograd-everything")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b'{"functions": ["\xff"]}', b'{"x":' + b"[" * 100_000])
def test_directory_with_a_damaged_request_is_not_overwritten(stand_in: StandIn, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "request.json").write_bytes(content)
    with pytest.raises(StepscopeError, match=r"request\.json"):
        record(tmp_path / "out")


def test_older_report_is_not_mistaken_for_the_new_one(stand_in: StandIn, tmp_path: Path) -> None:
    record(tmp_path / "out")
    stand_in.set(writes_nothing=True)
    with pytest.raises(StepscopeError, match="nsys wrote no report"):
        record(tmp_path / "out")


def test_missing_importer_is_distinguished_from_a_missing_report(stand_in: StandIn, tmp_path: Path) -> None:
    stand_in.set(ending=".qdstrm")
    with pytest.raises(StepscopeError, match="did not convert it") as raised:
        record(tmp_path / "out")
    assert raised.value.hint.endswith("QdstrmImporter --input-file report.qdstrm")


def test_missing_nsys_says_how_to_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StepscopeError, match="`nsys` is not on the PATH") as raised:
        record(tmp_path / "out")
    assert "stepscope profile" in raised.value.hint
    assert not (tmp_path / "out").exists()


def test_error_of_the_program_is_reported(stand_in: StandIn, tmp_path: Path) -> None:
    refused = TargetFailed(message="no device `cuda:7`", detail="torch sees 1", hint="stepscope doctor", bad_input=True)
    stand_in.set(answer=msgspec.json.encode(refused).decode(), code=2)
    with pytest.raises(StepscopeError, match="no device `cuda:7`") as raised:
        record(tmp_path / "out")
    assert raised.value.hint == "stepscope doctor"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"answer": None, "code": 3}, "nsys exited with status 3, before the case ran"),
        ({"answer": None}, "nsys exited with status 0, before the case ran"),
        ({"answer": "{"}, "nsys exited with status 0, before the case ran"),
        ({"code": 4}, "nsys exited with status 4"),
        ({"export_fails": True}, "nsys failed to export"),
    ],
)
def test_failure_of_nsys_has_its_own_message(
    stand_in: StandIn, tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    stand_in.set(**settings)
    with pytest.raises(StepscopeError) as raised:
        record(tmp_path / "out")
    assert raised.value.message.partition(": it")[0].partition(" `")[0] == message
    assert "Generated: a report" in raised.value.detail or "the report is damaged" in raised.value.detail


def test_ctrl_c_ends_nsys_and_what_it_started(stand_in: StandIn, tmp_path: Path) -> None:
    stand_in.set(hangs=True)
    hanging = tmp_path / "bin" / "hanging.txt"

    def interrupt() -> None:
        while not hanging.exists():
            time.sleep(0.02)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "out")
    assert (tmp_path / "bin" / "interrupted.txt").exists(), "it was interrupted, not killed"
    assert not (tmp_path / "out" / "report.nsys-rep").exists()


def test_report_is_read_through_nsys(stand_in: StandIn, tmp_path: Path) -> None:
    (tmp_path / "run.nsys-rep").write_bytes(b"report")
    recording = nsys.read(tmp_path / "run.nsys-rep")
    assert recording.kernels.height == 2
    assert recording.manifest.file == "run.nsys-rep"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["bin", "made before.sqlite", "run.nsys-rep"]


def test_report_can_be_saved_as_a_recording(stand_in: StandIn, tmp_path: Path) -> None:
    run = record(tmp_path / "out")
    store.save(nsys.read(run.exported), tmp_path / "saved", raw=run.report)
    assert (tmp_path / "saved" / "raw.nsys-rep").read_bytes() == b"report"
    assert store.load(tmp_path / "saved").ops.height == 9


def test_program_answers_an_unreadable_request(tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    path.write_text("{}")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "stepscope.measure.targets.nsys", str(path)], capture_output=True, check=False
    )
    assert done.returncode == 1
    answer = msgspec.json.decode(answer_path(path).read_bytes(), type=NsysRecorded | TargetFailed)
    assert isinstance(answer, TargetFailed)
    assert "case" in answer.message


def test_foreign_directory_raises_and_is_not_touched(stand_in: StandIn, tmp_path: Path) -> None:
    out = tmp_path / "run-nsys"
    out.mkdir()
    for name in ("report.nsys-rep", "report.sqlite", "request.json"):
        (out / name).write_text("theirs")
    with pytest.raises(StepscopeError, match="did not create"):
        record(out)
    assert {path.name: path.read_text() for path in out.iterdir()} == dict.fromkeys(
        ("report.nsys-rep", "report.sqlite", "request.json"), "theirs"
    )

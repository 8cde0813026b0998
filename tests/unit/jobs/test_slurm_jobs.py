"""Jobs on a cluster, as far as testable without one: resources, shares, submissions and results."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import StepscopeError
from stepscope.jobs.slurm import watch as watching
from stepscope.jobs.slurm.executor import require_slurm
from stepscope.jobs.slurm.resources import Resources, parse_mem, parse_sbatch, parse_time_min
from stepscope.jobs.slurm.row_ledger import RowLedger, forget_killed, read_own, seed
from stepscope.jobs.slurm.submissions import (
    Job,
    RankWork,
    ShareWork,
    TaskOutcome,
    keep,
    next_folder,
    outcome_path,
    read_submissions,
    write_whole,
)
from stepscope.jobs.slurm.sweep_jobs import deal
from stepscope.jobs.slurm.watch import JobState, JobWatch, parse_states, raise_failures
from stepscope.recording.rows.bench import BenchRow, Retry
from stepscope.recording.rows.results_file import ResultsFile
from stepscope.spec import build_case, grid_from_flags
from tests.unit.rows import row

CASES = grid_from_flags({"size": "nano", "context": "8,16,24,32,40"}).cases()


# --- Resources ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("90:00", 90), ("0:30", 1), ("1:30:00", 90), ("1-0", 1440), ("1-12:30", 2190), ("1-12:30:01", 2191)],
)
def test_times_are_parsed_like_slurm(text: str, minutes: int) -> None:
    assert parse_time_min(text) == minutes


@pytest.mark.parametrize("text", ["", "soon", "1:2:3:4", "0", "-5", "1-", "1.5"])
def test_invalid_times_raise(text: str) -> None:
    with pytest.raises(StepscopeError, match="--time"):
        parse_time_min(text)


def test_other_sbatch_options_pass_and_ours_raise() -> None:
    assert parse_sbatch(["exclusive", "--gres=gpu:a100:2"]) == (("exclusive", ""), ("gres", "gpu:a100:2"))
    for pair in ("output=x", "array=1-3", "a b=c", "gres="):
        with pytest.raises(StepscopeError, match="--sbatch"):
            parse_sbatch([pair])
    assert parse_mem("64G") == "64G"
    with pytest.raises(StepscopeError, match="--mem lots"):
        parse_mem("lots")


def test_missing_slurm_or_submitit_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(StepscopeError, match="Slurm not found on this machine"):
        require_slurm()
    for name in ("sbatch", "scontrol"):
        (tmp_path / name).touch(mode=0o755)
    with pytest.raises(StepscopeError, match="submitit is not installed") as raised:
        require_slurm()
    assert raised.value.hint == "pip install 'stepscope[slurm]'"


def test_place_is_what_changes_the_measurement() -> None:
    asked = Resources(partition="a", gpus=1, time_min=10, account="us")
    assert asked.place == Resources(partition="a", gpus=1, time_min=99, mem="64G").place
    assert asked.place != Resources(partition="b", gpus=1).place
    assert asked.place != Resources(partition="a", gpus=1, constraint="h100").place


@given(num_cases=st.integers(1, 40), count=st.integers(1, 50))
def test_grid_is_dealt_evenly_and_completely(num_cases: int, count: int) -> None:
    cases = grid_from_flags({"context": ",".join(map(str, range(1, num_cases + 1)))}).cases()
    shares = deal(cases, count)
    assert len(shares) == min(count, num_cases)
    assert sorted(case.workload.context for share in shares for case in share) == list(range(1, num_cases + 1))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


# --- States from Slurm ----------------------------------------------------------------------------------------------


def test_jobs_that_wait_together_share_a_line() -> None:
    text = (
        "JobId=2 ArrayJobId=2 ArrayTaskId=2,4-6,8-12:2%3 JobName=a JobState=PENDING Reason=Resources Power=\n"
        "JobId=3 ArrayJobId=2 ArrayTaskId=0 JobName=a JobState=RUNNING Reason=None Power=\n"
        "JobId=4 ArrayJobId=2 ArrayTaskId=1 JobName=a JobState=CANCELLED Reason=None Power=\n\n"
    )
    found = parse_states(text)
    assert sorted(found, key=lambda name: int(name[2:])) == [f"2_{n}" for n in (0, 1, 2, 4, 5, 6, 8, 10, 12)]
    assert found["2_8"] == JobState(state="PENDING", reason="Resources")
    assert [found[f"2_{n}"].phase for n in (0, 1, 2)] == ["running", "ended", "queued"]


def test_single_job_has_its_own_id() -> None:
    assert parse_states("JobId=7 JobName=a JobState=COMPLETING Reason=None") == {"7": JobState(state="COMPLETING")}
    assert JobState(state="COMPLETING").phase == "running"


# --- Submissions ----------------------------------------------------------------------------------------------------


def test_submissions_are_found_newest_first_with_finished_jobs(tmp_path: Path) -> None:
    work = ShareWork(shares=deal(CASES, 2), retry=None, fresh=False, timeout_s=None)
    first = keep(next_folder(tmp_path), "11", Resources(gpus=1), work, "bench")
    ranks = RankWork(entry="a:b", request="{}", ranks=2)
    second = keep(next_folder(tmp_path), "12", Resources(), ranks, "train")
    next_folder(tmp_path).mkdir()  # a submission that failed
    assert [kept.folder.name for kept in read_submissions(tmp_path)] == ["2", "1"]
    assert [job.id for job in first.jobs()] == ["11_0", "11_1"]
    assert [(job.id, job.tasks) for job in second.jobs()] == [("12", 2)]
    assert [log.name for log in second.jobs()[0].logs] == ["12_0_log.out", "12_1_log.out"]
    first.with_ended(first.jobs()[1])
    assert read_submissions(tmp_path)[1].submission.ended == (1,)
    assert next_folder(tmp_path).name == "4"


@pytest.mark.parametrize(("written", "meant"), [(b"true", Retry.FAILED), (b"false", None)])
def test_submission_of_an_earlier_version_keeps_its_retry_setting(
    tmp_path: Path, written: bytes, meant: Retry | None
) -> None:
    work = ShareWork(shares=deal(CASES, 2), retry=Retry.DOUBTFUL, fresh=False, timeout_s=None)
    keep(next_folder(tmp_path), "11", Resources(), work, "bench")
    path = tmp_path / "slurm/1/submission.json"
    for content, expected in ((b'"doubtful"', Retry.DOUBTFUL), (written, meant)):
        path.write_bytes(path.read_bytes().replace(b'"retry":"doubtful"', b'"retry":' + content))
        found = read_submissions(tmp_path)[0].submission.work
        assert isinstance(found, ShareWork)
        assert found.retried is expected


def test_damaged_manifest_is_named(tmp_path: Path) -> None:
    write_whole(tmp_path / "slurm/1/submission.json", b'{"schema":')
    with pytest.raises(StepscopeError, match=r"submission\.json"):
        read_submissions(tmp_path)


# --- Rows -----------------------------------------------------------------------------------------------------------


def _own(tmp_path: Path, *rows: BenchRow) -> Job:
    job = Job(id="7", index=0, folder=tmp_path / "0")
    write_whole(job.folder / "results.jsonl", b"".join(msgspec.json.encode(one) + b"\n" for one in rows))
    return job


def test_rows_are_collected_once_and_killed_ones_when_the_job_is_over(tmp_path: Path) -> None:
    ok, killed = row(context=8), row("killed", context=16)
    job = _own(tmp_path, ok, killed)
    for _ in range(2):  # the second command finds the rows of the first
        with ResultsFile.open(tmp_path / "results.jsonl", BenchRow) as results:
            list(RowLedger(results).collect(job, ended=False))
    assert len((tmp_path / "results.jsonl").read_bytes().splitlines()) == 1
    with ResultsFile.open(tmp_path / "results.jsonl", BenchRow) as results:
        ledger = RowLedger(results)
        assert list(ledger.collect(job, ended=True)) == [killed]
        assert list(ledger.collect(job, ended=True)) == []
        assert set(ledger.rows) == {ok.key, killed.key}


def test_incomplete_line_is_left_for_later(tmp_path: Path) -> None:
    job = _own(tmp_path, row(context=8))
    path = job.folder / "results.jsonl"
    path.write_bytes(path.read_bytes() + msgspec.json.encode(row(context=16))[:50])
    assert read_own(path) == (row(context=8),)


def test_requeued_job_reruns_what_was_killed_with_it(tmp_path: Path) -> None:
    path = _own(tmp_path, row(context=8), row("oom", context=16), row("killed", context=24)).folder / "results.jsonl"
    forget_killed(path)
    assert [one.status for one in read_own(path)] == ["ok", "oom"]


def test_dropping_killed_rows_keeps_rows_of_a_newer_version(tmp_path: Path) -> None:
    path = _own(tmp_path, row(context=8), row("killed", context=16)).folder / "results.jsonl"
    later = msgspec.json.encode(row(context=24)).replace(b'"status":"ok"', b'"status":"melted"') + b"\n"
    path.write_bytes(path.read_bytes() + later)
    forget_killed(path)
    assert path.read_bytes() == msgspec.json.encode(row(context=8)) + b"\n" + later


@pytest.mark.parametrize("measured", [0, 128])
@pytest.mark.parametrize("model", [{"model": "mine:build"}, {"hf": "gpt2"}])
def test_job_gets_rows_of_cases_that_leave_the_context_open(
    tmp_path: Path, model: dict[str, str], measured: int
) -> None:
    asked = build_case(model)
    assert asked.workload.context == 0
    placed = msgspec.structs.replace(asked.workload, context=measured, device="cpu")
    rows = [
        msgspec.structs.replace(
            row(context=8), case=msgspec.structs.replace(asked, workload=msgspec.structs.replace(placed, batch=batch))
        )
        for batch in (asked.workload.batch, asked.workload.batch + 1)
    ]
    seed(tmp_path / "results.jsonl", [asked], rows)
    assert read_own(tmp_path / "results.jsonl") == (rows[0],)


def test_job_gets_rows_of_its_cases_for_any_device(tmp_path: Path) -> None:
    rows = [row(context=8), row(context=16)]
    asked = msgspec.structs.replace(
        rows[0].case, workload=msgspec.structs.replace(rows[0].case.workload, device="auto")
    )
    seed(tmp_path / "results.jsonl", [asked], rows)
    assert read_own(tmp_path / "results.jsonl") == (rows[0],)


# --- How jobs end ---------------------------------------------------------------------------------------------------


class _Slurm:
    """What Slurm would report, without waiting for file systems."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: dict[str, JobState] | None = {}
        monkeypatch.setattr(watching, "read_states", lambda _: self.states)
        for name in ("_FIRST_LOOK_S", "_LONGEST_LOOK_S", "_LAG_S", "_LAG_OF_COMPLETED_S"):
            monkeypatch.setattr(watching, name, -1.0)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> _Slurm:
    return _Slurm(monkeypatch)


def _leave(job: Job, task: int, *, life: int = 0, ended_ns: int = 0, message: str = "") -> None:
    outcome = TaskOutcome(life=life, ended_ns=ended_ns, message=message)
    write_whole(outcome_path(job.folder, task), msgspec.json.encode(outcome))


def test_job_is_done_when_all_tasks_succeed_in_one_life(tmp_path: Path, slurm: _Slurm) -> None:
    job = Job(id="7", index=0, folder=tmp_path / "0", tasks=2)
    slurm.states = {"7": JobState(state="RUNNING")}
    watch = JobWatch([job])
    _leave(job, 0)
    watch.look()
    assert watch.counts().running == 1
    _leave(job, 1, life=1)
    watch.look()
    assert watch.waiting, "rank 0 finished in the job's last life, and not in this one"
    _leave(job, 0, life=1)
    watch.look()
    assert not watch.waiting
    assert watch.failures == {}


def test_rank_error_counts_when_the_job_has_ended_and_the_first_is_named(tmp_path: Path, slurm: _Slurm) -> None:
    job = Job(id="7", index=0, folder=tmp_path / "0", tasks=3)
    watch = JobWatch([job])
    _leave(job, 0, life=1, message="the others are gone", ended_ns=3)
    _leave(job, 1, life=0, message="the node went down", ended_ns=1)
    _leave(job, 2, life=1, message="no space left", ended_ns=2)
    for state in ("RUNNING", "COMPLETING", "REQUEUED", "PENDING"):
        slurm.states = {"7": JobState(state=state)}
        watch.look()
        assert watch.waiting
    slurm.states = {"7": JobState(state="FAILED")}
    watch.look()
    with pytest.raises(StepscopeError, match="rank 2 of job 7: no space left") as raised:
        raise_failures(list(watch.failures.values()), kept="kept")
    assert f"log: {tmp_path}/7_2_log.out" in raised.value.detail


def test_job_forgotten_by_slurm_has_ended_and_no_answer_means_nothing(tmp_path: Path, slurm: _Slurm) -> None:
    job = Job(id="7_1", index=1, folder=tmp_path / "1")
    watch = JobWatch([job])
    slurm.states = None
    watch.look()
    assert watch.counts().reason == "Slurm is not responding"
    assert watch.waiting
    slurm.states = {"7_0": JobState(state="RUNNING")}
    watch.look()
    assert "job 7_1 is no longer known to Slurm" in watch.failures["7_1"].text


def test_all_failures_are_in_one_error(tmp_path: Path, slurm: _Slurm) -> None:
    jobs = [Job(id=f"7_{n}", index=n, folder=tmp_path / str(n)) for n in range(2)]
    slurm.states = {"7_0": JobState(state="TIMEOUT"), "7_1": JobState(state="OUT_OF_MEMORY")}
    (tmp_path / "7_0_0_log.out").touch()
    watch = JobWatch(jobs)
    watch.look()
    with pytest.raises(StepscopeError, match="job 7_0 ended with state TIMEOUT") as raised:
        raise_failures(list(watch.failures.values()), kept="what was measured is kept")
    log = tmp_path / "7_0_0_log.out"
    assert raised.value.detail.splitlines() == [
        f"log: {log}",
        "job 7_1 ended with state OUT_OF_MEMORY",
        f"log: {tmp_path}/7_1_0_log.out (not found: the job never started)",
        "what was measured is kept",
    ]
    assert raised.value.hint == f"less {log}"


# --- On the node ----------------------------------------------------------------------------------------------------


def test_workers_do_not_receive_signals_of_the_job(tmp_path: Path) -> None:
    tasks = pytest.importorskip("stepscope.jobs.slurm.tasks", reason="submitit is not installed")

    def work() -> tuple[str, ...]:
        with subprocess.Popen(["sleep", "60"]) as process:
            for sent in (signal.SIGTERM, signal.SIGUSR2):
                process.send_signal(sent)
            time.sleep(0.1)
            alive = process.poll() is None
            process.kill()
        return (str(alive),)

    assert tasks._run_aside(work) == ("True",)


def test_share_is_measured_with_signals_blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = pytest.importorskip("stepscope.jobs.slurm.tasks", reason="submitit is not installed")
    monkeypatch.setattr(tasks, "_measure", lambda *_: (str(signal.pthread_sigmask(signal.SIG_BLOCK, ())),))
    tasks.ShareTask(tasks.ShareRequest(cases=(), folder=str(tmp_path), command="bench", timeout_s=None))()
    (outcome,) = Job(id="7", index=0, folder=tmp_path).outcomes()
    assert outcome is not None
    assert "SIGTERM" in outcome.keys[0]
    assert "SIGUSR2" in outcome.keys[0]


def test_waiting_main_thread_receives_signals(tmp_path: Path) -> None:
    tasks = pytest.importorskip("stepscope.jobs.slurm.tasks", reason="submitit is not installed")
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: heard.append(number))

    def work() -> tuple[str, ...]:
        os.kill(os.getpid(), signal.SIGUSR2)
        while not heard:
            time.sleep(0.01)
        return tuple(map(str, heard))

    try:
        assert tasks._run_aside(work) == (str(int(signal.SIGUSR2)),)
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_task_records_its_error_and_raises_it(tmp_path: Path) -> None:
    tasks = pytest.importorskip("stepscope.jobs.slurm.tasks", reason="submitit is not installed")
    job = Job(id="7", index=0, folder=tmp_path)
    for error in (StepscopeError("no device `cuda:7`", detail="there is none", hint="doctor"), KeyError("data")):

        def work(raised: Exception = error) -> tuple[str, ...]:
            raise raised

        with pytest.raises(type(error)):
            tasks._run(tmp_path, 0, lambda: tasks._run_aside(work))
        (outcome,) = job.outcomes()
        assert outcome is not None
        assert outcome.message == ("no device `cuda:7`" if isinstance(error, StepscopeError) else "KeyError: 'data'")
    with pytest.raises(SystemExit):
        tasks._run(tmp_path, 0, sys.exit)
    assert job.outcomes() == (None,), "a requeued job has not ended, and its earlier result is gone"
    tasks._run(tmp_path, 0, lambda: ("a", "b"))
    (outcome,) = job.outcomes()
    assert outcome is not None
    assert (outcome.keys, outcome.message) == (("a", "b"), "")


@pytest.mark.parametrize(("module", "absent"), [("jobs.slurm.tasks", "torch"), ("cli.main", "submitit")])
def test_nothing_heavy_is_imported(module: str, absent: str) -> None:
    pytest.importorskip("submitit", reason="submitit is not installed")
    code = f"import sys, stepscope.{module}; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ranks_agree_on_a_free_port_in_every_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = pytest.importorskip("stepscope.jobs.slurm.tasks", reason="submitit is not installed")
    with pytest.raises(StepscopeError, match="rank 0 did not choose a port"):
        tasks.agree_on_port(tmp_path, 1, timeout_s=0)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        used = taken.getsockname()[1]
        monkeypatch.setattr(tasks, "_PORTS", range(used, used + 20))
        chosen = tasks.agree_on_port(tmp_path, 0)
        assert used < chosen < used + 20
        assert tasks.agree_on_port(tmp_path, 1) == chosen
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        monkeypatch.setattr(tasks, "_PORTS", range(used, used + 1))
        with pytest.raises(StepscopeError, match="are in use"):
            tasks.agree_on_port(tmp_path, 0)
        with pytest.raises(StepscopeError, match="rank 0 did not choose a port"):
            tasks.agree_on_port(tmp_path, 1, timeout_s=0)

"""`--slurm` against a real Slurm cluster of one node, which the tests start and stop."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import StepscopeError
from stepscope.jobs.slurm.rank_jobs import SlurmRanks
from stepscope.jobs.slurm.resources import Resources
from stepscope.jobs.slurm.watch import JobCounts
from tests.cli.command import PATIENCE_S, TINY, kill, rows, start, stepscope, wait_until
from tests.cli.slurm_cluster import cluster, why_not
from tests.unit.kineto_files import write_ranks

pytest.importorskip("submitit", reason="submitit is not installed")
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is a Slurm")

JOB = ["--slurm", "--time", "5"]
TRAINED = ["--d-model", "16", "--d-ff", "32", "--num-layers", "1", "--num-heads", "2", "--vocab", "50"]
TRAINED += ["--batch", "2", "--context", "8", "--device", "cpu"]
NEVER = [*JOB, "--sbatch", "begin=now+1hour"]

MODEL = """
import time
from pathlib import Path
import torch
from torch import nn

def build(batch, context):
    if context == 32:
        raise RuntimeError("not at 32")
    if context == 64 and not Path("go").exists():
        with open("hanging", "a") as file:
            file.write("x")
        time.sleep(600)
    return nn.Linear(4, 4), torch.randn(batch, context, 4), lambda output: output.square().mean()
"""

RANKS = """
import os
from pathlib import Path

def add_ranks(request):
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([float(os.environ["RANK"]) + 1])
    dist.all_reduce(total)
    Path(request, os.environ["LOCAL_RANK"]).write_text(f"{total.item():g} of {os.environ['WORLD_SIZE']}")
    dist.destroy_process_group()

def fail_at_1(request):
    if os.environ["RANK"] == "1":
        raise ValueError("no data on this node")
    import time
    time.sleep(600)

def wait_for_a_second_life(request):
    Path(request, "life" + os.environ["RANK"] + os.environ.get("SLURM_RESTART_COUNT", "0")).touch()
    if "SLURM_RESTART_COUNT" not in os.environ:
        import time
        time.sleep(600)
"""


@pytest.fixture(scope="module", autouse=True)
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        try:
            with cluster(tmp_path_factory.mktemp("slurm")) as configuration:
                patch.setenv("SLURM_CONF", str(configuration))
                yield
        except TimeoutError as error:
            pytest.skip(str(error))


def test_array_job_resumes_a_local_run(tmp_path: Path) -> None:
    """Rows have the same keys as local ones, so finished cases are not measured again."""
    here = stepscope(tmp_path, "bench", *TINY, "--context", "8")
    assert here.returncode == 0, here.stderr
    first = (tmp_path / "runs/bench/results.jsonl").read_text()
    command = ["bench", *TINY, "--context", "8,16,24", *JOB, "--array", "2"]
    shown = stepscope(tmp_path, *command, "--print-sbatch")
    assert shown.returncode == 0, shown.stderr
    assert not (tmp_path / "runs/bench/slurm").exists()
    done = stepscope(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert "submitted: job" in done.stderr
    assert "2 done; 2 rows collected" in done.stderr
    (submitted,) = tmp_path.glob("runs/bench/slurm/1/*_submission.sh")
    assert submitted.read_text() == shown.stdout
    assert (tmp_path / "runs/bench/results.jsonl").read_text().startswith(first)
    assert sorted(row["case"]["workload"]["context"] for row in rows(tmp_path)) == [8, 16, 24]
    assert rows(tmp_path)[-1]["command"] == " ".join(["stepscope", *command])
    again = stepscope(tmp_path, *command)
    assert "3 of 3 cases are already done" in again.stderr
    assert "submitted" not in again.stderr
    assert again.stdout == done.stdout


def test_requeued_job_and_interrupted_command_resume(tmp_path: Path) -> None:
    """The first command is interrupted. The second one finds its job, which requeues itself at its time limit. A failed
    case is a row."""
    (tmp_path / "mine.py").write_text(MODEL)
    command = ["bench", "--model", "mine:build", "--context", "16,32,64", "--device", "cpu", "--warmup", "1"]
    command += ["--steps", "2", *JOB]
    waiting = start(tmp_path, *command)
    wait_until(lambda: len(rows(tmp_path)) == 2)
    wait_until(partial(_has_hung, tmp_path, 1))
    assert kill(waiting, signal.SIGINT) == 130
    said = (tmp_path / "stderr.txt").read_text()
    number = _manifest(tmp_path)["job_id"]
    assert f"interrupted: job {number} keeps running" in said
    assert f"scancel {number}" in said
    first = (tmp_path / "runs/bench/results.jsonl").read_text()

    waiting = start(tmp_path, *command)
    _slurm("scancel", "--signal=USR2", number)
    (tmp_path / "go").touch()
    _begin_again(number)
    assert waiting.wait(PATIENCE_S) == 0
    assert f"submitted earlier, not collected yet: job {number}" in (tmp_path / "stderr.txt").read_text()
    assert [row["status"] for row in rows(tmp_path)] == ["ok", "error", "ok"]
    assert "not at 32" in rows(tmp_path)[1]["reason"]
    assert (tmp_path / "runs/bench/results.jsonl").read_text().startswith(first), "nothing is measured twice"


def test_earlier_jobs_are_awaited_and_a_cancelled_one_is_named_with_its_log(tmp_path: Path) -> None:
    command = ["bench", *TINY, "--context", "8,16", "--array", "2"]
    left = stepscope(tmp_path, *command, *NEVER, "--no-wait")
    assert left.returncode == 0, left.stderr
    assert left.stdout == ""
    number = _manifest(tmp_path)["job_id"]
    waiting = start(tmp_path, *command, *NEVER)
    wait_until(lambda: "jobs: 2 queued (BeginTime)" in (tmp_path / "stderr.txt").read_text())
    assert len(_slurm("squeue", "--noheader", "--array").splitlines()) == 2, "submitted once"
    locked = stepscope(tmp_path, *command, *NEVER)
    assert locked.returncode == 2
    assert "another sweep is writing" in locked.stderr
    _slurm("scancel", f"{number}_1")  # forgotten at once
    wait_until(lambda: f"job {number}_1" in (tmp_path / "stderr.txt").read_text())
    _slurm("scancel", number)
    assert waiting.wait(PATIENCE_S) == 2
    said = (tmp_path / "stderr.txt").read_text()
    assert f"job {number}_1 is no longer known to Slurm" in said
    assert f"job {number}_0 ended with state CANCELLED" in said
    assert f"log: {tmp_path}/runs/bench/slurm/1/{number}_0_0_log.out (" in said
    assert "run the same command again to submit the rest" in said
    rest = stepscope(tmp_path, *command, *NEVER, "--no-wait")
    assert f"submitted: job {_manifest(tmp_path, 2)['job_id']}" in rest.stderr


def test_rejected_job_leaves_nothing(tmp_path: Path) -> None:
    refused = stepscope(tmp_path, "bench", *TINY, *JOB, "--partition", "gpus")
    assert refused.returncode == 2
    assert "Slurm rejected the job" in refused.stderr
    assert "invalid partition" in refused.stderr
    assert "hint: sinfo" in refused.stderr
    assert not (tmp_path / "runs").exists()


def test_cluster_options_without_slurm_are_rejected(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "bench", *TINY, "--partition", "debug")
    assert done.returncode == 2
    assert "`--partition` requires `--slurm`" in done.stderr


class _Watcher:
    def begin(self, job_ids: Sequence[str], *, submitted: str | None) -> None:
        pass

    def news(self, counts: JobCounts) -> None:
        pass


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], SlurmRanks]:
    (tmp_path / "mine_ranks.py").write_text(RANKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda name: SlurmRanks(
        folder=tmp_path / "run",
        command="train",
        resources=Resources(time_min=5),
        name="ranks",
        entry=f"mine_ranks:{name}",
        request=str(tmp_path),
        ranks=2,
    )


def test_tasks_become_ranks(tmp_path: Path, ranks: Callable[[str], SlurmRanks]) -> None:
    job = ranks("add_ranks")
    assert "--ntasks-per-node=2" in job.script()
    assert job.run(_Watcher())
    assert [(tmp_path / name).read_text() for name in "01"] == ["3 of 2", "3 of 2"]


def test_a_rank_that_raises_is_named_and_ends_the_job(ranks: Callable[[str], SlurmRanks]) -> None:
    job = ranks("fail_at_1")
    assert not job.run(_Watcher(), wait=False)
    with pytest.raises(StepscopeError, match="is already running in"):
        ranks("add_ranks").run(_Watcher())
    with pytest.raises(StepscopeError, match=r"rank 1 of job \d+: ValueError: no data on this node") as raised:
        job.run(_Watcher())
    assert "_1_log.out" in raised.value.detail


def test_requeued_training_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    command = ["train", *TRAINED, "--ranks", "2", "--save-every", "2", "--steps", "400", *JOB]
    waiting = start(tmp_path, *command)
    log, checkpoints = tmp_path / "runs/train/log.jsonl", tmp_path / "runs/train/checkpoints"
    wait_until(lambda: len(list(checkpoints.glob("*.json"))) == 2)
    number = _manifest(tmp_path, verb="train")["job_id"]
    _slurm("scontrol", "requeue", number)
    _begin_again(number)
    assert waiting.wait(PATIENCE_S) == 0, (tmp_path / "stderr.txt").read_text()
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == list(range(1, 401))
    logs = "".join(path.read_text() for path in tmp_path.glob(f"runs/train/slurm/1/{number}_*.out"))
    assert "Traceback" not in logs
    again = stepscope(tmp_path, *command)
    assert again.returncode == 0
    assert "submitted" not in again.stderr
    assert "400" in again.stdout


def test_repeated_fresh_command_collects_the_run_instead_of_deleting_it(tmp_path: Path) -> None:
    command = ["train", *TRAINED, "--steps", "3", "--fresh", *JOB]
    first = stepscope(tmp_path, *command, "--no-wait")
    assert first.returncode == 0, first.stderr
    manifest, log = tmp_path / "runs/train/checkpoints/step-00000003.json", tmp_path / "runs/train/log.jsonl"
    wait_until(manifest.exists)
    number = _manifest(tmp_path, verb="train")["job_id"]
    wait_until(lambda: "JobState=COMPLETED" in _slurm("scontrol", "show", "job", number))
    written = log.read_text()
    shown = stepscope(tmp_path, *command, "--print-sbatch")
    assert shown.returncode == 0, shown.stderr
    again = stepscope(tmp_path, *command)
    assert again.returncode == 0, again.stderr
    assert "submitted earlier, not collected yet" in again.stderr
    assert log.read_text() == written
    anew = stepscope(tmp_path, *command)
    assert anew.returncode == 0, anew.stderr
    assert "submitted: job" in anew.stderr
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3]
    assert log.read_text() != written, "that one was collected: now it begins anew"


def test_a_job_that_is_cancelled_while_it_runs_is_named_with_its_log(
    tmp_path: Path, ranks: Callable[[str], SlurmRanks]
) -> None:
    job = ranks("wait_for_a_second_life")
    assert not job.run(_Watcher(), wait=False)
    wait_until((tmp_path / "life00").exists)
    (log,) = tmp_path.glob("run/slurm/1/*_0_log.out")
    number = log.name.partition("_")[0]
    _slurm("scancel", number)
    with pytest.raises(StepscopeError, match=f"job {number} ended with state CANCELLED") as raised:
        job.run(_Watcher())
    assert raised.value.detail.startswith(f"log: {log}\n")


def _manifest(folder: Path, number: int = 1, verb: str = "bench") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"runs/{verb}/slurm/{number}/submission.json").read_text())
    return found


def _has_hung(folder: Path, times: int) -> bool:
    return (folder / "hanging").exists() and len((folder / "hanging").read_text()) == times


def _slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout


def _begin_again(number: str) -> None:
    """Start a requeued job now instead of after two minutes. This must happen more than a second after its last run
    ended, or else the node takes its new credential for the revoked one."""
    show = ["squeue", "--noheader", "--format=%T %r", f"--jobs={number}"]
    wait_until(lambda: _slurm(*show).strip() == "PENDING BeginTime")
    time.sleep(2)
    _slurm("scontrol", "update", f"JobId={number}", "StartTime=now")


def test_traces_of_ranks_are_reduced_by_the_tasks_of_a_job(tmp_path: Path) -> None:
    write_ranks(tmp_path / "traces", 5)
    command = ["reduce", "traces", "--out", "run", "--tasks", "2", *JOB]
    shown = stepscope(tmp_path, *command, "--print-sbatch")
    assert shown.returncode == 0, shown.stderr
    assert "--ntasks-per-node=2" in shown.stdout
    done = stepscope(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert sorted(one.name for one in (tmp_path / "run").glob("rank-*")) == [f"rank-{rank}" for rank in range(5)]
    ranks = stepscope(tmp_path, "explain", "run", "--table", "ranks", "--format", "csv")
    assert len(ranks.stdout.splitlines()) == 6

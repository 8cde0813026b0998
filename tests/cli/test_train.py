"""`stepscope train` end to end: ranks, resuming, and every way a rank can fail."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from stepscope.parallel.journal import read_journals
from tests.cli.command import PATIENCE_S, start, stepscope, wait_until

TINY = ["--d-model", "16", "--d-ff", "32", "--num-layers", "1", "--num-heads", "2", "--vocab", "300"]
TINY += ["--batch", "4", "--context", "8", "--device", "cpu"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def steps(folder: Path, out: str = "runs/train") -> list[int]:
    path = folder / out / "log.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_steps(folder: Path, count: int) -> None:
    wait_until(lambda: len(steps(folder)) >= count)


def processes_of(folder: Path) -> list[int]:
    return [entry.process for entry in read_journals(folder / "runs/train/journal")]


def test_two_ranks_train_resume_and_are_shown(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 50)
    command = ["train", *TINY, "--ranks", "2", "--data", "text.txt", "--save-every", "2"]
    first = stepscope(tmp_path, *command, "--steps", "3", "--format", "json", **ONE_THREAD)
    assert first.returncode == 0, first.stderr
    (row,) = json.loads(first.stdout)["rows"]
    assert (row["strategy"], row["ranks"], row["steps"]) == ("bucketed", 2, 3)
    assert row["exposed_ms"] <= row["step_ms"]
    more = stepscope(tmp_path, *command, "--steps", "5", "--strategy", "fsdp", "--memory", **ONE_THREAD)
    assert more.returncode == 0, more.stderr
    assert "resuming after step 3" in more.stderr
    assert "optimizer state" in more.stdout
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    shown = stepscope(tmp_path, "train", "--from", "runs/train", "--plot", "loss.svg", "--format", "csv")
    assert shown.returncode == 0, shown.stderr
    assert [line.split(",")[:3] for line in shown.stdout.splitlines()[1:]] == [
        ["bucketed", "2", "3"],
        ["fsdp", "2", "2"],
    ]
    assert "<svg" in (tmp_path / "loss.svg").read_text()
    other = stepscope(tmp_path, *command, "--steps", "9", "--seed", "1", **ONE_THREAD)
    assert other.returncode == 2
    assert "seed was `0` and is now `1`" in other.stderr
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    anew = stepscope(tmp_path, *command, "--fresh", "--steps", "1", "--seed", "1", **ONE_THREAD)
    assert anew.returncode == 0, anew.stderr
    assert "resuming" not in anew.stderr
    assert steps(tmp_path) == [1]
    assert sorted(path.name for path in (tmp_path / "runs/train/checkpoints").iterdir()) == [
        "step-00000001.json",
        "step-00000001.pt",
    ]


def test_killed_rank_is_named_and_the_same_command_resumes(tmp_path: Path) -> None:
    command = ["train", *TINY, "--ranks", "2", "--strategy", "naive", "--save-every", "5"]
    run = start(tmp_path, *command, "--steps", "100000")
    wait_for_steps(tmp_path, 12)
    processes = processes_of(tmp_path)
    os.kill(processes[1], signal.SIGKILL)
    assert run.wait(PATIENCE_S) == 2
    said = (tmp_path / "stderr.txt").read_text()
    assert "error: rank 1 was killed by SIGKILL" in said
    assert "collective " in said
    assert "rank-1.log" in said
    for process in processes:
        assert not Path(f"/proc/{process}").exists(), "a rank was left behind"
    done = max(int(path.stem[5:]) for path in (tmp_path / "runs/train/checkpoints").glob("*.json"))
    assert done >= 10
    again = stepscope(tmp_path, *command, "--steps", str(done + 1), **ONE_THREAD)
    assert again.returncode == 0, again.stderr
    assert f"resuming after step {done}" in again.stderr
    assert steps(tmp_path) == list(range(1, done + 2))


def test_a_rank_that_hangs_is_named_within_the_timeout(tmp_path: Path) -> None:
    run = start(tmp_path, "train", *TINY, "--ranks", "2", "--steps", "100000", "--timeout", "10")
    wait_for_steps(tmp_path, 3)
    processes = processes_of(tmp_path)
    os.kill(processes[0], signal.SIGSTOP)
    assert run.wait(PATIENCE_S) == 2
    said = (tmp_path / "stderr.txt").read_text()
    assert "rank 1 could not complete" in said
    assert "rank 0 is stopped" in said
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


def test_ctrl_c_leaves_no_rank_and_the_last_checkpoint(tmp_path: Path) -> None:
    run = start(tmp_path, "train", *TINY, "--ranks", "2", "--steps", "100000", "--save-every", "1")
    wait_for_steps(tmp_path, 3)
    processes = processes_of(tmp_path)
    second = stepscope(tmp_path, "train", *TINY, "--steps", "3")
    assert second.returncode == 2
    assert "another training run is writing to `runs/train`" in second.stderr
    run.send_signal(signal.SIGINT)
    assert run.wait(PATIENCE_S) == 130
    assert "resume from the last checkpoint" in (tmp_path / "stderr.txt").read_text()
    assert not any(Path(f"/proc/{process}").exists() for process in processes)
    assert list((tmp_path / "runs/train/checkpoints").glob("*.json"))


def test_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    command += ["-m", "stepscope", "train", *TINY, "--steps", "2", "--format", "json"]
    run = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=os.environ | ONE_THREAD,
    )
    assert run.returncode == 0, run.stderr
    (row,) = json.loads(run.stdout)["rows"]
    assert (row["ranks"], row["steps"]) == (2, 2)


def test_occupied_port_is_reported_at_once(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        run = stepscope(tmp_path, "train", *TINY, **environment)
    assert run.returncode == 2
    assert f"cannot listen on port `{port}`: Address already in use" in run.stderr
    assert "Traceback" not in run.stderr


def test_incomplete_rank_environment_is_rejected(tmp_path: Path) -> None:
    run = stepscope(tmp_path, "train", *TINY, RANK="0")
    assert run.returncode == 2
    assert "RANK is `0` but WORLD_SIZE is not set" in run.stderr
    assert "hint: unset RANK" in run.stderr
    assert not (tmp_path / "runs").exists()


def test_bad_input_is_rejected_before_anything_starts(tmp_path: Path) -> None:
    for arguments, said in (
        (["--ranks", "3"], "batch `4` cannot be split evenly over 3 ranks"),
        (["--data", "missing.txt"], "cannot read the data: `missing.txt`"),
        (["--strategy", "bucketted"], "bucketed"),
        (["--context", "8,16"], "one value for `context`"),
        (["--from", "nowhere"], "no training run in `nowhere`"),
        (["--backend", "nccl", "--device", "cpu"], "backend `nccl` requires GPUs"),
    ):
        run = stepscope(tmp_path, "train", *arguments)
        assert run.returncode == 2, arguments
        assert said in run.stderr
        assert "Traceback" not in run.stderr


def test_diverging_run_is_logged_shown_plotted_and_resumed(tmp_path: Path) -> None:
    diverging = ["train", *TINY, "--lr", "1e20", "--save-every", "3", "--out", "run"]
    first = stepscope(tmp_path, *diverging, "--steps", "6", "--format", "json", **ONE_THREAD)
    assert first.returncode == 0, first.stderr
    assert "loss nan" in first.stderr or "loss inf" in first.stderr
    assert any("not finite" in note for note in json.loads(first.stdout)["notes"])
    resumed = stepscope(tmp_path, *diverging, "--steps", "8", "--plot", "loss.svg", **ONE_THREAD)
    assert resumed.returncode == 0, resumed.stderr
    assert "after step 6" in resumed.stderr
    assert "not finite" in resumed.stdout
    assert steps(tmp_path, "run") == list(range(1, 9))
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert set(losses[-2:]) <= {"nan", "inf", "-inf"}


def test_stop_on_nan_fails_the_gate_and_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    diverging = ["train", *TINY, "--ranks", "2", "--lr", "1e20", "--save-every", "1", "--steps", "50", "--stop-on-nan"]
    for _ in range(2):
        found = stepscope(tmp_path, *diverging, **ONE_THREAD)
        assert found.returncode == 1, found.stderr
        assert "--stop-on-nan" in found.stderr
        done = steps(tmp_path)
        assert len(done) < 50
        last = max(path.stem for path in (tmp_path / "runs/train/checkpoints").glob("*.pt"))
        assert last == f"step-{done[-1] - 1:08d}"


def test_run_that_stops_at_its_first_step_still_reports_memory(tmp_path: Path) -> None:
    run = ["train", *TINY, "--lr", "1e20", "--save-every", "1", "--stop-on-nan"]
    assert stepscope(tmp_path, *run, "--steps", "50", **ONE_THREAD).returncode == 1
    (tmp_path / "runs/train/memory.json").unlink()
    resumed = stepscope(tmp_path, *run, "--steps", "50", **ONE_THREAD)
    assert resumed.returncode == 1, resumed.stderr
    assert (tmp_path / "runs/train/memory.json").is_file()

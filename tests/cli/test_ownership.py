"""stepscope never deletes or changes foreign files, whatever directory the user names."""

import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.command import TINY, kill, start, stepscope

TRAIN = [*TINY[: TINY.index("--warmup")], "--context", "8", "--steps", "2"]
BENCH = [*TINY, "--context", "8"]
MEMORY = [*TINY[: TINY.index("--warmup")], "--context", "8", "--steps", "2"]
COMM = ["--collective", "broadcast", "--sizes", "1kB", "--ranks", "2", "--repetitions", "1", "--device", "cpu"]
ATTENTION = ["--implementation", "sdpa", "--length", "16", "--head-dim", "16", "--device", "cpu", "--repetitions", "1"]


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"somebody else's {name}\n")


def see(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with its content and modification time, and every directory with its modification time."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in (folder, *folder.rglob("*"))
    }


def refuse(folder: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """The command fails and leaves `theirs` unchanged, including modification times."""
    before = see(folder / "theirs")
    found = stepscope(folder, *arguments, **environment)
    assert found.returncode == 2, found.stderr
    assert "error: " in found.stderr
    assert "Traceback" not in found.stderr
    assert see(folder / "theirs") == before
    return found


_RUN = ("logs/rank-0.log", "journal/0.journal", "journal/7.journal", "checkpoints/step-00000001.pt", "log.jsonl")


@pytest.mark.parametrize("more", [[], ["--fresh"]])
@pytest.mark.parametrize("names", [_RUN, ("run.json", "memory.json", "lock", *_RUN), ("logs/rank-0.log",)])
def test_training_into_a_foreign_directory_is_rejected(tmp_path: Path, names: tuple[str, ...], more: list[str]) -> None:
    fill(tmp_path / "theirs", *names)
    found = refuse(tmp_path, "train", *TRAIN, "--out", "theirs", *more)
    assert "did not create" in found.stderr


def test_torchrun_rank_rejects_a_foreign_directory_too(tmp_path: Path) -> None:
    fill(tmp_path / "theirs", *_RUN)
    refuse(tmp_path, "train", *TRAIN, "--out", "theirs", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")


def test_comm_with_a_foreign_rank_directory_is_rejected(tmp_path: Path) -> None:
    fill(tmp_path / "theirs", "ranks/logs/rank-0.log", "ranks/journal/0.journal", "ranks/thesis.tex")
    refuse(tmp_path, "comm", *COMM, "--out", "theirs", STEPSCOPE_CACHE=str(tmp_path / "cache"))
    environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "STEPSCOPE_CACHE": str(tmp_path / "cache")}
    refuse(tmp_path, "comm", *COMM, "--out", "theirs", **environment)


@pytest.mark.parametrize(
    "command", [["bench", *BENCH], ["memory", *MEMORY], ["comm", *COMM], ["attention", *ATTENTION]], ids=lambda c: c[0]
)
@pytest.mark.parametrize("fresh", [[], ["--fresh"]], ids=["plain", "fresh"])
def test_foreign_results_file_is_rejected(tmp_path: Path, command: list[str], fresh: list[str]) -> None:
    fill(tmp_path / "theirs", "results.jsonl", "logs/a.log", "recordings/a")
    refuse(tmp_path, *command, *fresh, "--out", "theirs", STEPSCOPE_CACHE=str(tmp_path / "cache"))


def test_report_overwrites_no_foreign_directory_or_page(tmp_path: Path) -> None:
    fill(tmp_path / "theirs", "report.json", "profile/manifest.json", "bench/results.jsonl")
    refuse(tmp_path, "report", *BENCH, "--data", "theirs")
    fill(tmp_path / "theirs", "page.html")
    refuse(tmp_path, "report", *BENCH, "--out", "theirs/page.html")
    refuse(tmp_path, "report", *BENCH, "--export", "theirs")


@pytest.mark.parametrize("names", [("manifest.json", "index.html"), ("notes.txt",)])
def test_profile_keeps_a_foreign_directory_even_with_force(tmp_path: Path, names: tuple[str, ...]) -> None:
    fill(tmp_path / "theirs", *names)
    (tmp_path / "theirs" / names[0]).write_text('{"name": "web app", "schema": "theirs"}')
    refuse(tmp_path, "profile", *BENCH, "--out", "theirs", "--force")


def wait_for(process: "subprocess.Popen[bytes]", folder: Path, pattern: str) -> None:
    while not list(folder.glob(pattern)):
        assert process.poll() is None, (folder.parent / "stderr.txt").read_text()
        time.sleep(0.01)


@pytest.mark.parametrize(
    "command",
    [
        ["profile", *BENCH, "--out", "out"],
        ["memory", *MEMORY, "--out", "out"],
        ["train", *TRAIN, "--out", "out"],
        ["comm", *COMM, "--out", "out"],
    ],
    ids=lambda command: command[0],
)
def test_next_command_removes_leftovers_of_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    process = start(tmp_path, *command)
    wait_for(process, temporary, ".stepscope.*")
    kill(process)
    assert list(temporary.glob(".stepscope.*"))
    done = stepscope(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert not [*temporary.glob(".stepscope.*"), *tmp_path.rglob("*.stepscope-scratch")]
    assert not (tmp_path / "out" / "ranks").exists()
    assert not [path for path in tmp_path.iterdir() if path.name not in ("tmp", "cache", "out", "stderr.txt")]

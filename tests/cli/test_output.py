"""Output to a full disk, a closed pipe or a closed stream."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.kineto_files import kernel, launch, training_step, write_trace


def shell(folder: Path, command: str) -> "subprocess.CompletedProcess[str]":
    """Return the exit status of stepscope, wherever its output goes."""
    program = f"{shlex.quote(sys.executable)} -m stepscope"
    script = f"{command.replace('stepscope', program)}\nexit ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("command", ["--help", "explain --help", "--version", "kernel x", "bench --list --format json"])
def test_a_full_disk_is_an_error_that_names_it(tmp_path: Path, command: str) -> None:
    done = shell(tmp_path, f"stepscope {command} >/dev/full")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: cannot write to standard output: No space left on device"]


@pytest.mark.parametrize("command", ["--help", "explain --help", "--version", "bench --list"])
def test_closed_pipe_ends_quietly(tmp_path: Path, command: str) -> None:
    done = shell(tmp_path, f"stepscope {command} | true")
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_pipe_does_not_change_the_exit_status(tmp_path: Path) -> None:
    write_trace(tmp_path / "a.json", training_step())
    slow = [launch("1700.000", "5.000", 7), kernel("ampere_sgemm_128x64_tn", "1800.000", "9000.000", 7)]
    write_trace(tmp_path / "b.json", [*training_step(), *slow])
    assert shell(tmp_path, "stepscope compare a.json b.json --fail-on 5% >/dev/null").returncode == 1
    done = shell(tmp_path, "stepscope compare a.json b.json --fail-on 5% | true")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-"])
def test_unprintable_error_keeps_its_exit_status(tmp_path: Path, where: str) -> None:
    for command in ("explain missing.json", "--no-such-option"):
        done = shell(tmp_path, f"stepscope {command} {where}")
        assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(
    "command",
    [
        "explain /dev/zero",
        "bench --from /dev/zero",
        "bench --config /dev/zero",
        "explain PATH",
        "explain PATH --bounded",
        "compare PATH PATH",
        "recover PATH",
        "verify trace.json --claim PATH",
        "verify --signed PATH --public-key trace.json",
        "verify --signed trace.json --public-key PATH",
        "recover trace.json --study --settings PATH",
        "report PATH",
        "bench --from PATH",
        "memory --from PATH",
        "attention --from PATH",
        "comm --from PATH",
        "precision --from PATH",
        "precision --from precision.json --bench PATH",
        "train --from PATH",
        "bench --config PATH",
        "train --config PATH",
    ],
)
def test_special_files_are_rejected_at_once(tmp_path: Path, command: str) -> None:
    write_trace(tmp_path / "trace.json", training_step())
    done = shell(tmp_path, f"mkfifo pipe; ulimit -v 8000000; stepscope {command.replace('PATH', 'pipe')}")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


def test_file_in_place_of_a_run_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("hi")
    done = shell(tmp_path, "stepscope train --from text.txt")
    assert done.returncode == 2
    assert "`text.txt` is not a directory" in done.stderr
    assert "rm " not in done.stderr


def test_empty_kernel_name_is_rejected(tmp_path: Path) -> None:
    done = shell(tmp_path, "stepscope kernel ' '")
    assert (done.returncode, done.stdout) == (2, "")
    assert "empty" in done.stderr


def test_name_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", training_step())
    done = shell(tmp_path, r"stepscope explain trace.json --save $'saved\xff'")
    assert done.returncode == 2
    assert "UTF-8" in done.stderr
    assert r"saved\xff" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]

"""`stepscope report`: any end leaves a page, and the same command resumes."""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from stepscope.files import is_ours
from tests.cli.command import TINY, kill, rows, start, stepscope, wait_until, workers

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "docs/examples/trace.json.gz"
STAGES = ("bench", "profile", "memory", "precision", "attention")

FACTORY = """
import os
from pathlib import Path
import torch
from torch import nn

def build(batch, context):
    return nn.Linear(8, 8), torch.ones(batch, context, 8), lambda output: output.sum()

def raises():
    raise ValueError("no weights for today")

def dies():
    os.abort()

def raises_later(batch, context):
    built = Path("built.txt")
    with built.open("a") as file:
        file.write("once more\\n")
    if len(built.read_text().splitlines()) > 2:  # bench builds it in two precisions
        raise ValueError("no weights for today")
    return build(batch, context)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> "tuple[Path, subprocess.CompletedProcess[str]]":
    """A directory with a finished report, and its output. Tests must not change it."""
    folder = tmp_path_factory.mktemp("report")
    return folder, stepscope(folder, "report", *TINY, "--data", "data")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FACTORY)
    return tmp_path


def stage_lines(done: "subprocess.CompletedProcess[str]") -> dict[str, str]:
    split = (line.partition(": ") for line in done.stderr.splitlines())
    return {name: said for name, _, said in split if name in STAGES}


def test_one_command_makes_a_page(made: "tuple[Path, subprocess.CompletedProcess[str]]") -> None:
    folder, done = made
    assert done.returncode == 0, done.stderr
    assert done.stdout == "report.html\n"
    said = stage_lines(done)
    assert tuple(said) == STAGES
    assert "ms per step" in said["bench"]
    assert "operators per step" in said["profile"]
    assert "peak" in said["memory"]
    assert "bf16" in said["precision"]
    assert "fastest" in said["attention"]
    assert done.stderr.splitlines()[-1] == "next: stepscope report data --out report.html --export figures"
    assert is_ours(folder / "report.html")
    assert {path.name for path in folder.iterdir()} == {"report.html", "data"}
    names = {path.name for path in (folder / "data").iterdir()}
    assert names == {"bench", "profile", "memory", "precision.json", "attention", "report.json"}
    assert [row["case"]["workload"]["precision"] for row in rows(folder, "data/bench")] == ["fp32", "bf16"]
    assert workers(folder) == []


def test_same_command_reuses_finished_stages(
    made: "tuple[Path, subprocess.CompletedProcess[str]]", tmp_path: Path
) -> None:
    shutil.copytree(made[0], tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "data/profile")
    done = stepscope(tmp_path, "report", *TINY, "--data", "data")
    assert done.returncode == 0, done.stderr
    assert {name for name, said in stage_lines(done).items() if "reused" not in said} == {"profile"}
    assert len(rows(tmp_path, "data/bench")) == 2
    assert (tmp_path / "data/profile/manifest.json").is_file()


def test_report_directory_makes_a_page_without_measuring(
    made: "tuple[Path, subprocess.CompletedProcess[str]]", tmp_path: Path
) -> None:
    done = stepscope(tmp_path, "report", str(made[0] / "data"), str(TRACE), "--out", "both.html")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "both.html\n"
    assert is_ours(tmp_path / "both.html")
    refused = stepscope(tmp_path, "report", str(made[0] / "data"), "--size", "nano")
    assert refused.returncode == 2
    assert "`--size` has no effect" in refused.stderr


def wait_for(text: str, folder: Path, process: "subprocess.Popen[bytes]") -> None:
    wait_until(lambda: text in (folder / "stderr.txt").read_text() or process.poll() is not None)
    assert process.poll() is None, (folder / "stderr.txt").read_text()


def wait_until_gone(folder: Path) -> None:
    wait_until(lambda: workers(folder) == [])


def test_same_command_resumes_after_a_kill_and_ctrl_c(tmp_path: Path) -> None:
    command = ["report", *TINY, "--data", "data"]
    process = start(tmp_path, *command)
    wait_for("bench: ", tmp_path, process)
    wait_until((tmp_path / "report.html").exists)
    kill(process)
    wait_until_gone(tmp_path)
    assert is_ours(tmp_path / "report.html")
    assert "not finished when this page was written" in (tmp_path / "report.html").read_text()

    process = start(tmp_path, *command)
    wait_for("profile: ", tmp_path, process)
    assert kill(process, signal.SIGINT) == 130
    said = (tmp_path / "stderr.txt").read_text().splitlines()
    assert said[0].startswith("bench: ")
    assert said[0].endswith("(reused; --fresh runs it again)")
    assert said[-1].startswith("interrupted: ")
    assert "report.html; resume with: stepscope report --d-model 16" in said[-1]
    page = (tmp_path / "report.html").read_text()
    assert "the report was interrupted" in page
    assert "not finished when" not in page
    assert is_ours(tmp_path / "report.html")
    wait_until_gone(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "data", "stderr.txt"}


def test_failed_stage_costs_only_its_section(folder: Path) -> None:
    command = ["report", "--model", "mine:raises_later", "--steps", "2", "--without", "memory"]
    done = stepscope(folder, *command)
    assert done.returncode == 0, done.stderr
    said = stage_lines(done)
    assert said["memory"] == "skipped with --without"
    assert said["attention"].startswith("skipped: ")
    assert "ms per step" in said["bench"]
    assert said["profile"].startswith("failed: building `mine:raises_later` raised ValueError: no weights for today")
    page = (folder / "report.html").read_text()
    assert "no weights for today" in page
    assert 'skipped with <span class="flag">--without</span>' in page


def test_page_has_the_reasons_if_every_stage_fails(folder: Path) -> None:
    done = stepscope(folder, "report", "--model", "mine:dies", "--without", "precision")
    assert done.returncode == 1
    assert "every stage failed" in done.stderr
    assert "SIGABRT" in (folder / "report.html").read_text()


def test_bad_input_leaves_nothing(folder: Path) -> None:
    done = stepscope(folder, "report", "--model", "mine:raises")
    assert done.returncode == 2
    assert "building `mine:raises` raised ValueError: no weights for today" in done.stderr
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"mine.py"}


def test_bad_calls_are_rejected_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("<html>my own</html>")
    calls = {
        ("--out", "mine.html"): "stepscope did not write it",
        ("--out", "report.pdf"): "unsupported file extension `.pdf`",
        ("--without", "memroy"): "unknown stage `memroy`",
        ("--size", "nano,small"): "one case to record, got 2",
        ("nothing.json",): "file not found: `nothing.json`",
        (str(TRACE), "--fresh"): "`--fresh` has no effect here",
    }
    for words, says in calls.items():
        done = stepscope(tmp_path, "report", *words)
        assert (done.returncode, says in done.stderr) == (2, True), f"{words}: {done.stderr}"
    assert {path.name for path in tmp_path.iterdir()} == {"mine.html"}
    assert stepscope(tmp_path, "report", str(TRACE), "--out", "mine.html", "--force").returncode == 0
    assert is_ours(tmp_path / "mine.html")

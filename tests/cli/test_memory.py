"""`stepscope memory`, and `stepscope explain` of what it leaves and of other people's snapshots."""

import csv
import json
import os
import pickle
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import kill, rows, start, stepscope, wait_until, workers
from tests.unit.snapshot_files import MIB, Model, frame, write

TINY = ["--d-model", "32", "--d-ff", "64", "--num-layers", "2", "--num-heads", "2", "--vocab", "50"]
TINY += ["--context", "16", "--batch", "2", "--steps", "2", "--device", "cpu"]
RESULTS = "runs/memory/results.jsonl"
DOCUMENT = ["peak_bytes", "peak_phase", "peak_step", "peak_module", "before_bytes", "categories", "modules", "largest"]
DOCUMENT += ["phases", "steps", "saved_bytes", "num_allocations"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """A directory with one case, recorded once for all tests, and the output of the command."""
    folder = tmp_path_factory.mktemp("one")
    done = stepscope(folder, "memory", *TINY, "--plot", "memory.html")
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """Two precisions, and a context that one of them has no room for."""
    folder = tmp_path_factory.mktemp("grid")
    axes = ["--context", "16,2048", "--precision", "fp32,bf16", "--memory-limit", "100MB"]
    done = stepscope(folder, "memory", *TINY, *axes)
    assert done.returncode == 0, done.stderr
    return folder, done


def only_recording(folder: Path) -> Path:
    (found,) = (folder / "runs/memory/recordings").iterdir()
    return found


def document(folder: Path, *arguments: str) -> dict[str, Any]:
    done = stepscope(folder, *arguments, "--format", "json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_page_has_the_peak_and_the_next_command(
    recorded: tuple[Path, "subprocess.CompletedProcess[str]"],
) -> None:
    folder, done = recorded
    assert "peak " in done.stdout.splitlines()[1]
    for part in ("by category", "by phase", "Largest allocations"):
        assert part in done.stdout
    assert len(done.stdout.splitlines()) < 60
    path = only_recording(folder).relative_to(folder)
    assert f"recording: {path}" in done.stderr
    assert f"next: stepscope explain {path} --questions" in done.stderr
    assert (only_recording(folder) / "raw.pickle.gz").is_file()
    assert [r["status"] for r in rows(folder, "runs/memory")] == ["ok"]


def test_document_is_the_same_from_run_and_file(recorded: tuple[Path, "subprocess.CompletedProcess[str]"]) -> None:
    """Of the run, of its recording, and of the snapshot that it keeps, which other viewers read too."""
    folder, _ = recorded
    again = stepscope(folder, "memory", *TINY, "--format", "json")
    assert "1 of 1 cases are already done" in again.stderr
    assert len(rows(folder, "runs/memory")) == 1
    ours = json.loads(again.stdout)
    assert ours["schema"] == "stepscope.memory-summary/1"
    assert sum(one["bytes"] for one in ours["categories"]) == ours["peak_bytes"] > 0
    assert ours["peak_phase"] in {one["phase"] for one in ours["phases"]}
    assert max(one["peak_bytes"] for one in ours["steps"]) == ours["peak_bytes"]
    assert stepscope(folder, "explain", str(only_recording(folder)), "--format", "json").stdout == again.stdout
    raw = document(folder, "explain", str(only_recording(folder) / "raw.pickle.gz"))
    for key in DOCUMENT:
        assert json.dumps(raw[key]) == json.dumps(ours[key]), key
    assert rows(folder, "runs/memory")[0]["summary"] == ours


@pytest.mark.parametrize(
    "part", ["categories", "phases", "steps", "modules", "layers", "largest", "freed", "leaks", "saved"]
)
def test_every_table_can_be_printed_alone(recorded: tuple[Path, "subprocess.CompletedProcess[str]"], part: str) -> None:
    folder, _ = recorded
    done = stepscope(folder, "memory", "--from", RESULTS, "--table", part, "--format", "csv")
    assert done.returncode == 0, done.stderr
    found = list(csv.DictReader(done.stdout.splitlines()))
    assert bool(found) == (part != "leaks")
    explained = stepscope(folder, "explain", str(only_recording(folder)), "--table", part, "--format", "csv")
    assert explained.stdout == done.stdout


@pytest.mark.parametrize("format_", ["text", "md", "json"])
def test_questions_are_answered_from_a_row(
    recorded: tuple[Path, "subprocess.CompletedProcess[str]"], format_: str
) -> None:
    folder, _ = recorded
    done = stepscope(folder, "memory", "--from", RESULTS, "--questions", "--detail", "--format", format_)
    assert done.returncode == 0, done.stderr
    assert "When does memory peak" in done.stdout


def test_plots_are_redrawn_and_foreign_files_need_force(
    recorded: tuple[Path, "subprocess.CompletedProcess[str]"],
) -> None:
    folder, done = recorded
    assert "chart: memory.html" in done.stderr
    page = (folder / "memory.html").read_text()
    assert "<html" in page
    assert "activations" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    draw = ["explain", str(only_recording(folder)), "--plot", "memory.png", "--by", "module", "--step", "1"]
    assert stepscope(folder, *draw, "--detail", "50%").returncode == 0
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert stepscope(folder, *draw).returncode == 0
    (folder / "memory.png").write_bytes(b"\x89PNG of somebody else")
    refused = stepscope(folder, *draw)
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    assert stepscope(folder, *draw, "--force").returncode == 0


def test_a_grid_is_a_table_of_peaks_and_what_does_not_fit_is_a_row(
    grid: tuple[Path, "subprocess.CompletedProcess[str]"],
) -> None:
    folder, done = grid
    assert "compared with fp32" in done.stdout
    assert "next: stepscope memory --from runs/memory/results.jsonl --plot peaks.png" in done.stderr
    found = {
        (r["case"]["workload"]["context"], r["case"]["workload"]["precision"]): r for r in rows(folder, "runs/memory")
    }
    assert {key: r["status"] for key, r in found.items()} == {
        (16, "fp32"): "ok",
        (16, "bf16"): "ok",
        (2048, "fp32"): "oom",
        (2048, "bf16"): "oom",
    }
    shown = stepscope(folder, "memory", "--from", RESULTS)
    assert shown.stdout == done.stdout
    assert "oom" in shown.stdout
    assert len(list((folder / "runs/memory/recordings").iterdir())) == 2
    assert not list((folder / "runs/memory/recordings").glob("*/raw*")), "of several cases only tables are kept"
    drawn = stepscope(folder, "memory", "--from", RESULTS, "--plot", "peaks.png")
    assert drawn.returncode == 0, drawn.stderr
    assert (folder / "peaks.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--questions"], "`--questions` needs a single case; got 4"),
        (["--table", "phases"], "`--table phases` needs a single case; got 4"),
        (["--table", "saved"], "--table saved --compile no,yes"),
    ],
)
def test_single_case_views_are_rejected_for_a_grid(
    grid: tuple[Path, "subprocess.CompletedProcess[str]"], arguments: list[str], said: str
) -> None:
    done = stepscope(grid[0], "memory", "--from", RESULTS, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.mark.parametrize("view", [[], ["--questions"], ["--table", "phases"]])
def test_single_failed_case_is_shown_as_in_bench(tmp_path: Path, view: list[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Broken(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        raise RuntimeError('it broke')\n"
        "def build():\n"
        "    return Broken(2, 2), torch.ones(1, 2), lambda y: y.sum()\n"
    )
    model = ["--model", "mine:build", "--device", "cpu", "--steps", "1"]
    bench = stepscope(tmp_path, "bench", *model)
    memory = stepscope(tmp_path, "memory", *model, *view)
    assert (
        (memory.returncode, "it broke" in memory.stdout) == (bench.returncode, "it broke" in bench.stdout) == (0, True)
    )


def test_checkpoint_study_compares_strategies(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "memory", *TINY, "--checkpoint-study", "--format", "csv")
    assert done.returncode == 0, done.stderr
    found = list(csv.DictReader(done.stdout.splitlines()))
    assert [one["checkpoint"] for one in found] == ["none", "block", "2"]
    none, block, _ = found
    assert int(block["peak_bytes"]) < int(none["peak_bytes"])
    assert int(block["saved_bytes"]) < int(none["saved_bytes"]) / 4
    assert float(none["ratio"]) == 1.0
    assert all(float(one["step_ms"]) > 0 for one in found)


def test_missing_recording_is_reported(
    tmp_path: Path, recorded: tuple[Path, "subprocess.CompletedProcess[str]"]
) -> None:
    shutil.copy(recorded[0] / RESULTS, tmp_path / "results.jsonl")
    done = stepscope(tmp_path, "memory", "--from", "results.jsonl")
    assert done.returncode == 2
    assert "the recording of this case is missing" in done.stderr


def test_interrupt_keeps_finished_cases(tmp_path: Path) -> None:
    sweep = start(tmp_path, "memory", *TINY, "--batch", "1,2,3,4,5,6,7,8")
    wait_until(lambda: bool(rows(tmp_path, "runs/memory")))
    assert kill(sweep, signal.SIGINT) == 130
    said = (tmp_path / "stderr.txt").read_text()
    assert "interrupted: finished cases are saved" in said
    assert "Traceback" not in said
    assert workers(tmp_path) == []
    kept = [r["key"] for r in rows(tmp_path, "runs/memory") if r["status"] == "ok"]
    assert 1 <= len(kept) < 8
    folders = {path.name for path in (tmp_path / "runs/memory/recordings").iterdir() if not path.name.startswith(".")}
    assert set(kept) <= folders


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--warmup", "3"], ["`--warmup` has no effect", "hint: --steps 10"]),
        (["--table", "kernels"], ["kernels", "categories"]),
        (["--detail", "200%"], ["`--detail 200%`", "hint: --detail 10%"]),
        (["--questions", "--batch", "2,4"], ["`--questions` needs a single case; got several"]),
        (["--table", "phases", "--checkpoint-study"], ["`--table phases` needs a single case; got several"]),
        (["--checkpoint-study", "--checkpoint", "2"], ["sets --checkpoint itself"]),
        (["--checkpoint-study", "--batch", "2,4"], ["`--checkpoint-study` takes a single workload"]),
        (["--plot", "memory.gif"], ["memory.gif", ".png"]),
        (["--plot", "none/memory.png"], ["not found: `none`"]),
        (["--by", "colour"], ["colour", "category"]),
        (["--size", "smal"], ["did you mean `small`"]),
        (["--from", "nowhere.jsonl"], ["cannot read the results file: `nowhere.jsonl`"]),
    ],
)
def test_bad_input_is_refused_before_anything_runs(tmp_path: Path, arguments: list[str], said: list[str]) -> None:
    base = [] if "--from" in arguments else ["--device", "cpu"]
    done = stepscope(tmp_path, "memory", *base, *arguments)
    assert done.returncode == 2, done.stderr
    for part in said:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("step", ["99", "0"])
def test_unknown_step_draws_nothing(recorded: tuple[Path, "subprocess.CompletedProcess[str]"], step: str) -> None:
    folder, _ = recorded
    done = stepscope(folder, "memory", "--from", RESULTS, "--plot", "step.png", "--step", step)
    assert done.returncode == 2
    assert f"step `{step}` not found" in done.stderr
    assert "from 1 to 2" in done.stderr
    assert not (folder / "step.png").exists()


def test_step_must_be_a_number_last_or_all(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "memory", "--plot", "step.png", "--step", "first")
    assert done.returncode == 2
    assert "`--step first`" in done.stderr
    assert not (tmp_path / "runs").exists()


# --- Other people's snapshots -----------------------------------------------------------------------------------------


class Hostile:
    """Unpickled by anybody less careful, it makes a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch pwned",)


def foreign() -> dict[str, Any]:
    model = Model(frames=[frame("/lab/model.py", 3)])
    for size in (3 * MIB, 5 * MIB):
        model.malloc(size)
    return model.snapshot()


@pytest.mark.parametrize("name", ["snapshot.pickle", "snapshot.pickle.gz", "no_ending"])
def test_foreign_snapshot_is_detected_by_content(tmp_path: Path, name: str) -> None:
    write(foreign(), tmp_path / name, zipped=name.endswith("gz"))
    assert document(tmp_path, "explain", name)["peak_bytes"] == 8 * MIB


def test_foreign_snapshot_is_shown_plotted_and_saved(tmp_path: Path) -> None:
    name = write(foreign(), tmp_path / "theirs.pickle").name
    page = stepscope(tmp_path, "explain", name)
    assert page.returncode == 0, page.stderr
    assert "lab/model.py:3 forward" in page.stdout
    drawn = stepscope(tmp_path, "explain", name, "--table", "categories", "--plot", "memory.svg")
    assert drawn.returncode == 0, drawn.stderr
    assert "<svg" in (tmp_path / "memory.svg").read_text()
    kept = stepscope(tmp_path, "explain", name, "--save", "kept")
    assert kept.returncode == 0, kept.stderr
    assert document(tmp_path, "explain", "kept")["peak_bytes"] == 8 * MIB


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps(Hostile()), ["system", "nothing was run"]),
        (pickle.dumps({"segments": [], "device_traces": [[Hostile()]]}), ["system", "nothing was run"]),
        (pickle.dumps(foreign())[:-40], ["damaged or truncated", "hint: create it again"]),
        (pickle.dumps([1, 2]), ["not a memory snapshot", "it contains a list"]),
        (pickle.dumps({"segments": 1, "device_traces": []}), ["no list `segments`"]),
        (pickle.dumps({"segments": [], "device_traces": []}), ["has no memory data"]),
        (pickle.dumps({**foreign(), "stepscope": {"schema": "stepscope.memory/9"}}), ["damaged labels in"]),
        (b"", ["is empty"]),
        (b"nothing at all", ["not a pickle, or damaged"]),
    ],
)
def test_pickle_that_is_not_a_snapshot_is_rejected_and_never_run(
    tmp_path: Path, content: bytes, said: list[str]
) -> None:
    (tmp_path / "theirs.pickle").write_bytes(content)
    done = stepscope(tmp_path, "explain", "theirs.pickle")
    assert done.returncode == 2, done.stdout
    for part in said:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["theirs.pickle"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--table", "kernels"], "has no table `kernels`"),
        (["--perfetto", "x.json"], "`--perfetto` needs a trace"),
        (["--table", "saved"], "no saved activations"),
        (["--plot", "x.png", "--step", "2"], "no step markers"),
        (["--detail", "200%"], "`--detail 200%`"),
        (["--questions", "--table", "phases"], "mutually exclusive"),
        (["--format", "md"], "`--format md` requires `--table`"),
        (["theirs.pickle"], "cannot be combined"),
    ],
)
def test_unsupported_views_of_a_snapshot_are_rejected(tmp_path: Path, arguments: list[str], said: str) -> None:
    write(foreign(), tmp_path / "theirs.pickle")
    done = stepscope(tmp_path, "explain", "theirs.pickle", *arguments)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["theirs.pickle"]

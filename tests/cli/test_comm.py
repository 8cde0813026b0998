"""`stepscope comm` end to end: tables, a killed rank, torchrun, bad input."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import PATIENCE_S, kill, rows, start, stepscope, wait_until, workers

OUT = "runs/comm"
TINY = ["comm", "--device", "cpu", "--ranks", "2", "--repetitions", "2"]


def test_a_rank_that_is_killed_costs_its_case_and_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    sizes = ",".join(f"{number}MB" for number in range(20, 40))
    sweep = start(
        tmp_path, *TINY[:-1], "1000", "--seconds", "1", "--sizes", sizes, "--collective", "broadcast", "--timeout", "20"
    )
    wait_until(lambda: len(rows(tmp_path, OUT)) > 0)
    ranks = sorted(_ranks(tmp_path))
    assert len(ranks) == 3  # and their parent process
    os.kill(ranks[-1], signal.SIGKILL)
    wait_until(lambda: any(row["status"] != "ok" for row in rows(tmp_path, OUT)))
    assert kill(sweep, signal.SIGINT) == 130
    assert "interrupted: finished cases are saved" in (tmp_path / "stderr.txt").read_text()
    assert _ranks(tmp_path) == []
    (failed,) = [row for row in rows(tmp_path, OUT) if row["status"] != "ok"]
    assert failed["status"] == "killed"
    assert "rank 1 was killed by SIGKILL" in failed["reason"] or "rank 0 was killed by SIGKILL" in failed["reason"]
    assert (tmp_path / OUT / "logs" / f"{failed['key']}.log").exists()


def _ranks(folder: Path) -> list[int]:
    return workers(folder, "stepscope.measure.training")


def test_ranks_started_by_torchrun_work_and_only_rank_0_prints(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "stepscope", "comm", "--device", "cpu", "--repetitions", "2"]
    command += ["--sizes", "10kB,40kB"]
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    told |= {"OMP_NUM_THREADS": "1", "STEPSCOPE_CACHE": str(tmp_path / "cache")}
    ranks = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=os.environ | told | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert said[1] == ("", "")
    assert "all-reduce, 2 ranks, gloo:" in said[0][0]
    assert "next: stepscope comm --from runs/comm/results.jsonl --plot comm.png" in said[0][1]
    assert [(row["case"]["ranks"], row["status"]) for row in rows(tmp_path, OUT)] == [(2, "ok")] * 8
    _check_what_is_kept_and_shown(tmp_path)


def _check_what_is_kept_and_shown(folder: Path) -> None:
    assert {path.name for path in (folder / OUT).iterdir()} == {"results.jsonl", "links.json"}
    kept = [json.loads((folder / where / "links.json").read_text()) for where in ("cache", OUT)]
    assert kept[0] == kept[1]
    assert set(kept[0][0]["links"]) == {"all-reduce", "all-gather", "reduce-scatter", "broadcast"}
    table = json.loads(stepscope(folder, "comm", "--from", f"{OUT}/results.jsonl", "--format", "json").stdout)
    assert [row["message"] for row in table["rows"]] == ["10 kB", "40 kB"] * 4
    assert {"median_ms", "p20_ms", "bus_gb_per_s", "rank_spread", "slowest_rank"} <= set(table["rows"][0])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--collective", "all-redcue"], ["unknown collective: `all-redcue`", "hint: --collective all-reduce"]),
        (["--from", "other.jsonl"], ["expected rows of schema `stepscope.comm/1`", "stepscope comm --out"]),
        (["--from", "other.jsonl", "--ranks", "2"], ["`--ranks` has no effect"]),
    ],
)
def test_bad_input_is_an_error_with_a_hint_and_leaves_nothing(
    tmp_path: Path, arguments: list[str], said: list[str]
) -> None:
    (tmp_path / "other.jsonl").write_text('{"schema":"stepscope.bench/1"}\n')
    done = stepscope(tmp_path, "comm", *arguments)
    assert done.returncode == 2, done.stderr
    for part in said:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()

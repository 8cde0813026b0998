"""`stepscope attention` end to end: tables, resuming, failures, charts, bad input."""

import json
import signal
from pathlib import Path

import pytest

from tests.cli.command import kill, rows, start, stepscope, wait_until, workers

OUT = "runs/attention"
TINY = ["attention", "--device", "cpu", "--batch", "1", "--head-dim", "8", "--repetitions", "2"]


def test_grid_with_failing_cases_completes_and_resumes(tmp_path: Path) -> None:
    command = [*TINY, "--implementation", "naive,sdpa,triton", "--length", "16,4096", "--memory-limit", "150MB"]
    first = stepscope(tmp_path, *command)
    assert first.returncode == 0, first.stderr
    found = {(r["case"]["implementation"], r["case"]["length"]): r for r in rows(tmp_path, OUT)}
    assert {key: r["status"] for key, r in found.items()} == {
        ("naive", 16): "ok",
        ("naive", 4096): "oom",
        ("sdpa", 16): "ok",
        ("sdpa", 4096): "ok",
        ("triton", 16): "unsupported",
        ("triton", 4096): "unsupported",
    }
    assert "it requires a CUDA GPU" in found["triton", 16]["reason"]
    assert "fwd vs sdpa" in first.stdout
    assert "predicted" in first.stdout
    assert "next: stepscope attention --from runs/attention/results.jsonl --plot attention.png" in first.stderr
    wider = stepscope(tmp_path, *command, "--implementation", "naive,sdpa,tiled,triton")
    assert "6 of 8 cases are already done" in wider.stderr
    assert len(rows(tmp_path, OUT)) == 8
    _check_what_is_shown(tmp_path)


def _check_what_is_shown(folder: Path) -> None:
    show = ["attention", "--from", "runs/attention/results.jsonl"]
    table = json.loads(stepscope(folder, *show, "--format", "json").stdout)
    assert [row["implementation"] for row in table["rows"]] == ["naive", "sdpa", "tiled", "triton"] * 2
    assert {"forward_p20_ms", "backward_vs_peer", "peak_form_bytes", "dk_error"} <= set(table["rows"][0])
    drawn = stepscope(folder, *show, "--table", "memory", "--plot", "memory.png", "--plot-of", "peak")
    assert drawn.returncode == 0, drawn.stderr
    assert "before backward" in drawn.stdout
    assert "TFLOP/s" not in drawn.stdout
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupt_ends_the_worker_and_keeps_the_rows(tmp_path: Path) -> None:
    lengths = ",".join(str(16 * number) for number in range(1, 40))
    sweep = start(tmp_path, *TINY[:-1], "1000", "--seconds", "0.1", "--implementation", "naive", "--length", lengths)
    wait_until(lambda: len(rows(tmp_path, OUT)) >= 2)
    assert kill(sweep, signal.SIGINT) == 130
    assert "interrupted: finished cases are saved" in (tmp_path / "stderr.txt").read_text()
    assert workers(tmp_path) == []
    assert 2 <= len(rows(tmp_path, OUT)) < 39


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--implementation", "trito"], ["unknown implementation: `trito`", "hint: --implementation triton"]),
        (["--peer", "sdp"], ["unknown peer: `sdp`", "hint: --peer sdpa"]),
        (["--from", "other.jsonl"], ["expected rows of schema `stepscope.attention/1`", "stepscope attention --out"]),
        (["--from", "other.jsonl", "--no-causal"], ["`--causal` has no effect"]),
        (["--device", "tpu"], ["unknown device: `tpu`"]),
    ],
)
def test_bad_input_is_an_error_with_a_hint_and_leaves_nothing(
    tmp_path: Path, arguments: list[str], said: list[str]
) -> None:
    (tmp_path / "other.jsonl").write_text('{"schema":"stepscope.bench/1"}\n')
    done = stepscope(tmp_path, "attention", *arguments)
    assert done.returncode == 2, done.stderr
    for part in said:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()

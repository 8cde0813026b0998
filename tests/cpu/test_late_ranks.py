"""Real ranks over gloo, one of which is late in a known way: it is named, with the reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stepscope
from stepscope.explain.ranks.reasons import Reason

ROOT = Path(__file__).parents[2]


def record(folder: Path, world: int, late: int, fault: str, strategy: str = "ddp") -> stepscope.Run:
    command = [sys.executable, "-m", "tests.cpu.late_ranks", str(folder), str(world), str(late), fault, strategy]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, check=True, env=environment, timeout=300)
    return stepscope.load(folder, cache=False)


@pytest.mark.parametrize(
    ("world", "late", "fault", "reason", "said"),
    [
        (2, 1, "input", "input", "its CPU waits for input"),
        (2, 0, "host", "host", "it runs no operators: no operator follows"),
        (2, 1, "work", "work", "in kernels or shapes that they do not run"),
        (4, 2, "input", "input", "its CPU waits for input"),
        (4, 1, "logging", "host", "it is in `logging`"),
        (4, 3, "work", "work", "in kernels or shapes that they do not run"),
    ],
)
def test_late_rank_of_ddp_is_named_with_its_reason(
    tmp_path: Path, world: int, late: int, fault: str, reason: Reason, said: str
) -> None:
    run = record(tmp_path, world, late, fault)
    assert run.rank_times is not None
    assert run.rank_times.straggler is not None
    assert (run.rank_times.straggler.lateness.rank, run.rank_times.straggler.reason) == (late, reason)
    (finding,) = (one for one in run.findings if one.code == "SS030")
    assert f"wait for rank {late}" in finding.title
    assert said in finding.evidence
    assert run.rank_times.lateness[late].steps == 3  # all of them are matched


@pytest.mark.parametrize(("fault", "reason"), [("input", "input"), ("host", "host")])
def test_late_rank_of_fsdp_is_named_with_its_reason(tmp_path: Path, fault: str, reason: Reason) -> None:
    times = record(tmp_path, 2, 1, fault, "fsdp").rank_times
    assert times is not None
    assert times.straggler is not None
    assert (times.straggler.lateness.rank, times.straggler.reason) == (1, reason)
    # Gloo runs a reduce-scatter as an all-reduce: the operator says what it is.
    assert set(times.ranks[0].collectives["kind"]) == {"all-gather", "reduce-scatter"}

"""Real ranks over gloo, one of which is late in a known way: it is named, with the reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stepscope
from stepscope.explain.ranks.reasons import Reason

ROOT = Path(__file__).parents[2]


# World size, late rank, fault, the reason that is found, and a part of the evidence.
DDP: tuple[tuple[int, int, str, Reason, str], ...] = (
    (2, 1, "input", "input", "its CPU waits for input"),
    (2, 0, "host", "host", "it runs no operators: no operator follows"),
    (2, 1, "work", "work", "in kernels or shapes that only it runs"),
    (4, 2, "input", "input", "its CPU waits for input"),
    (4, 1, "logging", "host", "it is in `logging`"),
    (4, 3, "work", "work", "in kernels or shapes that only it runs"),
)
FSDP: tuple[tuple[str, Reason], ...] = (("input", "input"), ("host", "host"))


class Recordings:
    """The directories of all runs, by world size, late rank, fault and strategy."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        runs = [(world, late, fault, "ddp") for world, late, fault, _, _ in DDP]
        runs += [(2, 1, fault, "fsdp") for fault, _ in FSDP]
        words = []
        for run in runs:
            self._path(*run).mkdir()
            words.append(",".join((str(self._path(*run)), *map(str, run))))
        command = [sys.executable, "-m", "tests.cpu.late_ranks", *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, check=True, env=environment, timeout=500)

    def load(self, world: int, late: int, fault: str, strategy: str = "ddp") -> stepscope.Run:
        return stepscope.load(self._path(world, late, fault, strategy), cache=False)

    def _path(self, *run: object) -> Path:
        return self._folder / "-".join(map(str, run))


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    return Recordings(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("world", "late", "fault", "reason", "said"), DDP)
def test_late_rank_of_ddp_is_named_with_its_reason(
    recordings: Recordings, world: int, late: int, fault: str, reason: Reason, said: str
) -> None:
    run = recordings.load(world, late, fault)
    assert run.rank_times is not None
    assert run.rank_times.straggler is not None
    assert (run.rank_times.straggler.lateness.rank, run.rank_times.straggler.reason) == (late, reason)
    (finding,) = (one for one in run.findings if one.code == "SS030")
    waiting = f"Rank {1 - late} waits" if world == 2 else "The other ranks wait"
    assert finding.title.startswith(f"{waiting} for rank {late}: ")
    assert said in finding.evidence
    assert run.rank_times.lateness[late].steps == 3  # all of them are matched


@pytest.mark.parametrize(("fault", "reason"), FSDP)
def test_late_rank_of_fsdp_is_named_with_its_reason(recordings: Recordings, fault: str, reason: Reason) -> None:
    times = recordings.load(2, 1, fault, "fsdp").rank_times
    assert times is not None
    assert times.straggler is not None
    assert (times.straggler.lateness.rank, times.straggler.reason) == (1, reason)
    # Gloo runs a reduce-scatter as an all-reduce: the operator says what it is.
    assert set(times.ranks[0].collectives["kind"]) == {"all-gather", "reduce-scatter"}

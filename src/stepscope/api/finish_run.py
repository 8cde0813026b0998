"""Finishes a recorded run in its own process: every rank's raw files become a recording, and rank 0 writes the page.

`python -m stepscope.api.finish_run DIR --rank 0` is started by the training process, and may outlive it.
"""

import argparse
import sys
import time
from pathlib import Path

from stepscope.api.report import report
from stepscope.errors import Exit, StepscopeError
from stepscope.jobs.loop_reduction import reduce_memory, reduce_rank
from stepscope.loop.messages import tell
from stepscope.loop.place import MEMORY_FOLDER, read_run
from stepscope.recording.memory.labels import SNAPSHOT_NAME
from stepscope.recording.store import is_recording
from stepscope.render.terminal import summarize_report

_PATIENCE_S = 120.0  # for the other ranks, whose steps end at the same time


def finish_run(folder: Path, rank: int) -> None:
    facts = read_run(folder)
    reduce_rank(folder / f"rank-{rank}.raw", folder / f"rank-{rank}", command=facts.command)
    if rank != 0:
        return
    if (folder / f"{MEMORY_FOLDER}.raw" / SNAPSHOT_NAME).is_file():
        reduce_memory(folder / f"{MEMORY_FOLDER}.raw", folder / MEMORY_FOLDER, command=facts.command)
    missing = _wait_for_ranks(folder, facts.world_size)
    if missing:
        tell(f"{missing} of {facts.world_size} ranks recorded nothing; the page shows the others")
    page = report(folder, (folder / facts.page).resolve(), force=True, command=facts.command)
    for line in summarize_report(page.report):
        tell(line)
    tell(f"page: {page.path}")


def _wait_for_ranks(folder: Path, world_size: int) -> int:
    """Wait until every rank has its recording. Return how many have not."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        missing = sum(not is_recording(folder / f"rank-{rank}") for rank in range(world_size))
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    given = parser.parse_args()
    try:
        finish_run(given.folder, given.rank)
    except StepscopeError as error:
        tell(f"error: {error}")
        sys.exit(Exit.BAD_INPUT)


if __name__ == "__main__":
    main()

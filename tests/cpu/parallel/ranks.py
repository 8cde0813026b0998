"""Ranks for tests: forked from one process that has imported torch, joined through a file."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch._dynamo", "stepscope.parallel.group", "stepscope.measure.training"])


def run_ranks(function: Callable[..., Any], world: int, *arguments: object, timeout_s: float = 240) -> list[Any]:
    """Run `function(rank, world, *arguments)` in `world` processes of one gloo group; return the results in rank
    order.
    """
    with start_ranks(function, world, *arguments, timeout_s=timeout_s) as (_, pipes):
        return _collect({pipe: rank for rank, pipe in enumerate(pipes)}, timeout_s)


@contextmanager
def start_ranks(
    function: Callable[..., Any], world: int, *arguments: object, timeout_s: float = 240
) -> Iterator[tuple[list[Any], list[Connection]]]:
    """Yield the processes, for tests that act on them, and the pipes over which they report."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meet"
        processes, pipes = [], []
        for rank in range(world):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            task = (function, rank, world, arguments, theirs, meeting, timeout_s)
            process = _CONTEXT.Process(target=_serve, args=task)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            yield processes, pipes
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(waiting: dict[Connection, int], timeout_s: float) -> list[Any]:
    answers: dict[int, Any] = {}
    world = len(waiting)
    while waiting:
        ready = wait(list(waiting), timeout_s)
        assert ready, f"ranks {sorted(waiting.values())} said nothing for {timeout_s} s"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                failure, answers[rank] = pipe.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died") from None
            if failure:
                raise AssertionError(f"rank {rank} raised:\n{failure}")
    return [answers[rank] for rank in range(world)]


def _serve(
    function: Callable[..., Any],
    rank: int,
    world: int,
    arguments: tuple[object, ...],
    answers: Connection,
    meeting: Path,
    timeout_s: float,
) -> None:
    import torch

    from stepscope.parallel.group import join
    from stepscope.parallel.journal import FOLDER_VARIABLE

    torch.set_num_threads(1)
    os.environ[FOLDER_VARIABLE] = str(meeting.with_name("journal"))
    try:
        with join(backend="gloo", timeout_s=timeout_s, meeting=meeting, rank=rank, world=world):
            answer = function(rank, world, *arguments)
            answers.send(("", answer))
    except BaseException:  # noqa: BLE001  # the process boundary: the test raises it again
        answers.send((traceback.format_exc(), None))
        os._exit(1)  # threads that wait for a dead peer would delay the exit

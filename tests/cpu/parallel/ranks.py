"""Ranks for tests: forked from one process that has imported torch, joined through a file."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch._dynamo", "stepscope.parallel.group", "stepscope.nn"])


def run_ranks(function: Callable[..., Any], world: int, *arguments: object, timeout_s: float = 60) -> list[Any]:
    """`function(rank, world, *arguments)` in `world` processes of one gloo group; what each returned, in order."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(world)]
        processes = [
            _CONTEXT.Process(
                target=_serve, args=(function, rank, world, arguments, pipes[rank][1], Path(folder) / "meet", timeout_s)
            )
            for rank in range(world)
        ]
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        try:
            return _collect({ours: rank for rank, (ours, _) in enumerate(pipes)}, timeout_s)
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

    torch.set_num_threads(1)
    try:
        with join(backend="gloo", timeout_s=timeout_s, meeting=meeting, rank=rank, world=world):
            answer = function(rank, world, *arguments)
            answers.send(("", answer))
    except BaseException:  # noqa: BLE001  # the process boundary: the test raises it again
        answers.send((traceback.format_exc(), None))

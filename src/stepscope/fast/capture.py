"""CUDA graphs of a step, one per phase, in one memory pool.

Each phase has a graph of its own, so that timers and recorders still see forward, backward and optimizer. Between two
graphs the GPU waits for a few microseconds at most, because the CPU launches the next one while the first runs.

A step that waits for the GPU cannot be captured. One that does is found before capture, because a failed capture leaves
CUDA in a state that is hard to leave; the error names the line.
"""

import gc
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

WARMUP = 3
# Not only names of directories: people keep their own code in a directory `torch`, too.
_PACKAGES = tuple(f"{Path(file).parent}/" for file in (torch.__file__, Path(__file__).parent))
_INTERNAL = (*_PACKAGES, "-packages/triton/", "/contextlib.py", "<frozen", "<eval_with_key>", "/torchinductor_")

Phase = tuple[str, Callable[[], None]]


class Part(NamedTuple):
    """A part of a step that becomes one graph. `prepare` runs before it is captured, and may wait for the GPU.
    `warm_up` loads its kernels without changing weights; without it, the part itself runs."""

    name: str
    run: Callable[[], None]
    prepare: Callable[[], None] | None = None
    warm_up: Callable[[], None] | None = None


class CannotCapture(RuntimeError):  # noqa: N818 - what happened, not what is wrong with the program
    """A step cannot be captured: the reason, and the line of the user's code, if known."""

    def __init__(self, reason: str, line: str | None) -> None:
        super().__init__(f"{line}: {reason}" if line else reason)
        self.reason, self.line = reason, line


def capture(parts: Sequence[Part], device: torch.device) -> tuple[Phase, ...]:
    """Run the parts a few times, then capture each one, and return phases that replay the graphs. They read and write
    the same memory every time."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for number in range(WARMUP):
            for part in parts:
                prepare(part)
                if part.warm_up is not None:
                    part.warm_up()
                    continue
                with _naming_lines(), refusing_waits() if number == WARMUP - 1 else nullcontext():
                    part.run()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    gc.collect()  # a graph must not free memory that an earlier step left behind
    pool = torch.cuda.graph_pool_handle()
    captured = []
    for part in parts:
        prepare(part)
        graph = torch.cuda.CUDAGraph()
        with _naming_lines(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            part.run()
        captured.append((part.name, graph.replay))
    torch.cuda.synchronize(device)
    return tuple(captured)


def prepare(part: Part) -> None:
    """Run what a part needs before it is captured."""
    if part.prepare is not None:
        part.prepare()


@contextmanager
def refusing_waits() -> Iterator[None]:
    """PyTorch raises at operations that wait for the GPU, before they do."""
    earlier = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(earlier)


@contextmanager
def _naming_lines() -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        if "synchronizing" not in text and "captur" not in str(error):
            raise
        line = _line_of(error)
        # Whoever keeps the error must not keep tensors of the step. Their part of autograd's graph belongs to the
        # stream of the capture, and PyTorch warns when a later step on another stream meets it.
        traceback.clear_frames(error.__traceback__)
        raise CannotCapture("it waits for the GPU" if "synchronizing" in text else text, line) from error


def _line_of(error: BaseException) -> str | None:
    """The innermost line that is the user's, as `file.py:12`: `code`."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not any(part in frame.filename for part in _INTERNAL):
            code = f" `{frame.line}`" if frame.line else ""
            return f"{Path(frame.filename).name}:{frame.lineno}{code}"
    return None

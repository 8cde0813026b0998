"""Decode blocks of events in several processes: the parser holds the GIL, so threads would not help.

The processes are plain interpreters that import only the decoder. They read blocks from stdin and write columns to
stdout. Small traces do not use them.
"""

import fcntl
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from queue import Queue
from typing import IO

from stepscope.errors import StepscopeError
from stepscope.recording.readers.kineto_events import BadBlockError, Decoded, EventDecoder

_LENGTH = struct.Struct("<Q")
_PIPE_BYTES = 1 << 20  # what Linux allows every user
_WITHOUT_ARGUMENTS = "--without-arguments"
# numpy's BLAS starts threads that spin for a tenth of a second, on cores that another process could use.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


def decode_block(decoder: EventDecoder, block: bytes) -> Decoded:
    try:
        return decoder.decode(block)
    except BadBlockError:
        return decoder.salvage(block)


def decode_in_processes(
    blocks: Iterator[tuple[int, bytes]], processes: int, *, with_arguments: bool
) -> Iterator[tuple[int, int, Decoded]]:
    """Yield (block number, process number, columns) in the order of completion."""
    # One waiting block per process keeps all of them busy and bounds the memory.
    waiting: Queue[tuple[int, bytes] | None] = Queue(maxsize=processes)
    done: Queue[tuple[int, int, Decoded] | BaseException | None] = Queue()
    stop = threading.Event()
    command = [sys.executable, "-P", "-m", __name__, *([] if with_arguments else [_WITHOUT_ARGUMENTS])]
    threads = [
        threading.Thread(target=_serve, args=(command, number, waiting, done, stop), daemon=True)
        for number in range(processes)
    ]
    threads.append(threading.Thread(target=_feed, args=(blocks, waiting, done, stop, processes), daemon=True))
    for thread in threads:
        thread.start()
    try:
        left = processes
        while left:
            result = done.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                left -= 1
            else:
                yield result
    finally:
        stop.set()
        while not waiting.empty():  # unblock a feeder that waits for room
            waiting.get_nowait()
        for thread in threads:
            thread.join(timeout=5)


def _feed(
    blocks: Iterator[tuple[int, bytes]],
    waiting: "Queue[tuple[int, bytes] | None]",
    done: "Queue[tuple[int, int, Decoded] | BaseException | None]",
    stop: threading.Event,
    processes: int,
) -> None:
    try:
        for block in blocks:
            if stop.is_set():
                break
            waiting.put(block)
    except BaseException as error:  # noqa: BLE001  # raised again by whoever reads `done`
        done.put(error)
    for _ in range(processes):
        waiting.put(None)


def _serve(
    command: list[str],
    number: int,
    waiting: "Queue[tuple[int, bytes] | None]",
    done: "Queue[tuple[int, int, Decoded] | BaseException | None]",
    stop: threading.Event,
) -> None:
    try:
        # In its own session: Ctrl-C is for the parent, and a worker ends when its input does.
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **_ONE_THREAD},
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            # The default of 64 KiB wakes both processes a hundred times per block. Linux limits what each user gets.
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            while (item := waiting.get()) is not None and not stop.is_set():
                index, block = item
                process.stdin.write(_LENGTH.pack(len(block)))
                process.stdin.write(block)
                process.stdin.flush()
                done.put((index, number, _receive(process.stdout)))
            process.stdin.close()
    except BaseException as error:  # noqa: BLE001  # raised again by whoever reads `done`
        done.put(error)
    done.put(None)


def _receive(stream: IO[bytes]) -> Decoded:
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise StepscopeError(
            "a process that reads the trace exited early", detail="it was killed, or ran out of memory"
        )
    # Written by our own child process: this pickle never comes from a file.
    decoded = pickle.loads(stream.read(_LENGTH.unpack(header)[0]))
    assert isinstance(decoded, Decoded)
    return decoded


def _work() -> None:
    import gc

    # Reference counting frees everything here; the garbage collector would visit 100,000 events for nothing.
    gc.disable()
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    decoder = EventDecoder(with_arguments=_WITHOUT_ARGUMENTS not in sys.argv)
    while header := source.read(_LENGTH.size):
        block = source.read(_LENGTH.unpack(header)[0])
        content = pickle.dumps(decode_block(decoder, block), protocol=5)
        target.write(_LENGTH.pack(len(content)))
        target.write(content)
        target.flush()


if __name__ == "__main__":
    # Import under the real module name, so that the pickled class is the one that the receiver knows.
    from stepscope.recording.readers.kineto_workers import _work as work

    work()

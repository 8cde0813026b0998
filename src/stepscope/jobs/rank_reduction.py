"""Many ranks reduced in parallel: each file becomes the activity of its rank, in one of a few processes.

A process reads one file at a time, so memory is bounded by the number of processes, and the parent receives a few
hundred kilobytes per rank. The activity of a recording is kept in its directory; that of a trace, in its cache
directory if it has one.
"""

import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import msgspec

from stepscope.errors import StepscopeError
from stepscope.explain.ranks.activity import RankActivity, reduce_rank
from stepscope.explain.ranks.activity_file import decode, encode, keep_activity, read_activity, save_rank
from stepscope.explain.trace.profile import make_profile
from stepscope.hardware import available_bytes
from stepscope.recording.cache import read_cached
from stepscope.recording.readers.formats import open_recording
from stepscope.recording.store import Recording

ENTRY = "stepscope.jobs.rank_reduction:reduce_share"
_LENGTH = struct.Struct("<?Q")  # whether it failed, and how many bytes follow
# A gzip trace of 0.6 MB takes 250 MB to read and reduce, and one of 3 MB takes 400 MB.
_PROCESS_BYTES, _BYTES_PER_BYTE = 300 << 20, 100
_ONE_THREAD = {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class _Order(msgspec.Struct, frozen=True):
    path: str
    cached: bool = False
    folder: str | None = None  # of a run, where to save the reduced recording


class _Refusal(msgspec.Struct, frozen=True):
    message: str
    detail: str
    hint: str


class ShareOfTraces(msgspec.Struct, frozen=True, kw_only=True):
    """What the tasks of a cluster's job divide among them."""

    traces: tuple[str, ...]
    folder: str


def reduce_files(paths: Sequence[Path], *, cached: bool = True) -> list[RankActivity]:
    """Return the activity of each file or directory, in order. What is kept in a directory is read back."""
    kept = {path: read_activity(path) if path.is_dir() else None for path in paths}
    rest = [path for path in paths if kept[path] is None]
    made = dict(zip(rest, _run([_Order(str(path), cached) for path in rest]), strict=True))
    return [kept[path] or made[path] for path in paths]


def reduce_into(traces: Sequence[Path], folder: Path) -> None:
    """Reduce traces to recordings in a run's directory, one per rank: `rank-0`, `rank-1`. Those that are there already
    are left alone."""
    folder.mkdir(parents=True, exist_ok=True)
    _run([_Order(str(path), folder=str(folder)) for path in traces])


def reduce_share(request: str) -> None:
    """Reduce the traces of this task of a job, by its rank among the tasks."""
    share = msgspec.json.decode(request, type=ShareOfTraces)
    task, tasks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    reduce_into([Path(path) for path in share.traces[task::tasks]], Path(share.folder))


# --- In the parent ----------------------------------------------------------------------------------------------------


def _run(orders: Sequence[_Order]) -> list[RankActivity]:
    """Carry out orders in a few processes. The first failure is raised, after the orders that were begun."""
    if not orders:
        return []
    count = _count_processes(orders)
    shares = [orders[place::count] for place in range(count)]
    failed = threading.Event()
    with ThreadPoolExecutor(count) as threads:
        done = list(threads.map(lambda share: list(_follow(share, failed)), shares))
    refused = next((one for share in done for one in share if isinstance(one, _Refusal)), None)
    if refused is not None:
        raise StepscopeError(refused.message, detail=refused.detail, hint=refused.hint)
    by_place = {place + at * count: one for place, share in enumerate(done) for at, one in enumerate(share)}
    return [one for place in sorted(by_place) if isinstance(one := by_place[place], RankActivity)]


def _count_processes(orders: Sequence[_Order]) -> int:
    """As many as there are cores, files, and room in memory."""
    largest = max((Path(one.path).stat().st_size for one in orders if Path(one.path).is_file()), default=0)
    room = available_bytes() // (_PROCESS_BYTES + _BYTES_PER_BYTE * largest)
    return max(1, min(len(os.sched_getaffinity(0)), len(orders), room))


def _follow(orders: Sequence[_Order], failed: threading.Event) -> Iterator[RankActivity | _Refusal]:
    code = "from stepscope.jobs.rank_reduction import serve; serve()"
    # In its own session: Ctrl-C is for the parent, and a worker ends when its input does.
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, **_ONE_THREAD},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for order in orders:
            if failed.is_set():
                break
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            process.stdin.flush()
            one = _receive(process.stdout, order)
            if isinstance(one, _Refusal):
                failed.set()
            yield one
        process.stdin.close()


def _receive(stream: IO[bytes], order: _Order) -> RankActivity | _Refusal:
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return _Refusal(f"a process that reads `{order.path}` exited early", "it was killed, or ran out of memory", "")
    has_failed, length = _LENGTH.unpack(header)
    content = stream.read(length)
    return msgspec.json.decode(content, type=_Refusal) if has_failed else decode(content)


# --- In a worker ------------------------------------------------------------------------------------------------------


def serve() -> None:
    """Read orders from the standard input and answer each on the standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=_Order)
        try:
            has_failed, content = False, encode(_carry_out(order))
        except StepscopeError as error:
            has_failed, content = True, msgspec.json.encode(_Refusal(error.message, error.detail, error.hint))
        answers.write(_LENGTH.pack(has_failed, len(content)) + content)
        answers.flush()


def _carry_out(order: _Order) -> RankActivity:
    path = Path(order.path)
    if order.folder is not None:
        return _save(open_recording(path), Path(order.folder))
    recording, folder = read_cached(path, open_recording) if order.cached else (open_recording(path), None)
    activity = reduce_rank(make_profile(recording)).named(path.name)
    if folder is not None:
        keep_activity(activity, folder)
    return activity


def _save(recording: Recording, folder: Path) -> RankActivity:
    rank = recording.manifest.rank
    if rank is None:
        raise StepscopeError(
            f"`{recording.manifest.file}` does not contain its rank",
            detail="PyTorch's profiler writes it if torch.distributed is initialized",
        )
    target = folder / f"rank-{rank}"
    done = read_activity(target)
    if done is not None and done.manifest.file == recording.manifest.file:
        return done
    return save_rank(recording, target)

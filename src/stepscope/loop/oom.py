"""`stepscope.explain_oom`: a page that explains why CUDA ran out of memory, from inside the process that did.

PyTorch calls an observer when a request has finally failed: after it has looked for a free block, returned cached
segments to CUDA and tried again. The allocator's lock is released, nothing has been unwound, and the exception is
raised when the observer returns. So at that moment everything is still held, and can be named (`tensor_owners`). The
snapshot is written here; a child process reads it and writes the page, because this process may be about to die. An
exception in the observer would replace the user's, so none leaves it.

Not every failed request ends a program: cuDNN's benchmark mode and some libraries catch the error and try something
smaller. The first ones are all recorded, later ones only now and then.

The allocator can record the stack of every allocation. That costs up to 39% of a CPU-bound step (docs/memory.md), so it
is on only until the third step of an optimizer, where most programs run out of memory if they do, and in one step of
fifty after that: less than 1% on average. In between nothing is recorded and the steps cost nothing. Live memory keeps
its stack either way, so a leak that grows over hundreds of steps still has the line that causes it.
"""

import atexit
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import msgspec
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from stepscope.files import write_atomically
from stepscope.loop.messages import TERMINAL, tell
from stepscope.loop.place import find_rank
from stepscope.loop.source_lines import classify_file, shorten_path
from stepscope.loop.tensor_owners import Owners, find_owners
from stepscope.recording.memory.labels import KEY, Mark, MemoryLabels, OutOfMemoryFacts

_FIRST_STEPS, _EVERY = 3, 50
_MOST_EVENTS = 50_000  # about 10 MB, and some steps of a large model
_MOST_PAGES, _AT_ONCE, _APART_S = 10, 3, 60.0
_MOST_FRAMES = 200
_PATIENCE_S = 60.0  # at exit, for a page that is being written
_OURS = str(Path(__file__).parents[1]) + os.sep
_BACKWARD = "_engine_run_backward"  # waits for autograd's threads


class Place(NamedTuple):
    """Where a training loop is, as far as its recorder knows."""

    step: int | None = None
    phase: str = ""
    module: str = ""


class OomWatch(AbstractContextManager["OomWatch"]):
    """What `explain_oom` returns. `reason` says why it does nothing, if so: on a machine without CUDA, or with an
    allocator that has no observers. As a context manager, it ends with the block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reason = _find_reason()
        self.locate: Callable[[], Place] | None = None
        self.snapshots: list[Path] = []
        self.failures: list[str] = []
        self._history = _StackHistory()
        self._lock = threading.Lock()
        self._last_s = 0.0
        self._children: list[subprocess.Popen[bytes]] = []

    @property
    def is_active(self) -> bool:
        return _active is self and not self.reason

    def uninstall(self) -> None:
        """Stop recording stacks and ignore later failures. PyTorch cannot forget an observer: ours stays, and returns
        at once."""
        global _active
        self._history.stop()
        if _active is self:
            _active = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()

    def wait(self, timeout_s: float = _PATIENCE_S) -> None:
        """Wait for the pages that are being written."""
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout_s)

    def _install(self) -> None:
        global _active
        _active = self
        if not self.reason:
            # Not now if CUDA is not initialized: a script may want to fork first.
            torch.cuda._lazy_call(self._attach)  # type: ignore[no-untyped-call]

    def _attach(self) -> None:
        global _is_attached
        if _active is not self:
            return
        if not _is_attached:
            _is_attached = True
            torch._C._cuda_attach_out_of_memory_observer(_observe)  # type: ignore[attr-defined]
        self._history.start()

    def _record(self, device: int, asked: int, limit: int, free: int) -> None:
        if not self._lock.acquire(blocking=False):  # two threads at once: one page is enough
            return
        try:
            if self._is_due():
                path = self._write(device, asked, limit, free)
                self.snapshots.append(path)
                self._explain(path)
        except Exception as error:  # noqa: BLE001  # C++ would raise this one instead of the user's
            self.failures.append(f"{type(error).__name__}: {error}")
            tell(f"the out-of-memory error was not recorded: {self.failures[-1]}")
        finally:
            self._last_s = time.monotonic()
            self._lock.release()

    def _is_due(self) -> bool:
        done = len(self.snapshots)
        return done < _AT_ONCE or (done < _MOST_PAGES and time.monotonic() - self._last_s >= _APART_S)

    def _write(self, device: int, asked: int, limit: int, free: int) -> Path:
        here = _device(device)
        content = of_device(torch.cuda.memory._snapshot(), device)
        frames = _user_frames()
        owners = find_owners(here, frames, mark=0)
        facts = _gather_facts(here, frames, owners, self.locate() if self.locate else Place())
        total = torch.cuda.mem_get_info(here)[1]
        facts = msgspec.structs.replace(
            facts,
            asked_bytes=asked,
            free_bytes=free,
            device=device,
            total_bytes=total,
            limit_bytes=limit if limit < total else None,
        )
        content[KEY] = msgspec.to_builtins(_label(f"cuda:{device}", owners, facts))
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{_name_file(len(self.snapshots))}.pickle"
        write_atomically(path, pickle.dumps(content, protocol=4))
        return path

    def _explain(self, path: Path) -> None:
        """Write the page in a process of its own session, which outlives this one."""
        if not self._children:
            atexit.register(self.wait)
        command = [sys.executable, "-P", "-m", "stepscope.jobs.oom", str(path.resolve())]
        self._children.append(
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=TERMINAL, stderr=TERMINAL, start_new_session=True
            )
        )


_active: OomWatch | None = None
_is_attached = False


def explain_oom(out: str | os.PathLike[str] | None = None) -> OomWatch:
    """Write a page when CUDA runs out of memory: what held the memory, what was asked for, and what would fit.

    Call it once, at the top of a training script. `out` is the directory for the page (`oom.html`) and the recording
    (`oom`); default: a new directory under `runs`. The exception reaches the script unchanged. Without CUDA the call
    does nothing, and the result says why (`reason`). A second call returns the same watch.
    """
    if _active is not None:
        if out is not None:
            _active.folder = Path(out)
        return _active
    watch = OomWatch(Path(out) if out is not None else Path("runs") / time.strftime("oom-%Y%m%d-%H%M%S"))
    watch._install()
    return watch


@contextmanager
def watching_memory(folder: Path, locate: Callable[[], Place]) -> Iterator[None]:
    """Explain failed requests within this context, unless the script has asked for that itself."""
    if _active is not None:
        yield
        return
    watch = explain_oom(folder)
    watch.locate = locate
    try:
        yield
    finally:
        watch.uninstall()
        watch.wait()


@contextmanager
def paused_stacks() -> Iterator[None]:
    """Leave the allocator's history to someone else. A request that fails meanwhile is still explained."""
    watch = _active
    if watch is not None:
        watch._history.stop()
    try:
        yield
    finally:
        if watch is not None and watch.is_active:
            watch._history.start()


def _observe(device: int, asked: int, limit: int, free: int) -> None:
    """PyTorch's observer. `limit` is the memory of the device, or what this process may use of it."""
    if _active is not None:
        _active._record(device, asked, limit, free)


def _find_reason() -> str:
    # Not `is_available`, which calls the driver: a process that forks later could then not use CUDA in its children.
    if not torch.cuda.device_count():
        return "CUDA is not available"
    if torch.cuda.get_allocator_backend() != "native":
        return "the allocator `cudaMallocAsync` has no observers"
    return ""


class _StackHistory:
    """Records the stacks of live memory, in some of the steps."""

    def __init__(self) -> None:
        self._is_on = False
        self._num_steps = 0
        self._hook: Any = None

    def start(self) -> None:
        if torch._C._cuda_isHistoryEnabled():
            return  # the script records its own
        self._hook = register_optimizer_step_post_hook(self._after_step)
        self._switch(on=self._is_wanted())

    def stop(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._switch(on=False)

    def _after_step(self, *_: object) -> None:
        self._num_steps += 1
        wanted = self._is_wanted()
        if wanted != self._is_on:
            self._switch(on=wanted)

    def _is_wanted(self) -> bool:
        return self._num_steps < _FIRST_STEPS or self._num_steps % _EVERY == 0

    def _switch(self, *, on: bool) -> None:
        if on:
            torch.cuda.memory._record_memory_history("all", context="state", stacks="python", max_entries=_MOST_EVENTS)
        elif self._is_on:
            torch.cuda.memory._record_memory_history(None)
        self._is_on = on


def _device(number: int) -> torch.device:
    return torch.device("cuda", number)


# --- The snapshot -----------------------------------------------------------------------------------------------------


def of_device(snapshot: dict[str, Any], device: int, *, keeps_metadata: bool = False) -> dict[str, Any]:
    """The snapshot without the other devices, whose memory has no labels."""
    traces = [trace if place == device else [] for place, trace in enumerate(snapshot["device_traces"])]
    for entry in () if keeps_metadata or device >= len(traces) else traces[device]:
        entry.pop("user_metadata", None)  # of others: ours is a number of a mark
    segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
    return {**snapshot, "segments": segments, "device_traces": traces}


def _label(device: str, owners: Owners, facts: OutOfMemoryFacts) -> MemoryLabels:
    return MemoryLabels(
        device=device,
        # All facts are about the end: no event comes after the only mark.
        marks=(Mark(opens=True, kind="phase", value="out of memory", time_ns=time.time_ns()),),
        operators=(),
        facts=tuple(owners.facts),
        watched_steps=(),
        segments_at_start=None,
        saved=tuple(owners.saved),
        oom=facts,
    )


def _gather_facts(device: torch.device, frames: list[FrameType], owners: Owners, place: Place) -> OutOfMemoryFacts:
    lines = [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in frames]
    own = [(file, line) for file, line, _ in lines if _is_users(file)]
    return OutOfMemoryFacts(
        asked_bytes=0,
        free_bytes=0,
        device_name=torch.cuda.get_device_name(device),
        torch=str(torch.__version__),
        script=Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "",
        stack="\n".join(f"{shorten_path(file)}:{line} {name}" for file, line, name in lines),
        line=f"{shorten_path(own[0][0])}:{own[0][1]}" if own else "",
        step=place.step,
        phase=place.phase,
        module=place.module,
        world_size=find_rank()[1],
        optimizers=owners.optimizers,
        missing_gradient_bytes=owners.missing_gradient_bytes,
        missing_state_bytes=owners.missing_state_bytes,
        num_old_graphs=owners.num_old_graphs,
        old_graph_bytes=owners.old_graph_bytes,
    )


def _user_frames() -> list[FrameType]:
    """The frames of the thread that asked for memory, innermost first. On a thread of autograd, which has no frames of
    Python, those of the thread that waits for it."""
    own = list(_without_ours(sys._getframe()))
    if any(_is_users(frame.f_code.co_filename) for frame in own):
        return own
    threads = [list(_without_ours(frame)) for frame in sys._current_frames().values()]
    waiting = [one for one in threads if any(frame.f_code.co_name == _BACKWARD for frame in one)]
    return own + (waiting[0] if waiting else [])


def _without_ours(innermost: FrameType | None) -> Iterator[FrameType]:
    count = 0
    while innermost is not None and count < _MOST_FRAMES:
        if not innermost.f_code.co_filename.startswith(_OURS):
            yield innermost
        innermost, count = innermost.f_back, count + 1


def _is_users(file: str) -> bool:
    return classify_file(file) == "user"


def _name_file(number: int) -> str:
    rank, _ = find_rank()
    name = f"oom-rank-{rank}" if rank else "oom"
    return f"{name}-{number + 1}" if number else name

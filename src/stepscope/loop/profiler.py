"""PyTorch's profiler around some steps of a loop that has its own pace: it starts in one step and stops in another."""

import errno
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile

from stepscope.patches import replace_attribute


@contextmanager
def _without_warning() -> Iterator[None]:
    """torch 2.11 warns that events are kept for one cycle only; there is only one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
        yield


class OtherProfilers:
    """Watches for profilers that the script starts: there can only be one at a time in a process, and one that is only
    warming up is ruined by another, too. `on_start` is called before one starts."""

    def __init__(self, on_start: Callable[[], None]) -> None:
        self._on_start = on_start
        self._active: set[int] = set()
        self._is_ours = False

    @property
    def are_active(self) -> bool:
        return bool(self._active) or bool(torch._C._autograd._profiler_enabled())

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Profilers that start and stop within this context are ours."""
        self._is_ours = True
        try:
            yield
        finally:
            self._is_ours = False

    def install(self, undo: ExitStack) -> None:
        kind: Any = torch.autograd.profiler.profile
        for name in ("_prepare_trace", "_start_trace"):
            replace_attribute(kind, name, self._watch_start(getattr(kind, name)), undo)
        replace_attribute(kind, "__exit__", self._watch_end(kind.__exit__), undo)

    def _watch_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def start(profile: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_ours and id(profile) not in self._active:
                self._on_start()
                self._active.add(id(profile))
            return original(profile, *args, **kwargs)

        return start

    def _watch_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def end(profile: Any, *args: Any, **kwargs: Any) -> Any:
            self._active.discard(id(profile))
            return original(profile, *args, **kwargs)

        return end


class LoopProfiler:
    """Entering it makes the profiler ready, `keep_events` begins the recording, leaving it ends it."""

    def __init__(
        self, activities: Sequence[ProfilerActivity], others: OtherProfilers, *, with_stack: bool = False
    ) -> None:
        self._others = others
        self._profiler = _KinetoProfile(activities=activities, record_shapes=True, with_stack=with_stack)
        self._keeps_events = False

    def __enter__(self) -> Self:
        with _without_warning(), self._others.ours():
            self._profiler.prepare_trace()
        return self

    def keep_events(self) -> None:
        with _without_warning(), self._others.ours():
            self._profiler.start_trace()
        self._keeps_events = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._keeps_events:
            self.keep_events()  # one that is only ready cannot be stopped
        self._profiler.stop_trace()

    @property
    def results(self) -> Any:
        assert self._profiler.profiler is not None, "the profiler must have been started"
        return self._profiler.profiler.kineto_results

    def write(self, path: Path) -> None:
        write_trace(self._profiler, path)


def write_trace(profiler: _KinetoProfile, path: Path) -> None:
    """Write the trace of a profiler. PyTorch only logs a failure, and leaves a part of the trace under another name."""
    path.unlink(missing_ok=True)
    profiler.export_chrome_trace(str(path))
    if not path.exists():
        path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
        raise OSError(errno.EIO, "PyTorch could not write the trace; the disk may be full")

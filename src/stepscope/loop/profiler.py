"""PyTorch's profiler around some steps of a loop that has its own pace: it starts in one step and stops in another."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile


@contextmanager
def _without_warning() -> Iterator[None]:
    """torch 2.11 warns that events are kept for one cycle only; there is only one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
        yield


class LoopProfiler:
    """Entering it makes the profiler ready, `keep_events` begins the recording, leaving it ends it."""

    def __init__(self, activities: Sequence[ProfilerActivity], *, with_stack: bool = False) -> None:
        self._profiler = _KinetoProfile(activities=activities, record_shapes=True, with_stack=with_stack)
        self._keeps_events = False

    def __enter__(self) -> Self:
        with _without_warning():
            self._profiler.prepare_trace()
        return self

    def keep_events(self) -> None:
        with _without_warning():
            self._profiler.start_trace()
        self._keeps_events = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._keeps_events:
            self.keep_events()  # one that is only ready cannot be stopped
        self._profiler.stop_trace()

    def owns(self, profile: torch.autograd.profiler.profile) -> bool:
        """Whether `profile` is the one inside. It is unknown while it is being made."""
        return self._profiler.profiler is None or self._profiler.profiler is profile

    @property
    def results(self) -> Any:
        assert self._profiler.profiler is not None, "the profiler must have been started"
        return self._profiler.profiler.kineto_results

    def write(self, path: Path) -> None:
        self._profiler.export_chrome_trace(str(path))

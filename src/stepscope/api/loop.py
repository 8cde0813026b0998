"""Recording a training loop from its own code: `stepscope.record`, `stepscope.steps` and `stepscope.trace_handler`.

    with stepscope.record("runs/today") as recorder:
        for batch in loader:
            ...
            recorder.step()

All of them leave what `stepscope run` leaves: a directory with a recording per rank, and a page.
"""

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from stepscope.api.arguments import require_count
from stepscope.api.display import StrPath
from stepscope.loop.messages import tell
from stepscope.loop.place import RunPlace, choose_place, find_rank

if TYPE_CHECKING:
    from torch.profiler import profile

    from stepscope.loop.recorder import LoopRecorder

T = TypeVar("T")


class Recorder:
    """Records some steps of the loop inside this context. Steps are found as `stepscope run` finds them, or marked by
    calling `step` at the end of each. The page exists after the context."""

    def __init__(self, place: RunPlace, *, steps: int, skip: int, sources: bool, force: bool, found_by: str) -> None:
        self._place = place
        self._num_steps, self._skip, self._sources = steps, skip, sources
        self._force = force
        self._found_by = found_by
        self._recorder: LoopRecorder | None = None

    @property
    def page(self) -> Path:
        return self._place.page

    @property
    def data(self) -> Path:
        """The directory with the recordings."""
        return self._place.folder

    def start(self) -> None:
        from stepscope.loop.recorder import LoopRecorder, RecordingPlan

        prepare_place(self._place, force=self._force)
        plan = RecordingPlan(steps=self._num_steps, skip=self._skip, sources=self._sources)
        self._recorder = LoopRecorder(self._place, plan, script=name_script(), found_by=self._found_by, tell=tell)
        self._recorder.start()

    def step(self) -> None:
        """Mark the end of a step. Costs about a microsecond while nothing is recorded."""
        if self._recorder is None:
            raise RuntimeError(
                "the recorder has not started: call step() inside `with stepscope.record(DIR) as recorder:`"
            )
        self._recorder.step("recorder.step()")

    def finish(self) -> None:
        """End the recording and wait for the page. Ctrl-C skips it."""
        if self._recorder is None:
            return
        self._recorder.end()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish()


def record(
    out: StrPath | None = None, *, steps: int = 3, skip: int = 10, sources: bool = True, force: bool = False
) -> Recorder:
    """Return a context that records some steps of the training loop inside it and writes a page about them.

    It skips `skip` warm-up steps, times a few more, and records `steps`. `sources` records one more step for source
    lines.

    `out` is a directory for the page and the recordings, or an .html file (default: `report.html`). The same program
    replaces its own earlier run; `force` replaces that of another.
    """
    return make_recorder(out, steps=steps, skip=skip, sources=sources, force=force)


def steps(
    batches: Iterable[T],
    out: StrPath | None = None,
    *,
    steps: int = 3,
    skip: int = 10,
    sources: bool = True,
    force: bool = False,
) -> Iterator[T]:
    """Yield `batches`, each as one step, and record some of them as `record` does."""
    recorder = make_recorder(out, steps=steps, skip=skip, sources=sources, force=force, found_by="iterator")
    return _iterate(batches, recorder)


def _iterate(batches: Iterable[T], recorder: Recorder) -> Iterator[T]:
    with recorder:
        for batch in batches:
            yield batch
            recorder.step()


def make_recorder(
    out: StrPath | None, *, steps: int, skip: int, sources: bool = True, force: bool = False, found_by: str = ""
) -> Recorder:
    require_count("steps", steps)
    require_count("skip", skip or 1)
    place = choose_place(out, name_script())
    return Recorder(place, steps=steps, skip=skip, sources=sources, force=force, found_by=found_by)


def trace_handler(out: StrPath | None = None, *, force: bool = False) -> "Callable[[profile], None]":
    """Return a function for `torch.profiler.profile(on_trace_ready=...)` that writes the page about its trace. A
    profiler that records several times replaces the page each time."""
    place = choose_place(out, name_script())
    prepare_place(place, force=force)

    def handle(profiler: Any) -> None:
        from stepscope.loop.trace_handler import hand_over_trace

        hand_over_trace(profiler, place, script=name_script()).wait()

    return handle


def prepare_place(place: RunPlace, *, force: bool) -> None:
    """Rank 0 prepares the directory for all."""
    rank, world_size = find_rank()
    if rank == 0:
        command = shlex.join(["python", *sys.argv])
        place.prepare(command=command, script=name_script(), world_size=world_size, force=force)


def name_script() -> str:
    """The program that runs, as a page should call it."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in ("__main__", "stepscope.loop.script"):
        return f"-m {spec.name.removesuffix('.__main__')}"
    return Path(getattr(main, "__file__", None) or "python").name

"""CUDA graphs of a step without a GPU: the runs before a capture, the capture, and what replays leave to do.

A graph keeps its addresses, so what is requested while it is captured comes from memory of its own, which nothing else
uses afterwards. The runs before it are on another stream, whose free memory is released before every graph. So a
captured step reserves what its graphs need at most, and next to it everything that is made outside.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from stepscope.fast import program
from stepscope.fast.capture import WARMUP, Part, Phase, prepare
from stepscope.patches import replace_attribute
from stepscope.planner.places import ProgramPlaces
from stepscope.planner.tracking import Tracker
from stepscope.recording.memory.allocator_model import GRAPH, MAIN


@contextmanager
def pretended_capture(tracker: Tracker, places: ProgramPlaces, begin_step: Callable[[], None]) -> Iterator[None]:
    """Let programs capture within this context. `begin_step` is called before the first run, and before the capture."""

    def capture(parts: Sequence[Part], _device: object) -> tuple[Phase, ...]:
        begin_step()
        tracker.pool = "warm-up"
        for _ in range(WARMUP):
            for part in parts:
                with _inside(places, part):
                    prepare(part)
                    (part.warm_up or part.run)()
        tracker.pool = MAIN
        begin_step()
        for part in parts:
            with _inside(places, part):
                prepare(part)
                tracker.release_cached()  # as PyTorch does before each graph
                with ExitStack() as undo:
                    replace_attribute(torch.cuda, "is_current_stream_capturing", lambda: True, undo)
                    tracker.pool = GRAPH
                    part.run()
                tracker.pool = MAIN
        return tuple((part.name, _replay) for part in parts)

    with ExitStack() as undo:
        replace_attribute(program, "capture", capture, undo)
        yield


@contextmanager
def _inside(places: ProgramPlaces, part: Part) -> Iterator[None]:
    places.begin_phase(part.name)
    yield
    places.on_phase_end()
    places.phase = None


def _replay() -> None:
    """A replay requests nothing."""

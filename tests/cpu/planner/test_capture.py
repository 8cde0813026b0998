"""CUDA graphs without a GPU: whose memory each part of a step requests, and when the cache is emptied."""

from functools import partial
from typing import cast

import torch

from stepscope.fast import program
from stepscope.fast.capture import WARMUP, Part
from stepscope.planner.places import ProgramPlaces
from stepscope.planner.stand_in.capture import pretended_capture
from stepscope.planner.tracking import Tracker
from stepscope.recording.memory.allocator_model import GRAPH, MAIN


class _Recorder:
    """Notes what happens, with the phase and the memory that requests would be from."""

    def __init__(self) -> None:
        self.pool, self.places = MAIN, ProgramPlaces()
        self.noted: list[tuple[str, str | None, str]] = []

    def note(self, what: str) -> None:
        self.noted.append((what, self.places.phase, self.pool))

    def release_cached(self) -> None:
        self.note("release")


def test_a_capture_follows_its_warm_up_and_requests_memory_of_its_own() -> None:
    recorder = _Recorder()
    begin, run, prepare, load = (partial(recorder.note, what) for what in ("begin", "run", "prepare", "load"))
    parts = [Part("forward", run), Part("optimizer", run, prepare, load)]
    with pretended_capture(cast(Tracker, recorder), recorder.places, begin):
        phases = vars(program)["capture"](parts, torch.device("cuda"))
    warm_up = [("run", "forward"), ("prepare", "optimizer"), ("load", "optimizer")]
    assert recorder.noted == [
        ("begin", None, MAIN),
        *((what, phase, "warm-up") for what, phase in WARMUP * warm_up),
        ("begin", None, MAIN),
        ("release", "forward", MAIN),
        ("run", "forward", GRAPH),
        ("prepare", "optimizer", MAIN),
        ("release", "optimizer", MAIN),
        ("run", "optimizer", GRAPH),
    ]
    recorder.noted.clear()
    for _, replay in phases:
        replay()
    assert not recorder.noted

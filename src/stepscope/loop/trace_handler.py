"""The trace of a user's own profiler, handed over like the steps that stepscope records itself."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import torch

from stepscope.files import write_atomically, writing
from stepscope.loop.finish import Finisher
from stepscope.loop.place import RunPlace
from stepscope.loop.profiler import write_trace
from stepscope.loop.recorder import rank_of
from stepscope.loop.source_lines import read_lines
from stepscope.measure.environment import describe_unmeasured
from stepscope.recording.rows.loop_run import HANDOVER_NAME, TRACE_NAME, LoopFacts, LoopRun, SourceLines


def hand_over_trace(profiler: Any, place: RunPlace, *, script: str) -> Finisher:
    """Start writing the page about a `torch.profiler.profile` that has stopped."""
    rank, world_size = rank_of()
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    has_stacks = profiler.with_stack and profiler.profiler is not None
    run = LoopRun(
        facts=LoopFacts(script=script, found_by="torch.profiler"),
        environment=describe_unmeasured(device),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        rank=rank,
        world_size=world_size,
        sources=read_lines(profiler.profiler.kineto_results) if has_stacks else SourceLines(),
        is_whole_trace=True,
    )
    folder = place.raw_folder(rank)
    with writing(folder, if_full="the trace was not saved", hint="choose another directory"):
        folder.mkdir(parents=True, exist_ok=True)
        write_trace(profiler, folder / TRACE_NAME)
        write_atomically(folder / HANDOVER_NAME, msgspec.json.encode(run))
    finisher = Finisher(place, rank)
    finisher.start()
    return finisher

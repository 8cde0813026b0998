"""The memory history of one step of a user's loop, as a snapshot that `recording.memory` reads.

On CUDA the allocator records its own history, with stacks. What each tensor is for is found where a phase begins, when
the tensors of the previous one still exist: before backward the graph holds the activations, before the optimizer the
gradients exist (`tensor_owners`). This takes a moment of the recorded step, and nothing of any other.

A CPU has no allocator with a history. PyTorch's profiler could watch the step instead, as `measure.memory.recorder`
does, but its events lack the memory of other threads, and its cost in a loop of unknown size was not worth it.
"""

import pickle
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch

from stepscope.annotate import Close
from stepscope.files import write_atomically
from stepscope.loop.oom import of_device, paused_stacks
from stepscope.loop.tensor_owners import find_owners
from stepscope.measure.memory.marks import Places
from stepscope.recording.memory.labels import (
    KEY,
    SNAPSHOT_NAME,
    MemoryLabels,
    SavedRow,
    TensorFact,
    without_frames,
)

_NOTED = ("phase:backward", "phase:optimizer")


class StepMemory:
    """Records what happens between `start` and `stop`, which writes the snapshot to `folder`. Open ranges with `open`:
    `step:3`, `phase:backward`, `phase:optimizer` and others, as elsewhere; modules are ignored."""

    def __init__(self, device: torch.device, *, folder: Path) -> None:
        if device.type != "cuda":
            raise ValueError(f"only CUDA has a memory history, not {device.type}")
        self._device, self._folder = device, folder
        self._number = device.index if device.index is not None else torch.cuda.current_device()
        self._places = Places(torch.cuda.memory._set_memory_metadata)
        self._places.watches_modules = False
        self._facts: list[TensorFact] = []
        self._saved: list[SavedRow] = []
        self._paused = ExitStack()

    def start(self) -> None:
        self._paused.enter_context(paused_stacks())
        torch.cuda.synchronize(self._device)
        self._note()
        segments = of_device(torch.cuda.memory._snapshot(), self._number)["segments"]
        self._start = [without_frames(segment) for segment in segments]
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=sys.maxsize, clear_history=True
        )

    def open(self, name: str) -> Close:
        """Open a range and return the function that closes it."""
        close = self._places.open(name)
        if name in _NOTED:
            self._note()
        return close

    def stop(self) -> Path:
        """End the recording and return the snapshot."""
        try:
            torch.cuda.synchronize(self._device)
            self._note()
            content = of_device(torch.cuda.memory._snapshot(), self._number, keeps_metadata=True)
        finally:
            torch.cuda.memory._record_memory_history(None)
            torch.cuda.memory._set_memory_metadata("")
            self._paused.close()
        labels = MemoryLabels(
            device=f"cuda:{self._number}",
            marks=tuple(self._places.marks),
            operators=(),
            facts=tuple(self._facts),
            watched_steps=(),
            segments_at_start=self._start,
            saved=tuple(self._saved),
        )
        content[KEY] = msgspec.to_builtins(labels)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / SNAPSHOT_NAME
        write_atomically(path, pickle.dumps(content, protocol=4))
        return path

    def _note(self) -> None:
        owners = find_owners(self._device, [], mark=self._places.mark)
        self._facts += owners.facts
        # The graph is complete where backward begins; after that it only shrinks.
        self._saved = max(self._saved, owners.saved, key=len)

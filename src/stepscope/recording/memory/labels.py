"""Labels that our recorder adds to a memory snapshot, under a key that other readers ignore.

The user metadata of each allocator event says where it happened: `12` is after mark 12, and `12:345` is inside operator
345 after that mark. Marks are the starts and ends of steps and phases.
"""

from typing import Annotated, Any

import msgspec

Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
SCHEMA = "stepscope.memory-labels/1"
KEY = "stepscope"  # in the snapshot
SNAPSHOT_NAME = "snapshot.pickle"
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "autocast copies",
    "temporaries",
    "workspaces",
    "communication",
    "other",
)
NOBODY = -1  # no operator: allocated before the recording, or while operators were not recorded


class Mark(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The start or end of a step or phase. Time is since the epoch."""

    opens: bool
    kind: str
    value: str
    time_ns: int


class Operator(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One call of an operator that allocated memory."""

    name: str
    module: str  # empty if unknown


class TensorFact(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The category of the memory at `address` that `operator` allocated, or that is alive at `mark`."""

    mark: int
    operator: int
    address: int
    category: str
    name: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    module: str | None = None  # if it is known without the operator


class SavedRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A tensor saved for backward, with the columns of the table `saved`."""

    node: int
    op: str
    argument: str
    module: str | None
    shape: str
    dtype: str
    bytes: int
    storage: int
    storage_bytes: int
    kind: str
    name: str | None


class OutOfMemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A request for memory that failed, and what the process knew about itself at that moment. Sizes are in bytes. What
    only `stepscope.explain_oom` knows is missing in a snapshot from another tool."""

    asked_bytes: Bytes  # by the allocator from CUDA
    free_bytes: Bytes  # that CUDA reported
    device: Annotated[int, msgspec.Meta(ge=0, lt=1024)] = 0
    event: Annotated[int, msgspec.Meta(ge=-1, le=2**62)] = -1  # the last event before it; -1 without a history
    total_bytes: Bytes | None = None  # of the device
    limit_bytes: Bytes | None = None  # of this process, if it has set one
    device_name: str = ""
    torch: str = ""  # its version
    script: str = ""
    stack: str = ""  # of the user's thread, innermost frame first
    line: str = ""  # the user's innermost line: `train.py:42`
    step: Bytes | None = None
    phase: str = ""
    module: str = ""
    world_size: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] = 1
    optimizers: tuple[str, ...] = ()  # classes
    # Memory that the rest of the step needs: gradients and optimizer states that do not exist yet.
    missing_gradient_bytes: Bytes = 0
    missing_state_bytes: Bytes = 0
    # Losses and other scalars whose graphs are still alive although a newer graph exists, and what those hold.
    num_old_graphs: Bytes = 0
    old_graph_bytes: Bytes = 0
    # Filled in from the segments, if they are those of the moment of the failure.
    largest_free_bytes: Bytes | None = None  # the largest free block that the request could have used
    movable_bytes: Bytes | None = None  # in free blocks that expandable segments could have used
    has_expandable_segments: bool = False


class MemoryLabels(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = SCHEMA
    device: str
    marks: tuple[Mark, ...]
    operators: tuple[Operator, ...]
    facts: tuple[TensorFact, ...]
    # Steps in which operators were profiled. Other steps with the same events copy labels from the last of them.
    watched_steps: tuple[int, ...]
    # The segments of the allocator at the start, in snapshot format; on a CPU, one block per tensor. None if they are
    # unknown, because the history is a ring buffer that lost its beginning.
    segments_at_start: list[dict[str, object]] | None
    # Peaks that the allocator reported over the recorded steps; None on a CPU.
    allocator_peak_bytes: int | None = None
    allocator_peak_reserved_bytes: int | None = None
    saved: tuple[SavedRow, ...] = ()
    oom: OutOfMemoryFacts | None = None  # if the snapshot was taken because memory ran out


class MemoryRun(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's report in addition to the snapshot: step times with and without the recorder."""

    step_ns: tuple[int, ...]  # unprofiled steps
    recorded_step_ns: tuple[int, ...]  # with the recorder, alternating with unprofiled steps
    watched_step_ns: tuple[int, ...]  # with every operator profiled too
    parameters: int
    optimizer: str | None = None  # what ran: the setting, or the class that a factory created
    notes: tuple[str, ...] = ()


def without_frames(segment: dict[str, Any]) -> dict[str, object]:
    """Return a segment of a snapshot without the stacks of its blocks."""
    blocks = [{key: value for key, value in block.items() if key != "frames"} for block in segment["blocks"]]
    return {**{key: value for key, value in segment.items() if key != "frames"}, "blocks": blocks}

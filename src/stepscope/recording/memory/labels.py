"""Labels that our recorder adds to a memory snapshot, under a key that other readers ignore.

The user metadata of each allocator event says where it happened: `12` is after mark 12, and `12:345` is inside operator
345 after that mark. Marks are the starts and ends of steps and phases.
"""

import msgspec

SCHEMA = "stepscope.memory-labels/1"
KEY = "stepscope"  # in the snapshot
SNAPSHOT_NAME = "snapshot.pickle"
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


class MemoryLabels(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = SCHEMA
    device: str
    marks: tuple[Mark, ...]
    operators: tuple[Operator, ...]
    facts: tuple[TensorFact, ...]
    # Steps in which operators were profiled. Other steps with the same events copy labels from the last of them.
    watched_steps: tuple[int, ...]
    # The segments of the allocator at the start, in snapshot format; on a CPU, one block per tensor.
    segments_at_start: list[dict[str, object]]
    # Peaks that the allocator reported over the recorded steps; None on a CPU.
    allocator_peak_bytes: int | None = None
    allocator_peak_reserved_bytes: int | None = None
    saved: tuple[SavedRow, ...] = ()


class MemoryRun(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's report in addition to the snapshot: step times with and without the recorder."""

    step_ns: tuple[int, ...]  # unprofiled steps
    recorded_step_ns: tuple[int, ...]  # with the recorder, alternating with unprofiled steps
    watched_step_ns: tuple[int, ...]  # with every operator profiled too
    parameters: int
    optimizer: str | None = None  # what ran: the setting, or the class that a factory created
    notes: tuple[str, ...] = ()

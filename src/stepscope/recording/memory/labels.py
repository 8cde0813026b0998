"""What our own recorder knows about a run's memory and a snapshot cannot say. It travels inside of the snapshot, under
a key that other readers of snapshots pass over.

A note on every event of the allocator (its user metadata) says where it happened: `12` is after the twelfth mark, and
`12:345` inside of operator 345 after it. Marks are the beginnings and ends of steps and phases.
"""

import msgspec

SCHEMA = "stepscope.memory-labels/1"
KEY = "stepscope"  # in the snapshot
SNAPSHOT_NAME = "snapshot.pickle"
NOBODY = -1  # the operator of what was there before, or came while nobody watched


class Mark(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A step or a phase begins or ends. The time is since the epoch."""

    opens: bool
    kind: str
    value: str
    time_ns: int


class Operator(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One call of an operator that took memory."""

    name: str
    module: str  # empty where nobody knows


class TensorFact(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The memory at `address` that `operator` took, or else that is there when `mark` is made, is of this category."""

    mark: int
    operator: int
    address: int
    category: str
    name: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


class SavedRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One tensor that autograd keeps, in the columns of the table `saved`."""

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
    # Steps in which operators were watched. The others take over from the last of them what is the same.
    watched_steps: tuple[int, ...]
    # What the allocator held when recording began, as snapshots have it; on a CPU a block a tensor.
    segments_at_start: list[dict[str, object]]
    # The allocator's own figures over the recorded steps; None on a CPU, which keeps none.
    allocator_peak_bytes: int | None = None
    allocator_peak_reserved_bytes: int | None = None
    saved: tuple[SavedRow, ...] = ()


class MemoryRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says besides the snapshot it leaves: what recording cost, and how long a step takes alone."""

    step_ns: tuple[int, ...]  # alone
    recorded_step_ns: tuple[int, ...]  # with the recorder, in turns with those alone
    watched_step_ns: tuple[int, ...]  # with every operator watched too
    parameters: int
    optimizer: str | None = None  # what ran: the setting, or the class of a factory's own
    notes: tuple[str, ...] = ()

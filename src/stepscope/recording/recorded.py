"""What a worker says about a run that it recorded. The trace itself is a file beside it.

Apart from `store.py`, because a worker has no use for tables and need not load what reads them.
"""

import msgspec

from stepscope.recording.rows.bench import Clock, Doubt

RAW_NAME = "raw.json.gz"  # the trace of PyTorch's profiler, in the folder that the worker was given


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Samples in nanoseconds, one entry a step, all on one clock: steps alone, steps with the recorder, and steps with
    the recorder and annotation. Those in the trace are others still."""

    clock: Clock
    phases_ns: dict[str, tuple[int, ...]]
    step_ns: tuple[int, ...]
    recorded_step_ns: tuple[int, ...]
    annotated_step_ns: tuple[int, ...]
    parameters: int
    optimizer: str | None = None  # what ran: the setting, or the class of a factory's own
    doubts: tuple[Doubt, ...] = ()
    # What is not in the trace, in words for the user.
    notes: tuple[str, ...] = ()

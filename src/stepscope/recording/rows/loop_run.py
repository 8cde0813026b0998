"""What a training process hands over about the steps that it recorded of its own loop.

The process writes a raw trace and this document, and another process turns both into a recording. Nothing here needs
polars, which the training process never loads.
"""

from typing import Annotated

import msgspec

from stepscope.recording.rows.bench import Doubt, Environment

SCHEMA = "stepscope.loop/1"
RUN_SCHEMA = "stepscope.run/1"
RUN_NAME = "run.json"  # marks the directory of a run
HANDOVER_NAME = "loop.json"
TRACE_NAME = "trace.json"  # not compressed: training waits while it is written
UNKNOWN_LINE = -1
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class LoaderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A DataLoader of a training loop, as it was configured."""

    dataset: str  # its class
    is_iterable: bool = False  # an `IterableDataset`: without sharding, every worker loads all of it
    batch_size: Count | None = None
    num_workers: Count = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: Count | None = None
    batches_per_step: float = 1.0


class LoopFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in a training loop that stepscope recorded from inside its process."""

    script: str  # `train.py`, or `-m package.module`
    found_by: str  # what marked the steps
    backwards_per_step: float = 1.0  # micro-batches
    optimizers: tuple[str, ...] = ()  # classes
    loaders: tuple[LoaderFacts, ...] = ()
    wrappers: tuple[str, ...] = ()  # classes that make the model or the optimizer parallel
    uses_scaler: bool = False
    skipped_steps: Count = 0  # by a GradScaler, among `steps_seen`
    steps_seen: Count = 0  # before the recording began
    clock_mhz: Count | None = None  # while the steps were recorded
    notes: tuple[str, ...] = ()


class SourceLines(msgspec.Struct, frozen=True, kw_only=True):
    """The operators of one step on the loop's thread, in the order of their start, and the line that called each, as a
    place in `lines`."""

    names: tuple[str, ...] = ()
    places: tuple[int, ...] = ()
    lines: tuple[str, ...] = ()


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`: what is common to all ranks. `page` is where the page goes."""

    schema: str = RUN_SCHEMA
    command: str
    script: str
    page: str
    world_size: Count = 1
    started: str = ""


class LoopRun(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded steps of one rank. `phases_ns` has one entry per phase and unprofiled step."""

    schema: str = SCHEMA
    facts: LoopFacts
    environment: Environment
    started: str
    rank: Count = 0
    world_size: Count = 1
    clock: str = "host"
    phases_ns: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    recorded_steps: Count = 0  # complete ones; marks of later steps do not count
    recorded_step_ns: tuple[int, ...] = ()
    parameters: int | None = None
    optimizer: str | None = None
    model: str = ""  # the class of the largest model
    compiled: bool = False
    doubts: tuple[Doubt, ...] = ()
    sources: SourceLines = SourceLines()
    expert_tokens: dict[str, tuple[Count, ...]] = msgspec.field(default_factory=dict)  # by module, in one step
    is_whole_trace: bool = False  # of a user's own profiler: `sources` are those of the trace itself

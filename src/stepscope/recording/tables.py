"""The tables of a recording: what every reader fills in and every analysis reads.

All times are whole nanoseconds on one clock per recording. Threads and processes are the numbers the operating system
gave them; a device and its streams are the driver's. A column that a source does not know is null, never a guess.

What may stand in a column is declared here once. `recording.validation` holds every table against it, so that no
analysis meets a value outside of it.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import polars as pl

Schema = dict[str, type[pl.DataType]]
# Times reach until 2043, and neither a difference of two nor a sum of many durations overflows 64 bits.
FARTHEST_NS = 2**61
LONGEST_NS = 2**50  # 13 days
LONGEST_KERNEL_NS = 2**44  # 4.9 hours
MOST_BYTES = 2**48
MOST_COUNTED = 1e60  # neither a product of two nor a sum of many is infinite
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
_Stride = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]


@dataclass(frozen=True, slots=True)
class ColumnRule:
    """What may stand in a column: `required` ones have a value in every row, numbers lie between `least` and `most`
    (as far as the type allows where these are None), and text decodes to `json`."""

    kind: type[pl.DataType]
    required: bool = False
    least: float | None = None
    most: float | None = None
    absent: int | None = None  # stands in a column without nulls for what a file does not say
    json: Any = None


_TEXT = ColumnRule(pl.String)
_NAME = ColumnRule(pl.String, required=True)
_NUMBER = ColumnRule(pl.Int64)
_TIME = ColumnRule(pl.Int64, required=True, least=-FARTHEST_NS, most=FARTHEST_NS)
_MAYBE_TIME = ColumnRule(pl.Int64, least=-FARTHEST_NS, most=FARTHEST_NS)
_COUNT = ColumnRule(pl.Int32, least=0)
_LONG_COUNT = ColumnRule(pl.Int64, least=0)
_BYTES = ColumnRule(pl.Int64, least=0, most=MOST_BYTES)
_TAKEN_BYTES = ColumnRule(pl.Int64, required=True, least=0, most=MOST_BYTES)
_SHAPE = ColumnRule(pl.String, json=list[_Size])
_TIMED = {"name": _NAME, "start_ns": _TIME, "end_ns": _TIME}
_ON_HOST = {"process": _NUMBER, "thread": ColumnRule(pl.Int64, absent=0)}

# What ran on a device. On a CPU recording these are the innermost operators, kind `cpu`, with the thread as stream.
KERNELS = {
    **_TIMED,
    "kind": _NAME,  # kernel, memcpy, memset or cpu
    "process": _NUMBER,
    "device": ColumnRule(pl.Int32, least=-1, absent=0),  # -1 is the host
    "stream": ColumnRule(pl.Int64, absent=0),
    "correlation": _NUMBER,  # joins the launch of the same process
    "graph": ColumnRule(pl.Boolean),  # started by the replay of a graph
    "bytes": _BYTES,
    "grid_x": _COUNT,
    "grid_y": _COUNT,
    "grid_z": _COUNT,
    "block_x": _COUNT,
    "block_y": _COUNT,
    "block_z": _COUNT,
    "registers": _COUNT,
    "shared_bytes": _COUNT,
}
# Calls of the CUDA or HIP runtime and driver.
LAUNCHES = {**_TIMED, **_ON_HOST, "correlation": _NUMBER}
# Operators of the framework. `sequence` names the autograd node an operator made, or, where `forward_thread` is not
# null, the node whose backward it is.
OPS = {
    **_TIMED,
    **_ON_HOST,
    "sequence": _LONG_COUNT,
    "forward_thread": _NUMBER,
    # JSON, as recorded.
    "shapes": ColumnRule(pl.String, json=list[list[_Size | list[_Size]]]),
    "dtypes": ColumnRule(pl.String, json=list[str]),
    "strides": ColumnRule(pl.String, json=list[list[_Stride | list[_Stride]]]),
    "arguments": ColumnRule(pl.String, json=list[Any]),
}
# Stretches of host time with a name: `source` is `user` (a profiler range), `module` (an nn.Module's call seen by the
# profiler's stacks), `python` (another frame worth keeping) or `nvtx`.
RANGES = {**_TIMED, **_ON_HOST, "source": _NAME}
# Arrows from the operator that made an autograd node to the one that ran its backward.
LINKS = {
    "forward_ns": _TIME,
    "forward_thread": _NUMBER,
    "backward_ns": _TIME,
    "backward_thread": _NUMBER,
    "process": _NUMBER,
}
# Steps timed without the recorder, one row a phase and step: the clock the recording is held against.
STEPS = {
    "phase": _NAME,
    "step": _COUNT,
    "duration_ns": ColumnRule(pl.Int64, required=True, least=0, most=LONGEST_NS),
    "clock": _NAME,
}
# Hardware counters, one row a kernel and metric; `kernel` is the row in `kernels`.
COUNTERS = {
    "kernel": ColumnRule(pl.Int64, required=True, least=0),
    "metric": _NAME,
    "unit": _NAME,
    "value": ColumnRule(pl.Float64, least=-MOST_COUNTED, most=MOST_COUNTED),
    "text": _TEXT,
}

# --- Memory. Time has two coordinates there: the event, which is the position in the order in which memory was taken
# and given back, and says exactly what was there together; and nanoseconds.
_LIVED = {
    "start_event": _LONG_COUNT,  # null: there before recording began
    "end_event": _LONG_COUNT,  # null: still there at its end
    "start_ns": _MAYBE_TIME,
    "end_ns": _MAYBE_TIME,
    "device": _COUNT,  # null on a CPU
    "stream": _NUMBER,
    "address": _NUMBER,
    "bytes": _TAKEN_BYTES,  # what it takes of the device's memory
}
# One row a piece of memory, from when it was taken to when it was given back.
ALLOCATIONS = {
    **_LIVED,
    "requested_bytes": _BYTES,  # before the allocator rounded it up
    "step": _COUNT,  # where it was taken: the step, its phase, the module's path and the operator
    "phase": _TEXT,
    "module": _TEXT,
    "op": _TEXT,
    "category": _TEXT,  # one of explain.memory.CATEGORIES, or what a later version calls it
    "name": _TEXT,  # a parameter's, a buffer's; what autograd calls it
    "shape": _SHAPE,
    "dtype": _TEXT,
    "stack": _COUNT,  # row in `stacks`
}
# What the allocator holds of the device, in use or not.
SEGMENTS = dict(_LIVED)
# One row a phase of a step, and one with a null phase for the whole step.
SPANS = {
    "step": _COUNT,
    "phase": _TEXT,
    "start_event": ColumnRule(pl.Int64, required=True, least=0),
    "end_event": ColumnRule(pl.Int64, required=True, least=0),  # exclusive
    "start_ns": _TIME,
    "end_ns": _TIME,
}
# Frames one a line, the innermost first: `file.py:12 function`.
STACKS = {"stack": ColumnRule(pl.Int32, required=True, least=0), "frames": _NAME}
# What autograd keeps for backward: one row a tensor that a node saved.
SAVED = {
    "node": ColumnRule(pl.Int64, required=True, least=0),  # in the order of the forward pass
    "op": _NAME,  # the node's name: MulBackward0
    "argument": _NAME,  # what the node calls it: self, result
    "module": _TEXT,
    "shape": _SHAPE,
    "dtype": _TEXT,
    "bytes": _TAKEN_BYTES,  # of this tensor
    "storage": ColumnRule(pl.Int64, required=True),  # tensors with the same number share memory
    "storage_bytes": _TAKEN_BYTES,
    "kind": _NAME,  # activation, parameter, buffer or input
    "name": _TEXT,  # of the parameter or buffer
}

TABLES: dict[str, dict[str, ColumnRule]] = {
    "kernels": KERNELS,
    "launches": LAUNCHES,
    "ops": OPS,
    "ranges": RANGES,
    "links": LINKS,
    "steps": STEPS,
    "counters": COUNTERS,
    "allocations": ALLOCATIONS,
    "segments": SEGMENTS,
    "spans": SPANS,
    "stacks": STACKS,
    "saved": SAVED,
}
# By table, the columns of which the second is never below the first, and how far apart the two may be.
_STRETCH = (("start_ns", "end_ns", LONGEST_NS),)
_LIFE = (("start_event", "end_event", None),)
ORDERED: dict[str, tuple[tuple[str, str, int | None], ...]] = {
    "kernels": (("start_ns", "end_ns", LONGEST_KERNEL_NS),),
    "launches": _STRETCH,
    "ops": _STRETCH,
    "ranges": _STRETCH,
    "allocations": _LIFE,
    "segments": _LIFE,
    "spans": (*_STRETCH, *_LIFE),
}
# Columns that no two rows of a table have in common.
UNIQUE = {"counters": ["kernel", "metric"], "stacks": ["stack"]}
SCHEMAS: dict[str, Schema] = {
    table: {name: column.kind for name, column in columns.items()} for table, columns in TABLES.items()
}


def empty(table: str) -> pl.DataFrame:
    return pl.DataFrame(schema=SCHEMAS[table])


def conform(table: str, frame: pl.DataFrame) -> pl.DataFrame:
    """`frame` with exactly the table's columns in their order; those it lacks are null, and a column that no table has
    is our mistake."""
    if not frame.height:
        return empty(table)
    schema = SCHEMAS[table]
    unknown = set(frame.columns) - set(schema)
    assert not unknown, f"columns {sorted(unknown)} belong to no `{table}` table"
    columns = [
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(kind).alias(name)
        for name, kind in schema.items()
    ]
    return frame.select(columns)

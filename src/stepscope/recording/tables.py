"""The tables of a recording: every reader fills them in, and every analysis reads them.

All times are whole nanoseconds on one clock per recording. Thread and process ids come from the operating system,
device and stream numbers from the driver. A value that the source does not contain is null, never a guess.

The valid values of each column are declared here once. `recording.validation` checks every table against them, so
analyses never see other values.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import polars as pl

Schema = dict[str, type[pl.DataType]]
# Times reach to 2043, and neither their differences nor sums of many durations overflow 64 bits.
FARTHEST_NS = 2**61
LONGEST_NS = 2**50  # 13 days
LONGEST_KERNEL_NS = 2**44  # 4.9 hours
MOST_BYTES = 2**48
MOST_COUNTED = 1e60  # products and sums of these stay finite
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
_Stride = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]


@dataclass(frozen=True, slots=True)
class ColumnRule:
    """The valid values of a column. A `required` column has no nulls, numbers are between `least` and `most` (None: the
    limits of the type), and text decodes to `json`."""

    kind: type[pl.DataType]
    required: bool = False
    least: float | None = None
    most: float | None = None
    absent: int | None = None  # replaces null in a column that must not have nulls
    json: Any = None
    is_new: bool = False  # missing, and read as null, in recordings from earlier versions


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
# The line of the user's code, such as `train.py:42`; null if the recording has none.
_SOURCE = ColumnRule(pl.String, is_new=True)
_TIMED = {"name": _NAME, "start_ns": _TIME, "end_ns": _TIME}
_ON_HOST = {"process": _NUMBER, "thread": ColumnRule(pl.Int64, absent=0)}

# Work on a device. In a CPU recording these are the operators that do the work, of kind `cpu`, with the thread as
# stream.
KERNELS = {
    **_TIMED,
    "kind": _NAME,  # kernel, memcpy, memset or cpu
    "process": _NUMBER,
    "device": ColumnRule(pl.Int32, least=-1, absent=0),  # -1 is the CPU
    "stream": ColumnRule(pl.Int64, absent=0),
    "correlation": _NUMBER,  # matches the launch in the same process; the ID in a file of Nsight Compute
    "graph": ColumnRule(pl.Boolean),  # launched by a CUDA graph
    "graph_node": ColumnRule(pl.Int64, is_new=True),  # of the CUDA graph: within one, in the order of the capture
    "bytes": _BYTES,  # of a copy, or of a collective's message
    # Of a collective: its name in the framework, its process group, and the number of ranks in it.
    "collective": ColumnRule(pl.String, is_new=True),
    "process_group": ColumnRule(pl.String, is_new=True),
    "group_size": ColumnRule(pl.Int32, least=0, is_new=True),
    "grid_x": _COUNT,
    "grid_y": _COUNT,
    "grid_z": _COUNT,
    "block_x": _COUNT,
    "block_y": _COUNT,
    "block_z": _COUNT,
    "registers": _COUNT,
    "shared_bytes": _COUNT,
}
# Calls to the CUDA or HIP runtime and driver.
LAUNCHES = {**_TIMED, **_ON_HOST, "correlation": _NUMBER}
# Launches of one kernel each. Under a capture they run none, and the launch of a graph runs many.
KERNEL_LAUNCHES = r"(?i)launch(?:cooperative)?kernel"
# Operators of the framework. `sequence` is the autograd node that the operator created, or, if `forward_thread` is not
# null, the node whose backward it runs.
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
    "source": _SOURCE,
}
# Named ranges of CPU time: `source` is `user` (a profiler range), `module` (a call of an nn.Module, from the profiler's
# stacks), `python` (another frame worth keeping) or `nvtx`.
RANGES = {**_TIMED, **_ON_HOST, "source": _NAME, "source_line": _SOURCE}
# Links from the operator that created an autograd node to the operator that ran its backward.
LINKS = {
    "forward_ns": _TIME,
    "forward_thread": _NUMBER,
    "backward_ns": _TIME,
    "backward_thread": _NUMBER,
    "process": _NUMBER,
}
# The kernels of a step that runs as CUDA graphs, launched one by one instead: their order, and what each belongs to.
CAPTURED = {
    **{name: KERNELS[name] for name in ("name", "kind", "grid_x", "grid_y", "grid_z")},
    "op": _TEXT,
    "module": _TEXT,
    "part": _TEXT,
    "phase": _TEXT,
    "recomputed": ColumnRule(pl.Boolean),
}
# The calls of compiled functions in order, as the compiler generated them: which kernel or operator, and its module.
# `key` is the function's name in the trace.
COMPILED_CALLS = {
    "graph": ColumnRule(pl.Int32, required=True, least=0),
    "key": _TEXT,
    "is_backward": ColumnRule(pl.Boolean, required=True),
    "kernel": _NAME,
    "module": _TEXT,
}
# Unprofiled steps, one row per phase and step: the reference for the recorded times.
STEPS = {
    "phase": _NAME,
    "step": _COUNT,
    "duration_ns": ColumnRule(pl.Int64, required=True, least=0, most=LONGEST_NS),
    "clock": _NAME,
}
# Hardware counters, one row per kernel and metric; `kernel` is the row in `kernels`.
COUNTERS = {
    "kernel": ColumnRule(pl.Int64, required=True, least=0),
    "metric": _NAME,
    "unit": _NAME,
    "value": ColumnRule(pl.Float64, least=-MOST_COUNTED, most=MOST_COUNTED),
    "text": _TEXT,
}

# --- Memory. Time has two coordinates here: the event, which is the position in the sequence of allocations and frees
# and defines exactly what is alive at the same time, and nanoseconds.
_LIVED = {
    "start_event": _LONG_COUNT,  # null: allocated before the recording
    "end_event": _LONG_COUNT,  # null: still allocated at the end
    "start_ns": _MAYBE_TIME,
    "end_ns": _MAYBE_TIME,
    "device": _COUNT,  # null on a CPU
    "stream": _NUMBER,
    "address": _NUMBER,
    "bytes": _TAKEN_BYTES,  # device memory, after rounding
}
# One row per allocation, from its start to its free.
ALLOCATIONS = {
    **_LIVED,
    "requested_bytes": _BYTES,  # before rounding by the allocator
    "step": _COUNT,  # where it was allocated: step, phase, module path and operator
    "phase": _TEXT,
    "module": _TEXT,
    "op": _TEXT,
    "category": _TEXT,  # one of explain.memory.CATEGORIES, or a category of a later version
    "name": _TEXT,  # of the parameter or buffer, or autograd's name
    "shape": _SHAPE,
    "dtype": _TEXT,
    "stack": _COUNT,  # row in `stacks`
}
# Memory that the allocator has reserved, in use or not.
SEGMENTS = dict(_LIVED)
# One row per phase of a step, and one with a null phase for the whole step.
SPANS = {
    "step": _COUNT,
    "phase": _TEXT,
    "start_event": ColumnRule(pl.Int64, required=True, least=0),
    "end_event": ColumnRule(pl.Int64, required=True, least=0),  # exclusive
    "start_ns": _TIME,
    "end_ns": _TIME,
}
# One frame per line, innermost first: `file.py:12 function`.
STACKS = {"stack": ColumnRule(pl.Int32, required=True, least=0), "frames": _NAME}
# Tensors saved for backward: one row per tensor of a node.
SAVED = {
    "node": ColumnRule(pl.Int64, required=True, least=0),  # in forward order
    "op": _NAME,  # name of the node: MulBackward0
    "argument": _NAME,  # the node's name for the tensor: self, result
    "module": _TEXT,
    "shape": _SHAPE,
    "dtype": _TEXT,
    "bytes": _TAKEN_BYTES,  # of the tensor
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
    "captured": CAPTURED,
    "compiled_calls": COMPILED_CALLS,
    "steps": STEPS,
    "counters": COUNTERS,
    "allocations": ALLOCATIONS,
    "segments": SEGMENTS,
    "spans": SPANS,
    "stacks": STACKS,
    "saved": SAVED,
}
# For each table, pairs of columns whose second is never less than the first, and their largest difference.
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
# Columns that identify a row.
UNIQUE = {"counters": ["kernel", "metric"], "stacks": ["stack"]}
SCHEMAS: dict[str, Schema] = {
    table: {name: column.kind for name, column in columns.items()} for table, columns in TABLES.items()
}


def empty(table: str) -> pl.DataFrame:
    return pl.DataFrame(schema=SCHEMAS[table])


def conform(table: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Return `frame` with exactly the columns of the table, in order. Missing columns are null; an unknown column is a
    bug."""
    if not frame.height:
        return empty(table)
    schema = SCHEMAS[table]
    unknown = set(frame.columns) - set(schema)
    assert not unknown, f"table `{table}` has no columns {sorted(unknown)}"
    columns = [
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(kind).alias(name)
        for name, kind in schema.items()
    ]
    return frame.select(columns)

"""The tables of a recording: what every reader fills in and every analysis reads.

All times are whole nanoseconds on one clock per recording. Threads and processes are the numbers the operating system
gave them; a device and its streams are the driver's. A column that a source does not know is null, never a guess.
"""

import polars as pl

Schema = dict[str, type[pl.DataType]]
_TIMED: Schema = {"name": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64}
_ON_HOST: Schema = {"process": pl.Int64, "thread": pl.Int64}

# What ran on a device. On a CPU recording these are the innermost operators, kind `cpu`, with the thread as stream.
KERNELS: Schema = {
    **_TIMED,
    "kind": pl.String,  # kernel, memcpy, memset or cpu
    "process": pl.Int64,
    "device": pl.Int32,
    "stream": pl.Int64,
    "correlation": pl.Int64,  # joins the launch of the same process
    "graph": pl.Boolean,  # started by the replay of a graph
    "bytes": pl.Int64,
    "grid_x": pl.Int32,
    "grid_y": pl.Int32,
    "grid_z": pl.Int32,
    "block_x": pl.Int32,
    "block_y": pl.Int32,
    "block_z": pl.Int32,
    "registers": pl.Int32,
    "shared_bytes": pl.Int32,
}
# Calls of the CUDA or HIP runtime and driver.
LAUNCHES: Schema = {**_TIMED, **_ON_HOST, "correlation": pl.Int64}
# Operators of the framework. `sequence` names the autograd node an operator made, or, where `forward_thread` is not
# null, the node whose backward it is.
OPS: Schema = {
    **_TIMED,
    **_ON_HOST,
    "sequence": pl.Int64,
    "forward_thread": pl.Int64,
    "shapes": pl.String,  # JSON, as recorded
    "dtypes": pl.String,
    "strides": pl.String,
    "arguments": pl.String,
}
# Stretches of host time with a name: `source` is `user` (a profiler range), `module` (an nn.Module's call seen by the
# profiler's stacks), `python` (another frame worth keeping) or `nvtx`.
RANGES: Schema = {**_TIMED, **_ON_HOST, "source": pl.String}
# Arrows from the operator that made an autograd node to the one that ran its backward.
LINKS: Schema = {
    "forward_ns": pl.Int64,
    "forward_thread": pl.Int64,
    "backward_ns": pl.Int64,
    "backward_thread": pl.Int64,
    "process": pl.Int64,
}
# Steps timed without the recorder, one row a phase and step: the clock the recording is held against.
STEPS: Schema = {"phase": pl.String, "step": pl.Int32, "duration_ns": pl.Int64, "clock": pl.String}
# Hardware counters, one row a kernel and metric; `kernel` is the row in `kernels`.
COUNTERS: Schema = {"kernel": pl.Int64, "metric": pl.String, "unit": pl.String, "value": pl.Float64, "text": pl.String}

# --- Memory. Time has two coordinates there: the event, which is the position in the order in which memory was taken
# and given back, and says exactly what was there together; and nanoseconds.
_LIVED: Schema = {
    "start_event": pl.Int64,  # null: there before recording began
    "end_event": pl.Int64,  # null: still there at its end
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "device": pl.Int32,  # null on a CPU
    "stream": pl.Int64,
    "address": pl.Int64,
    "bytes": pl.Int64,  # what it takes of the device's memory
}
# One row a piece of memory, from when it was taken to when it was given back.
ALLOCATIONS: Schema = {
    **_LIVED,
    "requested_bytes": pl.Int64,  # before the allocator rounded it up
    "step": pl.Int32,  # where it was taken: the step, its phase, the module's path and the operator
    "phase": pl.String,
    "module": pl.String,
    "op": pl.String,
    "category": pl.String,  # one of explain.memory.CATEGORIES
    "name": pl.String,  # a parameter's, a buffer's; what autograd calls it
    "shape": pl.String,  # JSON
    "dtype": pl.String,
    "stack": pl.Int32,  # row in `stacks`
}
# What the allocator holds of the device, in use or not.
SEGMENTS: Schema = dict(_LIVED)
# One row a phase of a step, and one with a null phase for the whole step.
SPANS: Schema = {
    "step": pl.Int32,
    "phase": pl.String,
    "start_event": pl.Int64,
    "end_event": pl.Int64,  # exclusive
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
}
# Frames one a line, the innermost first: `file.py:12 function`.
STACKS: Schema = {"stack": pl.Int32, "frames": pl.String}
# What autograd keeps for backward: one row a tensor that a node saved.
SAVED: Schema = {
    "node": pl.Int64,  # in the order of the forward pass
    "op": pl.String,  # the node's name: MulBackward0
    "argument": pl.String,  # what the node calls it: self, result
    "module": pl.String,
    "shape": pl.String,  # JSON
    "dtype": pl.String,
    "bytes": pl.Int64,  # of this tensor
    "storage": pl.Int64,  # tensors with the same number share memory
    "storage_bytes": pl.Int64,
    "kind": pl.String,  # activation, parameter, buffer or input
    "name": pl.String,  # of the parameter or buffer
}

SCHEMAS: dict[str, Schema] = {
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


def empty(table: str) -> pl.DataFrame:
    return pl.DataFrame(schema=SCHEMAS[table])


def conform(table: str, frame: pl.DataFrame) -> pl.DataFrame:
    """`frame` with exactly the table's columns in their order; those it lacks are null, and a column that no table has
    is our mistake."""
    if not frame.width:
        return empty(table)
    schema = SCHEMAS[table]
    unknown = set(frame.columns) - set(schema)
    assert not unknown, f"columns {sorted(unknown)} belong to no `{table}` table"
    columns = [
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(kind).alias(name)
        for name, kind in schema.items()
    ]
    return frame.select(columns)

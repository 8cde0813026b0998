"""The category of each allocation in a snapshot from another tool, inferred from its stacks.

The Python frames of a stack show the stage of training that allocated the memory: a module's forward pass, autograd, an
optimizer, or building the model. On CUDA, autograd runs on its own thread, which has no Python frames: its C++ frames
show it or, in a snapshot without them, an allocation without frames that follows a forward pass or a call of `backward`
was made there. The category then follows from the lifetime. Memory that outlives the forward pass and is alive in
backward is an activation, memory that outlives the backward pass and is alive in the optimizer is a gradient, and
memory that an optimizer never frees is its state.

Memory from before the recording has no stack. What is never freed and has the size of a gradient is a parameter, one
for each gradient; the rest is unknown.

Recordings of stepscope carry their categories and do not use this module.
"""

import re
from typing import Any

import numpy as np
import polars as pl

from stepscope.recording.memory import labels

CATEGORIES = (*labels.CATEGORIES, "unknown")
# Long-lived memory is at the bottom. These categories are in every chart, even if empty, so that each has the same
# colour everywhere. Other categories go on top if there are any.
STACKED = (
    "parameters",
    "optimizer state",
    "workspaces",
    "gradients",
    "autocast copies",
    "activations",
    "temporaries",
)

_COMMUNICATION = re.compile(r"^torch/distributed/(?!optim|fsdp/_optim|checkpoint)|c10d|\bnccl", re.MULTILINE | re.I)
_OPTIMIZER = re.compile(r"^torch/optim/|/optim\w*\.py:\d+ |^(?:\S*/)?\w*optimi[sz]er\w*\.py:\d+ ", re.MULTILINE)
_BACKWARD = re.compile(
    r"^torch/autograd/graph\.py:\d+ _engine_run_backward|^torch/_tensor\.py:\d+ backward| backward$", re.MULTILINE
)
_WORKSPACE = re.compile(r"[Ww]orkspace|cublas\w*Create|cudnnCreate", re.MULTILINE)
_BUILDING = re.compile(
    r" __init__$| _apply$| from_pretrained$| reset_parameters$| _load_from_state_dict$| load_state_dict$", re.MULTILINE
)
_FORWARD = re.compile(r" forward$|^torch/nn/(?:modules|functional)", re.MULTILINE)
_ENGINE = re.compile(r" torch::autograd::(?:Engine|python::PythonEngine)::|::\w+Backward\d*::apply\(")
_BEFORE_BACKWARD = ("forward", "backward", "communication")
STAGES = ("forward", "backward", "optimizer", "communication", "workspace", "building", "unknown")


_FRAME = re.compile(r"(.*?):\d+ (.*)")
_LIBRARIES = re.compile(r"(?:torch|functorch|triton)/|<frozen |(?:.*/)?python3\.\d+/")
_MACHINERY = re.compile(r"\S*:\d+ (?:torch::(?:unwind|CapturedTraceback|gather)|c10::|at::(?:\w+::)*empty)")
_NODE = re.compile(r"\b(\w+Backward\d*)::apply\(")


def python_frames(stack: str) -> list[str]:
    """Return the lines of a stack that are Python's; snapshots have C++ frames too by default."""
    return [line for line in stack.splitlines() if (found := _FRAME.match(line)) and _is_python(found[1], found[2])]


def _is_python(file: str, name: str) -> bool:
    return file.endswith(".py") or file.startswith("<") or name == "<module>"


def name_place(stack: str) -> str:
    """Return the place in the user's code that a stack belongs to: its first frame outside PyTorch and Python. On
    autograd's thread, which has none, return the node that it evaluated. Empty without a stack."""
    frames = python_frames(stack)
    for frame in (*(frame for frame in frames if not _LIBRARIES.match(frame)), *frames):
        return frame.replace(":0 ", " ")  # its line is unknown
    if found := _NODE.search(stack):
        return found[1]
    lines = stack.splitlines()
    telling = [line for line in lines if not _MACHINERY.match(line)]
    return next((line.removeprefix("??:0 ") for line in (*telling, *lines)), "")


def stage_of_stack(frames: str) -> str:
    """Return the stage of training that this stack belongs to."""
    # Libraries have C++ frames; what a program does shows in its Python frames.
    in_python = "\n".join(python_frames(frames))
    for stage, pattern, text in (
        ("communication", _COMMUNICATION, frames),
        ("workspace", _WORKSPACE, frames),
        ("optimizer", _OPTIMIZER, in_python),
        ("backward", _BACKWARD, in_python),
        ("building", _BUILDING, in_python),
        ("forward", _FORWARD, in_python),
        ("backward", _ENGINE, frames),
    ):
        if pattern.search(text):
            return stage
    return "unknown"


def guess_categories(allocations: pl.DataFrame, stacks: pl.DataFrame) -> pl.DataFrame:
    """Fill in `phase` and `category` from the stacks. Without stacks, every category is `unknown`."""
    if not stacks.height:
        return allocations.with_columns(category=pl.lit("unknown"), phase=pl.lit(None, dtype=pl.String))
    stages = pl.DataFrame(
        {"stack": stacks["stack"], "stage": [stage_of_stack(text) for text in stacks["frames"]]},
        schema={"stack": pl.Int32, "stage": pl.String},
    )
    frame = allocations.join(stages, on="stack", how="left", maintain_order="left")
    frame = frame.with_columns(stage=_stage_without_frames(frame))
    frame = frame.with_columns(leaves=_leaves(frame))
    is_stage = {name: pl.col("stage") == name for name in STAGES}
    never_freed = pl.col("end_event").is_null()
    category = (
        pl.when(is_stage["communication"])
        .then(pl.lit("communication"))
        .when(is_stage["workspace"])
        .then(pl.lit("workspaces"))
        .when(is_stage["building"])
        .then(pl.lit("parameters"))
        .when(is_stage["optimizer"])
        .then(pl.when(never_freed).then(pl.lit("optimizer state")).otherwise(pl.lit("temporaries")))
        .when(is_stage["backward"])
        .then(pl.when("leaves").then(pl.lit("gradients")).otherwise(pl.lit("temporaries")))
        .when(is_stage["forward"])
        .then(pl.when("leaves").then(pl.lit("activations")).otherwise(pl.lit("temporaries")))
        .when(is_stage["unknown"])
        .then(pl.lit("other"))
        .otherwise(pl.lit("unknown"))
    )
    phase = pl.when(pl.col("stage").is_in(["forward", "backward", "optimizer"])).then(pl.col("stage"))
    return _find_parameters(frame.with_columns(category=category, phase=phase).drop("stage", "leaves"))


def _find_parameters(frame: pl.DataFrame) -> pl.DataFrame:
    """Of the memory from before the recording, call one block per gradient of its size a parameter. An optimizer may
    keep more blocks of that size; which of them is the parameter makes no difference to any sum."""
    size = pl.coalesce("requested_bytes", "bytes")
    gradients = frame.filter(pl.col("category") == "gradients")
    if not gradients.height:
        return frame
    # Of one step: those that are alive when the first of them is freed.
    freed = gradients["end_event"].min()
    at_once = gradients.filter(pl.col("start_event") < freed) if freed is not None else gradients
    counts = at_once.group_by(size=size).agg(gradients=pl.len())
    held = pl.col("start_event").is_null() & pl.col("end_event").is_null() & (pl.col("category") == "unknown")
    place = pl.col("address").rank("ordinal").over("size", "held")
    marked = frame.with_columns(size=size, held=held).with_columns(place=place)
    marked = marked.join(counts, on="size", how="left", maintain_order="left")
    is_parameter = pl.col("held") & (pl.col("place") <= pl.col("gradients"))
    category = pl.when(is_parameter).then(pl.lit("parameters")).otherwise("category")
    return marked.with_columns(category=category).drop("size", "held", "place", "gradients")


def _stage_without_frames(frame: pl.DataFrame) -> pl.Series:
    """Assign allocations without frames to backward if they follow a forward pass or a call of `backward`: they were
    made on autograd's thread. Anywhere else the stage is unknown, because recording stacks may have been off."""
    ordered = frame.with_row_index("row").select("row", "start_event", "stage").sort("start_event", nulls_last=False)
    before = pl.col("stage").fill_null(strategy="forward")
    lacking = pl.col("stage").is_null() & pl.col("start_event").is_not_null()
    told = ordered.with_columns(
        stage=pl.when(lacking & before.is_in(_BEFORE_BACKWARD)).then(pl.lit("backward")).otherwise(pl.col("stage"))
    )
    return told.sort("row")["stage"]


def _leaves(frame: pl.DataFrame) -> pl.Series:
    """Whether each allocation is still alive when the next stage, which uses it, begins."""
    following = {"forward": ("backward",), "backward": ("optimizer", "forward")}
    ended = frame["end_event"].fill_null(np.iinfo(np.int64).max).to_numpy()
    started = frame["start_event"].fill_null(-1).to_numpy()
    leaves = np.zeros(frame.height, dtype=bool)
    stages = frame["stage"].fill_null("unknown")
    for stage, nexts in following.items():
        mine = (stages == stage).to_numpy()
        begins = _starts(frame, stages.is_in(list(nexts)))
        if begins.size and mine.any():
            at = np.searchsorted(begins, started[mine], side="right")
            known = at < begins.size
            begun = np.where(known, begins[np.minimum(at, begins.size - 1)], np.iinfo(np.int64).max)
            leaves[mine] = ended[mine] > begun
    return pl.Series("leaves", leaves)


def _starts(frame: pl.DataFrame, chosen: pl.Series) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.sort(frame.filter(chosen)["start_event"].drop_nulls().to_numpy())

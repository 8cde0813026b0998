"""Find the phase of a moment (input, forward, loss, backward or optimizer) and its step.

Evidence is used in order of reliability. Inside the evaluation of an autograd node the phase is backward, whatever
range is open. Then come ranges that name a phase (stepscope's, the framework's `Optimizer.step`, user-defined names),
the optimizer's frames, module calls, loss operators, and operators with a sequence number, which PyTorch gives to those
that could need a gradient. Any operator around a moment counts: `CompiledFunction` and other custom autograd functions
run without gradients inside, so only they have a number. Anything else on a thread follows the ranges of other threads
at that time, and on the autograd engine's own threads it is backward. A recording without backward is inference, and
everything without other evidence is forward.

An optimizer's range with backward inside runs a closure: there, modules, losses and sequence numbers come before the
range. Elsewhere they do not, because some optimizers leave gradients enabled, and their operators have numbers too.
"""

import polars as pl

from stepscope.recording.nesting import around, innermost
from stepscope.recording.store import Recording

_OURS = "phase:"
INPUT_RANGE = "phase:input"
FORWARD_RANGE = "phase:forward"
_STEP = r"^(?:ProfilerStep#|step:|step[_ ]|iteration[_ ]|iter[_ ])(\d{1,9})$"
# Names that users and frameworks give to the parts of a step. The first match wins. Words may be joined by `_`.
# Pipeline codes mark the forward pass, the gradients of inputs and those of weights: `mlp(F)`, `mlp(B)`, `mlp(W)`.
_BACKWARD = r"(?i:(?:^|[^a-z])(?:backward|bwd)(?:[^a-z]|$))"
_FORWARD = r"(?i:(?:^|[^a-z])(?:forward|fwd)(?:[^a-z]|$))"
_NAMED = (
    (
        "optimizer",
        r"(?i)(?:^|[^a-z])optimi[sz]er(?:[^a-z]|$)|(?:^|[^a-z])zero_grad(?:[^a-z]|$)|: (?:step|zero_grad)$",
    ),
    ("backward", rf"{_BACKWARD}|\([BW]\)\s*$"),
    ("loss", r"(?i)^#*\s*(?:compute[_ ])?loss\s*#*$|\bcriterion\b"),
    (
        "input",
        # The last three are TorchRec's: it moves and redistributes the next batch while the current one is trained on.
        r"(?i)\bdata ?load(?:er|ing)?\b|enumerate\(DataLoader\)|\bnext_batch\b|#*\s*(?:load|get)[ _](?:data|batch)"
        r"|\bcopy_batch_to_(?:gpu|device)\b|\b(?:wait_|start_)?sparse_data_dist\b|\bwait_for_batch\b",
    ),
    ("forward", rf"{_FORWARD}|\(F\)\s*$|\bexecute_(?:model|\d+_context)"),
    ("warm-up", r"(?i)^warm-?up"),
)
LOSS_OPS = (
    r"^aten::(?:cross_entropy_loss|nll_loss\w*|mse_loss|(?:smooth_)?l1_loss|binary_cross_entropy\w*"
    r"|kl_div|_?log_softmax|huber_loss|ctc_loss)$"
)
# The engine calls this after the last node, on a CPU from the thread that called `backward`.
_AFTER_NODES = "torch.distributed.ddp.reducer::"


def find_phases(
    frame: pl.DataFrame,
    ops: pl.DataFrame,
    named: pl.DataFrame,
    engine: pl.DataFrame,
    *,
    has_backward: bool,
    has_input: bool,
) -> pl.DataFrame:
    """Add `phase` to rows with `in_backward`, `module`, `op_row` (of `ops`) and the moment (`process`, `thread`, `ns`),
    and drop `in_backward`. `named` are the `named_ranges`, with `closure` where an optimizer runs one;
    `engine` are the threads (`process`, `thread`) that run backward and nothing else. If ranges mark the input of a
    loop (`has_input`), copies to the GPU outside its other parts carry what was loaded."""
    loss_ops = ops.filter(pl.col("name").str.contains(LOSS_OPS))
    in_loss = innermost(loss_ops, frame).is_not_null()
    after_nodes = innermost(ops.filter(pl.col("name").str.starts_with(_AFTER_NODES)), frame).is_not_null()
    threads = engine.with_columns(engine=pl.lit(value=True))
    framed = frame.join(threads, on=["process", "thread"], how="left", maintain_order="left", nulls_equal=True)
    sequence = innermost(ops.filter(pl.col("sequence").is_not_null()), frame).is_not_null()
    runs_model = around(named, "closure", frame) & (in_loss | sequence | frame["module"].is_not_null())
    here, anywhere = (
        around(named, "phase", frame, by_thread=by_thread).set(runs_model.fill_null(value=False), None)
        for by_thread in (True, False)
    )
    op_known = frame["op_row"].is_not_null()
    copies_in = pl.col("name").str.starts_with("Memcpy HtoD")
    launched = pl.col("ns").is_not_null()
    phase = (
        pl.when(pl.col("in_backward") | after_nodes)
        .then(pl.lit("backward"))
        .when(here.is_in(["forward"]) & in_loss)
        .then(pl.lit("loss"))
        .when(here.is_not_null())
        .then(here)
        .when(in_loss)
        .then(pl.lit("loss"))
        .when(pl.col("module").is_not_null())
        .then(pl.lit("forward"))
        .when(anywhere.is_not_null())
        .then(anywhere)
        .when((sequence | pl.lit(has_input) & op_known) & copies_in)
        .then(pl.lit("input"))
        .when(sequence)
        .then(pl.lit("forward"))
        .when(pl.col("engine") & launched)
        .then(pl.lit("backward"))
        .when(launched & pl.lit(not has_backward) & op_known)
        .then(pl.lit("forward"))
    )
    return framed.with_columns(phase=phase).drop("in_backward", "engine")


def named_ranges(ranges: pl.DataFrame) -> pl.DataFrame:
    """Return the ranges that name a part of a step, with `phase`. Each distinct name is read once."""
    phases = _read_phases(ranges.select("name", "source").unique())
    return ranges.join(phases, on=["name", "source"], how="inner", maintain_order="left")


def _read_phases(ranges: pl.DataFrame) -> pl.DataFrame:
    name = pl.col("name")
    ours = name.str.starts_with(_OURS)
    guess = pl.lit(None, pl.String)
    for label, pattern in reversed(_NAMED):
        guess = pl.when(name.str.contains(pattern)).then(pl.lit(label)).otherwise(guess)
    about_modules = name.str.starts_with("module:") | (pl.col("source") == "module") | name.str.starts_with("part:")
    both = name.str.contains(_FORWARD) & name.str.contains(_BACKWARD)  # around a whole step
    phase = pl.when(ours).then(name.str.strip_prefix(_OURS)).when(~about_modules & ~both).then(guess)
    return ranges.with_columns(phase=phase).filter(pl.col("phase").is_not_null())


def step_ranges(recording: Recording) -> pl.DataFrame:
    """Return the ranges that mark steps, with `step`, in order of time."""
    steps = recording.ranges.with_columns(step=pl.col("name").str.extract(_STEP).cast(pl.Int32, strict=False))
    return steps.filter(pl.col("step").is_not_null()).sort("start_ns")


def number_passes(recording: Recording, moments: pl.Series) -> pl.Series:
    """Return how many forward passes had started at each moment, if a step of the case runs several; 0 if it runs one,
    or if the case is unknown."""
    case = recording.manifest.case
    if case is None or case.workload.passes == 1:
        return pl.zeros(moments.len(), pl.UInt32, eager=True)
    return recording.ranges.filter(pl.col("name") == FORWARD_RANGE)["start_ns"].sort().search_sorted(moments, "right")

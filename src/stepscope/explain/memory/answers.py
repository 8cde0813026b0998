"""Answers to common questions about memory, from one recording, each with its evidence."""

from collections.abc import Sequence

import polars as pl

from stepscope import cost
from stepscope.explain.memory.categories import name_place
from stepscope.explain.memory.memory_profile import MemoryProfile
from stepscope.explain.memory.memory_tables import (
    categories_table,
    freed_table,
    largest_table,
    leaks_table,
    phases_table,
    steps_table,
)
from stepscope.explain.memory.saved import saved_in_block
from stepscope.explain.questions.answers import Answer, fit_commands, missing
from stepscope.findings import Column, Table
from stepscope.recording.rows.memory_summary import MemorySummary, PhaseBytes
from stepscope.spec import ModelShape
from stepscope.units import MIB, say_bytes

# A feed-forward block from a set of course notes. Counting its activations by hand gives the wrong answer.
_BATCH, _CONTEXT, _WIDTH, _INNER = 10, 200, 512, 1344
_TRAIN = "stepscope memory --mode train"


def answer_memory(profile: MemoryProfile) -> tuple[Answer, ...]:
    """Empty if nothing was ever allocated."""
    if not profile.allocations.height:
        return ()
    summary = profile.summary
    answers = (
        _peak(profile, summary),
        _phase_peaks(profile, summary),
        _largest(profile, summary),
        _steps(profile, summary),
        _freed(profile),
        _block(profile),
        _gradients(profile),
        _residual(profile),
        _example(),
        _leftover(summary),
    )
    return fit_commands(answers, profile.recording.manifest)


def _peak(profile: MemoryProfile, summary: MemorySummary) -> Answer:
    largest = max(summary.categories, key=lambda one: one.bytes)
    step = f"step {summary.peak_step + 1}, " if summary.peak_step is not None else ""
    where = f"{step}{summary.peak_phase or 'an unknown phase'}"
    module = f", in `{summary.peak_module}`" if summary.peak_module else ""
    share = largest.bytes / summary.peak_bytes
    return Answer(
        key="peak",
        question="When does memory peak, and what is it used for?",
        figure=say_bytes(summary.peak_bytes),
        sentence=f"Memory peaks in {where}{module}; {share:.0%} of it is {largest.category}.",
        evidence=categories_table(profile),
    )


def _phase_peaks(profile: MemoryProfile, summary: MemorySummary) -> Answer:
    key, question = "phases", "What is the peak memory of each phase?"
    last = [one for one in summary.phases if one.step == (summary.steps[-1].step if summary.steps else None)]
    if not last:
        return missing(
            key, question, "this recording has no phase markers, and its stacks do not show the phase", _TRAIN
        )
    said = ", ".join(f"{one.phase} {say_bytes(one.peak_bytes)}" for one in last)
    return Answer(
        key=key,
        question=question,
        figure=say_bytes(max(one.peak_bytes for one in last)),
        sentence=f"Peaks of the last step: {said}." + _say_shape(last),
        evidence=phases_table(profile),
    )


def _say_shape(phases: Sequence[PhaseBytes]) -> str:
    by_name = {one.phase: one for one in phases}
    forward, backward = by_name.get("forward"), by_name.get("backward")
    kept, given = _rise(forward), _rise(backward)
    if kept is None or given is None:
        return ""
    return f" Net change: forward +{say_bytes(max(0, kept))}, backward −{say_bytes(max(0, -given))}."


def _rise(phase: PhaseBytes | None) -> int | None:
    if phase is None or phase.start_bytes is None or phase.end_bytes is None:
        return None
    return phase.end_bytes - phase.start_bytes


def _largest(profile: MemoryProfile, summary: MemorySummary) -> Answer:
    first = summary.largest[0]
    what = f"a {first.dtype} tensor {first.shape}, " if first.shape else ""
    who = first.name if first.category in ("parameters", "gradients", "optimizer state") else first.op
    where = name_place(first.stack)
    return Answer(
        key="largest",
        question="What are the largest allocations, and where do they come from?",
        figure=say_bytes(first.bytes),
        sentence=f"The largest allocation at the peak ({what}{first.category}) comes from {who or 'unknown code'}"
        + (f" in `{first.module}`" if first.module else "")
        + (f", at {where}." if where else "."),
        evidence=largest_table(profile, top=10),
    )


def _steps(profile: MemoryProfile, summary: MemorySummary) -> Answer:
    key, question = "steps", "Does the first step peak as high as later steps?"
    if len(summary.steps) < 2:
        return missing(key, question, "this recording has fewer than two steps", "stepscope memory --steps 10")
    first, last = summary.steps[0], summary.steps[-1]
    change = last.peak_bytes - first.peak_bytes
    said = "the same as" if not change else f"{say_bytes(abs(change))} {'more' if change > 0 else 'less'} than"
    why = ""
    if change > 0 and summary.steps[0].end_bytes > summary.before_bytes:
        kept = say_bytes(first.end_bytes - summary.before_bytes)
        why = f" The first step adds {kept} that stays allocated, such as the optimizer state."
    leaks = leaks_table(profile)
    if leaks.rows:
        why += (
            f" Possible leak: {say_bytes(int(leaks.rows[0][0] or 0))} per step at {leaks.rows[0][3]} (--table leaks)."
        )
    return Answer(
        key=key,
        question=question,
        figure=f"{'No' if change > 0 else 'Yes'}, {say_bytes(first.peak_bytes)}",
        sentence=f"Step {last.step + 1} peaks at {say_bytes(last.peak_bytes)}, {said} step 1.{why}",
        evidence=steps_table(profile),
    )


def _freed(profile: MemoryProfile) -> Answer:
    key, question = "freed", "When does backward free activations?"
    table = freed_table(profile, top=profile.allocations.height)
    if not table.rows:
        return missing(key, question, "this recording has no backward pass", _TRAIN)
    freed = sum(row[1] for row in table.rows if isinstance(row[1], int))
    order = [str(row[0]) for row in table.rows if str(row[0]).isdecimal()]
    way = f"from layer {order[0]} to layer {order[-1]}" if len(order) > 1 else "as backward runs"
    return Answer(
        key=key,
        question=question,
        figure=way,
        sentence=f"Backward frees {say_bytes(freed)} of activations, {way}, each once its autograd node has run.",
        evidence=table,
    )


def _block(profile: MemoryProfile) -> Answer:
    key, question = "block", "How much does one block save for backward, and what are the largest tensors?"
    saved = profile.recording.saved
    if not saved.height:
        return missing(
            key,
            question,
            "this recording has no saved activations: the step ran without autograd, or another tool recorded it",
            _TRAIN,
        )
    table = saved_in_block(saved)
    if not table.rows:
        return missing(
            key, question, "the model has no repeated blocks, or is compiled into one graph", f"{_TRAIN} --compile no"
        )
    sizes = [row[-2] for row in table.rows if isinstance(row[-2], int)]
    total = sum(sizes)
    most = "; ".join(
        f"{row[0]} {row[1]} {size / total:.1%}" for row, size in list(zip(table.rows, sizes, strict=True))[:5]
    )
    return Answer(
        key=key,
        question=question,
        figure=say_bytes(total),
        sentence=f"{table.title}: {say_bytes(total)}. The five largest: {most}.",
        evidence=table,
    )


def _gradients(profile: MemoryProfile) -> Answer:
    key, question = "gradients", "How much memory do the gradients of one block take?"
    grads = profile.allocations.filter((pl.col("category") == "gradients") & pl.col("layer").is_not_null())
    if not grads.height:
        return missing(key, question, "this recording has no gradients that belong to a layer", _TRAIN)
    step = grads["step"].max()
    if step is not None:
        grads = grads.filter(pl.col("step") == step)
    by_layer = grads.group_by("layer").agg(pl.col("bytes").sum()).sort("layer")
    one = int(by_layer["bytes"][0])
    owned = profile.allocations.filter((pl.col("category") == "parameters") & (pl.col("layer") == by_layer["layer"][0]))
    share = one / max(1, int(owned["bytes"].sum()))
    same = "the same as its parameters" if share == 1 else f"{share:.2f}× its parameters"
    return Answer(
        key=key,
        question=question,
        figure=say_bytes(one),
        sentence=f"The gradients of one block take {say_bytes(one)}, {same}; those of all {by_layer.height} blocks "
        f"take {say_bytes(int(by_layer['bytes'].sum()))}.",
        evidence=Table(
            title="Gradients by layer",
            columns=(Column(key="layer", label="layer", kind="count"), Column(key="bytes", label="size", kind="bytes")),
            rows=tuple(by_layer.iter_rows()),
        ),
    )


def _residual(profile: MemoryProfile) -> Answer:
    key, question = "residual", "How large is one residual-stream tensor?"
    case = profile.recording.manifest.case
    if case is None or not isinstance(case.workload.model, ModelShape):
        return missing(
            key, question, "only recordings of the built-in model have its formula", "stepscope memory --size small"
        )
    workload, shape = case.workload, case.workload.model
    size = cost.residual_bytes(shape, batch=workload.micro_batch, context=workload.context)
    return Answer(
        key=key,
        question=question,
        figure=f"{size / MIB:,.4g} MiB",
        sentence="batch × context × d_model × 4 bytes = "
        f"{workload.micro_batch} × {workload.context} × {shape.d_model} × 4 = {size:,} bytes, "
        f"{size / MIB:,.4g} MiB in fp32.",
    )


def _example() -> Answer:
    """A count by hand, compared with what is saved for backward."""
    by_hand = cost.product_inputs_bytes(batch=_BATCH, context=_CONTEXT, d_model=_WIDTH, d_ff=_INNER)
    terms = cost.feed_forward_activations(batch=_BATCH, context=_CONTEXT, d_model=_WIDTH, d_ff=_INNER)
    kept = cost.total_bytes(terms)
    return Answer(
        key="by-hand",
        question="How much does a feed-forward block save for backward, and does a count by hand agree?",
        figure=f"{kept / MIB:,.2f} MiB",
        sentence=f"At batch {_BATCH}, context {_CONTEXT}, d_model {_WIDTH} and d_ff {_INNER}, counting the inputs of "
        f"its three GEMMs by hand gives {by_hand / MIB:,.2f} MiB; autograd saves {kept / MIB:,.2f} MiB. The gate and "
        "up projections share one input, which is saved once, not twice. The elementwise multiplications in between "
        "save their inputs too, which the count by hand leaves out.",
        evidence=Table(
            title="Saved for backward in a feed-forward block",
            columns=(
                Column(key="tensor", label="tensor"),
                Column(key="formula", label="formula"),
                Column(key="count", label="count", kind="count"),
                Column(key="bytes", label="size", kind="bytes"),
                Column(key="why", label="why"),
            ),
            rows=tuple((term.tensor, term.formula, term.count, term.bytes, term.why) for term in terms),
        ),
    )


def _leftover(summary: MemorySummary) -> Answer:
    key, question = "leftover", "How much memory stays allocated after a step, and how much is only cached?"
    if not summary.steps:
        return missing(key, question, "this recording has no step markers", _TRAIN)
    last = summary.steps[-1]
    if last.end_reserved_bytes is None:
        said = "PyTorch has no caching allocator on a CPU."
    else:
        cached = last.end_reserved_bytes - last.end_bytes
        said = (
            f"The allocator reserves {say_bytes(last.end_reserved_bytes)}: {say_bytes(cached)} is cached for the next "
            "step. Tools such as nvidia-smi show cached memory as used."
        )
    return Answer(
        key=key,
        question=question,
        figure=say_bytes(last.end_bytes),
        sentence=f"{say_bytes(last.end_bytes)} stays allocated. {said}",
    )

"""The questions people ask about memory, answered from one recording, with the evidence beside each."""

from collections.abc import Sequence

import polars as pl

from stepscope import cost
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
from stepscope.explain.questions.answers import Answer, missing
from stepscope.findings import Column, Table
from stepscope.recording.rows.memory_summary import MemorySummary, PhaseBytes
from stepscope.spec import ModelShape
from stepscope.units import MIB, say_bytes

# The feed-forward that a set of course notes counts by hand: the first example of why counting by hand goes wrong.
_BATCH, _CONTEXT, _WIDTH, _INNER = 10, 200, 512, 1344
_TRAIN = "stepscope memory --mode train"


def answer_memory(profile: MemoryProfile) -> tuple[Answer, ...]:
    summary = profile.summary
    return (
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


def _peak(profile: MemoryProfile, summary: MemorySummary) -> Answer:
    largest = max(summary.categories, key=lambda one: one.bytes)
    step = f"step {summary.peak_step + 1}, " if summary.peak_step is not None else ""
    where = f"{step}{summary.peak_phase or 'a place that is not known'}"
    module = f", in `{summary.peak_module}`" if summary.peak_module else ""
    share = largest.bytes / summary.peak_bytes
    return Answer(
        key="peak",
        question="When is most memory allocated, and who holds it?",
        figure=say_bytes(summary.peak_bytes),
        sentence=f"The peak is in {where}{module}; {share:.0%} of it are {largest.category}.",
        evidence=categories_table(profile),
    )


def _phase_peaks(profile: MemoryProfile, summary: MemorySummary) -> Answer:
    key, question = "phases", "Can the phases be told apart by their peaks?"
    last = [one for one in summary.phases if one.step == (summary.steps[-1].step if summary.steps else None)]
    if not last:
        return missing(key, question, "no phase is marked or can be told from stacks", _TRAIN)
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
    return (
        f" Forward ends {say_bytes(max(0, kept))} above its beginning, and backward {say_bytes(max(0, -given))} below."
    )


def _rise(phase: PhaseBytes | None) -> int | None:
    if phase is None or phase.start_bytes is None or phase.end_bytes is None:
        return None
    return phase.end_bytes - phase.start_bytes


def _largest(profile: MemoryProfile, summary: MemorySummary) -> Answer:
    first = summary.largest[0]
    what = f"a {first.dtype} tensor {first.shape}" if first.shape else "one piece"
    who = first.name if first.category in ("parameters", "gradients", "optimizer state") else first.op
    where = first.stack.partition("\n")[0]
    return Answer(
        key="largest",
        question="What are the largest allocations, and where do they come from?",
        figure=say_bytes(first.bytes),
        sentence=f"The largest at the peak is {what}, {first.category}, by {who or 'nobody known'}"
        + (f" in `{first.module}`" if first.module else "")
        + (f", at {where}." if where else "."),
        evidence=largest_table(profile, top=10),
    )


def _steps(profile: MemoryProfile, summary: MemorySummary) -> Answer:
    key, question = "steps", "Is the peak of the first step that of a later one?"
    if len(summary.steps) < 2:
        return missing(key, question, "it holds fewer than two steps", "stepscope memory --steps 10")
    first, last = summary.steps[0], summary.steps[-1]
    change = last.peak_bytes - first.peak_bytes
    said = "the same" if not change else f"{say_bytes(abs(change))} {'more' if change > 0 else 'less'}"
    why = ""
    if change > 0 and summary.steps[0].end_bytes > summary.before_bytes:
        kept = say_bytes(first.end_bytes - summary.before_bytes)
        why = f" The first step leaves {kept} behind, such as the optimizer's state, which is there from then on."
    leaks = leaks_table(profile)
    if leaks.rows:
        why += (
            f" And {say_bytes(int(leaks.rows[0][0] or 0))} a step are left behind at {leaks.rows[0][3]}: --table leaks."
        )
    return Answer(
        key=key,
        question=question,
        figure=say_bytes(last.peak_bytes),
        sentence=f"Step {last.step + 1} peaks at {say_bytes(last.peak_bytes)}, {said} than step 1.".replace(
            "the same than", "the same as"
        )
        + why,
        evidence=steps_table(profile),
    )


def _freed(profile: MemoryProfile) -> Answer:
    key, question = "freed", "When is memory given back in backward?"
    table = freed_table(profile, top=profile.allocations.height)
    if not table.rows:
        return missing(key, question, "it has no backward pass", _TRAIN)
    freed = sum(row[1] for row in table.rows if isinstance(row[1], int))
    order = [str(row[0]) for row in table.rows if str(row[0]).isdecimal()]
    way = f"from layer {order[0]} to layer {order[-1]}" if len(order) > 1 else "as its nodes run"
    return Answer(
        key=key,
        question=question,
        figure=say_bytes(freed),
        sentence=f"Backward gives back {say_bytes(freed)} of activations, {way}: each as soon as its node has run.",
        evidence=table,
    )


def _block(profile: MemoryProfile) -> Answer:
    key, question = "block", "How much does one block keep for backward, and what of it is most?"
    saved = profile.recording.saved
    if not saved.height:
        return missing(key, question, "nothing is kept without a graph, or it is not in the file", _TRAIN)
    table = saved_in_block(saved)
    if not table.rows:
        return missing(
            key, question, "the model has no repeated blocks, or is compiled as a whole", f"{_TRAIN} --compile no"
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
        sentence=f"{table.title}: {say_bytes(total)} . The five largest: {most}.",
        evidence=table,
    )


def _gradients(profile: MemoryProfile) -> Answer:
    key, question = "gradients", "How much do a block's gradients take?"
    grads = profile.allocations.filter((pl.col("category") == "gradients") & pl.col("layer").is_not_null())
    if not grads.height:
        return missing(key, question, "it has no gradients of layers", _TRAIN)
    step = grads["step"].max()
    if step is not None:
        grads = grads.filter(pl.col("step") == step)
    by_layer = grads.group_by("layer").agg(pl.col("bytes").sum()).sort("layer")
    one = int(by_layer["bytes"][0])
    owned = profile.allocations.filter((pl.col("category") == "parameters") & (pl.col("layer") == by_layer["layer"][0]))
    share = one / max(1, int(owned["bytes"].sum()))
    same = "as much as its parameters" if share == 1 else f"{share:.2f} times its parameters"
    return Answer(
        key=key,
        question=question,
        figure=say_bytes(one),
        sentence=f"A block's gradients take {say_bytes(one)}, {same}; all {by_layer.height} blocks' "
        f"{say_bytes(int(by_layer['bytes'].sum()))}.",
        evidence=Table(
            title="Gradients by layer",
            columns=(Column(key="layer", label="layer", kind="count"), Column(key="bytes", label="size", kind="bytes")),
            rows=tuple(by_layer.iter_rows()),
        ),
    )


def _residual(profile: MemoryProfile) -> Answer:
    key, question = "residual", "How large is one tensor of the residual stream?"
    case = profile.recording.manifest.case
    if case is None or not isinstance(case.workload.model, ModelShape):
        return missing(key, question, "the shape of the model is not in the recording", "stepscope memory --size 2.7B")
    workload, shape = case.workload, case.workload.model
    size = cost.residual_bytes(shape, batch=workload.micro_batch, context=workload.context)
    return Answer(
        key=key,
        question=question,
        figure=f"{size / MIB:,.4g} MiB",
        sentence="batch × context × width × 4 bytes = "
        f"{workload.micro_batch} × {workload.context} × {shape.d_model} × 4 = {size:,} bytes, "
        f"{size / MIB:,.4g} MiB in fp32.",
    )


def _example() -> Answer:
    """Counting by hand, against what autograd keeps."""
    by_hand = cost.product_inputs_bytes(batch=_BATCH, context=_CONTEXT, d_model=_WIDTH, d_ff=_INNER)
    terms = cost.feed_forward_activations(batch=_BATCH, context=_CONTEXT, d_model=_WIDTH, d_ff=_INNER)
    kept = cost.total_bytes(terms)
    return Answer(
        key="by-hand",
        question="How much does a feed-forward keep, counted by hand and counted right?",
        figure=f"{kept / MIB:,.2f} MiB",
        sentence=f"For batch {_BATCH}, context {_CONTEXT}, width {_WIDTH} and inner width {_INNER} the inputs of its "
        f"three products are {by_hand / MIB:,.2f} MiB by hand; autograd keeps {kept / MIB:,.2f} MiB. Gate and up "
        "read one x, which is kept once, not twice; and every product by element in between keeps its factors, which "
        "the hand count leaves out.",
        evidence=Table(
            title="What the feed-forward keeps",
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
    key, question = "leftover", "What stays after a step: allocated, or only cached?"
    if not summary.steps:
        return missing(key, question, "no steps are marked", _TRAIN)
    last = summary.steps[-1]
    if last.end_reserved_bytes is None:
        said = "On a CPU there is no cache beyond it that is known."
    else:
        cached = last.end_reserved_bytes - last.end_bytes
        said = (
            f"The allocator holds {say_bytes(last.end_reserved_bytes)}: {say_bytes(cached)} are cached for the next "
            "step and in no use, which other tools show as memory that was not given back."
        )
    return Answer(
        key=key,
        question=question,
        figure=say_bytes(last.end_bytes),
        sentence=f"{say_bytes(last.end_bytes)} stay allocated. {said}",
    )

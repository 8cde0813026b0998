"""What would have fit: rules about a request for memory that failed.

Each estimates what its fix saves of the whole step, and says whether that alone is enough. The codes are in the order
of how little a fix changes: a bug first, then what leaves the results and the speed alone, then what costs time or
accuracy. `torch.cuda.empty_cache` is never among them: PyTorch has returned all cached segments before it gives up.
"""

import math

import polars as pl

from stepscope.explain.memory.out_of_memory import USABLE, MemoryFailure
from stepscope.explain.rules.rule import MemoryHit, Rule
from stepscope.explain.trace.attribution.modules import number_layers
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Copyable, Finding
from stepscope.units import count_noun, say_percent, say_size

_LEAST_OLD = 0.01  # of the held memory
_LEAST_UNUSED = 0.05  # of the capacity
_LEAST_STATE = 0.05
_LEAST_SHARE = 0.02  # of a batch
_MOSTLY = 0.5
_VOCABULARY = 4096  # a last dimension of at least this size may be one
_CHUNKS = 8
_QUANTIZED = 0.75  # of a float32 state that 8-bit states save
_OUTSIDE_BYTES, _LEAST_OUTSIDE = 3 << 29, 0.02
_BYTES_FP32 = 4
_GIVES_LOGITS = ("log_softmax", "cross_entropy", "nll_loss", "LogSoftmax", "NllLoss")
_NOT_OWNED = ("activations", "temporaries", "other")
_MULTI_TENSOR = ("_multi_tensor_", "_foreach_")


def find_fixes(oom: MemoryFailure) -> tuple[Finding, ...]:
    """Return what applies: fixes that are enough alone, the least intrusive first, then the others by their savings."""
    found = []
    for rule in RULES:
        hit = rule.check_memory(oom) if rule.check_memory is not None else None
        if hit is not None:
            found.append(_make_finding(oom, rule, hit))
    return tuple(sorted(found, key=_rank))


def _rank(finding: Finding) -> tuple[bool, int, str]:
    return (not finding.is_enough, 0 if finding.is_enough else -(finding.saving_bytes or 0), finding.code)


def _make_finding(oom: MemoryFailure, rule: Rule, hit: MemoryHit) -> Finding:
    saved = None if hit.saving_bytes is None else round(hit.saving_bytes)
    is_enough = None if saved is None else saved >= oom.need_bytes
    lacking = "" if saved is None or is_enough else f"; {say_size(oom.need_bytes - saved)} short of what a step needs"
    return Finding(
        code=rule.code,
        title=hit.title or rule.title,
        evidence=hit.evidence + lacking,
        action=rule.action,
        fix=hit.paste or rule.paste,
        saving_bytes=saved,
        is_enough=is_enough,
    )


# --- Checks -----------------------------------------------------------------------------------------------------------


def find_old_graphs(oom: MemoryFailure) -> MemoryHit | None:
    facts = oom.facts
    if facts.old_graph_bytes < max(1, _LEAST_OLD * oom.held_bytes):
        return None
    graphs = count_noun(facts.num_old_graphs, "older graph")
    return MemoryHit(
        title=f"{graphs} of scalars such as losses hold {say_size(facts.old_graph_bytes)} of activations",
        evidence=f"{count_noun(facts.num_old_graphs, 'scalar')} with a `grad_fn` outside the newest graph",
        saving_bytes=facts.old_graph_bytes,
    )


def find_fragmentation(oom: MemoryFailure) -> MemoryHit | None:
    facts, unused = oom.facts, oom.unused_bytes
    if facts.has_expandable_segments or not facts.movable_bytes or unused is None:
        return None
    fits = facts.asked_bytes <= oom.room_bytes + facts.movable_bytes
    if not fits and unused < _LEAST_UNUSED * oom.capacity_bytes:
        return None
    largest = say_size(facts.largest_free_bytes or 0)
    text = (
        f"{say_size(unused)} is reserved but free, and the largest free block is {largest}; expandable segments could "
        f"use {say_size(facts.movable_bytes)} of it, with {say_size(oom.room_bytes)} on the device, for the "
        f"{say_size(facts.asked_bytes)} asked for"
    )
    title = f"Fragmentation: {say_size(unused)} is reserved but free"
    return MemoryHit(title=title, evidence=text, saving_bytes=facts.movable_bytes)


def find_kept_gradients(oom: MemoryFailure) -> MemoryHit | None:
    gradients = oom.categories["gradients"]
    if oom.phase != "forward" or not gradients:
        return None
    return MemoryHit(
        title=f"Gradients hold {say_size(gradients)} during the forward pass",
        evidence="they are needed only while gradients are accumulated over micro-batches",
        saving_bytes=gradients,
    )


def find_update_temporaries(oom: MemoryFailure) -> MemoryHit | None:
    if oom.phase != "optimizer" or not any(word in oom.facts.stack for word in _MULTI_TENSOR):
        return None
    saved = oom.categories["temporaries"] + oom.facts.asked_bytes
    text = f"the multi-tensor update needs temporary copies: {say_size(saved)} with the request that failed"
    return MemoryHit(evidence=text, saving_bytes=saved)


def find_logits(oom: MemoryFailure) -> MemoryHit | None:
    kept = oom.alive.filter(
        pl.col("category").is_in(["activations", "temporaries", "other"]) & _last_dim().is_not_null()
    )
    named = kept.filter(pl.col("name").str.contains_any(list(_GIVES_LOGITS)))
    in_loss = any(word in oom.facts.stack for word in _GIVES_LOGITS)
    source = named if named.height else kept if in_loss else kept.head(0)
    wide = source.filter(_last_dim() >= _VOCABULARY).sort("bytes", descending=True)
    if not wide.height:
        return None
    vocabulary = wide.select(_last_dim()).item(0, 0)
    logits = kept.filter(_last_dim() == vocabulary)
    held = int(logits["bytes"].sum())
    asked = oom.facts.asked_bytes if in_loss else 0
    if held + asked < _LEAST_UNUSED * oom.capacity_bytes:
        return None
    more = f", and {say_size(asked)} more was asked for" if asked else ""
    hold = "holds" if logits.height == 1 else "hold"
    tensors = f"{count_noun(logits.height, 'tensor')} with a last dimension of {vocabulary:,}"
    text = f"{tensors} {hold} {say_size(held)}{more}"
    saved = (held + asked) * (1 - 1 / _CHUNKS)
    return MemoryHit(
        title=f"Logits and their copies in the loss take {say_size(held + asked)}",
        evidence=f"{text}; in {_CHUNKS} chunks, one eighth exists at a time",
        saving_bytes=saved,
    )


def _last_dim() -> pl.Expr:
    """The last dimension of a tensor, null if its shape is unknown or has fewer than two."""
    return pl.col("shape").str.extract(r",\s*(\d+)\]$").cast(pl.Int64)


def find_batch(oom: MemoryFailure) -> MemoryHit | None:
    """How many micro-batches fit, from what grows with the batch and what does not."""
    room = USABLE * oom.capacity_bytes - oom.fixed_bytes
    if oom.phase == "optimizer" or oom.batch_bytes <= 0:
        return None
    share = min(room, oom.batch_bytes - oom.need_bytes) / oom.batch_bytes
    if share < _LEAST_SHARE:
        return None
    parts = max(2, math.ceil(1 / share))
    text = (
        f"activations and temporaries of a whole step need {say_size(oom.batch_bytes)} and everything else "
        f"{say_size(oom.fixed_bytes)}, of {say_size(USABLE * oom.capacity_bytes)} that is usable"
    )
    if room >= oom.batch_bytes:
        text += f"; that fits, but not in the free blocks, and {say_size(oom.need_bytes)} is lacking"
    else:
        text += f"; so {say_percent(share)} of the batch fits at a time"
    return MemoryHit(
        title=f"{count_noun(parts, 'micro-batch', 'micro-batches')} with accumulated gradients would fit",
        evidence=text,
        saving_bytes=oom.batch_bytes * (1 - 1 / parts),
        paste=f"for part in batch.chunk({parts}):\n    (compute_loss(part) / {parts}).backward()\noptimizer.step()",
    )


def find_wide_activations(oom: MemoryFailure) -> MemoryHit | None:
    kept = oom.alive.filter((pl.col("category") == "activations") & pl.col("dtype").is_not_null())
    wide = int(kept.filter(pl.col("dtype") == "float32")["bytes"].sum())
    total = int(kept["bytes"].sum())
    if not total or wide < _MOSTLY * total:
        return None
    copies = oom.categories["parameters"] / 2
    saved = wide / total * oom.activation_bytes / 2 - copies
    if saved <= 0:
        return None
    text = (
        f"{say_percent(wide / total)} of the activations are float32; in bf16 they take half, and autocast keeps "
        f"{say_size(copies)} of bf16 weights"
    )
    return MemoryHit(evidence=text, saving_bytes=saved)


def find_checkpointing(oom: MemoryFailure) -> MemoryHit | None:
    kept = oom.alive.filter(pl.col("category") == "activations")
    is_used = kept["name"].drop_nulls().str.starts_with("checkpoint.").any()
    layers = oom.num_layers
    if is_used or layers < 2 or oom.layers_reached < 1 or not oom.layer_bytes:
        return None
    inputs = _block_input_bytes(oom)
    each = f"each of the {layers} layers saves {say_size(oom.layer_bytes)}"
    if inputs is None:
        return MemoryHit(evidence=f"{each}; with checkpointing, each keeps its input only")
    saved = (layers - 1) * oom.layer_bytes - layers * inputs
    if saved <= 0:
        return None
    text = f"{each}; with checkpointing each keeps {say_size(inputs)}, its input, and one layer at a time is recomputed"
    return MemoryHit(evidence=text, saving_bytes=saved)


def _block_input_bytes(oom: MemoryFailure) -> float | None:
    """The median size of what a layer saves first, which is its input; None if that was not recorded."""
    saved = oom.profile.recording.saved.filter((pl.col("kind") == "activation") & pl.col("module").is_not_null())
    if not saved.height:
        return None
    inside = number_layers(saved, pl.DataFrame()).filter(pl.col("layer").is_not_null()).sort("node")
    firsts = inside.group_by("layer").agg(pl.col("storage_bytes").first())["storage_bytes"].median()
    return float(firsts) if isinstance(firsts, int | float) else None


def find_large_state(oom: MemoryFailure) -> MemoryHit | None:
    state, ranks = oom.state_bytes, oom.facts.world_size
    kept = oom.alive.filter((pl.col("category") == "optimizer state") & (pl.col("bytes") > _BYTES_FP32))
    is_wide = not kept.height or (kept["dtype"] == "float32").any()
    if state < _LEAST_STATE * oom.capacity_bytes or (ranks == 1 and not is_wide):
        return None
    title = f"The optimizer's state takes {say_size(state)}"
    if ranks > 1:
        return MemoryHit(
            title=title,
            evidence=f"sharded over {ranks} ranks, each keeps {say_size(state / ranks)}",
            saving_bytes=state * (1 - 1 / ranks),
            paste=(
                "optimizer = torch.distributed.optim.ZeroRedundancyOptimizer(\n"
                "    model.parameters(), torch.optim.AdamW, lr=lr\n)"
            ),
        )
    text = f"8-bit states take a quarter of it, {say_size(state * (1 - _QUANTIZED))}"
    return MemoryHit(title=title, evidence=text, saving_bytes=state * _QUANTIZED)


def find_others(oom: MemoryFailure) -> MemoryHit | None:
    outside, total = oom.outside_bytes, oom.facts.total_bytes
    if outside is None or total is None or outside < max(_OUTSIDE_BYTES, _LEAST_OUTSIDE * total):
        return None
    text = "the context and libraries of CUDA take about 0.5 GiB per process, NCCL more; the rest is other processes"
    return MemoryHit(title=f"{say_size(outside)} is used outside PyTorch's allocator", evidence=text)


def _look_at_processes(_profile: Profile) -> Copyable:
    return Copyable(label="about the memory of processes", text="stepscope doctor")


_SAVING = "Computed from what was held, and extrapolated to the whole step."
_BUILT_IN = "not applicable: `stepscope memory` finds the peak of the built-in model"
RULES = (
    Rule(
        code="SS101",
        title="Old graphs hold activations",
        action="Keep numbers instead of tensors with a graph, and evaluate under `torch.no_grad()`",
        check_memory=find_old_graphs,
        meaning="""A loss that is kept, in a list or in a sum, keeps its graph, and a graph that backward has not freed
            keeps all activations of its step. Memory then grows with every step.""",
        seen="Scalars with a `grad_fn` that is not part of the newest graph, and what their graphs still hold.",
        saving="The activations that only these graphs hold.",
        builtin=_BUILT_IN,
        own=("losses.append(loss.detach())  # or loss.item(), which waits for the GPU",),
    ),
    Rule(
        code="SS102",
        title="Fragmentation: memory is reserved but free",
        action="Use expandable segments",
        check_memory=find_fragmentation,
        meaning="""The allocator got the memory from CUDA in segments, and each still has a tensor in it. Free blocks in
            different segments cannot be joined. Expandable segments can return the free part of a segment.""",
        seen="Free blocks in the segments at the moment of the failure, compared with the request.",
        saving="The free blocks in whole pieces of 20 MiB, the unit in which expandable segments return memory.",
        builtin="PYTORCH_ALLOC_CONF=expandable_segments:True",
        own=(
            'os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # before the first CUDA call',
            "# before PyTorch 2.9, the variable is PYTORCH_CUDA_ALLOC_CONF",
        ),
    ),
    Rule(
        code="SS103",
        title="Gradients are held during the forward pass",
        action="Free gradients before the forward pass, unless they accumulate",
        check_memory=find_kept_gradients,
        meaning="""Gradients of the previous step are still allocated when activations are saved. If they are set to
            None after the optimizer step, the activations can use their memory.""",
        seen="Gradients that are alive when a request of the forward pass fails.",
        saving="The gradients.",
        builtin=_BUILT_IN,
        own=("optimizer.zero_grad(set_to_none=True)  # right after optimizer.step()",),
    ),
    Rule(
        code="SS104",
        title="The optimizer's update needs temporary copies",
        action="Use the fused optimizer",
        check_memory=find_update_temporaries,
        meaning="""The multi-tensor implementation, the default, computes intermediate results for all parameters at
            once. The fused one updates in place, in one kernel, and is faster too.""",
        seen="A request that fails inside a multi-tensor update.",
        saving="The temporaries at that moment, and the request.",
        builtin="--optimizer adamw-fused",
        own=("optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)",),
    ),
    Rule(
        code="SS105",
        title="Logits and their copies in the loss are large",
        action="Compute the loss in chunks, or with a fused linear cross-entropy",
        check_memory=find_logits,
        meaning="""Cross-entropy keeps the logits, their logarithmic softmax and, in backward, their gradient: several
            tensors of tokens × vocabulary. In chunks, only one part exists at a time; checkpointing each chunk keeps
            its logits from being saved.""",
        seen="Tensors whose last dimension is that of the softmax in the loss.",
        saving=f"Seven eighths of these tensors, for {_CHUNKS} chunks.",
        builtin=_BUILT_IN,
        own=(
            "# head_loss(hidden, targets) applies the output layer and cross-entropy to some of the tokens",
            "# Liger-Kernel's LigerFusedLinearCrossEntropyLoss does the same in one kernel",
        ),
        paste=(
            "parts = zip(hidden.chunk(8), targets.chunk(8))\n"
            "loss = sum(torch.utils.checkpoint.checkpoint(head_loss, h, t, use_reentrant=False) for h, t in parts) / 8"
        ),
    ),
    Rule(
        code="SS106",
        title="A smaller micro-batch would fit",
        action="Split each batch and accumulate the gradients",
        check_memory=find_batch,
        meaning="""Activations and temporaries grow with the batch; parameters, gradients and optimizer states do not.
            Several small passes with accumulated gradients give the same update, except for layers that use statistics
            of the batch, and cost more launches.""",
        seen="The memory that grows with the batch, extrapolated to all layers, and the rest.",
        saving=f"{_SAVING} {USABLE:.0%} of the memory counts as usable.",
        builtin="--grad-accumulation 4",
        own=("# for part in batch.chunk(4): (compute_loss(part) / 4).backward()",),
        paste="for part in batch.chunk(4):\n    (compute_loss(part) / 4).backward()\noptimizer.step()",
    ),
    Rule(
        code="SS107",
        title="Activations are float32",
        action="Run the forward pass under bf16 autocast",
        check_memory=find_wide_activations,
        meaning="""Activations in bf16 take half the memory, and GEMMs on tensor cores are faster. Normalization and the
            loss stay in float32.""",
        seen="The dtypes of the tensors that autograd has saved.",
        saving="""Half of the float32 activations, less bf16 copies of the weights. It is less if autocast keeps much in
            float32.""",
        builtin="--precision bf16",
        own=("# with torch.autocast(device_type='cuda', dtype=torch.bfloat16): around forward and loss",),
        paste='with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = compute_loss(batch)',
    ),
    Rule(
        code="SS108",
        title="Activation checkpointing would save memory",
        action="Checkpoint the layers",
        check_memory=find_checkpointing,
        meaning="""A checkpointed layer keeps its input and recomputes the rest in backward, which costs about a third
            more time.""",
        seen="The activations of each layer. Memory that a checkpoint already holds rules this out.",
        saving="The activations of all layers but one, less the inputs that are kept.",
        builtin="--checkpoint block",
        own=("x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)  # instead of block(x)",),
    ),
    Rule(
        code="SS109",
        title="The optimizer's state is large",
        action="Shard the optimizer over the ranks, or use 8-bit states",
        check_memory=find_large_state,
        meaning="""Adam keeps two float32 numbers per parameter. Ranks that hold the same state can divide it, and 8-bit
            states with block-wise scaling train about as well in practice. Check the loss curve.""",
        seen="The tensors in the optimizer's state, and those that its first step would have created.",
        saving="Three quarters with 8-bit states, (N − 1) / N on N ranks.",
        builtin="--shard-optimizer in stepscope train",
        own=("optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=lr)",),
    ),
    Rule(
        code="SS110",
        title="Memory is used outside PyTorch's allocator",
        action="Look for other processes with `nvidia-smi`",
        check_memory=find_others,
        meaning="""Part of the device belongs to other processes, the CUDA context, NCCL or libraries with their own
            allocators. A process of an earlier run that did not end is a common cause.""",
        seen="The device's memory, less what is free and what the allocator of this process has reserved.",
        saving="Not estimated.",
        builtin="stepscope doctor lists other processes",
        own=("# nvidia-smi lists processes and their memory",),
        look_up=_look_at_processes,
    ),
)

"""The rule about copies between CPU and GPU that nothing overlaps with. What they carry decides what to do: a batch,
weights, gradients for an optimizer on the CPU, or a checkpoint."""

from dataclasses import replace

import numpy as np
import polars as pl

from stepscope.cost import ADAM_BYTES
from stepscope.explain.ranks.collectives import CoveredTime, exposed_ns
from stepscope.explain.rules.dependent_waits import TO_DEVICE, TO_HOST, find_host_updates, large_copies
from stepscope.explain.rules.evidence import BANDWIDTH_SHARE, WORTH_SAYING, StepEvidence, ms
from stepscope.explain.rules.replay import Floats
from stepscope.explain.rules.rule import Hit, Rule, count_per_step, say_lines
from stepscope.explain.trace.loop.source_lines import launch_sources
from stepscope.units import say_message_bytes, say_percent

LEAST_EXPOSED = 0.02
_OFTEN = 4
_MOSTLY, _MOSTLY_OF_ONE_KIND = 0.5, 0.6
_GRADIENT_BYTES = 2  # per parameter, in 16 bits: the update on the GPU is rather estimated too long than too short


def find_exposed_copies(evidence: StepEvidence) -> Hit | None:
    crossing = pl.col("name").str.contains(f"{TO_DEVICE}|{TO_HOST}").fill_null(value=False)
    copies = evidence.kernels.filter(crossing)
    others = CoveredTime(evidence.kernels.filter(~crossing))
    alone = exposed_ns(copies, others)
    # Copies in both directions run at the same time: the time that they cover counts once.
    covered = CoveredTime(evidence.kernels).total_ns - others.total_ns
    alone *= covered / max(1.0, float(alone.sum()))
    exposed = covered / evidence.num_steps
    if exposed < LEAST_EXPOSED * evidence.step_ns:
        return None
    per_step = evidence.clock.say_per_step
    lines = say_lines(launch_sources(evidence.profile, copies), pl.Series(alone))
    text = f"{ms(exposed)} {per_step} does not overlap with other kernels{lines}; {_say_copies(evidence, copies)}"
    hit = Hit(title=f"Exposed copies between CPU and GPU: {ms(exposed)} {per_step}", evidence=text, about_ns=exposed)
    if find_host_updates(evidence).height:
        return _update_on_gpu(evidence, hit, copies, alone)
    if steps := _count_checkpoints(evidence, copies, alone):
        return _save_in_background(evidence, hit, steps)
    if _is_offloading(evidence):
        return _keep_on_gpu(evidence, hit, copies, alone)
    return _overlap(evidence, hit, copies, alone, free=others.total_ns - (int(copies["time_ns"].sum()) - alone.sum()))


def _shorten(evidence: StepEvidence, hit: Hit, copies: pl.DataFrame, shorter: Floats) -> Hit | None:
    """Return the hit with what shorter copies save, None if that is too little."""
    durations = evidence.durations
    durations[copies["row"].to_numpy()] -= shorter
    gain = evidence.gain_of(durations)
    if gain.step_ns < WORTH_SAYING * evidence.step_ns:
        return None
    return replace(hit, saving_ns=min(gain.step_ns, hit.about_ns or 0.0), gain=gain)


def _overlap(evidence: StepEvidence, hit: Hit, copies: pl.DataFrame, alone: Floats, *, free: float) -> Hit | None:
    """Copies on a separate stream overlap with at most the other work that is `free` of copies."""
    shorter = alone * min(1.0, max(0.0, free) / float(alone.sum()))
    if shorter.sum() < alone.sum():
        text = f"; only {ms(free / evidence.num_steps)} of kernels are left to overlap with: copy fewer bytes"
        hit = replace(hit, evidence=hit.evidence + text)
    is_input = _is_input(evidence, copies)
    if alone[is_input].sum() > _MOSTLY * alone.sum():
        is_pageable = bool(copies["name"].str.contains("Pageable").any())
        text = "; they carry the input, because the step begins with them"
        hit = replace(
            hit,
            evidence=hit.evidence + text,
            action="Copy the next batch on a separate stream, while the GPU works on this one",
            paste=_prefetch(is_pageable=is_pageable),
        )
    return _shorten(evidence, hit, copies, shorter)


def _is_input(evidence: StepEvidence, copies: pl.DataFrame) -> Floats:
    """Return which copies go to the GPU before anything else runs in their step. In a training loop that was recorded
    with its parts, a step may copy several batches: these are outside all of its parts, or in its input."""
    others = evidence.kernels.filter(~pl.col("row").is_in(copies["row"].implode()))
    first = others.group_by("step").agg(first_ns=pl.col("start_ns").min())
    placed = copies.join(first, on="step", how="left", maintain_order="left")
    begins = pl.col("start_ns") < pl.col("first_ns")
    if evidence.profile.recording.manifest.loop is not None:
        begins |= pl.col("phase").fill_null("input") == "input"
    to_device = pl.col("step").is_not_null() & pl.col("name").str.contains(TO_DEVICE)
    return placed.select((to_device & begins).fill_null(value=False)).to_series().to_numpy()


def _prefetch(*, is_pageable: bool) -> str:
    pinned = ".pin_memory()" if is_pageable else ""
    return (
        "with torch.cuda.stream(copying):  # copying = torch.cuda.Stream(), once; after this step is launched\n"
        f'    next_x = next(batches){pinned}.to("cuda", non_blocking=True)\n'
        "torch.cuda.current_stream().wait_stream(copying)  # before the next step\n"
        "next_x.record_stream(torch.cuda.current_stream())"
    )


def _keep_on_gpu(evidence: StepEvidence, hit: Hit, copies: pl.DataFrame, alone: Floats) -> Hit | None:
    share = say_percent((hit.about_ns or 0.0) / evidence.step_ns)
    text = "; they alternate with kernels, as they do if weights or optimizer state stay in CPU memory"
    hit = replace(
        hit,
        title=f"Copies between CPU and GPU take {share} {evidence.clock.say_of_step}",
        evidence=hit.evidence + text,
        action=_KEEP_WEIGHTS,
        paste="model.to('cuda')  # once, instead of layer by layer in every step",
    )
    return _shorten(evidence, hit, copies, alone)


def _update_on_gpu(evidence: StepEvidence, hit: Hit, copies: pl.DataFrame, alone: Floats) -> Hit | None:
    """Without copies, and without the CPU's update: the GPU updates the weights instead, at its bandwidth."""
    updates = find_host_updates(evidence)
    change = evidence.replay.unchanged()
    change.time_ns[copies["row"].to_numpy()] -= alone
    change.skipped_waits = set(updates["wait"].to_list())
    change.host_share[updates["row"].to_numpy()] = 0.0
    gain = evidence.gain(change)
    parameters = int(large_copies(evidence, TO_HOST)["moved_bytes"].sum()) / evidence.num_steps / _GRADIENT_BYTES
    bandwidth = evidence.hardware.bandwidth if evidence.hardware else None
    update_ns = parameters * ADAM_BYTES / (bandwidth * BANDWIDTH_SHARE) * 1e9 if bandwidth else 0.0
    cpu_ns = float((updates["end_ns"] - updates["start_ns"]).sum()) / evidence.num_steps
    per_step = evidence.clock.say_per_step
    text = (
        f"the CPU updates the weights for {ms(cpu_ns)} {per_step}, after it waited for the gradients; meanwhile the "
        f"GPU is idle. The copies: {hit.evidence}"
    )
    saving = max(0.0, gain.step_ns - update_ns)
    return replace(
        hit,
        title=f"Optimizer on the CPU: {ms((hit.about_ns or 0.0) + cpu_ns)} {per_step} in copies and the update",
        evidence=text,
        saving_ns=saving,
        gain=gain,
        action="Keep the optimizer state on the GPU, sharded over ranks if it does not fit",
        paste=_DEEPSPEED_ON_GPU if _uses_deepspeed(evidence) else _OPTIMIZER_ON_GPU,
    )


def _uses_deepspeed(evidence: StepEvidence) -> bool:
    return bool(evidence.profile.recording.ranges["name"].str.contains(r"^Optimizer\.step#DeepSpeed").any())


def _count_checkpoints(evidence: StepEvidence, copies: pl.DataFrame, alone: Floats) -> int:
    """Return in how many steps large copies to the CPU take most of the exposed time; 0 if in most of them."""
    saved = large_copies(evidence, TO_HOST)
    time = alone[copies["row"].is_in(saved["row"].implode()).to_numpy()].sum()
    steps = saved["step"].drop_nulls().n_unique()
    rare = steps < _MOSTLY * evidence.num_marked
    return steps if evidence.has_backward and rare and time > _MOSTLY * alone.sum() else 0


def _save_in_background(evidence: StepEvidence, hit: Hit, steps: int) -> Hit:
    each = (hit.about_ns or 0.0) * evidence.num_steps / steps
    return replace(
        hit,
        title=f"Copies to the CPU take {ms(each)} in {steps} of {evidence.num_marked} steps",
        evidence=f"{hit.evidence}; few steps do this, as if they save a checkpoint",
        action="Save checkpoints in the background",
        paste="saved = torch.distributed.checkpoint.async_save(state, checkpoint_id=path)  # a thread writes the files",
    )


def _say_copies(evidence: StepEvidence, copies: pl.DataFrame) -> str:
    """How many bytes, how fast, and from which kind of memory."""
    known = copies.filter(pl.col("moved_bytes").is_not_null())
    moved, time = int(known["moved_bytes"].sum()), int(known["time_ns"].sum())
    text = count_per_step(evidence, copies.height, "copy", "copies")
    if time:
        carried = say_message_bytes(int(float(f"{moved / evidence.num_steps:.3g}")))
        text += f", {carried} at {moved / time:.3g} GB/s (PCIe 4.0 ×16 reaches about 26, PCIe 5.0 ×16 about 53)"
    for word in ("Pageable", "Pinned"):
        share = float(copies.filter(pl.col("name").str.contains(word))["time_ns"].sum()) / int(copies["time_ns"].sum())
        if share > _MOSTLY_OF_ONE_KIND:
            text += f", with {word.lower()} CPU memory"
    return text


def _is_offloading(evidence: StepEvidence) -> bool:
    """Whether large copies to the GPU alternate with the kernels of layers, and would fit in its memory."""
    large = large_copies(evidence, TO_DEVICE)
    layers = evidence.kernels.filter(pl.col("class").is_in(["GEMM", "attention", "convolution"]))
    groups = np.unique(np.searchsorted(layers["row"].to_numpy(), large["row"].to_numpy()))
    memory = evidence.hardware.memory_bytes if evidence.hardware else None
    fits = memory is None or int(large["moved_bytes"].sum()) / evidence.num_steps < memory
    return len(groups) >= _OFTEN * evidence.num_steps and fits


_KEEP_WEIGHTS = (
    "Keep the weights on the GPU; if they do not fit, copy fewer bytes, or one layer ahead on a separate stream"
)
_DEEPSPEED_ON_GPU = 'config["zero_optimization"]["offload_optimizer"] = {"device": "none"}  # if the state fits'
_OPTIMIZER_ON_GPU = (
    "optimizer = Optimizer(model.parameters(), lr=lr)  # the class that you use, with parameters and state on the GPU"
)

RULES = (
    Rule(
        code="SS020",
        title="Exposed copies between CPU and GPU",
        action="Copy on a separate stream, one layer ahead",
        check=find_exposed_copies,
        meaning="""A batch, weights, gradients or optimizer state are copied over the bus while the GPU has nothing else
            to do.""",
        seen="""Time in which only copies to or from the CPU run on the device, at least 2% of the step. Copies at the
            start of a step carry its input. Large ones that alternate with the kernels of layers carry weights. If
            large copies to the CPU, a wait and large copies back follow each other, the optimizer runs on the CPU.
            Large copies to the CPU in few steps are taken for checkpoints.""",
        saving="""For weights, the step is replayed without the copies, as if they stayed on the GPU, provided that they
            fit. For an optimizer on the CPU, it is replayed without the copies, the wait and the CPU's update, and with
            an update on the GPU of 28 bytes per parameter at 89% of the bandwidth; this was not checked. For
            checkpoints the saving is not estimated. Otherwise copies are shortened by what could overlap on a separate
            stream, which is at most the other GPU work that does not overlap with copies yet. Saving more than that
            requires copying fewer bytes.""",
        builtin="not needed: its weights and batch stay on the GPU",
        own=(
            'with torch.cuda.stream(copying): next_x = next(batches).to("cuda", non_blocking=True)  # the next batch',
            "with torch.cuda.stream(copying): layer.weight.copy_(pinned, non_blocking=True)  # one layer ahead",
            "model.to('cuda')  # keep what every step needs on the GPU; offload less, or in 16 bits",
        ),
        paste=(
            "with torch.cuda.stream(copying):  # copying = torch.cuda.Stream(): one layer ahead\n"
            "    weight.copy_(pinned_weight, non_blocking=True)\n"
            "torch.cuda.current_stream().wait_stream(copying)  # before the layer runs"
        ),
    ),
)

"""Rules about the whole step: copies, recomputation, and the measurement itself."""

import shlex

import numpy as np
import polars as pl

from stepscope.explain.ranks.collectives import CoveredTime, exposed_ns
from stepscope.explain.rules.evidence import WORTH_SAYING, StepEvidence, ms
from stepscope.explain.rules.remarks import NOT_FINITE
from stepscope.explain.rules.replay import Floats
from stepscope.explain.rules.rule import Hit, Rule, count_per_step, settle, workload_of
from stepscope.explain.trace.profile import Profile, device_word, kernel_word
from stepscope.explain.trace.summary import kernel_times
from stepscope.findings import Copyable
from stepscope.recording.rows.bench import STEP_DOUBTS
from stepscope.recording.store import Manifest
from stepscope.units import say_message_bytes, say_percent

LEAST_EXPOSED = 0.02
# PyTorch's checkpoint passes each saved tensor through a Python function, in forward and in backward. This is the share
# of CPU time that is left without it, for launches that are not repeated. Three steps that were recorded with it and
# without (small, medium, and a Llama of `transformers`, on an H200) say 0.6, and the forward pass of medium says 0.7.
UNHOOKED_HOST_SHARE = 0.65
_WITHOUT_HOOKS = "CheckpointFunction"  # the variant with use_reentrant=True
FEW_KERNELS, MOST_OF_TIME = 3, 0.6
_LARGE_COPY, _OFTEN = 1 << 20, 4
_KEEP_ON_GPU = (
    "Keep the weights on the GPU; if they do not fit, copy fewer bytes, or one layer ahead on a separate stream",
    "model.to('cuda')  # once, instead of layer by layer in every step",
)
_LONGEST_NAME = 1000  # characters that still make sense in a command


def find_exposed_copies(evidence: StepEvidence) -> Hit | None:
    crossing = pl.col("name").str.contains(r"(?i)HtoD|DtoH|host to device|device to host").fill_null(value=False)
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
    text = f"{ms(exposed)} {per_step} does not overlap with other kernels; {_say_copies(evidence, copies)}"
    if _is_offloading(evidence, copies):
        shorter = alone
        title = (
            f"Copies between CPU and GPU take {say_percent(exposed / evidence.step_ns)} {evidence.clock.say_of_step}"
        )
        text += "; they alternate with kernels, as they do if weights or optimizer state stay in CPU memory"
        action, paste = _KEEP_ON_GPU
    else:
        free = others.total_ns - (int(copies["time_ns"].sum()) - float(alone.sum()))
        shorter = alone * min(1.0, max(0.0, free) / float(alone.sum()))
        title, action, paste = (
            f"Exposed copies between CPU and GPU: {ms(exposed)} {per_step}",
            None,
            None,
        )
        if shorter.sum() < alone.sum():
            text += f"; only {ms(free / evidence.num_steps)} of kernels are left to overlap with: copy fewer bytes"
    durations = evidence.durations
    durations[copies["row"].to_numpy()] -= shorter
    gain = evidence.gain_of(durations)
    if gain.step_ns < WORTH_SAYING * evidence.step_ns:
        return None
    return Hit(
        title=title,
        evidence=text,
        saving_ns=min(gain.step_ns, exposed),
        gain=gain,
        about_ns=exposed,
        action=action,
        paste=paste,
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
        if share > MOST_OF_TIME:
            text += f", with {word.lower()} CPU memory"
    return text


def _is_offloading(evidence: StepEvidence, copies: pl.DataFrame) -> bool:
    """Whether large copies to the GPU alternate with the kernels of layers, and would fit in its memory."""
    large = copies.filter((pl.col("moved_bytes") >= _LARGE_COPY) & pl.col("name").str.contains(r"(?i)HtoD|host to dev"))
    layers = evidence.kernels.filter(pl.col("class").is_in(["GEMM", "attention", "convolution"]))
    groups = np.unique(np.searchsorted(layers["row"].to_numpy(), large["row"].to_numpy()))
    memory = evidence.hardware.memory_bytes if evidence.hardware else None
    fits = memory is None or int(large["moved_bytes"].sum()) / evidence.num_steps < memory
    return len(groups) >= _OFTEN * evidence.num_steps and fits


def find_recomputation(evidence: StepEvidence) -> Hit | None:
    again = evidence.kernels.filter("recomputed")
    if not again.height:
        return None
    gain = evidence.gain_of(evidence.durations, evidence.mark(again), host_share=_unhooked(evidence, again))
    count = count_per_step(evidence, again.height, kernel_word(evidence.profile))
    time = f"{ms(evidence.per_step(again))} of {device_word(evidence.profile)} time"
    text = f"recomputing activations in backward takes {time}"
    return settle(evidence, gain, text, title=f"Activation checkpointing repeats {count}")


def _unhooked(evidence: StepEvidence, again: pl.DataFrame) -> Floats:
    """Return the share of CPU time that stays in the modules that are called a second time."""
    if evidence.profile.ops["name"].str.contains(_WITHOUT_HOOKS).any():
        return np.ones(evidence.kernels.height)
    inside = evidence.kernels["module"].is_in(again["module"].drop_nulls().unique().to_list())
    hooked = inside.fill_null(value=False).to_numpy() & evidence.replay.is_launching
    return np.where(hooked, UNHOOKED_HOST_SHARE, 1.0)


def find_dominant_kernels(evidence: StepEvidence) -> Hit | None:
    """The first rows of the table of kernels, which is by full name and over all devices."""
    kernels = kernel_times(evidence.profile)
    top = kernels[:FEW_KERNELS]
    share = sum(one.share for one in top)
    if len(kernels) <= FEW_KERNELS or share < MOST_OF_TIME:
        return None
    named = ", ".join(f"{one.short} ({say_percent(one.share)})" for one in top)
    words, device = kernel_word(evidence.profile), device_word(evidence.profile)
    return Hit(title=f"{FEW_KERNELS} {words}s take {say_percent(share)} of the {device} time", evidence=named)


def report_doubts(evidence: StepEvidence) -> Hit | None:
    told = (*STEP_DOUBTS, *NOT_FINITE)  # a CPU-bound step is not a problem of the measurement; see also SS021 and SS024
    doubts = [doubt for doubt in evidence.profile.recording.manifest.doubts if doubt.code not in told]
    return Hit(evidence="; ".join(doubt.text for doubt in doubts)) if doubts else None


def _keep_activations(manifest: Manifest) -> dict[str, object]:
    return {} if workload_of(manifest).checkpoint == "none" else {"checkpoint": "none"}


def _look_up_longest(profile: Profile) -> Copyable:
    longest = profile.time_by("name").row(0, named=True)["name"]
    if profile.on_cpu or not longest.isprintable() or len(longest) > _LONGEST_NAME:
        return Copyable(label="about this finding", text="stepscope rule SS014")
    return Copyable(label="about the longest kernel", text=shlex.join(["stepscope", "kernel", longest]))


def _look_up_machine(_profile: Profile) -> Copyable:
    return Copyable(label="check the machine", text="stepscope doctor")


RULES = (
    Rule(
        code="SS013",
        title="Activation checkpointing repeats the forward pass",
        action="Checkpoint fewer blocks",
        check=find_recomputation,
        meaning="""Activation checkpointing drops activations and recomputes them in the backward pass: about a third
            more work, in exchange for memory.""",
        seen="Modules that are called inside the backward pass.",
        saving="""The time of these kernels, replayed, and a third of the CPU time of the other launches in their
            modules, because PyTorch passes each saved tensor through Python (not with use_reentrant=True). On an
            H200, 43 to 46% of the step was estimated for three models, and 48 to 56% measured. The recording does not
            show whether there is enough memory.""",
        builtin="--checkpoint none",
        own=(
            "# checkpoint fewer blocks: every second one, or only those with the largest activations",
            "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=selective)  # keep GEMMs",
        ),
        paste=(
            "for number, block in enumerate(blocks):  # recompute every second block only\n"
            "    x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if number % 2 else block(x)"
        ),
        change=_keep_activations,
        on_cpu=True,
    ),
    Rule(
        code="SS014",
        title="A few kernels take most of the GPU time",
        action="Start with these",
        check=find_dominant_kernels,
        meaning="This is not a problem, but it shows where to look first.",
        seen="Three kernels that take at least 60% of the GPU time.",
        saving="Not estimated.",
        builtin="stepscope kernel NAME explains a kernel",
        own=(
            "# stepscope kernel NAME explains a kernel",
            "# with 60% in three kernels, making all the others 2× faster saves 20%",
        ),
        look_up=_look_up_longest,
        on_cpu=True,
    ),
    Rule(
        code="SS016",
        title="Unreliable measurement",
        action="Run `stepscope doctor`, then record again",
        check=report_doubts,
        meaning="""The machine was not in a good state for measuring: it was throttled, shared or cold, or step times
            varied widely.""",
        seen="""The problems that stepscope noticed while recording, except for those about numbers: see SS021 and
            SS024.""",
        saving="Not estimated. The warning says how far off the numbers may be.",
        builtin="run stepscope doctor, then record again",
        own=("# nvidia-smi -q -d PERFORMANCE shows why clocks are throttled",),
        look_up=_look_up_machine,
        on_cpu=True,
    ),
    Rule(
        code="SS020",
        title="Exposed copies between CPU and GPU",
        action="Copy on a separate stream, one layer ahead",
        check=find_exposed_copies,
        meaning="Weights, activations or optimizer state are copied over the bus while the GPU has nothing else to do.",
        seen="Time in which only copies to or from the CPU run on the device, at least 2% of the step.",
        saving="""Copies that alternate with the kernels of layers carry weights or optimizer state: the step is
            replayed without them, as if these stayed on the GPU, provided that they fit. Otherwise copies are shortened
            by what could overlap on a separate stream, which is at most the other GPU work that does not overlap with
            copies yet. Saving more than that requires copying fewer bytes.""",
        builtin="not needed: its weights and batch stay on the GPU",
        own=(
            "with torch.cuda.stream(copies): layer.weight.copy_(pinned, non_blocking=True)  # one layer ahead",
            "model.to('cuda')  # keep what every step needs on the GPU; offload less, or in 16 bits",
        ),
        paste=(
            "with torch.cuda.stream(copying):  # copying = torch.cuda.Stream(): one layer ahead\n"
            "    weight.copy_(pinned_weight, non_blocking=True)\n"
            "torch.cuda.current_stream().wait_stream(copying)  # before the layer runs"
        ),
    ),
)

"""Rules about the whole step: communication, recomputation, and the measurement itself."""

import shlex

import numpy as np
import polars as pl

from stepscope.explain.rules.evidence import StepEvidence, ms
from stepscope.explain.rules.replay import Floats
from stepscope.explain.rules.rule import Hit, Rule, count_per_step, settle, workload_of
from stepscope.explain.trace.accounting import account
from stepscope.explain.trace.profile import Profile, device_word, kernel_word
from stepscope.findings import Copyable
from stepscope.recording.store import Manifest
from stepscope.units import say_percent

LEAST_EXPOSED = 0.02
# PyTorch's checkpoint passes each saved tensor through a Python function, in forward and in backward. This is the share
# of CPU time that is left without it, for launches that are not repeated: forward took 54.1 ms with it and 38.1 ms
# without (medium model, H200), a share of 0.7. The machine varied by 15%: this is the cautious end.
UNHOOKED_HOST_SHARE = 0.8
_WITHOUT_HOOKS = "CheckpointFunction"  # the variant with use_reentrant=True
FEW_KERNELS, MOST_OF_TIME = 3, 0.6
_LONGEST_NAME = 1000  # characters that still make sense in a command


def find_exposed_communication(evidence: StepEvidence) -> Hit | None:
    return _find_exposed(evidence, evidence.kernels, "communication", "backward")


def find_exposed_copies(evidence: StepEvidence) -> Hit | None:
    crossing = pl.col("name").str.contains(r"(?i)HtoD|DtoH|host to device|device to host").fill_null(value=False)
    marked = evidence.kernels.with_columns(
        pl.when(crossing).then(pl.lit("communication")).otherwise(pl.lit("other")).alias("class")
    )
    return _find_exposed(evidence, marked, "copies between CPU and GPU", None)


def _find_exposed(evidence: StepEvidence, kernels: pl.DataFrame, what: str, phase: str | None) -> Hit | None:
    """Find kernels of the class `communication` that nothing else on the device overlaps with."""
    whole = account(kernels, evidence.clock.window)
    exposed, hidden = (
        time / evidence.num_steps for time in (whole.communication_exposed_ns, whole.communication_hidden_ns)
    )
    if exposed < LEAST_EXPOSED * evidence.step_ns:
        return None
    computing = kernels.filter(pl.col("class") != "communication")
    in_phase = computing.filter(pl.col("phase") == phase) if phase else computing.head(0)
    room = max(0.0, evidence.per_step(in_phase if in_phase.height else computing) - hidden)
    text = f"{ms(exposed)} per step does not overlap with other kernels, {ms(hidden)} does"
    if room >= exposed:
        text += f"; {ms(room)} of other kernels are available to overlap with"
    else:
        text += (
            f"; only {ms(room)} of other kernels are left to overlap with, so fewer bytes or a faster link would help "
            "more"
        )
    return Hit(title=f"Exposed {what}: {ms(exposed)} per step", evidence=text, saving_ns=min(exposed, room))


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
    total = float(evidence.kernels["time_ns"].sum())
    by_name = evidence.kernels.group_by("short").agg(pl.col("time_ns").sum()).sort("time_ns", "short", descending=True)
    top = by_name.head(FEW_KERNELS)
    if not total or by_name.height <= FEW_KERNELS or top["time_ns"].sum() < MOST_OF_TIME * total:
        return None
    named = ", ".join(f"{short} ({say_percent(time / total)})" for short, time in top.iter_rows())
    share = say_percent(float(top["time_ns"].sum()) / total)
    kernels, device = kernel_word(evidence.profile), device_word(evidence.profile)
    return Hit(title=f"{FEW_KERNELS} {kernels}s take {share} of the {device} time", evidence=named)


def report_doubts(evidence: StepEvidence) -> Hit | None:
    doubts = evidence.profile.recording.manifest.doubts
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
        code="SS011",
        title="Exposed communication",
        action="Use larger gradient buckets, and reduce gradients only in the last micro-batch",
        check=find_exposed_communication,
        meaning="""Collectives run while the device has nothing else to do. A rank that waits for a slower one counts as
            communication as well.""",
        seen="Time in which only communication runs on the device, at least 2% of the step.",
        saving="""The exposed time, but at most that of the backward kernels that do not overlap with communication
            yet. How much of it can overlap depends on the order of the gradients.""",
        builtin="not needed: it runs in one process",
        own=(
            "model = DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)",
            "with model.no_sync(): loss.backward()  # in all but the last micro-batch",
        ),
        paste=(
            "model = torch.nn.parallel.DistributedDataParallel("
            "model, bucket_cap_mb=100, gradient_as_bucket_view=True)\n"
            "with model.no_sync():  # in all but the last micro-batch\n"
            "    loss.backward()"
        ),
    ),
    Rule(
        code="SS013",
        title="Activation checkpointing repeats the forward pass",
        action="Checkpoint fewer blocks",
        check=find_recomputation,
        meaning="""Activation checkpointing drops activations and recomputes them in the backward pass: about a third
            more work, in exchange for memory.""",
        seen="Modules that are called inside the backward pass.",
        saving="""The time of these kernels, replayed, and a fifth of the CPU time of the other launches in their
            modules, because PyTorch passes each saved tensor through Python (not with use_reentrant=True). In one check
            of a CPU-bound step the estimate was 76 ms and the measured saving 88 of 192 ms (71 in the fastest steps).
            The recording does not show whether there is enough memory.""",
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
        seen="Three kernels, by short name, that take at least 60% of the GPU time.",
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
        seen="The problems that stepscope noticed while recording.",
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
        saving="""The exposed time, but at most that of the other GPU work that does not overlap with copies yet: on a
            separate stream, copies can overlap with it. Saving more than that requires copying fewer bytes.""",
        builtin="not needed: its weights and batch stay on the GPU",
        own=(
            "with torch.cuda.stream(copies): layer.weight.copy_(pinned, non_blocking=True)  # one layer ahead",
            "# keep what every step needs on the GPU; offload less, or in 16 bits",
        ),
        paste=(
            "with torch.cuda.stream(copying):  # copying = torch.cuda.Stream(): one layer ahead\n"
            "    weight.copy_(pinned_weight, non_blocking=True)\n"
            "torch.cuda.current_stream().wait_stream(copying)  # before the layer runs"
        ),
    ),
)

"""Rules about the step as a whole: communication, recomputation, and the measurement itself."""

import shlex

import numpy as np
import polars as pl

from stepscope.explain.rules.evidence import StepEvidence, ms
from stepscope.explain.rules.replay import Floats
from stepscope.explain.rules.rule import Hit, Rule, settle, workload_of
from stepscope.explain.trace.accounting import account
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Copyable
from stepscope.recording.store import Manifest

LEAST_EXPOSED = 0.02
# PyTorch's checkpoint passes each saved tensor through a Python function, in forward and in backward. Of the host's
# time for the launches that are not repeated, what is left without: forward took 54.1 ms with it and 38.1 without
# (medium model, H200), a share of 0.7. The machine varied by 15 %: this is the cautious end.
UNHOOKED_HOST_SHARE = 0.8
_WITHOUT_HOOKS = "CheckpointFunction"  # the variant with use_reentrant=True
FEW_KERNELS, MOST_OF_TIME = 3, 0.6
_LONGEST_NAME = 1000  # a longer one is no name to type


def find_exposed_communication(evidence: StepEvidence) -> Hit | None:
    return _find_exposed(evidence, evidence.kernels, "communication runs", "backward")


def find_exposed_copies(evidence: StepEvidence) -> Hit | None:
    crossing = pl.col("name").str.contains(r"(?i)HtoD|DtoH|host to device|device to host").fill_null(value=False)
    marked = evidence.kernels.with_columns(
        pl.when(crossing).then(pl.lit("communication")).otherwise(pl.lit("other")).alias("class")
    )
    return _find_exposed(evidence, marked, "copies between host and GPU run", None)


def _find_exposed(evidence: StepEvidence, kernels: pl.DataFrame, what: str, phase: str | None) -> Hit | None:
    """What is of the class `communication` and runs alone on the device."""
    whole = account(kernels, evidence.clock.window)
    exposed, hidden = (
        time / evidence.num_steps for time in (whole.communication_exposed_ns, whole.communication_hidden_ns)
    )
    if exposed < LEAST_EXPOSED * evidence.step_ns:
        return None
    computing = kernels.filter(pl.col("class") != "communication")
    in_phase = computing.filter(pl.col("phase") == phase) if phase else computing.head(0)
    room = max(0.0, evidence.per_step(in_phase if in_phase.height else computing) - hidden)
    text = f"{what} alone for {ms(exposed)} a step and beside other kernels for {ms(hidden)}"
    if room >= exposed:
        text += f"; {ms(room)} of other kernels could hide it"
    else:
        text += f"; only {ms(room)} of kernels are left to hide it: fewer bytes or a faster link would help more"
    return Hit(evidence=text, saving_ns=min(exposed, room))


def find_recomputation(evidence: StepEvidence) -> Hit | None:
    again = evidence.kernels.filter("recomputed")
    if not again.height:
        return None
    gain = evidence.gain_of(evidence.durations, evidence.mark(again), host_share=_unhooked(evidence, again))
    text = (
        f"{again.height / evidence.num_steps:,.0f} kernels a step compute activations a second time, "
        f"{ms(evidence.per_step(again))}"
    )
    return settle(evidence, gain, text)


def _unhooked(evidence: StepEvidence, again: pl.DataFrame) -> Floats:
    """The share of the host's time that stays in the modules which are called a second time."""
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
    named = ", ".join(f"{short} ({time / total:.0%})" for short, time in top.iter_rows())
    return Hit(evidence=f"{named}: together {float(top['time_ns'].sum()) / total:.0%} of the GPU time")


def report_doubts(evidence: StepEvidence) -> Hit | None:
    doubts = evidence.profile.recording.manifest.doubts
    return Hit(evidence="; ".join(doubt.text for doubt in doubts)) if doubts else None


def _keep_activations(manifest: Manifest) -> dict[str, object]:
    return {} if workload_of(manifest).checkpoint == "none" else {"checkpoint": "none"}


def _look_up_longest(profile: Profile) -> Copyable:
    longest = profile.time_by("name").row(0, named=True)["name"]
    if not longest.isprintable() or len(longest) > _LONGEST_NAME:
        return Copyable(label="what this means", text="stepscope rule SS014")
    return Copyable(label="what the longest kernel is", text=shlex.join(["stepscope", "kernel", longest]))


def _look_up_machine(_profile: Profile) -> Copyable:
    return Copyable(label="what disturbs the machine", text="stepscope doctor")


RULES = (
    Rule(
        code="SS011",
        title="communication that nothing hides",
        check=find_exposed_communication,
        meaning="""Collectives run while the device has nothing else to do. A rank that waits for a slower one is seen
            as communication as well.""",
        seen="Time in which communication runs alone on the device, at least 2 % of the step.",
        saving="""As much of it as there is computing in the backward pass that does not hide communication yet. How
            much of that can be had depends on the order of the gradients.""",
        builtin="one process; nothing to hide",
        own=(
            "model = DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)",
            "with model.no_sync(): loss.backward()  # all but the last micro-batch",
        ),
        paste=(
            "model = torch.nn.parallel.DistributedDataParallel("
            "model, bucket_cap_mb=100, gradient_as_bucket_view=True)\n"
            "with model.no_sync():  # all but the last micro-batch\n"
            "    loss.backward()"
        ),
    ),
    Rule(
        code="SS013",
        title="activations computed a second time",
        check=find_recomputation,
        meaning="""Activation checkpointing throws activations away and computes them again in the backward pass: about
            a third more work, for memory.""",
        seen="Modules that are called inside of the backward pass.",
        saving="""The time of these kernels, replayed, and a fifth of the host's time for the other launches of their
            modules: PyTorch passes each saved tensor through Python (not with use_reentrant=True). 76 ms were estimated
            where 88 of 192 came, 71 by the fastest steps; the host was the limit. Whether the memory suffices the
            recording does not know.""",
        builtin="--checkpoint none",
        own=(
            "# checkpoint fewer blocks: every second one, or only those with the largest activations",
            "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=selective)  # keep products",
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
        title="a few kernels take most of the time",
        check=find_dominant_kernels,
        meaning="Not a fault: where to look first.",
        seen="Three kernels, by their short names, with at least 60 % of the GPU time.",
        saving="None is estimated.",
        builtin="stepscope kernel NAME says what a kernel is",
        own=(
            "# stepscope kernel NAME says what a kernel is",
            "# with 60 % in three kernels, making all the others twice as fast gains 20 %",
        ),
        look_up=_look_up_longest,
        on_cpu=True,
    ),
    Rule(
        code="SS016",
        title="a measurement to doubt",
        check=report_doubts,
        meaning="The machine was not in a state to measure in: throttled, shared, cold, or with a wide spread.",
        seen="The doubts that stepscope noted while it recorded.",
        saving="None: the figures may be off by as much as the doubt says.",
        builtin="stepscope doctor, then record again",
        own=("# nvidia-smi -q -d PERFORMANCE names what holds the clocks back",),
        look_up=_look_up_machine,
        on_cpu=True,
    ),
    Rule(
        code="SS020",
        title="copies between host and GPU that nothing hides",
        check=find_exposed_copies,
        meaning="Weights, activations or optimizer state cross the bus while the GPU has nothing else to do.",
        seen="Time in which copies to or from the host run alone on the device, at least 2 % of the step.",
        saving="""As much of it as there is other work on the GPU that hides no copies yet; on a stream of their own
            they can overlap with it. Anything beyond that takes fewer bytes.""",
        builtin="its weights and batch stay on the device",
        own=(
            "with torch.cuda.stream(copies): layer.weight.copy_(pinned, non_blocking=True)  # one layer ahead",
            "# keep on the GPU what is needed in each step; offload less, or in 16 bits",
        ),
        paste=(
            "with torch.cuda.stream(copying):  # copying = torch.cuda.Stream(): one layer ahead\n"
            "    weight.copy_(pinned_weight, non_blocking=True)\n"
            "torch.cuda.current_stream().wait_stream(copying)  # before the layer runs"
        ),
    ),
)

"""Rules about the whole step: recomputation, where the time goes, and the measurement itself."""

import shlex

import numpy as np
import polars as pl

from stepscope.explain.rules.evidence import StepEvidence, ms
from stepscope.explain.rules.remarks import NOT_FINITE
from stepscope.explain.rules.replay import Floats
from stepscope.explain.rules.rule import Hit, Rule, count_per_step, settle, workload_of
from stepscope.explain.trace.loop.source_lines import main_sources
from stepscope.explain.trace.profile import Profile, device_word, kernel_word
from stepscope.explain.trace.summary import kernel_times
from stepscope.findings import Copyable
from stepscope.recording.rows.bench import STEP_DOUBTS
from stepscope.recording.store import Manifest
from stepscope.units import say_list, say_percent

# PyTorch's checkpoint passes each saved tensor through a Python function, in forward and in backward. This is the share
# of CPU time that is left without it, for launches that are not repeated. Three steps that were recorded with it and
# without (small, medium, and a Llama of `transformers`, on an H200) say 0.6, and the forward pass of medium says 0.7.
UNHOOKED_HOST_SHARE = 0.65
_WITHOUT_HOOKS = "CheckpointFunction"  # the variant with use_reentrant=True
FEW_KERNELS, MOST_OF_TIME = 3, 0.6
_LONGEST_NAME = 1000  # characters that still make sense in a command


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
    lines = main_sources(evidence.profile)
    known = list(dict.fromkeys(lines[one.name] for one in top if one.name in lines))
    named += f"; mostly launched at {say_list(known)}" if known else ""
    words, device = kernel_word(evidence.profile), device_word(evidence.profile)
    return Hit(title=f"{FEW_KERNELS} {words}s take {say_percent(share)} of the {device} time", evidence=named)


def report_doubts(evidence: StepEvidence) -> Hit | None:
    told = (*STEP_DOUBTS, *NOT_FINITE)  # a CPU-bound step is not a problem of the measurement; see also SS021 and SS024
    doubts = [doubt for doubt in evidence.profile.recording.manifest.doubts if doubt.code not in told]
    return Hit(evidence="; ".join(doubt.text for doubt in doubts)) if doubts else None


def _keep_activations(manifest: Manifest) -> dict[str, object]:
    return {} if workload_of(manifest).checkpoint == "none" else {"checkpoint": "none"}


def _look_up_longest(profile: Profile) -> Copyable | None:
    """The command about the longest kernel. An operator of a CPU has no name to explain."""
    longest = profile.time_by("name").row(0, named=True)["name"]
    if profile.on_cpu or not longest.isprintable() or len(longest) > _LONGEST_NAME:
        return None
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
)

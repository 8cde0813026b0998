"""Rules about the loop around the model: gradients that are filled with zeros, checkpoints and skipped updates."""

import polars as pl

from stepscope.explain.rules.evidence import WORTH_SAYING, StepEvidence, ms
from stepscope.explain.rules.rule import Hit, Rule, count_per_step, say_launching_lines, settle
from stepscope.explain.trace.profile import Profile, device_word, kernel_word
from stepscope.findings import Copyable
from stepscope.recording.nesting import innermost
from stepscope.units import count_noun, say_percent

_ZERO_GRAD = r"^Optimizer\.zero_grad#"
_FILLS = r"::_foreach_zero_$|::zero_$|::fill_$"
_CHECKPOINT = "phase:checkpoint"
_MANY_SKIPPED = 0.1  # of the steps; a scaler that looks for its scale skips a few


def find_zeroed_gradients(evidence: StepEvidence) -> Hit | None:
    ranges = evidence.profile.recording.ranges.filter(pl.col("name").str.contains(_ZERO_GRAD))
    kernels = evidence.kernels.filter(pl.col("op").str.contains(_FILLS).fill_null(value=False))
    inside = innermost(ranges, kernels.select("process", "thread", ns="launch_ns")).is_not_null()
    zeroing = kernels.filter(inside)
    if not zeroing.height:
        return None
    gain = evidence.gain_of(evidence.durations, evidence.mark(zeroing))
    time = f"{ms(evidence.per_step(zeroing))} of {device_word(evidence.profile)} time"
    text = f"`zero_grad` takes {time} to fill gradients with zeros{say_launching_lines(evidence, zeroing)}"
    count = count_per_step(evidence, zeroing.height, kernel_word(evidence.profile))
    title = f"`zero_grad(set_to_none=False)` fills gradients with zeros: {count}"
    if not evidence.profile.on_cpu:
        return settle(evidence, gain, text, title=title)
    # An operator of a CPU takes the time of the step itself.
    saving = gain.gpu_ns * min(1.0, evidence.step_ns / max(1.0, evidence.clock.profiled_ns))
    return Hit(title=title, evidence=text, saving_ns=saving, gain=gain) if _is_worth(evidence, saving) else None


def _is_worth(evidence: StepEvidence, time_ns: float) -> bool:
    return time_ns >= WORTH_SAYING * evidence.step_ns


def find_checkpoints(evidence: StepEvidence) -> Hit | None:
    time_ns = evidence.loop.time_of("checkpoint") if evidence.loop is not None else 0.0
    if not _is_worth(evidence, time_ns):
        return None
    saved = evidence.profile.recording.ranges.filter(pl.col("name") == _CHECKPOINT)
    steps = evidence.profile.steps.with_columns(process=pl.lit(0), thread=pl.lit(0))
    rows = innermost(steps, saved.select(process=pl.lit(0), thread=pl.lit(0), ns="start_ns")).drop_nulls()
    share = say_percent(time_ns / evidence.step_ns)
    text = f"`torch.save` takes {ms(time_ns)} per step on average, {share} of the step; other steps are shorter"
    title = f"A checkpoint is saved in {rows.n_unique()} of {count_noun(steps.height, 'recorded step')}"
    return Hit(title=title, evidence=text, about_ns=time_ns)


def find_skipped_steps(evidence: StepEvidence) -> Hit | None:
    loop = evidence.profile.recording.manifest.loop
    if loop is None or loop.skipped_steps <= _MANY_SKIPPED * loop.steps_seen or not loop.skipped_steps:
        return None
    share = say_percent(loop.skipped_steps / max(1, loop.steps_seen))
    text = f"{share} of the steps before the recording had infinite gradients: they computed a step and updated nothing"
    return Hit(
        title=f"GradScaler skipped {loop.skipped_steps:,} of {count_noun(loop.steps_seen, 'step')}", evidence=text
    )


def _look_up_checkpoint(_profile: Profile) -> Copyable:
    code = "saved = torch.distributed.checkpoint.async_save(state, checkpoint_id=path)  # a thread writes the files"
    return Copyable(label="save checkpoints in the background", text=code)


def _look_up_scale(_profile: Profile) -> Copyable:
    return Copyable(label="see which scale it uses", text="print(scaler.get_scale())  # every 100 steps")


RULES = (
    Rule(
        code="SS027",
        title="`zero_grad(set_to_none=False)` fills gradients with zeros",
        action="Free gradients instead of filling them",
        check=find_zeroed_gradients,
        meaning="""Gradients are kept and filled with zeros, and backward adds to them. Without them, backward writes
            its first result: one pass over all gradients less to write, and one less to read.""",
        seen="Kernels that fill memory, launched inside the range that PyTorch records around `zero_grad`.",
        saving="""The recording is replayed without these kernels; on a CPU, it is their time. What backward saves by
            not adding is not counted.""",
        builtin="not needed: its gradients are freed",
        own=("optimizer.zero_grad()  # set_to_none=True is the default",),
        on_cpu=True,
    ),
    Rule(
        code="SS028",
        title="A checkpoint is saved in the recorded steps",
        action="Record steps without a checkpoint, or save it in the background",
        check=find_checkpoints,
        meaning="""The recorded steps include saving a checkpoint, which most steps do not do. The step time of the page
            is a mean over all of them.""",
        seen="Ranges around `torch.save` in a recording of `stepscope run`, at least 1% of the step.",
        saving="Not estimated.",
        builtin="not seen: it saves no checkpoints",
        own=("# stepscope run --skip N records later steps",),
        look_up=_look_up_checkpoint,
        on_cpu=True,
    ),
    Rule(
        code="SS029",
        title="GradScaler skips steps",
        action="Find out why gradients are infinite, or train in bf16",
        check=find_skipped_steps,
        meaning="""GradScaler skips the update of a step whose gradients are infinite or NaN, and lowers its scale. A
            few skipped steps at the start are normal. If many are skipped, training loses their work.""",
        seen="The updates that GradScaler skipped before `stepscope run` began to record, over 10% of the steps.",
        saving="Not estimated.",
        builtin="--precision bf16, which needs no GradScaler",
        own=("# torch.autocast with bfloat16 needs no GradScaler",),
        look_up=_look_up_scale,
        on_cpu=True,
    ),
)

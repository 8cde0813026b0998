"""Remarks: what is unusual about a run, and how to learn more."""

import shlex
from dataclasses import replace

import numpy as np
import polars as pl

from stepscope.explain.ranks.collectives import CoveredTime
from stepscope.explain.rules.evidence import StepEvidence, ms, often
from stepscope.explain.rules.replay import LONG_GAP_NS, NEVER
from stepscope.explain.rules.rule import Hit, Rule
from stepscope.explain.trace.attribution.graphs import find_captures
from stepscope.explain.trace.profile import Profile, device_word, kernel_word
from stepscope.findings import Copyable
from stepscope.units import count_noun, say_factor, say_percent

# Backward computes two GEMMs for each of forward: 1.8 to 2.2 times its time in every recording looked at, of
# Transformers, ResNets and recommendation models.
MOST_BACKWARD = 4.0
LEAST_SLOWDOWN = 0.10
FEWEST_STEPS = 3
# The share of kernel time that the same kernels in every step must have, for their times to say something.
LEAST_REPEATED = 0.5
_TOP = 2
# Times that depend on other ranks or on the bus.
_NOT_COMPUTED = ("communication", "memcpy")
_LONGEST_NAME = 1000  # characters that still make sense in a command
_MOST_OF_WINDOW = 0.5
LEAST_BLOCKED = 0.05  # of the step
NOT_FINITE, DENORMAL = ("not-finite", "skipped"), ("denormal",)


def _doubts(evidence: StepEvidence, codes: tuple[str, ...]) -> Hit | None:
    texts = [doubt.text for doubt in evidence.profile.recording.manifest.doubts if doubt.code in codes]
    return Hit(evidence="; ".join(texts)) if texts else None


def find_infinite_loss(evidence: StepEvidence) -> Hit | None:
    hit = _doubts(evidence, NOT_FINITE)
    return hit and replace(hit, about_ns=evidence.step_ns)  # before any other remark


def find_denormals(evidence: StepEvidence) -> Hit | None:
    return _doubts(evidence, DENORMAL)


def _computed(evidence: StepEvidence) -> pl.DataFrame:
    return evidence.kernels.filter(~pl.col("class").is_in(_NOT_COMPUTED))


def _backward(kernels: pl.DataFrame) -> pl.DataFrame:
    """Return the kernels of backward itself, without activations that it recomputes."""
    return kernels.filter((pl.col("phase") == "backward") & ~pl.col("recomputed"))


def find_long_backward(evidence: StepEvidence) -> Hit | None:
    kernels = _computed(evidence)
    backward = _backward(kernels)
    # A kernel whose phase is unknown may belong to forward.
    others = kernels.filter(pl.col("phase").fill_null("").is_in(["", "forward", "loss"]) & ~pl.col("recomputed"))
    forward_ns, backward_ns = evidence.per_step(others), evidence.per_step(backward)
    if not (kernels["phase"] == "forward").any() or backward_ns <= MOST_BACKWARD * forward_ns:
        return None
    top = (
        backward.group_by(pl.coalesce("op", "short").alias("label"))
        .agg(pl.col("time_ns").sum())
        .sort("time_ns", "label", descending=[True, False])
        .head(_TOP)
    )
    total = max(1.0, float(backward["time_ns"].sum()))
    named = ", ".join(f"{label} ({say_percent(time / total)})" for label, time in top.iter_rows())
    text = (
        f"backward takes {ms(backward_ns)} of {device_word(evidence.profile)} time and forward {ms(forward_ns)}; the "
        f"usual factor is 2; most of backward is in {named}"
    )
    factor = say_factor(backward_ns / max(1.0, forward_ns))
    return Hit(title=f"Backward takes {factor} the time of forward", evidence=text)


def find_slowdown(evidence: StepEvidence) -> Hit | None:
    kernels = _computed(evidence).filter(pl.col("step").is_not_null())
    keys = ["name", "op", "shapes", *(f"{name}_{axis}" for name in ("grid", "block") for axis in "xyz")]
    per_step = kernels.group_by(*keys, "step").agg(pl.col("time_ns").sum(), calls=pl.len())
    num_steps = kernels["step"].n_unique()
    same = per_step.filter((pl.len().over(keys) == num_steps) & (pl.col("calls").n_unique().over(keys) == 1))
    times = same.group_by("step").agg(pl.col("time_ns").sum()).sort("step")["time_ns"].to_list()
    if num_steps < FEWEST_STEPS or sum(times) < LEAST_REPEATED * float(kernels["time_ns"].sum()):
        return None
    if times != sorted(times) or times[-1] <= (1 + LEAST_SLOWDOWN) * times[0]:
        return None
    slower = say_percent(times[-1] / times[0] - 1)
    what = kernel_word(evidence.profile)
    title = f"The same {what}s take {slower} longer at the end of the recording"
    text = (
        f"{what}s that every step runs equally often take {ms(times[0])} in the first of {num_steps} steps and "
        f"{ms(times[-1])} in the last, more in every step"
    )
    return Hit(title=title, evidence=text)


def find_blocked_queue(evidence: StepEvidence) -> Hit | None:
    """Long gaps on an idle GPU whose next kernel had been launched before they began."""
    replay, idle = evidence.replay, evidence.replay.idle_before
    queued = (replay.launch != NEVER) & (replay.launch < replay.start - idle) & (idle > LONG_GAP_NS)
    time = evidence.idle_ns(queued)
    if time < LEAST_BLOCKED * evidence.step_ns:
        return None
    longest = int(np.argmax(np.where(queued, idle, 0)))
    kernel = evidence.kernels["short"][longest]
    text = (
        f"{often(float(queued.sum()) / evidence.num_marked)} {evidence.clock.say_per_step} nothing runs for over "
        f"{ms(LONG_GAP_NS)}, although the next kernel has been launched; the longest such gap is "
        f"{ms(float(idle[longest]))} before {kernel}. Its stream waits for something else: an event, another rank or "
        "another process"
    )
    share = say_percent(time / evidence.step_ns)
    title = f"GPU idle {share} {evidence.clock.say_of_step} although kernels are queued"
    return Hit(title=title, evidence=text, about_ns=time)


def find_graph_capture(evidence: StepEvidence) -> Hit | None:
    captures = find_captures(evidence.profile.recording.launches)
    begin, stop = evidence.window
    captured = float(CoveredTime(captures).between(np.array([begin]), np.array([stop]))[0])
    if captured < _MOST_OF_WINDOW * max(1, stop - begin):
        return None
    text = (
        f"{count_noun(captures.height, 'capture')} of CUDA graphs, {say_percent(captured / (stop - begin))} of the "
        "trace: kernels launched inside a capture run later, when the graph is launched, so this is not how a step runs"
    )
    return Hit(evidence=text, about_ns=captured / evidence.num_steps)


def _look_up_anomaly(_profile: Profile) -> Copyable:
    code = "with torch.autograd.set_detect_anomaly(True):\n    loss = model(x)\n    loss.backward()"
    return Copyable(label="find the operation that produces it", text=code)


def _look_up_backward(profile: Profile) -> Copyable | None:
    """The longest kernel of backward. An operator of a CPU has no name to explain."""
    by_name = profile.time_by("name", kernels=_backward(profile.kernels))
    longest = by_name["name"][0] if by_name.height else ""
    if profile.on_cpu or not longest.isprintable() or not 0 < len(longest) <= _LONGEST_NAME:
        return None
    return Copyable(label="about the longest kernel of backward", text=shlex.join(["stepscope", "kernel", longest]))


def _look_up_capture(_profile: Profile) -> Copyable:
    code = "with torch.profiler.profile() as profiler:  # after the graphs are captured\n    step()"
    return Copyable(label="record steps that launch the graphs", text=code)


def _look_up_clocks(_profile: Profile) -> Copyable:
    return Copyable(label="check the machine", text="stepscope doctor")


def _look_up_denormals(_profile: Profile) -> Copyable:
    return Copyable(label="compute them as zero", text="torch.set_flush_denormal(True)  # once, before the first step")


_RECORD_WAITS = (
    "config = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)",
    "profiler = torch.profiler.profile(experimental_config=config)  # the trace has the waits of each stream",
)
RULES = (
    Rule(
        code="SS021",
        title="The loss is NaN or infinite",
        action="Find the operation that produces it, and measure again",
        check=find_infinite_loss,
        meaning="""Training has diverged or a number has overflowed. Step times stay the same on a GPU, but the run no
            longer does what training does: with fp16, updates are skipped.""",
        seen="The loss of the last step, and the loss scale of fp16, which stepscope checks after timing.",
        saving="Not estimated.",
        builtin="another --precision: bf16 has the range of fp32",
        own=(
            "# torch.autograd.set_detect_anomaly(True) names the operation whose gradient is NaN",
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # and a lower learning rate",
        ),
        look_up=_look_up_anomaly,
        on_cpu=True,
    ),
    Rule(
        code="SS022",
        title="Backward takes much longer than forward",
        action="Look at these operators first",
        check=find_long_backward,
        meaning="""Backward runs two GEMMs for each GEMM of forward and takes about twice as long. If it takes much
            longer, a few operators usually have a slow gradient: an embedding or an index with many equal entries, a
            scatter, or an operation that is deterministic on request.""",
        seen="""Kernel time in backward, without recomputation and communication, of over 4 times that in forward.
            Kernels whose phase is unknown count as forward.""",
        saving="Not estimated.",
        builtin="not seen: its backward takes twice the time of forward",
        own=("# torch.profiler with record_shapes=True shows the sizes of the operators named here",),
        look_up=_look_up_backward,
        on_cpu=True,
    ),
    Rule(
        code="SS023",
        title="The same kernels get slower during the recording",
        action="Check clocks and other processes, then record again",
        check=find_slowdown,
        meaning="""The work is the same in every step and takes longer each time: clocks fall because of heat or a power
            limit, or another process takes a growing share. Times from such a recording are not those of a long run.
            """,
        seen="""The total time of the kernels that every step runs equally often with the same sizes, at least half of
            the kernel time. It grows in every step, by over 10% in total, over at least 3 steps.""",
        saving="Not estimated.",
        builtin="run stepscope doctor, then record again",
        own=("# nvidia-smi -q -d PERFORMANCE shows why clocks are throttled",),
        look_up=_look_up_clocks,
        on_cpu=True,
    ),
    Rule(
        code="SS024",
        title="Denormal numbers slow the CPU down",
        action="Flush denormal numbers to zero",
        check=find_denormals,
        meaning="""Numbers too small for the normal range of their dtype (below 1.2e-38 in fp32) take some CPUs 5 to 100
            times as long. They are too small to change a result. GPUs compute them at full speed.""",
        seen="""The share of denormal numbers in parameters, gradients and optimizer state of a run on a CPU, at least
            0.1%. stepscope counts them after timing.""",
        saving="Not estimated: it depends on the CPU.",
        builtin="not needed: its parameters do not become denormal in the steps that are timed",
        own=("# torch.set_flush_denormal(True) once, before the first step",),
        look_up=_look_up_denormals,
        on_cpu=True,
    ),
    Rule(
        code="SS025",
        title="The trace shows CUDA graphs being captured, not a step",
        action="Record steps that launch the graphs",
        check=find_graph_capture,
        meaning="""While a CUDA graph is captured, launches are written down and nothing runs. Capturing happens once,
            before the first step that uses the graph. The GPU is idle, and that is not a problem.""",
        seen="Calls that begin and end a capture, with at least half of the recorded time between them.",
        saving="Not estimated.",
        builtin="not needed: it does not capture graphs",
        own=("# start the profiler after a few steps, when the graphs exist",),
        look_up=_look_up_capture,
    ),
    Rule(
        code="SS026",
        title="The GPU is idle although kernels are queued",
        action="Record what the streams wait for",
        check=find_blocked_queue,
        meaning="""The CPU has launched the next kernel, no kernel runs, and the next one still does not start. Its
            stream waits for an event that another stream, another rank or the CPU signals late, or another process uses
            the GPU.""",
        seen="""Gaps of over 1 ms on an idle GPU whose next kernel was launched before the gap began, with at least 5%
            of the step in total.""",
        saving="Not estimated.",
        builtin="not seen: it uses one stream",
        own=(
            *_RECORD_WAITS,
            "# or: nsys profile --trace=cuda,nvtx,osrt --cuda-event-trace=true python train.py",
            "# nvidia-smi shows other processes on the GPU",
        ),
        paste="\n".join(_RECORD_WAITS),
    ),
)

"""Rules about the CPU: the GPU waits for it, or it waits for the GPU."""

import re
from dataclasses import replace

import numpy as np
import polars as pl

from stepscope.explain.ranks.collectives import CoveredTime
from stepscope.explain.rules.dependent_waits import find_host_updates, is_decoding, is_large_copy, is_of_scaler
from stepscope.explain.rules.evidence import StepEvidence, ms, often
from stepscope.explain.rules.loop.loading import find_loading, is_input_copy
from stepscope.explain.rules.replay import LONG_GAP_NS, Bools
from stepscope.explain.rules.rule import (
    COMPILE,
    GROW_BATCH,
    THROUGHPUT,
    USE_GRAPHS,
    Hit,
    Rule,
    capture_step,
    compile_model,
    count_per_step,
    grow_batch,
    say_lines,
    settle,
    workload_of,
)
from stepscope.explain.trace.attribution.graphs import find_captures
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Copyable
from stepscope.recording.store import Manifest
from stepscope.units import count_noun, say_percent

LEAST_IDLE = 0.03
# The share of the CPU time of compiled code that is left if CUDA graphs launch it: an assumption.
GRAPH_HOST_SHARE = 0.1
_MOSTLY = 0.5


def _opens_step(evidence: StepEvidence) -> Bools:
    step = evidence.kernels["step"]
    opens: Bools = step.ne_missing(step.shift()).to_numpy().copy()
    opens[:1] = True
    return opens


def find_launch_bound(evidence: StepEvidence) -> Hit | None:
    share = evidence.compiled_host_share
    if evidence.is_compiled:
        share = np.where(share < 1, GRAPH_HOST_SHARE, 1.0)
    change = evidence.replay.unchanged()
    # A launch that waits for a batch is late for another reason: see SS012.
    loads = evidence.share_outside(find_loading(evidence)) < _MOSTLY
    change.host_share = np.where(_opens_step(evidence) | loads, 1.0, share)
    late = evidence.replay.starved & (change.host_share < 1)
    gain = evidence.gain(change)
    if gain.step_ns < LEAST_IDLE * evidence.step_ns:
        return None
    if (evidence.kernels["launched"] == "graph").sum() > _MOSTLY * evidence.kernels.height:
        return _late_graphs(evidence)
    clock, count = evidence.clock, evidence.kernels.height / evidence.num_steps
    each = clock.busy_ns / max(1.0, count)
    waited_ns = evidence.idle_ns(evidence.is_concerned(change))
    title = f"Launch-bound: the GPU waits for launches {say_percent(waited_ns / evidence.step_ns)} {clock.say_of_step}"
    text = (
        f"{int(late.sum()) / evidence.num_steps:,.0f} of {count:,.0f} kernels start late because the CPU launched "
        f"them late; a kernel runs for {ms(each)} on average"
    )
    action, paste = _launch_less(evidence)
    return Hit(
        title=title,
        evidence=text,
        saving_ns=gain.step_ns,
        gain=gain,
        about_ns=waited_ns,
        action=action,
        paste=paste,
    )


def _late_graphs(evidence: StepEvidence) -> Hit:
    """The kernels inside a graph need no launches: the CPU is late with whole graphs."""
    clock, graphs = evidence.clock, evidence.kernels.filter(pl.col("launched") == "graph")
    count = count_per_step(evidence, graphs["launch_ns"].n_unique(), "CUDA graph")
    inside, every = (one.height / evidence.num_steps for one in (graphs, evidence.kernels))
    idle = evidence.idle_ns(evidence.replay.starved)
    text = (
        f"{count} launch {inside:,.0f} of {every:,.0f} kernels; the GPU is idle for {ms(idle)} {clock.say_per_step} "
        "until the CPU makes its next launch, not between the kernels of a graph"
    )
    has_stacks = _has_stacks(evidence.profile)
    return Hit(
        title=f"Late CUDA graphs: the GPU is idle {say_percent(evidence.idle_share)} {clock.say_of_step}",
        evidence=text,
        about_ns=idle,
        action=f"Increase the batch size, {THROUGHPUT}" if has_stacks else "Find out what the CPU does between graphs",
        paste=GROW_BATCH if has_stacks else _RECORD_STACKS,
    )


def _launch_less(evidence: StepEvidence) -> tuple[str, str]:
    """Return what to do that the run does not do yet."""
    if evidence.uses_graphs:
        return f"Increase the batch size, {THROUGHPUT}", GROW_BATCH
    if evidence.is_compiled:
        return "Launch the compiled code with CUDA graphs", USE_GRAPHS
    return "Compile the model", COMPILE


def find_synchronisation(evidence: StepEvidence) -> Hit | None:
    waits = evidence.waits.filter((pl.col("kind") == "call") & ~pl.col("last") & pl.col("step").is_not_null())
    waits = waits.filter(~is_input_copy(evidence, waits))
    # A CPU that updates the weights needs the gradients: see SS020.
    waits = waits.filter(~pl.col("wait").is_in(find_host_updates(evidence)["wait"].implode()))
    gain = evidence.gain_without(waits) if waits.height else None
    if gain is None:
        return None
    waited = float(waits["clock_ns"].sum()) / evidence.num_marked
    by_op = waits.filter(pl.col("op").is_not_null())["op"].unique().sort().to_list()
    inside = f" in {', '.join(by_op[:3])}" if by_op else ""
    phases = evidence.profile.attribute_ops(waits["op_row"])["phase"].drop_nulls().unique().sort().to_list()
    where = f" ({', '.join(phases)})" if phases else ""
    per_step = evidence.clock.say_per_step
    title = f"CPU waits for the GPU {_say_often(evidence, waits['step'])}"
    text = (
        f"the CPU waits for {ms(waited)} {per_step}{inside}{where}{say_lines(waits['line'], waits['clock_ns'])}; after "
        "each wait the GPU is idle until the next launch arrives"
    )
    if is_of_scaler(evidence, waits).sum() > _MOSTLY * waits.height:
        text += "; GradScaler waits to learn whether a gradient is infinite, before it updates the weights"
        action, paste = _without_scaler(evidence)
    else:
        action, paste = _CLIP if phases == ["clipping"] else _wait_less(by_op, trains=evidence.has_backward)
    return Hit(title=title, evidence=text, saving_ns=gain.step_ns, gain=gain, action=action, paste=paste)


def _say_often(evidence: StepEvidence, steps: pl.Series) -> str:
    """Return how often something happens that happened in these steps: `twice per step`, `in 3 of 30 steps`."""
    if steps.n_unique() < evidence.num_marked:
        return f"in {steps.n_unique()} of {count_noun(evidence.num_marked, 'step')}"
    return f"{often(steps.len() / evidence.num_marked)} {evidence.clock.say_per_step}"


def _without_scaler(evidence: StepEvidence) -> tuple[str, str]:
    peaks = evidence.hardware.peak_flops if evidence.hardware else {"bf16": 0.0}
    if "bf16" in peaks:
        return "Train in bf16, which needs no GradScaler", _TRAIN_IN_BF16
    return "Use `fused=True`: a fused optimizer looks at the scaler's result on the GPU", _FUSED_SCALER


def _wait_less(ops: list[str], *, trains: bool) -> tuple[str, str]:
    """Return what to do about waits in these operators."""
    known = [advice for pattern, advice in _ADVICE.items() if any(re.search(pattern, op) for op in ops)]
    if not known:
        return "Find out what waits, and keep its values on the GPU", _FIND_WAITS
    return known[0][0], "\n".join(dict.fromkeys(paste[trains] for _, paste in known))


def find_step_end_wait(evidence: StepEvidence) -> Hit | None:
    waits = evidence.waits.filter((pl.col("kind") == "call") & pl.col("last") & pl.col("step").is_not_null())
    # Large copies to the CPU take time of their own: see SS020.
    waits = waits.filter(~is_large_copy(evidence, waits))
    steps = evidence.steps["step"]
    # The last step has no next one to delay.
    before_another = waits.filter(pl.col("step") < steps.max()) if steps.len() else waits.head(0)
    gain = evidence.gain_without(before_another) if before_another.height else None
    if gain is None:
        return None
    by_op = before_another["op"].drop_nulls().unique().sort().to_list()
    inside = f" in {by_op[0]}" if by_op else ""
    lines = say_lines(before_another["line"], before_another["clock_ns"])
    text = (
        f"the CPU waits for the GPU{inside} at the end of a step{lines}, so the next step starts with an empty launch "
        "queue"
    )
    if is_decoding(evidence):
        return _next_token(evidence, text)
    ended, every = waits["step"].n_unique(), evidence.num_marked
    rare = ended < _MOSTLY * every
    title = f"CPU waits for the GPU at the end of {ended} of {every} steps" if ended < every - 1 else ""
    hit = Hit(title=title, evidence=text, saving_ns=gain.step_ns, gain=gain)
    if not evidence.has_backward:
        return replace(hit, action="Start the next batch before reading the results of this one", paste=_READ_LATER)
    return replace(hit, action="Read values one step later, without waiting", paste=_READ_NEXT_STEP) if rare else hit


def _next_token(evidence: StepEvidence, text: str) -> Hit:
    """A token depends on the one before it, so the wait stays, and only what follows it can become shorter."""
    action = "Decode several sequences together, or speculatively"
    return Hit(
        title="CPU reads each token before it starts the next one",
        evidence=f"{text}; each token depends on the one before it, so the wait stays",
        about_ns=evidence.idle_ns(evidence.replay.starved & _opens_step(evidence)),
        action=action if evidence.uses_graphs else f"Launch a step as a CUDA graph. {action}",
        paste="" if evidence.uses_graphs else _DECODE_WITH_GRAPHS,
    )


def find_host_absence(evidence: StepEvidence) -> Hit | None:
    """Stalls that SS012 (loading), SS002 and SS018 (waiting), SS020 (updates on the CPU) and SS025 (captures) do not
    explain."""
    calls = evidence.waits.filter(pl.col("kind") == "call")
    known = (
        find_loading(evidence),
        calls,
        find_host_updates(evidence),
        find_captures(evidence.profile.recording.launches),
    )
    explained = pl.concat([one.select("start_ns", "end_ns") for one in known])
    until, idle = evidence.replay.start, evidence.replay.idle_before
    gaps = idle - CoveredTime(explained).between(until - idle, until)
    away: Bools = evidence.is_stall & (gaps > LONG_GAP_NS)
    if not away.any():
        return None
    change = evidence.replay.unchanged()
    change.host_share[away] = 1 - evidence.share_outside(explained)[away]
    gain = evidence.gain(change)
    gaps = gaps[away]
    row = int(np.flatnonzero(away)[gaps.argmax()])
    place = evidence.kernels.row(row, named=True)
    before = f" before {place['op']}" if place["op"] else ""
    phase = f" in {place['phase']}" if place["phase"] else ""
    start = ", at the start of a step" if _opens_step(evidence)[row] else ""
    steps = evidence.kernels["step"].filter(pl.Series(away))
    text = (
        f"{_say_often(evidence, steps)} the CPU launches nothing for over {ms(LONG_GAP_NS)}; the longest stall is "
        f"{ms(float(gaps.max()))}{before}{phase}{start}"
    )
    return settle(evidence, gain, text, title="")


# What to do about a wait by the operator that waits, with the code to paste in inference and in training.
_ADVICE: dict[str, tuple[str, tuple[str, str]]] = {
    r"_local_scalar_dense|::item$|::is_nonzero$|::equal$": (
        "Keep values on the GPU, and read them rarely",
        (
            "values.append(value)  # not value.item(): torch.stack(values).tolist() reads all of them at the end",
            "total_loss += loss.detach()  # not loss.item(): read the value every 100 steps",
        ),
    ),
    r"::nonzero|::masked_select|::index|::unique|::repeat_interleave": (
        "Avoid results whose size only the GPU knows",
        ("x = torch.where(mask, x, 0.0)  # not x[mask], whose size only the GPU knows",) * 2,
    ),
    r"::copy_$|::_to_copy$|::to$": (
        "Copy without waiting",
        (
            'y = x.to("cpu", non_blocking=True)  # and one torch.cuda.synchronize() before y is read\n'
            'x = x.pin_memory().to("cuda", non_blocking=True)  # for copies to the GPU',
        )
        * 2,
    ),
}
_CLIP = (
    "Clip gradients without reading their norm",
    "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)  # without error_if_nonfinite=True\n"
    "norms.append(norm)  # not norm.item(): torch.stack(norms).tolist() every 100 steps",
)
_FIND_WAITS = 'torch.cuda.set_sync_debug_mode("warn")  # prints a warning wherever the CPU waits'
_RECORD_STACKS = (
    "with torch.profiler.profile(with_stack=True) as profiler:\n"
    "    train_step()\n"
    'profiler.export_chrome_trace("trace.json")'
)
_TRAIN_IN_BF16 = (
    'with torch.autocast("cuda", torch.bfloat16):  # not float16\n'
    "    loss = model(x)\n"
    "loss.backward()  # without a GradScaler\n"
    "optimizer.step()"
)
_FUSED_SCALER = (
    "optimizer = Optimizer(model.parameters(), lr=lr, fused=True)  # the class that you use, if it has `fused`"
)
_READ_NEXT_STEP = (
    'value = loss.detach().to("cpu", non_blocking=True)  # not .item()\n'
    "copied = torch.cuda.Event()\n"
    "copied.record()\n"
    "# after the next step is launched: copied.synchronize(), then read value"
)
_DECODE_WITH_GRAPHS = f"{USE_GRAPHS}  # needs a key-value cache of static size"
_READ_LATER = (
    "results.append(model(x))  # no .item(), .cpu() and no torch.cuda.synchronize() yet\n"
    "if len(results) > 1:\n"
    "    use(results.pop(0))  # the GPU already works on the next one"
)


def _launch_faster(manifest: Manifest) -> dict[str, object]:
    return compile_model(manifest) or capture_step(manifest) or grow_batch(manifest)


def _leave_fp16(manifest: Manifest) -> dict[str, object]:
    """The gradient scaler of fp16 waits for the GPU once per step."""
    return {"precision": "bf16"} if workload_of(manifest).precision == "fp16" else {}


def _has_stacks(profile: Profile) -> bool:
    return bool(profile.recording.ranges["source"].is_in(["module", "python"]).any())


def _look_up_stall(profile: Profile) -> Copyable | None:
    if _has_stacks(profile):
        return None
    return Copyable(label="record Python stacks to see what the CPU did", text=_RECORD_STACKS)


RULES = (
    Rule(
        code="SS001",
        title="Launch-bound: the GPU waits for kernel launches",
        action="Compile the model",
        check=find_launch_bound,
        meaning="""Python and the framework take longer to launch a kernel than the GPU takes to run it. The launch
            queue is empty, so a faster kernel would only wait longer.""",
        seen="""Kernels that start late because they were launched after all earlier work was done. The rule fires if a
            faster CPU would make the step at least 3% shorter. GPU idle times of over 1 ms are not launch overhead: see
            SS019. If CUDA graphs launch most kernels, the CPU is late with the next graph, and the finding says so.""",
        saving="""The recording is replayed with a CPU that needs 45% of its time in forward and backward (25% in
            inference), as compiled code does on an H200, or 10% of it if the code is compiled already and CUDA graphs
            launch it; this last share is an assumption. The optimizer's launches stay (SS007). The saving is at most
            the idle time before the kernels that were launched late. Estimated and measured savings: 19.7 and 18.7 of
            50.6 ms, 27.9 and 31.6 of 60.9 ms, inference 11.5 and 12.3 of 16.0 ms. The shares come from these three
            runs, all of a small model; another model may differ by a third. A profiler slows the CPU down: if
            unprofiled steps were timed too, the CPU time is scaled to them. A larger batch raises throughput and does
            not shorten the step.""",
        builtin="--compile, then --graph, or a larger --batch; --preset fast does both, and more",
        own=(
            COMPILE,
            f"{USE_GRAPHS}  # if it is compiled already; needs static shapes",
            f"{GROW_BATCH}  # more work per launch",
        ),
        change=_launch_faster,
    ),
    Rule(
        code="SS002",
        title="CPU waits for the GPU inside the step",
        action="Keep values on the GPU: avoid `.item()` and boolean masks inside the step",
        check=find_synchronisation,
        meaning="""Something needs a value from the GPU on the CPU: .item(), .cpu(), print(loss), if tensor:, nonzero(),
            a boolean mask as an index. The CPU stops, the launch queue drains, and the GPU is idle until new launches
            arrive.""",
        seen="""Calls that synchronize or copy to the CPU, take over 10 µs, and are followed by launches in the same
            step. The first value that is read after the gradients were unscaled is GradScaler's. Waits for gradients
            that the CPU itself needs do not count: see SS020.""",
        saving="""The recording is replayed without these waits. In one check the estimate was 3.1 ms and the
            measured saving 2.4 of 59.4 ms; the difference is 1% of the step, less than the spread of step times. In a
            CPU-bound step there is little to gain, and the rule does not fire.""",
        builtin="--precision bf16 instead of fp16, whose gradient scaler waits once per step; nothing else waits",
        own=(
            "total_loss += loss.detach()  # not loss.item(): read the value every 100 steps",
            "x = torch.where(mask, x, 0.0)  # not x[mask], whose size only the GPU knows",
        ),
        paste=(
            "total_loss += loss.detach()  # not loss.item(): read the value every 100 steps\n"
            "x = torch.where(mask, x, 0.0)  # not x[mask], whose size only the GPU knows"
        ),
        change=_leave_fp16,
    ),
    Rule(
        code="SS018",
        title="CPU waits for the GPU at the end of each step",
        action="Read the loss every 100 steps, not in every step",
        check=find_step_end_wait,
        meaning="""A step that ends with loss.item() or torch.cuda.synchronize() makes the next step start with an empty
            launch queue.""",
        seen="""A wait after the last launch of a step, if another step follows. In inference with one query per
            sequence, each step decodes a token and needs the one before it.""",
        saving="The recording is replayed without these waits. Not estimated for decoding: its waits stay.",
        builtin="not needed: stepscope waits between steps, and that time is not counted",
        own=(
            "losses.append(loss.detach())  # torch.stack(losses).mean().item() every 100 steps",
            "# no torch.cuda.synchronize() in the training loop",
        ),
        paste=(
            "losses.append(loss.detach())  # no .item() and no torch.cuda.synchronize() in the loop\n"
            "if step % 100 == 99:\n"
            "    print(torch.stack(losses).mean().item())"
        ),
    ),
    Rule(
        code="SS019",
        title="CPU stalls: the GPU sits idle for over 1 ms",
        action="Find out what the CPU does during the stalls",
        check=find_host_absence,
        meaning="""The CPU launches nothing for longer than any launch takes. Common causes are loading, logging,
            saving, garbage collection, compilation and another process on the same core.""",
        seen="GPU idle times of over 1 ms, inside a step or at its start, that end with a late launch.",
        saving="The recording is replayed without the CPU time before those launches.",
        builtin="stepscope doctor shows whether the machine is busy",
        own=(
            "# see what the CPU did: torch.profiler.profile(with_stack=True)",
            "gc.freeze(); gc.disable()  # if it was garbage collection: collect between epochs",
        ),
        look_up=_look_up_stall,
    ),
)

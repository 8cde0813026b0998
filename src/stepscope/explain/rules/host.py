"""Rules about the CPU: the GPU waits for it, or it waits for the GPU."""

import re
from dataclasses import replace

import numpy as np
import polars as pl

from stepscope.explain.ranks.collectives import CoveredTime
from stepscope.explain.rules.evidence import StepEvidence, ms, often
from stepscope.explain.rules.loading import find_loading, is_input_copy
from stepscope.explain.rules.remarks import find_captures
from stepscope.explain.rules.replay import LONG_GAP_NS, Bools
from stepscope.explain.rules.rule import (
    COMPILE,
    GROW_BATCH,
    THROUGHPUT,
    USE_GRAPHS,
    Hit,
    Rule,
    compile_model,
    grow_batch,
    settle,
    workload_of,
)
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Copyable
from stepscope.recording.store import Manifest
from stepscope.units import say_percent

LEAST_IDLE = 0.03
# The share of the CPU time of compiled code that is left if CUDA graphs launch it: an assumption.
GRAPH_HOST_SHARE = 0.1


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
    change.host_share = np.where(_opens_step(evidence), 1.0, share)
    late = evidence.replay.starved & (change.host_share < 1)
    gain = evidence.gain(change)
    if gain.step_ns < LEAST_IDLE * evidence.step_ns:
        return None
    clock, count = evidence.clock, evidence.kernels.height / evidence.num_steps
    each = clock.busy_ns / max(1.0, count)
    title = f"Launch-bound: the GPU is idle {say_percent(evidence.idle_share)} {clock.say_of_step}"
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
        about_ns=evidence.idle_ns(late),
        action=action,
        paste=paste,
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
    gain = evidence.gain_without(waits) if waits.height else None
    if gain is None:
        return None
    waited = float((waits["end_ns"] - waits["start_ns"]).sum()) / evidence.num_marked
    by_op = waits.filter(pl.col("op").is_not_null())["op"].unique().sort().to_list()
    inside = f" in {', '.join(by_op[:3])}" if by_op else ""
    phases = evidence.profile.attribute_ops(waits["op_row"])["phase"].drop_nulls().unique().sort().to_list()
    where = f" ({', '.join(phases)})" if phases else ""
    per_step = evidence.clock.say_per_step
    title = f"CPU waits for the GPU {often(waits.height / evidence.num_marked)} {per_step}"
    text = (
        f"the CPU waits for {ms(waited)} {per_step}{inside}{where}; after each wait the GPU is idle until the next "
        "launch arrives"
    )
    action, paste = _wait_less(by_op, trains=evidence.has_backward)
    return Hit(title=title, evidence=text, saving_ns=gain.step_ns, gain=gain, action=action, paste=paste)


def _wait_less(ops: list[str], *, trains: bool) -> tuple[str, str]:
    """Return what to do about waits in these operators."""
    known = [advice for pattern, advice in _ADVICE.items() if any(re.search(pattern, op) for op in ops)]
    if not known:
        return "Find out what waits, and keep its values on the GPU", _FIND_WAITS
    return known[0][0], "\n".join(dict.fromkeys(paste[trains] for _, paste in known))


def find_step_end_wait(evidence: StepEvidence) -> Hit | None:
    waits = evidence.waits.filter((pl.col("kind") == "call") & pl.col("last") & pl.col("step").is_not_null())
    # The last step has no next one to delay.
    steps = evidence.steps["step"]
    waits = waits.filter(pl.col("step") < steps.max()) if steps.len() else waits.head(0)
    gain = evidence.gain_without(waits) if waits.height else None
    if gain is None:
        return None
    by_op = waits["op"].drop_nulls().unique().sort().to_list()
    inside = f" in {by_op[0]}" if by_op else ""
    text = f"the CPU waits for the GPU{inside} at the end of a step, so the next step starts with an empty launch queue"
    hit = Hit(evidence=text, saving_ns=gain.step_ns, gain=gain)
    if evidence.has_backward:
        return hit
    action = "Start the next batch before reading the results of this one"
    return replace(hit, action=action, paste=_READ_LATER)


def find_host_absence(evidence: StepEvidence) -> Hit | None:
    """Stalls that SS012 (loading), SS002 and SS018 (waiting) and SS025 (captures) do not explain."""
    calls = evidence.waits.filter(pl.col("kind") == "call").select("start_ns", "end_ns")
    explained = pl.concat([find_loading(evidence).select("start_ns", "end_ns"), calls, find_captures(evidence)])
    until, idle = evidence.replay.start, evidence.idle_before
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
    count = often(float(away.sum()) / evidence.num_marked)
    text = (
        f"{count} {evidence.clock.say_per_step} the CPU launches nothing for over {ms(LONG_GAP_NS)}; the longest stall "
        f"is {ms(float(gaps.max()))}{before}{phase}{start}"
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
_FIND_WAITS = 'torch.cuda.set_sync_debug_mode("warn")  # prints a warning wherever the CPU waits'
_READ_LATER = (
    "results.append(model(x))  # no .item(), .cpu() and no torch.cuda.synchronize() yet\n"
    "if len(results) > 1:\n"
    "    use(results.pop(0))  # the GPU already works on the next one"
)


def _compile_or_grow(manifest: Manifest) -> dict[str, object]:
    return compile_model(manifest) or grow_batch(manifest)


def _leave_fp16(manifest: Manifest) -> dict[str, object]:
    """The gradient scaler of fp16 waits for the GPU once per step."""
    return {"precision": "bf16"} if workload_of(manifest).precision == "fp16" else {}


def _look_up_stall(profile: Profile) -> Copyable:
    if profile.recording.ranges["source"].is_in(["module", "python"]).any():  # the trace has stacks
        return Copyable(label="about this finding", text="stepscope rule SS019")
    code = (
        "with torch.profiler.profile(with_stack=True) as profiler:\n"
        "    train_step()\n"
        'profiler.export_chrome_trace("trace.json")'
    )
    return Copyable(label="record Python stacks to see what the CPU did", text=code)


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
            SS019.""",
        saving="""The recording is replayed with a CPU that needs 45% of its time in forward and backward (25% in
            inference), as compiled code does on an H200, or 10% of it if the code is compiled already and CUDA graphs
            launch it; this last share is an assumption. The optimizer's launches stay (SS007). The saving is at most
            the idle time before the kernels that were launched late. Estimated and measured savings: 19.7 and 18.7 of
            50.6 ms, 27.9 and 31.6 of 60.9 ms, inference 11.5 and 12.3 of 16.0 ms. The shares come from these three
            runs, all of a small model; another model may differ by a third. A profiler slows the CPU down: if
            unprofiled steps were timed too, the CPU time is scaled to them. A larger batch raises throughput and does
            not shorten the step.""",
        builtin="--compile, or a larger --batch",
        own=(
            COMPILE,
            f"{USE_GRAPHS}  # if it is compiled already; needs static shapes",
            f"{GROW_BATCH}  # more work per launch",
        ),
        change=_compile_or_grow,
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
            step.""",
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
        seen="A wait after the last launch of a step, if another step follows.",
        saving="The recording is replayed without these waits.",
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

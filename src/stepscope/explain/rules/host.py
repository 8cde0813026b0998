"""Rules about the CPU: the GPU waits for it, or it waits for the GPU."""

import numpy as np
import polars as pl

from stepscope.explain.rules.evidence import WORTH_SAYING, Gain, StepEvidence, ms, often
from stepscope.explain.rules.replay import LONG_GAP_NS, Bools, Ints
from stepscope.explain.rules.rule import Hit, Rule, compile_model, count_per_step, grow_batch, settle, workload_of
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Copyable
from stepscope.recording.store import Manifest
from stepscope.units import say_percent

LEAST_IDLE = 0.03
_INPUT = r"(?i)enumerate\(DataLoader\)|\bdata ?load(?:er|ing)?\b|\bnext_batch\b|^phase:input$"
_PAGEABLE = r"(?i)HtoD.*Pageable|Pageable.*(?:-> ?Device|to device)"


def _gaps(evidence: StepEvidence) -> Ints:
    """Return how long the GPU was idle before each kernel; for the first kernel of a step, since the step began."""
    replay = evidence.replay
    since = replay.ready
    if evidence.clock.steps.height:
        place = np.searchsorted(evidence.clock.steps["start_ns"].to_numpy(), replay.start, side="right") - 1
        begun = np.where(place >= 0, evidence.clock.steps["start_ns"].to_numpy()[place], replay.start)
        since = np.maximum(since, np.minimum(begun, replay.start))
    return replay.start - since


def _is_long(evidence: StepEvidence) -> Bools:
    result: Bools = evidence.replay.starved & (_gaps(evidence) > LONG_GAP_NS)
    return result


def _opens_step(evidence: StepEvidence) -> Bools:
    step = evidence.kernels["step"].to_numpy()
    return np.concatenate(([True], step[1:] != step[:-1]))


def find_launch_bound(evidence: StepEvidence) -> Hit | None:
    updates = (evidence.kernels["phase"].fill_null("") == "optimizer").to_numpy()
    short = evidence.replay.is_launching & ~_is_long(evidence) & ~_opens_step(evidence) & ~updates
    change = evidence.replay.unchanged()
    change.host_share[short] = evidence.compiled_host_share[short]
    # A faster CPU would also reach its long stalls earlier; SS019 covers those.
    lost = float(_gaps(evidence)[evidence.replay.starved & short].sum()) / evidence.num_steps
    saving = min(lost, evidence.gain(change).step_ns)
    if saving < LEAST_IDLE * evidence.step_ns:
        return None
    count = evidence.kernels.height / evidence.num_steps
    starved = int((evidence.replay.starved & short).sum()) / evidence.num_steps
    each = evidence.clock.busy_step_ns / max(1.0, count)
    title = f"Launch-bound: the GPU is idle {say_percent(evidence.idle_share)} of the step"
    text = (
        f"{starved:,.0f} of {count:,.0f} kernels per step start late because the CPU launched them late; a kernel "
        f"runs for {ms(each)} on average"
    )
    return Hit(title=title, evidence=text, saving_ns=saving)


def find_synchronisation(evidence: StepEvidence) -> Hit | None:
    waits = evidence.waits.filter((pl.col("kind") == "call") & ~pl.col("last") & pl.col("step").is_not_null())
    waits = waits.filter(~_is_input_copy(evidence, waits))
    gain = evidence.gain_without(waits) if waits.height else None
    if gain is None:
        return None
    waited = float((waits["end_ns"] - waits["start_ns"]).sum()) / evidence.num_steps
    by_op = waits.filter(pl.col("op").is_not_null())["op"].unique().sort().to_list()
    inside = f" in {', '.join(by_op[:3])}" if by_op else ""
    phases = waits["phase"].drop_nulls().unique().sort().to_list()
    where = f" ({', '.join(phases)})" if phases else ""
    title = f"CPU waits for the GPU {often(waits.height / evidence.num_steps)} per step"
    text = (
        f"the CPU waits for {ms(waited)} per step{inside}{where}; after each wait the GPU is idle until the next "
        "launch arrives"
    )
    return Hit(title=title, evidence=text, saving_ns=gain.step_ns)


def _is_input_copy(evidence: StepEvidence, waits: pl.DataFrame) -> pl.Series:
    """Return which waits are copies from pageable memory to the GPU."""
    copies = evidence.kernels.filter(pl.col("name").str.contains(_PAGEABLE))
    return waits["start_ns"].is_in(copies["launch_ns"].drop_nulls().to_list())


def find_input_stalls(evidence: StepEvidence) -> Hit | None:
    recording = evidence.profile.recording
    begin, stop = evidence.clock.window
    inside = (pl.col("end_ns") > begin) & (pl.col("start_ns") < stop)
    loading = pl.concat(
        [
            frame.filter(inside).filter(pl.col("name").str.contains(_INPUT)).select("start_ns", "end_ns")
            for frame in (recording.ranges, recording.ops)
        ]
    ).sort("start_ns")
    if not loading.height:
        return None
    end = np.maximum.accumulate(evidence.replay.end)
    idle = list(zip(end[:-1].tolist(), evidence.replay.start[1:].tolist(), strict=True))
    idle = [(begin, int(evidence.replay.start[0])), *(gap for gap in idle if gap[1] > gap[0]), (int(end[-1]), stop)]
    stalled = _overlap(idle, list(loading.iter_rows())) / evidence.num_steps
    if stalled < WORTH_SAYING * evidence.step_ns:
        return None
    text = f"the GPU is idle for {ms(stalled)} per step while the CPU loads the next batch"
    return Hit(title=f"GPU waits {ms(stalled)} per step for input", evidence=text, saving_ns=stalled)


def _overlap(idle: list[tuple[int, int]], loading: list[tuple[int, int]]) -> float:
    """Return the time that is in both. Nested ranges count once."""
    total, place, done = 0, 0, 0
    for start, end in loading:
        start = max(start, done)
        done = max(done, end)
        while place < len(idle) and idle[place][1] <= start:
            place += 1
        at = place
        while at < len(idle) and idle[at][0] < end:
            total += max(0, min(end, idle[at][1]) - max(start, idle[at][0]))
            at += 1
    return float(total)


def find_pageable_copies(evidence: StepEvidence) -> Hit | None:
    copies = evidence.kernels.filter(pl.col("name").str.contains(_PAGEABLE))
    waits = evidence.waits.filter(_is_input_copy(evidence, evidence.waits))
    gain = evidence.gain_without(waits, removed=copies) if copies.height else None
    if gain is None:
        return None
    count = count_per_step(evidence, copies.height, "copy", "copies")
    text = f"the copies take {ms(evidence.per_step(copies))} on the GPU and block the CPU meanwhile"
    return Hit(title=f"Copies to the GPU use pageable memory: {count}", evidence=text, saving_ns=gain.step_ns)


def find_step_end_wait(evidence: StepEvidence) -> Hit | None:
    waits = evidence.waits.filter((pl.col("kind") == "call") & pl.col("last") & pl.col("step").is_not_null())
    # The last step has no next one to delay.
    steps = evidence.clock.steps["step"]
    waits = waits.filter(pl.col("step") < steps.max()) if steps.len() else waits.head(0)
    gain = evidence.gain_without(waits) if waits.height else None
    if gain is None:
        return None
    by_op = waits["op"].drop_nulls().unique().sort().to_list()
    inside = f" in {by_op[0]}" if by_op else ""
    text = f"the CPU waits for the GPU{inside} at the end of a step, so the next step starts with an empty launch queue"
    return Hit(evidence=text, saving_ns=gain.step_ns)


def find_host_absence(evidence: StepEvidence) -> Hit | None:
    away = _is_long(evidence)
    if not away.any():
        return None
    change = evidence.replay.unchanged()
    change.host_share[away] = 0.0
    lost = float(_gaps(evidence)[away].sum()) / evidence.num_steps
    gain = min(lost, evidence.gain(change).step_ns)
    gaps = _gaps(evidence)[away]
    row = int(np.flatnonzero(away)[gaps.argmax()])
    place = evidence.kernels.row(row, named=True)
    before = f" before {place['op']}" if place["op"] else ""
    phase = f" in {place['phase']}" if place["phase"] else ""
    start = ", at the start of a step" if _opens_step(evidence)[row] else ""
    count = often(float(away.sum()) / evidence.num_steps)
    text = (
        f"{count} per step the CPU launches nothing for over {ms(LONG_GAP_NS)}; the longest stall is "
        f"{ms(float(gaps.max()))}{before}{phase}{start}"
    )
    return settle(evidence, Gain(gpu_ns=0.0, step_ns=gain), text, title="")


def _compile_or_grow(manifest: Manifest) -> dict[str, object]:
    return compile_model(manifest) or grow_batch(manifest)


def _leave_fp16(manifest: Manifest) -> dict[str, object]:
    """The gradient scaler of fp16 waits for the GPU once per step."""
    return {"precision": "bf16"} if workload_of(manifest).precision == "fp16" else {}


def _look_up_stall(_profile: Profile) -> Copyable:
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
        action="Compile the model, or give each launch more work",
        check=find_launch_bound,
        meaning="""Python and the framework take longer to launch a kernel than the GPU takes to run it. The launch
            queue is empty, so a faster kernel would only wait longer.""",
        seen="""Kernels that start late because they were launched after all earlier work was done. The rule fires if a
            faster CPU would make the step at least 3% shorter. GPU idle times of over 1 ms are not launch overhead: see
            SS019.""",
        saving="""The recording is replayed with a CPU that needs 45% of its time in forward and backward (25% in
            inference), as compiled code does on an H200. CUDA graphs need even less. The optimizer's launches stay
            (SS007). Estimated and measured savings: 19.7 and 18.7 of 50.6 ms, 27.9 and 31.6 of 60.9 ms, inference 11.5
            and 12.3 of 16.0 ms. The shares come from these three runs, all of a small model; another model may differ
            by a third. A profiler slows the CPU down: if unprofiled steps were timed too, the CPU time is scaled to
            them.""",
        builtin="--compile, or a larger --batch",
        own=(
            'model = torch.compile(model, mode="reduce-overhead")  # CUDA graphs; needs static shapes',
            "loader = DataLoader(data, batch_size=2 * batch)  # more work per launch",
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
        code="SS012",
        title="GPU waits for input",
        action="Load batches in worker processes and pin their memory",
        check=find_input_stalls,
        meaning="The next batch is loaded while the GPU is idle.",
        seen="GPU idle time inside the range of a data loader.",
        saving="The idle time inside these ranges, assuming that loading can overlap with the step.",
        builtin="not needed: its batch stays on the GPU",
        own=(
            "loader = DataLoader(data, num_workers=8, pin_memory=True, prefetch_factor=4)",
            'batch = batch.to("cuda", non_blocking=True)',
        ),
        paste=(
            "loader = torch.utils.data.DataLoader(data, batch_size=batch, num_workers=8, pin_memory=True)\n"
            'x = x.to("cuda", non_blocking=True)'
        ),
    ),
    Rule(
        code="SS017",
        title="Copies to the GPU use pageable memory",
        action="Pin the memory of batches",
        check=find_pageable_copies,
        meaning="Memory that is not pinned is first copied to a pinned buffer, and the CPU is blocked meanwhile.",
        seen="Copies to the GPU named `Pageable`, and the CPU calls that made them.",
        saving="""The recording is replayed without the time of these copies and the CPU's waits. Pinned copies take
            time on the bus too, but overlap with kernels.""",
        builtin="not needed: its batch stays on the GPU",
        own=(
            "loader = DataLoader(data, pin_memory=True)",
            'batch = batch.to("cuda", non_blocking=True)',
        ),
        paste=(
            "loader = torch.utils.data.DataLoader(data, batch_size=batch, pin_memory=True)\n"
            'x = x.to("cuda", non_blocking=True)'
        ),
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

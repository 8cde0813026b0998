"""Rules about the host: the device waits for it, or it waits for the device."""

import numpy as np
import polars as pl

from stepscope.explain.rules.evidence import WORTH_SAYING, Gain, StepEvidence, ms, often
from stepscope.explain.rules.replay import LONG_GAP_NS, Bools, Ints
from stepscope.explain.rules.rule import Hit, Rule, compile_model, grow_batch, settle, workload_of
from stepscope.recording.store import Manifest

LEAST_IDLE = 0.03
_INPUT = r"(?i)enumerate\(DataLoader\)|\bdata ?load(?:er|ing)?\b|\bnext_batch\b|^phase:input$"
_PAGEABLE = r"(?i)HtoD.*Pageable|Pageable.*(?:-> ?Device|to device)"


def _gaps(evidence: StepEvidence) -> Ints:
    """Before each kernel, how long the device was idle; at the start of a step, since then."""
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
    # A faster host would also be away earlier; that is not what this rule is about.
    lost = float(_gaps(evidence)[evidence.replay.starved & short].sum()) / evidence.num_steps
    saving = min(lost, evidence.gain(change).step_ns)
    if saving < LEAST_IDLE * evidence.step_ns:
        return None
    count = evidence.kernels.height / evidence.num_steps
    starved = int((evidence.replay.starved & short).sum()) / evidence.num_steps
    each = evidence.clock.busy_step_ns / max(1.0, count)
    text = (
        f"the GPU is idle {evidence.idle_share:.0%} of the step: {starved:,.0f} of {count:,.0f} kernels a step start "
        f"late because they were launched late; a kernel runs for {ms(each)} on average"
    )
    return Hit(evidence=text, saving_ns=saving)


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
    text = (
        f"the host waits for the GPU {often(waits.height / evidence.num_steps)} a step{inside}{where}, {ms(waited)} "
        "in all, and the GPU then runs empty until the host has caught up"
    )
    return Hit(evidence=text, saving_ns=gain.step_ns)


def _is_input_copy(evidence: StepEvidence, waits: pl.DataFrame) -> pl.Series:
    """The waits that are calls of copies from pageable memory to the device."""
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
    text = f"the GPU is idle for {ms(stalled)} a step while the host loads the next batch"
    return Hit(evidence=text, saving_ns=stalled)


def _overlap(idle: list[tuple[int, int]], loading: list[tuple[int, int]]) -> float:
    """The time in both. Ranges that lie inside of another one count once."""
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
    text = (
        f"{copies.height / evidence.num_steps:.3g} copies a step from pageable memory, {ms(evidence.per_step(copies))} "
        "on the device; the host stands still during each"
    )
    return Hit(evidence=text, saving_ns=gain.step_ns)


def find_step_end_wait(evidence: StepEvidence) -> Hit | None:
    waits = evidence.waits.filter((pl.col("kind") == "call") & pl.col("last") & pl.col("step").is_not_null())
    # The last step of all has no next one to hold up.
    steps = evidence.clock.steps["step"]
    waits = waits.filter(pl.col("step") < steps.max()) if steps.len() else waits.head(0)
    gain = evidence.gain_without(waits) if waits.height else None
    if gain is None:
        return None
    by_op = waits["op"].drop_nulls().unique().sort().to_list()
    inside = f" in {by_op[0]}" if by_op else ""
    text = f"at the end of a step the host waits for the GPU{inside}, and the next step begins with an empty queue"
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
    text = (
        f"{often(float(away.sum()) / evidence.num_steps)} a step the GPU is idle for over {ms(LONG_GAP_NS)} because "
        f"nothing was launched; the longest is {ms(float(gaps.max()))}{before}{phase}{start}"
    )
    return settle(evidence, Gain(gpu_ns=0.0, step_ns=gain), text)


def _compile_or_grow(manifest: Manifest) -> dict[str, object]:
    return compile_model(manifest) or grow_batch(manifest)


def _leave_fp16(manifest: Manifest) -> dict[str, object]:
    """Its gradient scaler waits for the GPU once a step."""
    return {"precision": "bf16"} if workload_of(manifest).precision == "fp16" else {}


RULES = (
    Rule(
        code="SS001",
        title="the GPU waits for the host to launch kernels",
        check=find_launch_bound,
        meaning="""Python and the framework take longer to launch a kernel than the GPU takes to run it. The queue is
            empty, and a faster kernel would only wait longer.""",
        seen="""A kernel starts late because its launch came after all work before it was done. The rule fires when a
            faster host would make the step at least 3 % shorter. Gaps of over 1 ms are not launches: see SS019.""",
        saving="""The recording is replayed with a host that needs 45 % of its time in forward and backward (25 % in
            inference), as compiled code does on an H200; CUDA graphs leave less. The optimizer's launches stay (SS007).
            Estimated and measured: 19.7 and 18.7 of 50.6 ms; 27.9 and 31.6 of 60.9; inference 11.5 and 12.3 of 16.0.
            The shares come from these three, all of a small model: another may differ by a third. A recorder slows the
            host down: where the step was timed without one too, the host is scaled to that.""",
        builtin="--compile, or a larger --batch",
        own=(
            'model = torch.compile(model, mode="reduce-overhead")  # CUDA graphs; shapes must not change',
            "loader = DataLoader(data, batch_size=2 * batch)  # more work a launch",
        ),
        change=_compile_or_grow,
    ),
    Rule(
        code="SS002",
        title="the host waits for the GPU inside the step",
        check=find_synchronisation,
        meaning="""Something needs a value of the GPU's on the host: .item(), .cpu(), print(loss), if tensor:,
            nonzero(), a mask as an index. The host stops, the queue drains, and the GPU idles until new launches
            arrive.""",
        seen="""Calls that synchronise or copy to the host, last over 10 µs, and have launches after them in the same
            step.""",
        saving="""The recording is replayed without these waits. 3.1 ms were estimated where 2.4 of 59.4 ms came, a
            difference of 1 % of the step and less than the spread of its times. Where the host is slower than the GPU
            anyway there is little to gain, and the rule is silent.""",
        builtin="--precision bf16 in place of fp16, whose gradient scaler waits once a step; nothing else in it waits",
        own=(
            "total_loss += loss.detach()  # not loss.item(): ask for the number once in a hundred steps",
            "x = torch.where(mask, x, 0.0)  # not x[mask], whose size only the GPU knows",
        ),
        paste=(
            "total_loss += loss.detach()  # not loss.item(): ask for the number once in a hundred steps\n"
            "x = torch.where(mask, x, 0.0)  # not x[mask], whose size only the GPU knows"
        ),
        change=_leave_fp16,
    ),
    Rule(
        code="SS012",
        title="the GPU waits for input",
        check=find_input_stalls,
        meaning="The next batch is loaded while the GPU has nothing to do.",
        seen="The GPU is idle while a data loader's range is open on the host.",
        saving="The idle time inside these ranges, if loading can overlap with the step.",
        builtin="its batch stays on the device",
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
        title="copies to the GPU from pageable memory",
        check=find_pageable_copies,
        meaning="Memory that is not pinned is first copied to a pinned buffer; the host stands still meanwhile.",
        seen="Copies named `Pageable` to the device, and the host's calls that made them.",
        saving="""The recording is replayed without the copies' time and the host's waits. Pinned copies take time on
            the bus too, but overlap with kernels.""",
        builtin="its batch stays on the device",
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
        title="the host waits for the GPU at the end of each step",
        check=find_step_end_wait,
        meaning="A step that ends with loss.item() or a synchronisation starts the next one with an empty queue.",
        seen="A wait inside a step with no launch after it, and another step behind it.",
        saving="The recording is replayed without these waits.",
        builtin="stepscope's own waits lie between steps and are not counted",
        own=(
            "losses.append(loss.detach())  # torch.stack(losses).mean().item() once in a hundred steps",
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
        title="the host is away for milliseconds",
        check=find_host_absence,
        meaning="""Nothing is launched for so long that it cannot be the cost of launching: loading, logging, saving,
            garbage collection, compiling, another process on the core.""",
        seen="Gaps of over 1 ms on the GPU, inside of a step or at its start, that end with a late launch.",
        saving="The recording is replayed without the host's time before those launches.",
        builtin="stepscope doctor: is the machine busy?",
        own=(
            "# what the host did then: torch.profiler.profile(with_stack=True)",
            "gc.freeze(); gc.disable()  # if it was the collector: collect between epochs",
        ),
        paste=(
            "with torch.profiler.profile(with_stack=True) as profiler:  # what the host did then\n"
            "    train_step()\n"
            'profiler.export_chrome_trace("trace.json")'
        ),
    ),
)

"""Rules about the input of a step: loading batches, and copying them to the GPU."""

from dataclasses import replace

import numpy as np
import polars as pl

from stepscope.explain.ranks.collectives import CoveredTime
from stepscope.explain.rules.evidence import WORTH_SAYING, StepEvidence, ms
from stepscope.explain.rules.loop.loader_advice import LoadedInput, configure_loader, pin_batches, say_loader
from stepscope.explain.rules.replay import Change, Floats, Ints
from stepscope.explain.rules.rule import Hit, Rule, count_per_step, say_launching_lines
from stepscope.explain.trace.loop.loop_time import COLLATE, FROM_WORKERS, IN_PROCESS
from stepscope.recording.rows.loop_run import LoaderFacts

# Ranges of PyTorch, names that people choose, and Python frames.
_INPUT = (
    r"(?i)enumerate\(DataLoader\)|(?:\b|_)data[ _]?load(?:er|ing)?(?:\b|_)"
    r"|\b(?:next|load|get|fetch)[ _]batch\b|^phase:input$|: preprocess$"
    r"|torch/utils/data/dataloader\.py\(\d+\): __next__$"
)
_TRAINER = r"\btransformers/trainer\.py:"
_PIPELINE = r"transformers/pipelines/\S+: preprocess$"
_PAGEABLE = r"(?i)HtoD.*Pageable|Pageable.*(?:-> ?Device|to device)"
_TO_DEVICE = r"(?i)HtoD|host to device"
# What pinned copies reach on PCIe 4.0 ×16, and their share of the time of pageable ones whose bytes are unknown: an
# assumption.
PINNED_BYTES_PER_NS, _PINNED_SHARE = 25, 0.5
_MOST = 0.5
_LEAST_PART = 0.05  # of the input time, before a part of it is mentioned


def find_loading(evidence: StepEvidence) -> pl.DataFrame:
    """Return the ranges (name, start_ns, end_ns) in which the CPU loads input, on the threads that run the step: a
    thread that loads ahead does not hold the step up."""
    return _named(evidence, _INPUT)


def _named(evidence: StepEvidence, pattern: str) -> pl.DataFrame:
    recording = evidence.profile.recording
    begin, stop = evidence.window
    # On a CPU, the stream of an operator is its thread.
    threads = evidence.kernels["stream" if evidence.profile.on_cpu else "thread"].drop_nulls().unique()
    inside = (pl.col("end_ns") > begin) & (pl.col("start_ns") < stop)
    ours = pl.col("thread").is_in(threads.implode()) | pl.lit(not threads.len())
    named = pl.col("name").str.contains(pattern)
    frames = [frame.filter(inside & ours).filter(named) for frame in (recording.ranges, recording.ops)]
    return pl.concat([frame.select("name", "start_ns", "end_ns") for frame in frames]).sort("start_ns")


def find_input_stalls(evidence: StepEvidence) -> Hit | None:
    loading = find_loading(evidence)
    if not loading.height:
        return None
    on_cpu = evidence.profile.on_cpu
    starts, ends = _waiting(evidence)
    idle = CoveredTime(loading).between(starts, ends)
    stalled = _find_stalled(evidence, loading, float(idle.sum()))
    if stalled < WORTH_SAYING * evidence.step_ns:
        return None
    gain = None if on_cpu else evidence.gain(_without(evidence, loading, idle[:-1]))
    saving = stalled if gain is None or evidence.timed_input_ns is not None else gain.step_ns
    parts = {
        what: float(CoveredTime(ranges).between(starts, ends).sum()) / max(1.0, float(idle.sum()))
        for what, ranges in _parts(evidence, loading).items()
    }
    per_step = evidence.clock.say_per_step
    if on_cpu:
        title, text = (
            f"Loading input takes {ms(stalled)} {per_step}",
            "the model waits while the CPU loads the next batch",
        )
    else:
        title = f"GPU waits for input: {ms(stalled)} {per_step}"
        text = f"the GPU is idle for {ms(stalled)} {per_step} while the CPU loads the next batch"
    text += _say_parts(parts, stalled)
    loader = None if parts["pipeline"] > _MOST else _find_loader(evidence)
    if loader is None:
        action, paste = _load_better(parts, on_cpu=on_cpu)
    else:
        text += f"; {say_loader(loader)}"
        loaded = LoadedInput(
            loader=loader, step_ns=evidence.step_ns, loading_ns=evidence.timed_input_ns or stalled, stalled_ns=stalled
        )
        action, paste = configure_loader(loaded, on_cpu=on_cpu, uses_trainer=_uses_trainer(evidence))
    return Hit(title=title, evidence=text, saving_ns=saving, gain=gain, about_ns=stalled, action=action, paste=paste)


def _find_stalled(evidence: StepEvidence, loading: pl.DataFrame, idle_ns: float) -> float:
    """Return how long a step waits for input, by the clock. On a GPU, loading holds the step up while nothing runs: a
    loader that is done before the GPU is free costs nothing. What the profiler adds to the CPU's time is not saved."""
    timed_ns, clock = evidence.timed_input_ns, evidence.clock
    if evidence.profile.on_cpu:
        scale = min(1.0, evidence.step_ns / max(1, clock.profiled_ns))
        return idle_ns / evidence.num_steps * scale if timed_ns is None else timed_ns
    share = _share_exposed(evidence, loading)
    if timed_ns is not None:
        return min(timed_ns * (1.0 if share is None else share), clock.idle_ns)
    if share is not None and clock.has_steps:
        idle_ns = share * CoveredTime(loading).between(*(np.array([one]) for one in evidence.window))[0]
    return min(float(idle_ns) / evidence.num_steps * evidence.idle_scale, clock.idle_ns)


def _share_exposed(evidence: StepEvidence, loading: pl.DataFrame) -> float | None:
    """Return the share of the time of loading in which the GPU is idle; None if nothing is loaded after the first
    kernel. Before it, loading does not count: a recording begins with an idle GPU, whatever was running until then."""
    starts, ends = _waiting(evidence)
    covered = CoveredTime(loading)
    loading_ns = float(covered.between(ends[:1], ends[-1:]).sum())
    return float(covered.between(starts[1:], ends[1:]).sum()) / loading_ns if loading_ns else None


def _find_loader(evidence: StepEvidence) -> LoaderFacts | None:
    """Return the loader that gives most batches to a step, if the recording knows how it is configured."""
    loop = evidence.profile.recording.manifest.loop
    return max(loop.loaders, key=lambda one: one.batches_per_step, default=None) if loop else None


def _uses_trainer(evidence: StepEvidence) -> bool:
    """Whether the Trainer of transformers makes the loader: its arguments configure it."""
    ops = evidence.profile.ops
    return bool(ops["source"].str.contains(_TRAINER).any())


def _waiting(evidence: StepEvidence) -> tuple[Ints, Ints]:
    """Return when the step may wait for input: whenever the GPU is idle, and on a CPU always."""
    begin, stop = evidence.window
    if evidence.profile.on_cpu:
        return np.array([begin]), np.array([stop])
    replay = evidence.replay
    ends = np.append(replay.start, stop)
    return ends - np.append(replay.idle_before, max(0, stop - int(replay.end.max()))), ends


def _without(evidence: StepEvidence, loading: pl.DataFrame, idle: Floats) -> Change:
    """Return the change in which loading overlaps with the step: the GPU no longer waits for it."""
    change = evidence.replay.unchanged()
    waits_for_input = idle > 0
    change.host_share[waits_for_input] = evidence.share_outside(loading)[waits_for_input]
    return change


def _parts(evidence: StepEvidence, loading: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Return ranges inside `loading` by what happens in them; they may overlap."""
    copies = evidence.kernels.filter(pl.col("name").str.contains(_TO_DEVICE) & pl.col("launch_ns").is_not_null())
    copies = copies.select(start_ns="launch_ns", end_ns="launch_end_ns")
    inner = {"collate": _named(evidence, COLLATE), "copies": copies}
    starts, ends = (loading[name].to_numpy() for name in ("start_ns", "end_ns"))
    done = np.maximum.accumulate(ends)
    found = {}
    for what, ranges in inner.items():
        place = np.searchsorted(starts, ranges["start_ns"].to_numpy(), side="right") - 1
        found[what] = ranges.filter(
            pl.Series((place >= 0) & (done[np.maximum(0, place)] >= ranges["end_ns"].to_numpy()))
        )
    name = pl.col("name")
    for what, pattern in (("process", IN_PROCESS), ("workers", FROM_WORKERS), ("pipeline", _PIPELINE)):
        found[what] = loading.filter(name.str.contains(pattern))
    return found


def _say_parts(parts: dict[str, float], stalled_ns: float) -> str:
    if parts["pipeline"] > _MOST:
        text = ", in the preprocessing of a transformers pipeline"
    elif parts["process"] > _MOST:
        text = ", in the main process: the loader has no workers"
    elif parts["workers"] > _MOST:
        text = ", which comes from the loader's workers: they are not fast enough"
    else:
        text = ""
    words = {"collate": "collating samples", "copies": "copying to the GPU"}
    said = [f"{ms(parts[key] * stalled_ns)} in {word}" for key, word in words.items() if parts[key] >= _LEAST_PART]
    return text + (f"; of this, {' and '.join(said)}" if said else "")


def _load_better(parts: dict[str, float], *, on_cpu: bool) -> tuple[str, str]:
    """Return what to do, and the code for it."""
    if parts["pipeline"] > _MOST:
        return (
            "Preprocess in worker processes",
            "outputs = pipe(dataset, num_workers=8)  # a torch Dataset of all inputs, not one input per call",
        )
    pinned = "" if on_cpu else ", pin_memory=True"
    copied = "" if on_cpu else '\nx = x.to("cuda", non_blocking=True)'
    loader = "loader = torch.utils.data.DataLoader(data, batch_size=batch, "
    if parts["workers"] > _MOST:
        more = f"num_workers=2 * num_workers, prefetch_factor=4{pinned})"
        return "Use more workers, or do less per sample", f"{loader}{more}{copied}"
    if parts["copies"] > _MOST:
        return "Pin the memory of batches, and copy without waiting", f"{loader}pin_memory=True){copied}"
    workers = "num_workers=2" if on_cpu else "num_workers=8"
    return "Load batches in worker processes", f"{loader}{workers}{pinned}, persistent_workers=True){copied}"


def is_input_copy(evidence: StepEvidence, waits: pl.DataFrame) -> pl.Series:
    """Return which waits are copies from pageable memory to the GPU."""
    copies = evidence.kernels.filter(pl.col("name").str.contains(_PAGEABLE))
    return waits["start_ns"].is_in(copies["launch_ns"].drop_nulls().implode())


def find_pageable_copies(evidence: StepEvidence) -> Hit | None:
    copies = evidence.kernels.filter(pl.col("name").str.contains(_PAGEABLE))
    if not copies.height:
        return None
    change = evidence.replay.unchanged()
    change.skipped_waits = set(evidence.waits.filter(is_input_copy(evidence, evidence.waits))["wait"].to_list())
    # A pinned copy takes time on the bus too, on the same stream: to hide it is another fix (SS020).
    pinned_ns = (copies["moved_bytes"] / PINNED_BYTES_PER_NS).fill_null(copies["time_ns"] * _PINNED_SHARE)
    rows = copies["row"].to_numpy()
    change.time_ns[rows] = np.minimum(change.time_ns[rows], pinned_ns.to_numpy())
    gain = evidence.gain(change)
    if gain.step_ns < WORTH_SAYING * evidence.step_ns:
        return None
    count = count_per_step(evidence, copies.height, "copy", "copies")
    text = (
        f"the copies take {ms(evidence.per_step(copies))} on the GPU and block the CPU meanwhile"
        f"{say_launching_lines(evidence, copies)}; from pinned memory they would take about "
        f"{ms(float(change.time_ns[rows].sum()) / evidence.num_steps)}"
    )
    title = f"Copies to the GPU use pageable memory: {count}"
    hit = Hit(title=title, evidence=text, saving_ns=gain.step_ns, gain=gain)
    loader = _find_loader(evidence)
    if loader is not None and not loader.pin_memory:
        return replace(hit, paste=pin_batches(loader, uses_trainer=_uses_trainer(evidence)))
    return hit if find_loading(evidence).height else replace(hit, action="Copy from pinned memory", paste=_FROM_PINNED)


_FROM_PINNED = (
    "buffer = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)  # once, not in every step\n"
    'x = buffer.copy_(x).to("cuda", non_blocking=True)'
)

RULES = (
    Rule(
        code="SS012",
        title="The step waits for input",
        action="Load batches in worker processes",
        check=find_input_stalls,
        meaning="""The next batch is loaded while the GPU is idle, or, on a CPU, while the model does not run. A loader
            without workers loads in the process of the step. With workers, the step waits if they are slower than the
            model.""",
        seen="""The ranges that PyTorch records around a DataLoader (`enumerate(DataLoader)`), ranges with such a name,
            and, if stacks were recorded, the frames of a DataLoader and of `preprocess`, on the threads that run the
            step: GPU idle time inside them, or, on a CPU, all of their time. The name of the range says whether the
            loader has workers; a recording of `stepscope run` also has its arguments, and the time that unprofiled
            steps wait for it. Collating is `default_collate`, `collate_fn` or `aten::stack` inside a loader.""",
        saving="""The recording is replayed without the CPU time inside these ranges, assuming that loading can overlap
            with the step. On a CPU, this is their time, and needs cores that the model does not use. If unprofiled
            steps were timed by phase, it is the time that they wait for input, as far as the GPU is idle meanwhile.
            """,
        builtin="not needed: its batch stays on the device",
        own=(
            "loader = DataLoader(data, num_workers=8, pin_memory=True, prefetch_factor=4)",
            'batch = batch.to("cuda", non_blocking=True)',
        ),
        paste=(
            "loader = torch.utils.data.DataLoader(data, batch_size=batch, num_workers=8, pin_memory=True)\n"
            'x = x.to("cuda", non_blocking=True)'
        ),
        on_cpu=True,
    ),
    Rule(
        code="SS017",
        title="Copies to the GPU use pageable memory",
        action="Pin the memory of batches",
        check=find_pageable_copies,
        meaning="Memory that is not pinned is first copied to a pinned buffer, and the CPU is blocked meanwhile.",
        seen="Copies to the GPU named `Pageable`, and the CPU calls that made them.",
        saving="""The recording is replayed without the CPU's waits, and with copies at 25 GB/s, as pinned ones reach on
            PCIe 4.0 (half of their time if their bytes are unknown). What is left of them can be hidden: see SS020.""",
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
)

"""The step as one bar: its phases, and in each the time of every kernel class and the idle time.

The bar adds up to the step of `Profile.clock`. A moment counts once: while several kernels run, they share it equally.
Copies count where no other kernel computes, and communication where nothing else runs: its time is the exposed one.
Idle time belongs to the phase of the kernel that ends it. If the clock's step is an unprofiled one, its idle time is
spread over the phases as in the profiled steps.
"""

from collections.abc import Sequence

import numpy as np
import polars as pl

from stepscope.explain.trace.profile import UNKNOWN, Profile, order_phases
from stepscope.findings import StepBar, StepPhase, StepPicture

_KNOWN_ENOUGH = 0.5  # of the busy time, to show phases
# A class counts only where no class of an earlier tier runs; the first tier has all classes not named here.
_TIERS = {"memcpy": 1, "memset": 1, "communication": 2}


def draw_steps(profiles: Sequence[Profile | None], names: Sequence[str]) -> StepPicture | None:
    """Return one bar per run; None if no run has a timeline."""
    assert len(profiles) == len(names), "one name per profile"
    bars = [draw_bar(profile) if profile and not profile.is_serialized else None for profile in profiles]
    drawn = [bar for bar in bars if bar is not None]
    if not drawn:
        return None
    what = "step" if any(bar.is_step for bar in drawn) else "trace"
    by = "phase" if any(phase.name for bar in drawn for phase in bar.phases) else "kernel class"
    return StepPicture(title=f"The {what} by {by}", runs=tuple(names), bars=tuple(bars), notes=_write_notes(profiles))


def _write_notes(profiles: Sequence[Profile | None]) -> tuple[str, ...]:
    known = [profile for profile in profiles if profile is not None and not profile.is_serialized]
    notes = []
    if any(profile.has_gaps and profile.clock.kind == "unprofiled" for profile in known):
        notes.append("idle time is that of unprofiled steps, spread over the phases as in the profiled steps")
    devices = max((len(profile.devices) for profile in known), default=1)
    if devices > 1:
        notes.append(f"times are means over {devices} GPUs")
    if any(profile.on_cpu for profile in known):
        notes.append("outside operators, the CPU mostly runs Python and the framework")
    return tuple(notes)


def draw_bar(profile: Profile) -> StepBar:
    """Return the step of a recording with a timeline."""
    swept, clock = sweep_step(profile), profile.clock
    waits = dict(swept.group_by("phase").agg(pl.col("wait_ns").sum()).iter_rows())
    times = (
        swept.group_by("phase", "class").agg(pl.col("own_ns").sum()).sort("own_ns", "class", descending=[True, False])
    )
    phases = [
        StepPhase(
            name=phase,
            classes=tuple(part["class"]),
            times_ns=tuple(part["own_ns"].to_list()),
            idle_ns=waits[phase],
        )
        for phase in order_phases(waits)
        for part in [times.filter((pl.col("phase") == phase) & (pl.col("own_ns") > 0))]
    ]
    return StepBar(
        step_ns=clock.step_ns,
        busy_ns=clock.busy_ns,
        phases=tuple(phases),
        is_step=profile.has_steps,
        device="CPU" if profile.on_cpu else "GPU",
    )


def sweep_step(profile: Profile) -> pl.DataFrame:
    """Return the kernels with their share of one step: `own_ns`, the time that counts for each, and `wait_ns`, the idle
    time that it ended. They add up to the busy and the idle time of the clock's step. `phase` is empty if the phases
    are unknown."""
    swept = pl.concat(
        _sweep(group, profile.window)
        for group in profile.kernels.partition_by("process", "device", maintain_order=True)
    )
    if not _has_phases(swept):
        swept = swept.with_columns(phase=pl.lit(""))
    # The sweep covers all steps and devices; the clock's step is a mean over them.
    wholes = {"own_ns": profile.clock.busy_ns, "wait_ns": profile.clock.idle_ns}
    scales = {name: whole / max(1.0, float(swept[name].sum())) for name, whole in wholes.items()}
    return swept.with_columns(pl.col(name) * scale for name, scale in scales.items())


def _has_phases(swept: pl.DataFrame) -> bool:
    known = swept.filter(pl.col("phase") != UNKNOWN)
    return float(known["own_ns"].sum()) >= _KNOWN_ENOUGH * float(swept["own_ns"].sum())


def _sweep(kernels: pl.DataFrame, window: tuple[int, int]) -> pl.DataFrame:
    """Return the kernels of one device, each with its own share of the device's time (`own_ns`) and the idle time that
    it ended (`wait_ns`). Both together add up to the window."""
    starts, ends = kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy()
    count = len(starts)
    moments = np.concatenate((starts, ends))
    order = np.argsort(moments, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(2 * count)
    sorted_moments = moments[order]
    length = np.diff(sorted_moments, append=sorted_moments[-1:])
    tier = kernels["class"].replace_strict(_TIERS, default=0, return_dtype=pl.Int64).to_numpy()
    own, running = np.zeros(count), np.zeros(2 * count, np.int64)
    for number in range(max(_TIERS.values()) + 1):
        inside = (tier == number).astype(np.int64)
        here = np.cumsum(np.concatenate((inside, -inside))[order])
        rate = np.where((here > 0) & (running == 0), length / np.maximum(here, 1), 0.0)
        passed = np.concatenate(([0.0], np.cumsum(rate)))
        own += np.where(tier == number, passed[place[count:]] - passed[place[:count]], 0.0)
        running += here
    wait = np.zeros(count)
    gaps = np.flatnonzero(running[:-1] == 0)
    wait[order[gaps + 1]] = length[gaps]
    wait[order[0]] += sorted_moments[0] - window[0]
    wait[order[-1] - count] += window[1] - sorted_moments[-1]
    return kernels.with_columns(
        pl.col("phase").fill_null(UNKNOWN), own_ns=pl.Series(own, dtype=pl.Float64), wait_ns=pl.Series(wait)
    )

"""A profile: the kernels of a recording with what they belong to, and time that adds up. Questions, rules, tables and
comparisons are all computed from it."""

import hashlib
import shlex
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path

import polars as pl

from stepscope import hardware
from stepscope.errors import StepscopeError
from stepscope.explain.trace.accounting import DeviceAccount, account_devices
from stepscope.explain.trace.attribution import attribute_kernels, attribute_ops
from stepscope.explain.trace.attribution.phases import step_ranges
from stepscope.explain.trace.clock import Clock
from stepscope.explain.trace.extent import (
    StepExtent,
    StepRuns,
    find_extent,
    find_incomplete,
    find_interrupted,
    without_steps,
)
from stepscope.files import replacing
from stepscope.hardware import Hardware
from stepscope.recording.parquet import DamagedTableError, pack, unpack
from stepscope.recording.readers.kineto import ends_early
from stepscope.recording.readers.nsys_database import EXPORT_COMMAND
from stepscope.recording.store import Recording
from stepscope.units import count_noun

UNKNOWN = "unknown"
# The phases in the order of a step.
_PHASES = (
    "warm-up",
    "input",
    "forward",
    "loss",
    "backward",
    "clipping",
    "optimizer",
    "scheduler",
    "logging",
    "checkpoint",
)
# How operators and modules of kernels in CUDA graphs are known.
_SHOWS_OPERATOR = ["capture", "eager"]
_SHOWS_MODULE = [*_SHOWS_OPERATOR, "compiled", "order"]
_WORTH_KEEPING = 20_000  # kernels; attributing fewer is faster than reading a file


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One recording. `kernels` have the columns of `attribution.attribute_kernels`, and are those of the steps in
    `extent`. A row is a single kernel or, in bounded memory, `count` kernels that took `time_ns` in total, each between
    `min_ns` and `max_ns`."""

    recording: Recording
    kernels: pl.DataFrame
    extent: StepExtent
    kept_in: Path | None = None  # where derived data of a large recording is cached

    @property
    def ops(self) -> pl.DataFrame:
        """The operators, in the order of `op_row`."""
        return self.recording.ops

    def attribute_ops(self, rows: pl.Series) -> pl.DataFrame:
        """Return these operators with what they belong to. Attributing all takes as long as attributing the kernels."""
        return attribute_ops(self.recording, rows)

    @cached_property
    def gpu_time_ns(self) -> int:
        """The sum of all kernel durations, the total that shares refer to. Overlapping kernels each count. Raises
        StepscopeError for counters without times."""
        total = int(self.kernels["time_ns"].sum())
        if not total and self.recording.counters.height:
            raise no_time(self.recording)
        return total

    @cached_property
    def clock(self) -> Clock:
        overhead = self.recording.manifest.overhead
        steps = self.recording.steps.group_by("step", maintain_order=True).agg(ns=pl.col("duration_ns").sum())
        return Clock(
            extent=self.extent,
            find_busy_ns=lambda: sum(device.whole.busy_ns for device in self.devices) / len(self.devices),
            unprofiled_ns=overhead.plain_ns if overhead else None,
            unprofiled_steps=tuple(map(Fraction, steps["ns"])),
        )

    @property
    def steps(self) -> pl.DataFrame:
        """One row per step: step, start_ns, end_ns, as marked on the CPU."""
        return self.extent.steps

    @property
    def window(self) -> tuple[int, int]:
        return self.extent.window

    @property
    def step_windows(self) -> tuple[tuple[int, int], ...]:
        """Start and end of each step on the device."""
        return self.extent.windows

    @cached_property
    def devices(self) -> tuple[DeviceAccount, ...]:
        return account_devices(self.kernels, self.window)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is missing, damaged or left out."""
        return (*self.recording.manifest.notes, *self.extent.notes)

    @property
    def is_serialized(self) -> bool:
        """Whether kernels ran one at a time, as under Nsight Compute: without idle time and order of a step."""
        return self.recording.manifest.source == "nsight compute"

    @property
    def has_steps(self) -> bool:
        """Whether the step time is meaningful."""
        return bool(self.steps.height) and not self.is_serialized

    @property
    def has_gaps(self) -> bool:
        """Whether idle time is meaningful. It is not if the kernels are operators of a CPU."""
        return not self.on_cpu and not self.is_serialized

    # --- Shortcuts to the clock

    @property
    def wall_ns(self) -> int:
        return self.clock.wall_ns

    @property
    def num_steps(self) -> int:
        return self.clock.num_steps

    @property
    def step_ns(self) -> float:
        return self.clock.step_ns

    @property
    def idle_share(self) -> float:
        return self.clock.idle_share

    @cached_property
    def hardware(self) -> Hardware | None:
        """From the manifest of a stepscope recording, otherwise by device name; None if unknown."""
        environment = self.recording.manifest.environment
        return environment.hardware if environment else hardware.find(self.recording.manifest.device)

    @property
    def on_cpu(self) -> bool:
        return bool((self.kernels["kind"] == "cpu").all())

    def time_by(self, *columns: str, kernels: pl.DataFrame | None = None) -> pl.DataFrame:
        """Return time_ns, share (of all GPU time) and count per value of `columns`, the largest first. Null is
        `unknown`."""
        source = self.kernels if kernels is None else kernels
        named = [pl.col(c).fill_null(UNKNOWN) if source.schema[c] == pl.String else pl.col(c) for c in columns]
        grouped = source.group_by(*named, maintain_order=True).agg(pl.col("time_ns", "count").sum())
        share = pl.col("time_ns") / max(1, self.gpu_time_ns)
        return grouped.with_columns(share=share).sort("time_ns", *columns, descending=[True, *([False] * len(columns))])

    def coverage(self) -> dict[str, float]:
        """Return the shares of GPU time whose class, phase and module are known. The module around the launch of a CUDA
        graph is not that of its kernels."""
        total = max(1, self.gpu_time_ns)
        shows_module = (pl.col("launched") != "graph") | pl.col("matched").is_in(_SHOWS_MODULE)
        known = {
            "class": pl.col("class") != "other",
            "phase": pl.col("phase").is_not_null(),
            "module": pl.col("module").is_not_null() & shows_module.fill_null(value=False),
        }
        return {name: float(self.kernels.filter(test)["time_ns"].sum() / total) for name, test in known.items()}

    @property
    def layer_share(self) -> float:
        """The share of GPU time inside layers, as far as they are known."""
        inside = self.kernels.filter(pl.col("layer").is_not_null())
        return float(inside["time_ns"].sum() / max(1, self.gpu_time_ns))


def shares_by_launch(profile: Profile) -> dict[str, float]:
    """Return the shares of kernel time by kind of launch: `op`, `graph` or `before` the window."""
    return dict(profile.time_by("launched").select("launched", "share").iter_rows())


def times_in_graphs(profile: Profile) -> pl.DataFrame:
    """Return the time of kernels that CUDA graphs launched, by the way in which their owners are known."""
    return profile.time_by("matched", kernels=profile.kernels.filter(pl.col("launched") == "graph"))


def coverage_in_graphs(profile: Profile) -> dict[str, float]:
    """Return the shares of the time of CUDA graphs whose phase, layer, module and operator are known. What is open
    around the launch of a graph tells the phase, and nothing about single kernels."""
    graphs = profile.kernels.filter(pl.col("launched") == "graph")
    known = {
        "phase": pl.col("phase").is_not_null(),
        "layer": pl.col("layer").is_not_null() & pl.col("matched").is_not_null(),
        "module": pl.col("module").is_not_null() & pl.col("matched").is_in(_SHOWS_MODULE),
        "operator": pl.col("op").is_not_null() & pl.col("matched").is_in(_SHOWS_OPERATOR),
    }
    total = max(1, int(graphs["time_ns"].sum()))
    return {name: float(graphs.filter(test)["time_ns"].sum() / total) for name, test in known.items()}


def make_profile(recording: Recording, kept_in: Path | None = None) -> Profile:
    """Return the profile of a recording. `kept_in` is the recording's directory, where results for a large one are
    cached."""
    if not recording.kernels.height:
        raise no_kernels(recording, recording.ops.height)
    if kept_in is None or recording.kernels.height < _WORTH_KEEPING:
        kept_in, kernels = None, attribute_kernels(recording)
    else:
        kernels = _attribute_once(recording, kept_in / f"attributed-{code_digest()}.parquet")
    lasted = pl.col("end_ns") - pl.col("start_ns")
    kernels = kernels.with_columns(time_ns=lasted, count=pl.lit(1, pl.Int64), min_ns=lasted, max_ns=lasted)
    if not (recording.counters.height or kernels["time_ns"].sum()):
        raise no_time(recording)
    marked = step_ranges(recording)
    runs = StepRuns(marked)
    runs.add(kernels)
    interrupted = find_interrupted(recording, kernels, marked)
    extent = find_extent(marked, runs.total(), find_incomplete(recording, marked), interrupted)
    if not (counted := extent.keep(kernels)).height:
        extent, counted = without_steps(runs.total()), kernels
    total_ns = int(kernels["time_ns"].sum())
    extent = extent.without(total_ns - int(counted["time_ns"].sum()), total_ns)
    return Profile(recording=recording, kernels=counted, extent=extent, kept_in=kept_in)


def no_kernels(recording: Recording, num_ops: int) -> StepscopeError:
    has = f"{_name_file(recording)} has {count_noun(num_ops, 'operator')} and no kernels"
    notes = recording.manifest.notes
    record = "torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])"
    return StepscopeError(
        "the recording has no kernel timeline",
        detail="; ".join((has, *notes)),
        hint="copy the whole file: kernels come last" if ends_early(notes) else record,
    )


def no_time(recording: Recording) -> StepscopeError:
    manifest = recording.manifest
    match manifest.source:
        case _ if manifest.command:  # a recording of stepscope
            hint = f"record again: {manifest.command}"
        case "nsight systems":
            hint = f"export again: {EXPORT_COMMAND}"
        case "nsight compute":
            table = shlex.join(["stepscope", "explain", manifest.file or "FILE", "--table", "counters"])
            hint = f"collect `gpu__time_duration.sum` too, or run: {table}"
        case _:
            hint = "torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])"
    return StepscopeError(
        f"no kernel in {_name_file(recording)} has a duration", detail="; ".join(manifest.notes), hint=hint
    )


def _name_file(recording: Recording) -> str:
    """Return the file that was read; a recording of stepscope has none."""
    return f"`{recording.manifest.file}`" if recording.manifest.file else "the recording"


def _attribute_once(recording: Recording, path: Path) -> pl.DataFrame:
    with suppress(OSError, DamagedTableError):  # missing or damaged: computed below
        return unpack(path)
    kernels = attribute_kernels(recording)
    # A full disk only costs time on the next call.
    with suppress(OSError, pl.exceptions.PolarsError), replacing(path) as new:
        pack(kernels, new)
    return kernels


@cache
def code_digest() -> str:
    """Return a digest of the code that computes results: those cached by another version are not used."""
    package = Path(__file__).parents[2]
    files = sorted(file for folder in ("explain", "recording") for file in (package / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def order_phases(phases: Iterable[str]) -> list[str]:
    """Return phases in the order of a step; others by name, and unknown ones last."""
    return sorted(phases, key=lambda one: (_PHASES.index(one) if one in _PHASES else len(_PHASES), one == UNKNOWN, one))


def device_word(profile: Profile) -> str:
    return "CPU" if profile.on_cpu else "GPU"


def kernel_word(profile: Profile) -> str:
    return "operator" if profile.on_cpu else "kernel"

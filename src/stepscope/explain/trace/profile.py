"""A recording understood: kernels with what they belong to, and time that adds up. What every question, rule, table and
comparison starts from."""

import hashlib
import shlex
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import polars as pl

from stepscope import hardware
from stepscope.errors import StepscopeError
from stepscope.explain.trace.accounting import DeviceAccount, account_devices
from stepscope.explain.trace.attribution import attribute_kernels, attribute_ops
from stepscope.explain.trace.clock import Clock, find_step_windows
from stepscope.explain.trace.phases import step_ranges
from stepscope.files import replacing
from stepscope.hardware import Hardware
from stepscope.recording.parquet import DamagedTableError, pack, unpack
from stepscope.recording.readers.nsys_database import EXPORT_COMMAND
from stepscope.recording.store import Recording

UNKNOWN = "unknown"
_WORTH_KEEPING = 20_000  # kernels; fewer are attributed faster than a file is read


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One recording. `kernels` carry the columns of `attribution.attribute_kernels`. A row stands for `count` kernels
    that took `time_ns` together, each between `min_ns` and `max_ns`: for a single one, unless memory is bounded."""

    recording: Recording
    kernels: pl.DataFrame
    kept_in: Path | None = None  # where what was found out about a large recording is kept for the next look

    @cached_property
    def ops(self) -> pl.DataFrame:
        """The operators with what they belong to (`attribution.attribute_ops`), in the order that `op_row` counts."""
        return attribute_ops(self.recording)

    @cached_property
    def gpu_time_ns(self) -> int:
        """All kernels' durations added up: what shares are of. Kernels side by side count each. Counters may come
        without times, and are all that can be asked for then."""
        total = int(self.kernels["time_ns"].sum())
        if not total and self.recording.counters.height:
            raise no_time(self.recording)
        return total

    @cached_property
    def clock(self) -> Clock:
        overhead = self.recording.manifest.overhead
        return Clock(
            steps=self.steps,
            window=self.window,
            find_busy_ns=lambda: sum(device.whole.busy_ns for device in self.devices) / len(self.devices),
            find_launched_before=lambda: dict(self.time_by("launched").select("launched", "share").rows()).get(
                "before", 0
            ),
            plain_ns=overhead.plain_ns if overhead else None,
        )

    @cached_property
    def steps(self) -> pl.DataFrame:
        """One row a recorded step: step, start_ns, end_ns."""
        return step_ranges(self.recording).select("step", "start_ns", "end_ns")

    @cached_property
    def window(self) -> tuple[int, int]:
        """From the first thing to the last, of the recorded steps and of all that ran on a device."""
        times = pl.concat([self.kernels.select("start_ns", "end_ns"), self.steps.select("start_ns", "end_ns")])
        start, end = times["start_ns"].min(), times["end_ns"].max()
        assert isinstance(start, int)
        assert isinstance(end, int)
        return start, end

    @cached_property
    def devices(self) -> tuple[DeviceAccount, ...]:
        return account_devices(self.kernels, self.window)

    @cached_property
    def step_windows(self) -> tuple[tuple[int, int], ...]:
        """Where each step begins and ends on the device."""
        return find_step_windows(self.steps, self.kernels, self.window)

    @cached_property
    def plain_steps(self) -> tuple[Fraction, ...]:
        """The steps timed without the recorder, in nanoseconds; none where the recording has none."""
        steps = self.recording.steps.group_by("step", maintain_order=True).agg(ns=pl.col("duration_ns").sum())
        return tuple(map(Fraction, steps["ns"]))

    @property
    def is_serialized(self) -> bool:
        """Whether kernels ran one at a time, as Nsight Compute makes them: no gaps, and no order of a step."""
        return self.recording.manifest.source == "nsight compute"

    @property
    def has_steps(self) -> bool:
        """Whether a step's time means anything."""
        return bool(self.steps.height) and not self.is_serialized

    @property
    def has_gaps(self) -> bool:
        """Whether time between kernels means anything: not where operators of a CPU stand for kernels."""
        return not self.on_cpu and not self.is_serialized

    # --- What is asked of the clock most

    @property
    def wall_ns(self) -> int:
        return self.clock.wall_ns

    @property
    def num_steps(self) -> int:
        return self.clock.num_steps

    @property
    def steps_in_window(self) -> float:
        return self.clock.steps_in_window

    @property
    def recorded_step_ns(self) -> float:
        return self.clock.recorded_step_ns

    @property
    def busy_step_ns(self) -> float:
        return self.clock.busy_step_ns

    @property
    def step_ns(self) -> float:
        return self.clock.step_ns

    @property
    def idle_share(self) -> float:
        return self.clock.idle_share

    @cached_property
    def hardware(self) -> Hardware | None:
        """From the manifest of our own recordings, else by the device's name; None where it is not known."""
        environment = self.recording.manifest.environment
        return environment.hardware if environment else hardware.find(self.recording.manifest.device)

    @property
    def on_cpu(self) -> bool:
        return bool((self.kernels["kind"] == "cpu").all())

    def time_by(self, *columns: str, kernels: pl.DataFrame | None = None) -> pl.DataFrame:
        """Per value of `columns`: time_ns, share (of all GPU time) and count, the largest first. Null is `unknown`."""
        source = self.kernels if kernels is None else kernels
        named = [pl.col(c).fill_null(UNKNOWN) if source.schema[c] == pl.String else pl.col(c) for c in columns]
        grouped = source.group_by(*named, maintain_order=True).agg(pl.col("time_ns", "count").sum())
        share = pl.col("time_ns") / max(1, self.gpu_time_ns)
        return grouped.with_columns(share=share).sort("time_ns", *columns, descending=[True, *([False] * len(columns))])

    def coverage(self) -> dict[str, float]:
        """The share of GPU time whose class, phase and module are known."""
        total = max(1, self.gpu_time_ns)
        known = {
            "class": pl.col("class") != "other",
            "phase": pl.col("phase").is_not_null(),
            "module": pl.col("module").is_not_null(),
        }
        return {name: float(self.kernels.filter(test)["time_ns"].sum() / total) for name, test in known.items()}


def shares_by_launch(profile: Profile) -> dict[str, float]:
    """Of the kernels' time, by how they were launched: `op`, `graph` or `before` the window."""
    return dict(profile.time_by("launched").select("launched", "share").iter_rows())


def make_profile(recording: Recording, kept_in: Path | None = None) -> Profile:
    """`kept_in` is the folder the recording lies in, where a large one's attribution is kept for the next look."""
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
    return Profile(recording=recording, kernels=kernels, kept_in=kept_in)


def no_kernels(recording: Recording, num_ops: int) -> StepscopeError:
    has = f"{_name_file(recording)} has {num_ops} operators and no kernels"
    return StepscopeError(
        "the recording holds no kernel timeline",
        detail="; ".join((has, *recording.manifest.notes)),
        hint="record with CUDA activity: torch.profiler.profile(activities=[CPU, CUDA])",
    )


def no_time(recording: Recording) -> StepscopeError:
    manifest = recording.manifest
    match manifest.source:
        case _ if manifest.command:  # a recording of ours
            hint = f"record it again: {manifest.command}"
        case "nsight systems":
            hint = f"export it again: {EXPORT_COMMAND}"
        case "nsight compute":
            table = shlex.join(["stepscope", "explain", manifest.file or "FILE", "--table", "counters"])
            hint = f"count `gpu__time_duration.sum` as well, or: {table}"
        case _:
            hint = "record it again: torch.profiler.profile(activities=[CPU, CUDA])"
    return StepscopeError(
        f"no kernel in {_name_file(recording)} has a duration", detail="; ".join(manifest.notes), hint=hint
    )


def _name_file(recording: Recording) -> str:
    """The foreign file; a recording of ours comes from none."""
    return f"`{recording.manifest.file}`" if recording.manifest.file else "the recording"


def _attribute_once(recording: Recording, path: Path) -> pl.DataFrame:
    with suppress(OSError, DamagedTableError):  # not there yet, or damaged: made below
        return unpack(path)
    kernels = attribute_kernels(recording)
    # A full disk costs the next look its second, and nothing else.
    with suppress(OSError, pl.exceptions.PolarsError), replacing(path) as new:
        pack(kernels, new)
    return kernels


def code_digest() -> str:
    """Of the code that explains: what another version of it found out is not used."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]

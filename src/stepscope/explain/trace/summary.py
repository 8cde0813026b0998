"""A profile as one document with a versioned schema, for `--format json` and other programs.

Times are whole nanoseconds over the whole recording (`steps` is its number of steps). `gpu_time_ns` is the sum of all
kernel durations; classes, phases, modules and kernels each add up to it, including kernels launched before the window
and unknown phases. `devices` counts time once: classes that run alone on the device, overlap and idle add up to
`wall_ns`.
"""

from collections.abc import Sequence

import msgspec
import polars as pl

from stepscope.explain.trace.accounting import Account
from stepscope.explain.trace.profile import UNKNOWN, Profile, times_in_graphs
from stepscope.findings import Finding, joint_saving

SCHEMA = "stepscope.explain/2"


class ClassTime(msgspec.Struct, frozen=True, kw_only=True, rename={"kernel_class": "class"}):
    kernel_class: str
    time_ns: int
    share: float
    count: int


class PhaseTime(msgspec.Struct, frozen=True, kw_only=True):
    phase: str
    time_ns: int
    share: float
    count: int
    classes: tuple[ClassTime, ...]


class KernelTime(msgspec.Struct, frozen=True, kw_only=True, rename={"kernel_class": "class"}):
    name: str
    short: str
    kernel_class: str
    count: int
    time_ns: int
    share: float
    min_ns: int
    mean_ns: float
    max_ns: int


class ModuleTime(msgspec.Struct, frozen=True, kw_only=True):
    module: str
    layer: int | None
    time_ns: int
    share: float
    count: int


class Coverage(msgspec.Struct, frozen=True, kw_only=True, rename={"kernel_class": "class"}):
    """Shares of GPU time whose class, phase and module are known, and of that inside layers."""

    kernel_class: float
    phase: float
    module: float
    layer: float


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """`classes` + `overlap_ns` + `idle_ns` = `wall_ns`."""

    wall_ns: int
    busy_ns: int
    idle_ns: int
    overlap_ns: int
    communication_hidden_ns: int
    communication_exposed_ns: int
    classes: dict[str, int]


class SweptStream(msgspec.Struct, frozen=True, kw_only=True):
    stream: int
    account: Swept


class SweptDevice(msgspec.Struct, frozen=True, kw_only=True):
    device: int
    process: int | None
    account: Swept
    streams: tuple[SweptStream, ...]


class LaunchTime(msgspec.Struct, frozen=True, kw_only=True):
    """`op`: launched by a recorded call; `graph`: by the replay of a CUDA graph; `before`: launch not recorded."""

    launched: str
    time_ns: int
    count: int


class MatchedTime(msgspec.Struct, frozen=True, kw_only=True):
    """Time of CUDA graphs whose operators and modules are known from the captured order (`capture`) or from `eager`
    launches of the same kernels, whose modules are known from the code that was `compiled`, whose layers are known from
    `repetition`, or these and their modules from the `order` of kernels; the rest is `unknown`."""

    matched: str
    time_ns: int
    count: int


class StepClock(msgspec.Struct, frozen=True, kw_only=True):
    """The step by which all figures per step are divided: `busy_ns` + `idle_ns` = `step_ns`, mean over devices. Null if
    kernels ran one at a time. `steps` counts work launched before the recording began; times of the whole recording
    divided by it are per step."""

    kind: str  # of the steps that were timed: `unprofiled` or `profiled`
    steps: float
    step_ns: float
    busy_ns: float | None
    idle_ns: float | None
    idle_share: float | None
    profiled_ns: float
    unprofiled_ns: int | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = SCHEMA
    file: str
    source: str
    device: str
    rank: int | None
    world_size: int | None
    steps: int
    wall_ns: int
    step_ns: float  # that of `clock`
    clock: StepClock
    gpu_time_ns: int
    busy_ns: int
    idle_ns: int | None  # null if kernels ran one at a time
    overlap_ns: int
    classes: tuple[ClassTime, ...]
    phases: tuple[PhaseTime, ...]
    modules: tuple[ModuleTime, ...]
    kernels: tuple[KernelTime, ...]
    coverage: Coverage
    launched: tuple[LaunchTime, ...]
    graphs: tuple[MatchedTime, ...]
    devices: tuple[SweptDevice, ...]
    findings: tuple[Finding, ...]
    joint_saving_ns: int | None  # of all findings together, per step
    notes: tuple[str, ...]


def summarise(profile: Profile, findings: Sequence[Finding]) -> Summary:
    manifest = profile.recording.manifest
    covered = profile.coverage()
    joint = joint_saving(findings)
    accounts = [device.whole for device in profile.devices]
    return Summary(
        file=manifest.file,
        source=manifest.source,
        device=manifest.device,
        rank=manifest.rank,
        world_size=manifest.world_size,
        steps=profile.num_steps,
        wall_ns=profile.wall_ns,
        step_ns=profile.step_ns,
        clock=describe_clock(profile),
        gpu_time_ns=profile.gpu_time_ns,
        busy_ns=sum(one.busy_ns for one in accounts),
        idle_ns=None if profile.is_serialized else sum(one.idle_ns for one in accounts),
        overlap_ns=sum(one.overlap_ns for one in accounts),
        classes=_classes(profile, profile.kernels),
        phases=tuple(
            PhaseTime(
                **row,
                classes=_classes(profile, profile.kernels.filter(pl.col("phase").fill_null(UNKNOWN) == row["phase"])),
            )
            for row in profile.time_by("phase").iter_rows(named=True)
        ),
        modules=tuple(ModuleTime(**row) for row in profile.time_by("module", "layer").iter_rows(named=True)),
        kernels=kernel_times(profile),
        coverage=Coverage(
            kernel_class=covered["class"], phase=covered["phase"], module=covered["module"], layer=profile.layer_share
        ),
        launched=tuple(LaunchTime(**row) for row in profile.time_by("launched").drop("share").iter_rows(named=True)),
        graphs=tuple(MatchedTime(**row) for row in times_in_graphs(profile).drop("share").iter_rows(named=True)),
        devices=tuple(
            SweptDevice(
                device=one.device,
                process=one.process,
                account=_swept(one.whole),
                streams=tuple(SweptStream(stream=key, account=_swept(part)) for key, part in one.streams.items()),
            )
            for one in profile.devices
        ),
        findings=tuple(findings),
        joint_saving_ns=joint.saving_ns if joint else None,
        notes=profile.notes,
    )


def describe_clock(profile: Profile) -> StepClock:
    clock, is_known = profile.clock, not profile.is_serialized
    return StepClock(
        kind=clock.kind,
        steps=clock.num_steps,
        step_ns=clock.step_ns,
        busy_ns=clock.busy_ns if is_known else None,
        idle_ns=clock.idle_ns if is_known else None,
        idle_share=clock.idle_share if is_known else None,
        profiled_ns=clock.profiled_ns,
        unprofiled_ns=clock.unprofiled_ns,
    )


def kernel_times(profile: Profile) -> tuple[KernelTime, ...]:
    """Return one row per kernel name, the largest time first."""
    # The short name and the class follow from the name: grouping by all three takes three times as long.
    grouped = profile.kernels.group_by("name", maintain_order=True).agg(
        pl.col("short", "class").first(),
        pl.col("time_ns", "count").sum(),
        pl.col("min_ns").min(),
        pl.col("max_ns").max(),
    )
    told = grouped.with_columns(mean_ns=pl.col("time_ns") / pl.col("count"))
    rows = told.sort("time_ns", "name", descending=[True, False]).rename({"class": "kernel_class"})
    # One by one: polars multiplies a column by the reciprocal of a number, which changes the last digit.
    total = max(1, profile.gpu_time_ns)
    return tuple(KernelTime(**row, share=row["time_ns"] / total) for row in rows.iter_rows(named=True))


def _classes(profile: Profile, kernels: pl.DataFrame) -> tuple[ClassTime, ...]:
    times = profile.time_by("class", kernels=kernels).rename({"class": "kernel_class"})
    return tuple(ClassTime(**row) for row in times.iter_rows(named=True))


def _swept(account: Account) -> Swept:
    return Swept(**{name: getattr(account, name) for name in Swept.__struct_fields__})

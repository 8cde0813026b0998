"""A recording: a directory that outlives the run and can be read without torch.

The directory contains `manifest.json` (what ran, where, with which versions, and what is missing or unreliable) and one
Parquet file per table. It is written to a temporary directory and renamed when complete, so a directory with a manifest
is complete. Only a recording is ever replaced, and only if its directory contains nothing else. Files from other tools
become the same `Recording` in memory, so every analysis works on both.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import polars as pl

from stepscope.errors import StepscopeError
from stepscope.files import decode, find_foreign, is_of_kind, is_result_of, read_plain, replacing, restore, writing
from stepscope.recording import tables
from stepscope.recording.memory.labels import OutOfMemoryFacts
from stepscope.recording.parquet import DamagedTableError, read_tables, write_table
from stepscope.recording.rows.bench import NO_SIZES, ConfigSizes, Doubt, Environment
from stepscope.recording.rows.loop_run import LoopFacts
from stepscope.recording.validation import MisfitError, Repairs, check, check_references, settle
from stepscope.spec import Case

SCHEMA = "stepscope.recording/1"
MANIFEST_NAME = "manifest.json"
RAW_NAME = "raw"  # the original file of the recorder, with its own suffix
# Most events start or end a row of memory. Totals are kept per event, so a manifest that claims many more events than
# rows would exhaust the memory.
_EVENTS_OF_ANY_FILE, _MOST_EVENTS_PER_ROW = 1 << 24, 8

Source = Literal["pytorch profiler", "nsight systems", "nsight compute", "memory snapshot", "stepscope"]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
LongCount = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
StepTime = Annotated[int, msgspec.Meta(ge=1, le=tables.LONGEST_NS)]


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """The overhead of recording: median times of unprofiled, profiled, and profiled and annotated steps."""

    plain_ns: StepTime
    recorded_ns: StepTime | None = None
    annotated_ns: StepTime | None = None


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a memory recording. `estimated_bytes` is the total of allocations whose size is an estimate, because
    they were made before the file begins."""

    events: LongCount
    estimated_bytes: LongCount = 0
    # Only in recordings of stepscope.
    device: str = ""
    allocator_peak_bytes: LongCount | None = None
    allocator_peak_reserved_bytes: LongCount | None = None
    watched_steps: tuple[Count, ...] = ()
    unmatched_steps: tuple[Count, ...] = ()
    oom: OutOfMemoryFacts | None = None  # if memory ran out


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What was recorded. Nothing here identifies a person, a machine or a directory."""

    schema: str = SCHEMA
    source: Source
    file: str = ""  # base name of a file from another tool
    device: str = ""  # device name from the driver
    device_sms: Count | None = None
    rank: Count | None = None
    world_size: Count | None = None
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    shapes_recorded: bool = False
    modules_recorded: bool = False
    # For the user: what is missing from the file, and what was left out while reading it.
    notes: tuple[str, ...] = ()
    # Only in recordings of stepscope.
    case: Case | None = None
    environment: Environment | None = None
    command: str = ""
    started: str = ""
    doubts: tuple[Doubt, ...] = ()
    overhead: Overhead | None = None
    parameters: LongCount | None = None
    optimizer: str | None = None  # what ran: the setting, or the class that a factory created
    sizes: ConfigSizes = NO_SIZES
    # With hardware counters: theoretical FLOPs of one forward pass by kernel class.
    forward_flops: dict[str, LongCount] | None = None
    compiled: bool = False
    memory: MemoryFacts | None = None
    loop: LoopFacts | None = None  # of a script that stepscope recorded
    # Mixtures of experts: the tokens of each expert in one step, by the module that computes them.
    expert_tokens: dict[str, tuple[Count, ...]] = msgspec.field(default_factory=dict)
    # On disk only: the tables that were written; None in recordings from earlier versions.
    tables: tuple[str, ...] | None = None
    digests: dict[str, str] | None = None  # of the table files


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The manifest and the tables, with the columns of `recording.tables`."""

    manifest: Manifest
    kernels: pl.DataFrame = field(default_factory=partial(tables.empty, "kernels"))
    launches: pl.DataFrame = field(default_factory=partial(tables.empty, "launches"))
    ops: pl.DataFrame = field(default_factory=partial(tables.empty, "ops"))
    ranges: pl.DataFrame = field(default_factory=partial(tables.empty, "ranges"))
    links: pl.DataFrame = field(default_factory=partial(tables.empty, "links"))
    captured: pl.DataFrame = field(default_factory=partial(tables.empty, "captured"))
    compiled_calls: pl.DataFrame = field(default_factory=partial(tables.empty, "compiled_calls"))
    steps: pl.DataFrame = field(default_factory=partial(tables.empty, "steps"))
    counters: pl.DataFrame = field(default_factory=partial(tables.empty, "counters"))
    allocations: pl.DataFrame = field(default_factory=partial(tables.empty, "allocations"))
    segments: pl.DataFrame = field(default_factory=partial(tables.empty, "segments"))
    spans: pl.DataFrame = field(default_factory=partial(tables.empty, "spans"))
    stacks: pl.DataFrame = field(default_factory=partial(tables.empty, "stacks"))
    saved: pl.DataFrame = field(default_factory=partial(tables.empty, "saved"))

    def with_manifest(self, **changes: object) -> "Recording":
        return replace(self, manifest=msgspec.structs.replace(self.manifest, **changes))


TABLE_NAMES = tuple(one.name for one in fields(Recording) if one.name != "manifest")
_KEPT = r"attributed-[0-9a-f]{12}\.(parquet|\d+)|findings-[0-9a-f]{12}\.json|activity-[0-9a-f]{12}\.bin"
_RAW = rf"{RAW_NAME}\.(json|csv|pickle|sqlite|nsys-rep|qdrep)(\.gz)?"  # files that recorders write
_PARTS = re.compile(rf"{re.escape(MANIFEST_NAME)}|({'|'.join(TABLE_NAMES)})\.parquet|{_RAW}|{_KEPT}")


def save(
    recording: Recording, folder: Path, *, raw: Path | None = None, force: bool = False, command: str = ""
) -> None:
    """Write the whole recording or nothing. `raw` is the original file of the recorder and is moved in. `check_place`
    defines what may be replaced."""
    check_place(folder, force=force, command=command)
    with (
        writing(folder, if_full="nothing was saved", hint="save to a directory on another disk"),
        _telling_polars_errors(),
        replacing(folder, last=MANIFEST_NAME) as building,
    ):
        building.mkdir()
        written = tuple(name for name in TABLE_NAMES if getattr(recording, name).height)
        digests = {name: write_table(getattr(recording, name), building / f"{name}.parquet") for name in written}
        if raw is not None:
            kept_name = RAW_NAME + "".join(raw.suffixes)
            assert _is_part(kept_name), "other files would block replacing the recording"
            shutil.move(raw, building / kept_name)
        manifest = msgspec.structs.replace(recording.manifest, tables=written, digests=digests)
        content = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        (building / MANIFEST_NAME).write_bytes(content + b"\n")


def check_place(folder: Path, *, force: bool, command: str = "") -> None:
    """Raise StepscopeError if a recording must not be written here. A recording is replaced with `force`, or by the
    `command` that made it. A directory with other files in it is never replaced."""
    restore(folder)
    if not folder.exists() or _is_empty_folder(folder):
        return
    if not is_of_kind(folder / MANIFEST_NAME, SCHEMA):
        raise StepscopeError(
            f"`{folder}` exists and is not a recording",
            detail="stepscope only replaces recordings",
            hint="choose another directory",
        )
    foreign = find_foreign(folder, _is_part)
    if foreign is not None:
        raise StepscopeError(
            f"`{folder}` contains a file that is not part of the recording: `{foreign}`",
            detail="replacing the recording would delete it",
            hint=f"move `{folder / foreign}` elsewhere, or choose another directory",
        )
    if not force and not (command and is_result_of(folder / MANIFEST_NAME, command)):
        raise StepscopeError(f"`{folder}` already exists", hint="--force, or choose another directory")


def _is_empty_folder(path: Path) -> bool:
    try:
        return path.is_dir() and not any(path.iterdir())
    except OSError:  # a directory that cannot be listed may not be empty
        return False


@contextmanager
def _telling_polars_errors() -> Iterator[None]:
    """Turn polars errors into OSError: polars has its own error for a full disk."""
    try:
        yield
    except pl.exceptions.PolarsError as error:
        if "No space left" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        raise OSError(errno.EIO, str(error).splitlines()[0][:200]) from None


def is_recording(path: Path) -> bool:
    """Whether a directory should be read as a recording. `load` checks whether it is a valid one."""
    restore(path)
    return path.is_dir() and (path / MANIFEST_NAME).is_file()


def delete(folder: Path) -> bool:
    """Delete a recording and its cached results, unless the directory contains other files. Return whether it did."""
    is_own = find_foreign(folder, _is_part) is None
    if is_own:
        shutil.rmtree(folder, ignore_errors=True)
    return is_own


def _is_part(name: str) -> bool:
    """Whether a file belongs to a recording, including the results that `explain` caches."""
    return _PARTS.fullmatch(name) is not None


def load(folder: Path) -> Recording:
    """Read a recording; a missing table is empty. Raise StepscopeError if it is damaged."""
    try:
        manifest = decode(read_plain(folder / MANIFEST_NAME), Manifest)
    except (msgspec.DecodeError, OSError) as error:
        raise _damaged(folder, f"`{MANIFEST_NAME}`: {error}") from None
    if manifest.schema != SCHEMA:
        raise StepscopeError(
            f"unsupported recording version in `{folder}`: `{manifest.schema[:60]}`", detail=f"expected `{SCHEMA}`"
        )
    manifest = _with_current_classes(manifest)
    paths = {name: folder / f"{name}.parquet" for name in TABLE_NAMES}
    present = {name: path for name, path in paths.items() if path.is_file()}
    # A later version may have written tables that are unknown here.
    missing = [name for name in manifest.tables or () if name in paths and name not in present]
    if missing:
        raise StepscopeError(f"incomplete recording: `{missing[0]}.parquet` is missing from `{folder}`")
    try:
        frames = read_tables(present, manifest.digests or {})
    except (DamagedTableError, OSError) as error:
        raise _damaged(folder, str(error)) from None
    recording = Recording(manifest=msgspec.structs.replace(manifest, tables=None, digests=None), **frames)
    rows = recording.allocations.height + recording.segments.height
    if manifest.memory is not None and manifest.memory.events > _EVENTS_OF_ANY_FILE + _MOST_EVENTS_PER_ROW * rows:
        told = f"{manifest.memory.events:,} events are too many for {rows:,} rows"
        raise _damaged(folder, f"`{MANIFEST_NAME}`: {told}")
    try:
        for name, frame in frames.items():
            check(name, frame)
        for name, frame in frames.items():
            check_references(frame, _limits(recording, name))
    except MisfitError as error:
        raise _damaged(folder, f"`{name}.parquet`: {error}") from None
    repairs = Repairs()
    settled = {name: settle(name, frame, repairs) for name, frame in frames.items()}
    notes = (*manifest.notes, *repairs.notes())
    return Recording(manifest=msgspec.structs.replace(recording.manifest, notes=notes), **settled)


def _with_current_classes(manifest: Manifest) -> Manifest:
    """Earlier versions wrote the class `GEMM` in lower case."""
    flops = manifest.forward_flops
    if not flops or "gemm" not in flops:
        return manifest
    renamed = {"GEMM" if name == "gemm" else name: value for name, value in flops.items()}
    return msgspec.structs.replace(manifest, forward_flops=renamed)


def _limits(recording: Recording, table: str) -> dict[str, int]:
    """The upper limits of columns that refer to rows of other tables."""
    facts = recording.manifest.memory
    match table:
        case "counters":
            return {"kernel": recording.kernels.height}
        case "allocations" | "segments" if facts is not None:
            last = recording.stacks["stack"].max()
            stacks = {"stack": last + 1 if isinstance(last, int) else 0} if table == "allocations" else {}
            return {"start_event": facts.events, "end_event": facts.events, **stacks}
        case "spans" if facts is not None:
            return {"start_event": facts.events + 1, "end_event": facts.events + 1}
        case _:
            return {}


def _damaged(folder: Path, what: str) -> StepscopeError:
    return StepscopeError(f"cannot read the recording `{folder}`", detail=what.partition("\n")[0][:300])


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

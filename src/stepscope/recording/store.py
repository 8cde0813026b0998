"""A recording: what happened, in a folder that outlives the run and is read without torch.

A folder holds `manifest.json` (what ran, where, with which versions, and what is missing or doubtful) and one Parquet
file a table. It is written beside its place and moved there when it is whole, so that a folder with a manifest is
complete. Only a recording is ever replaced, and only where nothing else is in its folder. Foreign files become the same
`Recording` in memory; what is asked of one can be asked of the other.
"""

import errno
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
from stepscope.recording.parquet import DamagedTableError, read_tables, write_table
from stepscope.recording.rows.bench import Doubt, Environment
from stepscope.recording.validation import MisfitError, Repairs, check, check_references, settle
from stepscope.spec import Case

SCHEMA = "stepscope.recording/1"
MANIFEST_NAME = "manifest.json"
RAW_NAME = "raw"  # the recorder's own file, kept as it came, with its own ending
# An event begins or ends a row of memory, or is one of a few about it. Totals are kept for each event: more than these
# would take all the memory there is.
_EVENTS_OF_ANY_FILE, _MOST_EVENTS_PER_ROW = 1 << 24, 8

Source = Literal["pytorch profiler", "nsight systems", "nsight compute", "memory snapshot", "stepscope"]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
LongCount = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
StepTime = Annotated[int, msgspec.Meta(ge=1, le=tables.LONGEST_NS)]


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """What recording cost: medians of the step without anything, with the recorder, and with the annotation too."""

    plain_ns: StepTime
    recorded_ns: StepTime | None = None
    annotated_ns: StepTime | None = None


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording of memory says about itself. `estimated_bytes` is how much of it is in pieces whose size had to
    be guessed, because the file does not go back to when they were taken."""

    events: LongCount
    estimated_bytes: LongCount = 0
    # For recordings of our own.
    device: str = ""
    allocator_peak_bytes: LongCount | None = None
    allocator_peak_reserved_bytes: LongCount | None = None
    watched_steps: tuple[Count, ...] = ()
    unmatched_steps: tuple[Count, ...] = ()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording is of. Nothing here names a person, a machine or a folder."""

    schema: str = SCHEMA
    source: Source
    file: str = ""  # the base name of the foreign file
    device: str = ""  # what the driver calls the device
    device_sms: Count | None = None
    rank: Count | None = None
    world_size: Count | None = None
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    shapes_recorded: bool = False
    modules_recorded: bool = False
    # What is missing from the file and what was set aside while reading it, in words for the user.
    notes: tuple[str, ...] = ()
    # For recordings of our own.
    case: Case | None = None
    environment: Environment | None = None
    command: str = ""
    started: str = ""
    doubts: tuple[Doubt, ...] = ()
    overhead: Overhead | None = None
    parameters: LongCount | None = None
    optimizer: str | None = None  # what ran: the setting, or the class of a factory's own
    # With hardware counters: operations of one forward pass by the textbook, by class of kernel.
    forward_flops: dict[str, LongCount] | None = None
    compiled: bool = False
    memory: MemoryFacts | None = None
    # On the disk only: the tables that were written; None in recordings from before this was kept.
    tables: tuple[str, ...] | None = None
    digests: dict[str, str] | None = None  # of their files


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The manifest and its tables, in the columns of `recording.tables`."""

    manifest: Manifest
    kernels: pl.DataFrame = field(default_factory=partial(tables.empty, "kernels"))
    launches: pl.DataFrame = field(default_factory=partial(tables.empty, "launches"))
    ops: pl.DataFrame = field(default_factory=partial(tables.empty, "ops"))
    ranges: pl.DataFrame = field(default_factory=partial(tables.empty, "ranges"))
    links: pl.DataFrame = field(default_factory=partial(tables.empty, "links"))
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
_KEPT = r"attributed-[0-9a-f]{12}\.(parquet|\d+)|findings-[0-9a-f]{12}\.json"
_RAW = rf"{RAW_NAME}\.(json|csv|pickle|sqlite|nsys-rep|qdrep)(\.gz)?"  # what recorders write
_PARTS = re.compile(rf"{re.escape(MANIFEST_NAME)}|({'|'.join(TABLE_NAMES)})\.parquet|{_RAW}|{_KEPT}")


def save(
    recording: Recording, folder: Path, *, raw: Path | None = None, force: bool = False, command: str = ""
) -> None:
    """Writes the whole recording or nothing. `raw` is moved in as the recorder's own file. `check_place` says what may
    be replaced."""
    check_place(folder, force=force, command=command)
    with (
        writing(folder, if_full="nothing was kept", hint="a folder on another disk"),
        _telling_polars_errors(),
        replacing(folder, last=MANIFEST_NAME) as building,
    ):
        building.mkdir()
        written = tuple(name for name in TABLE_NAMES if getattr(recording, name).height)
        digests = {name: write_table(getattr(recording, name), building / f"{name}.parquet") for name in written}
        if raw is not None:
            kept_name = RAW_NAME + "".join(raw.suffixes)
            assert _is_part(kept_name), "or the recording could never be replaced"
            shutil.move(raw, building / kept_name)
        manifest = msgspec.structs.replace(recording.manifest, tables=written, digests=digests)
        content = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        (building / MANIFEST_NAME).write_bytes(content + b"\n")


def check_place(folder: Path, *, force: bool, command: str = "") -> None:
    """Refuses a place that a recording must not take. A recording is replaced by `force`, or by the `command` that made
    it; a folder that is neither empty nor a recording, or has something else in it too, never is."""
    restore(folder)
    if not folder.exists() or _is_empty_folder(folder):
        return
    if not is_of_kind(folder / MANIFEST_NAME, SCHEMA):
        raise StepscopeError(
            f"`{folder}` exists and is not a recording", detail="only a recording is replaced", hint="another folder"
        )
    foreign = find_foreign(folder, _is_part)
    if foreign is not None:
        raise StepscopeError(
            f"`{folder}` has something in it that is not part of the recording: `{foreign}`",
            detail="replacing the recording would delete it",
            hint=f"move `{folder / foreign}` elsewhere, or save to another folder",
        )
    if not force and not (command and is_result_of(folder / MANIFEST_NAME, command)):
        raise StepscopeError(f"`{folder}` exists", hint="--force, or another folder")


def _is_empty_folder(path: Path) -> bool:
    try:
        return path.is_dir() and not any(path.iterdir())
    except OSError:  # one that cannot be listed may have anything in it
        return False


@contextmanager
def _telling_polars_errors() -> Iterator[None]:
    """A full disk comes out of polars as an error of its own."""
    try:
        yield
    except pl.exceptions.PolarsError as error:
        full = "No space left" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error).splitlines()[0][:200]) from None


def is_recording(path: Path) -> bool:
    """Whether a folder is to be read as a recording. Whether it is one, `load` finds out."""
    restore(path)
    return path.is_dir() and (path / MANIFEST_NAME).is_file()


def delete(folder: Path) -> bool:
    """Deletes a recording and what was kept beside it, unless something else is in the folder."""
    is_own = find_foreign(folder, _is_part) is None
    if is_own:
        shutil.rmtree(folder, ignore_errors=True)
    return is_own


def _is_part(name: str) -> bool:
    """Whether a file is one that a recording consists of, or that was found out about it and kept (`explain`)."""
    return _PARTS.fullmatch(name) is not None


def load(folder: Path) -> Recording:
    """Reads a recording of any table that is there; one that is not was empty. Raises StepscopeError for one that is
    damaged, with the place."""
    try:
        manifest = decode(read_plain(folder / MANIFEST_NAME), Manifest)
    except (msgspec.DecodeError, OSError) as error:
        raise _damaged(folder, f"`{MANIFEST_NAME}`: {error}") from None
    if manifest.schema != SCHEMA:
        raise StepscopeError(
            f"`{folder}` is a recording of another version: `{manifest.schema[:60]}`", detail=f"expected `{SCHEMA}`"
        )
    manifest = _with_current_classes(manifest)
    paths = {name: folder / f"{name}.parquet" for name in TABLE_NAMES}
    present = {name: path for name, path in paths.items() if path.is_file()}
    # A later version may have written tables that this one does not know.
    missing = [name for name in manifest.tables or () if name in paths and name not in present]
    if missing:
        raise StepscopeError(f"the recording `{folder}` has lost its `{missing[0]}.parquet`")
    try:
        frames = read_tables(present, manifest.digests or {})
    except (DamagedTableError, OSError) as error:
        raise _damaged(folder, str(error)) from None
    recording = Recording(manifest=msgspec.structs.replace(manifest, tables=None, digests=None), **frames)
    rows = recording.allocations.height + recording.segments.height
    if manifest.memory is not None and manifest.memory.events > _EVENTS_OF_ANY_FILE + _MOST_EVENTS_PER_ROW * rows:
        told = f"it says {manifest.memory.events:,} events, more than {rows:,} rows can tell of"
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
    """What the numbers that point into other tables stay below."""
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

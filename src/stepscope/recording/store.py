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
from typing import Literal

import msgspec
import polars as pl

from stepscope.errors import StepscopeError
from stepscope.files import find_foreign, is_of_kind, is_result_of, replacing, restore, writing
from stepscope.recording import tables
from stepscope.recording.bench import Doubt, Environment
from stepscope.spec import Case

SCHEMA = "stepscope.recording/1"
MANIFEST_NAME = "manifest.json"
RAW_NAME = "raw"  # the recorder's own file, kept as it came, with its own ending

Source = Literal["pytorch profiler", "nsight systems", "nsight compute", "memory snapshot", "stepscope"]


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """What recording cost: medians of the step without anything, with the recorder, and with the annotation too."""

    plain_ns: int
    recorded_ns: int | None = None
    annotated_ns: int | None = None


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording of memory says about itself. `estimated_bytes` is how much of it is in pieces whose size had to
    be guessed, because the file does not go back to when they were taken."""

    events: int
    estimated_bytes: int = 0
    # For recordings of our own.
    device: str = ""
    allocator_peak_bytes: int | None = None
    allocator_peak_reserved_bytes: int | None = None
    watched_steps: tuple[int, ...] = ()
    unmatched_steps: tuple[int, ...] = ()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording is of. Nothing here names a person, a machine or a folder."""

    schema: str = SCHEMA
    source: Source
    file: str = ""  # the base name of the foreign file
    device: str = ""  # what the driver calls the device
    device_sms: int | None = None
    rank: int | None = None
    world_size: int | None = None
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
    parameters: int | None = None
    # With hardware counters: operations of one forward pass by the textbook, by class of kernel.
    forward_flops: dict[str, int] | None = None
    compiled: bool = False
    memory: MemoryFacts | None = None
    # On the disk only: the tables that were written; None in recordings from before this was kept.
    tables: tuple[str, ...] | None = None


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
_PARTS = re.compile(rf"{re.escape(MANIFEST_NAME)}|({'|'.join(TABLE_NAMES)})\.parquet|{RAW_NAME}(\.[^/]+)?|{_KEPT}")


def save(
    recording: Recording, folder: Path, *, raw: Path | None = None, force: bool = False, command: str = ""
) -> None:
    """Writes the whole recording or nothing. `raw` is moved in as the recorder's own file. `check_place` says what may
    be replaced."""
    check_place(folder, force=force, command=command)
    with (
        writing(folder, if_full="nothing was kept", hint="a folder on another disk"),
        _telling_polars_errors(),
        replacing(folder) as building,
    ):
        building.mkdir()
        written = tuple(name for name in TABLE_NAMES if getattr(recording, name).height)
        for name in written:
            frame: pl.DataFrame = getattr(recording, name)
            frame.write_parquet(building / f"{name}.parquet", compression="zstd", compression_level=1)
        if raw is not None:
            shutil.move(raw, building / (RAW_NAME + "".join(raw.suffixes)))
        manifest = msgspec.structs.replace(recording.manifest, tables=written)
        content = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        (building / MANIFEST_NAME).write_bytes(content + b"\n")


def check_place(folder: Path, *, force: bool, command: str = "") -> None:
    """Refuses a place that a recording must not take. A recording is replaced by `force`, or by the `command` that made
    it; a folder that is not a recording, or has something else in it too, never is."""
    restore(folder)
    if not folder.exists():
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
    """Reads a recording of any table that is there; one that is not was empty."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST_NAME).read_bytes(), type=Manifest)
        if manifest.schema != SCHEMA:
            raise StepscopeError(
                f"`{folder}` is a recording of another version: `{manifest.schema[:60]}`", detail=f"expected `{SCHEMA}`"
            )
        missing = [name for name in manifest.tables or () if not (folder / f"{name}.parquet").is_file()]
        if missing:
            raise StepscopeError(f"the recording `{folder}` has lost its `{missing[0]}.parquet`")
        present = {name: folder / f"{name}.parquet" for name in TABLE_NAMES if (folder / f"{name}.parquet").is_file()}
        frames = {name: _read_table(name, path) for name, path in present.items()}
    except (msgspec.DecodeError, OSError, pl.exceptions.PolarsError) as error:
        line = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise StepscopeError(f"cannot read the recording `{folder}`", detail=line) from None
    return Recording(manifest=msgspec.structs.replace(manifest, tables=None), **frames)


def _read_table(name: str, path: Path) -> pl.DataFrame:
    return tables.conform(name, pl.read_parquet(path, columns=list(tables.SCHEMAS[name])))


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

"""The activity of a rank as bytes: kept next to its recording, and sent between processes.

It is written where the rank ran, with the recording, so that a page over hundreds of ranks reads these files and not
the recordings. The name has a digest of the code, because another version of the code may compute something else: such
a file is not read, and the activity is computed again from the recording.
"""

import hashlib
import io
from contextlib import suppress
from pathlib import Path

import msgspec
import polars as pl

from stepscope.explain.ranks.activity import RankActivity, RankTotals, reduce_rank
from stepscope.explain.trace.extent import StepExtent
from stepscope.explain.trace.profile import code_digest, make_profile
from stepscope.files import write_atomically
from stepscope.recording import store
from stepscope.recording.compact import compact
from stepscope.recording.store import Manifest, Recording

_DIGEST_BYTES = 16
_FRAMES = ("collectives", "running", "computes", "loading", "phases", "host", "pauses", "work")


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    manifest: Manifest
    windows: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]
    totals: RankTotals
    on_cpu: bool
    has_gaps: bool
    unprofiled_ns: int | None
    unprofiled_steps: tuple[int, ...]
    frames: dict[str, bytes]  # Arrow


class DamagedActivityError(ValueError):
    """The bytes are not as they were written."""


def encode(activity: RankActivity) -> bytes:
    frames = {name: getattr(activity, name) for name in _FRAMES} | {"steps": activity.extent.steps}
    stored = _Stored(
        manifest=activity.manifest,
        windows=activity.extent.windows,
        notes=activity.extent.notes,
        totals=activity.totals,
        on_cpu=activity.on_cpu,
        has_gaps=activity.has_gaps,
        unprofiled_ns=activity.unprofiled_ns,
        unprofiled_steps=activity.unprofiled_steps,
        frames={name: _write_frame(frame) for name, frame in frames.items()},
    )
    content = msgspec.msgpack.encode(stored)
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() + content


def _write_frame(frame: pl.DataFrame) -> bytes:
    target = io.BytesIO()
    frame.write_ipc(target, compression="zstd")
    return target.getvalue()


def decode(packed: bytes) -> RankActivity:
    """Return what `encode` was given. Raise DamagedActivityError if the bytes are not what it returned: polars may
    crash on others."""
    content = packed[_DIGEST_BYTES:]
    if hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() != packed[:_DIGEST_BYTES]:
        raise DamagedActivityError("changed or damaged after it was written")
    stored = msgspec.msgpack.decode(content, type=_Stored)
    frames = {name: pl.read_ipc(io.BytesIO(stored.frames[name])) for name in (*_FRAMES, "steps")}
    extent = StepExtent(steps=frames.pop("steps"), windows=stored.windows, notes=stored.notes)
    return RankActivity(
        manifest=stored.manifest,
        extent=extent,
        totals=stored.totals,
        on_cpu=stored.on_cpu,
        has_gaps=stored.has_gaps,
        unprofiled_ns=stored.unprofiled_ns,
        unprofiled_steps=stored.unprofiled_steps,
        **frames,
    )


def _name_file(folder: Path) -> Path:
    return folder / f"activity-{code_digest()}.bin"


def read_activity(folder: Path) -> RankActivity | None:
    """Return the activity that is kept with a recording; None if there is none of this version of the code."""
    with suppress(OSError, DamagedActivityError):
        return decode(_name_file(folder).read_bytes())
    return None


def keep_activity(activity: RankActivity, folder: Path) -> None:
    with suppress(OSError):  # a full disk only costs time on the next call
        write_atomically(_name_file(folder), encode(activity))


def save_rank(recording: Recording, folder: Path, *, force: bool = False, command: str = "") -> RankActivity:
    """Save the recording of one rank of many: what pages over ranks need, with its activity, which is returned."""
    reduced = compact(recording)
    activity = reduce_rank(make_profile(reduced))
    store.save(reduced, folder, force=force, command=command)
    keep_activity(activity, folder)
    return activity

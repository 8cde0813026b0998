"""Checkpoints on disk: whole or not there.

A checkpoint is two files: the state, and a small manifest that says how many bytes it must have and their digest. Both
are written aside, forced to the disk and renamed, the manifest last: a checkpoint exists from the moment its manifest
does. A kill or a power cut at any moment leaves the one before it. What the state is, is the writer's business; here it
is bytes.
"""

import hashlib
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import decode, read_plain, write_atomically, writing
from stepscope.spec import Training

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

FOLDER_NAME = "checkpoints"
_OWN = re.compile(r"step-(\d{8,})\.(pt|json|part|json(\.\d+)?\.part)")
_KEPT = 2  # the newest, and one to fall back on by hand
IF_FULL = "the checkpoint before it is whole; free some space and the same command goes on from it"


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """`training` is what must be the same for a run to go on from here."""

    step: int
    bytes: int
    sha256: str
    training: Training
    data_digest: str = ""
    schema: str = "stepscope.checkpoint/1"


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    manifest: CheckpointManifest
    path: Path  # of the state


def save(
    folder: Path, step: int, training: Training, data_digest: str, write: Callable[[IO[bytes]], None]
) -> Checkpoint:
    """What `write` writes becomes the checkpoint of `step`; the oldest ones beyond the newest two go."""
    path, manifest_path = _paths(folder, step)
    with writing(path, if_full=IF_FULL):
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        try:
            _write_state(part, write)
            manifest = CheckpointManifest(
                step=step,
                bytes=part.stat().st_size,
                sha256=_digest(part),
                training=training.identity,
                data_digest=data_digest,
            )
            part.replace(path)
            write_atomically(manifest_path, msgspec.json.encode(manifest))
        except BaseException:
            _forget_orphans(folder, step)
            raise
        _forget_old(folder)
        _forget_orphans(folder, step)
    return Checkpoint(manifest=manifest, path=path)


def newest(folder: Path) -> Checkpoint | None:
    """The newest one, proven whole; None where there is none. A damaged one is an error: what wrote it was not us."""
    steps = _steps(folder)
    if not steps:
        return None
    path, manifest_path = _paths(folder, steps[-1])
    try:
        manifest = decode(read_plain(manifest_path), CheckpointManifest)
        size = path.stat().st_size
    except (OSError, msgspec.DecodeError) as error:
        raise _damaged(folder, steps, str(error)) from None
    if size != manifest.bytes:
        raise _damaged(folder, steps, f"it has {size} bytes and should have {manifest.bytes}")
    if _digest(path) != manifest.sha256:
        raise _damaged(folder, steps, "its content is not what was written")
    return Checkpoint(manifest=manifest, path=path)


def forget_all(folder: Path) -> None:
    """The manifests first: a kill on the way leaves none without its state. What somebody else put there stays."""
    own = [path for path in sorted(folder.glob("step-*")) if _OWN.fullmatch(path.name)]
    for path in sorted(own, key=lambda path: path.suffix != ".json"):
        path.unlink()


def _damaged(folder: Path, steps: list[int], why: str) -> StepscopeError:
    path, manifest_path = _paths(folder, steps[-1])
    before = f"goes on from step {steps[-2]}" if len(steps) > 1 else "begins anew"
    return StepscopeError(
        f"damaged checkpoint: `{path}`",
        detail=f"{why}\nwithout it the same command {before}",
        hint=f"rm {path} {manifest_path}",
    )


def _steps(folder: Path) -> list[int]:
    return sorted(int(own[1]) for path in folder.glob("step-*.json") if (own := _OWN.fullmatch(path.name)))


def _paths(folder: Path, step: int) -> tuple[Path, Path]:
    stem = folder / f"step-{step:08d}"
    return stem.with_suffix(".pt"), stem.with_suffix(".json")


def _forget_old(folder: Path) -> None:
    """The manifest first: what has none is no checkpoint."""
    for step in _steps(folder)[:-_KEPT]:
        path, manifest_path = _paths(folder, step)
        manifest_path.unlink()
        path.unlink(missing_ok=True)


def _forget_orphans(folder: Path, step: int) -> None:
    """What a kill left of checkpoints up to `step`: a part, or a state whose manifest never came or went first."""
    with_manifest = set(_steps(folder))
    for path in folder.glob("step-*"):
        own = _OWN.fullmatch(path.name)
        if own is None or int(own[1]) > step:
            continue
        if path.suffix == ".part" or (path.suffix == ".pt" and int(own[1]) not in with_manifest):
            path.unlink(missing_ok=True)


class _StateFile(io.FileIO):
    """Remembers why the disk refused a write: torch.save says only that the file is not as long as it should be."""

    refusal: OSError | None = None

    def write(self, content: "ReadableBuffer", /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            self.refusal = self.refusal or error
            raise


def _write_state(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    raw = _StateFile(path, "w+")
    try:
        with io.BufferedRandom(raw) as file:
            write(file)
            _to_disk(file)
    except Exception:
        if raw.refusal is not None:
            raise raw.refusal from None
        raise
    if raw.refusal is not None:  # and the writer made nothing of it
        raise raw.refusal


def _to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Checkpoints on disk: whole or not there.

A checkpoint is two files: the state, and a small manifest that says how many bytes it must have and their digest. Both
are written aside, forced to the disk and renamed, the manifest last: a checkpoint exists from the moment its manifest
does. A kill or a power cut at any moment leaves the one before it. What the state is, is the writer's business; here it
is bytes.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from stepscope.errors import StepscopeError
from stepscope.recording.lines import writing
from stepscope.spec import Training

FOLDER_NAME = "checkpoints"
_KEPT = 2  # the newest, and one to fall back on by hand
IF_FULL = "the checkpoint before it is whole; free some space and the same command goes on from it"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`training` is what must be the same for a run to go on from here."""

    step: int
    bytes: int
    sha256: str
    training: Training
    data_digest: str = ""
    schema: str = "stepscope.checkpoint/1"


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    manifest: Manifest
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
            with part.open("w+b") as file:
                write(file)
                _to_disk(file)
            manifest = Manifest(
                step=step,
                bytes=part.stat().st_size,
                sha256=_digest(part),
                training=training.identity,
                data_digest=data_digest,
            )
            part.replace(path)
            write_atomically(manifest_path, msgspec.json.encode(manifest))
        except OSError:
            part.unlink(missing_ok=True)
            raise
    _forget_old(folder)
    return Checkpoint(manifest=manifest, path=path)


def newest(folder: Path) -> Checkpoint | None:
    """The newest one, proven whole; None where there is none. A damaged one is an error: what wrote it was not us."""
    steps = _steps(folder)
    if not steps:
        return None
    path, manifest_path = _paths(folder, steps[-1])
    try:
        manifest = msgspec.json.decode(manifest_path.read_bytes(), type=Manifest)
        size = path.stat().st_size
    except (OSError, msgspec.DecodeError) as error:
        raise _damaged(folder, steps, str(error)) from None
    if size != manifest.bytes:
        raise _damaged(folder, steps, f"it has {size} bytes and should have {manifest.bytes}")
    if _digest(path) != manifest.sha256:
        raise _damaged(folder, steps, "its content is not what was written")
    return Checkpoint(manifest=manifest, path=path)


def forget_all(folder: Path) -> None:
    for path in folder.glob("step-*"):
        path.unlink()


def write_atomically(path: Path, content: bytes) -> None:
    """The old content or the new, whatever happens."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(content)
        _to_disk(file)
    part.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damaged(folder: Path, steps: list[int], why: str) -> StepscopeError:
    path, manifest_path = _paths(folder, steps[-1])
    before = f"goes on from step {steps[-2]}" if len(steps) > 1 else "begins anew"
    return StepscopeError(
        f"damaged checkpoint: `{path}`",
        detail=f"{why}\nwithout it the same command {before}",
        hint=f"rm {path} {manifest_path}",
    )


def _steps(folder: Path) -> list[int]:
    found = [path.stem.removeprefix("step-") for path in folder.glob("step-*.json")]
    return sorted(int(text) for text in found if text.isdigit())


def _paths(folder: Path, step: int) -> tuple[Path, Path]:
    stem = folder / f"step-{step:08d}"
    return stem.with_suffix(".pt"), stem.with_suffix(".json")


def _forget_old(folder: Path) -> None:
    """The manifest first: what has none is no checkpoint."""
    for step in _steps(folder)[:-_KEPT]:
        path, manifest_path = _paths(folder, step)
        manifest_path.unlink()
        path.unlink(missing_ok=True)


def _to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

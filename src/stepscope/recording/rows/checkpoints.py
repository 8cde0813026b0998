"""Checkpoints on disk, written atomically.

A checkpoint is two files: the state, and a small manifest with its size and digest. Both are written to temporary
files, synced to disk and renamed, the manifest last: a checkpoint exists once its manifest does. A kill or a power
failure at any moment leaves the previous checkpoint. The content of the state is up to the caller.
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
_KEPT = 2  # the newest, and one as a fallback
IF_FULL = "the previous checkpoint is intact; free some space and run the same command to resume from it"


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """`training` must match for a run to resume from this checkpoint."""

    step: int
    bytes: int
    sha256: str
    training: Training
    data_digest: str = ""
    schema: str = "stepscope.checkpoint/1"


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    manifest: CheckpointManifest
    path: Path  # path of the state


def save(
    folder: Path, step: int, training: Training, data_digest: str, write: Callable[[IO[bytes]], None]
) -> Checkpoint:
    """Save what `write` writes as the checkpoint of `step`, and delete all but the newest two."""
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
    """Return the newest checkpoint after verifying it, or None. A damaged one is an error: saving cannot cause it."""
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
        raise _damaged(folder, steps, f"expected {manifest.bytes:,} bytes, got {size:,}")
    if _digest(path) != manifest.sha256:
        raise _damaged(folder, steps, "its content does not match its digest")
    return Checkpoint(manifest=manifest, path=path)


def forget_all(folder: Path) -> None:
    """Delete all checkpoints, manifests first, so that a kill leaves none without its state. Keep other files."""
    own = [path for path in sorted(folder.glob("step-*")) if _OWN.fullmatch(path.name)]
    for path in sorted(own, key=lambda path: path.suffix != ".json"):
        path.unlink()


def _damaged(folder: Path, steps: list[int], why: str) -> StepscopeError:
    path, manifest_path = _paths(folder, steps[-1])
    before = f"resumes from step {steps[-2]}" if len(steps) > 1 else "starts from scratch"
    return StepscopeError(
        f"damaged checkpoint: `{path}`",
        detail=f"{why}\nwithout this checkpoint, the same command {before}",
        hint=f"rm {path} {manifest_path}",
    )


def _steps(folder: Path) -> list[int]:
    return sorted(int(own[1]) for path in folder.glob("step-*.json") if (own := _OWN.fullmatch(path.name)))


def _paths(folder: Path, step: int) -> tuple[Path, Path]:
    stem = folder / f"step-{step:08d}"
    return stem.with_suffix(".pt"), stem.with_suffix(".json")


def _forget_old(folder: Path) -> None:
    """Delete old checkpoints, each manifest before its state."""
    for step in _steps(folder)[:-_KEPT]:
        path, manifest_path = _paths(folder, step)
        manifest_path.unlink()
        path.unlink(missing_ok=True)


def _forget_orphans(folder: Path, step: int) -> None:
    """Delete what a kill left of checkpoints up to `step`: temporary files, and states without a manifest."""
    with_manifest = set(_steps(folder))
    for path in folder.glob("step-*"):
        own = _OWN.fullmatch(path.name)
        if own is None or int(own[1]) > step:
            continue
        if path.suffix == ".part" or (path.suffix == ".pt" and int(own[1]) not in with_manifest):
            path.unlink(missing_ok=True)


class _StateFile(io.FileIO):
    """Remembers why a write failed: torch.save only reports an unexpected file size."""

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
    if raw.refusal is not None:  # the writer swallowed the error
        raise raw.refusal


def _to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""The files of a run: opening one, and which files are the ranks of one run."""

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from stepscope.errors import StepscopeError
from stepscope.loop.place import is_run
from stepscope.recording import store
from stepscope.recording.cache import read_cached
from stepscope.recording.readers.formats import open_recording
from stepscope.recording.store import Manifest, Recording

_TRACE = re.compile(r"(?i).*\.json\.gz|.*(?:trace|rank).*\.json")  # PyTorch's profiler writes one file per rank
_RANK_FOLDER = re.compile(r"rank-(\d+)")
_MOST_NAMED = 8  # files in an error


class Opened(NamedTuple):
    """A recording, the file it was read from, and the directory that it is stored in, if any."""

    path: Path
    recording: Recording
    folder: Path | None

    @property
    def is_of_memory(self) -> bool:
        return self.recording.manifest.memory is not None


def open_file(path: Path, *, cached: bool) -> Opened:
    recording, folder = read_cached(path, open_recording) if cached else (open_recording(path), None)
    return Opened(path, recording, folder)


def expand_ranks(paths: Sequence[Path]) -> list[Path]:
    """Replace each directory that is not a recording: that of a report or of `stepscope run` by its recordings, any
    other by the traces in it, one per rank."""
    expanded: list[Path] = []
    for path in paths:
        traces: list[Path] = []
        with suppress(OSError):  # the reader says what is wrong with it
            if path.is_dir() and not (path / store.MANIFEST_NAME).exists():
                traces = _find_recordings(path)
        expanded += traces or [path]
    return expanded


def _find_recordings(folder: Path) -> list[Path]:
    from stepscope.jobs.report.data import is_data
    from stepscope.jobs.report.stages import ProfileStage

    if is_run(folder):
        found = [(int(match[1]), one) for one in folder.iterdir() if (match := _RANK_FOLDER.fullmatch(one.name))]
        return [one for _, one in sorted(found)]
    if is_data(folder):
        return [folder / ProfileStage.name]
    return sorted(one for one in folder.iterdir() if _TRACE.fullmatch(one.name))


def are_ranks(manifests: Sequence[Manifest]) -> bool:
    """Whether these are the ranks of one run: distinct ranks, and the same world size."""
    ranks = {one.rank for one in manifests}
    worlds = {one.world_size for one in manifests}
    if None in ranks or len(ranks) < len(manifests) or len(worlds) > 1:
        return False
    (world,) = worlds
    return world is None or all(rank is not None and rank < world for rank in ranks)


def sort_ranks(opened: Sequence[Opened]) -> list[Opened]:
    """Order files by rank if every rank is known. Raises if they are not the ranks of one run."""
    manifests = [one.recording.manifest for one in opened]
    if any(one.rank is None for one in manifests):
        return list(opened)
    if not are_ranks(manifests):
        raise StepscopeError(
            "these files are not the ranks of one run",
            detail=describe_ranks(opened),
            hint=f"one file per rank: stepscope explain {shlex.quote(str(opened[0].path))}",
        )
    return sorted(opened, key=lambda one: one.recording.manifest.rank or 0)


def describe_ranks(opened: Sequence[Opened]) -> str:
    """Return the rank in each file, for an error."""
    manifests = [one.recording.manifest for one in opened]
    said = ["no rank" if one.rank is None else f"rank {one.rank}" for one in manifests]
    worlds = ["" if one.world_size is None else f" of {one.world_size}" for one in manifests]
    shown = [f"{one.path.name}: {rank}{of}" for one, rank, of in zip(opened, said, worlds, strict=True)][:_MOST_NAMED]
    return ", ".join([*shown, *(["…"] if len(opened) > _MOST_NAMED else [])])

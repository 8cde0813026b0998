"""The files of a run: opening one, and which files are the ranks of one run."""

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError
from stepscope.explain.ranks.activity import RankActivity
from stepscope.recording import store
from stepscope.recording.cache import read_cached
from stepscope.recording.readers.formats import open_recording
from stepscope.recording.store import Manifest, Recording

_TRACE = re.compile(r"(?i).*\.json\.gz|.*(?:trace|rank).*\.json")  # PyTorch's profiler writes one file per rank
_RANK = re.compile(r"rank-(\d{1,7})")  # a recording in the directory of a run
_MOST_NAMED = 8  # files in an error
_MOST_IN_MEMORY = 8  # recordings


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A file or directory of a run. Of many ranks, only the manifest and the activity are in memory, and the recording
    is read if it is asked for."""

    path: Path
    manifest: Manifest
    loaded: tuple[Recording, Path | None] | None = None  # with the directory that it is stored in, if any
    activity: RankActivity | None = None
    cached: bool = False

    @classmethod
    def of(cls, path: Path, recording: Recording, folder: Path | None = None) -> "Opened":
        return cls(path=path, manifest=recording.manifest, loaded=(recording, folder))

    @cached_property
    def _content(self) -> tuple[Recording, Path | None]:
        recording, folder = self.loaded or _read(self.path, cached=self.cached)
        return recording.with_manifest(file=self.manifest.file), folder

    @property
    def recording(self) -> Recording:
        return self._content[0]

    @property
    def folder(self) -> Path | None:
        """The directory that the recording is stored in, if any."""
        return self._content[1]

    @property
    def is_of_memory(self) -> bool:
        return self.manifest.memory is not None

    def named(self, file: str) -> "Opened":
        return replace(self, manifest=msgspec.structs.replace(self.manifest, file=file))


def _read(path: Path, *, cached: bool) -> tuple[Recording, Path | None]:
    return read_cached(path, open_recording) if cached else (open_recording(path), None)


def open_file(path: Path, *, cached: bool) -> Opened:
    return Opened.of(path, *_read(path, cached=cached))


def open_ranks(paths: Sequence[Path], *, cached: bool) -> list[Opened]:
    """Open the files of a run. Many of them are reduced, in several processes, and not kept in memory."""
    if len(paths) <= _MOST_IN_MEMORY:
        return [open_file(path, cached=cached) for path in paths]
    from stepscope.jobs.rank_reduction import reduce_files

    activities = reduce_files(paths, cached=cached)
    return [
        Opened(path=path, manifest=one.manifest, activity=one, cached=cached)
        for path, one in zip(paths, activities, strict=True)
    ]


def expand_ranks(paths: Sequence[Path]) -> list[Path]:
    """Replace each directory that is not a recording: that of a report by its recording, any other by the recordings or
    traces in it, one per rank."""
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

    if is_data(folder):
        return [folder / ProfileStage.name]
    found = list(folder.iterdir())
    ranks = [one for one in found if _RANK.fullmatch(one.name) and store.is_recording(one)]
    return sorted(ranks, key=_number) or sorted(one for one in found if _TRACE.fullmatch(one.name))


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


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
    manifests = [one.manifest for one in opened]
    if any(one.rank is None for one in manifests):
        return list(opened)
    if not are_ranks(manifests):
        raise StepscopeError(
            "these files are not the ranks of one run",
            detail=describe_ranks(opened),
            hint=f"one file per rank: stepscope explain {shlex.quote(str(opened[0].path))}",
        )
    return sorted(opened, key=lambda one: one.manifest.rank or 0)


def describe_ranks(opened: Sequence[Opened]) -> str:
    """Return the rank in each file, for an error."""
    manifests = [one.manifest for one in opened]
    said = ["no rank" if one.rank is None else f"rank {one.rank}" for one in manifests]
    worlds = ["" if one.world_size is None else f" of {one.world_size}" for one in manifests]
    shown = [f"{one.path.name}: {rank}{of}" for one, rank, of in zip(opened, said, worlds, strict=True)][:_MOST_NAMED]
    return ", ".join([*shown, *(["…"] if len(opened) > _MOST_NAMED else [])])

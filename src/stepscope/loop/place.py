"""Where a recorded run is kept: a directory with a recording per rank, and the page.

All ranks use the same paths; rank 0 prepares the directory, long before another rank has anything to write.
"""

import os
import re
import shlex
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import (
    check_target,
    decode_as,
    find_foreign,
    is_of_kind,
    is_result_of,
    read_plain,
    write_atomically,
    writing,
)
from stepscope.recording.rows.loop_run import RUN_NAME, RUN_SCHEMA, RunFacts

DEFAULT_PAGE, DEFAULT_FOLDER = Path("report.html"), Path("runs/run")
MEMORY_FOLDER, OOM_FOLDER = "memory", "oom"
_PAGE_NAME = "report.html"
_FOLDERS = rf"(?:rank-\d+|{MEMORY_FOLDER}|oom(?:-rank-\d+)?(?:-\d+)?)"
_PARTS = re.compile(rf"{_FOLDERS}(?:\.raw)?(?:/.*)?|{_FOLDERS}\.(?:html|pickle)|{RUN_NAME}|{_PAGE_NAME}")


@dataclass(frozen=True, kw_only=True)
class RunPlace:
    """Absolute paths, because scripts change their directory. A directory that the user did not name is replaced by the
    next run of the same script."""

    folder: Path
    page: Path
    is_default: bool = False

    @property
    def memory_folder(self) -> Path:
        """Where rank 0 puts the memory history of a step."""
        return self.folder / f"{MEMORY_FOLDER}.raw"

    def raw_folder(self, rank: int) -> Path:
        """Where a rank puts what another process turns into its recording."""
        return self.folder / f"rank-{rank}.raw"

    def prepare(self, *, command: str, script: str, world_size: int, force: bool) -> None:
        """Make the directory ready for a new run, without the results of an earlier one. Raises StepscopeError if it,
        or the page, must not be replaced."""
        folder = self.folder
        if folder.exists() and not folder.is_dir():
            raise StepscopeError(f"`{folder}` is not a directory", hint="--out DIR")
        if folder.is_dir() and any(folder.iterdir()):
            self._check_old(command=command, script=script, force=force)
        with writing(folder, hint="--out DIR"):
            folder.mkdir(parents=True, exist_ok=True)
            check_target(self.page, force=force, flag="--out")
            self._clear()
            facts = RunFacts(
                command=command,
                script=script,
                page=os.path.relpath(self.page, folder),
                world_size=world_size,
                started=datetime.now(UTC).isoformat(timespec="seconds"),
            )
            write_atomically(folder / RUN_NAME, msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n")

    def _check_old(self, *, command: str, script: str, force: bool) -> None:
        folder, shown = self.folder, _shorten(self.folder)
        if not is_of_kind(folder / RUN_NAME, RUN_SCHEMA):
            raise StepscopeError(
                f"`{shown}` is not the directory of a run",
                detail=f"it has files but no valid {RUN_NAME}; expected a new or empty directory, or an earlier run",
                hint="--out DIR",
            )
        foreign = find_foreign(folder, lambda name: _PARTS.fullmatch(name.rstrip("/")) is not None)
        if foreign is not None:
            raise StepscopeError(
                f"`{shown}` contains a file that is not part of the run: `{foreign}`",
                detail="replacing the run would delete it",
                hint="--out DIR",
            )
        is_same = is_result_of(folder / RUN_NAME, command) or (self.is_default and read_run(folder).script == script)
        if not (force or is_same):
            before = read_run(folder).command
            raise StepscopeError(
                f"`{shown}` already has a run", detail=f"made by: {before}", hint="--force, or another --out DIR"
            )

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.is_dir() and _PARTS.fullmatch(path.name):
                shutil.rmtree(path)
            elif path != self.page and _PARTS.fullmatch(path.name):
                path.unlink()


def choose_place(out: str | os.PathLike[str] | None, script: str) -> RunPlace:
    """The page and the directory of a run. `out` is either: a name that ends in .html is the page, any other name is
    the directory, which then has the page."""
    stem = re.sub(r"[^\w.]+", "-", Path(script.removeprefix("-m ")).name.removesuffix(".py")).strip("-.") or "run"
    if out is None or Path(out).suffix.lower() == ".html":
        page = Path(out or DEFAULT_PAGE)
        return RunPlace(folder=(DEFAULT_FOLDER / stem).absolute(), page=page.absolute(), is_default=True)
    folder = Path(out).absolute()
    return RunPlace(folder=folder, page=folder / _PAGE_NAME)


def find_rank() -> tuple[int, int]:
    """This process's rank and the number of ranks, as its launcher says: torchrun, `srun` or `mpirun`."""
    for rank, size in (
        ("RANK", "WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ):
        if os.environ.get(rank, "").isdecimal() and os.environ.get(size, "").isdecimal():
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def is_run(folder: Path) -> bool:
    return folder.is_dir() and is_of_kind(folder / RUN_NAME, RUN_SCHEMA)


def read_run(folder: Path) -> RunFacts:
    try:
        return decode_as(read_plain(folder / RUN_NAME), RunFacts, RUN_SCHEMA)
    except (OSError, msgspec.DecodeError) as error:
        why = (error.strerror or "" if isinstance(error, OSError) else str(error))[:200]
        raise StepscopeError(f"not written by `stepscope run`: `{folder / RUN_NAME}`", detail=why) from None


def _shorten(path: Path) -> str:
    """Return a path as the user would type it."""
    try:
        return shlex.quote(str(path.relative_to(Path.cwd())))
    except ValueError:
        return str(path)

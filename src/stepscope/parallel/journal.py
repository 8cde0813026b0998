"""What every rank is doing, to find the one that caused a failure.

When one rank dies or hangs, the others only learn that a collective did not complete. So each rank keeps, in a small
memory-mapped file, how many collectives it has issued and finished and what the last one was; its peers, and the
process that started them, read the files of all ranks and see who fell behind. A write is a store to memory, about a
microsecond, and survives the process. This does not import torch: the process that watches has not loaded it.
"""

import mmap
import os
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

FOLDER_VARIABLE = "STEPSCOPE_JOURNAL"
VICTIM = "CollectiveError"  # prefix of the reason of a rank that failed because of another
_HEADER = struct.Struct("<QQQQB")  # issued, finished, process, time, state
_HOST_BYTES, _TEXT_BYTES = 64, 400
_SIZE = _HEADER.size + _HOST_BYTES + 2 * _TEXT_BYTES
_STATES: tuple[Literal["running", "raised", "left"], ...] = ("running", "raised", "left")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The last state of a rank."""

    rank: int
    issued: int
    finished: int
    collective: str  # the last one issued
    reason: str  # why it stopped, if it could still report it
    state: Literal["running", "raised", "left"]
    process: int
    host: str
    at_ns: int  # time of the last change, since the epoch

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended; False if that cannot be known from here."""
        return self._process_state in ("gone", "Z")

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped (SIGSTOP, a debugger)."""
        return self._process_state in ("T", "t")

    @property
    def _process_state(self) -> str:
        """The kernel's state, empty if it cannot be known from here."""
        if self.host != socket.gethostname():
            return ""
        try:
            status = Path(f"/proc/{self.process}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return "gone"
        except PermissionError:
            return ""
        return status.rpartition(")")[2].split()[0]

    @property
    def is_victim(self) -> bool:
        """Whether it failed because of another rank."""
        return self.state == "raised" and self.reason.startswith(VICTIM)

    @property
    def last_collective(self) -> str:
        if self.issued == 0:
            return "before its first collective"
        doing = "in" if self.finished < self.issued else "after"
        return f"{doing} collective {self.issued}, {self.collective}"


class Journal:
    """The journal of one rank. Without a directory it is kept in memory, and only this rank can read it."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self._issued = 0
        self._finished = 0
        if folder is None:
            self._map = mmap.mmap(-1, _SIZE)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"{rank}.journal").open("w+b") as file:
                file.truncate(_SIZE)
                self._map = mmap.mmap(file.fileno(), _SIZE)
        self._put_text(_HEADER.size, socket.gethostname(), _HOST_BYTES)
        self._put_header("running")

    def begin(self, collective: str) -> None:
        self._issued += 1
        self._put_text(_HEADER.size + _HOST_BYTES, collective, _TEXT_BYTES)
        self._put_header("running")

    def end(self) -> None:
        self._finished += 1
        self._put_header("running")

    def leave(self, reason: str = "") -> None:
        """Write the last entry: this rank is done, or raised `reason`."""
        self._put_text(_HEADER.size + _HOST_BYTES + _TEXT_BYTES, reason, _TEXT_BYTES)
        self._put_header("raised" if reason else "left")

    def entries(self) -> list[Entry]:
        """Return the entries of all ranks that are readable from here."""
        if self.folder is None:
            return [_read(self._map[:], self.rank)]
        return read_journals(self.folder)

    def _put_header(self, state: Literal["running", "raised", "left"]) -> None:
        words = (self._issued, self._finished, os.getpid(), time.time_ns(), _STATES.index(state))
        _HEADER.pack_into(self._map, 0, *words)

    def _put_text(self, offset: int, text: str, size: int) -> None:
        self._map[offset : offset + size] = text.encode()[:size].ljust(size, b"\0")


def read_journals(folder: Path) -> list[Entry]:
    found = [(int(path.stem), path) for path in folder.glob("*.journal") if path.stem.isdigit()]
    return [_read(path.read_bytes(), rank) for rank, path in sorted(found)]


def find_culprit(entries: Sequence[Entry]) -> Entry | None:
    """Return the rank that the others wait for: the first that raised on its own, else one whose process has ended or
    is stopped, else one that has issued fewer collectives than another. None if no rank stands out.
    """
    suspects = [entry for entry in entries if not entry.is_victim]
    raised = [entry for entry in suspects if entry.state == "raised"]
    if raised:
        return min(raised, key=lambda entry: entry.at_ns)
    halted = [entry for entry in suspects if entry.state == "running" and (entry.is_gone or entry.is_stopped)]
    if halted:
        return halted[0]
    last = min(suspects, key=lambda entry: entry.issued, default=None)
    if last is None or last.issued == max(entry.issued for entry in entries):
        return None
    return last


def blame(entries: Sequence[Entry]) -> str:
    """Describe the culprit: which rank, what happened to it, and its last collective."""
    culprit = find_culprit(entries)
    if culprit is None:
        return "no single rank is behind: " + _list(entries)
    what = {
        "raised": f"raised {culprit.reason}",
        "left": "had already exited",
        "running": "died" if culprit.is_gone else "is stopped" if culprit.is_stopped else "fell behind",
    }[culprit.state]
    return f"rank {culprit.rank} {what}, {culprit.last_collective}"


def _list(entries: Iterable[Entry]) -> str:
    return "; ".join(f"rank {entry.rank} {entry.last_collective}" for entry in entries)


def _read(content: bytes, rank: int) -> Entry:
    issued, finished, process, at_ns, state = _HEADER.unpack_from(content.ljust(_SIZE, b"\0"))
    offset = _HEADER.size
    texts = []
    for size in (_HOST_BYTES, _TEXT_BYTES, _TEXT_BYTES):
        texts.append(content[offset : offset + size].rstrip(b"\0").decode(errors="replace"))
        offset += size
    return Entry(
        rank=rank,
        issued=issued,
        finished=finished,
        host=texts[0],
        collective=texts[1],
        reason=texts[2],
        state=_STATES[state],
        process=process,
        at_ns=at_ns,
    )

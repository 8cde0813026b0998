"""A trace file of any size as blocks of whole events, without ever holding the file.

A profiler's trace is one JSON object with a list of events that may run to gigabytes. Reading it at once costs several
times its size; a streaming parser costs minutes. Cutting the text between two events and handing the pieces to a fast
parser costs neither. Where to cut is a guess (`}, {"ph":` could stand inside an event), and the parser is the judge:
text between two cuts is a list of events if and only if both cuts were right, so a wrong guess cannot pass unseen.

Compression is undone on the way. A file that ends early, or is damaged in the middle of its compression, gives what
came before the damage, and says so.
"""

import re
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from stepscope.errors import StepscopeError

BLOCK_BYTES = 8 << 20
# Kept back for the end, where the list closes and the trace's own properties may follow.
_TAIL_BYTES = 2 << 20
_LONGEST_EVENT = 64 << 20
_READ_BYTES = 1 << 20
_WIDEST_CUT = 4096  # bytes from the end of an event to the first key of the next
# Deflate reaches 1000 to 1 on a repeated byte; real traces reach 10 to 60.
_BOMB_RATIO, _BOMB_BYTES = 250, 256 << 20

_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_EVENT_KEYS = rb'"(?:ph|name|cat|pid|tid|ts|id|dur|args|s|bp)"\s*:'
BETWEEN_EVENTS = re.compile(rb"\}\s*,\s*\{\s*" + _EVENT_KEYS)
_END_OF_LIST = re.compile(rb"[}\[]\s*\]")


class Blocks:
    """Iterate for the blocks, each the text of whole events with commas between; then `properties` are the keys beside
    the list, and `notes` say what is missing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.notes: list[str] = []
        self.properties: dict[str, object] = {}
        self.is_bare_list = False

    def __iter__(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            pieces = self._pieces(file)
            buffer = self._find_list(pieces)
            ended, searched = False, 0
            while not ended:
                # One join a block: adding piece by piece would copy the buffer each time.
                collected, size = [buffer], len(buffer)
                enough = max(size, _TAIL_BYTES) + BLOCK_BYTES
                while size < enough:
                    piece = next(pieces, None)
                    if piece is None:
                        ended = True
                        break
                    collected.append(piece)
                    size += len(piece)
                buffer = b"".join(collected)
                if not ended:
                    cut = self._last_cut(buffer, searched)
                    if cut is None:
                        self._check_length(buffer)
                        searched = max(0, len(buffer) - _TAIL_BYTES - _WIDEST_CUT)
                        continue
                    yield buffer[: cut[0]]
                    buffer, searched = buffer[cut[1] :], 0
            events = self._close(buffer)
            if events.strip():
                yield events

    def _pieces(self, file: IO[bytes]) -> Iterator[bytes]:
        start = file.read(2)
        file.seek(0)
        return self._decompressed(file) if start == b"\x1f\x8b" else iter(lambda: file.read(_READ_BYTES), b"")

    def _decompressed(self, file: IO[bytes]) -> Iterator[bytes]:
        unzip = zlib.decompressobj(31)
        read, given = 0, 0
        while compressed := file.read(_READ_BYTES):
            read += len(compressed)
            while compressed:
                if unzip.eof:  # a second member follows the first
                    unzip = zlib.decompressobj(31)
                try:
                    piece = unzip.decompress(compressed, BLOCK_BYTES)
                except zlib.error as error:
                    self.notes.append(f"the compressed file is damaged ({error}): what follows is missing")
                    return
                given += len(piece)
                if given > _BOMB_BYTES and given > _BOMB_RATIO * read:
                    raise StepscopeError(
                        f"`{self._path}` unpacks to more than {_BOMB_RATIO} times its size",
                        detail="no real trace does; reading stopped",
                        hint=f"gunzip it yourself if you trust it, and explain the plain file: {self._path.stem}",
                    )
                if piece:
                    yield piece
                compressed = unzip.unused_data.lstrip(b"\0") if unzip.eof else unzip.unconsumed_tail
        if not unzip.eof:
            self.notes.append("the compressed file ends early: what follows is missing")

    def _find_list(self, pieces: Iterator[bytes]) -> bytes:
        """What follows the list's opening bracket."""
        buffer = b""
        while len(buffer) < _LONGEST_EVENT:
            piece = next(pieces, None)
            buffer += piece or b""
            text = buffer.lstrip(b"\xef\xbb\xbf \t\r\n")
            if text[:1] == b"[":
                self.is_bare_list = True
                return text[1:]
            if text and text[:1] != b"{":
                break
            if found := _START.search(buffer):
                self._read_properties(buffer[: found.start()] + b'"":0}')
                self._refuse_pictures()
                return buffer[found.end() :]
            if piece is None:
                break
        raise self._refusal(buffer)

    def _refusal(self, buffer: bytes) -> StepscopeError:
        if not buffer.strip():
            return StepscopeError(f"`{self._path}` is empty", hint="was the profiler stopped before it wrote?")
        if buffer.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{":
            return StepscopeError(
                f"`{self._path}` is no PyTorch profiler trace", detail="it is JSON, but holds no list `traceEvents`"
            )
        return StepscopeError(
            f"`{self._path}` is no trace",
            detail="expected JSON from PyTorch's profiler, plain or gzipped",
            hint="stepscope explain --help lists what can be read",
        )

    @staticmethod
    def _last_cut(buffer: bytes, searched: int) -> tuple[int, int] | None:
        """Where the last event before the tail ends, and where the next begins. What was searched before is not
        searched again: an event may be as long as many blocks."""
        limit = len(buffer) - _TAIL_BYTES
        for start in (max(searched, limit - (1 << 16)), searched):
            candidates = deque(BETWEEN_EVENTS.finditer(buffer, start, limit), maxlen=1)
            if candidates:
                found = candidates[0]
                return found.start() + 1, buffer.index(b"{", found.start() + 1)
        return None

    def _check_length(self, buffer: bytes) -> None:
        if len(buffer) > _LONGEST_EVENT:
            raise StepscopeError(
                f"`{self._path}` has an event of more than {_LONGEST_EVENT >> 20} MiB, or is no trace",
                detail="no two events could be told apart in that stretch",
            )

    def _close(self, buffer: bytes) -> bytes:
        """The last events, without the list's end and what follows it."""
        # A list among the properties that follow closes like the list of events, so the earliest end that fits is it.
        end, misses = None, 0
        for found in reversed(list(_END_OF_LIST.finditer(buffer))):
            rest = buffer[found.end() :]
            if (self.is_bare_list and not rest.strip()) or (
                not self.is_bare_list and self._read_properties(b'{"":0' + rest)
            ):
                end, misses = found.end() - 1, 0
            misses += 1
            if misses > (1000 if end is None else 100):
                break
        if end is not None:
            return buffer[:end]
        if buffer.strip()[:1] == b"]" and (self.is_bare_list or self._read_properties(b'{"":0' + buffer.strip()[1:])):
            return b""
        self.notes.append("the file ends early, before its list of events is closed")
        return buffer

    def _refuse_pictures(self) -> None:
        if self.properties.get("stepscope") == "a picture":
            raise StepscopeError(
                f"`{self._path}` was written by --perfetto, to be looked at",
                hint="explain the recording that it was made from",
            )

    def _read_properties(self, text: bytes) -> bool:
        try:
            self.properties.update(msgspec.json.decode(text, type=dict[str, object]))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return False
        return True

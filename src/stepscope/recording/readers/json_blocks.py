"""Split a trace file of any size into blocks of whole events, without holding the file in memory.

A profiler trace is one JSON object with a list of events that can reach gigabytes. Parsing it at once takes several
times its size in memory; a streaming parser takes minutes. Cutting the text between two events and passing the blocks
to a fast parser avoids both. Where to cut is a guess (`}, {"ph":` could appear inside an event), and the parser checks
it: the text between two cuts is a list of events if and only if both cuts are right, so a wrong guess is always
noticed.

The file is decompressed on the way. If it is truncated or damaged, everything before the damage is read, with a note.
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
# Kept for the end of the file, where the list closes and the properties of the trace may follow.
_TAIL_BYTES = 2 << 20
_LONGEST_EVENT = 64 << 20
_READ_BYTES = 128 << 10  # a megabyte of compressed text becomes ten that leave the CPU's cache before they are used
_WIDEST_CUT = 4096  # bytes from the end of an event to the first key of the next
# Deflate compresses a repeated byte 1000:1; real traces reach 10:1 to 60:1.
_BOMB_RATIO, _BOMB_BYTES = 250, 256 << 20

_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_EVENT_KEYS = rb'"(?:ph|name|cat|pid|tid|ts|id|dur|args|s|bp)"\s*:'
BETWEEN_EVENTS = re.compile(rb"\}\s*,\s*\{\s*" + _EVENT_KEYS)
_END_OF_LIST = re.compile(rb"[}\[]\s*\]")


class Blocks:
    """Iterate over the blocks, each the text of whole events separated by commas. Afterwards, `properties` has the
    other keys of the trace, and `notes` say what is missing."""

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
                # One join per block: adding piece by piece would copy the buffer each time.
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
                    self.notes.append(f"the compressed file is damaged ({error}); the rest is missing")
                    return
                given += len(piece)
                if given > _BOMB_BYTES and given > _BOMB_RATIO * read:
                    raise StepscopeError(
                        f"`{self._path}` decompresses to more than {_BOMB_RATIO}× its size",
                        detail="real traces stay far below that; reading stopped",
                        hint=f"if you trust the file, decompress it first: gunzip {self._path.name}",
                    )
                if piece:
                    yield piece
                compressed = unzip.unused_data.lstrip(b"\0") if unzip.eof else unzip.unconsumed_tail
        if not unzip.eof:
            self.notes.append("the compressed file ends early; the rest is missing")

    def _find_list(self, pieces: Iterator[bytes]) -> bytes:
        """Return the text after the opening bracket of the list."""
        buffer = b""
        while len(buffer) < _LONGEST_EVENT:
            piece = next(pieces, None)
            buffer += piece or b""
            text = buffer.lstrip(b"\xef\xbb\xbf \t\r\n")
            if text[:1] == b"[" and text[1:].lstrip()[:1] in (b"{", b"]"):
                self.is_bare_list = True
                return text[1:]
            if text and text[:1] != b"{" and (text[:1] != b"[" or text[1:].strip()):
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
            return StepscopeError(
                f"`{self._path}` is empty", hint="make sure that the profiler was stopped and the trace exported"
            )
        if buffer.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{":
            return StepscopeError(
                f"not a PyTorch profiler trace: `{self._path}`", detail="it is JSON without a `traceEvents` list"
            )
        return StepscopeError(
            f"not a trace: `{self._path}`",
            detail="expected JSON from the PyTorch profiler, plain or gzipped",
            hint="for the supported formats: stepscope explain --help",
        )

    @staticmethod
    def _last_cut(buffer: bytes, searched: int) -> tuple[int, int] | None:
        """Return where the last event before the tail ends and where the next one begins. Text before `searched` is not
        searched again, since an event may be as long as many blocks."""
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
                f"not a trace, or an event is longer than {_LONGEST_EVENT >> 20} MiB: `{self._path}`",
                detail="no boundary between two events was found",
            )

    def _close(self, buffer: bytes) -> bytes:
        """Return the last events, without the end of the list and what follows it."""
        # A list in the properties closes like the list of events, so the earliest end that fits is the right one.
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
        self.notes.append("the file ends early: the list of events is not closed")
        return buffer

    def _refuse_pictures(self) -> None:
        if self.properties.get("stepscope") == "a picture":
            raise StepscopeError(
                f"`{self._path}` was exported with --perfetto, for viewing only",
                hint="pass the recording that it was exported from",
            )

    def _read_properties(self, text: bytes) -> bool:
        try:
            self.properties.update(msgspec.json.decode(text, type=dict[str, object]))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return False
        return True

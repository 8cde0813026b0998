"""Convert a PyTorch CUDA memory snapshot to tables: every event of the allocator, and the segments at the end.

A snapshot is untrusted input: every field that is used is checked, and an error names the place. Other fields are
ignored, and paths are shortened, so that no home directory is kept.

Whole columns are extracted from the list of events with C functions; only if that fails is the bad event searched for.
A loop that checks each event took twice as long. Lists of frames are shared objects in the pickle, and so are the
frames, so a stack is identified by the identities of its frames and its text is built once.
"""

import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stepscope.errors import StepscopeError
from stepscope.recording.memory import snapshot_pickle

OTHER = "other"  # an action of an unknown version
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
    OTHER,
)
ACTION = pl.Enum(ACTIONS)
EVENT_SCHEMA: dict[str, pl.DataType] = {
    "action": ACTION,
    "address": pl.Int64(),
    "bytes": pl.Int64(),
    "stream": pl.Int64(),
    "time_ns": pl.Int64(),
    "stack": pl.Int32(),
    "metadata": pl.Int32(),
}
State = Literal["allocated", "pending", "free"]

_STATES: dict[object, State] = {
    "active_allocated": "allocated",
    "active_awaiting_free": "pending",
    "active_pending_free": "pending",
    "inactive": "free",
}
_NO_FRAMES: list[Any] = []
_CODES = {action: code for code, action in enumerate(ACTIONS)}
_WITHOUT_ADDRESS = (_CODES["oom"], _CODES["snapshot"], _CODES[OTHER])
_NOWHERE = {"addr": 0}
_DEVICES = 1024
# With these limits, sums over a snapshot fit in 64 bits; no real device comes near them.
_MOST_EVENTS = 100_000_000
_MOST_ADDRESS, _MOST_BYTES = 2**62, 2**48
_MOST_TIME_US = 2**63 // 1000 - 1
# A file can refer to one long text a million times. Real stacks stay far below these limits.
_MOST_FRAMES, _MOST_TEXT, _MOST_STACK_TEXT = 4096, 1024, 2 << 30
_ROUNDING_INTERVALS = 16  # 1 MiB, 2 MiB, 4 MiB, …, each with its own number of divisions
_PACKAGES = re.compile(r".*(?:site|dist)-packages/")
_HOMES = frozenset(("home", "Users", "users", "user"))
_INDUCTOR = re.compile(r"^torchinductor_.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotBlock:
    """A block of a segment. A `pending` block was freed by its owner but is still in use on another stream."""

    address: int
    bytes: int
    requested_bytes: int | None
    state: State
    stack: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Memory that the allocator got from CUDA; for an expandable segment, a contiguous mapped range."""

    address: int
    bytes: int
    stream: int
    small: bool
    expandable: bool
    stack: int | None
    blocks: tuple[SnapshotBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """The settings that determine how the allocator rounds and splits."""

    expandable_segments: bool = False
    max_split_bytes: int | None = None  # None: blocks of any size are split
    roundup_divisions: tuple[int, ...] = ()  # between powers of two from 1 MiB up; empty or 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """An out-of-memory event: what was asked for, and what the device had left."""

    event: int
    bytes: int
    free_bytes: int
    stack: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The trace of one device. `events` has the columns of EVENT_SCHEMA; its `bytes` are requested sizes."""

    device: int
    events: pl.DataFrame
    segments_at_end: tuple[Segment, ...]
    settings: AllocatorSettings
    oom: FailedRequest | None = None  # the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A snapshot. `stack` and `metadata` of events and blocks are positions in `stacks` and `metadata`."""

    traces: tuple[Trace, ...]
    stacks: tuple[str, ...]
    metadata: tuple[str, ...]
    labels: dict[str, Any] | None


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot. Raise StepscopeError, with the place, if it is invalid."""
    with snapshot_pickle.without_collection():
        return take_apart(snapshot_pickle.load(path), path)


def take_apart(content: dict[str, Any], path: Path) -> Snapshot:
    """Convert a loaded snapshot to tables, and empty its lists of events. Errors name `path`."""
    return _Reader(path).read(content)


def read_segments(path: Path, found: list[Any]) -> tuple[Segment, ...]:
    """Read segments of one device that were recorded at another time than the end, with the same checks."""
    return tuple(segment for several in _Reader(path)._segments(found).values() for segment in several)


def shorten_path(name: str) -> str:
    """Return the part of a path that identifies the code, without the user."""
    name = name.replace("\\", "/")
    if found := _PACKAGES.match(name):
        return name[found.end() :]
    if not (name.startswith("/") or name[1:3] == ":/"):
        return name
    parts = [part for part in name.split("/") if part]
    for at in range(len(parts) - 2, -1, -1):
        if parts[at] in _HOMES:
            parts = parts[min(at + 2, len(parts) - 1) :]
            break
    return "/".join(_INDUCTOR.sub("torchinductor", part) for part in parts[-3:])


class _Stacks:
    """Distinct stacks, in order of first appearance."""

    def __init__(self, refuse: Callable[[str, str], NoReturn]) -> None:
        self.texts: list[str] = []
        # Identities stay unique, because all objects of the file stay alive until it is read.
        self._of_list: dict[int, int] = {}
        self._of_frames: dict[tuple[int, ...], int] = {(): -1}
        self._of_text: dict[str, int] = {}
        self._line_of_frame: dict[int, str] = {}
        self._characters = 0
        self._refuse = refuse

    def number(self, frames: object, place: str) -> int:
        """Return the position of a stack, or -1 for none."""
        return self.numbers((frames,), place)[0]

    def numbers(self, lists: Sequence[object], place: str) -> "array[int]":
        of_list, of_frames = self._of_list, self._of_frames
        found = array("i")
        for frames in lists:
            known = of_list.get(id(frames))
            if known is None and type(frames) is list:
                known = of_frames.get(tuple(map(id, frames)))
            if known is None:
                # Only a list with a new stack is remembered: there are many lists, and most appear once.
                known = of_list[id(frames)] = self._add(frames, place)
            found.append(known)
        return found

    def _add(self, frames: object, place: str) -> int:
        if type(frames) is not list:
            self._refuse(f"{place}.frames", f"a list, not a {type(frames).__name__}")
        if len(frames) > _MOST_FRAMES:
            self._refuse(f"{place}.frames", f"at most {_MOST_FRAMES} frames, not {len(frames)}")
        text = "\n".join([self._line(frame, f"{place}.frames[{at}]") for at, frame in enumerate(frames)])
        known = self._of_frames[tuple(map(id, frames))] = self._of_text.setdefault(text, len(self.texts))
        if known == len(self.texts):
            self.texts.append(text)
            self._characters += len(text)
            if self._characters > _MOST_STACK_TEXT:
                self._refuse(f"{place}.frames", f"at most {_MOST_STACK_TEXT >> 30} GiB of distinct stacks")
        return known

    def _line(self, frame: object, place: str) -> str:
        known = self._line_of_frame.get(id(frame))
        if known is None:
            if type(frame) is not dict:
                self._refuse(place, f"a dict, not a {type(frame).__name__}")
            file, name, line = frame.get("filename"), frame.get("name"), frame.get("line")
            if type(file) is not str or type(name) is not str:
                self._refuse(place, "a `filename` and a `name`")
            if type(line) is not int or not 0 <= line < 2**64:
                self._refuse(f"{place}.line", "a number")
            line = line if line < 2**31 else 0  # Python 3.13 has frames without a line, written as 2**64 - 1
            text = f"{shorten_path(file)[-_MOST_TEXT:]}:{line} {name[:_MOST_TEXT]}"
            # Replace lone surrogates, which only Python accepts as text.
            text = text.encode("utf-8", "replace").decode("utf-8")
            known = self._line_of_frame[id(frame)] = " ".join(text.split())
        return known


class _Reader:
    """Converts one file to tables."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stacks = _Stacks(self._refuse)
        self._metadata: dict[str, int] = {}
        self._blocks_seen: set[int] = set()

    def read(self, content: dict[str, Any]) -> Snapshot:
        labels = content.get("stepscope")
        if labels is not None and type(labels) is not dict:
            self._refuse("stepscope", "a dict")
        segments = self._segments(content["segments"])
        device_traces = content["device_traces"]
        if len(device_traces) > _DEVICES:
            self._refuse("device_traces", f"at most {_DEVICES} devices")
        if len(set(map(id, device_traces))) < len(device_traces):
            self._refuse("device_traces", "a separate list for every device")
        settings = content.get("allocator_settings")
        traces = []
        for device in range(max(len(device_traces), *(one + 1 for one in segments), 0)):
            entries = device_traces[device] if device < len(device_traces) else []
            if type(entries) is not list:
                self._refuse(f"device_traces[{device}]", "a list")
            if entries or device in segments:
                events = self._events(entries, f"device_traces[{device}]")
                failed = self._failed(entries, events, f"device_traces[{device}]")
                entries.clear()  # frees about 500 bytes per event before the next device is read
                ended = tuple(sorted(segments.get(device, ()), key=lambda segment: segment.address))
                chosen = self._settings(settings, events, ended)
                traces.append(Trace(device=device, events=events, segments_at_end=ended, settings=chosen, oom=failed))
        return Snapshot(
            traces=tuple(traces), stacks=tuple(self._stacks.texts), metadata=tuple(self._metadata), labels=labels
        )

    def _events(self, entries: list[Any], place: str) -> pl.DataFrame:
        if len(entries) > _MOST_EVENTS:
            self._refuse(place, f"at most {_MOST_EVENTS:,} events")
        if not set(map(type, entries)) <= {dict}:
            self._refuse_first(entries, place, lambda entry: type(entry) is dict, "a dict")
        codes = self._actions(entries, place)
        addresses, addressed = self._addresses(entries, codes, place)
        sizes = self._integers(entries, "size", place, least=0, most=_MOST_BYTES)
        streams = self._integers(entries, "stream", place, least=-(2**63), most=2**63 - 1)
        times = self._optional(entries, "time_us")
        if times is not None:
            times_us = self._integers(entries, "time_us", place, least=-_MOST_TIME_US, most=_MOST_TIME_US)
        # Recording stacks can be switched on and off: an event without a stack has no such field.
        stacks = self._stacks.numbers([entry.get("frames", _NO_FRAMES) for entry in entries], place)
        columns = {
            "action": pl.Series(ACTIONS, dtype=ACTION).gather(codes),
            "address": pl.Series(addresses).set(pl.Series(~addressed), None),
            "bytes": pl.Series(sizes),
            "stream": pl.Series(streams),
            "time_ns": pl.repeat(None, len(entries), dtype=pl.Int64, eager=True)
            if times is None
            else pl.Series(times_us * 1000),
            "stack": _positions(stacks, len(entries)),
            "metadata": _positions(self._metadata_numbers(entries, place), len(entries)),
        }
        return pl.DataFrame(columns, schema=EVENT_SCHEMA)

    def _failed(self, entries: list[Any], events: pl.DataFrame, place: str) -> FailedRequest | None:
        at = (events["action"] == "oom").arg_true()
        if not at.len():
            return None
        event = int(at[-1])
        free = self._integer(entries[event], "device_free", f"{place}[{event}]", most=_MOST_BYTES, absent=0)
        size, stack = events["bytes"][event], events["stack"][event]
        return FailedRequest(event=event, bytes=size, free_bytes=free, stack=stack)

    def _actions(self, entries: list[Any], place: str) -> NDArray[np.uint8]:
        actions = [entry.get("action") for entry in entries]
        if not set(map(type, actions)) <= {str}:
            self._refuse_first(entries, place, lambda entry: type(entry.get("action")) is str, "`action` as text")
        other = _CODES[OTHER]
        return np.fromiter((_CODES.get(action, other) for action in actions), np.uint8, len(actions))

    def _addresses(
        self, entries: list[Any], codes: NDArray[np.uint8], place: str
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the addresses, and which events have one. An out-of-memory event has none."""
        addressed = ~np.isin(codes, _WITHOUT_ADDRESS)
        if not addressed.all():
            entries = [entry if has else _NOWHERE for entry, has in zip(entries, addressed.tolist(), strict=True)]
        return self._integers(entries, "addr", place, least=0, most=_MOST_ADDRESS), addressed

    def _integers(self, entries: list[Any], key: str, place: str, *, least: int, most: int) -> NDArray[np.int64]:
        try:
            values = np.frombuffer(array("q", map(itemgetter(key), entries)), np.int64)
        except (KeyError, TypeError, OverflowError):
            values = None
        if values is None or (values.size and (values.min() < least or values.max() > most)):
            expected = f"`{key}` as a number from {least} to {most}"
            self._refuse_first(entries, place, lambda entry: _within(entry.get(key), least, most), expected)
        return values

    def _optional(self, entries: list[Any], key: str) -> list[Any] | None:
        """Return the values of a field that older versions of PyTorch do not write; None if it is missing."""
        if not entries or key not in entries[0]:
            return None
        return [entry.get(key) for entry in entries]

    def _metadata_numbers(self, entries: list[Any], place: str) -> "array[int] | None":
        texts = [entry.get("user_metadata") for entry in entries]
        kinds = set(map(type, texts))
        if not kinds <= {str, type(None)}:
            expected = "`user_metadata` as text"
            self._refuse_first(entries, place, lambda entry: type(entry.get("user_metadata", "")) is str, expected)
        if str not in kinds:
            return None
        known = self._metadata
        return array("i", [known.setdefault(text, len(known)) if text else -1 for text in texts])

    def _segments(self, found: list[Any]) -> dict[int, list[Segment]]:
        segments: dict[int, list[Segment]] = {}
        for at, raw in enumerate(found):
            place = f"segments[{at}]"
            if type(raw) is not dict:
                self._refuse(place, f"a dict, not a {type(raw).__name__}")
            device = self._integer(raw, "device", place, most=_DEVICES - 1, absent=0)
            segments.setdefault(device, []).append(self._segment(raw, place))
        for device, several in segments.items():
            ordered = sorted(several, key=lambda segment: segment.address)
            for one, following in pairwise(ordered):
                if one.address + one.bytes > following.address:
                    self._refuse("segments", f"segments of device {device} that do not overlap")
        return segments

    def _segment(self, raw: dict[str, Any], place: str) -> Segment:
        address = self._integer(raw, "address", place, most=_MOST_ADDRESS)
        size = self._integer(raw, "total_size", place, least=1, most=_MOST_BYTES)
        kind, expandable, blocks = raw.get("segment_type"), raw.get("is_expandable", False), raw.get("blocks")
        if kind not in ("small", "large"):
            self._refuse(f"{place}.segment_type", "`small` or `large`")
        if type(expandable) is not bool:
            self._refuse(f"{place}.is_expandable", "True or False")
        if type(blocks) is not list or id(blocks) in self._blocks_seen:
            self._refuse(f"{place}.blocks", "a separate list")
        self._blocks_seen.add(id(blocks))
        return Segment(
            address=address,
            bytes=size,
            stream=self._integer(raw, "stream", place, least=-(2**63), most=2**63 - 1),
            small=kind == "small",
            expandable=expandable,
            stack=self._stack(raw, place),
            blocks=self._blocks(blocks, address, address + size, f"{place}.blocks"),
        )

    def _blocks(self, found: list[Any], start: int, end: int, place: str) -> tuple[SnapshotBlock, ...]:
        """Read blocks. Without addresses, as in files from 2023, each block starts where the previous one ends."""
        blocks = []
        for at, raw in enumerate(found):
            here = f"{place}[{at}]"
            if type(raw) is not dict:
                self._refuse(here, f"a dict, not a {type(raw).__name__}")
            size = self._integer(raw, "size", here, least=1, most=_MOST_BYTES)
            address = self._integer(raw, "address", here, most=_MOST_ADDRESS, absent=start)
            asked = self._integer(raw, "requested_size", here, most=_MOST_BYTES, absent=-1)
            state = raw.get("state")
            if type(state) is not str or state not in _STATES:
                self._refuse(f"{here}.state", f"one of {', '.join(map(str, _STATES))}")
            if address < start or address + size > end:
                self._refuse(here, "a block inside its segment and after the previous one")
            start = address + size
            blocks.append(
                SnapshotBlock(
                    address=address,
                    bytes=size,
                    requested_bytes=None if asked < 0 else asked,
                    state=_STATES[state],
                    stack=self._stack(raw, here),
                )
            )
        return tuple(blocks)

    def _stack(self, raw: dict[str, Any], place: str) -> int | None:
        number = self._stacks.number(raw["frames"], place) if "frames" in raw else -1
        return None if number < 0 else number

    def _settings(self, raw: object, events: pl.DataFrame, ended: Iterable[Segment]) -> AllocatorSettings:
        if raw is None:  # older snapshots have no settings; the events show at least this
            mapped = any(segment.expandable for segment in ended)
            return AllocatorSettings(expandable_segments=mapped or bool((events["action"] == "segment_map").any()))
        place = "allocator_settings"
        if type(raw) is not dict:
            self._refuse(place, "a dict")
        expandable = raw.get("expandable_segments", False)
        if type(expandable) is not bool:
            self._refuse(f"{place}.expandable_segments", "True or False")
        largest = self._integer(raw, "max_split_size", place, least=-1, most=2**64 - 1, absent=-1)
        divisions = raw.get("roundup_power2_divisions", {})
        if type(divisions) is not dict:
            self._refuse(f"{place}.roundup_power2_divisions", "a dict")
        names = [str(1 << interval) for interval in range(_ROUNDING_INTERVALS)]
        by_interval = {name: divisions.get(name, divisions.get(int(name), 0)) for name in names}
        chosen = [
            self._integer(by_interval, name, f"{place}.roundup_power2_divisions", most=2**30, absent=0)
            for name in names
        ]
        return AllocatorSettings(
            expandable_segments=expandable,
            max_split_bytes=None if largest < 0 or largest >= 2**63 - 1 else largest,
            roundup_divisions=tuple(chosen) if any(chosen) else (),
        )

    def _integer(
        self, raw: dict[str, Any], key: str, place: str, *, most: int, least: int = 0, absent: int | None = None
    ) -> int:
        value = raw.get(key, absent)
        if not (_within(value, least, most) or (key not in raw and absent is not None)):
            self._refuse(f"{place}.{key}", f"a number from {least} to {most}")
        return cast(int, value)

    def _refuse_first(self, entries: Iterable[Any], place: str, good: Callable[[Any], bool], expected: str) -> NoReturn:
        at = next((at for at, entry in enumerate(entries) if not good(entry)), 0)
        self._refuse(f"{place}[{at}]", expected)

    def _refuse(self, place: str, expected: str) -> NoReturn:
        raise StepscopeError(
            f"damaged memory snapshot: `{self._path}`",
            detail=f"at {place}: expected {expected}",
            hint='create it again: torch.cuda.memory._dump_snapshot("snapshot.pickle")',
        )


def _within(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _positions(numbers: "array[int] | None", count: int) -> pl.Series:
    """Convert to a series; negative numbers become null."""
    if numbers is None:
        return pl.repeat(None, count, dtype=pl.Int32, eager=True)
    found = np.frombuffer(numbers, np.int32)
    return pl.Series(found).set(pl.Series(found < 0), None)

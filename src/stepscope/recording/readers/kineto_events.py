"""Decode events of the PyTorch profiler from JSON text to columns of numbers.

This is the hot path of reading a trace and runs in separate processes for large files (`kineto_workers.py`), so it
imports only msgspec and numpy. Three things make it fast: the parser builds only the fields declared here, texts are
replaced by numbers immediately, and timestamps are not converted one by one.

Timestamps must not be parsed as floats: microseconds since the epoch with three decimals have 19 digits, a double has
16. The parser keeps them as text, and they are converted to nanoseconds together.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from stepscope.recording.readers.json_blocks import BETWEEN_EVENTS

IMPOSSIBLE = -(2**62)  # an invalid time: NaN, or larger than any clock
NONE = -1  # null in columns of counts and ids, which are never negative
_LARGEST = 2**63 - 1
_LONGEST_TEXT = 16_384
_MOST_CUTS = 200  # give up on an event after this many wrong cuts

_RENAMED = {
    "sequence": "Sequence number",
    "forward_thread": "Fwd thread id",
    "shapes": "Input Dims",
    "dtypes": "Input type",
    "strides": "Input Strides",
    "arguments": "Concrete Inputs",
    "registers": "registers per thread",
    "shared_bytes": "shared memory",
    "graph_node": "graph node id",
}


_NO_TEXT = Raw(b"")


class Args(msgspec.Struct, gc=False, rename=_RENAMED):
    correlation: int = NONE
    sequence: int = NONE
    forward_thread: int = NONE
    stream: int = NONE
    device: int = NONE
    bytes: int = NONE
    registers: int = NONE
    shared_bytes: int = NONE
    graph_node: int = NONE
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    shapes: Raw = _NO_TEXT
    dtypes: Raw = _NO_TEXT
    strides: Raw = _NO_TEXT
    arguments: Raw = _NO_TEXT


_NO_ARGS = Args()
_ZERO = Raw(b"0")


class Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: Raw = _ZERO
    dur: Raw = _ZERO
    pid: int | str = NONE
    tid: int | str = NONE
    id: int | str = NONE
    args: Args = msgspec.field(default_factory=lambda: _NO_ARGS)


_DECODER = msgspec.json.Decoder(list[Event])
_UNTYPED = msgspec.json.Decoder(dict[str, Any], float_hook=lambda text: Raw(text.encode()))

# Current names, and those of PyTorch before 1.12.
_CATEGORIES = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
    "cuda_runtime": "launch",
    "runtime": "launch",
    "cuda_driver": "launch",
    "driver": "launch",
    "cpu_op": "op",
    "operator": "op",
    "user_annotation": "user",
    "python_function": "python",
    "pythonfunction": "python",
    "python": "python",
    "fwdbwd": "flow",
    "forward_backward": "flow",
}
# Derived from other events by the profiler, or about the profiler itself.
_NOT_NEEDED = {
    "ac2g",
    "async_cpu_to_gpu",
    "async_gpu",
    "gpu_user_annotation",
    "overhead",
    "trace",
    "cpu_instant_event",
    "",
}
# The Python frames that show which module or part of a step is running.
_FRAMES = re.compile(r"nn\.Module: |torch/optim/\S+: (?:step|zero_grad)$|torch/_tensor\.py\S*: backward$")

Ints = NDArray[np.int64]
Columns = dict[str, Ints]


class Decoded(msgspec.Struct):
    """One block: columns by table, with texts as numbers, and counts of what was left out."""

    tables: dict[str, Columns]
    new_texts: list[str]
    ignored: int = 0  # events of unknown categories
    lost_events: int = 0
    lost_bytes: int = 0
    head: bytes = b""  # text at an edge that is not a whole event
    tail: bytes = b""


class BadBlockError(Exception):
    """The text is not a list of events: cut in the wrong place, or damaged."""


class EventDecoder:
    """Converts blocks to columns. Texts keep their numbers over its lifetime, so each is sent and stored once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._new_texts: list[str] = []
        self._kept_frames: dict[str, bool] = {}

    def decode(self, block: bytes) -> Decoded:
        """Decode a block. Raise BadBlockError if the text is not a list of events."""
        try:
            events = _DECODER.decode(b"[" + block + b"]")
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise BadBlockError(str(error)) from None
        return self._collect(events)

    def salvage(self, block: bytes) -> Decoded:
        """Decode a block event by event if it is damaged or was cut in the wrong place. Unreadable text is counted and
        left out, or kept as a fragment if the neighbouring block may have the rest."""
        spans = list(_spans(block))
        events = []
        lost: list[int] = []
        first = 0  # first span that is not accounted for
        opening = 0  # last span that may start an event: it has a phase letter
        for last, (start, end) in enumerate(spans):
            if b'"ph"' in block[start:end]:
                opening = last
            # On its own, or, if it was cut, with the spans before it.
            for begin in dict.fromkeys((last, max(opening, first), first)):
                event = _decode_leniently(block[spans[begin][0] : end])
                if event is not None:
                    lost.extend(range(first, begin))
                    events.append(event)
                    first = last + 1
                    break
            if last - first >= _MOST_CUTS:
                lost.append(first)
                first += 1
        lost.extend(range(first, len(spans)))
        stretches = _join_neighbours(lost, spans)
        decoded = self._collect(events)
        if stretches and stretches[0][0] == 0:
            decoded.head = block[slice(*stretches.pop(0))]
        if stretches and stretches[-1][1] == len(block):
            decoded.tail = block[slice(*stretches.pop())]
        decoded.lost_events, decoded.lost_bytes = len(stretches), sum(end - start for start, end in stretches)
        return decoded

    def _collect(self, events: Sequence[Event]) -> Decoded:
        by_category: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            by_category[event.cat].append(event)
        groups: dict[str, list[Event]] = {}
        ignored = 0
        for category, members in by_category.items():
            lowered = category.casefold()
            kind = _CATEGORIES.get(lowered)
            if lowered in _NOT_NEEDED:
                continue
            if kind is None:
                ignored += sum(event.ph == "X" for event in members)
            elif kind == "flow":
                for end in "sf":
                    groups.setdefault(f"flow {end}", []).extend(event for event in members if event.ph == end)
            else:
                kept = [event for event in members if event.ph == "X"]
                if kind == "python":
                    kept = [event for event in kept if self._is_kept(event.name)]
                groups.setdefault(kind, []).extend(kept)
        tables = {kind: self._columns(kind, group) for kind, group in groups.items() if group}
        new_texts, self._new_texts = self._new_texts, []
        return Decoded(tables=tables, new_texts=new_texts, ignored=ignored)

    def _columns(self, kind: str, group: list[Event]) -> Columns:
        match kind:
            case "kernel" | "memcpy" | "memset":
                return self._kernels(group)
            case "launch":
                return self._launches(group)
            case "op":
                return self._ops(group)
            case "flow s" | "flow f":
                return self._flows(group)
            case _:
                return self._on_host(group)

    def _is_kept(self, name: str) -> bool:
        try:
            return self._kept_frames[name]
        except KeyError:
            kept = self._kept_frames[name] = _FRAMES.search(name) is not None
            return kept

    def _texts(self, values: Iterable[str]) -> Ints:
        numbers = self._numbers
        result = []
        for value in values:
            try:
                result.append(numbers[value])
            except KeyError:
                numbers[value] = number = len(numbers)
                self._new_texts.append(value[:_LONGEST_TEXT])
                result.append(number)
        return np.array(result, dtype=np.int64)

    def _raws(self, values: Iterable[Raw]) -> Ints:
        return self._texts([str(value, "utf-8", "replace") for value in values])

    def _timed(self, group: list[Event]) -> Columns:
        start = nanoseconds([event.ts for event in group])
        lasted = nanoseconds([event.dur for event in group])
        return {
            "name": self._texts([event.name for event in group]),
            "start_ns": start,
            # Invalid times end before they start, so that they are left out with other such events.
            "end_ns": np.where((start == IMPOSSIBLE) | (lasted == IMPOSSIBLE), IMPOSSIBLE - 1, start + lasted),
        }

    def _on_host(self, group: list[Event]) -> Columns:
        return {
            **self._timed(group),
            "process": _numbers([event.pid for event in group]),
            "thread": _numbers([event.tid for event in group]),
        }

    def _kernels(self, group: list[Event]) -> Columns:
        grids = [event.args.grid or (NONE, NONE, NONE) for event in group]
        blocks = [event.args.block or (NONE, NONE, NONE) for event in group]
        columns = self._timed(group)
        streams = [event.args.stream if event.args.stream != NONE else event.tid for event in group]
        devices = [event.args.device if event.args.device != NONE else event.pid for event in group]
        columns |= {"stream": _numbers(streams), "device": _numbers(devices)}
        columns |= {
            name: _numbers([getattr(event.args, name) for event in group])
            for name in ("correlation", "bytes", "registers", "shared_bytes", "graph_node")
        }
        for prefix, sizes in (("grid", grids), ("block", blocks)):
            columns |= {f"{prefix}_{axis}": _numbers([size[i] for size in sizes]) for i, axis in enumerate("xyz")}
        return columns

    def _launches(self, group: list[Event]) -> Columns:
        return {**self._on_host(group), "correlation": _numbers([event.args.correlation for event in group])}

    def _ops(self, group: list[Event]) -> Columns:
        columns = self._on_host(group)
        columns["sequence"] = _numbers([event.args.sequence for event in group])
        columns["forward_thread"] = _numbers([event.args.forward_thread for event in group])
        for name in ("shapes", "dtypes", "strides", "arguments"):
            values = [getattr(event.args, name) for event in group]
            if any(value is not _NO_TEXT for value in values):
                columns[name] = self._raws(values)
        return columns

    def _flows(self, group: list[Event]) -> Columns:
        return {
            "id": _numbers([event.id for event in group]),
            "ns": nanoseconds([event.ts for event in group]),
            "process": _numbers([event.pid for event in group]),
            "thread": _numbers([event.tid for event in group]),
        }


def nanoseconds(values: Sequence[Raw]) -> Ints:
    """Convert microseconds as text to nanoseconds, exactly; `IMPOSSIBLE` for invalid times."""
    if not values:
        return np.empty(0, np.int64)
    joined = b"\n".join(values)
    digits = joined.replace(b".", b"")
    text = np.frombuffer(joined, np.uint8)
    ends = np.append(np.flatnonzero(text == ord("\n")), len(text))
    points = np.flatnonzero(text == ord("."))
    # If each has at most one point, only digits, and few enough of them, the number without its point is right up to a
    # power of ten.
    owner = np.searchsorted(ends, points)
    only_digits = len(ends) == len(values) and not digits.translate(None, b"0123456789\n")
    plain = only_digits and bool((np.diff(owner) > 0).all())
    if plain:
        decimals = np.zeros(len(values), np.int64)
        decimals[owner] = ends[owner] - points - 1
        lengths = np.diff(ends, prepend=-1) - 1
        lengths[owner] -= 1
        plain = bool((decimals <= 3).all() and (lengths >= 1).all() and (lengths + 3 - decimals <= 19).all())
        plain = plain and not _starts_with_nine(text, ends, lengths + 3 - decimals)
    if not plain:
        return np.array([_exact_nanoseconds(bytes(value)) for value in values], dtype=np.int64)
    return np.fromstring(digits.decode("ascii"), dtype=np.int64, sep="\n") * _POWERS[3 - decimals]


def _starts_with_nine(text: NDArray[np.uint8], ends: Ints, digits: Ints) -> bool:
    """Whether a 19-digit number starts with 9 and may not fit 64 bits; no real timestamp does."""
    starts = np.concatenate(([0], ends[:-1] + 1))
    return bool(((digits == 19) & (text[starts] == ord("9"))).any())


_POWERS = np.array([1, 10, 100, 1000], dtype=np.int64)
_PLAIN_NUMBER = re.compile(rb'"?(-?)(\d{1,16})(?:\.(\d{1,30}))?"?')


def _exact_nanoseconds(text: bytes) -> int:
    if found := _PLAIN_NUMBER.fullmatch(text):
        sign, whole, fraction = found.groups()
        value = int(whole) * 1000 + int(((fraction or b"") + b"000")[:3])
        value = -value if sign else value
        return value if abs(value) <= _LARGEST else IMPOSSIBLE
    try:
        rounded = float(text.strip(b'"')) * 1000
    except ValueError:
        return IMPOSSIBLE
    return round(rounded) if abs(rounded) < 2**62 else IMPOSSIBLE


def _numbers(values: Sequence[Any]) -> Ints:
    try:
        return np.array(values, dtype=np.int64)
    except (OverflowError, ValueError, TypeError):
        # Autograd's "no sequence number" is 2**64 - 1; old traces write streams as `stream 7`.
        return np.array([_number(value) for value in values], dtype=np.int64)


def _number(value: Any) -> int:
    if isinstance(value, int):
        return value if 0 <= value <= _LARGEST else NONE
    found = re.search(r"\d{1,18}", value) if isinstance(value, str) else None
    return int(found.group()) if found else NONE


def _spans(block: bytes) -> Iterable[tuple[int, int]]:
    start = 0
    for found in BETWEEN_EVENTS.finditer(block):
        yield start, found.start() + 1
        start = block.index(b"{", found.start() + 1)
    yield start, len(block)


def _join_neighbours(rows: list[int], spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join adjacent spans: they are the parts of one event that was cut."""
    stretches: list[tuple[int, int]] = []
    for place, row in enumerate(rows):
        if place and rows[place - 1] == row - 1:
            stretches[-1] = (stretches[-1][0], spans[row][1])
        else:
            stretches.append(spans[row])
    return stretches


def _decode_leniently(text: bytes) -> Event | None:
    """Decode an event even if a value has an unexpected type. Return None if the text is not JSON or has no phase
    letter (an object inside an event, after a wrong cut)."""
    event = _decode_event(text)
    return event if event is not None and event.ph else None


def _decode_event(text: bytes) -> Event | None:
    with suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return msgspec.json.decode(text, type=Event)
    try:
        fields = _UNTYPED.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    args = fields.get("args")
    kept = {key: value for key, value in fields.items() if key in ("ts", "dur") or type(value) in _FIELDS.get(key, ())}
    if isinstance(args, dict):
        kept["args"] = {key: value for key, value in args.items() if key in _NUMBERS_IN_ARGS and type(value) is int}
    return msgspec.json.decode(msgspec.json.encode(kept), type=Event)


_FIELDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("ph", "cat", "name"), (str,)),
    **dict.fromkeys(("pid", "tid", "id"), (int, str)),
}
_NUMBERS_IN_ARGS = {_RENAMED.get(field.name, field.name) for field in msgspec.structs.fields(Args) if field.type is int}

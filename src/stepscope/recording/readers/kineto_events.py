"""Decode events of the PyTorch profiler from JSON text to columns of numbers.

This is the hot path of reading a trace and runs in separate processes for large files (`kineto_workers.py`), so it
imports only msgspec and numpy. Three things make it fast: the parser builds only the fields declared here, texts are
replaced by numbers immediately, and timestamps are not converted one by one.

Timestamps must not be parsed as floats: microseconds since the epoch with three decimals have 19 digits, a double has
16. The parser keeps them as text, and they are converted to nanoseconds together.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from stepscope.recording.readers.json_blocks import BETWEEN_EVENTS
from stepscope.recording.readers.python_frames import name_user_frame

IMPOSSIBLE = -(2**62)  # an invalid time: NaN, or larger than any clock
NONE = -1  # null in columns of counts and ids, which are never negative
_LARGEST = 2**63 - 1
_LONGEST_TEXT = 16_384
_MOST_TEXTS = 1 << 16  # remembered at a time
_PART_BYTES = 256 << 10
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
    "collective": "Collective name",
    "process_group": "Process Group Name",
    "group_size": "Group size",
    "in_elements": "In msg nelems",
    "out_elements": "Out msg nelems",
    "element": "dtype",
}
# Bytes per element of a collective's message, by PyTorch's name.
_ELEMENT_BYTES = {
    **dict.fromkeys((b'"Byte"', b'"Char"', b'"Bool"', b'"Float8_e4m3fn"', b'"Float8_e5m2"'), 1),
    **dict.fromkeys((b'"Half"', b'"BFloat16"', b'"Short"'), 2),
    **dict.fromkeys((b'"Float"', b'"Int"'), 4),
    **dict.fromkeys((b'"Double"', b'"Long"'), 8),
}


_NO_TEXT = Raw(b"")
_NO_SIZE = (NONE, NONE, NONE)
ARGUMENTS = ("shapes", "dtypes", "strides", "arguments")
COLLECTIVE_TEXTS = ("collective", "process_group")
_OPTIONAL = (*ARGUMENTS, *COLLECTIVE_TEXTS, "group_size")


# Fields are in the order of most files: the parser expects the field after the last one it found.
class Args(msgspec.Struct, gc=False, frozen=True, rename=_RENAMED):
    sequence: int = NONE
    forward_thread: int = NONE
    arguments: Raw = _NO_TEXT
    dtypes: Raw = _NO_TEXT
    strides: Raw = _NO_TEXT
    shapes: Raw = _NO_TEXT
    device: int = NONE
    stream: int = NONE
    correlation: int = NONE
    bytes: int = NONE
    registers: int = NONE
    shared_bytes: int = NONE
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    graph_node: int = NONE
    collective: Raw = _NO_TEXT
    process_group: Raw = _NO_TEXT
    group_size: int = NONE
    in_elements: int = NONE
    out_elements: int = NONE
    element: Raw = _NO_TEXT


_NO_ARGS = Args()
_ZERO = Raw(b"0")


class Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = NONE
    tid: int | str = NONE
    ts: Raw = _ZERO
    dur: Raw = _ZERO
    args: Args = _NO_ARGS
    id: int | str = NONE


_DECODER = msgspec.json.Decoder(list[Event])
_UNTYPED = msgspec.json.Decoder(dict[str, Any], float_hook=lambda text: Raw(text.encode()))

_OLD_OP = "operator or range"
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
    "operator": _OLD_OP,
    "user_annotation": "user",
    "python_function": "python",
    "pythonfunction": "python",
    "python": "python",
    "fwdbwd": "flow",
    "forward_backward": "flow",
}
_NOT_NEEDED, _UNKNOWN = "not needed", "unknown"
# Derived from other events by the profiler, or about the profiler itself.
_CATEGORIES |= dict.fromkeys(
    (
        "ac2g",
        "async_cpu_to_gpu",
        "async_gpu",
        "gpu_user_annotation",
        "overhead",
        "trace",
        "cpu_instant_event",
        "",
    ),
    _NOT_NEEDED,
)
# The Python frames that show which module or part of a step is running, or what part of its input is being made.
_FRAMES = re.compile(
    r"nn\.Module: |torch/optim/\S+: (?:step|zero_grad)$|torch/_tensor\.py\S*: backward$"
    r"|torch/utils/data/\S+: (?:__next__|_try_get_data|default_collate)$|: (?:preprocess|collate_fn)$"
)

_OPERATOR = re.compile(r"::|^detach_?$|Backward\d*$")

Ints = NDArray[np.int64]
Columns = dict[str, Ints]
Times = tuple[bytes, bytes]


class Decoded(msgspec.Struct):
    """One block: columns by table, with texts as numbers, and counts of what was left out."""

    tables: dict[str, Columns]
    new_texts: list[str]
    starts_over: bool  # texts are numbered from 0 again
    ignored: int = 0  # events of unknown categories
    lost_events: int = 0
    lost_bytes: int = 0
    head: bytes = b""  # text at an edge that is not a whole event
    tail: bytes = b""


class BadBlockError(Exception):
    """The text is not a list of events: cut in the wrong place, or damaged."""


class _Kinds(dict[str, str]):
    """The kinds of events by their category, in any case."""

    def __missing__(self, category: str) -> str:
        kind = self[category] = _CATEGORIES.get(category.casefold(), _UNKNOWN)
        return kind


class _Numbering(dict[str, int]):
    """Numbers distinct texts in the order of their first use. The empty text is `NONE`."""

    def __init__(self) -> None:
        super().__init__({"": NONE})
        self.new: list[str] = []  # not sent yet
        self.starts_over = True

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self) - 1
        self.new.append(text[:_LONGEST_TEXT])
        return number


class EventDecoder:
    """Converts blocks to columns. Texts keep their numbers from block to block, so each is sent once; after many, they
    are forgotten and numbered anew. Without `with_arguments`, operators have no shapes, types, strides and lines."""

    def __init__(self, *, with_arguments: bool = True) -> None:
        self._with_arguments = with_arguments
        self._numbers = _Numbering()
        self._kinds = _Kinds()
        self._kept_frames: dict[str, bool] = {}
        self._user_frames: dict[str, str] = {}

    def decode(self, block: bytes) -> Decoded:
        """Decode a block. Raise BadBlockError if the text is not a list of events."""
        return self._collect(_decode_in_parts(block))

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
        decoded = self._collect([events])
        if stretches and stretches[0][0] == 0:
            decoded.head = block[slice(*stretches.pop(0))]
        if stretches and stretches[-1][1] == len(block):
            decoded.tail = block[slice(*stretches.pop())]
        decoded.lost_events, decoded.lost_bytes = len(stretches), sum(end - start for start, end in stretches)
        return decoded

    def _collect(self, parts: Iterable[Sequence[Event]]) -> Decoded:
        pieces: dict[str, list[Columns]] = defaultdict(list)
        times: dict[str, list[Times]] = defaultdict(list)
        ignored = 0
        for events in parts:
            groups, others = self._sort(events)
            ignored += others
            for kind, group in groups.items():
                pieces[kind].append(self._columns(kind, group))
                times[kind].append(_times(group))
        tables = {kind: _join_columns(kind, pieces[kind], times[kind]) for kind in pieces}
        numbers = self._numbers
        decoded = Decoded(tables=tables, new_texts=numbers.new, starts_over=numbers.starts_over, ignored=ignored)
        numbers.new, numbers.starts_over = [], False
        if len(numbers) > _MOST_TEXTS:
            self._numbers, self._kinds, self._kept_frames, self._user_frames = _Numbering(), _Kinds(), {}, {}
        return decoded

    def _sort(self, events: Sequence[Event]) -> tuple[dict[str, list[Event]], int]:
        """Return the events by kind, in their order, and the number of events with an unknown category."""
        by_kind: dict[str, list[Event]] = defaultdict(list)
        kinds = self._kinds
        for event in events:
            by_kind[kinds[event.cat]].append(event)
        by_kind.pop(_NOT_NEEDED, None)
        unknown = by_kind.pop(_UNKNOWN, [])
        flows = by_kind.pop("flow", [])
        groups = {kind: [event for event in group if event.ph == "X"] for kind, group in by_kind.items()}
        groups |= {f"flow {end}": [event for event in flows if event.ph == end] for end in "sf"}
        if "python" in groups:
            if self._with_arguments:
                groups["frame"] = [event for event in groups["python"] if self._name_frame(event.name)]
            groups["python"] = [event for event in groups["python"] if self._is_kept(event.name)]
        # Before PyTorch 1.12, operators and `record_function` ranges share a category.
        for event in groups.pop(_OLD_OP, ()):
            groups.setdefault("user" if _is_range(event) else "op", []).append(event)
        return {kind: group for kind, group in groups.items() if group}, sum(event.ph == "X" for event in unknown)

    def _columns(self, kind: str, group: list[Event]) -> Columns:
        match kind:
            case "kernel" | "memcpy" | "memset":
                return self._kernels(group)
            case "launch":
                return self._launches(group)
            case "op":
                return self._ops(group)
            case "frame":
                names = [self._user_frames[event.name] for event in group]
                return {"name": self._texts(names), **_threads(group)}
            case "flow s" | "flow f":
                return {"id": _numbers([event.id for event in group]), **_threads(group)}
            case _:
                return {**self._names(group), **_threads(group)}

    def _is_kept(self, name: str) -> bool:
        try:
            return self._kept_frames[name]
        except KeyError:
            kept = self._kept_frames[name] = _FRAMES.search(name) is not None
            return kept

    def _name_frame(self, name: str) -> str:
        try:
            return self._user_frames[name]
        except KeyError:
            named = self._user_frames[name] = name_user_frame(name)
            return named

    def _texts(self, values: Sequence[str]) -> Ints:
        return np.fromiter(map(self._numbers.__getitem__, values), np.int64, len(values))

    def _names(self, group: list[Event]) -> Columns:
        return {"name": self._texts([event.name for event in group])}

    def _raws(self, values: list[Raw]) -> Ints:
        if values.count(_NO_TEXT) == len(values):
            return np.full(len(values), NONE)
        # Converting all at once takes a third of the time of one by one, but an indented file has line breaks inside.
        texts = b"\n".join(values).decode("utf-8", "replace").split("\n")
        if len(texts) != len(values):
            texts = [str(value, "utf-8", "replace") for value in values]
        return self._texts(texts)

    def _quoted(self, values: list[Raw]) -> Ints:
        """Number texts that are strings of JSON, without their quotes."""
        if values.count(_NO_TEXT) == len(values):
            return np.full(len(values), NONE)
        return self._texts([str(value, "utf-8", "replace").strip('"') for value in values])

    def _kernels(self, group: list[Event]) -> Columns:
        args = [event.args for event in group]
        streams = [event.tid if one.stream == NONE else one.stream for event, one in zip(group, args, strict=True)]
        devices = [event.pid if one.device == NONE else one.device for event, one in zip(group, args, strict=True)]
        columns = {**self._names(group), "stream": _numbers(streams), "device": _numbers(devices)}
        for name in ("correlation", "bytes", "registers", "shared_bytes", "graph_node"):
            columns[name] = _numbers(list(map(attrgetter(name), args)))
        for prefix in ("grid", "block"):
            sizes = [size or _NO_SIZE for size in map(attrgetter(prefix), args)]
            along = _numbers([number for size in sizes for number in size]).reshape(-1, 3)
            columns |= {f"{prefix}_{axis}": along[:, i] for i, axis in enumerate("xyz")}
        collectives = [one.collective for one in args]
        if collectives.count(_NO_TEXT) < len(args):
            columns["bytes"] = _numbers(list(map(_message_bytes, args)))
        columns["group_size"] = _numbers([one.group_size for one in args])
        columns["collective"] = self._quoted(collectives)
        columns["process_group"] = self._quoted([one.process_group for one in args])
        return columns

    def _launches(self, group: list[Event]) -> Columns:
        correlation = _numbers([event.args.correlation for event in group])
        return {**self._names(group), **_threads(group), "correlation": correlation}

    def _ops(self, group: list[Event]) -> Columns:
        args = [event.args for event in group]
        columns = {**self._names(group), **_threads(group)}
        columns["sequence"] = _numbers([one.sequence for one in args])
        columns["forward_thread"] = _numbers([one.forward_thread for one in args])
        if self._with_arguments:
            columns["shapes"] = self._raws([one.shapes for one in args])
            columns["dtypes"] = self._raws([one.dtypes for one in args])
            columns["strides"] = self._raws([one.strides for one in args])
            columns["arguments"] = self._raws([one.arguments for one in args])
        return columns


def _decode_in_parts(block: bytes) -> Iterator[list[Event]]:
    """Yield the events of a block in parts that stay in the CPU's cache until their fields are taken. Raise
    BadBlockError if the text is not a list of events."""
    start = 0
    while start < len(block):
        found = BETWEEN_EVENTS.search(block, start + _PART_BYTES)
        end = found.start() + 1 if found else len(block)
        try:
            yield _DECODER.decode(b"".join((b"[", memoryview(block)[start:end], b"]")))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise BadBlockError(str(error)) from None
        start = block.index(b"{", end) if found else end


def _is_range(event: Event) -> bool:
    """Whether an event of the category `Operator` is a range. Operators have a namespace (`detach` is older than
    namespaces) or a sequence number, or run the backward of a node."""
    return event.args.sequence == NONE and _OPERATOR.search(event.name) is None


def _message_bytes(args: Args) -> int:
    """Return the bytes of a collective's message: the larger of what goes in and what comes out."""
    if args.collective is _NO_TEXT:
        return args.bytes
    elements, size = max(args.in_elements, args.out_elements), _ELEMENT_BYTES.get(bytes(args.element))
    return NONE if size is None or elements < 0 else elements * size


def _threads(group: list[Event]) -> Columns:
    return {"process": _numbers([event.pid for event in group]), "thread": _numbers([event.tid for event in group])}


def _times(group: list[Event]) -> Times:
    """Return the starts and durations as text."""
    return _join_lines([event.ts for event in group]), _join_lines([event.dur for event in group])


def _join_lines(values: Sequence[Raw]) -> bytes:
    """Return one line per value."""
    joined = b"\n".join(values)
    if joined.count(b"\n") >= len(values):  # a line break between the parts of a value
        joined = b"\n".join(bytes(value).replace(b"\n", b" ") for value in values)
    return joined


def _join_columns(kind: str, pieces: Sequence[Columns], times: Sequence[Times]) -> Columns:
    """Return the columns of a table. Columns without any value are left out."""
    joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    columns = {name: column for name, column in joined.items() if name not in _OPTIONAL or (column != NONE).any()}
    start = nanoseconds([starts for starts, _ in times])
    if kind.startswith("flow"):
        return columns | {"ns": start}
    lasted = nanoseconds([durations for _, durations in times])
    # Invalid times end before they start, so that they are left out with other such events.
    end = np.where((start == IMPOSSIBLE) | (lasted == IMPOSSIBLE), IMPOSSIBLE - 1, start + lasted)
    return columns | {"start_ns": start, "end_ns": end}


def nanoseconds(lines: Sequence[bytes]) -> Ints:
    """Convert microseconds as text, one number per line, to nanoseconds, exactly; `IMPOSSIBLE` for invalid times."""
    if not lines:
        return np.empty(0, np.int64)
    joined = b"\n".join(lines)
    digits = joined.replace(b".", b"")
    text = np.frombuffer(joined, np.uint8)
    ends = np.append(np.flatnonzero(text == ord("\n")), len(text))
    points = np.flatnonzero(text == ord("."))
    # If each has at most one point, only digits, and few enough of them, the number without its point is right up to a
    # power of ten.
    only_digits = not digits.translate(None, b"0123456789\n")
    one_each = (
        only_digits and len(points) == len(ends) and bool((points < ends).all() and (points[1:] > ends[:-1]).all())
    )
    owner = np.arange(len(ends)) if one_each else np.searchsorted(ends, points)
    plain = one_each or (only_digits and bool((np.diff(owner) > 0).all()))
    if plain:
        decimals = np.zeros(len(ends), np.int64)
        decimals[owner] = ends[owner] - points - 1
        lengths = np.diff(ends, prepend=-1) - 1
        lengths[owner] -= 1
        plain = bool((decimals <= 3).all() and (lengths >= 1).all() and (lengths + 3 - decimals <= 19).all())
        plain = plain and not _starts_with_nine(text, ends, lengths + 3 - decimals)
    if not plain:
        return np.array([_exact_nanoseconds(line) for line in joined.split(b"\n")], dtype=np.int64)
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
        return np.fromiter(values, np.int64, len(values))
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

"""Snapshots in PyTorch's own layout, made by a model of its allocator that keeps its blocks in plain lists.

The model is slow and simple on purpose, and shares nothing with the replay that it judges: it searches where the
replay looks up, and it counts what is allocated and reserved as it goes.
"""

import gzip
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 1 << 20
Entry = dict[str, Any]


@dataclass(slots=True, eq=False)
class Piece:
    """A block of the model."""

    address: int
    size: int
    requested: int = 0
    state: str = "inactive"


@dataclass(slots=True, eq=False)
class Part:
    """A segment of the model, or a stretch of an expandable one, with its blocks in order."""

    address: int
    stream: int
    small: bool
    expandable: bool
    blocks: list[Piece] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)


@dataclass(slots=True, kw_only=True)
class Model:
    """The allocator. `allocated` and `reserved` have the totals after each of `entries`."""

    expandable: bool = False
    max_split: int | None = None
    divisions: int = 0
    entries: list[Entry] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    frames: list[Entry] = field(default_factory=list)
    _next: int = 0x7F00_0000_0000
    _now_us: int = 1_700_000_000_000_000
    _arenas: dict[tuple[int, bool], int] = field(default_factory=dict)

    def malloc(self, size: int, stream: int = 0, metadata: str = "") -> int:
        rounded = self.round(size)
        small = rounded <= MIB
        part, block = self._fit(rounded, stream, small) or self._grow(rounded, stream, small)
        rest = block.size - rounded
        fine = small or self.expandable
        if rest >= 512 if fine else rest > MIB and rounded < (self.max_split or 2**60):
            block.size = rounded
            part.blocks.insert(part.blocks.index(block) + 1, Piece(block.address + rounded, rest))
        block.state, block.requested = "active_allocated", size
        self._record("alloc", block.address, size, stream, metadata)
        return block.address

    def free(self, address: int, *, complete: bool = True) -> None:
        part, block = self._find(address)
        block.state = "active_pending_free"
        self._record("free_requested", address, block.requested, part.stream)
        if complete:
            self.complete(address)

    def complete(self, address: int) -> None:
        part, block = self._find(address)
        block.state = "inactive"
        self._record("free_completed", address, block.requested, part.stream)
        self._merge(part)

    def empty_cache(self) -> None:
        for part in list(self.parts):
            if part.expandable:
                self._unmap(part)
            elif len(part.blocks) == 1 and part.blocks[0].state == "inactive":
                self.parts.remove(part)
                self._record("segment_free", part.address, part.size, part.stream)

    def run_out(self, size: int) -> None:
        self._record("oom", 0, size, 0)
        del self.entries[-1]["addr"]
        self.entries[-1]["device_free"] = 4096

    def live(self) -> list[int]:
        return self._in_state("active_allocated")

    def pending(self) -> list[int]:
        return self._in_state("active_pending_free")

    def round(self, size: int) -> int:
        if self.divisions > 1 and size > 512 * self.divisions:
            power = 1
            while power * 2 <= size:
                power *= 2
            step = power // self.divisions
            return -(-size // step) * step
        return max(512, -(-size // 512) * 512)

    def segments(self, device: int = 0) -> list[Entry]:
        return [
            {
                "device": device,
                "address": part.address,
                "total_size": part.size,
                "allocated_size": sum(one.size for one in part.blocks if one.state == "active_allocated"),
                "stream": part.stream,
                "segment_type": "small" if part.small else "large",
                "is_expandable": part.expandable,
                "segment_pool_id": (0, 0),
                "frames": [],
                "blocks": [
                    {
                        "address": one.address,
                        "size": one.size,
                        "requested_size": one.requested,
                        "state": one.state,
                        "frames": self.frames if one.state == "active_allocated" else [],
                    }
                    for one in part.blocks
                ],
            }
            for part in sorted(self.parts, key=lambda part: part.address)
        ]

    def snapshot(self, first: int = 0) -> Entry:
        """With the events from `first` on."""
        return {
            "segments": self.segments(),
            "device_traces": [self.entries[first:]],
            "allocator_settings": {
                "expandable_segments": self.expandable,
                "max_split_size": self.max_split or -1,
                "roundup_power2_divisions": {str(1 << at): self.divisions for at in range(16)},
            },
        }

    def _fit(self, rounded: int, stream: int, small: bool) -> tuple[Part, Piece] | None:
        fitting = [
            (block.size, block.address, part, block)
            for part in self.parts
            if part.stream == stream and part.small == small
            for block in part.blocks
            if block.state == "inactive" and block.size >= rounded and self._may_take(rounded, block.size)
        ]
        return min(fitting, key=lambda one: one[:2])[2:] if fitting else None

    def _may_take(self, rounded: int, size: int) -> bool:
        largest = self.max_split or 2**60
        return size < rounded + 20 * MIB if rounded >= largest else size < largest

    def _grow(self, rounded: int, stream: int, small: bool) -> tuple[Part, Piece]:
        if self.expandable:
            return self._map(rounded, stream, small)
        size = 2 * MIB if small else 20 * MIB if rounded < 10 * MIB else -(-rounded // (2 * MIB)) * 2 * MIB
        part = Part(self._next, stream, small, expandable=False, blocks=[Piece(self._next, size)])
        # Side by side more often than not, as on a real device: nothing may merge from one into the other.
        self._next += size if self._next % 3 else size + 2 * MIB
        self.parts.append(part)
        self._record("segment_alloc", part.address, size, stream)
        return part, part.blocks[0]

    def _map(self, rounded: int, stream: int, small: bool) -> tuple[Part, Piece]:
        """Behind the first stretch of the arena that has room behind it, and that grows by whole granules."""
        arena = self._arenas.setdefault((stream, small), 0x10_0000_0000_0000 + len(self._arenas) * 2**40)
        granule = 2 * MIB if small else 20 * MIB
        own = sorted((one for one in self.parts if one.stream == stream and one.small == small), key=_address)
        fresh = Part(own[-1].address + own[-1].size if own else arena, stream, small, expandable=True)
        for at, part in enumerate([*own, fresh]):
            low = part.address + part.size
            limit = own[at + 1].address if at + 1 < len(own) else low + 2**40
            tail = part.blocks[-1].size if part.blocks and part.blocks[-1].state == "inactive" else 0
            wanted = -(-(rounded - tail) // granule) * granule
            if low + wanted <= limit:
                break
        if part is fresh:
            self.parts.append(part)
        part.blocks.append(Piece(low, wanted))
        self._record("segment_map", low, wanted, stream)
        self._merge(part)
        block = part.blocks[-1]
        if low + wanted == limit:  # the gap is closed: two stretches become one
            part.blocks += own[at + 1].blocks
            self.parts.remove(own[at + 1])
            self._merge(part)
            block = next(one for one in part.blocks if one.address <= low < one.address + one.size)
        return part, block

    def _unmap(self, part: Part) -> None:
        granule = 2 * MIB if part.small else 20 * MIB
        for block in [one for one in part.blocks if one.state == "inactive"]:
            arena = self._arenas[part.stream, part.small]
            low = arena - (arena - block.address) // granule * granule
            high = arena + (block.address + block.size - arena) // granule * granule
            if low >= high:
                continue
            part = next(one for one in self.parts if block in one.blocks)
            at, end = part.blocks.index(block), block.address + block.size
            before = [*part.blocks[:at], *([Piece(block.address, low - block.address)] if low > block.address else [])]
            behind = [*([Piece(high, end - high)] if high < end else []), *part.blocks[at + 1 :]]
            self.parts.remove(part)
            for blocks in (before, behind):
                if blocks:
                    self.parts.append(Part(blocks[0].address, part.stream, part.small, expandable=True, blocks=blocks))
            self._record("segment_unmap", low, high - low, part.stream)

    def _merge(self, part: Part) -> None:
        merged: list[Piece] = []
        for block in part.blocks:
            if merged and merged[-1].state == block.state == "inactive":
                merged[-1].size += block.size
            else:
                merged.append(block)
        part.blocks = merged

    def _find(self, address: int) -> tuple[Part, Piece]:
        return next((part, block) for part in self.parts for block in part.blocks if block.address == address)

    def _in_state(self, state: str) -> list[int]:
        return sorted(block.address for part in self.parts for block in part.blocks if block.state == state)

    def _record(self, action: str, address: int, size: int, stream: int, metadata: str = "") -> None:
        self._now_us += 7
        self.entries.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": stream,
                "time_us": self._now_us,
                "frames": self.frames,
                "user_metadata": metadata,
                "compile_context": "N/A",
            }
        )
        blocks = [block for part in self.parts for block in part.blocks]
        self.allocated.append(sum(block.size for block in blocks if block.state == "active_allocated"))
        self.reserved.append(sum(block.size for block in blocks))


def frame(filename: str, line: int = 1, name: str = "forward") -> Entry:
    return {"filename": filename, "line": line, "name": name}


def event(action: str = "alloc", addr: int = 0x1000, size: int = 512, **more: Any) -> Entry:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 5, "frames": [], **more}


def empty(*entries: Entry) -> Entry:
    """A snapshot of one device with these events and no segments."""
    return {"segments": [], "device_traces": [list(entries)]}


def write(content: object, path: Path, *, protocol: int = 4, zipped: bool = False) -> Path:
    opener: Callable[..., Any] = gzip.open if zipped else open
    with opener(path, "wb") as file:
        pickle.dump(content, file, protocol=protocol)
    return path


def _address(part: Part) -> int:
    return part.address

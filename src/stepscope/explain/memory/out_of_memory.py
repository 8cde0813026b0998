"""A request for memory that failed: how much was missing, and what the rest of the step would have needed.

The step is not over when memory runs out. The first forward pass has neither gradients nor optimizer state yet, and
the later layers have not saved anything. A change that only makes room for the failed request would fail a moment
later, so what must be saved (`need_bytes`) is measured against the whole step: activations are extrapolated to all
layers, and missing optimizer states are added.
"""

from dataclasses import dataclass
from functools import cached_property

import polars as pl

from stepscope.explain.memory.categories import name_place, stage_of_stack
from stepscope.explain.memory.memory_profile import MemoryProfile
from stepscope.findings import Cell, Column, Table
from stepscope.recording.memory.labels import OutOfMemoryFacts
from stepscope.units import clip, say_percent, say_size

# Of the memory that a process can have; the rest is lost to fragmentation, and libraries want some.
USABLE = 0.95
_PHASES = ("forward", "backward", "optimizer")
_MOST_LINE = 50
_MOST_FRAMES = 15


@dataclass(frozen=True)
class MemoryFailure:
    """The memory of a process at the moment of the failure."""

    profile: MemoryProfile
    facts: OutOfMemoryFacts

    @property
    def event(self) -> int:
        return min(self.facts.event, self.profile.num_events - 1)

    @cached_property
    def alive(self) -> pl.DataFrame:
        return self.profile.alive_at(self.event)

    @cached_property
    def held_bytes(self) -> int:
        return int(self.alive["bytes"].sum())

    @cached_property
    def categories(self) -> dict[str, int]:
        """They add up to `held_bytes`."""
        return dict(self.profile.categories_at(self.event))

    @cached_property
    def reserved_bytes(self) -> int | None:
        segments = self.profile.recording.segments
        if segments.height and self.event < 0:
            return int(segments.filter(pl.col("start_event").is_null())["bytes"].sum())
        reserved = self.profile.reserved
        return None if reserved is None else int(reserved[self.event])

    @property
    def unused_bytes(self) -> int | None:
        """Reserved by PyTorch's allocator, and not part of any tensor."""
        return None if self.reserved_bytes is None else self.reserved_bytes - self.held_bytes

    @property
    def outside_bytes(self) -> int | None:
        """Used on the device, but not by the allocator of this process."""
        if self.facts.total_bytes is None or self.reserved_bytes is None:
            return None
        return max(0, self.facts.total_bytes - self.facts.free_bytes - self.reserved_bytes)

    @property
    def room_bytes(self) -> int:
        """What the allocator could still get from CUDA."""
        limit = self.facts.limit_bytes
        if limit is None or self.reserved_bytes is None:
            return self.facts.free_bytes
        return min(self.facts.free_bytes, max(0, limit - self.reserved_bytes))

    @property
    def capacity_bytes(self) -> int:
        """What tensors can have at most: what they hold, what is free, and what is reserved without being used."""
        return self.held_bytes + self.room_bytes + (self.unused_bytes or 0)

    @cached_property
    def phase(self) -> str:
        stage = self.facts.phase or stage_of_stack(self.facts.stack)
        return stage if stage in _PHASES else ""

    @property
    def place(self) -> str:
        """The user's line, as `train.py:42`; empty if unknown."""
        return clip(self.facts.line or name_place(self.facts.stack).partition(" ")[0], _MOST_LINE)

    # --- The rest of the step -----------------------------------------------------------------------------------------

    @cached_property
    def num_layers(self) -> int:
        """The layers of the model, as its parameters show them."""
        return self._layers("parameters")

    @cached_property
    def layers_reached(self) -> float:
        """The layers that have saved activations; the last of them may not be finished."""
        reached = self._layers("activations")
        return reached if self.phase != "forward" or reached >= self.num_layers else max(0.5, reached - 0.5)

    def _layers(self, category: str) -> int:
        return self.alive.filter(pl.col("category") == category)["layer"].drop_nulls().n_unique()

    @cached_property
    def layer_bytes(self) -> float:
        """The activations of one layer, on average over those that were reached."""
        inside = self.alive.filter((pl.col("category") == "activations") & pl.col("layer").is_not_null())
        return int(inside["bytes"].sum()) / self.layers_reached if inside.height else 0.0

    @cached_property
    def activation_bytes(self) -> float:
        """The activations at the end of the forward pass."""
        held = self.categories["activations"]
        if self.phase != "forward" or not self.layer_bytes:
            return held
        return held + self.layer_bytes * max(0.0, self.num_layers - self.layers_reached)

    @property
    def is_growing(self) -> bool:
        return self.activation_bytes > self.categories["activations"]

    @property
    def batch_bytes(self) -> float:
        """What grows with the batch: activations, temporaries, and the request unless an optimizer made it."""
        asked = self.facts.asked_bytes if self.phase != "optimizer" and not self.is_growing else 0
        return self.activation_bytes + self.categories["temporaries"] + asked

    @property
    def state_bytes(self) -> int:
        return self.categories["optimizer state"] + self.facts.missing_state_bytes

    @property
    def fixed_bytes(self) -> int:
        """What does not depend on the batch, at the start of the backward pass of a later step."""
        own = self.held_bytes - self.categories["activations"] - self.categories["temporaries"]
        return own + self.facts.missing_state_bytes

    @cached_property
    def need_bytes(self) -> int:
        """What must be saved for a whole step to fit; at least what the request lacks."""
        at_backward = self.fixed_bytes + self.batch_bytes
        at_update = self.fixed_bytes + self.facts.missing_gradient_bytes
        at_update += self.categories["temporaries"] + self.facts.asked_bytes if self.phase == "optimizer" else 0
        lacking = max(at_backward, at_update) - USABLE * self.capacity_bytes
        return round(max(lacking, self.facts.asked_bytes - self.room_bytes, 0))


def find_out_of_memory(profile: MemoryProfile) -> MemoryFailure | None:
    """None if memory did not run out while the history was recorded."""
    facts = profile.recording.manifest.memory
    return MemoryFailure(profile, facts.oom) if facts is not None and facts.oom is not None else None


# --- In words ---------------------------------------------------------------------------------------------------------


def say_failure(oom: MemoryFailure) -> str:
    """Return `CUDA ran out of memory at train.py:42: asked for 2 GiB, 1.31 GiB free of 140 GiB; 96.2 GiB held, 71% of
    it activations`."""
    where = f" at {oom.place}" if oom.place else ""
    return f"CUDA ran out of memory{where}: {_say_request(oom)}; {_say_held(oom)}"


def _say_request(oom: MemoryFailure) -> str:
    facts = oom.facts
    limit = facts.limit_bytes if facts.limit_bytes is not None else facts.total_bytes
    allowed = " allowed" if facts.limit_bytes is not None else ""
    of = f" of {say_size(limit)}{allowed}" if limit is not None else ""
    return f"asked for {say_size(facts.asked_bytes)}, {say_size(oom.room_bytes)} free{of}"


def _say_held(oom: MemoryFailure) -> str:
    if not oom.held_bytes:
        return "PyTorch held nothing"
    name, size = max(oom.categories.items(), key=lambda one: one[1])
    return f"{say_size(oom.held_bytes)} held, {say_percent(size / oom.held_bytes)} of it {name}"


def say_rest_of_step(oom: MemoryFailure) -> str:
    """What the step would still have needed; empty if nothing is known to be missing."""
    parts = []
    if oom.is_growing:
        reached = f"{oom.layers_reached:.0f} of {oom.num_layers} layers had run"
        more = say_size(oom.activation_bytes - oom.categories["activations"])
        parts.append(f"{reached}, so about {more} of activations were still to come")
    if oom.facts.missing_state_bytes:
        names = " and ".join(oom.facts.optimizers)
        parts.append(f"{names} had not created {say_size(oom.facts.missing_state_bytes)} of state yet")
    if oom.facts.missing_gradient_bytes:
        parts.append(f"{say_size(oom.facts.missing_gradient_bytes)} of gradients did not exist yet")
    return f"The step was not over: {'; '.join(parts)}." if parts else ""


# --- Tables -----------------------------------------------------------------------------------------------------------


def request_table(oom: MemoryFailure) -> Table:
    """The device's memory at the failure."""
    facts = oom.facts
    rows: list[tuple[Cell, ...]] = [
        ("asked for", facts.asked_bytes, oom.place or None),
        ("held by tensors", oom.held_bytes, None),
        ("reserved, not in use", oom.unused_bytes, "free blocks between tensors"),
        ("largest free block", facts.largest_free_bytes, "part of the line above"),
        ("outside PyTorch's allocator", oom.outside_bytes, "CUDA context, NCCL, other processes"),
        ("free on the device", facts.free_bytes, None),
        ("device", facts.total_bytes, facts.device_name or None),
        ("limit of this process", facts.limit_bytes, "set_per_process_memory_fraction"),
    ]
    return Table(
        title="The failed request",
        columns=(
            Column(key="what", label="memory"),
            Column(key="bytes", label="size", kind="bytes"),
            Column(key="note", label="note"),
        ),
        rows=tuple(row for row in rows if row[1] is not None),
    )


def lines_table(oom: MemoryFailure, *, top: int) -> Table:
    """Memory by the user's line that allocated it; empty without stacks."""
    sizes: dict[str, int] = {}
    for stack, size in oom.alive.group_by("stack").agg(pl.col("bytes").sum()).iter_rows():
        place = name_place(oom.profile.stack_text(stack))
        if place:
            sizes[place] = sizes.get(place, 0) + size
    ordered = sorted(sizes.items(), key=lambda one: (-one[1], one[0]))[:top]
    known = sum(sizes.values())
    rest = oom.held_bytes - known
    notes = (f"{say_size(rest)} was allocated while stacks were not recorded",) if rest else ()
    return Table(
        title="Memory held by line of code",
        columns=(
            Column(key="line", label="line"),
            Column(key="bytes", label="size", kind="bytes"),
            Column(key="share", label="share", kind="share"),
        ),
        rows=tuple((line, size, size / oom.held_bytes) for line, size in ordered),
        notes=notes,
    )


def stack_table(oom: MemoryFailure) -> Table:
    """The stack of the failed request, innermost frame first."""
    frames = oom.facts.stack.splitlines()
    more = (f"{len(frames) - _MOST_FRAMES} more frames",) if len(frames) > _MOST_FRAMES else ()
    return Table(
        title="Stack of the failed request",
        columns=(Column(key="frame", label="frame, innermost first"),),
        rows=tuple((frame,) for frame in frames[:_MOST_FRAMES]),
        notes=more,
    )

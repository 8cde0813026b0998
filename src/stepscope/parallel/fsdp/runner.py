"""Gathers units ahead of their use and frees them afterwards, in forward and in backward.

At most two units are gathered at a time: the one in use and the next in the schedule. Opening a unit first frees those
no longer in use, then starts gathering the next one, then waits for its own, whose gather started when the previous
unit was opened. Pinned units stay as well, from the beginning of a pass to its end: those of modules that contain other
units, and those whose weights are read outside the call of their module, so that nothing indicates when they are no
longer needed.

In backward, the gradient of a module's output opens its units. Autograd runs nodes in the reverse order of their
creation, so when the output of the next module has its gradient, the previous one is finished. The last unit of the
forward pass is the first of the backward pass, and stays gathered.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.errors import StepscopeError
from stepscope.parallel.communicator import Communicator
from stepscope.parallel.fsdp.autograd_graph import differentiable_leaves, keeps_weights
from stepscope.parallel.fsdp.flat_buffer import Flat, ParameterPlace
from stepscope.parallel.fsdp.schedule import (
    PINNED,
    OperationKind,
    ScheduleRound,
    UnitOperation,
    Use,
    agree,
    backward_operations,
    forward_operations,
    without_repeats,
)
from stepscope.parallel.fsdp.unit import OnGradient, ShardedUnit

# Gradient messages in flight at a time: one being sent and one waiting.
MAX_MESSAGES = 2


def in_backward() -> bool:
    """A forward pass that runs now is part of a backward pass: a checkpointed block is being recomputed."""
    return torch._C._current_graph_task_id() != -1


class Runner:
    """Which units are gathered, and which comes next."""

    def __init__(self, communicator: Communicator) -> None:
        self._units: list[ShardedUnit] = []
        self._communicator = communicator
        self._forward_uses: list[Use] = []
        self._backward_uses: list[Use] | None = None
        # Learned: uses whose weights the backward pass does not need, and units read outside their modules.
        self._unneeded: set[Use] = set()
        self._needed: set[Use] = set()
        self._pinned: list[int] = []
        self._knows_forward = self._knows_backward = False
        self._forward_record: list[Use] = []
        self._backward_record: list[Use] = []
        self.is_synchronizing = True
        self._num_synchronized = 0
        self._sent: deque[Flat] = deque()
        # A pass has run whose gradients have not been delivered.
        self.is_due = False
        self._reset()

    def _reset(self) -> None:
        # Units in use: by the open calls, from the outermost; or by the backward pass.
        self._open: list[Use] = []
        self._open_in_backward: set[int] = set()
        self._num_roots = 0
        self._forward: ScheduleRound | None = None
        self._backward: ScheduleRound | None = None
        self._backward_synchronizes = False

    def manage(self, unit: ShardedUnit) -> int:
        """Add a unit; return its number."""
        self._units.append(unit)
        return len(self._units) - 1

    def assume_order(self, uses: Sequence[Use]) -> None:
        """The assumed order of units, until it is known. Units that contain others stay for the whole pass."""
        self._forward_uses = list(uses)
        self._pinned = [number for number, unit in enumerate(self._units) if unit.is_around(self._units)]

    @property
    def is_active(self) -> bool:
        """The model is computing, so that its parameters are whole."""
        return self._num_roots > 0 or bool(self._open) or in_backward()

    @property
    def open_uses(self) -> tuple[Use, ...]:
        return tuple(self._open)

    # The forward pass.

    def begin_forward(self) -> None:
        self._num_roots += 1
        if self._num_roots > 1:
            return
        self._finish_backward()
        self._forward = ScheduleRound(forward_operations(self._with_pinned(self._forward_uses)), self._perform)
        self._forward_record = []
        for number in self._pinned:
            self._make_resident(number, self._forward)

    def end_forward(self, output: Any) -> None:
        self._num_roots -= 1
        if self._num_roots > 0:
            return
        assert self._forward is not None, "begun"
        self._forward.finish()
        last, self._forward = self._forward.last_gathered, None
        self._free_all_but({*self._pinned, last})
        if not torch.is_grad_enabled():
            self._free_all_but(set())
            return
        self.is_due = True
        self.watch(output, [Use(unit, PINNED) for unit in self._pinned], ())
        if not self._knows_forward:
            self._learn_forward()

    def abort(self) -> None:
        """After an error in a forward pass, nothing stays gathered, and the next pass starts fresh."""
        self._reset()
        self._free_all_but(set())

    def open(self, uses: Sequence[Use]) -> None:
        """A module's call begins; in a backward pass, to be recomputed."""
        surrounding = tuple(self._open)
        self._open += uses
        if in_backward():
            self._open_backward(uses, surrounding)
            return
        if not self._knows_forward:
            self._forward_record += uses
        for use in uses:
            self._make_resident(use.unit, self._forward)

    def close(self, uses: Sequence[Use]) -> None:
        """Units stay until others are opened: a backward pass may follow immediately."""
        del self._open[len(self._open) - len(uses) :]
        if not self._open and self._num_roots == 0 and not in_backward():
            self._free_all_but(set())

    def watch(self, output: Any, uses: Sequence[Use], surrounding: tuple[Use, ...]) -> None:
        """Open the units again when `output` receives a gradient."""
        leaves = differentiable_leaves(output)
        if torch.is_grad_enabled() and not self._knows_forward:
            self._note_needs(leaves, uses)
        # A module that did not need its weights in the first pass is checked again in each.
        uses = [use for use in uses if use not in self._unneeded or self._keeps_weights(leaves, use)]
        if not uses or not leaves:
            return
        self.is_due = True
        on_gradient = self._make_opener(uses, surrounding)
        for leaf in leaves:
            leaf.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    def serve(self, number: int, place: ParameterPlace) -> nn.Parameter:
        """Return the gathered matrix that a module reads."""
        if not self.is_active:
            return place.piece
        if number not in self._held():
            self._pin(number)
        return place.full

    # The backward pass.

    def _make_opener(self, uses: Sequence[Use], surrounding: tuple[Use, ...]) -> Callable[[Tensor], None]:
        versions = [self._units[use.unit].version for use in uses]

        def on_gradient(_: Tensor) -> None:
            for use, version in zip(uses, versions, strict=True):
                self._require_unchanged(self._units[use.unit], version)
            self._open_backward(uses, surrounding)

        return on_gradient

    def _require_unchanged(self, unit: ShardedUnit, version: int) -> None:
        if unit.version != version:
            raise StepscopeError(
                f"parameters of `{unit.name}` were modified between the forward and the backward pass",
                detail="the gradients would match neither the old values nor the new ones",
                hint="call loss.backward() before optimizer.step()",
            )

    def _open_backward(self, uses: Sequence[Use], surrounding: tuple[Use, ...]) -> None:
        if self._backward is None:
            self._begin_backward()
        before, self._open_in_backward = self._open_in_backward, {use.unit for use in (*surrounding, *uses)}
        for use in (*surrounding, *reversed(uses)):
            if use.unit in before and self._units[use.unit].is_resident:
                continue
            if not self._knows_backward:
                self._backward_record.append(use)
            self._make_resident(use.unit, self._backward)

    def _begin_backward(self) -> None:
        uses = self._with_pinned(self._backward_uses or self._forward_uses[::-1])
        self._backward = ScheduleRound(backward_operations(uses, self._unneeded, len(self._units)), self._perform)
        self._backward_record = []
        self._backward_synchronizes = self.is_synchronizing
        self._num_synchronized += self.is_synchronizing
        # Those left by the forward pass, the same on every rank.
        while (upcoming := self._backward.upcoming) is not None:
            if upcoming.kind is not OperationKind.GATHER or not self._units[upcoming.unit].is_resident:
                break
            self._backward.skip()

    def _make_hook(self, unit: ShardedUnit, flat: Flat, place: ParameterPlace) -> OnGradient:
        def on_gradient(_: Tensor) -> None:
            flat.take_gradient(place)
            if unit.has_all_gradients():
                self._send_complete()

        return on_gradient

    def _send_complete(self) -> None:
        while self._backward is not None and (upcoming := self._backward.upcoming) is not None:
            if upcoming.kind is not OperationKind.REDUCE or not self._units[upcoming.unit].has_all_gradients():
                return
            self._backward.step()

    def _finish_backward(self) -> None:
        """Finish the round, for what this rank did not use."""
        if self._backward is not None:
            self._backward.finish()
        self._backward = None
        self._open_in_backward = set()
        self._free_all_but(set())

    def finish(self) -> None:
        """When this returns, every message for this step's gradients has been sent."""
        if self._backward is not None and not self._backward_synchronizes:
            self._finish_backward()
        if self._num_synchronized == 0:
            # Before anything is freed: other ranks did not gather again what the forward pass left.
            self._begin_backward()
        self._finish_backward()
        self._num_synchronized = 0
        self._sent.clear()
        self.is_due = False
        if not self._knows_backward:
            self._learn_backward()

    # What both passes do.

    def _make_resident(self, number: int, track: ScheduleRound | None) -> None:
        unit = self._units[number]
        if not unit.is_resident and (track is None or not track.reach(number)):
            self._gather(number)
        unit.is_ahead = False
        self._free_unused()
        if track is not None and not any(other.is_ahead for other in self._units):
            track.prefetch()
        unit.wait()

    def _perform(self, operation: UnitOperation) -> None:
        unit = self._units[operation.unit]
        if operation.kind is OperationKind.GATHER:
            self._gather(operation.unit)
        elif self._backward_synchronizes:
            self._send(unit)
        else:
            for flat in unit.trained_flats:
                flat.forget_arrivals()

    def _send(self, unit: ShardedUnit) -> None:
        # Each message keeps a buffer of its unit's size until it is waited for.
        while len(self._sent) >= MAX_MESSAGES:
            self._sent.popleft().collect()
        for flat in unit.trained_flats:
            flat.send_gradient()
        self._sent.extend(unit.trained_flats)

    def _gather(self, number: int) -> None:
        held = self._held()
        for other, unit in enumerate(self._units):
            if other not in held and other != number:
                unit.free()
        self._units[number].gather(self._make_hook)
        self._units[number].is_ahead = True

    def _held(self) -> set[int]:
        return {use.unit for use in self._open} | self._open_in_backward | set(self._pinned)

    def _free_unused(self) -> None:
        held = self._held()
        for number, unit in enumerate(self._units):
            if number not in held and not unit.is_ahead:
                unit.free()

    def _free_all_but(self, kept: set[int | None]) -> None:
        for number, unit in enumerate(self._units):
            if number not in kept:
                unit.free()

    # What is learned from the first passes.

    def _with_pinned(self, uses: Sequence[Use]) -> list[Use]:
        others = [use for use in uses if use.unit not in self._pinned]
        return [Use(number, PINNED) for number in self._pinned] + without_repeats(others)

    def _pin(self, number: int) -> None:
        """Keep a unit until the end of the pass, and in later passes from the beginning."""
        self._pinned.append(number)
        self._make_resident(number, self._backward if in_backward() else self._forward)

    def _note_needs(self, outputs: list[Tensor], uses: Sequence[Use]) -> None:
        for use in uses:
            (self._needed if self._keeps_weights(outputs, use) else self._unneeded).add(use)
        self._unneeded -= self._needed

    def _keeps_weights(self, outputs: list[Tensor], use: Use) -> bool:
        return keeps_weights(outputs, {flat.storage_key for flat in self._units[use.unit].flats})

    def _learn_forward(self) -> None:
        """Compare the first pass with gradients of all ranks."""
        found = (self._forward_record, self._needed, self._unneeded)
        all_found = self._communicator.share_objects(found, "the order of layers")
        self._forward_uses = self._agree([record for record, _, _ in all_found], self._forward_uses)
        needed: set[Use] = set().union(*(each for _, each, _ in all_found))
        self._unneeded = set().union(*(each for _, _, each in all_found)) - needed
        self._knows_forward = True

    def _learn_backward(self) -> None:
        records = self._communicator.share_objects(self._backward_record, "the order of layers in backward")
        assumed = [use for use in self._forward_uses[::-1] if use not in self._unneeded]
        agreed = self._agree(records, assumed)
        if agreed != assumed:
            self._backward_uses = agreed
        self._knows_backward = True

    def _agree(self, records: Sequence[Sequence[Use]], assumed: Sequence[Use]) -> list[Use]:
        """All uses except those of pinned units, whose position is known."""
        names = [unit.name for unit in self._units]
        plain = [without_repeats([use for use in record if use.unit not in self._pinned]) for record in records]
        return agree(plain, [use for use in assumed if use.unit not in self._pinned], names)

"""The order in which units are gathered and their gradients sent: the same on all ranks.

A collective needs every rank, at the same position of the same sequence. But which units a rank uses may depend on its
data, and a rank that does not use one still owns a slice of it. So no rank decides: there is a schedule for the forward
and one for the backward pass, and a rank that uses a unit first does everything that comes before it in the schedule. A
skipped unit is thereby gathered for the others and freed again; missing gradients are sent as zeros. A unit that
appears again, where the schedule does not have it, ends the round and begins the next.

The schedule starts as the order in which the model registers its modules. After the first pass, ranks compare what they
really used, and that becomes the schedule unless it is a part of what was assumed.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from stepscope.errors import StepscopeError


class Use(NamedTuple):
    """A unit, by number, at one of its doors; `PINNED` for one that stays for the whole pass."""

    unit: int
    door: int


PINNED = -1


class OperationKind(Enum):
    GATHER = "gather"
    REDUCE = "reduce"


class UnitOperation(NamedTuple):
    kind: OperationKind
    unit: int


class ScheduleRound:
    """One round through a schedule, and this rank's position in it."""

    def __init__(self, operations: Sequence[UnitOperation], run: Callable[[UnitOperation], None]) -> None:
        self._operations = operations
        self._run = run
        self._next = 0

    @property
    def upcoming(self) -> UnitOperation | None:
        return self._operations[self._next] if self._next < len(self._operations) else None

    @property
    def last_gathered(self) -> int | None:
        """The unit that is gathered at the end of the round."""
        gathers = [operation.unit for operation in self._operations if operation.kind is OperationKind.GATHER]
        return gathers[-1] if gathers else None

    def step(self) -> None:
        operation = self._operations[self._next]
        self._next += 1
        self._run(operation)

    def skip(self) -> None:
        """Count the next operation as done: it was, before the round began."""
        self._next += 1

    def reach(self, unit: int) -> bool:
        """Do everything up to this unit's next gather, in the next round if it is not in this one; return whether there
        is one.
        """
        gather = UnitOperation(OperationKind.GATHER, unit)
        if gather not in self._operations:
            return False
        if gather not in self._operations[self._next :]:
            self.finish()
            self._next = 0
        while self.upcoming != gather:
            self.step()
        self.step()
        return True

    def prefetch(self) -> None:
        """Do everything up to the next gather, if this round has one left."""
        if any(operation.kind is OperationKind.GATHER for operation in self._operations[self._next :]):
            while self.upcoming is not None and self.upcoming.kind is not OperationKind.GATHER:
                self.step()
            self.step()

    def finish(self) -> None:
        while self.upcoming is not None:
            self.step()


def forward_operations(uses: Sequence[Use]) -> list[UnitOperation]:
    return [UnitOperation(OperationKind.GATHER, use.unit) for use in uses]


def backward_operations(uses: Sequence[Use], unneeded: set[Use], num_units: int) -> list[UnitOperation]:
    """The gathers of `uses`, without those whose weights the backward pass does not need. A unit's gradients are sent
    after its last use and after the following gather, which is needed sooner.
    """
    last = {use.unit: place for place, use in enumerate(uses)}
    operations: list[UnitOperation] = []
    leaving: list[UnitOperation] = []
    for place, use in enumerate(uses):
        if use not in unneeded:
            operations += [UnitOperation(OperationKind.GATHER, use.unit), *leaving]
            leaving = []
        if last[use.unit] == place:
            leaving.append(UnitOperation(OperationKind.REDUCE, use.unit))
    unused = [UnitOperation(OperationKind.REDUCE, unit) for unit in range(num_units) if unit not in last]
    return operations + leaving + unused


def without_repeats(uses: Sequence[Use]) -> list[Use]:
    """A unit used twice in a row is gathered once."""
    return [use for place, use in enumerate(uses) if place == 0 or uses[place - 1].unit != use.unit]


def agree(records: Sequence[Sequence[Use]], assumed: Sequence[Use], names: Sequence[str]) -> list[Use]:
    """Return the schedule to follow, from what each rank did once under `assumed`."""
    if all(_is_part(record, assumed) for record in records):
        return list(assumed)
    for rank, record in enumerate(records):
        if record != records[0]:
            raise _disagreement(rank, record, records[0], names)
    return list(records[0])


def _is_part(record: Sequence[Use], assumed: Sequence[Use]) -> bool:
    remaining = iter(assumed)
    return all(use in remaining for use in record)


def _disagreement(rank: int, record: Sequence[Use], first: Sequence[Use], names: Sequence[str]) -> StepscopeError:
    def describe(uses: Sequence[Use]) -> str:
        return ", ".join(names[use.unit] for use in uses) or "nothing"

    return StepscopeError(
        f"rank `{rank}` runs the layers of the model in a different order than rank `0`",
        detail=f"rank 0: {describe(first)}\nrank {rank}: {describe(record)}",
        hint="use stepscope.parallel.DDP(model) if the order of layers depends on the data",
    )

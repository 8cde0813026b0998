"""Kernels of a compiled step: what `torch.compile` makes of the operators of an eager one.

Inductor keeps GEMMs and attention as they are, and fuses the elementwise operators and reductions between
them: a fused kernel reads what it did not compute itself and writes what somebody else needs. What backward needs and
is cheap to compute is not kept but computed again, so backward reads the inputs of those operators instead.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from stepscope.planner.step_time.kernels_of import ITEM_BYTES
from stepscope.planner.step_time.operator_kinds import FREE, INDEXING, PRODUCTS, REDUCTIONS, ROWS, VIEWS, short_name

if TYPE_CHECKING:
    from stepscope.planner.operation import Operation, TensorFacts

_COMPILED_PHASES = ("forward", "backward")
OUTSIDE = ("", "(loss)")  # modules of operators that run outside the model
SHARED = "shared_cast"
_LARGE = 4096  # elements


@dataclass(slots=True)
class FusedGroup:
    """Operators that become one kernel, or one that stays as it is (`is_extern`). `position` is that of the last."""

    phase: str
    is_extern: bool
    positions: list[int] = field(default_factory=list)
    size: int = 0  # of its iteration space
    reads: dict[int, int] = field(default_factory=dict)  # bytes by storage
    writes: dict[int, int] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)  # storages of which it reads one element per iteration
    again: set[int] = field(default_factory=set)  # storages that it would compute again

    @property
    def position(self) -> int:
        return self.positions[-1]

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


def is_compiled(operation: "Operation") -> bool:
    """Whether an operator belongs to the model, which is what `torch.compile` sees. A loss outside stays eager."""
    return operation.phase in _COMPILED_PHASES and operation.module not in OUTSIDE


def fuse(operations: Sequence["Operation"]) -> list[FusedGroup]:
    """Return the groups of the compiled phases, in the order in which they run. The operators are those of
    `name_values`, with shared casts."""
    groups: list[FusedGroup] = []
    opened: list[FusedGroup] = []  # can still take operators: nothing that depends on them has run
    for position, operation in enumerate(operations):
        name = short_name(operation.name)
        if not is_compiled(operation) or name in VIEWS or name in FREE or name == SHARED:
            continue
        if _is_extern(name):
            groups.append(_new_group(position, operation, is_extern=True))
            used = {fact.storage for fact in operation.inputs}
            opened = [one for one in opened if not one.made & used and one.phase == operation.phase]
            continue
        found = _find_groups(opened, operation, name)
        group = found[-1] if found else _new_group(position, operation, is_extern=False)
        if not found:
            groups.append(group)
            opened.append(group)
        for other in found[:-1]:
            _merge(group, other)
            opened.remove(other)
            groups.remove(other)
        _join(group, position, operation)
    groups.sort(key=lambda one: one.position)
    _find_traffic(groups, operations)
    return [one for one in groups if one.is_extern or one.writes]


def name_values(operations: Sequence["Operation"]) -> list["Operation"]:
    """The operators as a compiler sees them: what is written to a tensor that exists is another tensor from then on."""
    following = 1 + max((fact.storage for one in operations for fact in (*one.inputs, *one.outputs)), default=0)
    current: dict[int, int] = {}  # the last value of each storage
    known: set[int] = set()
    changed = []
    for operation in operations:
        inputs = tuple(_rename(fact, current) for fact in operation.inputs)
        known |= {fact.storage for fact in operation.inputs}
        if short_name(operation.name) not in (*VIEWS, *FREE):
            for storage in {fact.storage for fact in operation.outputs if fact.storage >= 0} & known:
                current[storage] = following
                following += 1
        outputs = tuple(_rename(fact, current) for fact in operation.outputs)
        known |= {fact.storage for fact in operation.outputs}
        changed.append(msgspec.structs.replace(operation, inputs=inputs, outputs=outputs))
    return changed


def share_casts(operations: Sequence["Operation"]) -> list["Operation"]:
    """Let all readers of equal casts of a tensor read the first one, as common subexpressions are computed once."""
    first: dict[tuple[str, int, str], int] = {}
    renamed: dict[int, int] = {}
    changed = []
    for operation in operations:
        operation = rename_storages(operation, renamed)
        inputs, outputs = operation.inputs, operation.outputs
        if short_name(operation.name) == "_to_copy" and inputs and outputs:
            key = (operation.phase, inputs[0].storage, outputs[0].dtype)
            if key in first and is_compiled(operation):
                renamed[outputs[0].storage] = first[key]
                operation = msgspec.structs.replace(operation, name=f"aten.{SHARED}.default")
            first.setdefault(key, outputs[0].storage)
        changed.append(operation)
    return changed


def rename_storages(operation: "Operation", renamed: Mapping[int, int]) -> "Operation":
    """The same operator on other storages."""
    inputs = tuple(_rename(fact, renamed) for fact in operation.inputs)
    outputs = tuple(_rename(fact, renamed) for fact in operation.outputs)
    return msgspec.structs.replace(operation, inputs=inputs, outputs=outputs)


def _rename(fact: "TensorFacts", renamed: Mapping[int, int]) -> "TensorFacts":
    return msgspec.structs.replace(fact, storage=renamed[fact.storage]) if fact.storage in renamed else fact


def _merge(group: FusedGroup, other: FusedGroup) -> None:
    group.positions = sorted(group.positions + other.positions)
    group.made |= other.made
    group.whole |= other.whole
    group.size = max(group.size, other.size)


def _is_extern(name: str) -> bool:
    return name in PRODUCTS or "attention" in name or name.startswith("flash") or name in ("sort", "topk")


def _new_group(position: int, operation: "Operation", *, is_extern: bool) -> FusedGroup:
    group = FusedGroup(operation.phase, is_extern)
    if is_extern:
        _join(group, position, operation)
    return group


def _join(group: FusedGroup, position: int, operation: "Operation") -> None:
    group.positions.append(position)
    group.made |= {fact.storage for fact in operation.outputs}
    group.size = max(group.size, _iteration_size(operation))
    group.whole |= _whole_inputs(operation)


def _find_groups(opened: Sequence[FusedGroup], operation: "Operation", name: str) -> list[FusedGroup]:
    """The groups that made an input and run over the same elements, or over few; else one that reads the same tensor
    element by element. Sums over all rows start a kernel of their own, because their result is complete only at its
    end."""
    if _reduces_rows(operation, name):
        return []
    inputs, size = {fact.storage for fact in operation.inputs}, _iteration_size(operation)
    alike = [one for one in opened if one.phase == operation.phase]
    makers = [one for one in alike if one.made & inputs and _are_compatible(one.size, size)]
    whole = _whole_inputs(operation)
    return makers or [one for one in alike if one.size == size and one.whole & whole][-1:]


def _whole_inputs(operation: "Operation") -> set[int]:
    """Storages of the inputs that have as many elements as the operator runs over, if those are many."""
    size = _iteration_size(operation)
    if size < _LARGE:
        return set()
    return {fact.storage for fact in operation.inputs if fact.storage >= 0 and math.prod(fact.shape) == size}


def _are_compatible(first: int, second: int) -> bool:
    """Whether one kernel can run over both: as many elements, those of a slice or of halves, or one per row."""
    small, large = sorted((max(1, first), max(1, second)))
    return large <= 4 * small or large >= 64 * small


def _reduces_rows(operation: "Operation", name: str) -> bool:
    if name not in REDUCTIONS or not operation.inputs or not operation.outputs:
        return False
    shape, kept = operation.inputs[0].shape, operation.outputs[0].shape
    return bool(shape) and bool(kept) and kept[-1] == shape[-1] > 1 and math.prod(kept) < math.prod(shape)


def _iteration_size(operation: "Operation") -> int:
    return max((math.prod(fact.shape) for fact in (*operation.inputs, *operation.outputs)), default=0)


def _size_of(fact: "TensorFacts") -> int:
    return math.prod(fact.shape) * ITEM_BYTES.get(fact.dtype, 4)


def _find_traffic(groups: Sequence[FusedGroup], operations: Sequence["Operation"]) -> None:
    """Fill in what each group reads and writes."""
    maker = {storage: group for group in groups for storage in group.made if storage >= 0}
    needed = _find_needed(groups, maker, operations)
    sizes: dict[int, int] = {}
    for operation in operations:
        for fact in (*operation.outputs, *operation.inputs):
            sizes[fact.storage] = max(sizes.get(fact.storage, 0), _size_of(fact))
    for group in groups:
        for position in group.positions:
            for storage in _read_storages(operations[position].inputs):
                if storage not in group.made or group.is_extern:
                    for root in _roots(storage, group, maker, needed):
                        group.reads[root] = sizes.get(root, 0)
        group.writes = {one: sizes.get(one, 0) for one in group.made if one in needed or group.is_extern}
        if any(short_name(operations[position].name) in ROWS for position in group.positions):
            continue
        if any(short_name(operations[position].name) in INDEXING for position in group.positions):
            _limit_table_reads(group, operations)


def _find_needed(
    groups: Sequence[FusedGroup], maker: dict[int, FusedGroup], operations: Sequence["Operation"]
) -> set[int]:
    """Storages that must exist in memory: read by another group of the same phase, by a product, or by nobody here."""
    readers: dict[int, set[int]] = defaultdict(set)
    by_position = {position: group for group in groups for position in group.positions}
    outside: set[int] = set()
    for position, operation in enumerate(operations):
        if short_name(operation.name) in VIEWS or short_name(operation.name) in FREE:
            continue
        for storage in _read_storages(operation.inputs):
            if position in by_position:
                readers[storage].add(id(by_position[position]))
            else:
                outside.add(storage)
    needed = set(outside)
    for group in groups:
        for position in group.positions:
            for storage in _read_storages(operations[position].inputs):
                made_by = maker.get(storage)
                if made_by is None or made_by is group:
                    continue
                if group.is_extern or made_by.is_extern or group.phase == made_by.phase or group.size < _LARGE:
                    needed.add(storage)
    read_anywhere = set(readers) | outside
    needed |= {storage for storage in maker if storage not in read_anywhere}  # results of the step
    return needed


def _read_storages(facts: Iterable["TensorFacts"]) -> Iterable[int]:
    return dict.fromkeys(fact.storage for fact in facts if fact.storage >= 0)


def _roots(
    storage: int, reader: FusedGroup, maker: dict[int, FusedGroup], needed: set[int], depth: int = 0
) -> Iterable[int]:
    """What is read in place of a tensor that does not exist: what its group read."""
    made_by = maker.get(storage)
    if made_by is None or storage in needed or made_by.is_extern or made_by is reader or depth > 8:
        yield storage
        return
    yield from made_by.reads or ()


def _limit_table_reads(group: FusedGroup, operations: Sequence["Operation"]) -> None:
    """An embedding reads as many rows as it returns, not its whole table."""
    for position in group.positions:
        operation = operations[position]
        if short_name(operation.name) in ("embedding", "index_select") and operation.outputs:
            table = operation.inputs[0].storage
            if table in group.reads:
                group.reads[table] = min(group.reads[table], _size_of(operation.outputs[0]))

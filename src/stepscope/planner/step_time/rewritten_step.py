"""The operators of a step after the rewrites of `stepscope.fast`, from those of the plain step.

With working weights, parameters exist in bf16 already, so their casts and those of their gradients are gone. With
merged products, several that have the same input are one with a wider weight, and so are those of their gradients.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from stepscope.planner.step_time.fusion import SHARED, rename_storages, share_casts
from stepscope.planner.step_time.operator_kinds import FREE, MERGED_SIZES, VIEWS, short_name

if TYPE_CHECKING:
    from stepscope.planner.operation import Operation, TensorFacts

_HALF, _FULL = "bfloat16", "float32"


def use_working_weights(operations: Sequence["Operation"]) -> list["Operation"]:
    """Leave out the casts of parameters, and those of gradients that only the optimizer reads."""
    made: set[int] = set()
    first: list[int] = []  # casts of what nobody in this step made
    last: list[int] = []  # casts whose results only the optimizer reads
    readers: dict[int, set[str]] = defaultdict(set)
    for operation in operations:
        if short_name(operation.name) not in (*VIEWS, *FREE):  # autograd detaches a gradient before it keeps it
            for fact in operation.inputs:
                readers[fact.storage].add(operation.phase)
    for position, operation in enumerate(operations):
        if short_name(operation.name) == "_to_copy" and operation.inputs and operation.outputs:
            source, result = operation.inputs[0], operation.outputs[0]
            if source.dtype == _FULL and result.dtype == _HALF and source.storage not in made and len(source.shape) > 1:
                first.append(position)
            elif source.dtype == _HALF and result.dtype == _FULL and readers[result.storage] <= {"optimizer"}:
                last.append(position)
        made |= {fact.storage for fact in operation.outputs if fact.storage not in _storages(operation.inputs)}
    dropped = {*first, *last}
    return [one for position, one in enumerate(operations) if position not in dropped]


def merge_products(operations: Sequence["Operation"]) -> list["Operation"]:
    """Replace products of the same phase and left side, and their gradients, by wider ones."""
    operations = [one for one in share_casts(operations) if short_name(one.name) != SHARED]
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)  # by the input of forward
    backward: dict[int, list[int]] = defaultdict(list)  # by the right side
    for position, one in enumerate(operations):
        if _is_product(one) and one.phase == "forward":
            groups[one.inputs[0].storage, one.inputs[0].shape].append(position)
        elif _is_product(one) and one.phase == "backward":
            backward[one.inputs[1].storage].append(position)
    kept, dropped = list(operations), set()
    summed: set[int] = set()  # results that the wider product adds up itself
    for (storage, _), same in groups.items():
        weights = {operations[one].inputs[1].storage for one in same}
        of_inputs = sorted(position for weight in weights for position in backward[weight])
        for positions, axis in ((same, "n"), (of_inputs, "k"), (backward[storage], "m")):
            for first in range(0, len(positions), len(same)):  # one of each per pass of gradient accumulation
                alike = positions[first : first + len(same)]
                products = [operations[one] for one in alike]
                at = alike[0] if axis == "n" else alike[-1]  # when all of its inputs are there
                kept[at] = _widen(products, axis)
                dropped |= {one for one in alike if one != at}
                summed |= {one.outputs[0].storage for one in products[:-1]} if axis == "k" else set()
    return _drop_sums([one for position, one in enumerate(kept) if position not in dropped], summed)


def _is_product(operation: "Operation") -> bool:
    return short_name(operation.name) == "mm" and len(operation.inputs) == 2


def _widen(products: Sequence["Operation"], axis: str) -> "Operation":
    """One product, as wide along `axis` as all: rows (m) or columns (n) of the result, or what is summed (k). It reads
    and writes what they did, as parts of larger tensors, so its sizes are an argument."""
    last = products[-1]
    if len(products) == 1:
        return last
    m, n, k = (*last.outputs[0].shape, last.inputs[0].shape[1])
    sizes = {
        "m": (sum(one.outputs[0].shape[0] for one in products), n, k),
        "n": (m, sum(one.outputs[0].shape[1] for one in products), k),
        "k": (m, n, sum(one.inputs[0].shape[1] for one in products)),
    }[axis]
    lefts, rights = (dict.fromkeys(one.inputs[side] for one in products) for side in (0, 1))
    outputs = last.outputs if axis == "k" else tuple(one.outputs[0] for one in products)
    arguments = {**last.arguments, MERGED_SIZES: sizes}
    return msgspec.structs.replace(last, inputs=(*lefts, *rights), outputs=outputs, arguments=arguments)


def _drop_sums(operations: Sequence["Operation"], absent: set[int]) -> list["Operation"]:
    """Leave out the casts and additions of results that no longer exist. The sum is the operand that does."""
    kept: list[Operation] = []
    renamed: dict[int, int] = {}
    for operation in operations:
        operation = rename_storages(operation, renamed)
        name, outputs = short_name(operation.name), operation.outputs
        gone = [fact for fact in operation.inputs if fact.storage in absent]
        if not gone or name not in ("_to_copy", "add", "add_", *VIEWS, *FREE):
            kept.append(operation)
        elif len(gone) == len(operation.inputs):
            absent |= {fact.storage for fact in outputs}
        else:
            (left,) = (fact.storage for fact in operation.inputs if fact.storage not in absent)
            renamed |= {fact.storage: left for fact in outputs if fact.storage != left}
    return kept


def _storages(facts: Sequence["TensorFacts"]) -> set[int]:
    return {fact.storage for fact in facts}

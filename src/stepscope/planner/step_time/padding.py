"""Products with badly aligned rows.

Inductor (`fx_passes/pad_mm.py`) also measures them with padded sizes, and pads them if that is clearly faster. Here the
times of a calibration decide in the same way.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from stepscope.planner.step_time.operator_kinds import GROUPED, MERGED_SIZES, PRODUCTS, short_name

if TYPE_CHECKING:
    from stepscope.planner.operation import Operation, TensorFacts
    from stepscope.planner.step_time.kernels_of import KernelModel

_MULTIPLES = {"float32": 4, "bfloat16": 8, "float16": 8}  # that sizes are padded to
_LEAST_GAIN = 1.1


def pad_product(operation: "Operation") -> "Operation | None":
    """The same product with padded sizes, or None if it has nothing to pad."""
    name, multiple = short_name(operation.name), _MULTIPLES.get(operation.inputs[0].dtype if operation.inputs else "")
    if name not in PRODUCTS or name == GROUPED or MERGED_SIZES in operation.arguments or multiple is None:
        return None
    matrices = operation.inputs[-2:]
    if len(matrices[-1].shape) < 2:
        return None
    wide = tuple(_pad(fact, multiple) for fact in matrices)
    return None if wide == matrices else msgspec.structs.replace(operation, inputs=(*operation.inputs[:-2], *wide))


def _pad(fact: "TensorFacts", multiple: int) -> "TensorFacts":
    """A matrix, or a batch of them, with rows and columns that are multiples. What has one element is not padded."""
    *batch, rows, columns = fact.shape
    rows, columns = (size if size == 1 else -(-size // multiple) * multiple for size in (rows, columns))
    return msgspec.structs.replace(fact, shape=(*batch, rows, columns))


def is_worth_padding(
    model: "KernelModel", operation: "Operation", padded: "Operation", are_free: Sequence[bool]
) -> bool:
    """Whether Inductor's trial of a padded product is clearly faster. `are_free` says of its two matrices whether the
    trial takes them as padded already, and does not pad them in PyTorch: zeros, and a copy, which is slow of a
    transposed matrix."""
    tried_ns = model.product_ns(padded)
    pairs = zip(operation.inputs[-2:], padded.inputs[-2:], are_free, strict=True)
    for fact, wide, is_free in pairs:
        if fact != wide and not is_free:
            tried_ns += model.pad_ns(fact, math.prod(wide.shape))
    return model.product_ns(operation) > _LEAST_GAIN * tried_ns

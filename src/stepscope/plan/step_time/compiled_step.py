"""The kernels of a compiled step and what they cost the host.

Operators between products are fused (`fusion`). Products stay as they are, except for those whose rows are badly
aligned: Inductor (`fx_passes/pad_mm.py`) measures them with padded sizes as well, and takes these if they are clearly
faster. So does this module, with the times of a calibration.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from stepscope.hardware import Hardware
from stepscope.plan.step_time.fusion import OUTSIDE, FusedGroup, fuse, is_compiled, share_casts
from stepscope.plan.step_time.host_time import HostModel
from stepscope.plan.step_time.kernels_of import ITEM_BYTES, KernelModel, PlannedKernel
from stepscope.plan.step_time.measured_times import Sizes
from stepscope.plan.step_time.operator_kinds import GROUPED, MERGED_SIZES, PRODUCTS, short_name

if TYPE_CHECKING:
    from stepscope.plan.operation import Operation, TensorFacts

# Of Inductor: the multiple that sizes are padded to, how much faster that must be, and the share of the balance between
# arithmetic and bandwidth that a product must exceed to be tried.
_MULTIPLES = {"float32": 4, "bfloat16": 8, "float16": 8}
_LEAST_GAIN = 1.1
_LEAST_INTENSITY = 0.5


def compile_step(
    operations: Sequence["Operation"],
    model: KernelModel,
    costs: Sequence[float],
    host: HostModel,
    card: Hardware,
    *,
    with_loss: bool,
) -> tuple[list[PlannedKernel], list[float]]:
    """The kernels and the host's costs if forward and backward are compiled. Each kernel costs a launch. A step that is
    captured as a graph is compiled with its loss."""
    operations = share_casts([_inside(one) for one in operations] if with_loss else operations)
    groups = {group.position: group for group in fuse(operations)}
    padding = _Padding(model, card, groups)
    kernels, changed = [], list(costs)
    for position, operation in enumerate(operations):
        group = groups.get(position)
        if not is_compiled(operation):
            kernel = model.kernels_of(position, operation)
        elif group is not None and group.is_extern:
            kernel = model.kernels_of(position, operation)
            kernel = padding.apply(kernel, operation) if kernel is not None else None
        else:
            model.pass_over(operation)
            kernel = model.fused(position, operation, group.reads, group.writes) if group else None
        kernels += [kernel] if kernel else []
        if is_compiled(operation):
            changed[position] = host.compiled_launch_ns if group else 0.0
    before = ""
    for position, operation in enumerate(operations):
        if operation.phase != before and is_compiled(operation):
            changed[position] += host.compiled_start_ns
        before = operation.phase
    return kernels, changed


def _inside(operation: "Operation") -> "Operation":
    """The same operator as a part of the model, if it is outside."""
    return msgspec.structs.replace(operation, module="loss") if operation.module in OUTSIDE else operation


class _Padding:
    """Which products are padded. A matrix that a fused kernel writes is written with its padding, once; others, and
    those that another product reads with another padding, are copied."""

    def __init__(self, model: KernelModel, card: Hardware, groups: Mapping[int, FusedGroup]) -> None:
        self._model, self._card = model, card
        self._fused = {storage for group in groups.values() if not group.is_extern for storage in group.made}
        self._padded: dict[int, Sizes] = {}  # the shape with which a storage is written

    def apply(self, kernel: PlannedKernel, operation: "Operation") -> PlannedKernel:
        """The kernel of a product, or that of the padded one, with the copies that this needs."""
        name, dtype = short_name(operation.name), operation.inputs[0].dtype
        multiple = _MULTIPLES.get(dtype)
        is_plain = name in PRODUCTS and name != GROUPED and MERGED_SIZES not in operation.arguments
        if not is_plain or multiple is None or len(operation.inputs[-1].shape) < 2:
            return kernel
        left, right = operation.inputs[-2:]
        wide_left, wide_right = (_pad(fact, multiple) for fact in (left, right))
        if (wide_left, wide_right) == (left, right) or not self._is_tried(left, right, kernel.precision):
            return kernel
        padded = msgspec.structs.replace(operation, inputs=(*operation.inputs[:-2], wide_left, wide_right))
        faster_ns = self._model.product_ns(padded)
        pairs = [(fact, wide) for fact, wide in ((left, wide_left), (right, wide_right)) if fact != wide]
        tried_ns = faster_ns + sum(self._copy_ns(wide) for fact, wide in pairs if not self._is_free_in_trial(fact))
        if kernel.ns <= _LEAST_GAIN * tried_ns:
            return kernel
        copied = [wide for _, wide in pairs if not self._is_written(wide)]
        ns = faster_ns + sum(map(self._copy_ns, copied))
        return msgspec.structs.replace(kernel, ns=ns, launches=kernel.launches + len(copied))

    def _is_tried(self, left: "TensorFacts", right: "TensorFacts", precision: str) -> bool:
        """Whether a product computes enough per byte for padding to be worth a trial."""
        m, n, k = left.shape[-2], right.shape[-1], left.shape[-1]
        peak, bandwidth = self._card.peak_flops.get(precision), self._card.bandwidth
        if not peak or not bandwidth:
            return True
        return m * n * k / (m * k + n * k + m * n) > _LEAST_INTENSITY * peak / bandwidth

    def _is_free_in_trial(self, fact: "TensorFacts") -> bool:
        """Whether Inductor expects that nothing is copied."""
        return fact.contiguous and fact.storage in self._fused

    def _is_written(self, wide: "TensorFacts") -> bool:
        """Whether the kernel that makes a matrix writes it with this padding."""
        return wide.storage in self._fused and self._padded.setdefault(wide.storage, wide.shape) == wide.shape

    def _copy_ns(self, fact: "TensorFacts") -> float:
        return self._model.copy_ns(math.prod(fact.shape) * ITEM_BYTES[fact.dtype])


def _pad(fact: "TensorFacts", multiple: int) -> "TensorFacts":
    """A matrix, or a batch of them, with rows and columns that are multiples. What has one element is not padded."""
    *batch, rows, columns = fact.shape
    rows, columns = (size if size == 1 else -(-size // multiple) * multiple for size in (rows, columns))
    return msgspec.structs.replace(fact, shape=(*batch, rows, columns))

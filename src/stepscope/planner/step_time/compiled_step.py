"""The kernels of a compiled step and what they cost the host.

Operators between products are fused (`fusion`). Products stay as they are, except for those that Inductor pads
(`padding`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from stepscope.hardware import Hardware
from stepscope.planner.step_time.fusion import OUTSIDE, FusedGroup, fuse, is_compiled, share_casts
from stepscope.planner.step_time.host_time import HostModel
from stepscope.planner.step_time.kernels_of import ITEM_BYTES, KernelModel, PlannedKernel
from stepscope.planner.step_time.measured_times import Sizes
from stepscope.planner.step_time.padding import is_worth_padding, pad_product

if TYPE_CHECKING:
    from stepscope.planner.operation import Operation, TensorFacts

# Of the balance between arithmetic and bandwidth, which a product must exceed for Inductor to try it with padded sizes.
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
        padded = pad_product(operation)
        if padded is None:
            return kernel
        left, right = operation.inputs[-2:]
        if not self._is_tried(left, right, kernel.precision):
            return kernel
        are_free = [self._is_free_in_trial(fact) for fact in (left, right)]
        if not is_worth_padding(self._model, operation, padded, are_free):
            return kernel
        pairs = zip((left, right), padded.inputs[-2:], strict=True)
        copied = [wide for fact, wide in pairs if fact != wide and not self._is_written(wide)]
        ns = self._model.product_ns(padded) + sum(map(self._copy_ns, copied))
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

"""What Hopper's bulk copy engine (TMA) asks of a tensor."""

from torch import Tensor

ALIGNMENT = 16  # bytes, of the first element and of every stride but the last
_NEVER_TAKEN = 16  # elements: a stride that passes every check


def is_tma_able(x: Tensor) -> bool:
    """Whether the copy engine of Hopper can read x where it lies: rows dense, everything else on 16 bytes. A dimension
    of one is never stepped over, so its stride does not matter."""
    sizes, strides = x.shape, x.stride()
    if (strides[-1] != 1 and sizes[-1] != 1) or x.data_ptr() % ALIGNMENT:
        return False
    elements = ALIGNMENT // x.element_size()
    outer = zip(sizes[:-1], strides[:-1], strict=True)
    return not any(size != 1 and (stride <= 0 or stride % elements) for size, stride in outer)


def tma_strides(x: Tensor) -> list[int]:
    """The strides of such a tensor for a descriptor: that of a dimension of one is never taken, but it is checked."""
    strides = list(x.stride())
    if 1 in x.shape:
        strides = [_NEVER_TAKEN if size == 1 else stride for size, stride in zip(x.shape, strides, strict=True)]
    strides[-1] = 1
    return strides

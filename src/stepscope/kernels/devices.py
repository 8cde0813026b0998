"""What a launcher needs to know about the GPU that its tensors are on."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

UNKNOWN_MULTIPROCESSORS = 132  # Hopper's. In Triton's interpreter
_SAME_DEVICE = nullcontext()


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device. That is nearly always the tensors' own, and then nothing needs to change:
    setting the same device again takes microseconds.
    """
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _SAME_DEVICE
    return torch.cuda.device(x.device)


@cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return UNKNOWN_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count

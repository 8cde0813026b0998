"""Peak memory and memory limits, on a GPU and on a CPU.

On CUDA both belong to the caching allocator. A CPU has no such allocator: the peak is how far the resident set of the
process rose above its size before the model was built, and the limit is on how far its data segment may grow from
there.
"""

import resource
from contextlib import suppress
from pathlib import Path

import torch

from stepscope.errors import StepscopeError
from stepscope.hardware import read_proc_bytes


class HostMemory:
    """The peak resident memory above the value at construction."""

    def __init__(self) -> None:
        # Writing 5 resets the peak to the current size, so that importing torch does not count. A worker is forked and
        # starts with a fresh peak anyway, so a read-only /proc costs nothing there.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._start_bytes = _status_bytes("VmRSS")
        self._start_code_bytes = _status_bytes("RssFile")

    def peak_bytes(self) -> int:
        """Without the code of libraries, which a forked process maps page by page as it runs."""
        code_bytes = _status_bytes("RssFile") - self._start_code_bytes
        return max(0, _status_bytes("VmHWM") - self._start_bytes - max(0, code_bytes))


def limit_memory(device: torch.device, limit_bytes: int) -> None:
    """From here on, allocations beyond `limit_bytes` fail."""
    if device.type == "cuda":
        _limit_allocator(device, limit_bytes)
    else:
        _limit_data_segment(limit_bytes)


def _limit_allocator(device: torch.device, limit_bytes: int) -> None:
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    if limit_bytes > total_bytes:
        raise StepscopeError(
            f"memory limit of `{limit_bytes:,}` bytes exceeds the device's memory",
            detail=f"{torch.cuda.get_device_name(device)} has {total_bytes:,} bytes",
            hint="remove --memory-limit",
        )
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, device)


def _limit_data_segment(limit_bytes: int) -> None:
    # Let the thread pool allocate its stacks now: under the limit, a thread that cannot start aborts the process.
    square = torch.ones(256, 256)
    torch.mm(square, square).sum()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _status_bytes("VmData") + limit_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _status_bytes(field: str) -> int:
    return read_proc_bytes("/proc/self/status", field)

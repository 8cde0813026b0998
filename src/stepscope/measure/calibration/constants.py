"""Single numbers of a GPU: the gaps between kernels, what a CUDA graph costs, and how fast it is under continuous load.

A large GPU lowers its clock when it computes for longer than a moment, because of its power limit. A step of a second
is therefore slower than the sum of its kernels, each measured in a short burst.
"""

import time
from collections.abc import Callable

import torch

from stepscope.measure import nvml
from stepscope.measure.calibration.clock import Call, CallClock
from stepscope.measure.calibration.products import use_precision
from stepscope.measure.environment import DTYPES
from stepscope.measure.timing import elapsed_ns, make_event

_SUSTAINED_S = 1.2
_KERNELS = 200
_COOL_S = 0.4  # after continuous load, until the clock is that of a burst again


def measure_constants(clock: CallClock) -> dict[str, float]:
    device = clock.device
    if device.type != "cuda":
        return {}
    return {**_measure_gaps(clock), **_measure_transfers(device), **_measure_sustained(clock)}


def _measure_gaps(clock: CallClock) -> dict[str, float]:
    device = clock.device
    x, large = torch.zeros(32, device=device), torch.zeros(2**24, device=device)
    constants = {
        "tiny_kernel_in_stream_ns": float(clock.time_calls([lambda: x.add_(1.0)])),
        "large_kernel_in_stream_ns": float(clock.time_calls([lambda: large.add_(1.0)])),
    }
    for name, tensor in (("tiny", x), ("large", large)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_KERNELS):
                tensor.add_(1.0)
        constants[f"{name}_kernel_in_graph_ns"] = clock.time_calls([graph.replay]) / _KERNELS
        constants[f"graph_launch_host_{name}_ns"] = _time_on_host(graph.replay, device, 5)
    constants["launch_host_ns"] = _time_on_host(lambda: x.add_(1.0), device, _KERNELS)
    constants["launch_to_start_ns"] = _time_round_trip(lambda: x.add_(1.0), device)
    constants["synchronize_ns"] = _time_round_trip(lambda: None, device)
    constants["item_ns"] = _time_on_host(x.sum().item, device, 50)
    return constants


def _measure_transfers(device: torch.device) -> dict[str, float]:
    constants = {}
    for name, size in (("small", 2**12), ("large", 2**26)):
        pinned, target = torch.zeros(size, dtype=torch.uint8).pin_memory(), torch.zeros(size, dtype=torch.uint8)
        target = target.to(device)
        constants[f"to_device_{name}_ns"] = _time_round_trip(lambda a=target, b=pinned: a.copy_(b), device)  # type: ignore[misc]
    return constants


def _time_on_host(call: Call, device: torch.device, count: int) -> float:
    times = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        start_ns = time.perf_counter_ns()
        for _ in range(count):
            call()
        times.append((time.perf_counter_ns() - start_ns) / count)
    torch.cuda.synchronize(device)
    return min(times)


def _time_round_trip(call: Callable[[], object], device: torch.device) -> float:
    """From the launch of a call to its end, as the host sees it."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize(device)
        start_ns = time.perf_counter_ns()
        call()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter_ns() - start_ns)
    return float(sorted(times)[len(times) // 2])


def _measure_sustained(clock: CallClock) -> dict[str, float]:
    """Return the time of large products in a burst and after a second of nothing else, and of a mix with copies."""
    device = clock.device
    constants: dict[str, float] = {}
    for precision, side in (("bf16", 8192), ("tf32", 8192), ("fp32", 4096), ("bf16", 2048)):
        use_precision(precision)
        left, right = (torch.randn(side, side, device=device, dtype=DTYPES[precision]) for _ in range(2))
        _add_sustained(constants, clock, f"{precision}_{side}", lambda a=left, b=right: torch.mm(a, b))  # type: ignore[misc]
        if (precision, side) == ("bf16", 8192):
            small = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
            _add_sustained(constants, clock, "bf16_mixed", lambda a=small: torch.mm(a, a).mul(0.5).add(a).float())  # type: ignore[misc]
    copied = torch.zeros(2**28, device=device)
    _add_sustained(constants, clock, "copy", lambda: copied.mul_(1.0))
    return constants


def _add_sustained(constants: dict[str, float], clock: CallClock, name: str, call: Call) -> None:
    time.sleep(_COOL_S)
    constants[f"burst_{name}_ns"] = float(clock.time_calls([call]))
    end = time.monotonic() + _SUSTAINED_S
    count = max(4, round(2e8 / constants[f"burst_{name}_ns"] / 10))  # about 20 ms
    while True:
        before, after = make_event(), make_event()
        before.record()
        for _ in range(count):
            call()
        after.record()
        after.synchronize()
        if time.monotonic() > end:
            break
    if clocks := nvml.clocks(clock.device):
        constants[f"sustained_{name}_mhz"] = float(clocks.sm_mhz)
    constants[f"sustained_{name}_ns"] = elapsed_ns(before, after) / count

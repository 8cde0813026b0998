"""The matrix-product peak of a device that has no data sheet here: measured, and marked as measured.

It is what the installed library reaches on a large square product, which is the ceiling a model's matrix work can be
held against; it is lower than a data sheet's peak, so a utilisation against it reads higher. The best of several runs
counts, because a ceiling is not moved by another process's interference.
"""

import time
from collections.abc import Callable, Collection

import torch

from stepscope.hardware import Hardware
from stepscope.spec import Precision

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Large enough to be past the library's fixed costs, small enough for a second or two on two cores.
_WIDTH = {"cpu": 1024, "cuda": 8192}
_BUDGET_S = 0.5
_LEAST_RUNS = 3


def measure_peaks(name: str, device: torch.device, precisions: Collection[Precision]) -> Hardware:
    return Hardware(
        name=name,
        peak_flops={precision: _matmul_peak(device, precision) for precision in sorted(set(precisions))},
        source="measured",
    )


def _matmul_peak(device: torch.device, precision: Precision) -> float:
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    width = _WIDTH[device.type]
    left = torch.randn(width, width, device=device).to(_DTYPES[precision])
    right = torch.randn(width, width, device=device).to(_DTYPES[precision])

    def multiply() -> None:
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return 2 * width**3 / _best_seconds(multiply)


def _best_seconds(run: Callable[[], None]) -> float:
    run()
    best = float("inf")
    deadline = time.perf_counter() + _BUDGET_S
    runs = 0
    while runs < _LEAST_RUNS or time.perf_counter() < deadline:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
        runs += 1
    return best

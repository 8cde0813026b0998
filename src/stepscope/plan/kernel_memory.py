"""Memory that CUDA kernels take for themselves: temporaries that an operator's results do not show."""

from typing import Any

import torch
from torch import Tensor

from stepscope.plan.assumptions import Accelerator

aten = torch.ops.aten
MULTIPLIES = frozenset(
    {
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.addmv.default,
        aten.mv.default,
        aten.dot.default,
        aten._scaled_mm.default,
    }
)


def on_cpu(func: Any) -> tuple[int, ...]:
    return ()


def temporary_bytes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor], gpu: Accelerator
) -> list[int]:
    return []

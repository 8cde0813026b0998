"""What a kernel says of its problem, family by family: matrix products, fused attention, and all that moves data."""

from stepscope.recover.facts import Fact, Sighting
from stepscope.recover.families import fused_attention as attention
from stepscope.recover.families import products
from stepscope.recover.families import registry as memory_bound
from stepscope.recover.families.tilings import PROCESSORS


def read(sighting: Sighting, *, processors: int = PROCESSORS, recent: bool = False) -> Fact | None:
    """The fact, or None where nothing is known.

    `processors`: the GPU's SMs, which persistent kernels fill. `recent`: as in `memory_bound.read`."""
    if fact := attention.read(sighting, processors):
        return fact
    if sighting.name.kernel_class == "gemm":
        return products.read(sighting, processors)
    return memory_bound.read(sighting, recent=recent)

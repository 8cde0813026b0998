"""What a kernel's launch says about its problem: one table of kernel families, and one entry point.

A family recognizes its kernels by name. Its reader returns facts of which exactly one holds: usually a single fact,
several if the name leaves open which rule chose the grid, and none for a kernel of another family or without
information. No kernel is read by two families, so their order only matters for speed.
"""

from collections.abc import Callable, Iterable

import msgspec

from stepscope.recover.facts import Fact, Sighting
from stepscope.recover.families.compiled import read_compiled
from stepscope.recover.families.elementwise import is_recent, read_concatenation, read_elementwise
from stepscope.recover.families.fused_attention import read_attention
from stepscope.recover.families.grids import PROCESSORS, UNKNOWN, join_choices
from stepscope.recover.families.optimizers import read_update
from stepscope.recover.families.products import read_product
from stepscope.recover.families.reductions import read_reduction, read_scan
from stepscope.recover.families.routing import read_routing
from stepscope.recover.families.rowwise import read_lookup, read_norm, read_softmax


class Platform(msgspec.Struct, frozen=True, kw_only=True):
    """What launched the kernels: the number of SMs, which persistent kernels fill; whether PyTorch is known to be 2.7
    or later (`elementwise.is_recent`); and whether to assume that compiled kernels follow Inductor's rules."""

    processors: int = PROCESSORS
    recent: bool = False
    usual: bool = False


Reader = Callable[[Sighting, Platform], tuple[Fact, ...]]
FAMILIES: dict[str, Reader] = {
    "fused attention": lambda sighting, platform: _only(read_attention(sighting, platform.processors)),
    "GEMM": lambda sighting, platform: _only(read_product(sighting, platform.processors)),
    "elementwise": lambda sighting, platform: read_elementwise(sighting, recent=platform.recent),
    "norms": lambda sighting, _: _only(read_norm(sighting)),
    "lookups": lambda sighting, _: _only(read_lookup(sighting)),
    "concatenation": lambda sighting, _: _only(read_concatenation(sighting)),
    "optimizers": lambda sighting, _: _only(read_update(sighting)),
    "softmax": lambda sighting, _: read_softmax(sighting),
    "routing": lambda sighting, _: _only(read_routing(sighting)),
    "reductions": lambda sighting, _: read_reduction(sighting),
    "running sums": lambda sighting, _: read_scan(sighting),
    "compiled": lambda sighting, platform: read_compiled(sighting, usual=platform.usual),
}
_H200 = Platform()


def find_platform(sightings: Iterable[Sighting], device_sms: int | None) -> Platform:
    return Platform(processors=device_sms or UNKNOWN, recent=is_recent(one.name for one in sightings))


def _only(fact: Fact | None) -> tuple[Fact, ...]:
    return () if fact is None else (fact,)


def read_facts(sighting: Sighting, platform: Platform = _H200) -> tuple[Fact, ...]:
    """Return the facts of which exactly one holds, or none if the kernel is unknown."""
    if not sighting.has_geometry:
        return ()
    return next((facts for read in FAMILIES.values() if (facts := read(sighting, platform))), ())


def read_fact(sighting: Sighting, platform: Platform = _H200) -> Fact | None:
    """Return one fact that holds whichever of `read_facts` does."""
    return join_choices(read_facts(sighting, platform))

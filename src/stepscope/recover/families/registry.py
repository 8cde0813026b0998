"""All families of kernels that move data rather than multiply matrices, behind one door."""

from stepscope.recover.facts import Sighting
from stepscope.recover.families import concatenation, elementwise, gather, inductor, norms, reductions, scans, softmax
from stepscope.recover.families import optimizers as update
from stepscope.recover.families.grids import MemoryFact, join_choices

_SINGLE = (norms.read, gather.read, concatenation.read, update.read)
_SEVERAL = (softmax.choices, reductions.choices, scans.choices, inductor.choices)


def read(sighting: Sighting, *, recent: bool = False) -> MemoryFact | None:
    """One fact, or None of a kernel that is of none of these families or says nothing."""
    return join_choices(choices(sighting, recent=recent))


def choices(sighting: Sighting, *, recent: bool = False) -> tuple[MemoryFact, ...]:
    """The facts of which exactly one holds. `recent` as of `elementwise.is_recent`."""
    if not sighting.has_geometry:
        return ()
    if min(*sighting.grid, *sighting.block) < 1:  # no launch at all
        return ()
    if found := elementwise.choices(sighting, recent=recent):
        return found
    for read_one in _SINGLE:
        if fact := read_one(sighting):
            return (fact,)
    for read_several in _SEVERAL:
        if several := read_several(sighting):
            return several
    return ()

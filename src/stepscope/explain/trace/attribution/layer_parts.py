"""What the kernels of a layer are for, from their order alone.

The kernels between two calls of fused attention are those of a layer: its output projection, a norm, the feed-forward
layer or the experts, a norm, and the projections to queries, keys and values of the next layer. Their GEMMs have these
roles only if norms separate them in exactly this way. Layers with attention and feed-forward in parallel, with norms of
queries between the projections, without fused attention, or in backward have no parts here.

A kernel between two parts, such as a residual addition, belongs to neither.
"""

from collections.abc import Sequence
from itertools import pairwise

from stepscope.explain.kernel_names import decode
from stepscope.explain.kernel_names.vocabulary import KernelName

PROJECTION, ATTENTION, OUTPUT = "q, k, v projection", "attention", "output projection"
NORM, FEED_FORWARD, EXPERTS = "norm", "feed-forward", "mixture of experts"
_MOST_PROJECTIONS = 3
_MOST_DENSE = 3  # GEMMs of a feed-forward layer without experts: gate, up, down
_OF_EXPERTS = "expert"  # in the operations of their own kernels
_KINDS = ("GEMM", "norm", "attention")


def find_parts(names: Sequence[str]) -> tuple[int, list[str | None]] | None:
    """Return the place at which a layer begins among kernels that repeat without end, and the part of each kernel; None
    if their order is not that of a layer."""
    kernels = [decode(name) for name in names]
    calls = [at for at, one in enumerate(kernels) if one.kernel_class == "attention"]
    if not calls or any(kernels[at].direction == "backward" for at in calls):
        return None
    places = [(calls[-1] + 1 + at) % len(names) for at in range(len(names))]
    parts = _name_parts([kernels[at] for at in places])
    if parts is None:
        return None
    begin = max(at for at, part in enumerate(parts) if part == NORM)
    found = dict(zip(places, parts, strict=True))
    return places[begin], [found[at] for at in range(len(names))]


def _name_parts(kernels: Sequence[KernelName]) -> list[str | None] | None:
    """Return the parts of kernels in the order of a layer, from behind attention to attention."""
    gemms, norms, attention = ([at for at, one in enumerate(kernels) if one.kernel_class == kind] for kind in _KINDS)
    gaps = [at for at, (one, other) in enumerate(pairwise(gemms)) if any(one < norm < other for norm in norms)]
    if len(gaps) != 2 or gaps[0] != 0 or attention[0] < gemms[-1]:
        return None
    middle, projections = gemms[1 : gaps[1] + 1], gemms[gaps[1] + 1 :]
    # What routes tokens, and adds up what experts computed, is around their GEMMs.
    routing = [at for at in range(gemms[0], projections[0]) if _OF_EXPERTS in kernels[at].operation]
    if len(projections) > _MOST_PROJECTIONS or (len(middle) > _MOST_DENSE and not routing):
        return None
    parts: list[str | None] = [NORM if at in norms else None for at in range(len(kernels))]
    around = [*middle, *routing]
    for begin, end, part in (
        (gemms[0], gemms[0], OUTPUT),
        (min(around), max(around), EXPERTS if routing else FEED_FORWARD),
        (projections[0], projections[-1], PROJECTION),
        (projections[-1] + 1, len(kernels) - 1, ATTENTION),
    ):
        parts[begin : end + 1] = [part] * (end + 1 - begin)
    return parts

"""What shows that kernels are missing: layers that do not agree, and GEMMs or launch numbers that do not fit.

A file may have lost a kernel, or begin or end within a pass. Layers repeat, so one that lost a kernel differs from the
others, and a pass that lost an attention call has GEMMs where none belong. Not every loss shows: a file without a whole
layer looks like that of a smaller model, unless its launches are numbered or its backward pass has more layers.
"""

import itertools
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from stepscope.recover.evidence.order import Anchor, KernelOrder, Role, is_attention, is_lookup, is_of_training
from stepscope.recover.facts import Sighting
from stepscope.units import count_noun

_WHOLE_LAYER = 0.9  # of its time; the kernels between the last layer and the LM head take up to 0.77, with padding
# Kernels that look something up or build a mask before the first layer.
_PREPARING = ("embedding", "index", "elementwise", "copy", "reduction", "norm", "GEMM", "other")
_PART_OF_LAYER = 0.5  # of its launches: what happens between two kernels of a layer takes at most a third
_COMPILED_NUMBER = re.compile(r"_(\d{1,9})$")
_LOOKED_UP = frozenset({"embedding", "index_select"})  # operators in a compiled kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class StructureDoubt:
    """A reason why there may be more layers, or why what one layer shows may be wrong."""

    text: str
    of_layers: bool = False
    of_sizes: bool = False


def look(sighting: Sighting) -> Hashable:
    """Return a key that is equal for the same kernel with the same launch and, if counted, the same stores."""
    return sighting.name.name, sighting.grid, sighting.block, sighting.counters.get("store_bytes")


def is_confirmed(layers: Sequence[Anchor]) -> bool:
    """Whether the same GEMMs are between two pairs of attention calls: the loss of one kernel does not change both."""
    return len(layers) > 2


def doubt_ends(
    layers: Sequence[Anchor],
    *,
    first: Sequence[Hashable],
    last: Sequence[Hashable],
    behind: Sequence[Hashable],
    ahead: Sequence[Hashable],
    follows_pass: bool,
) -> Iterator[StructureDoubt]:
    """Compare the ends of a pass with a layer. `first` are the GEMMs before its first attention and `last` those after
    its last one; `behind` and `ahead` are the GEMMs of a layer after and before its attention."""
    of_sizes = not is_confirmed(layers)
    end = len(first)
    used = []
    for key in reversed(ahead):  # a GEMM for rotary angles may be between them
        end = next((place for place in reversed(range(end)) if first[place] == key), -1)
        used.append(end)
    if end < 0 and of_sizes:
        yield StructureDoubt(text="the first layer does not have the GEMMs of the other", of_sizes=True)
    others = [key for place, key in enumerate(first) if place not in used]
    if follows_pass and others[: len(behind)] == [*behind]:  # of the pass before, followed by its LM head
        others = others[len(behind) :] or others
    if not {*others}.isdisjoint((*behind, *ahead)):
        yield StructureDoubt(
            text="more GEMMs of a layer come before the first attention", of_layers=True, of_sizes=of_sizes
        )
    rest = last[len(behind) :]
    if len(rest) > 1 and of_sizes:
        yield StructureDoubt(text="several GEMMs follow the last layer: one may belong to it", of_sizes=True)
    rest = rest[: len(ahead)]  # the file may end with the first of them, which is not an LM head then
    if rest and [*rest] == [*ahead[: len(rest)]]:
        yield StructureDoubt(
            text="what follows the last layer may be the start of another", of_layers=True, of_sizes=True
        )


def doubt_projections(ahead: Sequence[Role]) -> Iterator[StructureDoubt]:
    """Keys and values are one projection where queries are part of it as well. Without the query's, a file that lost
    the key's projection in every layer looks the same."""
    if "key_value" in ahead:
        yield StructureDoubt(
            text="two projections before attention: a third may be missing from every layer", of_sizes=True
        )


def find_hidden_layers(
    before: Sequence[Sighting], final: Sequence[Sighting], layer: Sequence[Sighting]
) -> Iterator[str]:
    """Yield where kernels take so long that they may be a layer under other names: before the first layer, or between
    the last one and the LM head."""
    strange = [one for one in before if one.name.kernel_class not in _PREPARING]
    for kernels, share, where in ((strange, 0.5, "before the first"), (final, _WHOLE_LAYER, "after the last")):
        spent, usual = (sum(one.duration_ns for one in part) for part in (kernels, layer))
        if 0 < share * usual <= spent:
            yield f"kernels {where} layer take {spent / 1e3:,.1f} µs, a layer {usual / 1e3:,.1f} µs"


def doubt_layers(
    order: KernelOrder, passes: Sequence[Sequence[Anchor]], shown: Sequence[Anchor], within: range
) -> Iterator[StructureDoubt]:
    """Compare the layers with each other. `shown` is the pass that is analyzed, and `within` are its kernels."""
    if len(shown) == 1:
        yield StructureDoubt(
            text="a single layer: no other confirms which of its kernels is which", of_layers=True, of_sizes=True
        )
    if _differ(order, passes):
        yield StructureDoubt(
            text="layers or passes differ in kernels other than GEMMs: what one layer shows may not apply to all",
            of_sizes=True,
        )
    if _continues(order, shown[-1][-1].index):
        yield StructureDoubt(text="attention follows without the start of a pass", of_layers=True, of_sizes=True)
    backward = _count_backward(order, passes, shown)
    if backward > len(shown):
        yield StructureDoubt(text=f"the backward pass has {count_noun(backward, 'layer')}", of_layers=True)
    if skips_launches(order.sightings[within.start : within.stop], len(shown)):
        yield StructureDoubt(
            text="between two kernels, as many launches are missing as half a layer has", of_layers=True
        )


def _differ(order: KernelOrder, passes: Sequence[Sequence[Anchor]]) -> bool:
    """Whether layers of this or another pass have different kernels. A compiler generates separate kernels for some
    layers; there only the attention kernels are compared."""
    attentions = {tuple(map(look, anchor)) for layers in passes for anchor in layers}
    between = [order.sightings[a[-1].index : b[0].index] for layers in passes for a, b in itertools.pairwise(layers)]
    if any(one.name.library == "Inductor" for gap in between[:1] for one in gap):
        return len(attentions) > 1
    return len(attentions) > 1 or len({tuple(map(look, gap)) for gap in between}) > 1


def _continues(order: KernelOrder, last: int) -> bool:
    """Whether attention follows this kernel and nothing between them belongs to another pass or to training."""
    following = next((anchor[0].index for anchor in order.anchors if anchor[0].index > last), None)
    between = order.sightings[last + 1 : following]
    return following is not None and find_lookup(between) is None and not any(map(is_of_training, between))


def _count_backward(order: KernelOrder, passes: Sequence[Sequence[Anchor]], shown: Sequence[Anchor]) -> int:
    """Return the attention calls of the backward pass after this one. A call may have several kernels, and the loss has
    a softmax too."""
    last = shown[-1][-1].index
    following = next((one[0][0].index for one in passes if one[0][0].index > last), None)
    calls = Counter(
        look(one)
        for one in order.sightings[last:following]
        if is_attention(one, backward=True) or (one.name.kernel_class, one.name.direction) == ("softmax", "backward")
    )
    return max(calls.values(), default=0)


def skips_launches(kernels: Sequence[Sighting], num_layers: int) -> bool:
    """Whether the launch numbers of a pass skip those of half a layer, between two kernels that otherwise follow each
    other closely or are together only once."""
    numbers = [one.launch for one in kernels if one.launch is not None]
    if len(numbers) < max(2, len(kernels)):
        return False
    steps: dict[Hashable, list[int]] = {}
    for (a, b), (number, following) in zip(itertools.pairwise(kernels), itertools.pairwise(numbers), strict=True):
        steps.setdefault((look(a), look(b)), []).append(following - number)
    usual = median(step for each in steps.values() for step in each)  # 0 in a CUDA graph, which is one launch
    least = _PART_OF_LAYER * usual * len(kernels) / num_layers
    return usual > 0 and any(max(each) - (min(each) if len(each) > 1 else 0) > least for each in steps.values())


def find_lookup(sightings: Sequence[Sighting]) -> Sighting | None:
    """Return the lookup of embeddings with which a pass starts; the kernels are those since the previous attention. A
    compiler may look embeddings up again in later layers, but numbers its kernels: the first has all numbers before."""
    numbers: set[int] = set()
    unseen = 0
    for one in sightings:
        if is_lookup(one):
            return one
        if one.name.library == "Inductor" and (found := _COMPILED_NUMBER.search(one.name.name)):
            if not _LOOKED_UP.isdisjoint(one.name.fused) and int(found[1]) <= unseen:
                return one
            numbers.add(int(found[1]))
            while unseen in numbers:
                unseen += 1
    return None

"""Regular runs: layers are alike, passes are complete, and nothing is missing between launches.

A program runs the same kernels in every layer, and the driver numbers its calls. So kernels that were left out show,
even if those that remain fit the claim. None of this refutes a claim: programs may have a reason to treat a layer
differently.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence

from stepscope.recover.evidence.completeness import find_hidden_layers, look, skips_launches
from stepscope.recover.evidence.layout import Placement
from stepscope.recover.evidence.order import Zone, breaks_feed_forward, is_norm, is_product
from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.facts import Sighting
from stepscope.units import count_noun

_HALF = {"bf16", "fp16"}
_LONG_LAYER = 1.7  # times another layer; the highest measured was 1.2

# Kernels in these zones belong to a layer.
LAYER_ZONES: tuple[Zone, ...] = ("between", "middle", "feed_forward", "heads", "merge")
Span = tuple[int, int]  # indices of the first and the last kernel


def find_irregularities(evidence: KernelEvidence, placement: Placement) -> Iterator[str]:
    sightings = evidence.sightings
    spans = _find_spans(placement)
    yield from _compare_layers(sightings, spans)
    yield from _compare_times(sightings, spans)
    yield from _find_bare_layers(placement)
    yield from _find_leftovers(placement)
    yield from _compare_heads(placement)
    yield from _compare_steps(sightings, placement)
    yield from _find_long_ends(sightings, placement, spans)
    yield from _find_skipped(sightings, placement, spans)


def disputes_dtype(sightings: Sequence[Sighting], placement: Placement) -> bool:
    """Whether the layers' GEMMs are in one dtype of 16 bits, and all kernels that are not GEMMs only in the other."""
    gemms = {one.sighting.dtype for one in placement.products if one.layer is not None} & _HALF
    others = {one.dtype for one in sightings if one.name.kernel_class != "GEMM"} & _HALF
    return bool(gemms and others) and gemms.isdisjoint(others)


def is_whole(placement: Placement, pass_number: int) -> bool:
    """Whether the file certainly has all layers of a pass."""
    return pass_number not in placement.unclear and not placement.is_cut(pass_number)


def _find_spans(placement: Placement) -> dict[tuple[int, int], Span]:
    """Return the kernels of each layer, from its first GEMM to its last, by pass and layer."""
    spans: dict[tuple[int, int], Span] = {}
    for one in placement.products:
        if one.layer is not None:
            index = one.sighting.index
            first, last = spans.get((one.pass_number, one.layer), (index, index))
            spans[one.pass_number, one.layer] = min(first, index), max(last, index)
    return spans


def _compare_layers(sightings: Sequence[Sighting], spans: dict[tuple[int, int], Span]) -> Iterator[str]:
    """Compare the kernels of the layers, and those between one layer and the next. A compiler puts other operations
    into the same kernel in some layers, and the first layer prepares what all need."""
    is_compiled = any(one.name.library == "Inductor" for one in sightings)
    key = _look_roughly if is_compiled else look
    spans = {place: span for place, span in spans.items() if not is_compiled or place[1] > 1}
    inside = {place: sightings[first : last + 1] for place, (first, last) in spans.items()}
    between = {
        (number, layer): sightings[last + 1 : spans[number, layer + 1][0]]
        for (number, layer), (_, last) in spans.items()
        if (number, layer + 1) in spans
    }
    for parts in (inside, between):
        kernels = {place: tuple(map(key, part)) for place, part in parts.items()}
        if len(set(kernels.values())) > 1:
            usual = Counter(kernels.values()).most_common(1)[0][0]
            number, layer = next(place for place, one in kernels.items() if one != usual)
            other = len(kernels[number, layer])
            yield (
                f"layers differ: pass {number}, layer {layer} has {count_noun(other, 'kernel')} where others have "
                f"{len(usual)}"
                if other != len(usual)
                else f"layers differ: pass {number}, layer {layer} has other kernels than most"
            )
            return


def _compare_times(sightings: Sequence[Sighting], spans: dict[tuple[int, int], Span]) -> Iterator[str]:
    """Find layers that contain another one under other names, also where a compiler makes layers different."""
    spent = {place: sum(one.duration_ns for one in sightings[a : b + 1]) for place, (a, b) in spans.items()}
    shortest_of: dict[int, float] = {}
    for (number, _), time in spent.items():
        shortest_of[number] = min(time, shortest_of.get(number, time))
    for (number, layer), time in spent.items():
        shortest = shortest_of[number]
        if 0 < _LONG_LAYER * shortest < time:
            yield f"layers differ: pass {number}, layer {layer} takes {time / shortest:.1f}× as long as another"
            return


def _look_roughly(sighting: Sighting) -> Hashable:
    return sighting.name.kernel_class, sighting.grid


def _find_bare_layers(placement: Placement) -> Iterator[str]:
    """A layer has norms, and an activation between the GEMMs of its feed-forward half."""
    inside = [one.sighting for one in placement.others if one.zone in LAYER_ZONES]
    is_fused = any(one.name.library in ("Inductor", "Triton") or one.name.kernel_class == "other" for one in inside)
    if not is_fused and not any(map(is_norm, inside)):
        yield "the layers have no norm: kernels may be missing"
    if breaks_feed_forward(placement.find_zone("feed_forward")):
        yield "the feed-forward layers have no activation between their GEMMs: kernels may be missing"


def _find_leftovers(placement: Placement) -> Iterator[str]:
    """Find GEMMs before the first layer that are like those of a layer: others may lack one."""
    start = min(one.sighting.index for one in placement.attentions)
    inside = {look(one.sighting) for one in placement.products if one.layer is not None}
    if found := [one for one in placement.extras if one.index < start and look(one) in inside]:
        gemms = count_noun(len(found), "GEMM")
        yield f"before the first layer: {gemms} with the kernel and grid of a layer, which may lack one"


def _compare_heads(placement: Placement) -> Iterator[str]:
    """Either every pass has an LM head or none. The last pass of the file may be cut."""
    headed = {one.pass_number for one in placement.products if one.role == "head"}
    passes = set(range(1, len(placement.num_layers))) - placement.left_out
    if headed and (without := sorted(passes - headed)):
        yield f"pass {without[0]} has no LM head, but others have one"


def _compare_steps(sightings: Sequence[Sighting], placement: Placement) -> Iterator[str]:
    """Every training step has as many gradients before its optimizer. Without one, the step may be cut."""
    gradients: set[int] = set()
    products: defaultdict[int, list[int]] = defaultdict(list)
    for one in placement.products:
        products[one.pass_number].append(one.sighting.index)
    end = len(sightings)  # where the next pass begins
    for number in sorted(products, reverse=True):
        own = products[number]
        following = sightings[max(own) + 1 : end]
        end = min(end, *own)
        update = next((one.index for one in following if one.name.kernel_class == "optimizer"), None)
        if update is not None:
            gradients.add(sum(is_product(one) for one in following if one.index < update))
    if len(gradients) > 1:
        yield f"training steps differ: {' and '.join(map(str, sorted(gradients)))} GEMMs after the forward pass"


def _find_long_ends(
    sightings: Sequence[Sighting], placement: Placement, spans: dict[tuple[int, int], Span]
) -> Iterator[str]:
    """Find what may be a layer under other names, before the first layer or between the last one and the LM head."""
    headed = {one.pass_number for one in placement.products if one.role == "head"}
    zones: defaultdict[tuple[int, Zone | None], list[Sighting]] = defaultdict(list)
    for one in placement.others:
        zones[one.pass_number, one.zone].append(one.sighting)
    for number in range(1, len(placement.num_layers) + 1):
        first, last = spans.get((number, 1), (0, -1))
        layer = sightings[first : last + 1]
        final = zones[number, "final"] if number in headed else []
        yield from (f"in pass {number}, {text}" for text in find_hidden_layers(zones[number, "before"], final, layer))


def _find_skipped(
    sightings: Sequence[Sighting], placement: Placement, spans: dict[tuple[int, int], Span]
) -> Iterator[str]:
    heads = {one.pass_number: one.sighting.index for one in placement.products if one.role == "head"}
    spans_of: defaultdict[int, list[Span]] = defaultdict(list)
    for (number, _), span in spans.items():
        spans_of[number].append(span)
    for number, layers in enumerate(placement.num_layers, start=1):
        if inside := spans_of[number]:
            first, last = min(start for start, _ in inside), max(end for _, end in inside)
            if skips_launches(sightings[first : heads.get(number, last) + 1], layers):
                yield f"in pass {number}, as many launches are missing between two kernels as a layer has"

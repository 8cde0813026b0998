"""The sizes of a mixture of experts: their number, how many of them each token uses, and the width of one.

They follow from the kernels between the router and the sum of the results, once the tokens and d_model are known. A
gather copies each token once for each of its experts. Activations have one row per copy. The readers of routing kernels
follow PyTorch's source and were not measured, so no size is certain.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from stepscope.recover.evidence.experts import RoutedLayer
from stepscope.recover.evidence.observation import Observation, Seen
from stepscope.recover.evidence.order import Role, is_product
from stepscope.recover.evidence.structure import RoleReading, Structure
from stepscope.recover.facts import Elements, Fact, Gather, Groups, Product, Rows, Sighting, Window, find_window
from stepscope.recover.families import Platform, read_facts
from stepscope.recover.families.grids import join_choices, join_windows
from stepscope.recover.families.routing import read_grouped
from stepscope.recover.shape import Core
from stepscope.recover.solve.dependent_sizes import Sized, find_feed_forward, intersect

_MOST_EXPERTS = 1024
_MOST_PER_TOKEN = 64
_ELEMENT_BYTES = (2, 4)
_ROUTING_CLASSES = ("softmax", "sort")

Facts = Mapping[int, tuple[Fact, ...]]  # by the index of the kernel: facts of which one holds


class ExpertSizes(msgspec.Struct, frozen=True, kw_only=True):
    """`pairs` are the rows of all experts together. Windows are None if nothing shows the size."""

    num_experts: Window | None
    per_token: int | None = None
    pairs: int | None = None
    d_ff: Sized | None = None


def find_expert_sizes(layer: RoutedLayer, core: Core | None, platform: Platform) -> ExpertSizes:
    facts = {one.index: read_facts(one, platform) for one in layer.kernels}
    pairs = _count_pairs(layer, facts, core.d_model if core else None)
    per_token = _divide(pairs, core.tokens) if core and pairs else None
    number = _find_number(layer, facts, core, per_token)
    if core is None or not pairs or per_token is None:
        return ExpertSizes(num_experts=number, pairs=pairs)
    groups = number.high if number else _MOST_EXPERTS
    width = _find_width(layer, facts, pairs, core.d_model, groups)
    return ExpertSizes(num_experts=number, per_token=per_token, pairs=pairs, d_ff=width)


def _divide(pairs: int, tokens: int) -> int | None:
    per_token, rest = divmod(pairs, tokens)
    return per_token if not rest and 0 < per_token <= _MOST_PER_TOKEN else None


def _count_pairs(layer: RoutedLayer, facts: Facts, d_model: int | None) -> int | None:
    """Return the rows that are copied for the experts, by one gather or by one for each expert."""
    last = layer.products[-1].index
    rows = [
        fact.rows.low
        for index, choices in facts.items()
        for fact in choices
        if index < last and isinstance(fact, Gather) and fact.rows.is_exact and _has_width(fact, d_model)
    ]
    return sum(rows) or None


def _has_width(fact: Gather, d_model: int | None) -> bool:
    window = fact.width_bytes
    return window is None or d_model is None or any(d_model * size in window for size in _ELEMENT_BYTES)


def _find_number(layer: RoutedLayer, facts: Facts, core: Core | None, per_token: int | None) -> Window | None:
    """Return the possible numbers of experts. What contradicts stronger evidence is ignored."""
    found: Window | None = None
    for window in _number_windows(layer, facts, core):
        found = window if found is None else intersect((found, window), _MOST_EXPERTS) or found
    if found is None or per_token is None or found.high < per_token:
        return found
    return Window(max(found.low, per_token), found.high)


def _number_windows(layer: RoutedLayer, facts: Facts, core: Core | None) -> Iterator[Window]:
    """Yield windows from the strongest evidence to the weakest."""
    yield from (fact.count for choices in facts.values() for fact in choices if isinstance(fact, Groups))
    if core is None:
        return
    # A router may also choose among groups of experts, of which there are fewer: these come last.
    yield from sorted(_routed_widths(layer, facts, core.tokens), key=lambda width: -width.high)
    for fact in facts[layer.router.index] if layer.router else ():
        if isinstance(fact, Product):
            window = find_window(fact, rows=core.tokens, inner=core.d_model, largest=_MOST_EXPERTS)
            yield from (window,) if window else ()


def _routed_widths(layer: RoutedLayer, facts: Facts, tokens: int) -> Iterator[Window]:
    """Yield the widths of the softmax and the top-k with a row for each token."""
    for one in layer.kernels:
        rows = [fact for fact in facts[one.index] if isinstance(fact, Rows) and tokens in fact.rows]
        widths = [fact.width for fact in rows if fact.width is not None]
        if widths and one.name.kernel_class in _ROUTING_CLASSES:
            yield join_windows(widths)


def _find_width(layer: RoutedLayer, facts: Facts, pairs: int, d_model: int, groups: int) -> Sized:
    """Return the width of an expert: an ordinary feed-forward layer with a row for each pair of token and expert."""
    inner = list(_add_up(layer, facts))
    is_gated = len(inner) > 1
    first, last = layer.products[0], layer.products[-1]
    into: Role = "gate_up" if is_gated else "up"
    products = {into: read_grouped(first, groups), "down": read_grouped(last, groups)} if first is not last else {}
    observation = Observation(
        structure=Structure(num_layers=1, num_passes=1, is_training=False),
        reading=RoleReading(products={into: first}, zones={}),
        products={role: product for role, product in products.items() if product is not None},
        zones={"feed_forward": tuple(inner)},
        attentions=(),
        softmaxes=(),
        lookups=(),
    )
    core = Core(batch=pairs, context=1, d_model=d_model, num_heads=1, num_kv_heads=1, d_head=1)
    return find_feed_forward(observation, core)


def _add_up(layer: RoutedLayer, facts: Facts) -> Iterator[Seen]:
    """Yield the element counts of the kernels between the two GEMMs of an expert, added up over a loop of experts."""
    rounds = [stretch for stretch in _inner_stretches(layer, facts) if stretch]
    lengths = {len(stretch) for stretch in rounds}
    if len(lengths) != 1:
        return
    for kernels in zip(*rounds, strict=True):
        windows = [fact.count for one in kernels if isinstance(fact := join_choices(facts[one.index]), Elements)]
        total = Window(sum(window.low for window in windows), sum(window.high for window in windows))
        yield Seen(sighting=kernels[0], counts=(total,))


def _inner_stretches(layer: RoutedLayer, facts: Facts) -> Iterator[Sequence[Sighting]]:
    """Yield the data movement kernels between two GEMMs of the same expert. Between those of two experts, rows are
    gathered."""
    places = [place for place, one in enumerate(layer.kernels) if is_product(one) and one in layer.products]
    for start, end in itertools.pairwise(places):
        between = layer.kernels[start + 1 : end]
        if not any(map(_gathers, between)):
            yield [one for one in between if isinstance(join_choices(facts[one.index]), Elements)]


def _gathers(sighting: Sighting) -> bool:
    return "gather by index" in sighting.name.operation


def say_experts(found: ExpertSizes, layers: Iterable[RoutedLayer]) -> tuple[str, ...]:
    """Return sentences for a result without sizes."""
    number = found.num_experts
    said = [f"layers with experts: {sum(1 for _ in layers)}"]
    if number is not None:
        said.append(
            f"num_experts: {number.low:,}" if number.is_exact else f"num_experts: {number.low} to {number.high}"
        )
    return tuple(said)

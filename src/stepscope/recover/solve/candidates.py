"""Find all sizes that are consistent with the evidence, by constraint propagation from the number of tokens.

tokens → d_model → (batch, num_heads, d_head, num_kv_heads) → d_ff, vocab_size. GEMMs and attention are hard
constraints: they exclude candidates. Element counts are soft, because nobody can list every tensor that a program might
create: candidates are ranked by how many they explain, then by how common they are.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isqrt

import numpy as np

from stepscope.recover.evidence.observation import Observation, Seen
from stepscope.recover.evidence.order import Role, Zone
from stepscope.recover.facts import LARGEST_SIZE, Window, find_window
from stepscope.recover.shape import (
    Core,
    Cores,
    Flags,
    Ints,
    counted_up_to,
    divisors,
    join_cores,
    tensor_sizes,
)
from stepscope.recover.solve.dependent_sizes import (
    MOST_WIDTHS,
    WIDEST,
    count_each,
    intersect,
    is_explained,
    list_numbers,
)
from stepscope.recover.solve.heads import HALF, Triple, find_heads
from stepscope.recover.solve.priors import (
    Effort,
    surprise,
    surprise_of_width,
)

_NORM_ZONES: tuple[Zone, ...] = ("between", "middle")
_CORE_ZONES: tuple[Zone, ...] = ("between", "middle", "heads", "merge", "before", "final")
_MOST_TOKENS = 4096  # candidates for the number of tokens
_MOST_RANKED = 2000  # of the best candidates, by how common they are
_AT_ONCE = 50_000  # candidates that are scored together, to limit memory
# Units of effort: to ask a GEMM what fits a width, and to store and rank a candidate.
_ASKING = 300
_KEEPING = 24
# In no model do num_heads · d_head and d_model differ by more than this factor.
_WIDEST_HEADS = 16
_OUT: tuple[Role, ...] = ("output", "down")
_INTO_HEADS: tuple[Role, ...] = ("query", "key", "value", "key_value", "query_key_value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A candidate for the attention sizes, with the number of element counts it explains."""

    core: Core
    explained: int
    surprise: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """`consistent` are the candidates that no GEMM and no attention kernel excludes, and `explained` how many of the
    `facts` element counts each explains. `cores` are the best of them in order, empty if no sizes fit."""

    observation: Observation
    consistent: Cores
    explained: Ints
    cores: tuple[Scored, ...]
    facts: int
    is_cut: bool = False  # there were too many candidates to examine
    is_spent: bool = False  # the search reached its work limit
    num_widths: int = 0  # pairs of tokens and d_model that norms and GEMMs allow

    @property
    def best(self) -> Scored:
        return self.cores[0]

    @property
    def has_open_width(self) -> bool:
        """Whether tokens and d_model may have values that no candidate has."""
        return self.is_spent or (self.is_cut and self.num_widths > 1)


def solve(observation: Observation, effort: Effort, among: Cores | None = None) -> Solution:
    """Return the candidates. If a complete search finds none, this interpretation of the kernels is wrong. With
    `among`, only these candidates are tried."""
    facts = explainable(observation)
    with effort.share(1) as mine:
        chains = list(_chain_all(observation, mine, len(facts), among))
    consistent = join_cores([cores for chain in chains for cores in chain.cores])
    return order(
        observation,
        consistent,
        count_explained(consistent, facts),
        len(facts),
        is_cut=mine.is_spent or any(chain.is_cut for chain in chains),
        is_spent=mine.is_spent,
        num_widths=sum(chain.num_widths for chain in chains),
    )


def order(
    observation: Observation,
    consistent: Cores,
    explained: Ints,
    facts: int,
    *,
    is_cut: bool = False,
    is_spent: bool = False,
    num_widths: int = 0,
) -> Solution:
    most = int(explained.max(initial=0))
    best = np.flatnonzero(explained == most)
    oddness = surprise(consistent.take(best))
    ranked = np.argsort(oddness, kind="stable")[:_MOST_RANKED].tolist()
    return Solution(
        observation=observation,
        consistent=consistent,
        explained=explained,
        cores=tuple(
            Scored(core=consistent[int(best[place])], explained=most, surprise=float(oddness[place]))
            for place in ranked
        ),
        facts=facts,
        is_cut=is_cut,
        is_spent=is_spent,
        num_widths=num_widths,
    )


def count_explained(cores: Cores, facts: Sequence[tuple[Zone, Seen]]) -> Ints:
    """Return, for each candidate, how many of the counts are the size of one of its tensors."""
    explained = np.zeros(len(cores), np.int64)
    for start in range(0, len(cores), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        explained[some] = _count_some(cores.take(some), facts)
    return explained


def _count_some(cores: Cores, facts: Sequence[tuple[Zone, Seen]]) -> Ints:
    explained = np.zeros(len(cores), np.int64)
    known = {zone: list(tensor_sizes(cores, zone)) for zone in {zone for zone, _ in facts}}
    for zone, seen in facts:
        possible = counted_up_to(cores) if _is_counting(seen) else known[zone]
        explained += is_explained(seen.counts, possible, len(cores))
    return explained


def _is_counting(seen: Seen) -> bool:
    return "arange" in seen.sighting.name.operation


def explainable(observation: Observation) -> list[tuple[Zone, Seen]]:
    """Return the element counts that the attention sizes should explain."""
    return [(zone, seen) for zone in _CORE_ZONES for seen in observation.zones.get(zone, ())]


def find_tokens(observation: Observation, effort: Effort) -> list[int]:
    """Return the possible numbers of tokens: the rows of norms and embedding lookups. If these leave too many, the
    divisors of exact element counts that they allow."""
    rows = [list(seen.counts) for zone in _NORM_ZONES for seen in observation.zones.get(zone, ()) if _is_norm(seen)]
    rows += [[lookup.rows] for lookup in observation.lookups[:1]]
    if observation.is_assumed:  # the first norm, with the lookup in the same kernel
        first = [seen for seen in observation.zones.get("before", ()) if seen.sighting.name.kernel_class == "norm"]
        rows += [list(seen.counts) for seen in first if seen.is_rows]
    if not rows:
        rows = [list(seen.counts) for seen in observation.zones.get("final", ()) if _is_norm(seen)]
    least = min(rows, key=_total, default=None)
    if least is not None and _total(least) <= _MOST_TOKENS:
        tokens = {number for window in least for number in window}
    else:
        counts = sorted(_exact_counts(observation))
        tokens = {number for count in counts if effort.afford(isqrt(count)) for number in divisors(count)}
    numbers = np.array(sorted(number for number in tokens if 1 < number <= LARGEST_SIZE), np.int64)
    found: list[int] = _keep_inside(numbers, rows).tolist()
    return found


def _keep_inside(numbers: Ints, each: Iterable[Sequence[Window]]) -> Ints:
    """Keep the numbers that are in one of the windows of every item."""
    for windows in each:
        numbers = numbers[is_explained(windows, (numbers,), len(numbers))]
    return numbers


def _is_norm(seen: Seen) -> bool:
    return seen.is_rows and seen.sighting.name.kernel_class in ("norm", "reduction")


def _total(windows: Iterable[Window]) -> int:
    return sum(window.size for window in windows)


def _exact_counts(observation: Observation) -> set[int]:
    """Return exact element counts near the norms: tokens · d_model, or a small multiple."""
    seen = [seen for zone in _NORM_ZONES for seen in observation.zones.get(zone, ()) if not seen.is_rows]
    most = LARGEST_SIZE * WIDEST
    return {window.low for one in seen for window in one.counts if window.is_exact and 1 < window.low <= most}


def _find_widths(observation: Observation, tokens: int, effort: Effort) -> list[int]:
    """Return the possible values of d_model: the elements per token of kernels near the norms. Those that explain most
    kernels come first, then the most common."""
    seen = [seen for zone in _NORM_ZONES for seen in observation.zones.get(zone, ())]
    fixed = [one.widths for one in seen if one.widths and one.sighting.name.kernel_class == "norm"]
    counted = [one for one in seen if not one.is_rows]
    if not effort.afford(_KEEPING * (1 + len(seen))):
        return []
    ranges = [
        Window(max(2, -(-window.low // tokens)), window.high // tokens) for one in counted for window in one.counts
    ]
    ranges = [window for window in map(_clip, ranges) if 0 < window.size <= MOST_WIDTHS]
    # A compiler merges the kernels next to norms with the norms. What is left there are often casts of weights.
    if not ranges or (observation.is_assumed and fixed):
        ranges = [window for windows in fixed for window in windows if window.size <= MOST_WIDTHS]
    if not ranges:
        ranges = [
            Window(-(-lookup.width_bytes.low // size), lookup.width_bytes.high // size)
            for lookup in observation.lookups[:1]
            if lookup.width_bytes is not None
            for size in ((2,) if observation.structure.dtype in HALF else (4,))
        ]
    widths = _keep_inside(list_numbers(map(_clip, ranges), Window(0, WIDEST)), fixed)
    if observation.is_assumed:
        # Hundreds of widths fit the rules. A compiler pads matrices with a width that its GEMMs cannot read.
        widths = widths[widths % _find_step(observation) == 0]
    if not effort.afford((1 + len(counted)) * len(widths)):
        return []
    scores = count_each((tokens * widths,), counted, len(widths))
    ranked = sorted(zip((-scores).tolist(), map(surprise_of_width, widths.tolist()), widths.tolist(), strict=True))
    found: list[int] = []
    most = 0
    for score, _, width in ranked:
        if found and -score < most - 1:
            break
        if not effort.afford(_ASKING * (1 + len(observation.products))):
            break
        if _has_products(observation, tokens, width):
            most = most if found else -score
            found.append(width)
    return found


def _find_step(observation: Observation) -> int:
    """Return what the columns of GEMMs with d_model columns are usually a multiple of."""
    products = (observation.products.get(role) for role in _OUT)
    return max((product.usual_multiples[1] for product in products if product is not None), default=1)


def _clip(window: Window) -> Window:
    return Window(window.low, min(WIDEST, window.high), window.step)


def _has_products(observation: Observation, tokens: int, width: int) -> bool:
    """Whether every GEMM with d_model on one side has a size that fits on the other."""
    into: tuple[Role, ...] = (*_INTO_HEADS, "up", "gate", "gate_up")
    return all(
        find_window(product, rows=tokens, inner=width) is not None
        for role, product in observation.products.items()
        if role in into
    ) and all(
        find_window(product, rows=tokens, columns=width) is not None
        for role, product in observation.products.items()
        if role in _OUT
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """What the GEMMs allow for one number of tokens and one d_model."""

    tokens: int
    width: int
    query: Window  # num_heads · d_head
    columns: dict[Role, Window]


def _link(observation: Observation, tokens: int, width: int) -> _Link | None:
    products = observation.products
    columns: dict[Role, Window] = {}
    for role in _INTO_HEADS:
        if role in products:
            window = find_window(products[role], rows=tokens, inner=width, largest=WIDEST)
            if window is None:
                return None
            columns[role] = window
    anything = Window(1, WIDEST)
    output: Window | None = anything
    if "output" in products:
        output = find_window(products["output"], rows=tokens, columns=width, largest=WIDEST)
    joint = columns.get("query_key_value", anything)
    likely = Window(max(1, width // _WIDEST_HEADS), width * _WIDEST_HEADS)
    # Keys and values together are at most twice as wide as queries.
    limits = [output, columns.get("query", anything), Window(joint.low // 3, joint.high), likely]
    query = intersect(limits, WIDEST)
    return _Link(tokens=tokens, width=width, query=query, columns=columns) if query else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenChain:
    """Candidates with the same number of tokens, grouped by d_model. `is_cut`: there are more."""

    cores: tuple[Cores, ...] = ()
    num_widths: int = 0  # that norms and GEMMs allow
    is_cut: bool = False


def _chain_all(observation: Observation, effort: Effort, facts: int, among: Cores | None) -> Iterator[_TokenChain]:
    """Yield all candidates. First d_model is found for every number of tokens: few have any, and these share the
    remaining effort."""
    wanted: dict[int, set[Triple]] = {}
    for _, heads, _, size, batch, context in among.rows() if among is not None else ():
        wanted.setdefault(batch * context, set()).add((batch, heads, size))
    with effort.share(3) as part:
        tokens = [number for number in find_tokens(observation, part) if among is None or number in wanted]
    with effort.share(3) as part:
        linked = {number: _link_all(observation, number, part, len(tokens) - i) for i, number in enumerate(tokens)}
    linked = {number: links for number, links in linked.items() if links}
    for done, (number, links) in enumerate(linked.items()):
        with effort.share(len(linked) - done) as part:
            yield _chain(observation, links, part, facts, wanted.get(number))


def _link_all(observation: Observation, tokens: int, effort: Effort, parts: int) -> list[_Link]:
    """Return a link for every d_model, using one of `parts` shares of the effort."""
    with effort.share(parts) as part:
        widths = _find_widths(observation, tokens, part)
        asked = part.afford_some(len(widths), _ASKING * (1 + len(observation.products)))
    return [link for width in widths[:asked] if (link := _link(observation, tokens, width)) is not None]


def _chain(
    observation: Observation, links: list[_Link], effort: Effort, facts: int, among: set[Triple] | None
) -> _TokenChain:
    """Return all candidates for one number of tokens and these widths."""
    queries = Window(min(link.query.low for link in links), max(link.query.high for link in links))
    with effort.share(2) as part:
        every, is_cut = find_heads(observation, links[0].tokens, queries, part, among)
    if every is None:
        return _TokenChain(num_widths=len(links), is_cut=is_cut)
    cores: list[Cores] = []
    for link in links:
        if not effort.afford(1 + len(every) // 8):
            break
        fitting = every.take(_fits(every, link))
        affordable = effort.afford_some(len(fitting), _KEEPING + facts)
        if affordable:
            cores.append(fitting.take(slice(affordable)).with_width(link.width))
    cores.sort(key=lambda part: int(part.d_model[0]))
    return _TokenChain(cores=tuple(cores), num_widths=len(links), is_cut=is_cut)


def _fits(cores: Cores, link: _Link) -> Flags:
    wanted: dict[Role, Ints] = {
        "key": cores.key_width,
        "value": cores.key_width,
        "key_value": 2 * cores.key_width,
        "query_key_value": cores.joint_width,
    }
    fits = (cores.query_width >= link.query.low) & (cores.query_width <= link.query.high)
    for role, sizes_ in wanted.items():
        if role in link.columns:
            fits &= (sizes_ >= link.columns[role].low) & (sizes_ <= link.columns[role].high)
    return fits

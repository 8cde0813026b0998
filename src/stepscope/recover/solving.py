"""All integers consistent with what was seen: propagation over the chained sizes, from the tokens outward.

tokens → width → (batch, heads, head size, key-value heads) → feed-forward width, vocabulary. Products and attention are
hard: a candidate that one of them excludes is gone. Counts of elements are softer, because nobody can list every tensor
a program might make: candidates are ordered by how many of them they explain, then by how usual they are.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from stepscope.recover.facts import Window
from stepscope.recover.families.bounds import BoundedProduct, find_window
from stepscope.recover.heads import find_heads
from stepscope.recover.observation import Observation, Seen
from stepscope.recover.shape import Core, Cores, Flags, Ints, divisors, join_cores
from stepscope.recover.structure import Role, Zone
from stepscope.recover.usual import surprise, surprise_of_feed_forward, surprise_of_vocabulary
from stepscope.recover.vocabulary import Quantity, counted_up_to, feed_forward_sizes, sizes

_NORM_ZONES: tuple[Zone, ...] = ("between", "middle")
_CORE_ZONES: tuple[Zone, ...] = ("between", "middle", "heads", "merge", "before", "final")
_MOST_TOKENS = 4096  # candidates for the number of tokens
_MOST_WIDTHS = 4096
_MOST_RANKED = 2000  # of the best, by how usual they are
_AT_ONCE = 50_000  # candidates that are scored together, for the memory it takes
# No model has heads that are together this many times as wide as its residual stream, or as narrow.
_WIDEST_HEADS = 16
_WIDEST = 65_536
_LARGEST_VOCABULARY = 1 << 20
_HALF = ("fp16", "bf16")
_INTO_HEADS: tuple[Role, ...] = ("query", "key", "value", "key_value", "query_key_value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A candidate for the attention half, with how many of the seen counts it explains."""

    core: Core
    explained: int
    surprise: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """What a width beside the chain can be: all that products admit, and of these what explains most."""

    window: Window | None
    best: tuple[int, ...]  # by how usual they are
    explained: int = 0
    to_explain: int = 0
    is_told: bool = False  # if there is one alone, it is certain
    apart: tuple[Window, ...] = ()  # the parts of the window, where it is of several


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """`consistent` are all that no product and no attention excludes, `explained` how many of the `facts` counts each
    of them explains; `cores` are the best of them in order."""

    observation: Observation
    consistent: Cores
    explained: Ints
    cores: tuple[Scored, ...]
    facts: int
    is_cut: bool = False  # there were more candidates than could be looked at

    @property
    def best(self) -> Scored:
        return self.cores[0]


def solve(observation: Observation) -> Solution | None:
    """None where no sizes at all fit, which means that this reading of the roles is wrong."""
    parts = [part for tokens in sorted(find_tokens(observation)) for part in _chain(observation, tokens)]
    if not parts:
        return None
    facts = explainable(observation)
    consistent = join_cores([part.cores for part in parts])
    solution = order(observation, consistent, count_explained(consistent, facts), len(facts))
    return replace(solution, is_cut=any(part.is_cut for part in parts))


def order(observation: Observation, consistent: Cores, explained: Ints, facts: int) -> Solution:
    most = int(explained.max())
    best = [consistent[int(index)] for index in np.flatnonzero(explained == most)]
    scored = [Scored(core=core, explained=most, surprise=surprise(core)) for core in best]
    scored.sort(key=lambda one: one.surprise)
    return Solution(
        observation=observation,
        consistent=consistent,
        explained=explained,
        cores=tuple(scored[:_MOST_RANKED]),
        facts=facts,
    )


def count_explained(cores: Cores, facts: Sequence[tuple[Zone, Seen]]) -> Ints:
    """For each candidate, how many of the counts are the size of one of its tensors."""
    places = range(0, len(cores), _AT_ONCE)
    return np.concatenate([_count_some(cores.take(np.arange(len(cores))[at : at + _AT_ONCE]), facts) for at in places])


def _count_some(cores: Cores, facts: Sequence[tuple[Zone, Seen]]) -> Ints:
    explained = np.zeros(len(cores), np.int64)
    known = {zone: list(sizes(cores, zone)) for zone in {zone for zone, _ in facts}}
    for zone, seen in facts:
        explained += _is_explained(seen, counted_up_to(cores) if _is_counting(seen) else known[zone], len(cores))
    return explained


def _inside(numbers: Quantity, window: Window) -> Flags:
    inside: Flags = (numbers >= window.low) & (numbers <= window.high) & ((numbers - window.low) % window.step == 0)  # type: ignore[assignment]  # of many at once
    return inside


def _is_explained(seen: Seen, possible: Iterable[Quantity], count: int) -> Flags:
    explained = np.zeros(count, np.bool_)
    for size, window in itertools.product(possible, seen.counts):
        explained |= _inside(size, window)
        if explained.all():
            break
    return explained


def _is_counting(seen: Seen) -> bool:
    return "arange" in seen.sighting.name.operation


def explainable(observation: Observation) -> list[tuple[Zone, Seen]]:
    """Counts that the attention half is to explain."""
    return [(zone, seen) for zone in _CORE_ZONES for seen in observation.zones.get(zone, ())]


def find_tokens(observation: Observation) -> set[int]:
    """Rows of the norms around the products, lookups of embeddings; where these leave too much open, divisors of exact
    counts that they admit."""
    rows = [list(seen.counts) for zone in _NORM_ZONES for seen in observation.zones.get(zone, ()) if _is_norm(seen)]
    rows += [[lookup.rows] for lookup in observation.lookups[:1]]
    if not rows:
        rows = [list(seen.counts) for seen in observation.zones.get("final", ()) if _is_norm(seen)]
    least = min(rows, key=_total, default=None)
    if least is not None and _total(least) <= _MOST_TOKENS:
        tokens = {number for window in least for number in window}
    else:
        tokens = {number for count in _exact_counts(observation) for number in divisors(count)}
    return {number for number in tokens if number > 1 and all(_holds(windows, number) for windows in rows)}


def _is_norm(seen: Seen) -> bool:
    return seen.is_rows and seen.sighting.name.kernel_class in ("norm", "reduction")


def _total(windows: Iterable[Window]) -> int:
    return sum(window.size for window in windows)


def _holds(windows: Iterable[Window], number: int) -> bool:
    return any(number in window for window in windows)


def _exact_counts(observation: Observation) -> set[int]:
    """Of elements that norms wrote: tokens · width, or a small multiple."""
    seen = [seen for zone in _NORM_ZONES for seen in observation.zones.get(zone, ()) if not seen.is_rows]
    return {window.low for one in seen for window in one.counts if window.is_exact and window.low > 1}


def _find_widths(observation: Observation, tokens: int) -> list[int]:
    """Widths of the residual stream: what kernels around the norms work on, a token each."""
    seen = [seen for zone in _NORM_ZONES for seen in observation.zones.get(zone, ())]
    fixed = [list(one.widths) for one in seen if one.widths and one.sighting.name.kernel_class == "norm"]
    ranges = [
        Window(max(2, -(-window.low // tokens)), min(_WIDEST, window.high // tokens))
        for one in seen
        if not one.is_rows
        for window in one.counts
    ]
    ranges = [window for window in ranges if 0 < window.size <= _MOST_WIDTHS]
    if not ranges:
        ranges = [window for windows in fixed for window in windows if window.size <= _MOST_WIDTHS]
    if not ranges:
        ranges = [
            Window(-(-lookup.width_bytes.low // size), lookup.width_bytes.high // size)
            for lookup in observation.lookups[:1]
            if lookup.width_bytes is not None
            for size in ((2,) if observation.structure.dtype in _HALF else (4,))
        ]
    widths = {width for window in ranges for width in window}
    scored = {
        width: sum(_holds(one.counts, tokens * width) for one in seen if not one.is_rows)
        for width in widths
        if all(_holds(windows, width) for windows in fixed) and _has_products(observation, tokens, width)
    }
    most = max(scored.values(), default=0)
    return sorted(width for width, score in scored.items() if score >= most - 1)[:_MOST_WIDTHS]


def _has_products(observation: Observation, tokens: int, width: int) -> bool:
    """Whether every product with the width on one side has something that fits on the other."""
    into: tuple[Role, ...] = (*_INTO_HEADS, "up", "gate", "gate_up")
    return all(
        find_window(product, rows=tokens, inner=width) is not None
        for role, product in observation.products.items()
        if role in into
    ) and all(
        find_window(product, rows=tokens, columns=width) is not None
        for role, product in observation.products.items()
        if role in ("output", "down")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """What products leave open for one number of tokens and one width."""

    tokens: int
    width: int
    query: Window  # heads · head size
    columns: dict[Role, Window]


def _link(observation: Observation, tokens: int, width: int) -> _Link | None:
    products = observation.products
    columns: dict[Role, Window] = {}
    for role in _INTO_HEADS:
        if role in products:
            window = find_window(products[role], rows=tokens, inner=width, largest=_WIDEST)
            if window is None:
                return None
            columns[role] = window
    anything = Window(1, _WIDEST)
    output: Window | None = anything
    if "output" in products:
        output = find_window(products["output"], rows=tokens, columns=width, largest=_WIDEST)
    joint = columns.get("query_key_value", anything)
    likely = Window(max(1, width // _WIDEST_HEADS), width * _WIDEST_HEADS)
    # Keys and values take at least nothing and at most twice what queries do.
    limits = [output, columns.get("query", anything), Window(joint.low // 3, joint.high), likely]
    query = _intersect(limits, _WIDEST)
    return _Link(tokens=tokens, width=width, query=query, columns=columns) if query else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    """Candidates with the same number of tokens and the same width. `is_cut`: there are more."""

    cores: Cores
    is_cut: bool


def _chain(observation: Observation, tokens: int) -> Iterator[_Chain]:
    """All candidates with so many tokens, a part for each width."""
    links = [link for width in _find_widths(observation, tokens) if (link := _link(observation, tokens, width))]
    if not links:
        return
    queries = Window(min(link.query.low for link in links), max(link.query.high for link in links))
    every, is_cut = find_heads(observation, tokens, queries)
    if every is None:
        return
    for link in links:
        fitting = every.take(_fits(every, link))
        if len(fitting):
            yield _Chain(cores=fitting.with_width(link.width), is_cut=is_cut)


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


def find_feed_forward(observation: Observation, core: Core) -> Sized:
    """The width between the two halves of the feed-forward layer."""
    products, tokens, width = observation.products, core.tokens, core.d_model
    windows = [find_window(products[role], rows=tokens, inner=width) for role in ("up", "gate") if role in products]
    if "gate_up" in products and (both := find_window(products["gate_up"], rows=tokens, inner=width)):
        windows.append(Window(-(-both.low // 2), both.high // 2))
    if "down" in products:
        windows.append(find_window(products["down"], rows=tokens, columns=width))
    window = _intersect(windows, _WIDEST * 4)
    seen = [one for one in observation.zones.get("feed_forward", ()) if not one.is_rows]
    gated = observation.reading.is_gated

    joint = "gate_up" in products

    def explain(size: int) -> int:
        return sum(one.explained_by(feed_forward_sizes(tokens, width, size, joint=joint)) for one in seen)

    ranges = [Window(-(-count.low // tokens), count.high // tokens) for one in seen for count in one.counts]
    return _choose(window, ranges, explain, lambda size: surprise_of_feed_forward(size, width, gated=gated), len(seen))


def find_vocabulary(observation: Observation, core: Core) -> Sized:
    head = observation.products.get("head")
    if head is None:
        return Sized(window=None, best=())
    seen = [one for one in observation.zones.get("after", ()) if not one.is_rows]
    compiled = any(one.name.library == "Inductor" for one in observation.reading.zones["final"])
    found: list[tuple[bool, Sized]] = []
    for rows in dict.fromkeys((core.tokens, core.tokens - core.batch, core.batch)):
        window = find_window(head, rows=rows, inner=core.d_model, largest=_LARGEST_VOCABULARY) if rows else None
        if window is None:
            continue

        def explain(size: int, rows: int = rows) -> int:
            return sum(one.explained_by((rows * size, (rows - core.batch) * size, 2 * rows * size)) for one in seen)

        ranges = [Window(-(-count.low // rows), count.high // rows) for one in seen for count in one.counts]
        sized = _choose(window, ranges, explain, partial(_oddness_of_vocabulary, head, compiled), len(seen))
        found.append((rows == core.tokens, sized))
    return _join_heads(found)


def _join_heads(found: list[tuple[bool, Sized]]) -> Sized:
    """A head may take every token, all but the first or last of each sequence, or one of each. Which, only what comes
    after it can tell; so what explains as much as the best is left open, every token first."""
    if not found:
        return Sized(window=None, best=())
    most = max(sized.explained for _, sized in found)
    left = sorted((one for one in found if one[1].explained == most), key=lambda one: not one[0])
    windows = [sized.window for _, sized in left if sized.window is not None]
    best = tuple(dict.fromkeys(size for _, sized in left for size in sized.best))
    is_every = left[0][0]
    return Sized(
        window=Window(min(one.low for one in windows), max(one.high for one in windows)),
        best=best,
        explained=most,
        to_explain=left[0][1].to_explain,
        is_told=is_every and left[0][1].is_told,
        apart=tuple(windows),
    )


def _oddness_of_vocabulary(head: BoundedProduct, compiled: bool, size: int) -> float:
    """A compiler pads what a kernel wants aligned; without one an odd size is not given to such a kernel."""
    aligned = size % head.usual_multiples[1] == 0
    return surprise_of_vocabulary(size) + (0.0 if aligned or compiled else 3.0)


def _intersect(windows: Iterable[Window | None], largest: int) -> Window | None:
    low, high = 1, largest
    for window in windows:
        if window is None:
            return None
        low, high = max(low, window.low), min(high, window.high)
    return Window(low, high) if low <= high else None


def _choose(
    window: Window | None,
    ranges: Iterable[Window],
    explain: Callable[[int], int],
    oddness: Callable[[int], float],
    to_explain: int,
) -> Sized:
    """Of what a product admits, the sizes that explain most of what was seen beside it."""
    if window is None:
        return Sized(window=None, best=())
    inside = {
        size
        for one in ranges
        if 0 < one.size <= _MOST_WIDTHS
        for size in range(max(one.low, window.low), min(one.high, window.high) + 1)
    }
    if not inside and window.size <= _MOST_WIDTHS:
        inside = set(window)
    if not inside:
        return Sized(window=window, best=(), to_explain=to_explain)
    scores = {size: explain(size) for size in inside}
    most = max(scores.values())
    best = sorted((size for size, score in scores.items() if score == most), key=lambda size: (oddness(size), size))
    is_told = window.is_exact or (most > 0 and most >= to_explain - 1)
    return Sized(window=window, best=tuple(best), explained=most, to_explain=to_explain, is_told=is_told)

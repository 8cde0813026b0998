"""The sizes that follow from the tokens and d_model: d_ff and vocab_size.

The GEMMs give a window for each. The best values in it are those that explain most of the neighboring kernels, the most
common first.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from stepscope.recover.evidence.observation import Observation, Seen
from stepscope.recover.facts import Product, Window, find_window
from stepscope.recover.shape import Core, Flags, Ints, Quantity, feed_forward_sizes
from stepscope.recover.solve.priors import surprise_of_feed_forward, surprise_of_vocabulary

MOST_WIDTHS = 4096
_MOST_CHOICES = 2_000_000  # values to try, times the element counts to explain
WIDEST = 65_536
WIDEST_FEED_FORWARD = 4 * WIDEST
LARGEST_VOCABULARY = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """The possible values of d_ff or vocab_size: the window that the GEMMs allow, and its values that explain most."""

    window: Window | None
    best: tuple[int, ...]  # the most common first
    explained: int = 0
    to_explain: int = 0
    is_told: bool = False  # if `best` has a single value, it is certain
    is_cut: bool = False  # there were too many values to try
    apart: tuple[Window, ...] = ()  # the parts of a window that has several


def find_feed_forward(observation: Observation, core: Core) -> Sized:
    """Return the possible values of d_ff."""
    products, tokens, width = observation.products, core.tokens, core.d_model
    windows = [find_window(products[role], rows=tokens, inner=width) for role in ("up", "gate") if role in products]
    if "gate_up" in products and (both := find_window(products["gate_up"], rows=tokens, inner=width)):
        windows.append(Window(-(-both.low // 2), both.high // 2))
    if "down" in products:
        windows.append(find_window(products["down"], rows=tokens, columns=width))
    window = intersect(windows, WIDEST_FEED_FORWARD)
    seen = [one for one in observation.zones.get("feed_forward", ()) if not one.is_rows]
    gated = observation.reading.is_gated

    joint = "gate_up" in products

    def explain(hidden: Ints) -> Ints:
        return count_each(feed_forward_sizes(tokens, width, hidden, joint=joint), seen, len(hidden))

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
        window = find_window(head, rows=rows, inner=core.d_model, largest=LARGEST_VOCABULARY) if rows else None
        if window is None:
            continue

        def explain(vocabulary: Ints, rows: int = rows) -> Ints:
            sizes_ = (rows * vocabulary, (rows - core.batch) * vocabulary, 2 * rows * vocabulary)
            return count_each(sizes_, seen, len(vocabulary))

        ranges = [Window(-(-count.low // rows), count.high // rows) for one in seen for count in one.counts]
        sized = _choose(window, ranges, explain, partial(_oddness_of_vocabulary, head, compiled), len(seen))
        found.append((rows == core.tokens, sized))
    return _join_heads(found)


def _join_heads(found: list[tuple[bool, Sized]]) -> Sized:
    """An LM head may run on every token, on all but the first or last of each sequence, or on one of each. Only the
    kernels after it show which, so all variants that explain as much as the best stay open, every token first."""
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
        is_cut=any(sized.is_cut for _, sized in found),
        apart=tuple(windows),
    )


def _oddness_of_vocabulary(head: Product, compiled: bool, size: int) -> float:
    """A compiler pads sizes for kernels that need alignment. Without one, such a kernel is not used for an odd size."""
    aligned = size % head.usual_multiples[1] == 0
    return surprise_of_vocabulary(size) + (0.0 if aligned or compiled else 3.0)


def _choose(
    window: Window | None,
    ranges: Iterable[Window],
    explain: Callable[[Ints], Ints],
    oddness: Callable[[int], float],
    to_explain: int,
) -> Sized:
    """Return the values in the window that explain most of the neighboring kernels."""
    if window is None:
        return Sized(window=None, best=())
    inside = list_numbers((one for one in ranges if 0 < one.size <= MOST_WIDTHS), window)
    if not len(inside) and window.size <= MOST_WIDTHS:
        inside = list_numbers((window,), window)
    is_cut = len(inside) * (1 + to_explain) > _MOST_CHOICES
    if is_cut or not len(inside):
        return Sized(window=window, best=(), to_explain=to_explain, is_cut=is_cut)
    scores = explain(inside)
    most = int(scores.max())
    best = sorted(inside[scores == most].tolist(), key=lambda size: (oddness(size), size))
    is_told = window.is_exact or (most > 0 and most >= to_explain - 1)
    return Sized(window=window, best=tuple(best), explained=most, to_explain=to_explain, is_told=is_told)


# --- Windows, and the sizes that explain a count


def intersect(windows: Iterable[Window | None], largest: int) -> Window | None:
    low, high = 1, largest
    for window in windows:
        if window is None:
            return None
        low, high = max(low, window.low), min(high, window.high)
    return Window(low, high) if low <= high else None


def list_numbers(windows: Iterable[Window], limits: Window) -> Ints:
    """Return all distinct numbers of the windows that are within the limits."""
    flags = np.zeros(limits.size, np.bool_)
    for window in windows:
        skipped = max(0, -(-(limits.low - window.low) // window.step))
        flags[window.low + skipped * window.step - limits.low : max(0, window.high - limits.low + 1) : window.step] = (
            True
        )
    return np.flatnonzero(flags) + limits.low


def _inside(numbers: Quantity, window: Window) -> Flags:
    inside: Flags = (numbers >= window.low) & (numbers <= window.high)  # type: ignore[assignment]  # numpy compares elementwise
    if window.step > 1 and np.any(inside):  # computing remainders takes longer than everything else here
        inside = inside & ((numbers - window.low) % window.step == 0)
    return inside


def is_explained(windows: Sequence[Window], possible: Iterable[Quantity], count: int) -> Flags:
    explained = np.zeros(count, np.bool_)
    for size, window in itertools.product(possible, windows):
        explained |= _inside(size, window)
        if explained.all():
            break
    return explained


def count_each(possible: Sequence[Quantity], seen: Iterable[Seen], count: int) -> Ints:
    """Return how many of the counts each size explains."""
    explained = np.zeros(count, np.int64)
    for one in seen:
        explained += is_explained(one.counts, possible, count)
    return explained

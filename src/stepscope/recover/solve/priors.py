"""The order in which the search tries sizes, and how much work it may do.

How common sizes are only ranks the candidates that the evidence leaves open; it never excludes one. The score is a sum
of surprises: 0 for sizes of published models, higher for less common ones.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from stepscope.recover.shape import Cores, Ints

Floats = npt.NDArray[np.float64]
_VOCABULARIES = frozenset((32_000, 50_257, 50_304, 128_256, 151_936, 256_000))
_OTHER_VOCABULARIES = frozenset(
    (10_000, 32_064, 32_768, 49_152, 50_272, 50_280, 50_432, 51_200, 64_000, 65_024, 92_544, 100_277, 100_352, 128_000,
     129_280, 151_552, 151_643, 152_064, 200_019, 262_144)
)  # fmt: skip


def surprise(cores: Cores) -> Floats:
    """Return the surprise of each candidate."""
    heads = _of_each(_of_head, cores.d_head) + _of_each(_of_context, cores.context) + _of_each(_of_batch, cores.batch)
    heads = heads + _of_each(_of_number, cores.num_heads) + _of_groups(cores.num_heads, cores.num_kv_heads)
    return heads + np.where(cores.query_width == cores.d_model, 0.0, 2.5) + _of_each(surprise_of_width, cores.d_model)


def _of_each(surprise_of: Callable[[int], float], sizes: Ints) -> Floats:
    """Compute each distinct size once: there are few among many candidates."""
    distinct, where = np.unique(sizes, return_inverse=True)
    return np.array([surprise_of(size) for size in distinct.tolist()], np.float64)[where]


def surprise_of_heads(batch: int, num_heads: int, d_head: int, context: int) -> float:
    return _of_head(d_head) + _of_context(context) + _of_batch(batch) + _of_number(num_heads)


def surprise_of_feed_forward(d_ff: int, d_model: int, *, gated: bool) -> float:
    usual = {4 * d_model, 8 * d_model // 3, 7 * d_model // 2}
    rounded = {-(-size // unit) * unit for size in usual for unit in (1, 64, 128, 256)}
    near = 0.0 if d_ff == 4 * d_model and not gated else 0.3 if d_ff in rounded else 1.0
    return near + _evenness(d_ff)


def surprise_of_vocabulary(size: int) -> float:
    known = 0.0 if size in _VOCABULARIES else 0.2
    return known if size in _VOCABULARIES | _OTHER_VOCABULARIES else 0.8 + _evenness(size) / 2


def _of_head(size: int) -> float:
    if size in (64, 128):
        return 0.0
    if size in (32, 80, 96, 256):
        return 0.7
    return 1.5 + (0.0 if size % 8 == 0 else 2.0) + (1.0 if size < 16 else 0.0)


def _of_number(heads: int) -> float:
    return (0.5 if heads % 2 else 0.0) + (1.0 if heads > 128 else 0.0)


def _of_groups(heads: Ints, kv_heads: Ints) -> Floats:
    usual = np.isin(heads // kv_heads, (2, 3, 4, 5, 6, 7, 8, 16))
    return np.where(kv_heads == heads, 0.0, np.where(usual, 0.4, 1.5))


def surprise_of_width(width: int) -> float:
    return _evenness(width)


def _of_context(context: int) -> float:
    if context & (context - 1) == 0:
        return 0.0 if context >= 64 else 1.0
    return 0.4 if context % 64 == 0 else 0.7 if context % 8 == 0 else 1.2


def _of_batch(batch: int) -> float:
    size = 0.0 if batch <= 64 else 0.8 if batch <= 512 else 2.0
    return size + (0.0 if batch & (batch - 1) == 0 else 0.3)


def _evenness(size: int) -> float:
    for step, cost in ((256, 0.0), (128, 0.1), (64, 0.2), (32, 0.6), (16, 0.9), (8, 1.2), (2, 1.8)):
        if size % step == 0:
            return cost
    return 2.4


# --- The work limit
#
# Weak evidence fits hundreds of millions of sizes, and the search must end. Work is counted instead of timed, so that a
# file gives the same result on every machine. If the search stops early the result says so, and no field that depends
# on the rest is certain.


class Effort:
    """The remaining units of work. One unit is roughly the comparison of one candidate with one element count: 0.2 µs
    on a slow machine."""

    def __init__(self, units: int) -> None:
        self.left = units
        self.is_spent = False  # some work was skipped

    def afford(self, units: int) -> bool:
        """Pay for the work if enough units are left. If not, return False: the caller must skip it."""
        return self.afford_some(1, units) == 1

    def afford_some(self, number: int, units: int) -> int:
        """Pay for as many of `number` equal pieces of work as possible, and return how many."""
        paid = min(number, self.left // units) if units else number
        self.left -= paid * units
        self.is_spent |= paid < number
        return paid

    @contextmanager
    def share(self, parts: int) -> Iterator["Effort"]:
        """Yield one of `parts` equal shares. Units it does not use are returned."""
        part = Effort(self.left // parts)
        given = part.left
        yield part
        self.left -= given - part.left
        self.is_spent |= part.is_spent

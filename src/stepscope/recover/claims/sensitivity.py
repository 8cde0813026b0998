"""Which other values would have passed? A size that can be changed unnoticed was not tested.

Sizes are changed alone, and in pairs that leave a product as it is: twice the heads of half the size, twice the batch
of half the context. Matrix products see such pairs as one.
"""

from collections.abc import Callable, Iterator

import msgspec

from stepscope.recover.shape import ClaimedShape, divisors

Interval = tuple[int, int | None]  # both included; None: no end was found
_LARGEST = 1 << 22
_FACTORS = (2, 3, 4, 8)
_CLOSE = 0.05  # of a value: others that are no further from it leave it tested
_PAIRS = {"num_heads": "d_head", "d_head": "num_heads", "batch": "context", "context": "batch"}


def find_passing(shape: ClaimedShape, name: str, passes: Callable[[ClaimedShape], bool]) -> tuple[Interval, ...]:
    """The interval around the claimed value in which every value passes, less the value itself, and others that pass
    with the other half of a pair changed along."""
    value = getattr(shape, name)
    assert isinstance(value, int)
    if value > _LARGEST:
        return ((1, None),)

    def passes_with(size: int) -> bool:
        return passes(msgspec.structs.replace(shape, **{name: size}))

    if name == "num_kv_heads":
        heads = shape.num_heads or value
        return tuple((size, size) for size in divisors(heads) if size != value and passes_with(size))
    low, high = _reach(value, -1, passes_with), _reach(value, 1, passes_with)
    found: list[Interval] = []
    if low < value:
        found.append((low, value - 1))
    if high > value:
        found.append((value + 1, high if high < _LARGEST else None))
    apart = set(_swap(shape, name, passes))
    # Grids of compiled kernels know a count but for a power of two.
    apart |= {size for factor in _FACTORS for size in _scale(value, factor) if passes_with(size)}
    found += [(size, size) for size in apart if not low <= size <= high]
    return tuple(sorted(found, key=lambda one: one[0]))


def is_tested(value: int, others: tuple[Interval, ...]) -> bool:
    """Whether nothing but values close by would have passed."""
    return all(
        high is not None and low >= (1 - _CLOSE) * value and high <= (1 + _CLOSE) * value for low, high in others
    )


def is_narrowed(value: int, others: tuple[Interval, ...]) -> bool:
    """Whether neither half the value nor twice as much, nor anything beyond, would have passed."""
    return all(high is not None and 2 * low > value and high < 2 * value for low, high in others)


def _scale(value: int, factor: int) -> Iterator[int]:
    yield value * factor
    if value % factor == 0:
        yield value // factor


def _reach(value: int, step: int, passes_with: Callable[[int], bool]) -> int:
    """The last value in a direction up to which all that was tried passes: ever longer steps, then halves."""
    good, stride = value, 1
    while True:
        tried = good + step * stride
        if not 1 <= tried <= _LARGEST:
            tried = 1 if step < 0 else _LARGEST
        if tried == good:
            return good
        if not passes_with(tried):
            return _bisect(good, tried, passes_with)
        good, stride = tried, 2 * stride


def _bisect(good: int, bad: int, passes_with: Callable[[int], bool]) -> int:
    while abs(bad - good) > 1:
        middle = (good + bad) // 2
        if passes_with(middle):
            good = middle
        else:
            bad = middle
    return good


def _swap(shape: ClaimedShape, name: str, passes: Callable[[ClaimedShape], bool]) -> Iterator[int]:
    other = _PAIRS.get(name)
    if other is None:
        return
    value, partner = getattr(shape, name), getattr(shape, other)
    if partner is None or partner > _LARGEST:
        return
    for size in divisors(value, partner):
        changed = {name: size, other: value * partner // size}
        if name in ("num_heads", "d_head") and shape.num_kv_heads:
            heads = changed["num_heads"]
            kept = shape.num_kv_heads * (shape.d_head or 1)
            kv_heads, rest = divmod(kept, changed["d_head"])
            if rest or not kv_heads or heads % kv_heads:
                continue
            changed["num_kv_heads"] = kv_heads
        if size != value and passes(msgspec.structs.replace(shape, **changed)):
            yield size

"""Low-rank adapters (LoRA): two small GEMMs next to a projection, scaled and added to its result.

`result + B(A(x)) * scale` is a GEMM with few columns, a GEMM with few rows to sum over, a multiplication by a number,
and a sum. No layer of a plain decoder multiplies and adds right after three GEMMs in a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepscope.recover.evidence.order import adds_parts, is_lookup, is_of_training, is_product
from stepscope.recover.facts import Sighting

# Kernels that may run between the GEMMs of an adapter: a copy in another precision, dropout.
_BETWEEN = ("copy", "random")
_LARGEST_SHARE = 0.5  # of the projection's work


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankAdapter:
    """`kernels` are all kernels that the adapter adds to the run."""

    projection: Sighting
    down: Sighting
    up: Sighting
    kernels: tuple[Sighting, ...]


def find_adapters(sightings: Sequence[Sighting]) -> list[LowRankAdapter]:
    """Return the adapters of forward passes."""
    products = [one for one in _take_forward(sightings) if is_product(one)]
    found: list[LowRankAdapter] = []
    for projection, down, up in zip(products, products[1:], products[2:], strict=False):
        if not _are_next(sightings, projection, down) or not _are_next(sightings, down, up):
            continue
        sums = _find_sum(sightings, up)
        if sums and _works_less(up, projection):
            start, end = projection.index + 1, sums[-1].index + 1
            found.append(LowRankAdapter(projection=projection, down=down, up=up, kernels=tuple(sightings[start:end])))
    return found


def _take_forward(sightings: Sequence[Sighting]) -> Iterator[Sighting]:
    """Yield the kernels after which no kernel of a backward pass came without a lookup of embeddings in between."""
    is_forward = True
    for one in sightings:
        is_forward = not is_of_training(one) and (is_forward or is_lookup(one))
        if is_forward:
            yield one


def _are_next(sightings: Sequence[Sighting], one: Sighting, following: Sighting) -> bool:
    between = sightings[one.index + 1 : following.index]
    return all(kernel.name.kernel_class in _BETWEEN or adds_parts(kernel) for kernel in between)


def _find_sum(sightings: Sequence[Sighting], up: Sighting) -> tuple[Sighting, ...]:
    """Return the multiplication and the sum after an adapter's second GEMM, if that is what follows."""
    behind = [one for one in sightings[up.index + 1 : up.index + 8] if not _may_be_between(one)]
    is_sum = [one.name.operation for one in behind[:2]] == ["multiply", "add"]
    return tuple(behind[:2]) if is_sum else ()


def _may_be_between(sighting: Sighting) -> bool:
    return sighting.name.kernel_class in _BETWEEN or adds_parts(sighting)


def _works_less(up: Sighting, projection: Sighting) -> bool:
    """Whether the second GEMM of an adapter does less work than the projection, as far as both were counted. It has the
    same result, but sums over few elements. The first has few columns, but may be padded to more than a projection."""
    work, whole = _count_work(up), _count_work(projection)
    return work is None or whole is None or work <= _LARGEST_SHARE * whole


def _count_work(sighting: Sighting) -> int | None:
    return sighting.counters.get("tensor_ops") or sighting.counters.get("ffma") or None


def drop_adapters(sightings: Sequence[Sighting], adapters: Sequence[LowRankAdapter]) -> list[Sighting]:
    """Return the kernels without the adapters. They keep their indices."""
    inside = {one.index for adapter in adapters for one in adapter.kernels}
    return [one for one in sightings if one.index not in inside]

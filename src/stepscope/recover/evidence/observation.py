"""One interpretation of a run as facts: what every GEMM, attention and other kernel of a layer says about its sizes."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import msgspec

from stepscope.recover.evidence.order import Role, Zone
from stepscope.recover.evidence.structure import RoleReading, Structure
from stepscope.recover.facts import Attention, Elements, Fact, Gather, Product, Rows, Sighting, Window, equals, exactly
from stepscope.recover.families import Platform, find_platform, read_fact, read_facts

# A compiled kernel stores one or several results, with elements of these sizes.
_COMPILED_BYTES = (1, 2, 4, 8, 6, 12)
FEWEST = 16  # smaller counts belong to scalars and carry no information


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A kernel other than a GEMM: its number of elements or rows is in one of the windows."""

    sighting: Sighting
    counts: tuple[Window, ...]
    widths: tuple[Window, ...] = ()  # of rows
    is_rows: bool = False

    def explained_by(self, sizes: Iterable[int]) -> bool:
        return any(size in window for size in sizes for window in self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    structure: Structure
    reading: RoleReading
    products: dict[Role, Product]
    zones: dict[Zone, tuple[Seen, ...]]
    attentions: tuple[Attention, ...]
    softmaxes: tuple[Seen, ...]
    lookups: tuple[Gather, ...]
    is_assumed: bool = False  # block sizes of compiled kernels are those of Inductor's rules


def observe(structure: Structure, reading: RoleReading, device_sms: int | None) -> Observation:
    kernels = [*reading.products.values(), *(one for zone in reading.zones.values() for one in zone)]
    is_assumed = not any(one.counters for one in kernels) and any(one.name.library == "Inductor" for one in kernels)
    platform = msgspec.structs.replace(find_platform(kernels, device_sms), usual=is_assumed)
    products = {role: _read_product(one, platform) for role, one in reading.products.items()}
    attentions = [*_distinct(structure.attentions), *_distinct(structure.backward_attentions)]
    return Observation(
        structure=structure,
        reading=reading,
        products={role: product for role, product in products.items() if isinstance(product, Product)},
        zones={zone: _see_all(ones, platform) for zone, ones in reading.zones.items()},
        attentions=tuple(fact for one in attentions if isinstance(fact := read_fact(one, platform), Attention)),
        softmaxes=_see_all(structure.softmaxes, platform),
        lookups=tuple(fact for one in reading.zones["before"] if isinstance(fact := read_fact(one, platform), Gather)),
        is_assumed=is_assumed,
    )


def _read_product(sighting: Sighting, platform: Platform) -> Fact | None:
    if sighting.told is None:
        return read_fact(sighting, platform)
    return Product(tuple(equals(partial(_pick, axis), size) for axis, size in enumerate(sighting.told)))


def _pick(axis: int, *sizes: int) -> int:
    return sizes[axis]


def _distinct(sightings: Iterable[Sighting]) -> list[Sighting]:
    """Keep one of each set of kernels with the same launch and counters."""
    found = {(one.name.name, one.grid, one.block, one.counters.get("tensor_ops")): one for one in sightings}
    return list(found.values())


def _see_all(sightings: Iterable[Sighting], platform: Platform) -> tuple[Seen, ...]:
    """Keep one kernel for each set of windows: a second one adds no information."""
    found: dict[object, Seen] = {}
    for sighting in sightings:
        seen = see(sighting, platform)
        if seen is not None and max(window.high for window in seen.counts) >= FEWEST:
            found.setdefault((seen.counts, seen.is_rows), seen)
    return tuple(found.values())


def see(sighting: Sighting, platform: Platform) -> Seen | None:
    if sighting.name.library == "Inductor" and (stored := sighting.counters.get("store_bytes")):
        counts = tuple(exactly(stored // size) for size in _COMPILED_BYTES if stored % size == 0)
        return Seen(sighting=sighting, counts=counts)
    choices = read_facts(sighting, platform)
    if not choices:
        return None
    if all(isinstance(choice, Elements) for choice in choices):
        return Seen(sighting=sighting, counts=tuple(choice.count for choice in choices if isinstance(choice, Elements)))
    if all(isinstance(choice, Rows) for choice in choices):
        rows = [choice for choice in choices if isinstance(choice, Rows)]
        widths = tuple(choice.width for choice in rows if choice.width is not None)
        return Seen(
            sighting=sighting,
            counts=tuple(choice.rows for choice in rows),
            widths=widths if len(widths) == len(rows) else (),
            is_rows=True,
        )
    return None

"""One reading of a run, as facts: what every product, attention and other kernel of a layer says of its sizes."""

from collections.abc import Iterable
from dataclasses import dataclass

from stepscope.recover import families
from stepscope.recover.evidence.structure import Reading, Role, Structure, Zone
from stepscope.recover.facts import Attention, Elements, Gather, Rows, Sighting, Window, exactly
from stepscope.recover.families import registry as memory_bound
from stepscope.recover.families.bounds import BoundedProduct, bounded
from stepscope.recover.families.bounds import exactly as exactly_measured
from stepscope.recover.families.elementwise import is_recent
from stepscope.recover.families.tilings import UNKNOWN

# What a compiled kernel stored is that of one result or of several, of elements of these sizes.
_COMPILED_BYTES = (1, 2, 4, 8, 6, 12)
FEWEST = 16  # counts below this are of scalars and the like, and say nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A kernel that is no product: the windows of which one holds its number of elements or rows."""

    sighting: Sighting
    counts: tuple[Window, ...]
    widths: tuple[Window, ...] = ()  # of rows
    is_rows: bool = False

    def explained_by(self, sizes: Iterable[int]) -> bool:
        return any(size in window for size in sizes for window in self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    structure: Structure
    reading: Reading
    products: dict[Role, BoundedProduct]
    zones: dict[Zone, tuple[Seen, ...]]
    attentions: tuple[Attention, ...]
    softmaxes: tuple[Seen, ...]
    lookups: tuple[Gather, ...]


def observe(structure: Structure, reading: Reading, device_sms: int | None) -> Observation:
    processors = device_sms or UNKNOWN
    kernels = [*reading.products.values(), *(one for zone in reading.zones.values() for one in zone)]
    recent = is_recent(kernel.name for kernel in kernels)
    products = {role: _read_product(one, processors) for role, one in reading.products.items()}
    attentions = [families.attention.read(one, processors) for one in _distinct(structure.attentions)]
    attentions += [families.attention.read(one, processors) for one in _distinct(structure.backward_attentions)]
    lookups = [memory_bound.read(one, recent=recent) for one in reading.zones["before"]]
    return Observation(
        structure=structure,
        reading=reading,
        products={role: product for role, product in products.items() if product is not None},
        zones={zone: _see_all(ones, recent=recent) for zone, ones in reading.zones.items()},
        attentions=tuple(fact for fact in attentions if fact is not None),
        softmaxes=_see_all(structure.softmaxes, recent=recent),
        lookups=tuple(fact for fact in lookups if isinstance(fact, Gather)),
    )


def _read_product(sighting: Sighting, processors: int) -> BoundedProduct | None:
    if sighting.told is None:
        return families.products.read(sighting, processors)
    rows, columns, inner, batch = sighting.told
    return bounded(
        [
            exactly_measured(lambda rows, _columns, _inner, _batch: rows, rows),
            exactly_measured(lambda _rows, columns, _inner, _batch: columns, columns),
            exactly_measured(lambda _rows, _columns, inner, _batch: inner, inner),
            exactly_measured(lambda _rows, _columns, _inner, batch: batch, batch),
        ]
    )


def _distinct(sightings: Iterable[Sighting]) -> list[Sighting]:
    """One of each that were launched alike, with the same counters."""
    found = {(one.name.name, one.grid, one.block, one.counters.get("tensor_ops")): one for one in sightings}
    return list(found.values())


def _see_all(sightings: Iterable[Sighting], *, recent: bool) -> tuple[Seen, ...]:
    """Kernels with the same windows count once: a second one tells nothing new."""
    found: dict[object, Seen] = {}
    for sighting in sightings:
        seen = see(sighting, recent=recent)
        if seen is not None and max(window.high for window in seen.counts) >= FEWEST:
            found.setdefault((seen.counts, seen.is_rows), seen)
    return tuple(found.values())


def see(sighting: Sighting, *, recent: bool) -> Seen | None:
    if sighting.name.library == "Inductor" and (stored := sighting.counters.get("store_bytes")):
        counts = tuple(exactly(stored // size) for size in _COMPILED_BYTES if stored % size == 0)
        return Seen(sighting=sighting, counts=counts)
    choices = memory_bound.choices(sighting, recent=recent)
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

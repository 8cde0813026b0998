"""Durations and the claimed work: what a GPU cannot do faster, and what it usually does not do slower.

A kernel takes at least its operations at the GPU's peak, and the bytes that do not fit into any cache at its bandwidth.
Both follow from the claim, so they also test evidence without counters. A run that is much slower than its claim
explains is only worth a remark: kernels wait, GPUs are shared, and programs pad.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stepscope.hardware import Hardware
from stepscope.recover.claims.plausibility import FASTEST
from stepscope.recover.claims.prediction import ROLE_WORDS, ShapeCheck, describe_place
from stepscope.recover.evidence.layout import KernelPlace, Placement
from stepscope.recover.evidence.order import Role, is_attention, is_norm
from stepscope.recover.facts import Sighting
from stepscope.recover.shape import ClaimedShape, Size, plus, product_sizes, times

_LARGEST_CACHE = 1 << 28  # bytes; no GPU has a larger one
_NARROW = 2  # bytes of an element, if not known to be wider
_WIDE_DTYPES = ("fp32", "tf32")
# For the remark: the share of both peaks that kernels usually reach, their shortest time, and bytes of an element that
# a data movement kernel reads and writes.
_USUAL_SHARE, _USUAL_NS, _USUAL_BYTES = 0.3, 3_000, 8
_MUCH_SLOWER = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Operations, and bytes that are read and written at least once."""

    operations: int
    bytes: int

    def __add__(self, other: "Work") -> "Work":
        return Work(operations=self.operations + other.operations, bytes=self.bytes + other.bytes)

    def repeat(self, number: int) -> "Work":
        return Work(operations=self.operations * number, bytes=self.bytes * number)


Needs = Callable[[ClaimedShape], Work | None]  # None: a size that it depends on is unknown


@dataclass(frozen=True, slots=True)
class WorkLimits:
    """Checks of durations on one GPU."""

    hardware: Hardware

    def predict(self, placement: Placement) -> Iterator[ShapeCheck]:
        """Yield a check for the quickest launch of each kind, and for the quickest pass."""
        for role, place in _find_quickest_products(placement.products).items():
            needs = _needs_product(role, place.sighting.dtype)
            yield from self._check([place], place, f"{ROLE_WORDS[role]} duration", needs)
        if calls := _find_calls(placement):
            quickest = min(calls, key=_sum_ns)
            yield from self._check(quickest, quickest[0], "attention duration", _needs_attention)
        norms = [one for one in placement.others if one.zone in ("between", "middle") and is_norm(one.sighting)]
        if timed := [one for one in norms if one.sighting.duration_ns > 0]:
            place = min(timed, key=lambda one: one.sighting.duration_ns)
            yield from self._check([place], place, "norm duration", _needs_norm)
        passes = _find_passes(placement)
        if passes:
            layers, kernels = min(passes, key=lambda one: _sum_ns(one[1]))
            needs = _needs_pass(layers, placement)
            yield from self._check(kernels, kernels[0], "duration of a pass", needs)

    def _check(
        self, places: Sequence[KernelPlace], first: KernelPlace, what: str, needs: Needs
    ) -> Iterator[ShapeCheck]:
        spent_ns = _sum_ns(places)
        peak = self._find_peak([one.sighting for one in places])

        def least_ns(shape: ClaimedShape) -> float | None:
            work = needs(shape)
            if work is None:
                return None
            moved = max(0, work.bytes - _LARGEST_CACHE) / (self.hardware.bandwidth or float("inf"))
            return max(work.operations / peak, moved) / FASTEST * 1e9

        def test(shape: ClaimedShape) -> bool | None:
            least = least_ns(shape)
            return None if least is None else least <= spent_ns

        if spent_ns > 0:
            yield ShapeCheck(
                sighting=first.sighting,
                what=what,
                where=describe_place(first),
                test=test,
                expect=lambda shape: f"at least {(least_ns(shape) or 0) / 1e3:,.2f} µs at this GPU's peak",
                seen=f"{spent_ns / 1e3:,.2f} µs",
                key=(what, peak, spent_ns),
            )

    def _find_peak(self, sightings: Sequence[Sighting]) -> float:
        """Return the peak of the fastest dtype among the GEMMs and attention calls. An fp32 kernel may compute in tf32
        unless its name excludes tensor cores, a kernel of unknown type in any."""
        peaks = self.hardware.peak_flops
        dtypes: set[str] = set()
        for one in sightings:
            if one.name.kernel_class in ("GEMM", "attention"):
                may_be_narrower = one.dtype in _WIDE_DTYPES and one.name.tensor_cores is not False
                dtypes |= set(_WIDE_DTYPES) if may_be_narrower else {one.dtype or ""}
        known = [peaks[dtype] for dtype in dtypes if dtype in peaks]
        return max(known if known and "" not in dtypes else peaks.values(), default=float("inf"))

    def find_slow_pass(self, placement: Placement, shape: ClaimedShape) -> tuple[float, float] | None:
        """Return the nanoseconds of the quickest pass and how long the claimed work usually takes, if it took much
        longer."""
        passes = _find_passes(placement)
        if not passes:
            return None
        layers, kernels = min(passes, key=lambda one: _sum_ns(one[1]))
        work = _needs_pass(layers, placement)(shape)
        widest = max(shape.d_ff or 0, shape.d_model or 0, *((shape.vocab_size or 0,) if _has_head(kernels) else ()))
        if work is None or not self.hardware.bandwidth or not shape.tokens:
            return None
        work += Work(operations=0, bytes=len(kernels) * shape.tokens * widest * _USUAL_BYTES)
        peak = self._find_peak([one.sighting for one in kernels])
        seconds = (work.operations / peak + work.bytes / self.hardware.bandwidth) / _USUAL_SHARE
        usual_ns = seconds * 1e9 + len(kernels) * _USUAL_NS
        spent_ns = _sum_ns(kernels)
        return (spent_ns, usual_ns) if spent_ns > _MUCH_SLOWER * usual_ns else None


def find_idle_share(sightings: Sequence[Sighting]) -> float | None:
    """Return the share of time without a kernel, if it is much longer than that with one."""
    starts = [one.start_ns for one in sightings if one.start_ns is not None]
    if len(starts) < len(sightings):
        return None
    busy = sum(one.duration_ns for one in sightings)
    span = max(start + one.duration_ns for start, one in zip(starts, sightings, strict=True)) - min(starts)
    return 1 - busy / span if span > _MUCH_SLOWER * busy else None


def _sum_ns(places: Sequence[KernelPlace]) -> int:
    return sum(one.sighting.duration_ns for one in places)


def _find_quickest_products(places: Sequence[KernelPlace]) -> dict[Role, KernelPlace]:
    quickest: dict[Role, KernelPlace] = {}
    for place in places:
        if place.role is not None and place.sighting.duration_ns > 0:
            known = quickest.setdefault(place.role, place)
            if place.sighting.duration_ns < known.sighting.duration_ns:
                quickest[place.role] = place
    return quickest


def _find_calls(placement: Placement) -> list[list[KernelPlace]]:
    """Return the kernels of every fused attention call."""
    calls: dict[tuple[int, int | None], list[KernelPlace]] = {}
    for one in placement.attentions:
        if is_attention(one.sighting, backward=False):
            calls.setdefault((one.pass_number, one.layer), []).append(one)
    return list(calls.values())


def _find_passes(placement: Placement) -> list[tuple[int, list[KernelPlace]]]:
    """Return the layers and the kernels of every complete forward pass."""
    kernels: dict[int, list[KernelPlace]] = {}
    for one in (*placement.products, *placement.attentions, *placement.others):
        kernels.setdefault(one.pass_number, []).append(one)
    return [
        (layers, kernels[number])
        for number, layers in enumerate(placement.num_layers, start=1)
        if number in kernels and number not in placement.unclear and not placement.is_cut(number)
    ]


def _has_head(places: Sequence[KernelPlace]) -> bool:
    return any(one.role == "head" for one in places)


# --- The least work


def _needs_product(role: Role, dtype: str | None) -> Needs:
    size = 4 if dtype in _WIDE_DTYPES else _NARROW

    def needs(shape: ClaimedShape) -> Work | None:
        ways = [_multiply(*sizes, size=size) for sizes in product_sizes(role, shape)]
        known = [way for way in ways if way is not None]
        return min(known, key=lambda way: way.operations) if len(known) == len(ways) else None

    return needs


def _multiply(rows: Size, columns: Size, inner: Size, batch: Size, *, size: int) -> Work | None:
    operations = times(2, rows, columns, inner, batch)
    elements = plus(plus(times(rows, inner), times(columns, inner)), times(rows, columns))
    moved = times(elements, batch, size)
    return None if operations is None or moved is None else Work(operations=operations, bytes=moved)


def _needs_attention(shape: ClaimedShape) -> Work | None:
    """A causal mask leaves half of the two GEMMs."""
    operations = times(2, shape.batch, shape.num_heads, shape.context, shape.context, shape.d_head)
    moved = times(2 * _NARROW, shape.tokens, plus(shape.query_width, shape.key_width))
    return None if operations is None or moved is None else Work(operations=operations, bytes=moved)


def _needs_norm(shape: ClaimedShape) -> Work | None:
    moved = times(2 * _NARROW, shape.tokens, shape.d_model)
    return None if moved is None else Work(operations=0, bytes=moved)


def _needs_pass(layers: int, placement: Placement) -> Needs:
    """Only the weights must be read from memory: everything else may stay in the cache for the next kernel."""
    roles = [role for role in placement.pattern if role is not None]
    is_fused = bool(_find_calls(placement))

    def needs(shape: ClaimedShape) -> Work | None:
        parts = [_needs_product(role, None)(shape) for role in roles]
        if is_fused:
            parts.append(_needs_attention(shape))
        head = _needs_product("head", None)(shape)
        known = [part for part in parts if part is not None]
        if head is None or len(known) < len(parts):
            return None
        layer = sum((part for part in known), Work(operations=0, bytes=0))
        operations = layer.repeat(layers).operations + head.operations
        return Work(operations=operations, bytes=_count_weights(shape, roles, layers))

    return needs


def _count_weights(shape: ClaimedShape, roles: Sequence[Role], layers: int) -> int:
    """Return the bytes of the weights that a pass reads."""
    total = times(_NARROW, shape.vocab_size, shape.d_model) or 0
    for role in roles:
        if role not in ("scores", "values"):
            _, columns, inner, _ = product_sizes(role, shape)[0]
            total += layers * (times(_NARROW, columns, inner) or 0)
    return total

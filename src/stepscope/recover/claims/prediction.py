"""What a claimed shape predicts of every kernel, as checks that can be asked of other shapes as well.

A check is asked of the claim first. Then it is asked of shapes that differ from it in one size: a size that can be
changed without any check noticing was not tested, however well the claim fits.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from stepscope.hardware import Hardware
from stepscope.recover.claims.plausibility import FASTEST
from stepscope.recover.evidence.layout import KernelPlace, Placement
from stepscope.recover.evidence.order import Role, Zone, adds_parts, is_norm
from stepscope.recover.facts import Attention, Fact, Gather, Product, Rows, Sighting, Window, find_window
from stepscope.recover.families import Platform, read_facts
from stepscope.recover.families.grids import join_choices
from stepscope.recover.shape import HEAD_ROWS, ClaimedShape, ProductShape, Size, count_head_rows, product_sizes, times

_NORM_ZONES: tuple[Zone, ...] = ("between", "middle", "final")
_WITH_TOKENS = ("index", "embedding", "norm")
_WORDS: dict[Role, str] = {
    "query_key_value": "projection to queries, keys and values",
    "query": "projection to queries",
    "key": "projection to keys",
    "value": "projection to values",
    "key_value": "projection to keys and values",
    "scores": "scores of attention",
    "values": "values of attention",
    "output": "output projection of attention",
    "gate": "gate of the feed-forward layer",
    "up": "up projection of the feed-forward layer",
    "gate_up": "gate and up projection of the feed-forward layer",
    "down": "down projection of the feed-forward layer",
    "head": "head",
}


Test = Callable[[ClaimedShape], bool | None]  # None: it needs a size that is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeCheck:
    """Whether a shape can have made this kernel."""

    sighting: Sighting
    what: str
    where: str
    test: Test
    expect: Callable[[ClaimedShape], str]
    seen: str
    key: object  # equal for checks that answer alike
    suggest: Callable[[ClaimedShape], str] = lambda _: ""  # what would fit instead


def admits(product: Product, sizes: ProductShape) -> bool | None:
    """None where more than one size is not known."""
    rows, columns, inner, batch = sizes
    unknown = sizes.count(None)
    if batch is None or unknown > 1:
        return None
    if unknown:
        return find_window(product, rows=rows, columns=columns, inner=inner, batch=batch) is not None
    return product.admits(rows or 0, columns or 0, inner or 0, batch)


def _any_of(answers: Iterable[bool | None]) -> bool | None:
    """False only where every way is excluded."""
    found = list(answers)
    return True if True in found else None if None in found else False


class Predictor:
    """Checks for the kernels of one file. Readers are asked once for launches that look alike."""

    def __init__(self, platform: Platform, hardware: Hardware | None) -> None:
        self._platform = platform
        self._hardware = hardware
        self._identities: dict[int, object] = {}  # by the kernel's index in the file
        # Launches that look alike say the same, and a run has thousands.
        self._facts: dict[object, tuple[Fact, ...]] = {}

    def identify(self, sighting: Sighting) -> object:
        """Equal for launches that every reader takes alike. How long they took is not part of it."""
        if sighting.index not in self._identities:
            self._identities[sighting.index] = _identity(sighting)
        return self._identities[sighting.index]

    def product(self, sighting: Sighting) -> Product | None:
        return next((fact for fact in self._choices(sighting) if isinstance(fact, Product)), None)

    def _choices(self, sighting: Sighting) -> tuple[Fact, ...]:
        key = (self.identify(sighting), sighting.shared_bytes)
        if key not in self._facts:
            self._facts[key] = read_facts(sighting, self._platform)
        return self._facts[key]

    def fits(self, role: Role, sighting: Sighting, shape: ClaimedShape) -> bool | None:
        product = self.product(sighting)
        if product is None:
            return None
        return _any_of(admits(product, sizes) for sizes in product_sizes(role, shape))

    def find_single_steps(self, placement: Placement, shape: ClaimedShape) -> set[int]:
        """Passes whose lookups and norms have a row for each sequence: one token more of a text that is generated."""
        if shape.batch is None or shape.tokens == shape.batch:
            return set()
        rows: dict[int, set[int]] = {}
        for place in placement.others:
            if place.zone in ("before", *_NORM_ZONES) and place.sighting.name.kernel_class in _WITH_TOKENS:
                fact = join_choices(self._choices(place.sighting))
                if isinstance(fact, Gather | Rows) and fact.rows.is_exact:
                    rows.setdefault(place.pass_number, set()).add(fact.rows.low)
        return {number for number, seen in rows.items() if seen == {shape.batch}}

    def predict(self, placement: Placement) -> Iterator[ShapeCheck]:
        yield from self._check_products(placement)
        yield from self._check_speed(placement.products)
        for place in placement.attentions:
            yield from self.check_anchor(place.sighting, _where(place))
        for sighting in placement.recomputed:
            yield from self.check_anchor(sighting, "attention that is run again for the backward pass")
        for sighting in placement.backward_attentions:
            yield from self.check_anchor(sighting, "backward")
        yield from self._check_lookup(placement)
        for place in placement.others:
            if place.zone in _NORM_ZONES and is_norm(place.sighting) and place.sighting.name.library != "Inductor":
                yield from self._check_norm(place)

    def _check_products(self, placement: Placement) -> Iterator[ShapeCheck]:
        parts = {place.sighting.index: place for place in placement.others if adds_parts(place.sighting)}
        for place in placement.products:
            if (check := self._check_product(place, place.sighting)) is not None:
                yield check
            following = parts.get(place.sighting.index + 1)
            if following is not None and (check := self._check_product(place, following.sighting)) is not None:
                yield check

    def _check_product(self, place: KernelPlace, sighting: Sighting) -> ShapeCheck | None:
        role, product = place.role, self.product(sighting)
        if role is None or product is None:
            return None
        return ShapeCheck(
            sighting=sighting,
            what=_WORDS[role],
            where=_where(place),
            test=lambda shape: _any_of(admits(product, sizes) for sizes in product_sizes(role, shape)),
            expect=lambda shape: _describe_product(role, shape),
            suggest=lambda shape: _suggest(role, shape, product),
            seen=describe_launch(sighting),
            key=(role, self.identify(sighting)),
        )

    def _check_speed(self, places: list[KernelPlace]) -> Iterator[ShapeCheck]:
        """No product can take less time than its operations do at the card's peak."""
        quickest: dict[Role, KernelPlace] = {}
        for place in places:
            if place.role is not None and place.sighting.duration_ns > 0:
                known = quickest.setdefault(place.role, place)
                if place.sighting.duration_ns < known.sighting.duration_ns:
                    quickest[place.role] = place
        for role, place in quickest.items():
            peak = self._peak(place.sighting.name.dtype)
            if peak is not None:
                yield _speed_check(role, place, peak)

    def _peak(self, dtype: str | None) -> float | None:
        """Products in fp32 may be made of several in tf32, and those of an unknown kind may be of any."""
        if self._hardware is None:
            return None
        peaks = self._hardware.peak_flops
        if dtype in ("fp32", "tf32"):
            return max(peaks.get("fp32", 0), peaks.get("tf32", 0)) or None
        return peaks.get(dtype, None) if dtype in ("fp16", "bf16") else None

    def check_anchor(self, sighting: Sighting, where: str) -> Iterator[ShapeCheck]:
        fact = next(iter(self._choices(sighting)), None)
        if isinstance(fact, Attention):
            yield ShapeCheck(
                sighting=sighting,
                what="attention",
                where=where,
                test=lambda shape: admits_attention(fact, shape),
                expect=_describe_attention,
                seen=describe_launch(sighting),
                key=("attention", self.identify(sighting)),
            )
        elif sighting.name.kernel_class in ("softmax", "reduction") and sighting.name.library != "Inductor":
            yield from self._check_rows(
                sighting,
                "softmax of attention",
                where,
                rows=lambda shape: (times(shape.tokens, shape.num_heads),),
                width=lambda shape: shape.context,
            )

    def _check_norm(self, place: KernelPlace) -> Iterator[ShapeCheck]:
        """The last norm may be of the tokens that the head is asked about only."""
        ways = HEAD_ROWS if place.zone == "final" else HEAD_ROWS[:1]
        yield from self._check_rows(
            place.sighting,
            "norm",
            _where(place),
            rows=lambda shape: tuple(count_head_rows(shape, way) for way in ways),
            width=lambda shape: shape.d_model,
            is_apart=place.zone == "final",
        )

    def _check_rows(
        self,
        sighting: Sighting,
        what: str,
        where: str,
        *,
        rows: Callable[[ClaimedShape], tuple[Size, ...]],
        width: Callable[[ClaimedShape], Size],
        is_apart: bool = False,
    ) -> Iterator[ShapeCheck]:
        """`is_apart`: other places are asked about other rows."""
        facts = [one for one in self._choices(sighting) if isinstance(one, Rows)]
        if not facts:
            return

        def test(shape: ClaimedShape) -> bool | None:
            return _any_of(
                _both(_holds(fact.rows, number), _holds(fact.width, width(shape)))
                for fact in facts
                for number in rows(shape)
            )

        yield ShapeCheck(
            sighting=sighting,
            what=what,
            where=where,
            test=test,
            expect=lambda shape: f"{_say(rows(shape)[0])} rows of {_say(width(shape))}",
            seen=f"{_describe_windows([fact.rows for fact in facts])} rows, {describe_launch(sighting)}",
            key=(what, where if is_apart else "", self.identify(sighting)),
        )

    def _check_lookup(self, placement: Placement) -> Iterator[ShapeCheck]:
        """One of the lookups before the first layer is that of the tokens. Others are of positions or kinds."""
        found: dict[int, list[tuple[KernelPlace, Gather]]] = {}
        for place in placement.others:
            fact = join_choices(self._choices(place.sighting)) if place.zone == "before" else None
            if isinstance(fact, Gather):
                found.setdefault(place.pass_number, []).append((place, fact))
        for lookups in found.values():
            key = ("lookup", *(self.identify(place.sighting) for place, _ in lookups))
            yield _lookup_check([place for place, _ in lookups], [fact for _, fact in lookups], key)


def _identity(sighting: Sighting) -> object:
    return (
        sighting.name.name,
        sighting.grid,
        sighting.block,
        tuple(
            (key, sighting.counters.get(key))
            for key in ("tensor_ops", "tensor_instructions", "ffma", "fadd", "fmul", "store_bytes")
        ),
    )


def describe_launch(sighting: Sighting) -> str:
    parts = [f"grid ({', '.join(map(str, sighting.grid))})"]
    for key in ("tensor_ops", "ffma", "store_bytes"):
        if value := sighting.counters.get(key):
            parts.append(f"{key} {value:,}")
            if key == "tensor_ops":
                break
    return ", ".join(parts)


def _speed_check(role: Role, place: KernelPlace, peak: float) -> ShapeCheck:
    def least_us(shape: ClaimedShape) -> float | None:
        counts = [times(2, *sizes) for sizes in product_sizes(role, shape)]
        known = [count for count in counts if count is not None]
        return min(known) / (FASTEST * peak) * 1e6 if len(known) == len(counts) else None

    def test(shape: ClaimedShape) -> bool | None:
        least = least_us(shape)
        return None if least is None else least <= duration_us

    duration_us = place.sighting.duration_ns / 1e3
    return ShapeCheck(
        sighting=place.sighting,
        what=f"shortest time of the {_WORDS[role]}",
        where=_where(place),
        test=test,
        expect=lambda shape: f"at least {least_us(shape) or 0:,.2f} µs, at this GPU's peak",
        seen=f"{duration_us:,.2f} µs",
        key=("speed", role, place.sighting.name.dtype, place.sighting.duration_ns),
    )


def _lookup_check(places: list[KernelPlace], facts: list[Gather], key: object) -> ShapeCheck:
    def test(shape: ClaimedShape) -> bool | None:
        return _any_of(
            _both(
                _holds(fact.rows, shape.tokens),
                _any_of(_holds(fact.width_bytes, times(shape.d_model, size)) for size in (2, 4)),
            )
            for fact in facts
        )

    first = places[0]
    return ShapeCheck(
        sighting=first.sighting,
        what="lookup of tokens",
        where=_where(first),
        test=test,
        expect=lambda shape: f"{_say(shape.tokens)} rows of {_say(shape.d_model)} elements",
        seen=f"{_describe_windows([fact.rows for fact in facts])} rows, {describe_launch(first.sighting)}",
        key=key,
    )


def admits_attention(fact: Attention, shape: ClaimedShape) -> bool | None:
    """Programs may repeat key-value heads before they call attention, so that it sees as many as there are heads."""
    sizes = (shape.batch, shape.num_heads, shape.num_kv_heads, shape.context, shape.d_head)
    if None in sizes:
        windows = (fact.batch, fact.heads, None, fact.length, fact.head_dim)
        answers = [_holds(window, size) for window, size in zip(windows, sizes, strict=True)]
        return False if False in answers else None
    batch, heads, kv_heads, length, head = (size or 0 for size in sizes)
    return any(
        fact.admits(batch, heads, groups, length, length, head, causal)
        for groups in {kv_heads, heads}
        for causal in (True, False)
    )


def _holds(window: Window | None, size: Size) -> bool | None:
    return None if window is None or size is None else size in window


def _both(first: bool | None, second: bool | None) -> bool | None:
    """False where either is; True where one is and the other tells nothing."""
    if first is False or second is False:
        return False
    return True if first or second else None


def _where(place: KernelPlace) -> str:
    layer = f"layer {place.layer}" if place.layer is not None else ""
    number = f"pass {place.pass_number}"
    return f"{number}, {layer}" if layer else number


def _describe_product(role: Role, shape: ClaimedShape) -> str:
    rows, columns, inner, batch = product_sizes(role, shape)[0]
    text = f"{_say(rows)} × {_say(columns)}, summed over {_say(inner)}"
    return text if batch == 1 else f"{text}, {_say(batch)} times"


def _suggest(role: Role, shape: ClaimedShape, product: Product) -> str:
    """The columns, or the size summed over, that the kernel would have if all else were true."""
    rows, columns, inner, batch = product_sizes(role, shape)[0]
    if not rows or columns is None or inner is None or batch is None:
        return ""
    across = find_window(product, rows=rows, inner=inner, batch=batch)
    if across is not None:
        return f"which would be {across.low:,} to {across.high:,} columns"
    deep = find_window(product, rows=rows, columns=columns, batch=batch)
    return f"which would be a sum over {deep.low:,} to {deep.high:,}" if deep is not None else ""


def _describe_attention(shape: ClaimedShape) -> str:
    return (
        f"batch {_say(shape.batch)}, {_say(shape.num_heads)} heads of {_say(shape.d_head)}, "
        f"{_say(shape.num_kv_heads)} for keys and values, context {_say(shape.context)}"
    )


def _describe_windows(windows: list[Window]) -> str:
    return " or ".join(
        f"{window.low:,}" if window.is_exact else f"{window.low:,} to {window.high:,}" for window in windows[:3]
    )


def _say(size: Size) -> str:
    return "?" if size is None else f"{size:,}"

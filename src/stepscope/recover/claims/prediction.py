"""Predictions from a claimed shape for every kernel, as checks that can be run for other shapes too.

A check is run for the claim first, then for shapes that differ from it in one size. If a size can be changed without
any check failing, it was not tested, however well the claim fits.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from stepscope.recording.readers.counter_metrics import SECTOR_BYTES
from stepscope.recover.evidence.layout import KernelPlace, Placement
from stepscope.recover.evidence.order import Role, Zone, adds_parts, adds_tensors, is_norm
from stepscope.recover.facts import Attention, Fact, Gather, Product, Rows, Sighting, Window, find_window
from stepscope.recover.families import Platform, read_facts
from stepscope.recover.families.grids import join_choices
from stepscope.recover.shape import HEAD_ROWS, ClaimedShape, ProductShape, Size, count_head_rows, product_sizes, times

_NARROWEST = 2  # bytes of an element
_NORM_ZONES: tuple[Zone, ...] = ("between", "middle", "final")
_WITH_TOKENS = ("index", "embedding", "norm")
ROLE_WORDS: dict[Role, str] = {
    "query_key_value": "query-key-value projection",
    "query": "query projection",
    "key": "key projection",
    "value": "value projection",
    "key_value": "key-value projection",
    "scores": "attention scores",
    "values": "attention values",
    "output": "attention output projection",
    "gate": "feed-forward gate projection",
    "up": "feed-forward up projection",
    "gate_up": "feed-forward gate and up projection",
    "down": "feed-forward down projection",
    "head": "LM head",
}


Test = Callable[[ClaimedShape], bool | None]  # None: a size it needs is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeCheck:
    """A check whether a shape can have launched this kernel."""

    sighting: Sighting
    what: str
    where: str
    test: Test
    expect: Callable[[ClaimedShape], str]
    seen: str
    key: object  # equal for checks with equal results
    suggest: Callable[[ClaimedShape], str] = lambda _: ""  # the sizes that would fit instead


def admits(product: Product, sizes: ProductShape) -> bool | None:
    """Whether the sizes fit; None if more than one is unknown."""
    rows, columns, inner, batch = sizes
    unknown = sizes.count(None)
    if batch is None or unknown > 1:
        return None
    if unknown:
        return find_window(product, rows=rows, columns=columns, inner=inner, batch=batch) is not None
    return product.admits(rows or 0, columns or 0, inner or 0, batch)


def _any_of(answers: Iterable[bool | None]) -> bool | None:
    """Return False only if every alternative is excluded."""
    found = list(answers)
    return True if True in found else None if None in found else False


class Predictor:
    """Makes the checks for the kernels of one file. Facts are read once for identical launches."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._identities: dict[int, object] = {}  # by the kernel's index in the file
        # Identical launches have the same facts, and a run has thousands of them.
        self._facts: dict[object, tuple[Fact, ...]] = {}

    def identify(self, sighting: Sighting) -> object:
        """Return a key that is equal for launches with the same facts. It does not include the duration."""
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

    def is_rotary(self, sighting: Sighting, shape: ClaimedShape) -> bool | None:
        """Whether this can be the outer product of positions and frequencies of rotary embeddings: a GEMM of inner size
        1. None if a size is unknown."""
        product = self.product(sighting)
        if product is None:
            return False
        if shape.context is None or shape.batch is None or shape.d_head is None:
            return None
        for batch in {shape.batch, 1}:
            windows = (
                find_window(product, columns=shape.context, inner=1, batch=batch),
                find_window(product, rows=shape.context, inner=1, batch=batch),
            )
            if any(window is not None and window.low <= shape.d_head for window in windows):
                return True
        return False

    def find_single_steps(self, placement: Placement, shape: ClaimedShape) -> set[int]:
        """Return the passes whose lookups and norms have one row per sequence: the decode steps of text generation."""
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
        for place in placement.attentions:
            yield from self.check_anchor(place.sighting, describe_place(place))
        for sighting in placement.recomputed:
            yield from self.check_anchor(sighting, "attention recomputed for the backward pass")
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
            if (check := self._check_written(place)) is not None:
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
            what=ROLE_WORDS[role],
            where=describe_place(place),
            test=lambda shape: _any_of(admits(product, sizes) for sizes in product_sizes(role, shape)),
            expect=lambda shape: _describe_product(role, shape),
            suggest=lambda shape: _suggest(role, shape, product),
            seen=describe_launch(sighting),
            key=(role, self.identify(sighting)),
        )

    def _check_written(self, place: KernelPlace) -> ShapeCheck | None:
        """Every element of the result is written to the L2 cache. Kernels of a compiler may write something else."""
        role, sectors = place.role, place.sighting.counters.get("write_sectors")
        if role is None or sectors is None or place.sighting.name.library == "Inductor":
            return None
        most = sectors * SECTOR_BYTES // _NARROWEST

        def test(shape: ClaimedShape) -> bool | None:
            counts = (times(rows, columns, batch) for rows, columns, _, batch in product_sizes(role, shape))
            return _any_of(None if count is None else count <= most for count in counts)

        return ShapeCheck(
            sighting=place.sighting,
            what=f"{ROLE_WORDS[role]} result",
            where=describe_place(place),
            test=test,
            expect=lambda shape: _describe_product(role, shape),
            seen=f"write_sectors {sectors:,}, enough for at most {most:,} elements",
            key=("written", role, sectors),
        )

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
                "attention softmax",
                where,
                rows=lambda shape: (times(shape.tokens, shape.num_heads),),
                width=lambda shape: shape.context,
            )

    def _check_norm(self, place: KernelPlace) -> Iterator[ShapeCheck]:
        """The last norm may run only on the tokens that the LM head uses."""
        ways = HEAD_ROWS if place.zone == "final" else HEAD_ROWS[:1]
        yield from self._check_rows(
            place.sighting,
            "norm",
            describe_place(place),
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
        """`is_apart`: at other positions, other numbers of rows are allowed."""
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
        """One of the lookups before the first layer is the token embedding. Others are positions or token types."""
        found: dict[int, list[tuple[KernelPlace, Gather]]] = {}
        for place in placement.others:
            fact = join_choices(self._choices(place.sighting)) if place.zone == "before" else None
            if isinstance(fact, Gather):
                found.setdefault(place.pass_number, []).append((place, fact))
        adding = {place.sighting.index for place in placement.others if adds_tensors(place.sighting)}
        for number, lookups in found.items():
            # The file may start after the lookup of tokens, with that of positions.
            is_cut = number == 1 and len(lookups) == 1 and lookups[0][0].sighting.index + 1 in adding
            key = ("lookup", is_cut, *(self.identify(place.sighting) for place, _ in lookups))
            yield _lookup_check([place for place, _ in lookups], [fact for _, fact in lookups], key, is_cut=is_cut)


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


def _lookup_check(places: list[KernelPlace], facts: list[Gather], key: object, *, is_cut: bool) -> ShapeCheck:
    def test(shape: ClaimedShape) -> bool | None:
        return _any_of(
            _both(
                _holds(fact.rows, rows),
                _any_of(_holds(fact.width_bytes, times(shape.d_model, size)) for size in (2, 4)),
            )
            for fact in facts
            for rows in ((shape.tokens, shape.context) if is_cut else (shape.tokens,))
        )

    first = places[0]
    return ShapeCheck(
        sighting=first.sighting,
        what="token embedding lookup",
        where=describe_place(first),
        test=test,
        expect=lambda shape: f"{_say(shape.tokens)} rows of {_say(shape.d_model)} elements",
        seen=f"{_describe_windows([fact.rows for fact in facts])} rows, {describe_launch(first.sighting)}",
        key=key,
    )


def admits_attention(fact: Attention, shape: ClaimedShape) -> bool | None:
    """Whether the sizes fit; None if one is unknown. Programs may repeat key-value heads before they call attention, so
    num_heads of them are allowed too."""
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
    """Return False if either is False, True if at least one is True, otherwise None."""
    if first is False or second is False:
        return False
    return True if first or second else None


def describe_place(place: KernelPlace) -> str:
    layer = f"layer {place.layer}" if place.layer is not None else ""
    number = f"pass {place.pass_number}"
    return f"{number}, {layer}" if layer else number


def _describe_product(role: Role, shape: ClaimedShape) -> str:
    rows, columns, inner, batch = product_sizes(role, shape)[0]
    text = f"M {_say(rows)}, N {_say(columns)}, K {_say(inner)}"
    return text if batch == 1 else f"{text}, batch of {_say(batch)}"


def _suggest(role: Role, shape: ClaimedShape, product: Product) -> str:
    """Return the N or the K that would fit the kernel if all else in the claim is true."""
    rows, columns, inner, batch = product_sizes(role, shape)[0]
    if not rows or columns is None or inner is None or batch is None:
        return ""
    across = find_window(product, rows=rows, inner=inner, batch=batch)
    if across is not None:
        return f"which fits N {_describe_windows([across])}"
    deep = find_window(product, rows=rows, columns=columns, batch=batch)
    return f"which fits K {_describe_windows([deep])}" if deep is not None else ""


def _describe_attention(shape: ClaimedShape) -> str:
    return (
        f"batch {_say(shape.batch)}, num_heads {_say(shape.num_heads)}, num_kv_heads {_say(shape.num_kv_heads)}, "
        f"d_head {_say(shape.d_head)}, context {_say(shape.context)}"
    )


def _describe_windows(windows: list[Window]) -> str:
    return " or ".join(
        f"{window.low:,}" if window.is_exact else f"{window.low:,} to {window.high:,}" for window in windows[:3]
    )


def _say(size: Size) -> str:
    return "?" if size is None else f"{size:,}"

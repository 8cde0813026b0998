"""Where in the step a kernel runs, under names that both runs of a comparison share: its phase, its layer, and its part
of the layer.

In a phase whose modules both runs know, modules name the places. Compiled code has no modules, and a trace of another
tool may lack them. The order of the kernels then says what belongs together: both runs compute the same products one
after the other, so GEMMs and attention with the same number of operations are joined (`alignment`). What runs between
two of them has the place that the run with modules has there. If neither run has modules, the places are numbered
products, each with the kernels that follow it.
"""

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stepscope import cost
from stepscope.explain.alignment import align
from stepscope.explain.story.sections.step_picture import sweep_step
from stepscope.explain.trace.attribution.modules import label_layers
from stepscope.explain.trace.profile import UNKNOWN, Profile, order_phases
from stepscope.recording.nesting import look_up

PLACE = ("phase", "layer", "part")
Key = tuple[str, str, str]  # the values of `PLACE`; a layer or part is empty outside layers, or if it is unknown
_Ints = NDArray[np.int64]
_ANCHORS = ("GEMM", "attention", "convolution")
_KNOWN_ENOUGH = 0.5  # of the time of a phase, to name its places by modules
_ALIKE = 0.5  # of the products of the shorter sequence, to trust their number of operations
_NUMBER = re.compile(r"\d+$")
_CLASS_NUMBER = re.compile(r"_\d+$")


def find_places(a: Profile, b: Profile) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the kernels of both runs as `sweep_step` does, with the columns of `PLACE` and `step_at`, the place of the
    step that each started in."""
    frames = [_name_by_module(profile) for profile in (a, b)]
    phases = order_phases({*frames[0]["phase"].unique(), *frames[1]["phase"].unique()})
    named: tuple[list[pl.DataFrame], list[pl.DataFrame]] = ([], [])
    for phase in phases:
        pair = [frame.filter(pl.col("phase") == phase).sort("start_ns", "end_ns") for frame in frames]
        for done, frame in zip(named, _name_phase(pair[0], pair[1]), strict=True):
            done.append(frame)
    one, other = (_name_layers(pl.concat(done)) for done in named)
    return _shorten_layers(one, other)


def order_places(a: pl.DataFrame, b: pl.DataFrame) -> list[Key]:
    """Return the places of both runs in the order of A's step. One that only B has follows the place before it in B."""
    orders = [_order(frame) for frame in (a, b)]
    places: list[Key] = []
    for phase in order_phases({key[0] for order in orders for key in order}):
        first, other = ([key for key in order if key[0] == phase] for order in orders)
        known = {key: at for at, key in enumerate(first)}
        behind: dict[int, list[Key]] = {}
        last = -1
        for key in other:
            last = known.get(key, last)
            if key not in known:
                behind.setdefault(last, []).append(key)
        places += behind.get(-1, [])
        for at, key in enumerate(first):
            places += [key, *behind.get(at, ())]
    return places


def _order(frame: pl.DataFrame) -> list[Key]:
    """The places by when they first run in a step."""
    first = frame.group_by(PLACE).agg(pl.col("offset_ns").min()).sort("offset_ns", *PLACE)
    return [(phase, layer, part) for phase, layer, part in first.select(PLACE).iter_rows()]


# --- Modules ----------------------------------------------------------------------------------------------------------


def _name_by_module(profile: Profile) -> pl.DataFrame:
    """The kernels with the layer and part of each, null if its module is unknown, and with what aligning them needs."""
    swept = sweep_step(profile)
    named = swept.select("module", layer=label_layers(swept))
    distinct = named.unique()
    depth = max((label.count(".") for label in distinct["layer"].drop_nulls()), default=1)
    parts = [_find_part(module, layer, depth) for module, layer in distinct.iter_rows()]
    table = distinct.with_columns(part=pl.Series(parts, dtype=pl.String))
    named = named.join(table, on=["module", "layer"], how="left", nulls_equal=True, maintain_order="left")
    starts, began = np.array([start for start, _ in profile.step_windows]), swept["start_ns"].to_numpy()
    step_at = np.clip(np.searchsorted(starts, began, side="right") - 1, 0, None)
    return swept.select(
        *("phase", "class", "short", "is_cast", "op_row", "start_ns", "end_ns", "own_ns", "wait_ns"),
        layer=named["layer"],
        part=named["part"],
        step_at=pl.Series(step_at, dtype=pl.Int64),
        offset_ns=pl.Series(began - starts[step_at], dtype=pl.Int64),
    ).hstack(_describe_products(profile, swept))


def _find_part(module: str | None, layer: str | None, depth: int) -> str | None:
    """The first name inside a layer, empty for the layer itself; outside layers, the path as deep as that of the list
    of layers. A name in parentheses is all of the model, the loss or the optimizer."""
    if module is None or module.startswith("("):
        return module
    if layer is None:
        return ".".join(module.split(".")[: max(1, depth)])
    if not module.startswith(layer):  # a path of classes, which has no path up to the layer
        return _CLASS_NUMBER.sub("", module.rpartition(".")[2])
    part = module.removeprefix(layer).lstrip(".").partition(".")[0]
    # A layer that is known from repetition has parts with numbers like those of classes.
    return _CLASS_NUMBER.sub("", part) if _CLASS_NUMBER.search(layer) else part


def _describe_products(profile: Profile, kernels: pl.DataFrame) -> pl.DataFrame:
    """The operations of each product and the size that it sums over, which two runs share whatever their precision;
    null if they are unknown. Without that size, the forward and the two backward products of a layer are alike."""
    calls = pl.DataFrame(
        {"op": kernels["op"]}
        | {name: look_up(profile.recording.ops, name, kernels["op_row"]) for name in ("shapes", "dtypes", "arguments")}
    )
    calls = calls.with_columns(is_anchor=kernels["class"].is_in(_ANCHORS))
    distinct = calls.filter("is_anchor").unique()
    known = [_describe_product(*row[:4]) for row in distinct.iter_rows()]
    described = pl.DataFrame(known, schema={"operations": pl.Int64, "inner": pl.Int64}, orient="row")
    return calls.join(
        distinct.hstack(described), on=calls.columns, how="left", nulls_equal=True, maintain_order="left"
    ).select("operations", "inner")


def _describe_product(
    op: str | None, shapes: str | None, dtypes: str | None, arguments: str | None
) -> tuple[int | None, int | None]:
    found = cost.operator_cost(op or "", shapes, dtypes, arguments)
    dims = cost.product_dims(op or "", shapes)
    return found.flops if found else None, dims[-1] if dims else None


def _name_layers(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(pl.col("layer", "part").fill_null(""))


def _shorten_layers(a: pl.DataFrame, b: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Name `blocks.3` and `module.blocks.3` alike, as `layer 3`, if each run has a single list of layers."""
    paths = [[path for path in frame["layer"].unique() if path] for frame in (a, b)]
    if any(len({_NUMBER.sub("", path) for path in each}) > 1 for each in paths):
        return a, b
    names = {path: f"layer {found[0]}" for each in paths for path in each if (found := _NUMBER.search(path))}
    one, other = (frame.with_columns(pl.col("layer").replace(names)) for frame in (a, b))
    return one, other


# --- The order of kernels ---------------------------------------------------------------------------------------------


def _name_phase(a: pl.DataFrame, b: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Name the places of one phase."""
    knows = [_knows_modules(frame) for frame in (a, b)]
    a, b = (
        frame.with_columns(pl.col("part").fill_null(UNKNOWN)) if knew else _without_names(frame)
        for frame, knew in zip((a, b), knows, strict=True)
    )
    if all(knows) or not a.height or not b.height:
        return a, b
    one, other = _join_slots(a, b)
    if not len(one.anchors):
        return a, b
    if knows[0]:
        return a, _take_names(b, other, a, one)
    if knows[1]:
        return _take_names(a, one, b, other), b
    names = ["", *(f"{kind} {number}" for number, kind in enumerate(a["class"].gather(one.anchors.tolist()), start=1))]
    return _number_slots(a, one, names), _number_slots(b, other, names)


def _knows_modules(frame: pl.DataFrame) -> bool:
    known = frame.filter(~pl.col("part").str.starts_with("("))
    return bool(known.height) and float(known["own_ns"].sum()) >= _KNOWN_ENOUGH * float(frame["own_ns"].sum())


def _without_names(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(layer=pl.lit(None, pl.String), part=pl.lit(None, pl.String))


@dataclass(frozen=True, kw_only=True)
class _Slots:
    """The slot of each kernel: the number of the last joined product that started before it in its step, or itself; -1
    before the first one. `anchors` are the rows of the joined products in one step."""

    slots: _Ints
    is_anchor: NDArray[np.bool_]
    anchors: _Ints


def _join_slots(a: pl.DataFrame, b: pl.DataFrame) -> tuple[_Slots, _Slots]:
    """Join the products of both runs by their operations or, if few agree because the sizes differ, by class."""
    for names in (("class", "operations", "inner"), ("class",)):
        steps = [_list_anchors(frame, names) for frame in (a, b)]
        usual = [_find_usual(each) for each in steps]
        pairs = align(usual[0], usual[1])
        if len(pairs) >= _ALIKE * min(map(len, usual)):
            break
    one, other = (
        _slot(frame, each, reference, [pair[side] for pair in pairs])
        for side, (frame, each, reference) in enumerate(zip((a, b), steps, usual, strict=True))
    )
    return one, other


@dataclass(frozen=True, kw_only=True)
class _StepAnchors:
    rows: _Ints
    names: tuple[Hashable, ...]


def _list_anchors(frame: pl.DataFrame, names: Sequence[str]) -> list[_StepAnchors]:
    """The products of each step, in order. A product may have several kernels: one operator launches them."""
    rows = frame.with_row_index("row").filter(pl.col("class").is_in(_ANCHORS))
    rows = rows.filter(pl.col("op_row").is_null() | pl.struct("step_at", "op_row").is_first_distinct())
    steps = rows.partition_by("step_at", maintain_order=True)
    return [
        _StepAnchors(rows=step["row"].to_numpy().astype(np.int64), names=tuple(step.select(names).iter_rows()))
        for step in steps
    ]


def _find_usual(steps: Sequence[_StepAnchors]) -> tuple[Hashable, ...]:
    """The sequence that most steps have."""
    counted = Counter(step.names for step in steps).most_common(1)
    return counted[0][0] if counted else ()


def _slot(
    frame: pl.DataFrame, steps: Sequence[_StepAnchors], usual: tuple[Hashable, ...], joined: Sequence[int]
) -> _Slots:
    """`joined` are the places of the joined products in `usual`, the sequence of most steps."""
    numbers = {place: number for number, place in enumerate(joined)}
    begins = np.full(frame.height, -1, np.int64)
    anchors: _Ints = np.zeros(0, np.int64)
    for step in steps:
        same = range(len(usual)) if step.names == usual else dict(align(usual, step.names))
        found = [(int(step.rows[same[place]]), number) for place, number in numbers.items() if place in same]
        for row, number in found:
            begins[row] = number
        if step.names == usual:
            anchors = np.array([row for row, _ in found], np.int64)
    slots = pl.DataFrame({"step": frame["step_at"], "op": frame["op_row"], "slot": begins}).with_columns(
        pl.when(pl.col("slot") >= 0).then("slot")
    )
    # All kernels of the operator that launched a joined product belong to it.
    of_op = pl.when(pl.col("op").is_not_null()).then(pl.col("slot").max().over("step", "op"))
    slots = slots.with_columns(joined=pl.coalesce("slot", of_op))
    filled = slots.select(pl.col("joined").forward_fill().over("step").fill_null(-1)).to_series()
    is_product = slots["joined"].is_not_null().to_numpy()
    return _Slots(slots=filled.to_numpy(), is_anchor=is_product, anchors=anchors)


def _take_names(frame: pl.DataFrame, own: _Slots, namer: pl.DataFrame, slots: _Slots) -> pl.DataFrame:
    """Name the places of a run without modules after those of `namer`. A joined product has the place of the other one;
    what follows it, the place that takes most time between the same products of `namer` or, if nothing runs there, that
    of the next product."""
    count = len(slots.anchors)
    of_products = namer.select("layer", "part").gather(slots.anchors.tolist()).rows()
    between = (
        namer.with_columns(slot=pl.Series(slots.slots))
        .filter(~pl.Series(slots.is_anchor))
        .group_by("slot", "layer", "part")
        .agg(pl.col("own_ns").sum())
        .sort("own_ns", "layer", "part", descending=[True, False, False], nulls_last=True)
        .unique("slot", keep="first", maintain_order=True)
    )
    most: dict[int, Any] = {slot: (layer, part) for slot, layer, part, _ in between.iter_rows()}
    of_gaps = [most.get(slot) or of_products[min(slot + 1, count - 1)] for slot in range(-1, count)]
    names = [
        of_products[slot] if is_product else of_gaps[slot + 1]
        for slot, is_product in zip(own.slots.tolist(), own.is_anchor.tolist(), strict=True)
    ]
    columns = zip(*names, strict=True) if names else ((), ())
    layer, part = (pl.Series(list(column), dtype=pl.String) for column in columns)
    return frame.with_columns(layer=layer, part=part)


def _number_slots(frame: pl.DataFrame, own: _Slots, names: Sequence[str]) -> pl.DataFrame:
    """Name the places after the joined products: `GEMM 3` is the third one with what follows it."""
    parts = [names[slot + 1] for slot in own.slots.tolist()]
    return frame.with_columns(layer=pl.lit(None, pl.String), part=pl.Series(parts, dtype=pl.String))

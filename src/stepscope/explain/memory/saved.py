"""Tables of the activations saved for backward: by module, operator and block, and eager compared with compiled.

Each storage counts once. Several autograd nodes may save the same storage (the input of three GEMMs); it counts for the
first of them in forward order, so the rows of every table add up to the memory that is really held.
"""

import re
from collections.abc import Iterator

import polars as pl

from stepscope.cost.activations import NOTHING_KEPT, PARTS, Activations
from stepscope.explain.module_roles import find_roles
from stepscope.findings import Cell, Column, Table

LARGEST = 5
OUTSIDE = "(outside blocks)"
_BLOCK = re.compile(r"^((?:[^.\d][^.]*\.)*\d+)(?:\.|$)")
_NOTE = "activations only; a tensor saved by several autograd nodes counts once, for the first node"
_BYTES = Column(key="bytes", label="bytes", kind="bytes")
_SHARE = Column(key="share", label="share", kind="share")
_COUNT = Column(key="count", label="tensors", kind="count")


def held_storages(saved: pl.DataFrame) -> pl.DataFrame:
    """The activations in `saved`, one row per storage, from the node that saved it first. `block` is the path of the
    repeated block that contains it."""
    rows = saved.filter(pl.col("kind") == "activation").sort("node", maintain_order=True)
    rows = rows.unique("storage", keep="first", maintain_order=True)
    blocks = [_block_of(module) for module in rows["module"]]
    return rows.with_columns(pl.Series("block", blocks, dtype=pl.String))


def saved_by_module(saved: pl.DataFrame) -> Table:
    held = held_storages(saved)
    return Table(
        title="Saved for backward by module",
        columns=(Column(key="module", label="module"), _BYTES, _SHARE, _COUNT),
        rows=tuple((module, *sizes) for module, _, *sizes in _add_up(held, held["module"])),
        notes=(_NOTE,),
    )


def saved_by_role(saved: pl.DataFrame) -> Table:
    """By module, with the same module of all layers in one row: `blocks.*.ffn`."""
    held = held_storages(saved)
    named = held.filter(pl.col("module").is_not_null()).group_by("module", maintain_order=True)
    operators = named.agg(pl.col("op").unique().sort().str.join(" "))
    roles = held["module"].replace_strict(find_roles(dict(operators.iter_rows())), default=None, return_dtype=pl.String)
    modules = Column(key="modules", label="modules", kind="count")
    return Table(
        title="Saved for backward by module, all layers combined",
        columns=(Column(key="module", label="module"), modules, _BYTES, _SHARE, _COUNT),
        rows=tuple(_add_up(held, roles)),
        notes=(_NOTE,),
    )


def _add_up(held: pl.DataFrame, by: pl.Series) -> Iterator[tuple[str | None, int, int, float, int]]:
    """Yield each key with its number of modules, bytes, share and number of tensors, largest first."""
    sums = held.group_by(by.alias("key"), maintain_order=True).agg(
        pl.col("module").n_unique(), pl.col("storage_bytes").sum(), pl.len()
    )
    total = max(1, _total(held))
    for key, modules, size, tensors in sums.sort("storage_bytes", descending=True, maintain_order=True).iter_rows():
        yield key, modules, size, size / total, tensors


def saved_by_block(saved: pl.DataFrame) -> Table:
    """One row per block, with its five largest contributors."""
    held = held_storages(saved).with_columns(pl.col("block").fill_null(OUTSIDE))
    total = max(1, _total(held))
    rows: list[tuple[Cell, ...]] = []
    for (block,), inside in held.group_by(["block"], maintain_order=True):
        size = _total(inside)
        rows.append((str(block), size, size / total, inside.height, _largest(inside)))
    return Table(
        title="Saved for backward by block",
        columns=(
            Column(key="block", label="block"),
            _BYTES,
            _SHARE,
            _COUNT,
            Column(key="mostly", label="largest tensors"),
        ),
        rows=tuple(rows),
        notes=(_NOTE,),
    )


def saved_in_block(saved: pl.DataFrame) -> Table:
    """The tensors that the first block saves, largest first."""
    held = held_storages(saved)
    chosen = next(iter(held["block"].drop_nulls()), "")
    inside = held.filter(pl.col("block") == chosen).sort("storage_bytes", descending=True, maintain_order=True)
    total = max(1, _total(inside))
    return Table(
        title=f"Saved for backward in {chosen}" if chosen else "Saved for backward by block: no blocks found",
        columns=(
            Column(key="module", label="module"),
            Column(key="op", label="operator"),
            Column(key="argument", label="argument"),
            Column(key="shape", label="shape"),
            Column(key="dtype", label="dtype"),
            _BYTES,
            _SHARE,
        ),
        rows=tuple(
            (*(row[name] for name in ("module", "op", "argument", "shape", "dtype")), size, size / total)
            for row, size in zip(inside.iter_rows(named=True), inside["storage_bytes"], strict=True)
        ),
        notes=(_NOTE,),
    )


def compare_saved(eager: pl.DataFrame, compiled: pl.DataFrame) -> tuple[Table, Table]:
    """Eager compared with compiled, by operator and by tensor size.

    A compiled graph is one autograd node, which does not show where its tensors come from. The tables compare sizes
    instead: if eager saves five tensors of one size and dtype and compiled three, two of the listed operators no longer
    save theirs.
    """
    left, right = held_storages(eager), held_storages(compiled)
    return _compare_ops(left, right), _compare_sizes(left, right)


def saved_and_predicted(saved: pl.DataFrame, closed: Activations) -> Table:
    """The saved activations of the built-in model, eager and without checkpointing: predicted and measured by part."""
    held = held_storages(saved)
    found: dict[str, int] = {}
    for row in held.iter_rows(named=True):
        part = _part_of(row["module"] or "", row["argument"], row["dtype"])
        found[part] = found.get(part, 0) + row["storage_bytes"]
    parts = [*PARTS, *(part for part in found if part not in PARTS)]
    rows = [
        (part, closed.part_formula(part), closed.part_bytes(part), found.get(part, 0))
        for part in parts
        if closed.part_bytes(part) or found.get(part) or part in NOTHING_KEPT
    ]
    rows.append(("all", "", closed.bytes, _total(held)))
    return Table(
        title="Saved for backward: predicted and measured",
        columns=(
            Column(key="part", label="part"),
            Column(key="formula", label="formula (bytes)"),
            Column(key="closed_bytes", label="predicted", kind="bytes"),
            Column(key="audit_bytes", label="measured", kind="bytes"),
            Column(key="difference_bytes", label="difference", kind="bytes"),
        ),
        rows=tuple((*row, row[3] - row[2]) for row in rows),
        notes=(_NOTE, *(f"{part} saves nothing: {why}" for part, why in NOTHING_KEPT.items())),
    )


def _total(held: pl.DataFrame) -> int:
    return int(held["storage_bytes"].sum())


def _largest(inside: pl.DataFrame) -> str:
    """`ffn SigmoidBackward0 result 10.8%`, with the last part of the module's path, which is enough within a block."""
    total = max(1, _total(inside))
    named = inside.with_columns(pl.col("module").fill_null("").str.split(".").list.last())
    sums = named.group_by("module", "op", "argument", maintain_order=True).agg(pl.col("storage_bytes").sum())
    top = sums.sort("storage_bytes", descending=True, maintain_order=True).head(LARGEST)
    return ", ".join(f"{module} {op} {argument} {size / total:.1%}" for module, op, argument, size in top.iter_rows())


def _compare_ops(left: pl.DataFrame, right: pl.DataFrame) -> Table:
    sides = [dict(side.group_by("op").agg(pl.col("storage_bytes").sum()).iter_rows()) for side in (left, right)]
    order = sorted(sides[0] | sides[1], key=lambda op: (-sides[0].get(op, 0), -sides[1].get(op, 0), op))
    rows = [(op, sides[0].get(op, 0), sides[1].get(op, 0)) for op in order]
    rows.append(("all", _total(left), _total(right)))
    return Table(
        title="Saved for backward by operator, eager and compiled",
        columns=(Column(key="op", label="operator"), *_SIDES),
        rows=tuple((op, before, after, before - after) for op, before, after in rows),
        notes=(_NOTE,),
    )


def _compare_sizes(left: pl.DataFrame, right: pl.DataFrame) -> Table:
    keys = ["dtype", "storage_bytes"]
    what = (pl.col("op") + " " + pl.col("argument")).unique(maintain_order=True).str.join(", ")
    before = left.group_by(keys).agg(pl.len().alias("eager"), what.alias("ops"))
    after = right.group_by(keys).agg(pl.len().alias("compiled"))
    both = before.join(after, on=keys, how="full", coalesce=True).with_columns(
        pl.col("eager", "compiled").fill_null(0).cast(pl.Int64)
    )
    both = both.with_columns(((pl.col("eager") - pl.col("compiled")) * pl.col("storage_bytes")).alias("gone"))
    both = both.sort("gone", "storage_bytes", "dtype", descending=[True, True, False])
    return Table(
        title="Saved for backward by tensor size, eager and compiled",
        columns=(
            Column(key="dtype", label="dtype"),
            Column(key="each_bytes", label="tensor size", kind="bytes"),
            Column(key="eager_count", label="eager", kind="count"),
            Column(key="compiled_count", label="compiled", kind="count"),
            Column(key="gone_bytes", label="no longer saved", kind="bytes"),
            Column(key="eager_ops", label="saved in eager by"),
        ),
        rows=tuple(both.select(*keys, "eager", "compiled", "gone", "ops").iter_rows()),
        notes=(_NOTE, "a negative size means that the compiled model saves more"),
    )


_SIDES = (
    Column(key="eager_bytes", label="eager", kind="bytes"),
    Column(key="compiled_bytes", label="compiled", kind="bytes"),
    Column(key="gone_bytes", label="no longer saved", kind="bytes"),
)


def _block_of(module: str | None) -> str | None:
    """`blocks.3` for `blocks.3.attention.q_proj`: the path up to its first number."""
    match = _BLOCK.match(module or "")
    return match[1] if match else None


def _part_of(module: str, argument: str, dtype: str) -> str:
    """The part of the built-in model that a module belongs to. A 16-bit second operand of a linear layer is the
    autocast copy of its weight."""
    last = module.rpartition(".")[2]
    if argument == "mat2" and dtype in ("bfloat16", "float16") and last != "attention":
        return "weights"
    if last.endswith("_norm"):
        return "norm"
    if last.endswith("_proj"):
        return "projections"
    named = {"attention": "attention", "lm_head": "head", "(loss)": "loss", "embedding": "embedding"}
    return "ffn" if ".ffn" in module else named.get(last, last or "(unknown)")

"""The matrix products of a recording: one row an operator that ran one, with its role, shape and operations.

A product is an operator, not a kernel: the library may split one product over two kernels. Its role comes from the
module's name, or from the part of attention it is in, or, where neither is recorded, from its place around a softmax.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import polars as pl

from stepscope.explain.questions.answers import stepped
from stepscope.explain.trace.profile import Profile

SCORES, VALUES, SOFTMAX = "scores", "values", "softmax"
ROLES = ("query", "key", "value", "query, key, value", SCORES, VALUES, "output", "gate", "up", "down", "head")
UNKNOWN_ROLE = "unknown"
_BATCHED = ("aten::bmm", "aten::baddbmm")
_SUMMAND_FIRST = ("aten::addmm", "aten::baddbmm", "aten::_addmm_activation")
# The last word of a module's name, as models in the wild call their layers.
_ROLE_WORDS = {
    "query": ("q_proj", "query", "q", "wq", "to_q", "q_lin"),
    "key": ("k_proj", "key", "k", "wk", "to_k", "k_lin"),
    "value": ("v_proj", "value", "v", "wv", "to_v", "v_lin"),
    "query, key, value": ("qkv", "qkv_proj", "c_attn", "wqkv", "query_key_value", "in_proj", "to_qkv"),
    "output": ("output_proj", "o_proj", "out_proj", "wo", "o", "to_out", "out_lin"),
    "gate": ("gate", "gate_proj", "w1"),
    "up": ("up", "up_proj", "w3", "c_fc", "fc1", "fc_in", "dense_h_to_4h", "lin1"),
    "down": ("down", "down_proj", "w2", "fc2", "fc_out", "dense_4h_to_h", "lin2"),
    "head": ("lm_head", "head", "embed_out", "classifier"),
}
_BY_WORD = {word: role for role, words in _ROLE_WORDS.items() for word in words}


@dataclass(frozen=True, slots=True)
class Extent:
    """`batch` products of (m, k) by (k, n)."""

    batch: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.k * self.n

    @property
    def elements(self) -> int:
        """Of the result."""
        return self.batch * self.m * self.n

    @property
    def moved(self) -> int:
        """Elements read and written at the least: both factors and the result, once."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)

    def __str__(self) -> str:
        product = f"({self.m}×{self.k})·({self.k}×{self.n})"
        return product if self.batch == 1 else f"{self.batch}× {product}"


def find_products(profile: Profile) -> pl.DataFrame:
    """Rows: phase, recomputed, step, layer, module, op, op_row, role, kernels (short names), time_ns, launch_ns."""
    kernels = _order(stepped(profile))
    products = kernels.filter(pl.col("class") == "gemm").filter(
        ~pl.col("op").str.contains("conv").fill_null(value=False)
    )
    # What a graph started has no operator of its own: each kernel counts by itself.
    alone = pl.col("op_row").is_null() | (pl.col("launched") == "graph")
    identity = pl.when(alone).then(-1 - pl.col("order").cast(pl.Int64)).otherwise("op_row")
    grouped = (
        products.with_columns(product=identity)
        .group_by("process", "product", maintain_order=True)
        .agg(
            pl.col(
                "phase", "recomputed", "step", "layer", "module", "part", "op", "op_row", "launch_ns", "order"
            ).first(),
            kernels=pl.col("short").unique(maintain_order=True),
            time_ns=pl.col("time_ns").sum(),
        )
    )
    around = _around_softmax(kernels)
    return grouped.join(around, on="order", how="left", maintain_order="left").with_columns(
        role=pl.coalesce(
            pl.col("part").replace_strict({SCORES: SCORES, VALUES: VALUES}, default=None, return_dtype=pl.String),
            pl.col("module").map_elements(role_of_module, return_dtype=pl.String, skip_nulls=True),
            pl.col("place"),
            pl.lit(UNKNOWN_ROLE),
        )
    )


def _order(kernels: pl.DataFrame) -> pl.DataFrame:
    return kernels.sort("process", "thread", "launch_ns", "start_ns", nulls_last=True).with_row_index("order")


def _around_softmax(ordered: pl.DataFrame) -> pl.DataFrame:
    """In forward, the batched product right before a softmax makes the scores, the one right after mixes the values."""
    batched = pl.col("op").is_in(_BATCHED).fill_null(value=False) & (pl.col("class") == "gemm")
    softmax = pl.col("class") == "softmax"
    line = ordered.filter((pl.col("phase") == "forward") & (batched | softmax)).with_columns(soft=softmax)
    before, after = pl.col("soft").shift(-1), pl.col("soft").shift(1)
    placed = line.with_columns(
        place=pl.when("soft")
        .then(None)
        .when(before.fill_null(value=False))
        .then(pl.lit(SCORES))
        .when(after.fill_null(value=False))
        .then(pl.lit(VALUES))
    )
    return placed.filter(pl.col("place").is_not_null()).select("order", "place")


@cache
def role_of_module(module: str) -> str | None:
    """By the last words of its qualified name. `w1`, `w2` and `w3` are a SwiGLU's, as in the original code of LLaMA."""
    for word in reversed(module.casefold().split(".")):
        if word in _BY_WORD:
            return _BY_WORD[word]
        if not word.isdigit() and word not in ("linear", "dense", "base_layer"):
            return None
    return None


def extents(profile: Profile, op_rows: Sequence[int | None]) -> list[Extent | None]:
    """From the shapes of operators' inputs; None where they were not recorded."""
    ops = profile.recording.ops
    known = [row for row in op_rows if row is not None]
    names = dict(zip(known, ops["name"].gather(known), strict=True)) if known else {}
    shapes = dict(zip(known, ops["shapes"].gather(known), strict=True)) if known else {}
    return [extent(names[row], shapes[row]) if row is not None else None for row in op_rows]


@cache
def extent(op: str, shapes: str | None) -> Extent | None:
    try:
        dims = [shape for shape in json.loads(shapes or "[]") if isinstance(shape, list) and shape]
    except ValueError:
        return None
    matrices = [shape for shape in dims if len(shape) >= 2 and all(isinstance(size, int) for size in shape)]
    if len(matrices) < 2:
        return None
    # `addmm` and `baddbmm` name the summand first, and compiled code names `out` last.
    first, second = dims[1:3] if op in _SUMMAND_FIRST and len(dims) > 2 else matrices[:2]
    if op == "aten::linear":
        first, second = matrices[0], [matrices[1][1], matrices[1][0]]
        rows = 1
        for size in first[:-1]:
            rows *= size
        return Extent(1, rows, first[-1], second[1])
    if len(first) != len(second) or first[-1] != second[-2]:
        return None
    batch = 1
    for size in first[:-2]:
        batch *= size
    return Extent(batch, first[-2], first[-1], second[-1])

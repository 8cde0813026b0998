"""The GEMMs of a recording, one row per operator with its role, shape and FLOPs; and the question how many of each role
are expected and found.

A GEMM here is an operator, not a kernel: a library may split it over two kernels. Its role comes from the module's
name, the part of attention it belongs to, or, if neither is recorded, from its place around a softmax.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import polars as pl

from stepscope.explain.questions.answers import Answer, missing, share_by, stepped, time_of
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Cell, Column, Table
from stepscope.spec import ModelShape
from stepscope.units import count_noun, say_count, say_list

SCORES, VALUES, SOFTMAX = "scores", "values", "softmax"
ROLES = ("query", "key", "value", "query, key, value", SCORES, VALUES, "output", "gate", "up", "down", "head")
UNKNOWN_ROLE = "unknown"
_BATCHED = ("aten::bmm", "aten::baddbmm")
_OF_CONVOLUTION = pl.col("op").str.contains("conv").fill_null(value=False)
_SUMMAND_FIRST = ("aten::addmm", "aten::baddbmm", "aten::_addmm_activation")
# The last word of a module's name in common models.
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
    """`batch` GEMMs of (m, k) by (k, n)."""

    batch: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.k * self.n

    @property
    def elements(self) -> int:
        """Elements of the result."""
        return self.batch * self.m * self.n

    @property
    def moved(self) -> int:
        """The fewest elements read and written: both factors and the result, once."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)

    def __str__(self) -> str:
        product = f"({self.m}×{self.k})·({self.k}×{self.n})"
        return product if self.batch == 1 else f"{self.batch}× {product}"


def find_products(profile: Profile) -> pl.DataFrame:
    """Rows: phase, recomputed, step, layer, module, op, op_row, role, kernels (short names), time_ns, launch_ns."""
    kernels = _order(stepped(profile))
    products = kernels.filter((pl.col("class") == "GEMM") & ~_OF_CONVOLUTION)
    # Kernels of a CUDA graph have no recorded call of an operator, so each counts separately.
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
    """In forward, the batched GEMM before a softmax computes the scores, and the one after it uses the values."""
    batched = pl.col("op").is_in(_BATCHED).fill_null(value=False) & (pl.col("class") == "GEMM")
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
    """The role from the last words of the qualified name. `w1`, `w2` and `w3` are SwiGLU weights as in LLaMA's code."""
    for word in reversed(module.casefold().split(".")):
        if word in _BY_WORD:
            return _BY_WORD[word]
        if not word.isdigit() and word not in ("linear", "dense", "base_layer"):
            return None
    return None


def extents(profile: Profile, op_rows: Sequence[int | None]) -> list[Extent | None]:
    """GEMM sizes from the input shapes of operators; None if they were not recorded."""
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
    # `addmm` and `baddbmm` have the summand first, and compiled code has `out` last.
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


# --- The question -----------------------------------------------------------------------------------------------------


_KEY = "products"
_QUESTION = "Does each layer run the expected GEMMs?"
_LINEAR = ("query", "key", "value", "output", "gate", "up", "down")
_SHOWN_KERNELS = 2


def products_by_role(profile: Profile) -> Answer:
    products = find_products(profile)
    if not products.height:
        reason = "this recording has no GEMMs"
        return missing(_KEY, _QUESTION, reason, "stepscope profile --mode train")
    expected = _expected(profile)
    steps = profile.num_steps
    counts = {stage: each.height / steps for stage, each in _stages(products).items()}
    total = products.height / steps
    known = products.filter(pl.col("role") != UNKNOWN_ROLE)
    counted = say_list(f"{say_count(count)} in {stage}" for stage, count in counts.items() if count)
    verdict = ""
    if expected is None:
        sentence = (
            "The expected number is known only for the built-in model. "
            f"Found {profile.clock.say_per_step}: {counted}{_beside_convolutions(profile)}; "
            f"{_per_layer(profile, products)}"
        )
        if known.height < products.height:
            share = 1 - known.height / products.height
            sentence += f"; {share * 100:.0f}% could not be assigned a role from their module names"
    else:
        layers, roles, passes = expected
        per_layer = [role for role in roles if role != "head"]
        forward = len(per_layer) * layers + 1
        match = _verdict(counts, forward * passes, profile)
        verdict = f"{match.partition(':')[0]}, "
        times = f", in {passes} passes per step" if passes > 1 else ""
        fused = "" if SCORES in roles else "; attention is one fused kernel"
        sentence = (
            f"{match}. Found {counted}. Expected {layers} × {len(per_layer)} and the head = {forward} per forward "
            f"pass, and twice that in backward{times}; per layer {say_list(per_layer)}{fused}"
        )
    return Answer(
        key=_KEY,
        question=_QUESTION,
        figure=verdict
        + (
            f"{say_count(counts['forward'])} in forward"
            if counts["forward"]
            else f"{say_count(total)} {profile.clock.say_per_step}"
        ),
        sentence=sentence + ".",
        evidence=_table(profile, products, expected),
    )


def _stages(products: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """The GEMMs of forward, backward, and recomputation by activation checkpointing."""
    again = pl.col("recomputed").fill_null(value=False)
    phase = pl.col("phase")
    return {
        "forward": products.filter((phase == "forward") & ~again),
        "backward": products.filter((phase == "backward") & ~again),
        "recomputation": products.filter(again),
        "other or unknown phases": products.filter(~again & (phase.is_null() | ~phase.is_in(["forward", "backward"]))),
    }


_Expected = tuple[int, tuple[str, ...], int]


def _expected(profile: Profile) -> _Expected | None:
    """Layers, roles and passes per step of the built-in model; None for other models."""
    case = profile.recording.manifest.case
    if case is None or not isinstance(case.workload.model, ModelShape):
        return None
    fused = bool((stepped(profile)["class"] == "attention").any())
    attention = () if fused else (SCORES, VALUES)
    roles = (*_LINEAR[:3], *attention, *_LINEAR[3:], "head")
    return case.workload.model.num_layers, roles, case.workload.passes


def _verdict(counts: dict[str, float], forward: int, profile: Profile) -> str:
    wanted = {"forward": forward}
    if (profile.kernels["phase"] == "backward").any():
        wanted["backward"] = 2 * forward
    wrong = [stage for stage, count in wanted.items() if counts[stage] != count]
    if not wrong:
        return "Yes"
    if profile.recording.manifest.compiled:
        return "No: the compiler may merge GEMMs or hide operators"
    differ = say_list(f"{say_count(counts[stage])} instead of {wanted[stage]} in {stage}" for stage in wrong)
    return f"No: {differ}"


def _beside_convolutions(profile: Profile) -> str:
    """Libraries compute convolutions with GEMM kernels too, which the other questions count."""
    of_convolution = (pl.col("class") == "GEMM") & _OF_CONVOLUTION
    return ", without those of convolutions" if stepped(profile).filter(of_convolution).height else ""


def _per_layer(profile: Profile, products: pl.DataFrame) -> str:
    forward = products.filter((pl.col("phase") == "forward") & pl.col("layer").is_not_null())
    if not forward.height:
        return "layers were not recorded" if profile.kernels["layer"].is_null().all() else "none of them in a layer"
    layers = forward["layer"].n_unique()
    each = share_by(forward, "layer")["count"] / profile.num_steps
    least, most = float(each.min()), float(each.max())  # type: ignore[arg-type]
    spread = say_count(least) if least == most else f"{say_count(least)} to {say_count(most)}"
    return f"each of {layers} layers runs {spread} in forward"


def _table(profile: Profile, products: pl.DataFrame, expected: _Expected | None) -> Table:
    layers, wanted, passes = expected or (0, (), 1)
    steps = profile.num_steps
    rows: list[tuple[Cell, ...]] = []
    unknown: list[tuple[Cell, ...]] = []
    for stage, group in _stages(products).items():
        shaped = group.with_columns(shape=pl.Series(_shapes(profile, group), dtype=pl.String))
        by_role = {key[0]: part for key, part in shaped.partition_by("role", as_dict=True).items()}
        # GEMMs of unknown role may be any of these, so none counts as missing then.
        told = stage == "forward" and UNKNOWN_ROLE not in by_role
        due = [role for role in wanted if told and role not in by_role]
        for role in (*(role for role in (*ROLES, UNKNOWN_ROLE) if role in by_role or role in due),):
            part = by_role.get(role, shaped.clear())
            keys = ["shape"] if role == UNKNOWN_ROLE else []
            for piece in part.partition_by(keys) if keys else [part]:
                due_here = _due(stage, role, layers, passes) if role in wanted else None
                row = _row(stage, role, piece, steps, due_here)
                (unknown if role == UNKNOWN_ROLE else rows).append(row)
    unknown.sort(key=lambda row: -float(row[5] or 0))
    notes = ["backward runs two for each: the gradients of the input and of the weight"]
    if len(unknown) > 12:
        notes.append(f"{count_noun(len(unknown) - 12, 'more shape')} of unknown role not shown")
    return Table(
        title=f"GEMMs by role, {profile.clock.say_per_step}",
        columns=(
            Column(key="stage", label="in"),
            Column(key="role", label="role"),
            Column(key="shape", label="shape"),
            Column(key="expected", label="expected", kind="count"),
            Column(key="counted", label="found", kind="number"),
            Column(key="per_step_ms", label="time", kind="ms"),
            Column(key="kernels", label="kernels"),
        ),
        rows=(*rows, *unknown[:12]),
        notes=tuple(notes),
    )


def _due(stage: str, role: str, layers: int, passes: int) -> int | None:
    if stage not in ("forward", "backward"):
        return None
    return passes * (1 if role == "head" else layers) * (2 if stage == "backward" else 1)


def _shapes(profile: Profile, group: pl.DataFrame) -> list[str | None]:
    return [str(one) if one else None for one in extents(profile, group["op_row"].to_list())]


def _row(stage: str, role: str, part: pl.DataFrame, steps: int, due: int | None) -> tuple[Cell, ...]:
    shapes = part["shape"].drop_nulls().unique(maintain_order=True).to_list()
    kernels = part["kernels"].explode().drop_nulls().value_counts(sort=True)["kernels"].to_list()
    shown = ", ".join(kernels[:_SHOWN_KERNELS])
    more = f" and {len(kernels) - _SHOWN_KERNELS} more" if len(kernels) > _SHOWN_KERNELS else ""
    shape = "; ".join(shapes[:2]) + (" …" if len(shapes) > 2 else "")
    return (stage, role, shape or None, due, part.height / steps, time_of(part) / steps / 1e6, shown + more)

"""Mixtures of experts: the time of the router, of moving tokens, of the experts' GEMMs and of all-to-alls, and how
evenly the tokens are spread over the experts.

A kernel belongs to a mixture by its module: `mlp.experts`, or `mlp.gate` next to it. Without modules, it does by a name
that only such kernels have, and by the part of a layer that the order of kernels shows. The tokens of each expert are
known if the recorder counted them; otherwise from the rows of GEMMs, if each expert has its own.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import polars as pl

from stepscope.explain.kernel_names import decode
from stepscope.explain.ranks.collectives import find_collectives
from stepscope.explain.trace.attribution.layer_parts import EXPERTS
from stepscope.explain.trace.profile import Profile, kernel_word
from stepscope.explain.trace.roofline import add_product_sizes
from stepscope.findings import Cell, Column, Table
from stepscope.recording.nesting import look_up
from stepscope.units import count_noun

ROUTER, MOVING, PRODUCTS, SHARED, EXCHANGE, REST = (
    "router",
    "grouping and moving tokens",
    "expert GEMMs",
    "shared experts",
    "all-to-all",
    "activations and the rest",
)
_PARTS = (ROUTER, MOVING, PRODUCTS, REST, SHARED, EXCHANGE)
# Labels of a path: names, or classes with a number.
_EXPERTS = re.compile(r"(?i)experts?(?:_\d+)?|\w+Experts_\d+")
_IN_LAYER = re.compile(rf"(?:.*\.)?{EXPERTS}(?:_\d+)?")  # the part of a layer that is known from the order of kernels
_SHARED = re.compile(r"(?i)shared")
_ROUTER = re.compile(r"(?i).*(?:gate|router)(?:_\d+)?|.*TopK\w*")
_MOVED = ("index", "copy", "sort", "reduction", "memcpy", "memset", "embedding")
# What names of kernels say, if the recording has no modules.
_OPERATIONS = {
    "select experts (top-k)": ROUTER,
    "group tokens by expert": MOVING,
    "count tokens by expert": MOVING,
    "sum the experts' results": MOVING,
    "grouped GEMM": PRODUCTS,
}
_MS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """The tokens of each expert of one module in a step. Unless `is_complete`, experts without tokens are not among
    them, and the imbalance is larger than it seems."""

    module: str
    tokens: tuple[int, ...]
    is_complete: bool = True

    @property
    def imbalance(self) -> float:
        """The tokens of the busiest expert, relative to the mean."""
        return max(self.tokens) * len(self.tokens) / max(1, sum(self.tokens))


# --- Which kernels ----------------------------------------------------------------------------------------------------


def find_expert_kernels(profile: Profile, kernels: pl.DataFrame | None = None) -> pl.DataFrame:
    """Return the kernels of mixtures of experts, with `expert_part` and `mixture`, the module around router and
    experts."""
    source = profile.kernels if kernels is None else kernels
    parts = _Parts(source)
    distinct = source.select("module", "class", "name").unique()
    rows = [(*row, parts.choose(*row), parts.find_mixture(row[0])) for row in distinct.iter_rows()]
    added = {"expert_part": pl.String, "mixture": pl.String}
    chosen = pl.DataFrame(rows, schema={**distinct.schema, **added}, orient="row")
    chosen = chosen.filter(pl.col("expert_part").is_not_null())
    keys = ["module", "class", "name"]
    found = source.join(chosen, on=keys, how="inner", nulls_equal=True, maintain_order="left")
    if not found.height:
        return found
    exchanges = find_collectives(profile, source).filter(pl.col("kind") == "all-to-all")
    outside = exchanges.join(found, on=["start_ns", "end_ns", "stream", "name"], how="anti", nulls_equal=True)
    outside = outside.select(source.columns).with_columns(expert_part=pl.lit(EXCHANGE), mixture=pl.lit(None, pl.String))
    return pl.concat([found, outside])


class _Parts:
    """The part of a mixture that a kernel belongs to."""

    def __init__(self, kernels: pl.DataFrame) -> None:
        modules = kernels["module"].drop_nulls().unique().to_list()
        self._mixtures = {path[: path.rindex(".")] for one in modules if "." in (path := _find_experts(one) or "")}
        in_layers = kernels.filter(pl.col("module").is_in([one for one in modules if _IN_LAYER.fullmatch(one)]))
        self._has_router = {module for (module,), own in in_layers.group_by("module") if _has_router(own)}

    def choose(self, module: str | None, kernel_class: str, name: str) -> str | None:
        if module is not None and _IN_LAYER.fullmatch(module):
            return self._choose_in_layer(module, kernel_class, name)
        if module is None or not self._mixtures:
            return _OPERATIONS.get(decode(name).operation)
        mixture = self.find_mixture(module)
        if mixture is None:
            return None
        below = module[len(mixture) + 1 :].split(".")
        if kernel_class == "communication":
            return EXCHANGE
        if any(map(_SHARED.match, below)):
            return SHARED
        if not any(map(_EXPERTS.fullmatch, below)) and _ROUTER.fullmatch(below[0]):
            return ROUTER
        if kernel_class == "GEMM":
            return PRODUCTS
        return MOVING if kernel_class in _MOVED else REST

    def _choose_in_layer(self, module: str, kernel_class: str, name: str) -> str:
        if named := _OPERATIONS.get(decode(name).operation):
            return named
        if kernel_class == "communication":
            return EXCHANGE
        if kernel_class == "GEMM" and module in self._has_router:
            return ROUTER
        return MOVING if kernel_class in _MOVED else REST

    def find_mixture(self, module: str | None) -> str | None:
        return next((one for one in _list_parents(module or "") if one in self._mixtures), None)


def _has_router(kernels: pl.DataFrame) -> bool:
    """Whether the experts of a layer are chosen once for each GEMM that is not one of their own."""
    operations = [decode(name).operation for name in kernels["name"].to_list()]
    choices = sum(_OPERATIONS.get(one) == ROUTER for one in operations)
    others = zip(operations, kernels["class"].to_list(), strict=True)
    return choices == sum(1 for one, kernel_class in others if kernel_class == "GEMM" and one not in _OPERATIONS)


def _find_experts(module: str) -> str | None:
    """The path of the routed experts that a module is, or is part of."""
    labels = module.split(".")
    for depth, label in enumerate(labels, start=1):
        if _SHARED.match(label):
            return None
        if _EXPERTS.fullmatch(label):
            return ".".join(labels[:depth])
    return None


def _list_parents(module: str) -> Iterable[str]:
    """The module itself and those around it, the innermost first."""
    while module:
        yield module
        module = module.rpartition(".")[0]


# --- How many tokens --------------------------------------------------------------------------------------------------


def find_expert_loads(profile: Profile) -> tuple[ExpertLoad, ...]:
    """The tokens of each expert, by module in the order of their names; empty if unknown."""
    counted = profile.recording.manifest.expert_tokens
    if counted:
        return tuple(ExpertLoad(module=module, tokens=tokens) for module, tokens in counted.items() if sum(tokens) > 0)
    found = find_expert_kernels(profile)
    return tuple(_read_rows(list_products(profile, found, PRODUCTS), list_products(profile, found, ROUTER)))


def list_products(profile: Profile, kernels: pl.DataFrame, part: str) -> pl.DataFrame:
    """Return the forward GEMMs of a part that are one GEMM each, with m, n and k, in the order of their start."""
    kernels = kernels.filter(
        (pl.col("expert_part") == part)
        & pl.col("mixture").is_not_null()
        & (pl.col("class") == "GEMM")
        & (pl.col("phase").fill_null("forward") == "forward")
        & ~pl.col("recomputed").fill_null(value=False)
    ).sort("start_ns", maintain_order=True)
    kernels = kernels.with_columns(shapes=look_up(profile.ops, "shapes", kernels["op_row"]))
    return add_product_sizes(kernels).filter(pl.col("batch") == 1)


def _read_rows(products: pl.DataFrame, routers: pl.DataFrame) -> Iterable[ExpertLoad]:
    """Loads from the rows of one weight's GEMMs in the first step: the weight that most of them have. A router has a
    column for each expert."""
    columns = dict(routers.group_by("mixture").agg(pl.col("n").first()).iter_rows())
    for (mixture,), own in products.group_by(["mixture"], maintain_order=True):
        experts = _find_experts(own["module"][0]) or str(mixture)
        first = own.filter(pl.col("step").eq_missing(own["step"][0]))
        if all(module[len(experts) + 1 :].partition(".")[0].isdecimal() for module in first["module"].to_list()):
            tokens = _add_up_modules(experts, first)
        else:
            per_weight = [one for _, one in first.group_by("module", "n", "k", maintain_order=True)]
            tokens = max(per_weight, key=lambda one: one.height)["m"].to_list()
        if len(tokens) > 1:
            idle = max(0, columns.get(mixture, 0) - len(tokens))
            is_complete = mixture in columns
            yield ExpertLoad(module=experts, tokens=(*tokens, *[0] * idle), is_complete=is_complete)


def _add_up_modules(experts: str, products: pl.DataFrame) -> list[int]:
    """The rows of `experts.3.w1`: every expert has the same weights, and the first one of each counts."""
    sums: dict[str, dict[str, int]] = {}
    for module, rows in products.select("module", "m").iter_rows():
        number, _, weight = module[len(experts) + 1 :].partition(".")
        own = sums.setdefault(number, {})
        own[weight] = own.get(weight, 0) + rows
    return [next(iter(own.values())) for own in sums.values()]


# --- Tables -----------------------------------------------------------------------------------------------------------


def experts_table(profile: Profile) -> Table:
    """Return the kernel time of mixtures of experts by part."""
    times = profile.time_by("expert_part", kernels=find_expert_kernels(profile)).iter_rows(named=True)
    rows: list[tuple[Cell, ...]] = [
        (one["expert_part"], one["time_ns"] / profile.num_steps / _MS, one["share"], one["count"] / profile.num_steps)
        for one in sorted(times, key=lambda one: _PARTS.index(one["expert_part"]))
    ]
    loads = find_expert_loads(profile)
    return Table(
        title="Time of mixtures of experts",
        columns=(
            Column(key="part", label="part"),
            Column(key="kernel_ms", label=f"{kernel_word(profile)}s ms", kind="ms"),
            Column(key="share", label="share", kind="share"),
            Column(key="count", label="count", kind="number"),
        ),
        rows=tuple(rows),
        notes=(f"share: of total {kernel_word(profile)} time", say_loads(loads))
        if rows
        else ("the recording has no experts",),
    )


def say_loads(loads: Sequence[ExpertLoad]) -> str:
    """How evenly tokens are spread over the experts."""
    if not loads:
        return "tokens per expert: not in the recording"
    worst = max(loads, key=lambda one: one.imbalance)
    least = "" if worst.is_complete else "at least "
    busiest = f"the busiest expert has {least}{worst.imbalance:.2f} times the mean number of tokens, in {worst.module}"
    if len(loads) == 1:
        return busiest
    mean = sum(one.imbalance for one in loads) / len(loads)
    return f"{busiest}; {mean:.2f} times on average over {count_noun(len(loads), 'layer')}"


def loads_table(loads: Sequence[ExpertLoad]) -> Table:
    rows = tuple(
        (
            one.module,
            len(one.tokens),
            min(one.tokens),
            sum(one.tokens) / len(one.tokens),
            max(one.tokens),
            one.imbalance,
        )
        for one in loads
    )
    is_complete = all(one.is_complete for one in loads)
    return Table(
        title="Tokens per expert",
        columns=(
            Column(key="module", label="experts"),
            Column(key="experts", label="number", kind="number"),
            Column(key="min", label="fewest", kind="number"),
            Column(key="mean", label="mean", kind="number"),
            Column(key="max", label="most", kind="number"),
            Column(key="imbalance", label="most / mean", kind="ratio"),
        ),
        rows=rows,
        notes=() if is_complete else ("from the rows of their GEMMs: an expert without tokens has none",),
    )

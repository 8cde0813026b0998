"""Rules about mixtures of experts: experts that run one after the other, and tokens that are spread unevenly."""

import polars as pl

from stepscope.explain.rules.evidence import WORTH_SAYING, StepEvidence, ms
from stepscope.explain.rules.rule import Hit, Rule, count_per_step
from stepscope.explain.trace.experts import (
    PRODUCTS,
    ROUTER,
    find_expert_kernels,
    find_expert_loads,
    list_products,
    say_loads,
)
from stepscope.recording.nesting import around
from stepscope.units import count_noun, say_percent

FEWEST_IN_TURN = 4  # GEMMs of one weight in a layer: fewer are the gate and up projections of a single expert
LEAST_IMBALANCE = 1.5
LEAST_EXPERTS = 0.05  # of the step
_GROUPED = r"grouped_mm"


def find_experts_in_turn(evidence: StepEvidence) -> Hit | None:
    profile = evidence.profile
    kernels = find_expert_kernels(profile, evidence.kernels)
    products = list_products(profile, _without_grouped(evidence, kernels), PRODUCTS)
    in_turn = products.group_by("mixture", "step", "n", "k").agg(in_turn=pl.len(), least=pl.min("m"), most=pl.max("m"))
    # A batch that is processed in parts calls the router once for each of them.
    routers = list_products(profile, kernels, ROUTER).group_by("mixture", "step").agg(calls=pl.len())
    in_turn = in_turn.join(routers, on=["mixture", "step"], how="left", nulls_equal=True)
    in_turn = in_turn.filter(pl.col("in_turn") >= FEWEST_IN_TURN * pl.col("calls").fill_null(1))
    if not in_turn.height:
        return None
    own = kernels.filter(pl.col("expert_part") != ROUTER)
    time = evidence.per_step(own)
    if time < LEAST_EXPERTS * evidence.step_ns:
        return None
    layers = in_turn["mixture"].n_unique()
    rows = sorted({*in_turn["least"].to_list(), *in_turn["most"].to_list()})
    text = (
        f"{count_per_step(evidence, products.height, 'GEMM')} in forward, of {rows[0]} to {rows[-1]} rows each, "
        f"in {count_noun(layers, 'layer')}; with what moves tokens and with "
        f"backward, experts take {ms(time)} and {count_per_step(evidence, own.height, 'kernel')}"
    )
    title = f"Experts run one after the other: {say_percent(time / evidence.step_ns)} {evidence.clock.say_of_step}"
    return Hit(title=title, evidence=text, about_ns=time)


def _without_grouped(evidence: StepEvidence, kernels: pl.DataFrame) -> pl.DataFrame:
    """The kernels that no grouped GEMM launches. For some dtypes, it is a loop itself."""
    ops = evidence.profile.ops
    grouped = ops.filter(pl.col("name").str.contains(_GROUPED))
    around_it = around(grouped, "name", kernels.select("process", "thread", ns="launch_ns"))
    return kernels.filter(around_it.is_null())


def find_uneven_experts(evidence: StepEvidence) -> Hit | None:
    loads = find_expert_loads(evidence.profile)
    if not loads:
        return None
    kernels = find_expert_kernels(evidence.profile, evidence.kernels)
    time = evidence.per_step(kernels.filter(pl.col("expert_part") == PRODUCTS))
    mean = sum(one.imbalance for one in loads) / len(loads)
    if mean < LEAST_IMBALANCE or time < WORTH_SAYING * evidence.step_ns:
        return None
    idle = sum(tokens == 0 for one in loads for tokens in one.tokens)
    text = f"{say_loads(loads)}; their GEMMs take {ms(time)} {evidence.clock.say_per_step}"
    if idle:
        text += f"; {count_noun(idle, 'expert')} in {count_noun(len(loads), 'layer')} had no token"
    return Hit(title=f"Experts are loaded unevenly: the busiest has {mean:.1f} times the mean", evidence=text)


RULES = (
    Rule(
        code="SS031",
        title="Experts run one after the other",
        action="Compute all experts of a layer with one grouped GEMM",
        check=find_experts_in_turn,
        meaning="""A loop over the experts selects the tokens of each one, multiplies them and adds the result. These
            are many small kernels that do not fill a GPU, and finding out which tokens an expert has often makes the
            CPU wait for the GPU. A grouped GEMM takes the tokens of all experts, sorted, in one launch.""",
        seen="""At least 4 GEMMs of the same width and depth in one layer's experts in forward, by module, and experts
            that take at least 5% of the step.""",
        saving="Not estimated: it depends on how well the small GEMMs fill the GPU.",
        builtin="not needed: it has no experts",
        own=(
            'model.set_experts_implementation("grouped_mm")  # transformers 5',
            "# your own model: torch.nn.functional.grouped_mm(sorted_tokens, weights, offs=ends_of_experts)",
        ),
    ),
    Rule(
        code="SS032",
        title="Experts are loaded unevenly",
        action="Balance the router: weight its auxiliary loss more, or add a bias per expert",
        check=find_uneven_experts,
        meaning="""The router sends most tokens to few experts. On one GPU a grouped GEMM hides this; with experts on
            several ranks, all of them wait for the rank with the busiest expert. Experts without tokens do not
            learn.""",
        seen="""The tokens of each expert in a recorded model, or the rows of its GEMMs: the busiest expert has at least
            1.5 times the mean, on average over layers. A random router over few tokens is uneven as well.""",
        saving="Not estimated.",
        builtin="not needed: it has no experts",
        own=(
            "model.config.output_router_logits = True  # transformers adds the auxiliary loss",
            "model.config.router_aux_loss_coef *= 2  # its weight",
        ),
        on_cpu=True,
    ),
)

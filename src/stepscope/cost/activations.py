"""Saved activations of the built-in model, tensor by tensor, and the peak memory of a step with checkpointing.

Memory is counted in distinct storages that nodes of the graph hold, without parameters, buffers and inputs.
`measure.memory.saved_tensors` measures the same on a real graph, and tests check that both agree to the byte.

A formula is text: `B·L·d·4` is evaluated with the symbols of a shape, so the formula in a table is the one computed.

| symbol | | symbol | |
| --- | --- | --- | --- |
| B | batch | H | query heads |
| L | context | G | key/value heads |
| d | d_model | D | head dimension, d/H |
| d_ff | feed-forward width | R | query heads per key/value head, H/G |
| V | vocabulary | N | blocks |

Exact for fp32 (and tf32, which stores the same) with unfused attention, on any device. Under autocast, GEMMs save
16-bit copies of their inputs, one per GEMM even if they share a tensor, and of their weights; sums stay in fp32. `sdpa`
is counted as PyTorch's CPU kernel saves it. A CUDA kernel may write its output in the layout that the output projection
reads, which saves B·L·d, and adds a few bytes of random state.
"""

import math
from collections.abc import Iterable, Mapping

import msgspec

from stepscope.cost.model import parameters
from stepscope.spec import Attention, Checkpointing, ModelShape, Precision, Workload

PARTS = ("embedding", "norm", "projections", "rope", "attention", "ffn", "head", "loss", "weights")
NUMBER, EXPONENTIALS = "scale", "exponentials"
NOTHING_KEPT = {
    "embedding": "its backward only needs the ids, which are the input",
    "rope": "the backward of a rotation only needs cosines and sines, which are buffers",
}


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor saved for backward. `formula` is the size of one; `count` is how many a block, or the rest of the model,
    has."""

    part: str
    tensor: str
    formula: str
    each_bytes: int
    count: int
    why: str

    @property
    def bytes(self) -> int:
        return self.count * self.each_bytes


class Activations(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors saved by one block, and by the model outside its blocks."""

    block: tuple[Term, ...]
    outside: tuple[Term, ...]
    num_layers: int

    @property
    def block_bytes(self) -> int:
        return total_bytes(self.block)

    @property
    def outside_bytes(self) -> int:
        return total_bytes(self.outside)

    @property
    def bytes(self) -> int:
        return self.num_layers * self.block_bytes + self.outside_bytes

    def part_bytes(self, part: str) -> int:
        inside, outside = _select(self.block, part), _select(self.outside, part)
        return self.num_layers * total_bytes(inside) + total_bytes(outside)

    def part_formula(self, part: str) -> str:
        """Return `N·(...)` for the N blocks, plus the tensors saved outside them."""
        inside, outside = join_formulas(_select(self.block, part)), join_formulas(_select(self.outside, part))
        parts = [f"N·({inside})"] * (inside != "0") + [outside] * (outside != "0")
        return " + ".join(parts) or "0"


def saved_activations(
    shape: ModelShape, *, batch: int, context: int, precision: Precision = "fp32", attention: Attention = "naive"
) -> Activations:
    """Return the tensors that a forward pass saves for backward."""
    count = _Counter(_symbols(shape, batch, context), precision)
    return Activations(
        block=(*_attention(count, attention), *_feed_forward(count), *count.norm(2)),
        outside=(*count.norm(1), *_head(count)),
        num_layers=shape.num_layers,
    )


def feed_forward_activations(
    *, batch: int, context: int, d_model: int, d_ff: int, precision: Precision = "fp32"
) -> tuple[Term, ...]:
    """Return the tensors that `down(silu(gate(x)) * up(x))` saves. A common estimate, the inputs of its three GEMMs
    (`product_inputs_bytes`), is wrong in both directions: `gate` and `up` read the same `x`, and each elementwise
    product in between saves both of its factors."""
    symbols = {"B": batch, "L": context, "d": d_model, "d_ff": d_ff}
    return tuple(term for term in _feed_forward(_Counter(symbols, precision)) if term.part == "ffn")


def product_inputs_bytes(*, batch: int, context: int, d_model: int, d_ff: int) -> int:
    """Return the bytes of the inputs of the three feed-forward GEMMs in fp32, each counted: B·L·(2·d + d_ff)·4."""
    return batch * context * (2 * d_model + d_ff) * 4


def residual_bytes(shape: ModelShape, *, batch: int, context: int) -> int:
    """Return the bytes of the residual stream, B·L·d·4: fp32 even under autocast, and saved once per checkpointed
    group."""
    return multiply_out("B·L·d·4", _symbols(shape, batch, context))


def _select(terms: Iterable[Term], part: str) -> list[Term]:
    return [term for term in terms if term.part == part]


def total_bytes(terms: Iterable[Term]) -> int:
    return sum(term.bytes for term in terms)


def join_formulas(terms: Iterable[Term]) -> str:
    """Return terms as one sum, equal ones combined: `B·L·d·4 + 5·B·L·d_ff·4`; `0` for none."""
    counts: dict[str, int] = {}
    for term in terms:
        counts[term.formula] = counts.get(term.formula, 0) + term.count
    return " + ".join(f"{count}·{formula}" if count > 1 else formula for formula, count in counts.items()) or "0"


# --- The terms ---------------------------------------------------------------------------------------------------


class _Counter:
    """Makes terms. `w` in a formula is the width of GEMM inputs: 4 bytes, or 2 under autocast."""

    def __init__(self, symbols: dict[str, int], precision: Precision) -> None:
        self.symbols = symbols
        self.narrow = precision in ("bf16", "fp16")

    def term(self, part: str, tensor: str, formula: str, why: str, count: int = 1) -> Term:
        width = 2 if self.narrow else 4
        return make_term(part, tensor, formula, why, symbols=self.symbols, width=width, count=count)

    def norm(self, count: int) -> list[Term]:
        why = "gain times the normalized input: the gain's gradient needs the other factor"
        return [
            self.term("norm", "input, the residual stream", "B·L·d·4", "square and multiplication", count),
            self.term("norm", "inverse root mean square", "B·L·4", "its own backward, and the multiplication", count),
            self.term("norm", "normalized input", "B·L·d·4", why, count),
        ]

    def weights(self, tensor: str, formula: str, count: int = 1) -> list[Term]:
        """Return autocast's copies of weights; in fp32, GEMMs read the parameters themselves."""
        why = "the GEMM reads a 16-bit copy"
        return [self.term("weights", tensor, formula, why, count)] if self.narrow else []


def _attention(count: _Counter, attention: Attention) -> list[Term]:
    shared = "autocast copies it for each GEMM" if count.narrow else "one tensor, read by three GEMMs"
    return [
        count.term("projections", "input of q, k and v", "B·L·d·w", shared, 3 if count.narrow else 1),
        *(_written_out(count) if attention == "naive" else _fused(count)),
        count.term("projections", "input of the output projection", "B·L·d·w", "input of a GEMM"),
        *count.weights("q and output", "d·d·2", 2),
        *count.weights("k and v", "G·D·d·2", 2),
    ]


def _written_out(count: _Counter) -> list[Term]:
    exponentials = "exp saves its result, and the division reads it too"
    return [
        count.term("attention", "scaled queries", "B·L·d·w", "input of a GEMM"),
        count.term("attention", "keys", "B·L·G·D·w", "input of a GEMM"),
        count.term("attention", "causal mask", "R·L·L", "masks the gradient"),
        count.term("attention", NUMBER, "8", "a scalar is saved as a tensor"),
        count.term("attention", "exponentials", "B·H·L·L·4", exponentials),
        count.term("attention", "sums of the exponentials", "B·H·L·4", "division"),
        count.term("attention", "attention weights", "B·H·L·L·w", "input of a GEMM"),
        count.term("attention", "values", "B·L·G·D·w", "input of a GEMM"),
    ]


def _fused(count: _Counter) -> list[Term]:
    return [
        count.term("attention", "queries", "B·L·d·w", "scores are recomputed"),
        count.term("attention", "keys", "B·L·G·D·w", "scores are recomputed"),
        count.term("attention", "logarithms of the sums", "B·H·L·4", "recompute the weights from the scores"),
        count.term("attention", "values", "B·L·G·D·w", "input of a GEMM"),
        count.term("attention", "output", "B·L·d·w", "gradient of the softmax without its weights"),
    ]


def _feed_forward(count: _Counter) -> list[Term]:
    shared = "autocast copies it for each GEMM" if count.narrow else "one tensor, read by two GEMMs"
    sigmoid = "its own backward, and silu(gate) = gate · sigmoid(gate)"
    return [
        count.term("ffn", "input of gate and up", "B·L·d·w", shared, 2 if count.narrow else 1),
        count.term("ffn", "gate", "B·L·d_ff·w", "factor of silu(gate) = gate · sigmoid(gate)"),
        count.term("ffn", "sigmoid(gate)", "B·L·d_ff·w", sigmoid),
        count.term("ffn", "silu(gate)", "B·L·d_ff·w", "factor of silu(gate) · up"),
        count.term("ffn", "up", "B·L·d_ff·w", "factor of silu(gate) · up"),
        count.term("ffn", "silu(gate) · up", "B·L·d_ff·w", "input of the down projection"),
        *count.weights("gate, up and down", "d·d_ff·2", 3),
    ]


def _head(count: _Counter) -> list[Term]:
    return [
        count.term("head", "input", "B·L·d·w", "input of a GEMM"),
        count.term("loss", EXPONENTIALS, "B·L·V·4", "exp saves its result"),
        count.term("loss", "sums of the exponentials", "B·L·4", "logarithm"),
        count.term("loss", "logits", "B·L·V·w", "gather saves its input"),
        *count.weights("head", "V·d·2"),
    ]


def _symbols(shape: ModelShape, batch: int, context: int) -> dict[str, int]:
    return {
        "B": batch,
        "L": context,
        "d": shape.d_model,
        "d_ff": shape.d_ff,
        "H": shape.num_heads,
        "G": shape.num_kv_heads,
        "D": shape.head_dim,
        "R": shape.num_heads // shape.num_kv_heads,
        "V": shape.vocab,
    }


def make_term(
    part: str, tensor: str, formula: str, why: str, *, symbols: Mapping[str, int], width: int, count: int = 1
) -> Term:
    """Return a term; `w` in the formula is `width`, in bytes."""
    text = formula.replace("·w", f"·{width}")
    return Term(part=part, tensor=tensor, formula=text, each_bytes=multiply_out(text, symbols), count=count, why=why)


def multiply_out(formula: str, symbols: Mapping[str, int]) -> int:
    """Return the value of a formula."""
    return math.prod(symbols[factor] if factor in symbols else int(factor) for factor in formula.split("·"))


# --- Checkpointing --------------------------------------------------------------------------------------------------


class StepPeak(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted peak memory of a step, and what it consists of. Temporary tensors of operations come on top, a few
    tensors of a block's size; only those of the loss are counted, because they can be the largest."""

    checkpoint: str
    parameter_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    activation_bytes: int
    moment: str  # the end of forward, the backward of the loss, or the module whose backward begins

    @property
    def bytes(self) -> int:
        return self.parameter_bytes + self.optimizer_bytes + self.gradient_bytes + self.activation_bytes


def step_peak(workload: Workload) -> StepPeak:
    """Return the predicted peak of a step. Groups of k blocks save the inputs of N/k groups after forward, and the
    activations of k blocks while backward works on a group. Both are freed block by block as gradients appear, so the
    peak is searched over all blocks: with few tokens it is at the first block, next to all gradients; with many at the
    last, next to all inputs. In a step with several passes, all gradients exist from the second pass on."""
    shape = _builtin(workload)
    kept = activations_of(workload)
    residual = residual_bytes(shape, batch=workload.micro_batch, context=workload.context)
    held = [("forward", 0, _held_after_forward(workload, kept))]
    counted = parameters(shape)
    if workload.mode in ("forward-backward", "train"):
        held.append(("loss", 0, saved_bytes(workload) + _loss_gradients(kept)))
        held += [
            (f"blocks.{block}", gradients, _held_at(block, kept, residual, workload.checkpointing))
            for block, gradients in enumerate(_gradients_before(shape))
        ]
        held.append(("embedding", 4 * counted.total, 0))
        if workload.passes > 1:
            held = [(moment, 4 * counted.total, activations) for moment, _, activations in held]
    moment, gradient_bytes, activation_bytes = max(held, key=lambda one: one[1] + one[2])
    return StepPeak(
        checkpoint=workload.checkpoint,
        parameter_bytes=4 * counted.total,
        optimizer_bytes=8 * counted.total if workload.mode == "train" and workload.optimizer != "sgd" else 0,
        gradient_bytes=gradient_bytes,
        activation_bytes=activation_bytes,
        moment=moment,
    )


def best_checkpoint(workload: Workload) -> StepPeak:
    """Return the checkpoint setting with the lowest predicted peak. Among equal ones, the one that recomputes least:
    none, then groups, then nested groups."""
    sizes = range(1, _builtin(workload).num_layers + 1)
    settings = ["none", *map(str, sizes), *(f"nested:{size}" for size in sizes if size > 1)]
    peaks = [step_peak(msgspec.structs.replace(workload, checkpoint=setting)) for setting in settings]
    return min(peaks, key=lambda peak: peak.bytes)


def activations_of(workload: Workload) -> Activations:
    """Return the saved activations of one pass of the built-in model, without checkpointing."""
    return saved_activations(
        _builtin(workload),
        batch=workload.micro_batch,
        context=workload.context,
        precision=workload.precision,
        attention=workload.attention or "naive",
    )


def _builtin(workload: Workload) -> ModelShape:
    if not isinstance(workload.model, ModelShape):
        raise ValueError(f"formulas exist for the built-in model only, got `{workload.model.name}`")
    return workload.model


def _gradients_before(shape: ModelShape) -> list[int]:
    """Return the bytes of gradients that exist when backward reaches each block: those of the head, the last norm and
    the blocks after it. A tied head shares the gradient of the embedding."""
    counted, layers = parameters(shape), shape.num_layers
    block = 4 * ((counted.attention + counted.feed_forward) // layers + 2 * shape.d_model)
    first = 4 * (shape.vocab + 1) * shape.d_model
    return [first + behind * block for behind in reversed(range(layers))]


def saved_bytes(workload: Workload) -> int:
    """Return the bytes that a forward pass saves for backward. With checkpointing, these are the inputs of groups
    instead of their activations."""
    kept = activations_of(workload)
    if workload.checkpointing is None:
        return kept.bytes
    groups = math.ceil(kept.num_layers / workload.checkpointing.every)
    residual = residual_bytes(_builtin(workload), batch=workload.micro_batch, context=workload.context)
    # A scalar in the code does not pass through a checkpoint's hooks and stays saved.
    numbers = kept.num_layers * sum(term.bytes for term in kept.block if term.tensor == NUMBER)
    return groups * residual + numbers + kept.outside_bytes


def _held_after_forward(workload: Workload, kept: Activations) -> int:
    """Autocast keeps its 16-bit copies of weights until the end of the forward pass, saved for backward or not."""
    copies = kept.num_layers * total_bytes(_select(kept.block, "weights"))
    return saved_bytes(workload) + (copies if workload.checkpointing else 0)


def _loss_gradients(kept: Activations) -> int:
    """Backward starts with a gradient of the logits through the target's logit, which replaces the logits, and then
    adds one through the exponentials, of the same size, in addition to everything saved."""
    return sum(term.bytes for term in kept.outside if term.tensor == EXPONENTIALS)


def _held_at(block: int, kept: Activations, residual: int, checkpointing: Checkpointing | None) -> int:
    """Return the bytes held when backward reaches a block: the inputs of earlier groups, and the activations of its own
    group. The input of a group is among the activations of its first block."""
    if checkpointing is None:
        return (block + 1) * kept.block_bytes
    group, place = divmod(block, checkpointing.every)
    if checkpointing.nested:
        return (group + place) * residual + kept.block_bytes
    return group * residual + (place + 1) * kept.block_bytes

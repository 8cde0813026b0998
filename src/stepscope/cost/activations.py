"""What autograd keeps for backward in the built-in model, tensor by tensor, and the peak of a step that recomputes it.

The unit of account is memory: distinct storages that a node of the graph holds, without parameters, buffers and inputs.
`measure.memory.saved_tensors` reads the same off a real graph, and tests hold the two together to the byte.

A formula is its own text. `B·L·d·4` is multiplied out from the symbols of a shape, so what a table shows and what is
computed cannot differ.

| symbol | | symbol | |
| --- | --- | --- | --- |
| B | batch | H | query heads |
| L | context | G | key/value heads |
| d | width of the model | D | width of a head, d/H |
| d_ff | width of the feed-forward | R | query heads a key/value head, H/G |
| V | vocabulary | N | blocks |

Exact for fp32 (and tf32, which stores the same) with attention written out, on any device. Under autocast matrix
products keep 16-bit copies of their inputs, one for each product although they share a tensor, and of their weights;
sums stay in fp32. `sdpa` is counted as PyTorch's CPU kernel keeps it. A CUDA kernel may lay its output out such that
the output projection reads it in place, which saves B·L·d, and adds a few bytes of random state.
"""

import math
from collections.abc import Iterable, Mapping

import msgspec

from stepscope.cost.model import parameters
from stepscope.spec import Attention, Checkpointing, ModelShape, Precision, Workload

PARTS = ("embedding", "norm", "projections", "rope", "attention", "ffn", "head", "loss", "weights")
NUMBER, EXPONENTIALS = "scale", "exponentials"
NOTHING_KEPT = {
    "embedding": "its backward needs the ids alone, which are the input",
    "rope": "a rotation's backward needs cosines and sines alone, which are the model's buffers",
}


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that is kept: `formula` is of one, and `count` how many of it a block, or the rest of the model, has."""

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
    """What one block keeps, and what the model keeps around its blocks."""

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
        """`N·(...)` for what the N blocks keep, and what is kept outside of them."""
        inside, outside = join_formulas(_select(self.block, part)), join_formulas(_select(self.outside, part))
        parts = [f"N·({inside})"] * (inside != "0") + [outside] * (outside != "0")
        return " + ".join(parts) or "0"


def saved_activations(
    shape: ModelShape, *, batch: int, context: int, precision: Precision = "fp32", attention: Attention = "naive"
) -> Activations:
    """What a forward pass leaves behind for backward."""
    count = _Counter(_symbols(shape, batch, context), precision)
    return Activations(
        block=(*_attention(count, attention), *_feed_forward(count), *count.norm(2)),
        outside=(*count.norm(1), *_head(count)),
        num_layers=shape.num_layers,
    )


def feed_forward_activations(
    *, batch: int, context: int, d_model: int, d_ff: int, precision: Precision = "fp32"
) -> tuple[Term, ...]:
    """Of `down(silu(gate(x)) * up(x))` alone. Counted by hand it is often the inputs of its three products
    (`product_inputs_bytes`), which misses on both sides: `gate` and `up` read one and the same `x`, and each product by
    element in between keeps both of its factors."""
    symbols = {"B": batch, "L": context, "d": d_model, "d_ff": d_ff}
    return tuple(term for term in _feed_forward(_Counter(symbols, precision)) if term.part == "ffn")


def product_inputs_bytes(*, batch: int, context: int, d_model: int, d_ff: int) -> int:
    """The inputs of the feed-forward's three matrix products in fp32, each counted for itself: B·L·(2·d + d_ff)·4."""
    return batch * context * (2 * d_model + d_ff) * 4


def residual_bytes(shape: ModelShape, *, batch: int, context: int) -> int:
    """The stream between blocks, B·L·d·4: fp32 under autocast too, and what a checkpoint keeps for a group."""
    return multiply_out("B·L·d·4", _symbols(shape, batch, context))


def _select(terms: Iterable[Term], part: str) -> list[Term]:
    return [term for term in terms if term.part == part]


def total_bytes(terms: Iterable[Term]) -> int:
    return sum(term.bytes for term in terms)


def join_formulas(terms: Iterable[Term]) -> str:
    """Terms as one sum, like ones together: `B·L·d·4 + 5·B·L·d_ff·4`; `0` for none."""
    counts: dict[str, int] = {}
    for term in terms:
        counts[term.formula] = counts.get(term.formula, 0) + term.count
    return " + ".join(f"{count}·{formula}" if count > 1 else formula for formula, count in counts.items()) or "0"


# --- Term by term ---------------------------------------------------------------------------------------------------


class _Counter:
    """Makes terms. `w` in a formula is the width of what matrix products read: 4 bytes, or 2 under autocast."""

    def __init__(self, symbols: dict[str, int], precision: Precision) -> None:
        self.symbols = symbols
        self.narrow = precision in ("bf16", "fp16")

    def term(self, part: str, tensor: str, formula: str, why: str, count: int = 1) -> Term:
        width = 2 if self.narrow else 4
        return make_term(part, tensor, formula, why, symbols=self.symbols, width=width, count=count)

    def norm(self, count: int) -> list[Term]:
        why = "gain times the normalised input: the gain's gradient needs the other factor"
        return [
            self.term("norm", "input, the residual stream", "B·L·d·4", "square and product", count),
            self.term("norm", "inverse root mean square", "B·L·4", "its own backward, and the product", count),
            self.term("norm", "normalised input", "B·L·d·4", why, count),
        ]

    def weights(self, tensor: str, formula: str, count: int = 1) -> list[Term]:
        """Autocast makes them; in fp32 products read the parameters themselves."""
        why = "the product reads a 16-bit copy"
        return [self.term("weights", tensor, formula, why, count)] if self.narrow else []


def _attention(count: _Counter, attention: Attention) -> list[Term]:
    shared = "autocast copies it for each product" if count.narrow else "one tensor, which three products read"
    return [
        count.term("projections", "input of q, k and v", "B·L·d·w", shared, 3 if count.narrow else 1),
        *(_written_out(count) if attention == "naive" else _fused(count)),
        count.term("projections", "input of the output projection", "B·L·d·w", "product"),
        *count.weights("q and output", "d·d·2", 2),
        *count.weights("k and v", "G·D·d·2", 2),
    ]


def _written_out(count: _Counter) -> list[Term]:
    exponentials = "exp keeps its result, and the division reads the same"
    return [
        count.term("attention", "scaled queries", "B·L·d·w", "product"),
        count.term("attention", "keys", "B·L·G·D·w", "product"),
        count.term("attention", "causal mask", "R·L·L", "where no gradient goes"),
        count.term("attention", NUMBER, "8", "a number is kept as a tensor of its own"),
        count.term("attention", "exponentials", "B·H·L·L·4", exponentials),
        count.term("attention", "sums of the exponentials", "B·H·L·4", "division"),
        count.term("attention", "attention weights", "B·H·L·L·w", "product"),
        count.term("attention", "values", "B·L·G·D·w", "product"),
    ]


def _fused(count: _Counter) -> list[Term]:
    return [
        count.term("attention", "queries", "B·L·d·w", "scores are computed again"),
        count.term("attention", "keys", "B·L·G·D·w", "scores are computed again"),
        count.term("attention", "logarithms of the sums", "B·H·L·4", "scores and these give the weights again"),
        count.term("attention", "values", "B·L·G·D·w", "product"),
        count.term("attention", "output", "B·L·d·w", "the softmax's gradient, without its weights"),
    ]


def _feed_forward(count: _Counter) -> list[Term]:
    shared = "autocast copies it for each product" if count.narrow else "one tensor, which two products read"
    sigmoid = "its own backward, and silu(gate) = gate · sigmoid(gate)"
    return [
        count.term("ffn", "input of gate and up", "B·L·d·w", shared, 2 if count.narrow else 1),
        count.term("ffn", "gate", "B·L·d_ff·w", "factor of silu(gate) = gate · sigmoid(gate)"),
        count.term("ffn", "sigmoid(gate)", "B·L·d_ff·w", sigmoid),
        count.term("ffn", "silu(gate)", "B·L·d_ff·w", "factor of silu(gate) · up"),
        count.term("ffn", "up", "B·L·d_ff·w", "factor of silu(gate) · up"),
        count.term("ffn", "silu(gate) · up", "B·L·d_ff·w", "input of the product with down"),
        *count.weights("gate, up and down", "d·d_ff·2", 3),
    ]


def _head(count: _Counter) -> list[Term]:
    return [
        count.term("head", "input", "B·L·d·w", "product"),
        count.term("loss", EXPONENTIALS, "B·L·V·4", "exp keeps its result"),
        count.term("loss", "sums of the exponentials", "B·L·4", "logarithm"),
        count.term("loss", "logits", "B·L·V·w", "gather keeps what it gathered from"),
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
    """`w` in the formula is `width`, in bytes."""
    text = formula.replace("·w", f"·{width}")
    return Term(part=part, tensor=tensor, formula=text, each_bytes=multiply_out(text, symbols), count=count, why=why)


def multiply_out(formula: str, symbols: Mapping[str, int]) -> int:
    """What the text of a formula comes to."""
    return math.prod(symbols[factor] if factor in symbols else int(factor) for factor in formula.split("·"))


# --- Checkpointing --------------------------------------------------------------------------------------------------


class StepPeak(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a step holds at once, and what it consists of at that moment. What an operation needs while it runs
    comes on top, a few tensors of a block's size; only the loss's share of it is counted, which can be the most of
    all."""

    checkpoint: str
    parameter_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    activation_bytes: int
    moment: str  # the end of forward, the loss's backward, or the module whose backward begins

    @property
    def bytes(self) -> int:
        return self.parameter_bytes + self.optimizer_bytes + self.gradient_bytes + self.activation_bytes


def step_peak(workload: Workload) -> StepPeak:
    """Groups of k keep the inputs of N/k groups after forward, and the activations of k blocks while backward works on
    a group. But both go block by block as gradients come, so the peak is searched over all blocks: with few tokens it
    is at the first one, where all gradients stand beside one group; with many at the last, where all inputs do. Where a
    step has several passes, all gradients are there from the second on."""
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
    """The setting with the least predicted peak, all else as in `workload`. Of equal ones it is the one that computes
    least again: none, then groups, then nested ones."""
    sizes = range(1, _builtin(workload).num_layers + 1)
    settings = ["none", *map(str, sizes), *(f"nested:{size}" for size in sizes if size > 1)]
    peaks = [step_peak(msgspec.structs.replace(workload, checkpoint=setting)) for setting in settings]
    return min(peaks, key=lambda peak: peak.bytes)


def activations_of(workload: Workload) -> Activations:
    """Of one pass of a workload's built-in model, as if nothing were checkpointed."""
    return saved_activations(
        _builtin(workload),
        batch=workload.micro_batch,
        context=workload.context,
        precision=workload.precision,
        attention=workload.attention or "naive",
    )


def _builtin(workload: Workload) -> ModelShape:
    if not isinstance(workload.model, ModelShape):
        raise ValueError(f"closed forms are of the built-in model, not of `{workload.model.name}`")
    return workload.model


def _gradients_before(shape: ModelShape) -> list[int]:
    """Bytes of gradients that are there when backward comes to each block: the head's, the last norm's, and those of
    the blocks behind. A tied head's gradient is the embedding's."""
    counted, layers = parameters(shape), shape.num_layers
    block = 4 * ((counted.attention + counted.feed_forward) // layers + 2 * shape.d_model)
    first = 4 * (shape.vocab + 1) * shape.d_model
    return [first + behind * block for behind in reversed(range(layers))]


def saved_bytes(workload: Workload) -> int:
    """What a forward pass leaves behind for backward, checkpointed as the workload says: the inputs of its groups in
    place of their activations."""
    kept = activations_of(workload)
    if workload.checkpointing is None:
        return kept.bytes
    groups = math.ceil(kept.num_layers / workload.checkpointing.every)
    residual = residual_bytes(_builtin(workload), batch=workload.micro_batch, context=workload.context)
    # A plain number in the code is not handed to a checkpoint's hooks and stays.
    numbers = kept.num_layers * sum(term.bytes for term in kept.block if term.tensor == NUMBER)
    return groups * residual + numbers + kept.outside_bytes


def _held_after_forward(workload: Workload, kept: Activations) -> int:
    """The 16-bit copies of weights live until autocast ends with the forward pass, kept for backward or not."""
    copies = kept.num_layers * total_bytes(_select(kept.block, "weights"))
    return saved_bytes(workload) + (copies if workload.checkpointing else 0)


def _loss_gradients(kept: Activations) -> int:
    """Backward begins with a gradient of the logits through the target's logit, which takes the place of the logits
    themselves, and then adds one through the exponentials, as wide as they are, beside all that is kept."""
    return sum(term.bytes for term in kept.outside if term.tensor == EXPONENTIALS)


def _held_at(block: int, kept: Activations, residual: int, checkpointing: Checkpointing | None) -> int:
    """When backward comes to a block, the ones behind it being done: inputs of the groups before, and what of its own
    group is there. A group's own input is among the activations of its first block."""
    if checkpointing is None:
        return (block + 1) * kept.block_bytes
    group, place = divmod(block, checkpointing.every)
    if checkpointing.nested:
        return (group + place) * residual + kept.block_bytes
    return group * residual + (place + 1) * kept.block_bytes

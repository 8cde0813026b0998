"""The sizes of models that are not plain decoders, as far as the plain decoder inside them shows them.

Nothing about them is certain except the data type, because no such model was measured: the readers of their kernels
follow the source of PyTorch and `transformers`.
"""

from collections.abc import Iterator, Sequence

import msgspec

from stepscope.recover.evidence.order import NoTransformerError, is_attention
from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.evidence.variants import DecoderVariant, find_variant
from stepscope.recover.facts import Product, Window, find_window
from stepscope.recover.families import find_platform, read_fact
from stepscope.recover.shape import CORE_FIELDS, Core
from stepscope.recover.solve.experts import ExpertSizes, find_expert_sizes, say_experts
from stepscope.recover.solve.recovery import Candidate, Field, Recovery, Value, recover
from stepscope.units import count_noun

_UNMEASURED = "never certain: read from the source of PyTorch, not measured"
_MOST_LISTED = 64


def recover_any(evidence: Sequence[KernelEvidence]) -> Recovery:
    """Recover a plain decoder, or a variant of one. Raises NoTransformerError like `recover`; for a variant, the error
    says what was seen and what is known."""
    variants = [find_variant(one) if one.sightings else None for one in evidence]
    found = [variant for variant in variants if variant is not None]
    if not found:
        return recover(evidence)
    first = found[0]
    if any(variant is None and one.sightings for variant, one in zip(variants, evidence, strict=True)):
        raise NoTransformerError(f"the files show different models: only one has {first.seen}")
    problem = "no part of it is a plain stack of layers"
    for number in range(min(len(one.plain) for one in found)):
        plain = [
            one if variant is None else variant.plain[number] for variant, one in zip(variants, evidence, strict=True)
        ]
        try:
            return _adapt(recover(plain), first, evidence, is_bare=number > 0)
        except NoTransformerError as error:
            problem = str(error)
    raise NoTransformerError(first.seen, known=tuple(_say_known(first, evidence, problem)))


def refuse_variants(evidence: Sequence[KernelEvidence]) -> None:
    """Raise NoTransformerError if a file shows a variant: no claim describes one, so none can be tested."""
    found = next((variant for one in evidence if one.sightings and (variant := find_variant(one))), None)
    if found is None:
        return
    try:
        fields = recover_any(evidence).fields
    except NoTransformerError as error:
        raise NoTransformerError(str(error), known=error.known) from None
    known = ", ".join(f"{name} {_spell(field.value)}" for name, field in fields.items() if field.value is not None)
    raise NoTransformerError(found.seen, known=(f"probably {known}",) if known else ())


def _spell(value: Value) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _say_known(variant: DecoderVariant, evidence: Sequence[KernelEvidence], problem: str) -> Iterator[str]:
    yield f"without it, the rest is not a plain decoder either: {problem}"
    dtypes = {one.name.dtype for file in evidence for one in file.sightings if one.name.kernel_class == "GEMM"} - {None}
    yield f"data types of the GEMMs: {', '.join(sorted(map(str, dtypes)))}"
    if variant.experts:
        yield from say_experts(_find_experts(variant, None, evidence), variant.experts)
    if variant.stacks:
        yield _say_stacks(variant)


def _say_stacks(variant: DecoderVariant) -> str:
    assert variant.stacks is not None
    encoder, decoder = variant.stacks.encoder_layers, variant.stacks.decoder_layers
    layers = count_noun(decoder, "layer")
    return (
        f"an encoder of {count_noun(encoder, 'layer')} and a decoder of {layers}" if encoder else f"a stack of {layers}"
    )


def _adapt(answer: Recovery, variant: DecoderVariant, evidence: Sequence[KernelEvidence], *, is_bare: bool) -> Recovery:
    """Return the result for the plain decoder inside a variant as one for the variant."""
    fields = {name: _doubt(field) if name != "dtype" else field for name, field in answer.fields.items()}
    fields["parameters"] = Field(value=None, certain=False)
    notes = [variant.seen, *answer.notes]
    candidates = tuple(msgspec.structs.replace(one, parameters=None) for one in answer.candidates)
    if variant.experts:
        core = _core_of(candidates[0]) if candidates else None
        found = _find_experts(variant, core, evidence)
        fields |= _expert_fields(found, fields["d_ff"], has_shared=bool(variant.experts[0].shared) and not is_bare)
        width = fields["d_ff"].value
        candidates = tuple(
            msgspec.structs.replace(one, d_ff=width if isinstance(width, int) else None) for one in candidates[:1]
        )
    if variant.adapters and candidates and (rank := _find_rank(variant, candidates[0], evidence)):
        notes.append(f"rank of the adapters: {rank.low:,} to {rank.high:,}")
    if variant.stacks:
        said = _say_stacks(variant)
        notes.append(f"{said}; the sizes below are those of the encoder")
        fields |= {"num_layers": Field(value=None, certain=False, evidence=(said,))}
        fields |= {"vocab_size": Field(value=None, certain=False, evidence=("the LM head is part of the decoder",))}
        candidates = ()
    return msgspec.structs.replace(
        answer, candidates=candidates, fields=fields, items=(), variant=variant.seen, notes=tuple(notes)
    )


def _doubt(field: Field) -> Field:
    return msgspec.structs.replace(field, certain=False) if field.certain else field


def _core_of(candidate: Candidate) -> Core | None:
    sizes = {name: getattr(candidate, name) for name in CORE_FIELDS}
    return Core(**sizes) if None not in sizes.values() else None


def _find_experts(variant: DecoderVariant, core: Core | None, evidence: Sequence[KernelEvidence]) -> ExpertSizes:
    file = next(one for one in evidence if one.sightings)
    return find_expert_sizes(variant.experts[0], core, find_platform(file.sightings, file.device_sms))


def _find_rank(variant: DecoderVariant, best: Candidate, evidence: Sequence[KernelEvidence]) -> Window | None:
    """Return the columns of the first adapter's first GEMM, if the adapter is next to a projection into the heads: then
    its input has d_model columns."""
    file, down = next(one for one in evidence if one.sightings), variant.adapters[0].down
    attention = next((one.index for one in file.sightings if is_attention(one, backward=False)), None)
    product = read_fact(down, find_platform(file.sightings, file.device_sms))
    if not isinstance(product, Product) or attention is None or down.index > attention or variant.experts:
        return None
    return find_window(product, rows=best.tokens, inner=best.d_model) if best.tokens and best.d_model else None


def _expert_fields(found: ExpertSizes, dense: Field, *, has_shared: bool) -> dict[str, Field]:
    """Return the fields that only a mixture of experts has. Its d_ff is the width of one expert."""
    fields = {"num_experts": Field(value=None, certain=False), "num_experts_per_tok": Field(value=None, certain=False)}
    if number := found.num_experts:
        low, high = (None, None) if number.is_exact else (number.low, number.high)
        value = _most_common(number)
        fields["num_experts"] = Field(value=value, certain=False, low=low, high=high, evidence=(_UNMEASURED,))
    if found.per_token and found.pairs:
        said = f"{found.pairs:,} rows copied for {found.pairs // found.per_token:,} tokens"
        fields["num_experts_per_tok"] = Field(value=found.per_token, certain=False, evidence=(said, _UNMEASURED))
    fields["d_ff"] = Field(value=None, certain=False)
    if found.d_ff and found.d_ff.best:
        value, *others = found.d_ff.best
        said = "the width of one expert"
        fields["d_ff"] = Field(value=value, certain=False, alternatives=tuple(others), evidence=(said, _UNMEASURED))
        if len(others) > _MOST_LISTED:
            every = found.d_ff.best
            fields["d_ff"] = Field(
                value=value, certain=False, low=min(every), high=max(every), evidence=(said, _UNMEASURED)
            )
    if has_shared:
        fields["shared_d_ff"] = msgspec.structs.replace(
            dense, evidence=("a dense feed-forward layer next to the experts", *dense.evidence)
        )
    return fields


def _most_common(number: Window) -> int:
    """Return a power of two if there is one, otherwise the largest."""
    powers = [2**log for log in range(11) if 2**log in number]
    return powers[-1] if powers else number.high

"""Which runs are not plain decoders, and what remains of them."""

import random

import pytest

from stepscope.recover.evidence.encoders import find_two_stacks
from stepscope.recover.evidence.experts import find_routed
from stepscope.recover.evidence.order import is_product
from stepscope.recover.evidence.structure import find_structure
from stepscope.recover.evidence.variants import find_variant
from stepscope.recover.facts import Sighting
from tests.unit.recover.evidence_runs import COUNTERS, TRACES, read_evidence, with_kernels
from tests.unit.recover.families.launches import seen
from tests.unit.recover.synthetic_runs import Model, launch
from tests.unit.recover.variant_runs import LLAMA, TOP_K, Experts, adapted, encoder_decoder, mixture, route

MODEL = Model(
    num_layers=3, d_model=768, num_heads=12, num_kv_heads=4, d_head=64, d_ff=2048, vocab_size=32_000, batch=2,
    context=200,
)  # fmt: skip
MIXTRAL = Experts(num_experts=8, per_token=2, d_ff=1024)
LOOP = Experts(num_experts=8, per_token=2, d_ff=1024, is_grouped=False)
SHARED = Experts(num_experts=16, per_token=4, d_ff=512, shared=1024)


@pytest.mark.parametrize("file", [*COUNTERS, *TRACES])
def test_no_recorded_decoder_is_a_variant(file: str) -> None:
    assert find_variant(read_evidence(file)) is None


@pytest.mark.parametrize("experts", [MIXTRAL, LOOP, SHARED])
def test_experts_are_found_in_every_layer(experts: Experts) -> None:
    layers = find_routed(mixture(MODEL, experts).sightings)
    assert len(layers) == MODEL.num_layers
    assert {len(layer.shared) for layer in layers} == {3 if experts.shared else 0}
    assert {layer.is_grouped for layer in layers} == {experts.is_grouped}
    for layer in layers:
        assert layer.router is not None
        assert len(layer.products) % 2 == 0
        assert layer.kernels[0] == layer.router


@pytest.mark.parametrize("experts", [MIXTRAL, LOOP, SHARED])
def test_the_rest_of_a_mixture_is_a_plain_decoder(experts: Experts) -> None:
    variant = find_variant(mixture(MODEL, experts))
    assert variant is not None
    assert "mixture of experts" in variant.seen
    structure = find_structure(variant.plain[0].sightings)
    assert structure.num_layers == MODEL.num_layers
    assert [one.index for one in variant.plain[0].sightings] == list(range(len(variant.plain[0].sightings)))


def test_layers_without_experts_are_dropped_where_they_differ() -> None:
    variant = find_variant(mixture(MODEL, SHARED, dense_layers=1))
    assert variant is not None
    assert find_structure(variant.plain[1].sightings).num_layers == MODEL.num_layers


def test_sampling_is_not_routing() -> None:
    """Two passes of a decoder, with a top-k of the logits after each."""
    once = [*launch(MODEL, LLAMA).sightings, seen(TOP_K, (2,), (1024,))]
    assert find_variant(with_kernels(read_evidence(LLAMA), [*once, *once])) is None


def test_a_router_in_an_unknown_kernel_does_not_hide_grouped_gemms() -> None:
    kernels = [one for one in mixture(MODEL, MIXTRAL).sightings if one.name.kernel_class != "sort"]
    variant = find_variant(with_kernels(read_evidence(LLAMA), kernels))
    assert variant is not None
    assert len(variant.experts) == MODEL.num_layers


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize(
    "roles", [("query",), ("query", "value"), ("query", "key", "value", "output", "gate", "up", "down")]
)
def test_adapters_are_found_and_dropped(roles: tuple[str, ...], *, counted: bool) -> None:
    variant = find_variant(adapted(MODEL, 16, roles, counted=counted))
    assert variant is not None
    assert len(variant.adapters) == len(roles) * MODEL.num_layers
    plain = [one.name.name for one in variant.plain[0].sightings]
    assert plain == [one.name.name for one in launch(MODEL, LLAMA).sightings]


def test_full_gemms_in_a_layer_are_not_adapters() -> None:
    """Two GEMMs as large as a projection, scaled and added: extra work that the counters show."""
    kernels: list[Sighting] = []
    for one in adapted(MODEL, 16, ("query",)).sightings:
        wide = is_product(one) and kernels and is_product(kernels[-1])
        kernels.append(kernels[-1] if wide else one)
    assert find_variant(with_kernels(read_evidence(LLAMA), kernels)) is None


@pytest.mark.parametrize(("encoder", "decoder"), [(1, 1), (2, 2), (3, 1), (1, 3)])
@pytest.mark.parametrize("context", [200, 64])
def test_an_encoder_and_a_decoder_are_counted(encoder: int, decoder: int, context: int) -> None:
    model = Model(**{**{name: getattr(MODEL, name) for name in Model.__dataclass_fields__}, "num_layers": encoder})
    evidence = encoder_decoder(model, decoder_layers=decoder, decoder_context=context)
    variant = find_variant(evidence)
    assert variant is not None
    assert variant.stacks is not None
    assert (variant.stacks.encoder_layers, variant.stacks.decoder_layers) == (encoder, decoder)
    assert find_structure(variant.plain[0].sightings).num_layers == encoder
    twice = with_kernels(evidence, [*evidence.sightings, *evidence.sightings])
    stacks = find_two_stacks(twice.sightings)
    assert stacks is not None
    assert (stacks.encoder_layers, stacks.decoder_layers) == (encoder, decoder)


def test_cross_attention_without_an_encoder_is_named() -> None:
    evidence = encoder_decoder(MODEL, decoder_layers=3, decoder_context=64)
    whole = find_variant(evidence)
    assert whole is not None
    assert whole.stacks is not None
    start = len(whole.stacks.encoder)
    variant = find_variant(with_kernels(evidence, evidence.sightings[start:]))
    assert variant is not None
    assert variant.seen == "cross-attention: layers with two attention calls"
    assert variant.plain == ()


def test_a_loop_of_experts_differs_between_layers() -> None:
    """So layers cannot be recognized as equal without dropping the experts."""
    choice = random.Random(0)
    first, second = ([one.grid for one in route(MODEL, LOOP, choice)] for _ in range(2))
    assert first != second

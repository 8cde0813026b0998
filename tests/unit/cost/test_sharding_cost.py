"""Memory per rank compared with counts by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope import cost
from stepscope.cost import LayerSize, training_bytes
from stepscope.spec import SIZES, ModelShape

LAYERS = (
    LayerSize(matrices=(100, 11), vectors=(5,)),
    LayerSize(matrices=(60,)),
    LayerSize(matrices=(30,), vectors=(7,)),
)


def test_unsharded_training_keeps_everything() -> None:
    kept = training_bytes(LAYERS, ranks=4, sharding="none")
    assert (kept.parameters, kept.gradients, kept.optimizer, kept.gathered) == (852, 852, 1704, 0)
    assert kept.total == 852 * 4


def test_a_sharded_optimizer_keeps_a_share_of_its_state_and_at_most_one_parameter_more() -> None:
    kept = training_bytes(LAYERS, ranks=4, sharding="optimizer")
    assert (kept.parameters, kept.gradients) == (852, 852)
    assert kept.optimizer == (54 + 100) * 8  # 213 elements over four ranks, rounded up, and the largest parameter
    assert training_bytes(LAYERS, ranks=1, sharding="optimizer").optimizer == 213 * 8


def test_fsdp_shards_matrices_replicates_vectors_and_gathers_two_layers() -> None:
    kept = training_bytes(LAYERS, ranks=2, sharding="fsdp", compute_bytes=2)
    elements = 50 + 6 + 30 + 15 + 5 + 7
    assert kept.parameters == kept.gradients == elements * 4
    assert kept.optimizer == elements * 8
    assert kept.gathered == (111 + 60) * 2


@pytest.mark.parametrize("size", ["nano", "small"])
@pytest.mark.parametrize("tied", [False, True])
def test_layers_cover_all_parameters_of_the_built_in_model(size: str, tied: bool) -> None:
    shape = SIZES[size]
    if tied:
        shape = ModelShape(
            d_model=64, d_ff=96, num_layers=2, num_heads=4, num_kv_heads=2, vocab=100, tie_embeddings=True
        )
    assert sum(layer.elements for layer in cost.layer_sizes(shape)) == cost.parameters(shape).total


@given(
    matrices=st.lists(st.lists(st.integers(1, 10**8), max_size=5), min_size=1, max_size=6),
    vector=st.integers(0, 10**4),
    ranks=st.integers(1, 64),
)
def test_sharding_never_keeps_more(matrices: list[list[int]], vector: int, ranks: int) -> None:
    layers = [LayerSize(matrices=tuple(one), vectors=(vector,)) for one in matrices]
    plain, optimizer, fsdp = (
        training_bytes(layers, ranks=ranks, sharding=sharding) for sharding in ("none", "optimizer", "fsdp")
    )
    assert optimizer.optimizer <= plain.optimizer
    assert fsdp.parameters <= plain.parameters
    assert fsdp.gathered <= plain.parameters
    if ranks == 1:
        assert fsdp.parameters == plain.parameters
        assert optimizer == plain


@pytest.mark.parametrize(("named", "given_"), [("ranks", {"ranks": 0}), ("sharding", {"sharding": "half"})])
def test_invalid_arguments_are_named(named: str, given_: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"`{named}`"):
        training_bytes(LAYERS, **({"ranks": 2, "sharding": "none"} | given_))  # type: ignore[arg-type]

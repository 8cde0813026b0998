import pytest

from check_families import launch_blocks
from stepscope.recover.facts import Sighting, Update, Window
from stepscope.recover.families import optimizers
from stepscope.recover.families.optimizers import CHUNK_ELEMENTS, LARGE, SMALL
from tests.unit.recover.families.launches import HIDDEN, seen

NAME = (
    f"void {HIDDEN}multi_tensor_apply_kernel<{HIDDEN}{{metadata}}, {HIDDEN}BinaryOpScalarFunctor<float, 1, 1, 0> >(int)"
)
ONE_LIST = NAME.format(metadata="TensorListMetadata<1>")
TWO_LISTS = NAME.format(metadata="TensorListMetadata<2>")
THREE_LISTS = NAME.format(metadata="TensorListMetadata<3>")
WITH_SCALARS = NAME.format(metadata="TensorListScalarListMetadata<float, 1>")
FUSED = NAME.format(metadata="FusedOptimizerTensorListMetadata<4>")


def gpt2(num_layers: int, width: int, vocabulary: int, positions: int) -> list[int]:
    layer = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,), (width,), (width,)]
    layer += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    shapes = [(vocabulary, width), (positions, width), *layer * num_layers, (width,), (width,)]
    return [shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes]


def launches(name: str, grids: tuple[int, ...]) -> list[Sighting]:
    return [seen(name, (grid,), (512,)) for grid in grids]


# Three layers, and the launches of foreach AdamW that the profiler recorded.
SIZES = gpt2(3, 768, 50257, 1024)
SEEN = (320, 320, 311)


@pytest.mark.parametrize("name", [ONE_LIST, THREE_LISTS, WITH_SCALARS])
def test_a_list_of_tensors_gives_the_recorded_launches(name: str) -> None:
    room = optimizers.room_for_tensors(seen(name, (320,), (512,)), SMALL)
    assert room is not None
    assert launch_blocks(SIZES, room, SMALL.blocks) == SEEN
    joined = optimizers.join_launches(launches(name, SEEN))
    assert joined is not None
    assert sum(SIZES) in joined.elements
    assert joined.tensors is not None
    assert len(SIZES) in joined.tensors


def test_full_launches_bound_the_number_of_tensors() -> None:
    three = optimizers.join_launches(launches(THREE_LISTS, SEEN))
    assert three == Update(
        elements=Window((951 - 144) * CHUNK_ELEMENTS + 144, 951 * CHUNK_ELEMENTS), tensors=Window(1, 144)
    )
    alone = optimizers.read_update(launches(THREE_LISTS, (311,))[0])
    assert alone == Update(elements=Window(311, 311 * CHUNK_ELEMENTS), tensors=Window(1, 311))
    # Kernels for CUDA 13 have more room; every launch but the last is full of blocks or of tensors.
    large = optimizers.join_launches(launches(THREE_LISTS, (2240, 100)))
    assert large is not None
    assert large.tensors == Window(1, 2 * 336)


def test_a_launch_can_be_full_of_tensors() -> None:
    assert launch_blocks([10] * 250, 110, 320) == (110, 110, 30)
    assert launch_blocks([65536] * 110, 110, 320) == (110,)
    assert launch_blocks([65536, 65537], 110, 320) == (3,)
    assert launch_blocks([320 * 65536], 110, 320) == (320,)
    assert launch_blocks([320 * 65536 + 1, 5], 110, 320) == (320, 2)
    assert launch_blocks([0] * 109 + [5, 5], 110, 320) == (2,)
    # A tensor that was split counts in both launches.
    assert launch_blocks([321 * 65536] + [1] * 110, 110, 320) == (320, 110, 1)


@pytest.mark.parametrize(
    ("name", "small", "large"),
    [(ONE_LIST, 110, 770), (TWO_LISTS, 64, 448), (THREE_LISTS, 48, 336), (WITH_SCALARS, 96, 672), (FUSED, 36, 252)],
)
def test_room_for_tensors(name: str, small: int, large: int) -> None:
    launch = seen(name, (3,), (512,))
    assert (optimizers.room_for_tensors(launch, SMALL), optimizers.room_for_tensors(launch, LARGE)) == (small, large)


def test_full_launches_are_joined_to_calls() -> None:
    order = [*launches(ONE_LIST, SEEN), *launches(THREE_LISTS, SEEN), *launches(ONE_LIST, (300, 20))]
    grids = [tuple(launch.grid[0] for launch in call) for call in optimizers.split_calls(order)]
    assert grids == [SEEN, SEEN, (300,), (20,)]


@pytest.mark.parametrize(
    ("name", "grid", "block"),
    [
        (ONE_LIST, (3, 2), (512,)),
        (ONE_LIST, (3,), (256,)),
        (ONE_LIST, (2241,), (512,)),
        ("multi_tensor_apply_kernel", (3,), (512,)),
        ("void at::native::vectorized_elementwise_kernel<4, TensorListMetadata<1> >(int)", (3,), (512,)),
    ],
)
def test_unknown_launches_have_no_fact(name: str, grid: tuple[int, ...], block: tuple[int, ...]) -> None:
    assert optimizers.read_update(seen(name, grid, block)) is None


def test_a_call_needs_only_known_launches() -> None:
    assert optimizers.join_launches([]) is None
    assert optimizers.join_launches([*launches(ONE_LIST, (320,)), seen("spin_kernel", (3,), (512,))]) is None


def test_more_than_five_lists_are_unknown() -> None:
    for depth, room in ((5, 30), (6, None)):
        name = NAME.format(metadata=f"FusedOptimizerTensorListMetadata<{depth}>")
        assert optimizers.room_for_tensors(seen(name, (3,), (512,)), SMALL) == room

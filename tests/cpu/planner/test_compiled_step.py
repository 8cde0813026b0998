"""What compiling and the rewrites of the fast step make of a step's operators."""

import msgspec
import pytest

from stepscope.planner.operation import Operation
from stepscope.planner.step_time import predict_step
from stepscope.planner.step_time.fusion import fuse, name_values, share_casts
from stepscope.planner.step_time.operator_kinds import MERGED_SIZES
from stepscope.planner.step_time.rewritten_step import merge_products, use_working_weights
from stepscope.recording.rows.calibration import Calibration
from tests.cpu.planner.calibrations import bytes_ns, make_calibration, product_ns
from tests.cpu.planner.operations import call, chain, half, tensor

CALIBRATION = make_calibration()
ODD, EVEN = 50257, 50264


def test_a_chain_of_elementwise_operators_becomes_one_kernel() -> None:
    groups = fuse(chain(10))
    assert len(groups) == 1
    assert (
        sum(groups[0].reads.values()) == sum(groups[0].writes.values()) == 4 * 2**22
    )  # the first input, the last result


def test_a_product_separates_fused_kernels_and_reads_what_they_wrote() -> None:
    left = tensor(8192, 512, storage=103)
    multiply = call("mm.default", (left, tensor(512, 512, storage=7)), (tensor(8192, 512, storage=200),))
    groups = fuse([*chain(3), multiply, *chain(2, first=200)])
    assert [group.is_extern for group in groups] == [False, True, False]
    assert 103 in groups[0].writes


def test_what_backward_needs_is_computed_again_instead_of_kept() -> None:
    forward = chain(3)  # 100 to 103
    reads = call(
        "mul.Tensor",
        (tensor(2**22, storage=102), tensor(2**22, storage=300)),
        (tensor(2**22, storage=301),),
        "backward",
    )
    groups = fuse([*forward, reads])
    assert 102 not in groups[0].writes
    assert set(groups[1].reads) == {100, 300}


def test_equal_casts_are_computed_once() -> None:
    def cast(result: int) -> Operation:
        out = tensor(2**20, storage=result, dtype="bfloat16")
        return call("_to_copy.default", (tensor(2**20, storage=1),), (out,))

    assert len(fuse(share_casts([cast(2), cast(3)]))) == 1


def test_a_tensor_that_was_added_to_is_not_the_one_before() -> None:
    """A sum in place, between two casts of it: both are computed, and the second reads the sum."""

    def cast(result: int) -> Operation:
        return call("_to_copy.default", (tensor(2**20, storage=1),), (half(2**20, storage=result),))

    added = call("add.Tensor", (tensor(2**20, storage=1), tensor(2**20, storage=2)), (tensor(2**20, storage=1),))
    multiply = call(
        "mm.default", (half(1024, 1024, storage=11), half(1024, 64, storage=7)), (half(1024, 64, storage=8),)
    )
    view = call("view.default", (tensor(2**20, storage=1),), (tensor(1024, 1024, storage=1),))
    first, sum_, again, second = name_values([cast(11), added, view, cast(12)])
    assert first.inputs[0].storage == 1
    assert sum_.outputs[0].storage == again.outputs[0].storage == second.inputs[0].storage != 1
    groups = fuse(share_casts(name_values([cast(11), multiply, added, view, cast(12)])))
    assert [group.is_extern for group in groups] == [False, True, False]
    assert sum(groups[-1].reads.values()) == 2 * 4 * 2**20


def test_compiling_makes_a_chain_faster() -> None:
    operations = chain(50, elements=2**24)
    eager, compiled = predict_step(operations, CALIBRATION), predict_step(operations, CALIBRATION, compiled=True)
    assert compiled.ns < 0.1 * eager.ns
    assert compiled.launches == 1


def test_a_fused_kernel_reads_what_was_just_written_from_the_cache() -> None:
    def predict(first: int) -> float:
        multiply = call(
            "mm.default", (half(2048, 64, storage=1), half(64, 2048, storage=2)), (tensor(2**22, storage=100),)
        )
        step = predict_step([multiply, *chain(3, first=first)], CALIBRATION, compiled=True)
        return next(one.ns for one in step.kernels if one.name == "fused")

    assert predict(100) < 0.9 * predict(300)


# --- Padded products --------------------------------------------------------------------------------------------------


def slow_if_odd() -> Calibration:
    """The same calibration, with products that take six times as long if their rows are badly aligned."""

    def slow_down(row: tuple[int, ...]) -> tuple[int, ...]:
        return (*row[:-1], 6 * row[-1]) if any(size % 2 for size in row[:-1]) else row

    series = tuple(
        msgspec.structs.replace(one, rows=tuple(map(slow_down, one.rows))) if one.operation in ("mm", "addmm") else one
        for one in CALIBRATION.series
    )
    return msgspec.structs.replace(CALIBRATION, series=series)


SLOW = slow_if_odd()


def logits(rows: int = 8192, *, has_cast: bool = True) -> list[Operation]:
    """A product with an odd vocabulary. Its weight is a parameter, or the cast of one."""
    weight = half(1024, ODD, storage=3, contiguous=False)
    cast = call("_to_copy.default", (tensor(ODD, 1024, storage=2),), (half(ODD, 1024, storage=3),))
    multiply = call("mm.default", (half(rows, 1024, storage=1), weight), (half(rows, ODD, storage=4),))
    return [cast, multiply] if has_cast else [multiply]


def product_time(operations: list[Operation], *, compiled: bool) -> float:
    step = predict_step(operations, SLOW, compiled=compiled)
    return next(one.ns for one in step.kernels if one.name == "mm")


def test_a_compiler_pads_a_product_with_an_odd_vocabulary() -> None:
    assert product_time(logits(), compiled=False) > 4 * product_ns("bf16", 8192, ODD, 1024)
    assert product_time(logits(), compiled=True) == pytest.approx(product_ns("bf16", 8192, EVEN, 1024), rel=0.15)


def test_a_parameter_is_copied_to_be_padded() -> None:
    copied_ns = product_time(logits(has_cast=False), compiled=True) - product_time(logits(), compiled=True)
    assert copied_ns == pytest.approx(bytes_ns(2 * 2 * EVEN * 1024), rel=0.1)


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_matrix_that_lies_transposed_is_not_copied_to_be_padded_if_that_takes_long(contiguous: bool) -> None:
    """It is a parameter, so that the compiler has to copy it."""
    slow = [
        msgspec.structs.replace(one, rows=tuple((size, 10 * ns) for size, ns in one.rows))
        for one in SLOW.series
        if one.operation == "transpose_copy"
    ]
    calibration = msgspec.structs.replace(
        SLOW, series=(*(one for one in SLOW.series if one.operation != "transpose_copy"), *slow)
    )
    left = half(ODD, 1001, storage=1, contiguous=contiguous)
    multiply = call("mm.default", (left, half(1001, 1024, storage=2)), (half(ODD, 1024, storage=4),))
    eager, compiled = (predict_step([multiply], calibration, compiled=one).gpu_ns for one in (False, True))
    assert (compiled < eager) == contiguous


def test_a_product_that_is_bound_by_memory_is_not_padded() -> None:
    assert product_time(logits(16), compiled=True) == product_time(logits(16), compiled=False)


def test_a_product_that_gains_nothing_is_not_padded() -> None:
    plain, compiled = (predict_step(logits(), CALIBRATION, compiled=one) for one in (False, True))
    assert [one.ns for one in compiled.kernels if one.name == "mm"] == [
        one.ns for one in plain.kernels if one.name == "mm"
    ]


# --- The fast step ----------------------------------------------------------------------------------------------------


def linear_step() -> list[Operation]:
    """Two linear layers with the same input: casts of weights, products, and their gradients with casts. Gradients of
    the weights are transposed and detached, those of the input are added up."""
    x, y = half(1024, 512, storage=1), (half(1024, 256, storage=41), half(1024, 256, storage=42))
    operations = []
    for number in (0, 1):
        weight, cast = tensor(512, 256, storage=20 + number), half(512, 256, storage=30 + number)
        operations.append(call("_to_copy.default", (weight,), (cast,)))
        operations.append(call("mm.default", (x, cast), (y[number],)))
    for number in (0, 1):
        cast, gradient = half(256, 512, storage=30 + number), half(256, 512, storage=50 + number)
        kept = tensor(256, 512, storage=80 + number)
        operations += [
            call("mm.default", (half(256, 1024, storage=60 + number, contiguous=False), x), (gradient,), "backward"),
            call("mm.default", (y[number], cast), (half(1024, 512, storage=70 + number),), "backward"),
            call("_to_copy.default", (gradient,), (kept,), "backward"),
            call("t.default", (kept,), (tensor(512, 256, storage=80 + number),), "backward"),
            call("detach.default", (kept,), (kept,), "backward"),
        ]
    parts = tensor(1024, 512, storage=90), tensor(1024, 512, storage=91)
    for number in (0, 1):
        operations.append(
            call("_to_copy.default", (half(1024, 512, storage=70 + number),), (parts[number],), "backward")
        )
    operations.append(call("add.Tensor", parts, (parts[0],), "backward"))
    operations.append(call("mul.Tensor", (parts[0],), (tensor(1024, 512, storage=95),), "backward"))
    return operations


def test_working_weights_need_no_casts() -> None:
    left = use_working_weights(linear_step())
    casts = [one.inputs[0].storage for one in left if "_to_copy" in one.name]
    assert casts == [70, 71]  # of the gradients of the input


def test_merged_products_do_the_same_work_in_fewer_kernels() -> None:
    plain = [one for one in linear_step() if "mm" in one.name]
    merged = merge_products(plain)
    assert [(one.phase, one.arguments[MERGED_SIZES]) for one in merged] == [
        ("forward", (1024, 512, 512)),
        ("backward", (512, 512, 1024)),
        ("backward", (1024, 512, 512)),
    ]
    before, after = predict_step(plain, CALIBRATION), predict_step(plain, CALIBRATION, merge=True)
    assert after.flops == before.flops
    assert after.launches == before.launches // 2
    assert after.gpu_ns < before.gpu_ns


def test_a_merged_product_reads_and_writes_the_parts() -> None:
    forward, *_ = (one for one in merge_products(linear_step()) if "mm" in one.name)
    assert {fact.storage for fact in forward.inputs} == {1, 30, 31}
    assert {fact.storage for fact in forward.outputs} == {41, 42}


def test_a_merged_product_adds_up_the_gradients_of_its_input() -> None:
    left = merge_products(name_values(linear_step()))
    assert not [one for one in left if one.name.startswith("aten.add")]
    (cast,) = (one for one in left if "_to_copy" in one.name and one.outputs[0].shape == (1024, 512))
    (scaled,) = (one for one in left if "mul" in one.name)
    assert scaled.inputs[0].storage == cast.outputs[0].storage

"""Predicted step times, from a made-up calibration whose times follow from a few numbers."""

import math

import msgspec
import pytest

from stepscope.errors import StepscopeError
from stepscope.hardware import find
from stepscope.plan.operation import Operation, TensorFacts
from stepscope.plan.step_time import NotCalibratedError, predict_step
from stepscope.plan.step_time.data_sheets import assume_links, predict_data_parallel, scale_calibration
from stepscope.plan.step_time.fusion import fuse
from stepscope.plan.step_time.host_time import HostModel
from stepscope.plan.step_time.kernels_of import KernelModel
from stepscope.plan.step_time.measured_times import Curve, MeasuredTimes, product_alignment
from stepscope.plan.step_time.rewritten_step import merge_products, use_working_weights
from tests.cpu.plan.calibrations import CALL_NS, LAUNCH_NS, bytes_ns, make_calibration, product_ns

CALIBRATION = make_calibration()
FORTH_AND_BACK = ("forward", "backward")


def tensor(*shape: int, storage: int, dtype: str = "float32", contiguous: bool = True) -> TensorFacts:
    return TensorFacts(shape, dtype, contiguous, storage)


def call(
    name: str,
    inputs: tuple[TensorFacts, ...],
    outputs: tuple[TensorFacts, ...],
    phase: str = "forward",
    module: str = "block",
    **arguments: object,
) -> Operation:
    return Operation(f"aten.{name}", phase, module, inputs, outputs, arguments)  # type: ignore[arg-type]


def kernel_of(operation: Operation, *before: Operation) -> object:
    model = KernelModel(MeasuredTimes(CALIBRATION))
    for position, one in enumerate(before):
        model.kernels_of(position, one)
    return model.kernels_of(len(before), operation)


def product(phase: str = "forward", *, m: int = 8192, storage: int = 10, dtype: str = "bfloat16") -> Operation:
    left, right = tensor(m, 2048, storage=storage, dtype=dtype), tensor(2048, 2048, storage=2, dtype=dtype)
    return call("mm.default", (left, right), (tensor(m, 2048, storage=storage + 1, dtype=dtype),), phase)


def addition(elements: int, *, storage: int = 20, phase: str = "forward") -> Operation:
    inputs = tensor(elements, storage=storage), tensor(elements, storage=storage + 1)
    return call("add.Tensor", inputs, (tensor(elements, storage=storage + 2),), phase)


def test_a_product_between_the_measured_sizes_takes_the_time_of_its_flops() -> None:
    found = MeasuredTimes(CALIBRATION).product("mm", "bf16", "nn", (6000, 2048, 3072))
    assert found.ns == pytest.approx(product_ns("bf16", 6000, 2048, 3072), rel=0.15)
    assert 0 < found.error < 0.3


def test_a_measured_size_is_found_almost_exactly_and_is_more_certain() -> None:
    times = MeasuredTimes(CALIBRATION)
    known, far = times.product("mm", "fp32", "nt", (1024, 1024, 1024)), times.product("mm", "fp32", "nt", (16, 16, 16))
    assert known.ns == pytest.approx(product_ns("fp32", 1024, 1024, 1024), rel=0.02)
    assert known.error < 0.5 * far.error


@pytest.mark.parametrize(
    ("layout", "sizes", "alignment"),
    [
        ("nt", (100, 768, 768), 16),
        ("nt", (100, 50257, 768), 2),  # rows of the result
        ("nt", (100, 30522, 768), 4),
        ("nn", (100, 768, 1001), 2),  # rows of the left side
        ("tn", (50257, 768, 128), 2),
        ("tn", (768, 768, 127), 16),  # no row is that long
    ],
)
def test_rows_are_aligned_as_they_lie_in_memory(layout: str, sizes: tuple[int, ...], alignment: int) -> None:
    assert product_alignment("bf16", layout, sizes) == alignment


def test_layouts_of_a_product_have_their_own_level() -> None:
    sizes = [(m, n, 512) for m in (256, 512, 1024) for n in (256, 512, 1024)]
    slow, fast = [2.0 * m * n for m, n, _ in sizes], [1.0 * m * n for m, n, _ in sizes]
    curve = Curve([*sizes, *sizes], [*slow, *fast], lambda size: 1.0 * size[0] * size[1], ["nt"] * 9 + ["tn"] * 9)
    assert curve.at((700, 700, 512), "nt").ns == pytest.approx(2.0 * 700 * 700, rel=0.01)
    assert curve.at((700, 700, 512), "tn").ns == pytest.approx(700 * 700, rel=0.01)
    assert curve.at((700, 700, 512), "tn+bias").ns == pytest.approx(700 * 700, rel=0.01)  # the closest that is known


def experts(dtype: str, *, tokens: int = 8192) -> Operation:
    inputs = tensor(tokens, 1024, storage=1, dtype=dtype), tensor(8, 1024, 1024, storage=2, dtype=dtype)
    offsets = tensor(8, storage=3, dtype="int32")
    return call("_grouped_mm.default", (*inputs, offsets), (tensor(tokens, 1024, storage=4, dtype=dtype),))


def test_experts_take_the_time_of_their_products() -> None:
    found = predict_step([experts("bfloat16")], CALIBRATION)
    assert found.flops == 2 * 8192 * 1024 * 1024
    batch = MeasuredTimes(CALIBRATION).product("bmm", "bf16", "nn", (8, 1024, 1024, 1024))
    assert found.gpu_ns == pytest.approx(batch.ns, rel=0.05)
    assert any("equally many tokens for every expert" in one for one in found.assumptions)


def test_experts_in_fp32_are_products_one_after_the_other_and_the_host_waits() -> None:
    alone = predict_step([experts("float32")], CALIBRATION)
    one = MeasuredTimes(CALIBRATION).product("mm", "fp32", "nn", (1024, 1024, 1024))
    assert alone.gpu_ns == pytest.approx(8 * one.ns, rel=0.05)
    assert alone.launches == 8
    assert alone.host_ns > alone.gpu_ns


def test_a_vector_is_a_matrix_with_one_column() -> None:
    inputs = tensor(4096, 1024, storage=1), tensor(1024, storage=2)
    found = predict_step([call("mv.default", inputs, (tensor(4096, storage=3),))], CALIBRATION)
    assert found.flops == 2 * 4096 * 1024


def test_an_operator_of_another_library_has_no_time() -> None:
    x = tensor(4096, storage=1)
    with pytest.raises(NotCalibratedError, match=r"no times of `other\.scan\.default`"):
        predict_step([Operation("other.scan.default", "forward", "", (x,), (x,), {})], CALIBRATION)


def test_a_host_without_trials_is_a_typical_one_and_that_is_said() -> None:
    found = predict_step([addition(1024)], msgspec.structs.replace(CALIBRATION, trials=()))
    assert "a typical host, because the calibration has no trials of one" in found.assumptions


def test_elementwise_time_follows_the_bytes() -> None:
    kernel = kernel_of(addition(2**27))
    assert kernel.bytes == 3 * 4 * 2**27  # type: ignore[attr-defined]
    assert kernel.ns == pytest.approx(bytes_ns(3 * 4 * 2**27), rel=0.03)  # type: ignore[attr-defined]


def test_an_expanded_input_counts_as_much_as_its_memory() -> None:
    small = call("sum.dim_IntList", (tensor(4096, 1024, storage=1),), (tensor(4096, 1, storage=2),), dim=(-1,))
    expanded = tensor(4096, 1024, storage=2, contiguous=False)
    used = call("div.Scalar", (expanded,), (tensor(4096, 1024, storage=3),), other=2.0)
    kernel = kernel_of(used, small)
    assert kernel.bytes == 4 * (4096 + 4096 * 1024)  # type: ignore[attr-defined]


def test_what_the_last_kernel_wrote_is_read_from_the_cache() -> None:
    first, second = addition(2**20, storage=20), addition(2**20, storage=22)  # reads what the first wrote
    warm, cold = kernel_of(second, first), kernel_of(second)
    assert warm.ns < cold.ns  # type: ignore[attr-defined]
    flood = addition(2**27, storage=50)
    assert kernel_of(second, first, flood).ns == pytest.approx(cold.ns)  # type: ignore[attr-defined]


def test_views_launch_nothing() -> None:
    view = call("view.default", (tensor(4, 4, storage=1),), (tensor(16, storage=1),))
    assert kernel_of(view) is None


def test_large_kernels_decide_the_time_of_a_step_and_small_ones_the_host() -> None:
    large = predict_step([product(m=16384, storage=10 * n) for n in range(40)], CALIBRATION)
    assert large.ns == pytest.approx(large.gpu_ns, rel=0.05)
    assert large.phases[0].bound == "compute"
    small = predict_step([addition(1000, storage=10 * n) for n in range(400)], CALIBRATION)
    assert small.ns == pytest.approx(small.host_ns, rel=0.05)
    assert small.phases[0].bound == "launch"
    assert small.ns == pytest.approx(400 * CALL_NS, rel=0.35)


def test_the_gpu_waits_for_the_host() -> None:
    small = [addition(1000, storage=10 * n) for n in range(400)]
    host_ns, last = predict_step(small, CALIBRATION).host_ns, predict_step([product(m=32768)], CALIBRATION)
    assert predict_step([*small, product(m=32768)], CALIBRATION).ns == pytest.approx(host_ns + last.gpu_ns, rel=0.05)


def test_a_slower_host_only_slows_down_what_waits_for_it() -> None:
    slow = make_calibration(host_factor=2.0)
    small, large = [addition(1000, storage=10 * n) for n in range(400)], [product(m=16384) for _ in range(40)]
    assert predict_step(small, slow).ns == pytest.approx(2 * predict_step(small, CALIBRATION).ns, rel=0.1)
    assert predict_step(large, slow).ns == pytest.approx(predict_step(large, CALIBRATION).ns, rel=0.03)


def test_a_graph_has_no_host_and_shorter_gaps() -> None:
    operations = [addition(1000, storage=10 * n) for n in range(400)]
    step = predict_step(operations, CALIBRATION, graph=True)
    assert step.host_ns == 0
    assert step.ns == pytest.approx(400 * (LAUNCH_NS - 500), rel=0.15)


def test_phases_add_up_and_the_interval_contains_the_step() -> None:
    operations = [*(product(m=4096) for _ in range(5)), *(product("backward", m=4096) for _ in range(10))]
    operations += [addition(2**24, phase="optimizer")]
    step = predict_step(operations, CALIBRATION)
    assert [phase.name for phase in step.phases] == ["forward", "backward", "optimizer"]
    assert sum(phase.ns for phase in step.phases) == pytest.approx(step.ns)
    assert step.interval_ns[0] < step.ns < step.interval_ns[1]
    assert step.flops == 15 * 2 * 4096 * 2048 * 2048


def test_reading_a_value_makes_the_host_wait() -> None:
    read = call("_local_scalar_dense.default", (tensor(1, storage=11),), ())
    waiting = predict_step([product(m=16384), read, *(addition(1000) for _ in range(50))], CALIBRATION)
    running = predict_step([product(m=16384), *(addition(1000) for _ in range(50))], CALIBRATION)
    assert waiting.ns > running.ns + 10_000


def test_tf32_is_faster_than_fp32() -> None:
    operations = [product(dtype="float32")]
    assert predict_step(operations, CALIBRATION, tf32=True).gpu_ns < 0.3 * predict_step(operations, CALIBRATION).gpu_ns


def chain(length: int, *, elements: int = 2**22, phase: str = "forward", first: int = 100) -> list[Operation]:
    """Elementwise operators, each of which reads what the one before it wrote."""
    return [
        call(
            "mul.Tensor",
            (tensor(elements, storage=first + number),),
            (tensor(elements, storage=first + number + 1),),
            phase,
            other=2.0,
        )
        for number in range(length)
    ]


def test_a_chain_of_elementwise_operators_becomes_one_kernel() -> None:
    groups = fuse(chain(10))
    assert len(groups) == 1
    assert groups[0].bytes == 2 * 4 * 2**22  # the first input and the last result


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

    assert len(fuse([cast(2), cast(3)])) == 1


def test_compiling_makes_a_chain_faster() -> None:
    operations = chain(50, elements=2**24)
    eager, compiled = predict_step(operations, CALIBRATION), predict_step(operations, CALIBRATION, compiled=True)
    assert compiled.ns < 0.1 * eager.ns
    assert compiled.launches == 1


def test_a_repeated_forward_pass_costs_the_host_as_much_as_the_first() -> None:
    forward = [addition(1000, storage=10 * n) for n in range(30)]
    named = [Operation(f"aten.op{n}", "forward", "block", one.inputs, one.outputs, {}) for n, one in enumerate(forward)]
    again = [Operation(one.name, "backward", one.module, one.inputs, one.outputs, {}) for one in named]
    slow_forward = msgspec.structs.replace(
        CALIBRATION,
        trials=tuple(
            msgspec.structs.replace(one, ns=3 * one.ns) if one.phase == "forward" else one for one in CALIBRATION.trials
        ),
    )
    first, second = predict_step([*named, *again], slow_forward).phases
    assert second.host_ns == pytest.approx(first.host_ns, rel=0.25)


def test_a_checkpoint_costs_the_host_what_its_trial_shows() -> None:
    """Forward takes twice as long under a checkpoint. Backward also repeats it, for three times its plain cost."""
    forward, backward = (next(one for one in CALIBRATION.trials if one.phase == phase) for phase in FORTH_AND_BACK)
    both = {name: count + forward.operations[name] for name, count in backward.operations.items()}
    trials = (
        msgspec.structs.replace(forward, model="made up checkpoint block", ns=2 * forward.ns),
        msgspec.structs.replace(
            backward, model="made up checkpoint block", ns=backward.ns + 3 * forward.ns, operations=both
        ),
    )
    plain = HostModel(CALIBRATION)
    host = HostModel(msgspec.structs.replace(CALIBRATION, trials=(*CALIBRATION.trials, *trials)))
    assert host.checkpointed == pytest.approx(2, rel=0.1)
    assert host.again == pytest.approx(3, rel=0.1)
    assert host.cost(addition(8), "forward") == plain.cost(addition(8), "forward")  # they do not count as plain steps


def test_another_gpu_is_scaled_by_its_data_sheet_and_less_certain() -> None:
    card = find("NVIDIA A100-SXM4-80GB")
    assert card is not None
    scaled = scale_calibration(CALIBRATION, card)
    operations = [product(m=16384) for _ in range(20)]
    here, there = predict_step(operations, CALIBRATION), predict_step(operations, scaled)
    assert there.gpu_ns == pytest.approx(here.gpu_ns * 989.4 / 312, rel=0.1)
    assert scaled.scaled_from == "NVIDIA H200"
    assert math.log(there.interval_ns[1] / there.ns) > 2 * math.log(here.interval_ns[1] / here.ns)


def test_a_gpu_without_bf16_has_no_times_for_it() -> None:
    card = find("Tesla V100-SXM2-32GB")
    assert card is not None
    assert not any(one.dtype == "bf16" for one in scale_calibration(CALIBRATION, card).series)


def test_communication_hides_behind_backward() -> None:
    operations = [*(product(m=8192) for _ in range(20)), *(product("backward", m=8192) for _ in range(40))]
    step = predict_step(operations, CALIBRATION)
    links, is_assumed = assume_links("NVIDIA H200", 8)
    assert is_assumed
    parallel = predict_data_parallel(step, [4 * 2048 * 2048] * 20, links)
    assert step.ns < parallel.step_ns < step.ns + parallel.communication_ns
    sent_ns = 20 * 4 * 2048 * 2048 * (2 * 7 / 8) / 3.6e11 * 1e9
    assert sent_ns < parallel.communication_ns < 1.5 * sent_ns


def half(*shape: int, storage: int, contiguous: bool = True) -> TensorFacts:
    return tensor(*shape, storage=storage, dtype="bfloat16", contiguous=contiguous)


def linear_step() -> list[Operation]:
    """Two linear layers with the same input: casts of weights, products, and their gradients with casts."""
    x, y = half(1024, 512, storage=1), (half(1024, 256, storage=41), half(1024, 256, storage=42))
    operations = []
    for number in (0, 1):
        weight, cast = tensor(512, 256, storage=20 + number), half(512, 256, storage=30 + number)
        operations.append(call("_to_copy.default", (weight,), (cast,)))
        operations.append(call("mm.default", (x, cast), (y[number],)))
    for number in (0, 1):
        cast, gradient = half(256, 512, storage=30 + number), half(256, 512, storage=50 + number)
        operations.append(
            call("mm.default", (half(256, 1024, storage=60, contiguous=False), x), (gradient,), "backward")
        )
        operations.append(call("mm.default", (y[number], cast), (half(1024, 512, storage=70 + number),), "backward"))
        operations.append(call("_to_copy.default", (gradient,), (tensor(256, 512, storage=80 + number),), "backward"))
    return operations


def test_working_weights_need_no_casts() -> None:
    left = use_working_weights(linear_step())
    assert {one.name for one in left} == {"aten.mm.default"}


def test_merged_products_do_the_same_work_in_fewer_kernels() -> None:
    plain = [one for one in linear_step() if "mm" in one.name]
    merged = merge_products(plain)
    assert [(one.phase, one.inputs[0].shape, one.outputs[0].shape) for one in merged] == [
        ("forward", (1024, 512), (1024, 512)),
        ("backward", (512, 1024), (512, 512)),
        ("backward", (1024, 512), (1024, 512)),
    ]
    before, after = predict_step(plain, CALIBRATION), predict_step(plain, CALIBRATION, merge=True)
    assert after.flops == before.flops
    assert after.launches == before.launches // 2
    assert after.gpu_ns < before.gpu_ns


def test_continuous_load_slows_products_down_and_nothing_else() -> None:
    hot = msgspec.structs.replace(
        CALIBRATION, constants=CALIBRATION.constants | {"burst_bf16_8192_ns": 1e6, "sustained_bf16_8192_ns": 1.2e6}
    )
    products, additions = [product(m=16384) for _ in range(20)], [addition(2**26) for _ in range(20)]
    assert predict_step(products, hot).gpu_ns == pytest.approx(
        1.2 * predict_step(products, CALIBRATION).gpu_ns, rel=0.02
    )
    assert predict_step(additions, hot).gpu_ns == pytest.approx(predict_step(additions, CALIBRATION).gpu_ns)


def test_a_dtype_that_was_not_measured_is_an_error() -> None:
    without = msgspec.structs.replace(
        CALIBRATION, series=tuple(one for one in CALIBRATION.series if one.dtype not in ("bf16", "fp16"))
    )
    with pytest.raises(StepscopeError, match="no times of products in bf16"):
        predict_step([product()], without)


def test_without_a_backward_pass_the_host_is_faster() -> None:
    calls = [addition(1000, storage=10 * n) for n in range(100)]
    training = predict_step([*calls, addition(1000, phase="backward")], CALIBRATION).phases[0]
    assert predict_step(calls, CALIBRATION).phases[0].host_ns < 0.9 * training.host_ns

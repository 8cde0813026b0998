"""Predicted step times, from a made-up calibration whose times follow from a few numbers."""

import math
from typing import Any

import msgspec
import pytest

from stepscope.errors import StepscopeError
from stepscope.hardware import find
from stepscope.planner.assumptions import accelerator_of
from stepscope.planner.operation import Operation
from stepscope.planner.prediction import _time
from stepscope.planner.simulation import Simulation
from stepscope.planner.step_time import NotCalibratedError, predict_step
from stepscope.planner.step_time.data_sheets import assume_links, predict_data_parallel, scale_calibration
from stepscope.planner.step_time.host_time import HostModel
from stepscope.planner.step_time.kernels_of import KernelModel
from stepscope.planner.step_time.measured_times import Curve, MeasuredTimes, product_alignment
from stepscope.recording.rows.calibration import Calibration, Series
from stepscope.spec import SIZES, Workload
from tests.cpu.planner.calibrations import CALL_NS, LAUNCH_NS, bytes_ns, make_calibration, product_ns
from tests.cpu.planner.operations import addition, call, product, tensor

CALIBRATION = make_calibration()
FORTH_AND_BACK = ("forward", "backward")


def kernel_of(operation: Operation, *before: Operation) -> object:
    model = KernelModel(MeasuredTimes(CALIBRATION))
    for position, one in enumerate(before):
        model.kernels_of(position, one)
    return model.kernels_of(len(before), operation)


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


def test_the_interval_is_wider_where_a_slower_host_would_decide() -> None:
    def reach(operations: list[Operation], calibration: Calibration) -> tuple[float, float]:
        step = predict_step(operations, calibration)
        low, high = (abs(math.log(edge / step.ns)) for edge in step.interval_ns)
        return low, high

    products = [product(m=16384) for _ in range(50)]
    usual = predict_step(products, CALIBRATION)
    balanced = make_calibration(host_factor=1.05 * usual.gpu_ns / usual.host_ns)
    (gpu_low, gpu_high), (low, high) = reach(products, CALIBRATION), reach(products, balanced)
    launches_low, launches_high = reach([addition(1000) for _ in range(50)], CALIBRATION)
    assert gpu_high == pytest.approx(gpu_low, rel=0.2)
    assert launches_high == pytest.approx(launches_low, rel=0.2)
    assert low < 1.1 * gpu_low
    assert 1.25 * gpu_high < high < launches_high


def test_a_step_in_balance_takes_longer_than_host_and_gpu_alone() -> None:
    """A host that is slower than expected costs time, and one that is faster saves none."""
    products = [product(m=16384) for _ in range(400)]
    usual = predict_step(products, CALIBRATION)
    balanced = predict_step(products, make_calibration(host_factor=usual.gpu_ns / usual.host_ns))
    alone = max(balanced.host_ns, balanced.gpu_ns)
    assert 1.04 * alone < balanced.ns < 1.08 * alone
    assert balanced.phases[0].ns == balanced.ns
    assert usual.ns == pytest.approx(usual.gpu_ns, rel=0.02)


def test_steps_of_full_size_decide_what_calls_cost() -> None:
    small = [one for one in CALIBRATION.trials if one.phase == "forward"]
    full = [msgspec.structs.replace(one, ns=3 * one.ns, is_full_size=True) for one in small]
    plain = HostModel(CALIBRATION)
    host = HostModel(msgspec.structs.replace(CALIBRATION, trials=(*CALIBRATION.trials, *full)))
    assert host.cost(addition(8), "forward") == pytest.approx(3 * plain.cost(addition(8), "forward"), rel=0.05)
    assert host.cost(addition(8), "backward") == plain.cost(addition(8), "backward")


def test_reading_a_value_makes_the_host_wait() -> None:
    read = call("_local_scalar_dense.default", (tensor(1, storage=11),), ())
    waiting = predict_step([product(m=16384), read, *(addition(1000) for _ in range(50))], CALIBRATION)
    running = predict_step([product(m=16384), *(addition(1000) for _ in range(50))], CALIBRATION)
    assert waiting.ns > running.ns + 10_000


@pytest.mark.parametrize(("source", "non_blocking", "waits"), [(-1, False, True), (-1, True, False), (5, False, False)])
def test_a_copy_from_the_cpu_makes_the_host_wait(source: int, non_blocking: bool, waits: bool) -> None:
    index = (tensor(1, storage=source, dtype="int64"),), (tensor(1, storage=6, dtype="int64"),)
    copy = call("_to_copy.default", *index, non_blocking=non_blocking)
    step = predict_step([product(m=16384), copy], CALIBRATION)
    assert (step.host_ns > step.gpu_ns) == waits


def test_a_safe_softmax_has_three_more_kernels() -> None:
    scores = (tensor(64, 1024, 1024, storage=1),), (tensor(64, 1024, 1024, storage=2),)
    plain, safe = (
        predict_step([call(f"{name}.default", *scores)], CALIBRATION) for name in ("_softmax", "_safe_softmax")
    )
    elements = 64 * 1024 * 1024
    assert safe.launches == plain.launches + 3
    more = bytes_ns(5 * elements) + bytes_ns(2 * elements) + bytes_ns(8 * elements)
    assert safe.gpu_ns == pytest.approx(plain.gpu_ns + more, rel=0.1)


@pytest.mark.parametrize("vocab", [1024, 50257])
def test_a_loss_reads_one_score_per_token_and_its_gradient_is_only_written(vocab: int) -> None:
    scores, targets = tensor(65536, vocab, storage=1), tensor(65536, storage=2, dtype="int64")
    forward = call("nll_loss_forward.default", (scores, targets), (tensor(storage=3), tensor(storage=4)))
    given = (tensor(storage=5), scores, targets, tensor(storage=4))
    backward = call("nll_loss_backward.default", given, (tensor(65536, vocab, storage=6),))
    assert predict_step([forward], CALIBRATION).gpu_ns < 5 * LAUNCH_NS
    assert predict_step([backward], CALIBRATION).gpu_ns == pytest.approx(bytes_ns(4 * 65536 * vocab), rel=0.05)


def test_a_number_is_added_to_a_list_faster_than_another_list() -> None:
    one, other = ([tensor(10**7, storage=first + n) for n in range(10)] for first in (100, 200))
    number, sums = call("_foreach_add_.Scalar", (*one,), ()), call("_foreach_add_.List", (*one, *other), ())
    took = [predict_step([update], CALIBRATION).gpu_ns for update in (number, sums)]
    assert took == pytest.approx([bytes_ns(passes * 4 * 10**8) for passes in (2, 3)], rel=0.05)


def attention(*, mask: bool, dropout: float) -> Operation:
    q, k, v = (tensor(8, 16, 1024, 64, storage=number, dtype="bfloat16") for number in (1, 2, 3))
    bias = (tensor(8, 1, 1024, 1024, storage=4, dtype="bfloat16"),) if mask else ()
    name = "_scaled_dot_product_cudnn_attention.default"
    return call(name, (q, k, v, *bias), (tensor(8, 16, 1024, 64, storage=9, dtype="bfloat16"),), dropout_p=dropout)


def test_attention_with_a_mask_and_dropout_pays_for_both() -> None:
    plain = next(one for one in CALIBRATION.series if (one.operation, one.dtype) == ("sdpa-cudnn", "bf16"))
    more = [slow_series(plain, "sdpa-cudnn-masked", 2.0), slow_series(plain, "sdpa-cudnn-dropout", 3.0)]
    calibration = msgspec.structs.replace(CALIBRATION, series=(*CALIBRATION.series, *more))
    chosen = ((False, 0.0), (True, 0.0), (False, 0.1), (True, 0.1))
    alone, masked, dropped, both = (
        predict_step([attention(mask=mask, dropout=dropout)], calibration).gpu_ns for mask, dropout in chosen
    )
    assert masked / alone == pytest.approx(2.0, rel=0.05)
    assert dropped / alone == pytest.approx(3.0, rel=0.05)
    assert both / alone == pytest.approx(6.0, rel=0.05)


def slow_series(series: Series, operation: str, factor: float) -> Series:
    rows = tuple((*row[:-1], round(factor * row[-1])) for row in series.rows)
    return msgspec.structs.replace(series, operation=operation, rows=rows)


def test_tf32_is_faster_than_fp32() -> None:
    operations = [product(dtype="float32")]
    assert predict_step(operations, CALIBRATION, tf32=True).gpu_ns < 0.3 * predict_step(operations, CALIBRATION).gpu_ns


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
    scaled = scale_calibration(CALIBRATION, card)
    assert not any(one.dtype == "bf16" for one in scaled.series)
    nothing: Any = None
    simulation = Simulation(
        gpu=accelerator_of(card),
        steps=2,
        parameter_sizes=[],
        memory=nothing,
        operations=[product()],
        assumptions=[],
        events=nothing,
        requests=[],
    )
    timed, said = _time(simulation, Workload(model=SIZES["nano"], precision="bf16"), scaled)
    assert timed is None
    assert said == ["No step time: the data sheet of the V100 SXM2 has no bf16."]


def test_communication_hides_behind_backward() -> None:
    operations = [*(product(m=8192) for _ in range(20)), *(product("backward", m=8192) for _ in range(40))]
    step = predict_step(operations, CALIBRATION)
    links, is_assumed = assume_links("NVIDIA H200", 8)
    assert is_assumed
    parallel = predict_data_parallel(step, [4 * 2048 * 2048] * 20, links)
    assert step.ns < parallel.step_ns < step.ns + parallel.communication_ns
    sent_ns = 20 * 4 * 2048 * 2048 * (2 * 7 / 8) / 3.6e11 * 1e9
    assert sent_ns < parallel.communication_ns < 1.5 * sent_ns


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

"""Simulated steps against peaks that were measured on an H200, and what a simulation says about them."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import accumulate

import msgspec
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from stepscope.spec import SIZES, Workload
from stepscope.step import build
from tests.cpu.planner.simulated import PROGRAMS, REFUSED, Answer

# Of bench/results: bench_h200, bench_h200_faster, attention_train_h200, memory_h200, memory_checkpoint_study_h200.
MEASURED = {
    "fp32": 2_374_862_848,
    "bf16": 2_971_895_808,
    "fused": 5_226_378_752,
    "inference": 581_028_864,
    "checkpointed": 2_473_641_984,
}
OTHERS = (
    "nano",
    "micro-batches",
    "fp16",
    "graphed",
    "sgd",
    "llama",
    "llama-compiled",
    "llama-fast",
    "chain-compiled",
    *(f"{product}-product" for product in ("odd", "timed-odd", "even", "thin-odd", "thin-even")),
    "graph-break",
    "unknown-compiler",
    "branching",
    "masked",
    "on-cpu",
    "adafactor",
)
GROUPED = ("grouped-bf16", "grouped-fp32")
EXPERTS = ("experts-bf16", "experts-fp32")
UNUSUAL = ("biases-2.11", "biases-2.12", "recomputed-index", "fused-sgd", "compiled", "convolution", "triton")


def simulate(names: Iterable[str], **environment: str) -> dict[str, Answer]:
    command = [sys.executable, "-m", "tests.cpu.planner.simulated", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    decode = msgspec.json.Decoder(Answer).decode
    return {name: decode(line) for name, line in zip(names, done.stdout.splitlines(), strict=True)}


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    return simulate((*MEASURED, *OTHERS, *GROUPED, *EXPERTS, *UNUSUAL, *PROGRAMS, *REFUSED))


def operators_of(answer: Answer, phase: str = "") -> list[str]:
    return [one.name for one in answer.operations if not phase or one.phase == phase]


def categories_of(answer: Answer) -> dict[str, int]:
    assert answer.memory is not None
    return {one.category: one.bytes for one in answer.memory.categories}


@pytest.mark.parametrize("name", MEASURED)
def test_peak_is_the_measured_one_to_the_byte(answers: dict[str, Answer], name: str) -> None:
    memory = answers[name].memory
    assert memory is not None
    assert memory.peak_allocated_bytes == MEASURED[name]
    low, high = memory.allocated_range
    assert low <= memory.peak_allocated_bytes <= high < 1.01 * low


def test_categories_and_modules_add_up_to_the_peak(answers: dict[str, Answer]) -> None:
    for name in MEASURED:
        memory = answers[name].memory
        assert memory is not None
        assert sum(one.bytes for one in memory.categories) == memory.peak_allocated_bytes
        assert sum(one.bytes for one in memory.modules) == memory.peak_allocated_bytes
        assert max(one.bytes for one in memory.phases) == memory.peak_allocated_bytes
        assert max(one.bytes for one in memory.timeline) <= memory.peak_allocated_bytes


def test_categories_are_those_that_the_recorder_measured(answers: dict[str, Answer]) -> None:
    measured = {"parameters": 515_976_192, "activations": 1_013_829_632, "autocast copies": 275_013_632}
    found = categories_of(answers["bf16"])
    for category, size in measured.items():
        assert found[category] == pytest.approx(size, rel=0.003)
    assert found["workspaces"] == 2 * 32 * 2**20


def test_recomputed_activations_are_activations(answers: dict[str, Answer]) -> None:
    assert categories_of(answers["checkpointed"])["activations"] == pytest.approx(79_536_128, rel=0.01)


def test_a_step_fits_if_and_only_if_its_segments_do(answers: dict[str, Answer]) -> None:
    assert answers["bf16"].fitting == [False, True]


def test_operations_have_phases_modules_and_storages(answers: dict[str, Answer]) -> None:
    operations = answers["nano"].operations
    product = next(one for one in operations if one.name == "aten.mm.default" and one.phase == "backward")
    assert product.module == "lm_head"
    assert {one.phase for one in operations} == {"forward", "backward", "optimizer"}
    update = next(one for one in operations if one.name == "aten._foreach_addcdiv_.ScalarList")
    assert update.phase == "optimizer"
    assert len(update.inputs) == 3 * len({one.storage for one in update.inputs[: len(update.inputs) // 3]})
    view = next(one for one in operations if one.name == "aten.t.default")
    assert view.inputs[0].storage == view.outputs[0].storage >= 0
    assert all(not name.startswith("prim.") for name in operators_of(answers["nano"]))


def test_micro_batches_accumulate_into_one_gradient(answers: dict[str, Answer]) -> None:
    one, two = answers["nano"], answers["micro-batches"]
    assert operators_of(two).count("aten._scaled_dot_product_cudnn_attention.default") == 0
    assert operators_of(two, "optimizer") == operators_of(one, "optimizer")
    passes = [operators_of(answer, "forward").count("aten.index_select.default") for answer in (one, two)]
    assert passes == [1, 2]
    assert categories_of(two)["gradients"] <= 1.01 * 4 * two.parameters


def test_a_loss_scale_and_our_own_optimizer_are_simulated(answers: dict[str, Answer]) -> None:
    assert not answers["fp16"].error
    assert "aten._amp_foreach_non_finite_check_and_unscale_.default" in operators_of(answers["fp16"])
    assert categories_of(answers["fp16"])["optimizer state"] >= 8 * answers["fp16"].parameters
    update = next(one for one in answers["fp16"].operations if one.name == "stepscope.adamw.default")
    assert sum(math.prod(one.shape) for one in update.inputs) >= 4 * answers["fp16"].parameters
    assert not answers["fp16"].launched
    assert answers["triton"].launched == ("double",)


def test_a_phase_that_requests_nothing_has_a_peak(answers: dict[str, Answer]) -> None:
    memory = answers["sgd"].memory
    assert memory is not None
    peaks = {one.phase: one.bytes for one in memory.phases}
    held = sum(categories_of(answers["sgd"])[name] for name in ("parameters", "gradients", "workspaces"))
    assert held <= peaks["optimizer"] < peaks["forward"]
    assert not any(one.phase == "optimizer" for one in memory.timeline)


def _most_live_bytes(run: Callable[[], object]) -> int:
    """The most bytes that PyTorch's allocator for the CPU has handed out at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorder:
        run()
    assert recorder.profiler is not None
    results = recorder.profiler.kineto_results
    assert results is not None
    changes: list[tuple[int, int]] = sorted(
        (one.start_ns(), one.nbytes()) for one in results.events() if one.name() == "[memory]"
    )
    return max(accumulate(size for _, size in changes))


def _build_sgd() -> Callable[[], None]:
    return build(Workload(model=SIZES["nano"], optimizer="sgd"), torch.device("cpu")).run


@pytest.mark.parametrize(("name", "make"), [("sgd", _build_sgd), *PROGRAMS.items()])
def test_requests_are_those_of_the_same_step_on_a_cpu(
    answers: dict[str, Answer], name: str, make: Callable[[], Callable[[], None]]
) -> None:
    def run() -> None:
        step = make()
        for _ in range(2):
            step()

    memory = answers[name].memory
    assert memory is not None
    assert memory.peak_requested_bytes - memory.workspace_bytes == pytest.approx(_most_live_bytes(run), rel=1e-4)


def test_transformers_model_takes_the_kernel_of_the_gpu(answers: dict[str, Answer]) -> None:
    operators = operators_of(answers["llama"])
    assert operators.count("aten._scaled_dot_product_cudnn_attention.default") == 2
    assert "aten._fused_rms_norm.default" not in operators  # this model writes its norm itself
    assert "aten.silu_backward.default" in operators
    assert "scaled_dot_product_attention takes cuDNN's kernel." in answers["llama"].assumptions
    shapes = {tensor.shape for one in answers["llama"].operations for tensor in (*one.inputs, *one.outputs)}
    assert not any(shape[-2:] == (48, 48) for shape in shapes)  # no mask


def test_grouped_heads_have_no_fused_kernel_in_fp32(answers: dict[str, Answer]) -> None:
    assert "aten._scaled_dot_product_cudnn_attention.default" in operators_of(answers["grouped-bf16"])
    assert "aten._safe_softmax.default" in operators_of(answers["grouped-fp32"])


@pytest.mark.parametrize("name", ["grouped-bf16", "grouped-fp32"])
def test_a_mask_of_booleans_becomes_numbers_before_any_kernel(answers: dict[str, Answer], name: str) -> None:
    readers = [one.name for one in answers[name].operations if any(fact.dtype == "bool" for fact in one.inputs)]
    assert readers
    assert set(readers) <= {"aten.tril.default", "aten.where.self"}


def test_a_compiled_transformers_model_builds_its_mask(answers: dict[str, Answer]) -> None:
    attention = next(one for one in answers["llama-compiled"].operations if "cudnn_attention" in one.name)
    assert any(fact.shape[-2:] == (48, 48) for fact in attention.inputs)


def test_a_condition_on_values_names_the_line(answers: dict[str, Answer]) -> None:
    error = answers["branching"].error
    assert "the value of a tensor" in error
    assert "simulated.py" in error
    assert "if y.sum() > 0" in error


def test_a_condition_on_a_known_mask_is_answered(answers: dict[str, Answer]) -> None:
    assert not answers["masked"].error
    assert "aten.index.Tensor" not in operators_of(answers["masked"])


def test_a_model_can_be_built_on_the_cpu_and_moved(answers: dict[str, Answer]) -> None:
    assert answers["on-cpu"].parameters == 64 * 64 + 3 * 64
    assert categories_of(answers["on-cpu"])["parameters"] == 64 * 64 * 4 + 3 * 512


def test_an_optimizer_that_reads_norms_is_simulated_and_says_so(answers: dict[str, Answer]) -> None:
    assert not answers["adafactor"].error
    assert any(one.startswith("The optimizer reads norms") for one in answers["adafactor"].assumptions)
    assert categories_of(answers["adafactor"])["optimizer state"] < categories_of(answers["on-cpu"])["optimizer state"]


@pytest.mark.parametrize(("name", "item_bytes"), [("experts-bf16", 2), ("experts-fp32", 4)])
def test_experts_are_one_call_forward_and_one_per_gradient(
    answers: dict[str, Answer], name: str, item_bytes: int
) -> None:
    calls = [one for one in answers[name].operations if one.name == "aten._grouped_mm.default"]
    assert [(one.phase, one.outputs[0].shape) for one in calls] == [("forward", (8, 32)), ("backward", (4, 32, 64))]
    assert categories_of(answers[name])["parameters"] == 4 * 32 * 64 * item_bytes


def test_experts_in_bf16_need_no_cublas(answers: dict[str, Answer]) -> None:
    assert categories_of(answers["experts-bf16"])["workspaces"] < 2**20
    assert categories_of(answers["experts-fp32"])["workspaces"] >= 2 * 32 * 2**20


def test_a_list_as_an_index_in_a_checkpoint_is_simulated(answers: dict[str, Answer]) -> None:
    assert not answers["recomputed-index"].error


def test_a_compiled_step_keeps_what_its_compiler_keeps(answers: dict[str, Answer]) -> None:
    """A chain of 16 operators keeps its input and makes one result, and its backward pass makes one gradient."""
    memory = answers["chain-compiled"].memory
    assert memory is not None
    peaks = {one.phase: one.bytes for one in memory.phases}
    assert 0 <= peaks["forward"] - 3 * 2**20 <= 4096  # the input, the result, and the gradient of the step before
    assert 0 <= peaks["backward"] - 4 * 2**20 <= 4096


def test_products_with_odd_sizes_are_padded_if_bound_by_arithmetic_and_faster(answers: dict[str, Answer]) -> None:
    """Padding copies a matrix. In the table of times, rows that are not aligned cost nothing."""

    def forward_bytes(name: str) -> int:
        memory = answers[f"{name}-product"].memory
        assert memory is not None
        return next(one.bytes for one in memory.phases if one.phase == "forward")

    copy_bytes = 4 * 256 * 1004
    assert forward_bytes("odd") - forward_bytes("even") > copy_bytes
    assert forward_bytes("odd") - forward_bytes("timed-odd") > copy_bytes
    assert forward_bytes("thin-odd") - forward_bytes("thin-even") < copy_bytes / 10


def test_compiling_changes_the_memory_and_not_the_operators(answers: dict[str, Answer]) -> None:
    eager, compiled = answers["unknown-compiler"], answers["llama-compiled"]
    assert eager.memory is not None
    assert compiled.memory is not None
    assert compiled.memory.peak_allocated_bytes < eager.memory.peak_allocated_bytes
    assert compiled.memory.workspace_bytes == eager.memory.workspace_bytes > 0
    assert operators_of(compiled) == operators_of(eager)
    assert any("compiles for this GPU" in one for one in compiled.assumptions)


def test_without_the_compiler_the_memory_is_the_eager_one_and_the_reason_is_said(answers: dict[str, Answer]) -> None:
    (said,) = [one for one in answers["unknown-compiler"].assumptions if "eager" in one]
    assert said.startswith("Memory is that of the eager step, without --compile: the compiler of PyTorch")
    assert answers["graph-break"].error.startswith("compilation stops at `")


def test_a_captured_step_reserves_its_graphs_next_to_what_lives_between_steps(answers: dict[str, Answer]) -> None:
    fast, graphed = answers["llama-fast"], answers["graphed"]
    assert fast.memory is not None
    assert graphed.memory is not None
    assert fast.fitting == [False, True]
    assert any("Replays request no memory" in one for one in graphed.assumptions)
    categories = categories_of(fast)
    assert categories["optimizer state"] == 2 * categories["parameters"]
    assert {one.phase for one in fast.memory.timeline} == {"forward", "backward"}
    assert graphed.memory.reserved_bytes[0] > graphed.memory.peak_allocated_bytes


def test_gradients_are_clipped_together(answers: dict[str, Answer]) -> None:
    operators = operators_of(answers["on-cpu"])
    assert [operators.count(f"aten.{name}") for name in ("_foreach_norm.Scalar", "_foreach_mul_.Tensor")] == [1, 1]
    assert operators.count("aten.linalg_vector_norm.default") == 1  # of all norms


def test_a_bias_needs_a_workspace_of_its_own_before_2_12(answers: dict[str, Answer]) -> None:
    """One in the thread of the program, and one where autograd repeats the forward pass."""
    workspaces = {name: categories_of(answers[name])["workspaces"] for name in ("biases-2.11", "biases-2.12")}
    assert workspaces["biases-2.11"] - workspaces["biases-2.12"] == 2 * 2**20


def test_an_optimizer_in_place_needs_no_fake(answers: dict[str, Answer]) -> None:
    assert "aten._fused_sgd_.default" in operators_of(answers["fused-sgd"])
    assert categories_of(answers["fused-sgd"])["optimizer state"] == categories_of(answers["fused-sgd"])["parameters"]


def test_what_is_not_simulated_as_it_runs_is_said(answers: dict[str, Answer]) -> None:
    assert any("`torch.compile`" in one for one in answers["compiled"].assumptions)
    assert not any("`torch.compile`" in one for one in answers["nano"].assumptions)
    assert "Workspaces of convolutions are not counted." in answers["convolution"].assumptions


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_simulated_is_refused_with_the_line_and_a_hint(answers: dict[str, Answer], name: str) -> None:
    error = answers[name].error
    assert "simulated.py" in error or name == "sparse"
    assert "hint: " in error


def test_ranks_hold_less_the_more_is_sharded(answers: dict[str, Answer]) -> None:
    memory, ranks = answers["bf16"].memory, answers["bf16"].ranks
    assert memory is not None
    gradients = 4 * answers["bf16"].parameters
    assert ranks["none"] == pytest.approx(memory.peak_allocated_bytes + gradients, rel=0.01)
    assert ranks["fsdp"] < ranks["optimizer"] < ranks["none"]


def test_without_a_compiler_the_figures_are_the_same() -> None:
    found = simulate(("inference",), CXX="no-such-compiler")
    assert found["inference"].memory is not None
    assert found["inference"].memory.peak_allocated_bytes == MEASURED["inference"]

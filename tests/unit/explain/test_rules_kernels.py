"""Rules about kernels: recordings in which each fires, with its estimate, and similar ones in which it does not."""

import json
import math
from dataclasses import replace
from typing import Any

import msgspec
import polars as pl
import pytest

from stepscope.explain.rules.evidence import BANDWIDTH_SHARE
from stepscope.explain.trace.profile import make_profile
from stepscope.hardware import find as find_hardware
from stepscope.spec import build_case
from tests.unit.explain.test_rules_host import found, saving_us
from tests.unit.recordings import (
    ADD,
    BF16,
    COPY,
    FP32,
    GEMM_BF16,
    GEMM_FP32,
    GEMM_TF32,
    INDUCTOR,
    SOFTMAX,
    Timeline,
)
from tests.unit.rows import ENVIRONMENT

H200_BF16, H200_TF32, H200_FP32, H200_BYTES = 989.4e12, 494.7e12, 66.9e12, 4.8e12


# --- SS003: chains


def chain(times: list[float], *, kernel: str = ADD, between: str | None = None) -> Timeline:
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"):
        for layer in range(10):
            with timeline.module(f"blocks.{layer}.ffn"):
                timeline.launch(GEMM_BF16, 100, op="aten::mm")
                for us in times:
                    timeline.launch(kernel, us, op="aten::mul")
                    if between:
                        timeline.launch(between, 50, op="aten::mm")
    return timeline


def test_fused_chain_takes_as_long_as_its_longest_kernel() -> None:
    profile = chain([30, 50, 20]).profile()
    assert saving_us(profile, "SS003") == pytest.approx(10 * (30 + 20), rel=0.01)
    finding = found(profile, "SS003")
    assert finding is not None
    assert "in the forward of ffn" in finding.evidence
    # At least a fifth remains, however many kernels there are.
    assert saving_us(chain([20] * 20).profile(), "SS003") == pytest.approx(10 * 400 * 0.8, rel=0.01)


@pytest.mark.parametrize(("phase", "left"), [("backward", 0.45), ("forward", 0.25)])
def test_compiling_a_chain_saves_cpu_time(phase: str, left: float) -> None:
    """In a CPU-bound step, the CPU time of all launches counts, not the number of launches left."""
    timeline = Timeline(host_us=200)
    with timeline.step(), timeline.phase(phase), timeline.module("blocks.0.ffn"):
        for _ in range(100):
            timeline.launch(ADD, 10, op="aten::mul")
    assert saving_us(timeline.profile(), "SS003") == pytest.approx(100 * 200 * (1 - left), rel=0.02)


def test_gemm_interrupts_a_chain() -> None:
    assert found(chain([30, 50, 20], between=GEMM_BF16).profile(), "SS003") is None
    assert found(chain([30]).profile(), "SS003") is None


def test_compiled_kernels_are_not_fused_again() -> None:
    assert found(chain([30, 50, 20], kernel=INDUCTOR).profile(), "SS003") is None
    assert found(chain([30, 50, 20]).profile(compiled=True), "SS003") is None


# --- SS004: attention

HEADS, LENGTH, WIDTH = 64, 1024, 64
SCORES = [[HEADS, LENGTH, WIDTH], [HEADS, WIDTH, LENGTH]]
VALUES = [[HEADS, LENGTH, LENGTH], [HEADS, LENGTH, WIDTH]]
SQUARE = 2 * HEADS * LENGTH * LENGTH * WIDTH


def write_attention(
    timeline: Timeline,
    *,
    parts: bool = True,
    masked: bool = True,
    softmax: bool = True,
    between: bool = False,
    mask_op: str = "aten::masked_fill_",
) -> None:
    """One attention: GEMMs of 100 µs each and 1000 µs of everything else."""
    bf16 = [BF16, BF16]
    with timeline.part("scores") if parts else timeline.range("a"):
        timeline.launch(GEMM_BF16, 100, op="aten::bmm", shapes=SCORES, dtypes=bf16)
        timeline.launch(ADD, 200, op=mask_op if masked else "aten::mul")
    if between:
        timeline.launch(GEMM_BF16, 100, op="aten::mm")
    with timeline.part("softmax") if parts else timeline.range("b"):
        timeline.launch(SOFTMAX if softmax else ADD, 800, op="aten::_softmax" if softmax else "aten::exp")
    with timeline.part("values") if parts else timeline.range("c"):
        timeline.launch(GEMM_BF16, 100, op="aten::bmm", shapes=VALUES, dtypes=bf16)


# A causal kernel computes half of the square, and the other half of the diagonal tiles of 128.
CAUSAL = 0.5 + 0.5 * 128 / LENGTH


def fused_us(flops: float, share: float = 0.40, least: float = 5) -> float:
    queries = HEADS * LENGTH
    return least + flops / (H200_BF16 * share * queries / (queries + 12_000)) * 1e6


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_unfused_attention(parts: bool, masked: bool) -> None:
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"), timeline.module("blocks.0.attention"):
        write_attention(timeline, parts=parts, masked=masked)
    # Only the built-in attention's mask is known to be causal.
    expected = 1200 - fused_us(2 * SQUARE * (CAUSAL if masked and parts else 1))
    assert saving_us(timeline.profile(), "SS004") == pytest.approx(expected, rel=0.001)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (None, "q, k, v"),
        ("aten::mul", "q, k, v"),
        ("aten::masked_fill_", "q, k, v, attn_mask=mask"),
        ("aten::where", "q, k, v, attn_mask=mask"),
        ("aten::add", "q, k, v, attn_mask=mask"),
        ("aten::tril", "q, k, v, is_causal=True"),
    ],
)
def test_fused_call_computes_what_the_model_does(op: str | None, arguments: str) -> None:
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"):
        write_attention(timeline, parts=False, masked=op is not None, mask_op=op or "")
        timeline.launch(ADD, 10, op="aten::add")  # the residual
    finding = found(timeline.profile(), "SS004")
    assert finding is not None
    assert finding.fix.endswith(f"scaled_dot_product_attention({arguments})")


def test_mask_of_a_small_part_is_a_comment() -> None:
    """A text tower with a mask next to a vision tower without one."""
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"):
        for _ in range(3):
            write_attention(timeline, parts=False, masked=False)
            timeline.launch(GEMM_BF16, 10, op="aten::mm")
        write_attention(timeline, parts=False, mask_op="aten::add")
    finding = found(timeline.profile(), "SS004")
    assert finding is not None
    assert finding.fix.endswith("(q, k, v)")
    assert "attn_mask=mask where" in finding.fix


def test_fused_call_keeps_the_dropout() -> None:
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"):
        timeline.launch(GEMM_BF16, 100, op="aten::bmm", shapes=SCORES, dtypes=[BF16, BF16])
        timeline.launch(SOFTMAX, 800, op="aten::_softmax")
        timeline.launch(ADD, 100, op="aten::native_dropout")
        timeline.launch(GEMM_BF16, 100, op="aten::bmm", shapes=VALUES, dtypes=[BF16, BF16])
    finding = found(timeline.profile(), "SS004")
    assert finding is not None
    assert "dropout_p=" in finding.fix


def test_backward_of_fused_attention_has_five_gemms() -> None:
    timeline = Timeline()
    with timeline.step():
        with timeline.phase("forward"), timeline.module("blocks.0.attention"):
            write_attention(timeline)
        with timeline.phase("backward"), timeline.part("softmax"):
            for _ in range(4):
                timeline.launch(GEMM_BF16, 100, op="aten::bmm", shapes=SCORES, dtypes=[BF16, BF16])
            timeline.launch(ADD, 1000, op="aten::mul")
    expected = 1200 + 1400 - fused_us(2 * SQUARE * CAUSAL) - fused_us(5 * SQUARE * CAUSAL, 0.34, least=15)
    assert saving_us(timeline.profile(), "SS004") == pytest.approx(expected, rel=0.001)


def test_fused_attention_costs_four_launches() -> None:
    timeline = Timeline(host_us=400)
    with timeline.step(), timeline.phase("forward"):
        for layer in range(10):
            with timeline.module(f"blocks.{layer}.attention"):
                write_attention(timeline)
                with timeline.part("values"):
                    for _ in range(3):
                        timeline.launch(ADD, 10, op="aten::mul")
    # Seven launches each, three of which disappear. The kernels are shorter than the launches.
    assert saving_us(timeline.profile(), "SS004") == pytest.approx(10 * 3 * 400, rel=0.03)


@pytest.mark.parametrize(("host_us", "why"), [(5, None), (290, "CPU-bound")])
def test_gpu_time_below_the_cpu_time_saves_nothing(host_us: float, why: str | None) -> None:
    timeline = Timeline(host_us=host_us)
    with timeline.step(), timeline.phase("forward"):
        for layer in range(10):
            with timeline.module(f"blocks.{layer}.attention"):
                write_attention(timeline)
    finding = found(timeline.profile(), "SS004")
    assert finding is not None
    assert finding.saving_ns is not None
    if why is not None:
        assert why in finding.evidence
        assert f"{finding.saving_ns / 1e6:.3g} ms of step time" in finding.evidence
    assert why is not None or "but" not in finding.evidence


@pytest.mark.parametrize(("softmax", "between"), [(False, False), (True, True)])
def test_gemms_without_a_softmax_between_them_are_not_attention(softmax: bool, between: bool) -> None:
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"):
        write_attention(timeline, parts=False, softmax=softmax, between=between)
    assert found(timeline.profile(), "SS004") is None


# --- SS005: precision


def test_fp32_gemms_on_cuda_cores() -> None:
    flops, us = 2 * 4096**3, 2742.0  # three quarters of the fp32 peak
    timeline = Timeline()
    for _ in range(4):
        timeline.launch(GEMM_FP32, us, op="aten::mm", shapes=[[4096, 4096], [4096, 4096]], dtypes=[FP32, FP32])
    expected = 4 * (us - flops / (H200_TF32 * 0.75) * 1e6)
    assert saving_us(timeline.profile(), "SS005") == pytest.approx(expected, rel=0.01)


def test_memory_bound_gemm_gains_up_to_the_bandwidth() -> None:
    timeline = Timeline()
    moved = 4 * (16 * 2**20 + 2**20 * 16 + 16 * 16)
    timeline.launch(GEMM_FP32, 200, op="aten::mm", shapes=[[16, 2**20], [2**20, 16]], dtypes=[FP32, FP32])
    expected = 200 - moved / (H200_BYTES * BANDWIDTH_SHARE) * 1e6
    assert saving_us(timeline.profile(), "SS005") == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("kernel", "device"),
    [
        (GEMM_TF32, "NVIDIA H200"),
        (GEMM_BF16, "NVIDIA H200"),
        ("void gemv2T_kernel_val<int, float>", "NVIDIA H200"),
        (GEMM_FP32, "unknown GPU"),
    ],
)
def test_gemms_on_the_best_units_have_no_finding(kernel: str, device: str) -> None:
    timeline = Timeline(device=device)
    timeline.launch(kernel, 200, op="aten::mm", shapes=[[4096, 4096], [4096, 4096]], dtypes=[FP32, FP32])
    assert found(timeline.profile(), "SS005") is None


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_gpu_without_tf32_gets_fp16(phase: str) -> None:
    """Convolutions count too. Only training needs a gradient scaler."""
    timeline = Timeline(device="Tesla V100-SXM2-32GB")
    with timeline.step(), timeline.phase(phase):
        timeline.launch("volta_sgemm_128x64_nn", 200, op="aten::mm")
        timeline.launch("cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1", 300, op="aten::cudnn_convolution")
    finding = found(timeline.profile(), "SS005")
    assert finding is not None
    assert "TF32" not in finding.evidence
    assert "torch.float16" in finding.fix
    assert "high" not in finding.fix
    assert ("GradScaler" in finding.fix) == (phase == "backward")
    assert saving_us(timeline.profile(), "SS005") == pytest.approx(500 * 0.65, rel=0.01)


def test_built_in_model_on_a_gpu_without_tf32_runs_in_fp16() -> None:
    timeline = Timeline(device="Tesla V100-SXM2-32GB")
    timeline.launch("volta_sgemm_128x64_nn", 200, op="aten::mm")
    environment = msgspec.structs.replace(ENVIRONMENT, hardware=find_hardware("Tesla V100-SXM2-32GB"))
    finding = found(timeline.profile(case=build_case({"size": "small"}), environment=environment), "SS005")
    assert finding is not None
    assert "--precision fp16" in finding.fix


# --- SS006 and SS008: copies


@pytest.mark.parametrize(("target", "code", "other"), [(FP32, "SS006", "SS008"), (BF16, "SS008", "SS006")])
def test_a_copy_is_a_cast_or_a_change_of_layout(target: str, code: str, other: str) -> None:
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"):
        for _ in range(10):
            timeline.launch(GEMM_BF16, 100, op="aten::mm")
            shapes = [[1024, 4096], [1024, 4096], []]
            timeline.launch(COPY, 20, op="aten::copy_", shapes=shapes, dtypes=[target, FP32, "Scalar"])
    profile = timeline.profile()
    assert saving_us(profile, code) == pytest.approx(10 * 20)
    assert found(profile, other) is None
    finding = found(profile, code)
    assert finding is not None
    assert ("weights" in finding.evidence) == (code == "SS008")


def test_few_copies_have_no_finding() -> None:
    timeline = Timeline()
    timeline.launch(COPY, 15, op="aten::copy_")
    for _ in range(10):
        timeline.launch(GEMM_BF16, 100, op="aten::mm")
    assert found(timeline.profile(), "SS006") is None


def test_copies_inside_a_library_do_not_count() -> None:
    timeline = Timeline()
    timeline.launch(COPY, 200, op="aten::convolution_backward")
    timeline.launch(GEMM_BF16, 500, op="aten::mm")
    assert found(timeline.profile(), "SS006") is None


# --- SS009 and SS010: sizes


def sized(vocabulary: int) -> Timeline:
    timeline = Timeline()
    shapes = [[4096, 1024], [1024, 4096]]
    timeline.launch(GEMM_BF16, 50, op="aten::mm", shapes=shapes, dtypes=[BF16, BF16])
    shapes = [[4096, 1024], [1024, vocabulary]]
    timeline.launch(GEMM_BF16, 400, op="aten::mm", shapes=shapes, dtypes=[BF16, BF16])
    return timeline


def test_unaligned_vocabulary() -> None:
    # No aligned GEMM has half as many FLOPs, so the usual share of the peak applies.
    flops = 2 * 4096 * 1024 * (64 * math.ceil(10007 / 64))
    expected = 400 - flops / (H200_BF16 * 0.65) * 1e6
    assert saving_us(sized(10007).profile(), "SS009") == pytest.approx(expected, rel=0.01)
    assert found(sized(10048).profile(), "SS009") is None


def test_only_a_vocabulary_is_padded() -> None:
    """The size of an embedding or a loss is a vocabulary; another odd size is a choice of the model."""
    width = found(sized(10007).profile(), "SS009")
    assert width is not None
    assert width.is_remark
    assert "a width of the model, is 10007" in width.evidence
    timeline = sized(10007)
    timeline.launch(ADD, 5, op="aten::embedding", shapes=[[10007, 1024], [4096]], dtypes=[BF16, "long"])
    vocabulary = found(timeline.profile(), "SS009")
    assert vocabulary is not None
    assert vocabulary.fix.startswith("vocab = 10048")
    assert "the vocabulary, is 10007" in vocabulary.evidence


def test_empty_gemm_is_left_out() -> None:
    timeline = sized(10007)
    timeline.launch(GEMM_BF16, 1, op="aten::mm", shapes=[[0, 1024], [1024, 10007]], dtypes=[BF16, BF16])
    assert found(timeline.profile(), "SS009") is not None


def test_odd_number_of_rows_is_aligned() -> None:
    """Rows of 1024 elements begin at multiples of 16 bytes, however many there are."""
    timeline = Timeline()
    shapes = [[8193, 1024], [1024, 4096]]
    timeline.launch(GEMM_BF16, 400, op="aten::mm", shapes=shapes, dtypes=[BF16, BF16])
    assert found(timeline.profile(), "SS009") is None


def test_kernel_that_says_that_it_is_aligned_is_believed() -> None:
    timeline = Timeline()
    shapes = [[4096, 1024], [1024, 10007]]
    timeline.launch(GEMM_TF32, 400, op="aten::mm", shapes=shapes, dtypes=[FP32, FP32])
    assert found(timeline.profile(), "SS009") is None


@pytest.mark.parametrize(("strides", "letter"), [([[1, 1001], [4096, 1]], "M"), ([[1024, 1], [4096, 1]], None)])
def test_alignment_follows_the_strides(strides: list[list[int]], letter: str | None) -> None:
    """A transposed left operand is contiguous along M."""
    timeline = Timeline()
    shapes = [[1001, 1024], [1024, 4096]]
    timeline.launch(GEMM_BF16, 400, op="aten::mm", shapes=shapes, dtypes=[BF16, BF16])
    recording = timeline.record()
    ops = recording.ops.with_columns(strides=pl.lit(json.dumps(strides)))
    finding = found(make_profile(replace(recording, ops=ops)), "SS009")
    if letter is None:
        assert finding is None
    else:
        assert finding is not None
        assert f"(M × N × K): {letter}, " in finding.evidence


def test_costliest_gemm_is_named() -> None:
    timeline = Timeline()
    for _ in range(5):
        timeline.launch(GEMM_BF16, 50, op="aten::mm", shapes=[[1024, 1001], [1001, 256]], dtypes=[BF16, BF16])
    timeline.launch(GEMM_BF16, 900, op="aten::mm", shapes=[[1024, 1024], [1024, 2001]], dtypes=[BF16, BF16])
    finding = found(timeline.profile(), "SS009")
    assert finding is not None
    assert "1024 × 1024 × 2001" not in finding.evidence
    assert "the costliest is 1024 × 2001 × 1024" in finding.evidence


def test_gemms_of_unfused_attention_have_one_finding() -> None:
    timeline = Timeline()
    scores, values = [[64, 3137, 64], [64, 64, 3137]], [[64, 3137, 3137], [64, 3137, 64]]
    with timeline.step(), timeline.phase("forward"):
        timeline.launch(GEMM_BF16, 900, op="aten::bmm", shapes=scores, dtypes=[BF16, BF16])
        timeline.launch(SOFTMAX, 800, op="aten::_softmax")
        timeline.launch(GEMM_BF16, 900, op="aten::bmm", shapes=values, dtypes=[BF16, BF16])
    profile = timeline.profile()
    assert found(profile, "SS004") is not None
    assert [found(profile, code) for code in ("SS009", "SS010", "SS015")] == [None] * 3


def test_tile_with_mostly_padding() -> None:
    timeline = Timeline()
    # Tiles of 128 × 256: 320 rows fill two and a half tiles of 128, or one and a quarter if transposed.
    timeline.launch(GEMM_BF16, 100, op="aten::mm", shapes=[[320, 4096], [4096, 4096]], dtypes=[BF16, BF16])
    assert saving_us(timeline.profile(), "SS009") == pytest.approx(100 / 6, rel=0.01)
    finding = found(timeline.profile(), "SS009")
    assert finding is not None
    assert finding.is_remark  # batch × length: no code to paste
    assert "is 320 and leaves 17% of its tiles of 128 empty" in finding.evidence


@pytest.mark.parametrize("rows", [1, 64])
def test_padding_of_a_memory_bound_gemm_costs_nothing(rows: int) -> None:
    timeline = Timeline()
    timeline.launch(GEMM_BF16, 100, op="aten::mm", shapes=[[rows, 4096], [4096, 4096]], dtypes=[BF16, BF16])
    profile = timeline.profile()
    assert found(profile, "SS015") is not None
    assert found(profile, "SS009") is None


@pytest.mark.parametrize(("blocks", "expected"), [(133, 200 * 131 / 264), (264, None), (132 * 7 + 1, None)])
def test_partly_empty_last_wave(blocks: int, expected: float | None) -> None:
    timeline = Timeline(multiprocessors=132)
    grid: dict[str, Any] = {"grid_x": blocks, "grid_y": 1, "grid_z": 1, "block_x": 384, "block_y": 1, "block_z": 1}
    timeline.launch(GEMM_BF16, 200, op="aten::mm", registers=168, shared_bytes=200 * 1024, **grid)
    profile = timeline.profile()
    if expected is None:
        assert found(profile, "SS010") is None
    else:
        assert saving_us(profile, "SS010") == pytest.approx(expected, rel=0.01)


def test_waves_depend_on_the_gpu() -> None:
    """Blocks of 96 KiB: two fit on a multiprocessor of an H200, one on an A100's, none of the sizes is known for
    others."""
    grid: dict[str, Any] = {"grid_x": 133, "grid_y": 1, "grid_z": 1, "block_x": 128, "block_y": 1, "block_z": 1}
    texts = {}
    for device in ("NVIDIA H200", "NVIDIA A100-SXM4-40GB", "some other GPU"):
        timeline = Timeline(device=device, multiprocessors=100)
        timeline.launch(GEMM_BF16, 200, op="aten::mm", registers=168, shared_bytes=96 * 1024, **grid)
        finding = found(timeline.profile(), "SS010")
        texts[device] = finding.evidence if finding else None
    assert texts["NVIDIA H200"] is None  # less than a wave
    assert "1.33 waves" in (texts["NVIDIA A100-SXM4-40GB"] or "")
    assert "33% full" in (texts["NVIDIA A100-SXM4-40GB"] or "")
    assert texts["some other GPU"] is None


def test_waves_of_a_persistent_kernel() -> None:
    """As many blocks as multiprocessors, each processing tile after tile: 16 × 9 tiles of 128 × 256."""
    timeline = Timeline(multiprocessors=132)
    grid: dict[str, Any] = {"grid_x": 132, "grid_y": 1, "grid_z": 1, "block_x": 384, "block_y": 1, "block_z": 1}
    shapes = [[2048, 512], [512, 2304]]
    timeline.launch(GEMM_BF16, 200, op="aten::mm", shapes=shapes, dtypes=[BF16, BF16], **grid)
    assert saving_us(timeline.profile(), "SS010") == pytest.approx(200 * (1 - 144 / 264), rel=0.01)


# --- SS015: memory-bound GEMMs


@pytest.mark.parametrize(("rows", "fires"), [(8, True), (8192, False)])
def test_gemms_with_few_rows(rows: int, fires: bool) -> None:
    timeline = Timeline()
    timeline.launch(GEMM_BF16, 100, op="aten::mm", shapes=[[rows, 4096], [4096, 4096]], dtypes=[BF16, BF16])
    finding = found(timeline.profile(), "SS015")
    assert (finding is not None) == fires
    assert finding is None or finding.saving_ns is None


@pytest.mark.parametrize(
    ("op", "phase", "shapes", "fix"),
    [
        ("aten::mm", "backward", [[8, 4096], [4096, 4096]], "batch_size=2 * batch"),
        ("aten::mm", "forward", [[8, 4096], [4096, 4096]], "torch.cat(requests)"),
        ("aten::mm", "forward", [[65536, 4096], [4096, 8]], ""),  # a narrow layer
        ("aten::bmm", "forward", [[64, 8, 4096], [64, 4096, 4096]], ""),
    ],
)
def test_larger_batch_is_proposed_only_if_the_rows_are_few(op: str, phase: str, shapes: list[object], fix: str) -> None:
    timeline = Timeline()
    with timeline.step(), timeline.phase(phase):
        timeline.launch(GEMM_BF16, 100, op=op, shapes=shapes, dtypes=[BF16, BF16])
    finding = found(timeline.profile(), "SS015")
    assert finding is not None
    assert finding.is_remark == (not fix)
    assert fix in finding.fix

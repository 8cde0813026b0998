"""Rules about the speed of GEMMs: their precision, and the memory bandwidth that they need."""

import math
from dataclasses import replace

import polars as pl

from stepscope.explain.rules.evidence import BANDWIDTH_SHARE, PRODUCT_SHARE, StepEvidence, ms
from stepscope.explain.rules.naive_attention import unfused_attention
from stepscope.explain.rules.rule import (
    GROW_BATCH,
    THROUGHPUT,
    Hit,
    Rule,
    count_per_step,
    grow_batch,
    settle,
    workload_of,
)
from stepscope.explain.trace.roofline import add_product_sizes
from stepscope.hardware import Hardware
from stepscope.recording.store import Manifest

LEAST_MEMORY_SHARE = 0.05
# On a GPU without TF32, in fp16 with autocast, of a time whose FLOPs are unknown. NVIDIA reports 2.5 to 3.5 times the
# throughput for whole ResNets and Transformers on a V100, far less than the ratio of the peaks.
_HALF_OF_SINGLE = 0.35
_BATCHED = ("aten::bmm", "aten::baddbmm")


def gemms(evidence: StepEvidence) -> pl.DataFrame:
    """Return the GEMM kernels with batch, m, n and k, null if unknown, and `batched`: whether one kernel computes many
    GEMMs."""
    products = evidence.kernels.filter((pl.col("class") == "GEMM") & (pl.col("kind") == "kernel"))
    return add_product_sizes(products).with_columns(
        batched=pl.col("op").is_in(_BATCHED) | (pl.col("batch").fill_null(1) > 1)
    )


def without_attention(evidence: StepEvidence, products: pl.DataFrame) -> pl.DataFrame:
    """Return the GEMMs that are not part of unfused attention: a fused kernel replaces those (SS004)."""
    return products.filter(~pl.col("row").is_in(unfused_attention(evidence)["row"].implode()))


def memory_bound(evidence: StepEvidence, products: pl.DataFrame) -> pl.DataFrame:
    """Return the GEMMs whose bytes take longer than their FLOPs at the limits of the GPU, as far as these are known."""
    hardware = evidence.hardware
    bandwidth, peaks = (hardware.bandwidth, hardware.peak_flops) if hardware else (None, {})
    products = products.filter((pl.col("flops") > 0) & pl.lit(bandwidth is not None))
    peak = pl.col("dtype").replace_strict(peaks, default=None, return_dtype=pl.Float64)
    return products.filter(pl.col("bytes") / (bandwidth or math.inf) > pl.col("flops") / peak)


def row_counts(products: pl.DataFrame) -> list[int]:
    """Return the numbers of rows (batch × length) of the GEMMs of forward: in backward, any size may be this one."""
    forward = products.filter((pl.col("phase").fill_null("") != "backward") & ~pl.col("batched"))
    return forward["m"].drop_nulls().unique().sort().to_list()


def find_single_precision(evidence: StepEvidence) -> Hit | None:
    hardware = evidence.hardware
    better = _better_precision(hardware)
    if hardware is None or better is None:
        return None
    slow = _on_cuda_cores(evidence, better)
    if not slow.height:
        return None
    new = evidence.durations.copy()
    for row, time, flops, moved in slow.select("row", "time_ns", "flops", "bytes").iter_rows():
        new[row] = _faster_ns(hardware, better, time, flops, moved)
    gain = evidence.gain_of(new)
    time = evidence.per_step(slow)
    count = count_per_step(evidence, slow.height, "GEMM" if better == "tf32" else "kernel")
    text = (
        f"on the CUDA cores they take {ms(time)}; in {'TF32' if better == 'tf32' else 'fp16'} on tensor cores they "
        f"would take about {ms(time - gain.gpu_ns)}"
    )
    hit = settle(evidence, gain, text, title=f"fp32 without tensor cores: {count}")
    if hit is None or better == "tf32":
        return hit
    paste = _TRAIN_IN_FP16 if evidence.has_backward else _INFER_IN_FP16
    return replace(hit, action="Use fp16 with autocast: this GPU has no TF32", paste=paste)


def _better_precision(hardware: Hardware | None) -> str | None:
    """Return what the tensor cores compute instead of fp32: TF32, or fp16 on GPUs without it. None if they are not
    faster, or if there are none."""
    peaks = hardware.peak_flops if hardware else {}
    better = "tf32" if "tf32" in peaks else "fp16"
    return better if "fp32" in peaks and peaks.get(better, 0.0) > peaks["fp32"] else None


def _on_cuda_cores(evidence: StepEvidence, better: str) -> pl.DataFrame:
    """Return the kernels that tensor cores could run: GEMMs, and convolutions where TF32 is not an option. cuDNN uses
    TF32 by default."""
    # A matrix times a vector has no tiles and is memory-bound.
    tiled = pl.col("tile_m").is_not_null() & ~pl.col("tensor_cores").fill_null(value=True)
    products = gemms(evidence).filter((pl.col("dtype") == "fp32") & tiled)
    if better == "tf32":
        return products.select("row", "time_ns", "flops", "bytes")
    convolutions = evidence.kernels.filter((pl.col("class") == "convolution") & (pl.col("dtype") == "fp32"))
    return pl.concat([one.select("row", "time_ns", "flops", "bytes") for one in (products, convolutions)])


def _faster_ns(hardware: Hardware, better: str, time: float, flops: float | None, moved: float | None) -> float:
    fp32, fast = hardware.peak_flops["fp32"], hardware.peak_flops[better]
    if flops is None or not time:
        return time * (fp32 / fast if better == "tf32" else _HALF_OF_SINGLE)
    # A GEMM that is too small for the GPU stays too small: it keeps its share of the peak.
    reached = min(PRODUCT_SHARE, flops / (time * 1e-9) / fp32)
    by_bytes = (moved or 0.0) / ((hardware.bandwidth or math.inf) * BANDWIDTH_SHARE) * (1 if better == "tf32" else 0.5)
    return max(flops / (fast * max(reached, 0.05)), by_bytes) * 1e9


def find_memory_bound(evidence: StepEvidence) -> Hit | None:
    products = gemms(evidence)
    slow = memory_bound(evidence, without_attention(evidence, products))
    # More rows are free only if the rows are few. In backward, each size may be the number of rows.
    smallest = pl.min_horizontal("m", "n", "k")
    few = (pl.col("m") == smallest) | (
        (pl.col("phase").fill_null("") == "backward") & smallest.is_in(row_counts(products))
    )
    narrow = slow.filter((~(few & ~pl.col("batched"))).fill_null(value=True))
    growing = slow.filter((few & ~pl.col("batched")).fill_null(value=False))
    chosen = growing if growing["time_ns"].sum() >= narrow["time_ns"].sum() else narrow
    time = evidence.per_step(chosen)
    if time < LEAST_MEMORY_SHARE * evidence.step_ns:
        return None
    top = (
        chosen.group_by("op", "batched", "m", "n", "k")
        .agg(pl.col("time_ns").sum())
        .sort("time_ns", "op", "m", "n", "k", descending=[True, False, False, False, False], nulls_last=True)
        .row(0, named=True)
    )
    sizes = f"; most of the time is in {top['op']} of {top['m']} × {top['n']} × {top['k']}" if top["m"] else ""
    title = f"Memory-bound GEMMs take {ms(time)} {evidence.clock.say_per_step}"
    text = f"memory bandwidth limits them, not arithmetic{sizes}"
    if chosen is growing:
        paste = None if evidence.has_backward else _INFER_TOGETHER
        action = None if evidence.has_backward else f"Process more inputs per call, {THROUGHPUT}"
        return Hit(title=title, evidence=text, action=action, paste=paste)
    text += (
        "; each is a batch of small GEMMs, and a larger batch has more of them, not larger ones"
        if top["batched"]
        else "; another size than the number of rows is small, so a larger batch does not help"
    )
    return Hit(title=title, evidence=text, action="", paste="")


def _lower_precision(manifest: Manifest) -> dict[str, object]:
    """TF32, because the saving is estimated for it, or fp16 on a GPU without TF32. bf16 saves more than TF32 and rounds
    more."""
    workload = workload_of(manifest)
    if workload.precision != "fp32" or workload.device == "cpu":
        return {}
    hardware = manifest.environment.hardware if manifest.environment else None
    return {"precision": _better_precision(hardware) or "tf32"}


_INFER_IN_FP16 = """with torch.inference_mode(), torch.autocast("cuda", torch.float16):
    y = model(x)"""
_TRAIN_IN_FP16 = """scaler = torch.amp.GradScaler("cuda")  # once
with torch.autocast("cuda", torch.float16):
    loss = model(x)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()"""
_INFER_TOGETHER = "y = model(torch.cat(requests))  # several inputs per call: the weights are read once for all of them"

RULES = (
    Rule(
        code="SS005",
        title="fp32 GEMMs run without tensor cores",
        action="Allow TF32",
        check=find_single_precision,
        meaning="""The tensor cores are idle. TF32 keeps the range of fp32, rounds the inputs of GEMMs to 10 bits and
            has about seven times the peak throughput. bf16 doubles that again and halves the memory traffic.""",
        seen="""GEMM kernels that, by their names, run in fp32 on the CUDA cores, on a GPU that supports TF32. On one
            that does not, such as V100, convolutions count too, and the fix is fp16.""",
        saving="""Each GEMM is assumed to reach the same share of the TF32 peak as it reaches of the fp32 peak now (at
            most 75%), limited by 89% of the memory bandwidth. In fp16, kernels whose FLOPs are unknown are assumed to
            take 35% of their time; this was not checked. The result is replayed. In one check the estimate was 52
            ms and the measured saving 57 of 167 ms (71 in the fastest steps). The step then became CPU-bound, and the
            replay assumes the slowest CPU that fits the recording.""",
        builtin="--precision tf32, or bf16; fp16 on a GPU without TF32",
        own=(
            'torch.set_float32_matmul_precision("high")',
            'with torch.autocast("cuda", torch.bfloat16): loss = model(x)  # or bf16',
        ),
        paste=(
            'torch.set_float32_matmul_precision("high")  # TF32\n'
            'with torch.autocast("cuda", torch.bfloat16):  # or bf16\n'
            "    loss = model(x)"
        ),
        change=_lower_precision,
    ),
    Rule(
        code="SS015",
        title="Memory-bound GEMMs",
        action=f"Increase the batch size, {THROUGHPUT}",
        check=find_memory_bound,
        meaning="""A GEMM does few operations per byte if one of its sizes is small. Memory bandwidth is then the limit,
            so tensor cores and lower-precision arithmetic do not help. If the rows are few, additional rows are free:
            this is how decoding one token at a time becomes fast.""",
        seen="""GEMMs whose memory traffic takes longer at full bandwidth than their FLOPs take at peak throughput, in
            total at least 5% of the step. If another size than the number of rows is small, or if they are batched, a
            larger batch does not help, and this is a remark. The GEMMs of unfused attention are left out: see SS004.
            """,
        saving="Not estimated: the step does not get shorter, but it does more work.",
        builtin="a larger --batch or --context",
        own=(
            GROW_BATCH,
            "# combine small GEMMs of one input: qkv = x @ torch.cat((wq, wk, wv)).T",
        ),
        change=grow_batch,
    ),
)

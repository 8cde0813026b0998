"""Rules about GEMMs: their precision, sizes, tiles and waves."""

import math

import msgspec
import numpy as np
import polars as pl

from stepscope import cost
from stepscope.explain.rules.evidence import BANDWIDTH_SHARE, PRODUCT_SHARE, StepEvidence, ms
from stepscope.explain.rules.rule import Hit, Rule, count_per_step, grow_batch, settle, workload_of
from stepscope.explain.trace.roofline import least_ns
from stepscope.recording.store import Manifest
from stepscope.spec import ModelShape

ALIGNED_BYTES = 16
PADDED_TO = 64
USUAL_ALIGNED_SHARE = 0.65  # of the peak, assumed if the recording has no aligned GEMM to compare with
LEAST_PADDING = 0.15
LEAST_TAIL = 0.10
MOST_WAVES = 6
LEAST_MEMORY_SHARE = 0.05
# Limits of one multiprocessor on the data center GPUs since Volta.
_REGISTERS, _THREADS, _SHARED_BYTES = 65_536, 2_048, 228 * 1024
_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp8": 1}


def _products(evidence: StepEvidence) -> pl.DataFrame:
    """Return the GEMM kernels with batch, m, n and k, null if unknown."""
    products = evidence.kernels.filter((pl.col("class") == "GEMM") & (pl.col("kind") == "kernel"))
    distinct = products.select("op", "shapes").unique()
    rows = [(op, shapes, *(cost.product_dims(op or "", shapes) or (None,) * 4)) for op, shapes in distinct.iter_rows()]
    schema = {"op": pl.String, "shapes": pl.String, **dict.fromkeys(("batch", "m", "n", "k"), pl.Int64)}
    sizes = pl.DataFrame(rows, schema=schema, orient="row")
    return products.join(sizes, on=["op", "shapes"], how="left", nulls_equal=True, maintain_order="left")


def find_single_precision(evidence: StepEvidence) -> Hit | None:
    hardware = evidence.hardware
    if hardware is None or not {"fp32", "tf32"} <= set(hardware.peak_flops):
        return None
    fp32, tf32 = hardware.peak_flops["fp32"], hardware.peak_flops["tf32"]
    # A matrix times a vector has no tiles and is memory-bound.
    tiled = pl.col("tile_m").is_not_null() & ~pl.col("tensor_cores").fill_null(value=True)
    slow = _products(evidence).filter((pl.col("dtype") == "fp32") & tiled)
    if not slow.height or tf32 <= fp32:
        return None
    new = evidence.durations.copy()
    for row, time, flops, moved in slow.select("row", "time_ns", "flops", "bytes").iter_rows():
        if flops is None or not time:
            new[row] = time * fp32 / tf32
            continue
        # A GEMM that is too small for the GPU stays too small: it keeps its share of the peak.
        reached = min(PRODUCT_SHARE, flops / (time * 1e-9) / fp32)
        by_bytes = moved / ((hardware.bandwidth or math.inf) * BANDWIDTH_SHARE)
        new[row] = max(flops / (tf32 * max(reached, 0.05)), by_bytes) * 1e9
    gain = evidence.gain_of(new)
    time = evidence.per_step(slow)
    count = count_per_step(evidence, slow.height, "GEMM")
    text = (
        f"on the CUDA cores they take {ms(time)}; in TF32 on tensor cores they would take about "
        f"{ms(time - gain.gpu_ns)}"
    )
    return settle(evidence, gain, text, title=f"fp32 without tensor cores: {count}")


def find_odd_sizes(evidence: StepEvidence) -> Hit | None:
    products = _products(evidence).filter(pl.col("m").is_not_null() & pl.col("flops").is_not_null())
    products = products.filter(
        pl.col("dtype").is_in(list(_ELEMENT_BYTES)) & pl.col("tensor_cores").fill_null(value=True)
    )
    if not products.height:
        return None
    multiple = ALIGNED_BYTES // pl.col("dtype").replace_strict(_ELEMENT_BYTES, return_dtype=pl.Int64)
    # A size of 1 is a vector, not a choice.
    odd = pl.any_horizontal(*((pl.col(size) % multiple != 0) & (pl.col(size) > 1) for size in ("m", "n", "k")))
    products = products.with_columns(odd=odd)
    new = evidence.durations.copy()
    wasteful: list[tuple[int, int, int]] = []
    odd_kinds = products.filter("odd").select("dtype", "flops").unique()
    speeds = {key: _aligned_speed(evidence, products, *key) for key in odd_kinds.rows()}
    for row in products.iter_rows(named=True):
        speed = speeds.get((row["dtype"], row["flops"]))
        better = _aligned_ns(evidence, row, speed) if row["odd"] else _unpadded_ns(row)
        if better is not None and better < row["time_ns"]:
            new[row["row"]] = better
            wasteful.append((row["m"], row["n"], row["k"]))
    if not wasteful:
        return None
    gain = evidence.gain_of(new)
    worst = max(set(wasteful), key=wasteful.count)
    time = evidence.durations[new < evidence.durations].sum() / evidence.num_steps
    count = count_per_step(evidence, len(wasteful), "GEMM")
    text = (
        f"GEMMs with sizes such as {worst[0]} × {worst[1]} × {worst[2]} take {ms(time)}; with sizes that fit "
        f"the tiles they would take about {ms(time - gain.gpu_ns)}"
    )
    return settle(evidence, gain, text, title=f"Sizes do not fit the tiles: {count}")


def _aligned_speed(evidence: StepEvidence, products: pl.DataFrame, dtype: str, flops: float) -> float | None:
    """Return the FLOP/ns of the fastest aligned GEMM with at least half as many FLOPs."""
    like = products.filter(
        ~pl.col("odd") & (pl.col("dtype") == dtype) & (pl.col("flops") >= flops / 2) & (pl.col("time_ns") > 0)
    )
    best = (like["flops"] / like["time_ns"]).max()
    peak = evidence.hardware.peak_flops.get(dtype) if evidence.hardware else None
    if isinstance(best, float):
        return best
    return peak * USUAL_ALIGNED_SHARE * 1e-9 if peak else None


def _aligned_ns(evidence: StepEvidence, row: dict[str, float], speed: float | None) -> float | None:
    """Return the time of the padded GEMM at `speed`, and at least the time that its bytes take."""
    if speed is None:
        return None
    m, n, k = (PADDED_TO * math.ceil(row[size] / PADDED_TO) if row[size] > PADDED_TO else row[size] for size in "mnk")
    limit = least_ns(evidence.hardware, str(row["dtype"]), 0, row["bytes"]) or 0.0
    return max(row["flops"] * (m * n * k) / (row["m"] * row["n"] * row["k"]) / speed, limit / BANDWIDTH_SHARE)


def _unpadded_ns(row: dict[str, float]) -> float | None:
    """Return the time without the part of the tiles outside the result, None if that part is small."""
    if not row["tile_m"] or not row["tile_n"]:
        return None
    # Libraries compute a row-major result as the transpose of a column-major one, so either size may come first.
    useful = max(_filled(row["m"], row["n"], row), _filled(row["n"], row["m"], row))
    return None if 1 - useful < LEAST_PADDING else row["time_ns"] * useful


def _filled(first: float, second: float, row: dict[str, float]) -> float:
    tiles = math.ceil(first / row["tile_m"]) * math.ceil(second / row["tile_n"])
    return first * second / (tiles * row["tile_m"] * row["tile_n"])


def find_empty_waves(evidence: StepEvidence) -> Hit | None:
    multiprocessors = evidence.profile.recording.manifest.device_sms
    if not multiprocessors:
        return None
    new, hit = evidence.durations.copy(), []
    for row in _products(evidence).iter_rows(named=True):
        waves = _waves(row, multiprocessors)
        if waves is None or not 1 < waves <= MOST_WAVES:
            continue
        filled = waves / math.ceil(waves)
        if 1 - filled >= LEAST_TAIL:
            new[row["row"]] *= filled
            hit.append((row["short"], waves))
    if not hit:
        return None
    gain = evidence.gain_of(new)
    short, waves = max(dict.fromkeys(hit), key=hit.count)
    count = count_per_step(evidence, len(hit), "GEMM")
    text = (
        f"for example, {short} makes {waves:.2f} waves on {multiprocessors} multiprocessors; this costs up to "
        f"{ms(gain.gpu_ns)} of GPU time"
    )
    return settle(evidence, gain, text, title=f"Last wave partly empty: {count}")


def _waves(row: dict[str, int | None], multiprocessors: int) -> float | None:
    """Return the number of waves: from the tiles of the result if a persistent kernel (as many blocks as
    multiprocessors) works through them, otherwise from its blocks and how many fit on a multiprocessor at once."""
    grid, block = (
        math.prod(int(row[f"{name}_{axis}"] or 1) for axis in "xyz") if row[f"{name}_x"] else 0
        for name in ("grid", "block")
    )
    if not grid or not block:
        return None
    if grid <= multiprocessors:
        m, n, tile_m, tile_n = (row[key] for key in ("m", "n", "tile_m", "tile_n"))
        if not (m and n and tile_m and tile_n) or grid < 0.9 * multiprocessors:
            return None
        tiles = min(math.ceil(m / tile_m) * math.ceil(n / tile_n), math.ceil(n / tile_m) * math.ceil(m / tile_n))
        return (row["batch"] or 1) * tiles / grid
    limits = [
        _THREADS // block,
        _REGISTERS // (row["registers"] * block) if row["registers"] else _THREADS,
        _SHARED_BYTES // row["shared_bytes"] if row["shared_bytes"] else _THREADS,
    ]
    return grid / (multiprocessors * max(1, min(limits)))


def find_memory_bound(evidence: StepEvidence) -> Hit | None:
    hardware = evidence.hardware
    if hardware is None or not hardware.bandwidth:
        return None
    products = _products(evidence).filter(pl.col("flops").is_not_null() & (pl.col("flops") > 0))
    bound = np.zeros(products.height, dtype=np.bool_)
    for place, (dtype, flops, moved) in enumerate(products.select("dtype", "flops", "bytes").iter_rows()):
        peak = hardware.peak_flops.get(dtype or "")
        bound[place] = peak is not None and moved / hardware.bandwidth > flops / peak
    slow = products.filter(pl.Series(bound))
    time = evidence.per_step(slow)
    if time < LEAST_MEMORY_SHARE * evidence.step_ns:
        return None
    top = (
        slow.group_by("op", "m", "n", "k")
        .agg(pl.col("time_ns").sum())
        .sort("time_ns", descending=True)
        .row(0, named=True)
    )
    sizes = f", most of it in {top['op']} of {top['m']} × {top['n']} × {top['k']}" if top["m"] else ""
    return Hit(
        title=f"Memory-bound GEMMs take {ms(time)} per step",
        evidence=f"{ms(time)} per step in GEMMs that are limited by memory bandwidth, not by arithmetic{sizes}",
    )


def _lower_precision(manifest: Manifest) -> dict[str, object]:
    """TF32, because the saving is estimated for it. bf16 saves more and rounds more."""
    workload = workload_of(manifest)
    return {"precision": "tf32"} if workload.precision == "fp32" and workload.device != "cpu" else {}


def _pad_vocabulary(manifest: Manifest) -> dict[str, object]:
    model = workload_of(manifest).model
    if not isinstance(model, ModelShape) or model.vocab % PADDED_TO == 0:
        return {}
    return {"model": msgspec.structs.replace(model, vocab=PADDED_TO * math.ceil(model.vocab / PADDED_TO))}


RULES = (
    Rule(
        code="SS005",
        title="fp32 GEMMs run without tensor cores",
        action="Allow TF32",
        check=find_single_precision,
        meaning="""The tensor cores are idle. TF32 keeps the range of fp32, rounds the inputs of GEMMs to 10 bits and
            has about seven times the peak throughput. bf16 doubles that again and halves the memory traffic.""",
        seen="GEMM kernels that, by their names, run in fp32 on the CUDA cores, on a GPU that supports TF32.",
        saving="""Each GEMM is assumed to reach the same share of the TF32 peak as it reaches of the fp32 peak now (at
            most 75%), limited by 89% of the memory bandwidth. The result is replayed. In one check the estimate was 52
            ms and the measured saving 57 of 167 ms (71 in the fastest steps). The step then became CPU-bound, and the
            replay assumes the slowest CPU that fits the recording.""",
        builtin="--precision tf32, or bf16",
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
        code="SS009",
        title="GEMM sizes do not fit the tiles",
        action="Pad the vocabulary and other sizes to a multiple of 64",
        check=find_odd_sizes,
        meaning="""GEMMs are computed in tiles and loaded 16 bytes at a time. A size that is not a multiple of 8 (in 16
            bits; 4 in TF32) needs slower loads and kernels. With a size just above a multiple of the
            tile, the last tiles compute mostly padding.""",
        seen="""GEMMs on tensor cores with a size that is not such a multiple, or whose tiles (from the kernel's name)
            compute at least 15% more than needed.""",
        saving="""For unaligned sizes: the GEMM, padded to a multiple of 64, at the speed of the fastest aligned GEMM of
            its kind in the recording (65% of the peak if there is none). For partly filled tiles: the share of the
            padding. The result is replayed. In one check on a CPU-bound step the estimate was zero, and the fastest
            steps indeed took the same time (51.6 ms). The GPU time of unaligned sizes was not checked, because the
            kernels that cuBLAS has for them change between versions.""",
        builtin="--vocab 10048 instead of 10007: the next multiple of 64",
        own=(
            "# pad sizes to multiples of 64: tokens, widths, heads",
            "vocab = 64 * math.ceil(vocab / 64)  # the extra rows are never read",
        ),
        paste="vocab = 64 * math.ceil(vocab / 64)  # same for every width; the extra rows are never read",
        change=_pad_vocabulary,
    ),
    Rule(
        code="SS010",
        title="The last wave of a GEMM is partly empty",
        action="Let the compiler choose the tiles",
        check=find_empty_waves,
        meaning="""Thread blocks run in waves, each as large as the GPU can hold at once. 133 tiles on 132
            multiprocessors take as long as 264.""",
        seen="GEMMs whose tiles make one to six waves, with at least 10% of all slots empty in the last one.",
        saving="""The empty share of their time. This is an upper bound: libraries split work along K to fill the last
            wave, and the result depends on all sizes together. Treat it as a reason to try, not as a promise.""",
        builtin="another --batch: batch × context decides the number of tiles",
        own=(
            (
                "# choose rows (batch × context) so that ceil(M / tile) × ceil(N / tile) is just below a multiple of "
                "the number of multiprocessors"
            ),
            "torch._inductor.config.max_autotune_gemm = True  # lets the compiler choose the tiles",
        ),
        paste='model = torch.compile(model, mode="max-autotune")  # chooses the tiles',
        change=grow_batch,
    ),
    Rule(
        code="SS015",
        title="Memory-bound GEMMs",
        action="Increase the batch size",
        check=find_memory_bound,
        meaning="""A GEMM does few operations per byte if one of its sizes is small. Memory bandwidth is then the limit,
            so tensor cores and lower-precision arithmetic do not help. Additional rows are free.""",
        seen="""GEMMs whose memory traffic takes longer at full bandwidth than their FLOPs take at peak throughput, in
            total at least 5% of the step.""",
        saving="Not estimated: the step does not get shorter, but it does more work.",
        builtin="a larger --batch or --context",
        own=(
            "loader = DataLoader(data, batch_size=2 * batch)",
            "# combine small GEMMs of one input: qkv = x @ torch.cat((wq, wk, wv)).T",
        ),
        paste="loader = torch.utils.data.DataLoader(data, batch_size=2 * batch)  # more rows in the same time",
        change=grow_batch,
    ),
)

"""Unfused attention: scores, softmax and values as separate kernels that go through memory."""

import math
from dataclasses import replace

import numpy as np
import polars as pl

from stepscope import cost
from stepscope.explain.rules.evidence import POINTWISE, StepEvidence, ms
from stepscope.explain.rules.replay import Floats
from stepscope.explain.rules.rule import Hit, Rule, count_per_step, settle, workload_of
from stepscope.explain.trace.attribution.phases import number_passes
from stepscope.recording.store import Manifest

# The share of the peak that PyTorch's fused kernels reach on an H200 with many queries (batch × heads × length), causal
# counted as half: cuDNN in 16 bits by head dimension, forward and backward; the memory-efficient kernel in fp32.
_HALF = {"narrow": (0.40, 0.34), "wide": (0.56, 0.45)}
_SINGLE = (0.5, 0.5)
# The number of queries at which they reach half of that: 230 of 989 TFLOP/s at 16,384 queries in bf16, 22 of 67 at
# 32,768 in fp32.
_HALF_SPEED_QUERIES = {"half": 12_000, "single": 20_000}
_WIDE_HEAD = 96
# Forward and backward take at least this long: two kernels and four (cuDNN, context 128).
_LEAST_FUSED_NS = (5_000, 15_000)
# The CPU time of a fused call, in launches of the separate operations: it chooses a backend and looks up cuDNN's plan
# cache. 178 and 224 µs for forward and backward, where a launch takes 56 and 48 µs (one profiler, two recordings).
_HOST_LAUNCHES = 4
_PARTS = ("scores", "softmax", "values")
# Operators that change the scores before the softmax: a mask or a bias that a fused call must get as well. `baddbmm`
# adds while it multiplies.
_MASKED = r"^aten::(?:masked_fill|where|add_?$|baddbmm)|triu|tril"
_TRIANGLE = r"triu|tril"
_DROPOUT = r"dropout|bernoulli"
_TILE = 64
_DIAGONAL = 128  # tiles on the diagonal of a causal mask are computed in full
_MOST_BETWEEN = 16  # kernels between a GEMM and the softmax


def unfused_attention(evidence: StepEvidence) -> pl.DataFrame:
    """Return the kernels of unfused attention, with `group` (one pass of one attention) and `forward`."""
    pieces = _by_parts(evidence)
    return pieces if pieces.height else _by_pattern(evidence.kernels)


def find_naive_attention(evidence: StepEvidence) -> Hit | None:
    pieces = unfused_attention(evidence)
    if not pieces.height:
        return None
    fused = pieces.join(_fused_times(evidence, pieces), on="group", maintain_order="left")
    gain = evidence.merged(fused, host_share=_host_share(evidence, fused))
    products = fused.filter(pl.col("class") == "GEMM")
    time = evidence.per_step(fused)
    count = count_per_step(evidence, fused.height, "kernel")
    text = (
        f"attention takes {ms(time)} of GPU time, {ms(evidence.per_step(products))} of it in GEMMs; a fused kernel "
        f"would take about {ms(time - gain.gpu_ns)}"
    )
    hit = settle(evidence, gain, text, title=f"Unfused attention launches {count}")
    return hit and replace(hit, paste=_write_call(pieces))


def _write_call(pieces: pl.DataFrame) -> str:
    """Return the fused call that computes the same: with a mask if the scores get one, causal only if the mask is made
    right there, with dropout if there is some."""
    forward = pieces.filter("forward")
    masked = forward.filter(pl.col("group").is_in(_masked_groups(forward).implode()))
    share = float(masked["time_ns"].sum()) / max(1.0, float(forward["time_ns"].sum()))
    arguments, remark = "q, k, v", "scale=... unless the scores are divided by sqrt(head_dim)"
    if _is_causal(forward) and share == 1:
        arguments += ", is_causal=True"
    elif share > 0.5:
        arguments += ", attn_mask=mask"
        remark = f"mask: what the scores get now; {remark}"
    elif share > 0:
        remark = f"attn_mask=mask where the scores get one; {remark}"
    if forward["op"].str.contains(_DROPOUT).any():
        arguments += ", dropout_p=dropout if self.training else 0.0"
    return f"# {remark}\nout = torch.nn.functional.scaled_dot_product_attention({arguments})"


def _masked_groups(forward: pl.DataFrame) -> pl.Series:
    """Return the groups whose scores are masked or get a bias before the softmax."""
    softmax = pl.col("row").filter((pl.col("class") == "softmax") | (pl.col("part") == "softmax")).min().over("group")
    before = forward.filter(pl.col("row") < softmax)
    return before.filter(pl.col("op").str.contains(_MASKED))["group"].unique().sort()


def _is_causal(pieces: pl.DataFrame) -> bool:
    """Whether the mask is known to be causal: that of the built-in attention is, and so is one that is made of a
    triangle inside the attention. Elsewhere a mask may be any."""
    named = pieces["part"].is_in(_PARTS).any() and pieces["op"].str.contains("masked_fill").any()
    return bool(named or pieces["op"].str.contains(_TRIANGLE).any())


def _host_share(evidence: StepEvidence, pieces: pl.DataFrame) -> Floats:
    """Keep the CPU time of the first few launches of each attention: the fused call costs as much."""
    share = np.ones(evidence.kernels.height)
    launch = pl.int_range(pl.len()).over("group")
    gone = pieces.sort("row").filter(launch >= _HOST_LAUNCHES)
    share[gone["row"].to_numpy()] = 0.0
    return share


def _by_parts(evidence: StepEvidence) -> pl.DataFrame:
    """Return the kernels of the built-in attention, by its annotations, with `group` (one pass of one module) and
    `forward`."""
    forward = (pl.col("phase") != "backward") | pl.col("recomputed")
    pieces = evidence.kernels.filter(pl.col("part").is_in(_PARTS)).with_columns(forward=forward.fill_null(value=True))
    passes = number_passes(evidence.profile.recording, pieces["launch_ns"])
    return pieces.with_columns(group=pl.struct("step", "module", "forward", passes.alias("pass")).rank("dense"))


def _by_pattern(kernels: pl.DataFrame) -> pl.DataFrame:
    """Return the same by order: a batched GEMM, a softmax, a batched GEMM; in backward two on either side."""
    batched = (kernels["op"].is_in(["aten::bmm", "aten::baddbmm"]) & (kernels["class"] == "GEMM")).fill_null(
        value=False
    )
    small = (kernels["class"].is_in([*POINTWISE, "memset"]) & (kernels["kind"] != "memcpy")).fill_null(value=False)
    is_batched, is_small = batched.to_list(), small.to_list()
    softmax = kernels.filter((pl.col("class") == "softmax") & (pl.col("kind") == "kernel"))
    found: list[tuple[int, int, bool]] = []
    for group, (row, op) in enumerate(softmax.select("row", "op").iter_rows()):
        backward = "backward" in (op or "")
        rows = _reach(row, -1, is_batched, is_small, 2 if backward else 1)
        after = _reach(row, +1, is_batched, is_small, 2 if backward else 1)
        if rows and after:
            found += [(one, group, not backward) for one in (*rows, row, *after)]
    schema = {"row": pl.UInt32, "group": pl.Int64, "forward": pl.Boolean}
    rows_found = pl.DataFrame(found, schema=schema, orient="row").unique("row", keep="first", maintain_order=True)
    return rows_found.join(kernels, on="row", maintain_order="left")


def _reach(row: int, step: int, batched: list[bool], small: list[bool], products: int) -> list[int]:
    """Return the rows from a softmax to the last of `products` batched GEMMs on one side, none if anything else is in
    between."""
    rows: list[int] = []
    missing = products
    at = row + step
    while 0 <= at < len(batched) and missing and len(rows) < _MOST_BETWEEN:
        if batched[at]:
            missing -= 1
        elif not small[at]:
            return []
        rows.append(at)
        at += step
    return [] if missing else rows


def _fused_times(evidence: StepEvidence, pieces: pl.DataFrame) -> pl.DataFrame:
    """Return group and fused_ns: the GEMMs' FLOPs at a fused kernel's speed. If the FLOPs are unknown, the GEMMs' own
    time: a fused kernel runs the same GEMMs and overlaps the rest with them."""
    pieces = _pad(pieces)
    work_share = _causal_share(pieces) if _is_causal(pieces) else 1.0
    own = pl.col("time_ns").filter(pl.col("class") == "GEMM").sum()
    product = pl.col("class") == "GEMM"
    groups = pieces.group_by("group").agg(
        pl.col("forward").first(),
        products_ns=own,
        total_ns=pl.col("time_ns").sum(),
        flops=pl.when(pl.col("flops").filter(product).is_not_null().all()).then(pl.col("flops").filter(product).sum()),
    )
    speeds = _fused_speeds(evidence, pieces)
    if speeds is None:
        fused = pl.col("products_ns").cast(pl.Float64)
    else:
        # The four GEMMs of backward are 2 × the two of forward; a fused kernel runs five.
        work = pl.when("forward").then(pl.col("flops")).otherwise(pl.col("flops") * 1.25) * work_share
        rate = pl.when("forward").then(pl.lit(speeds[0])).otherwise(pl.lit(speeds[1]))
        least = pl.when("forward").then(_LEAST_FUSED_NS[0]).otherwise(_LEAST_FUSED_NS[1])
        fused = pl.coalesce(work / rate * 1e9, pl.col("products_ns").cast(pl.Float64)) + least
    return groups.select("group", fused_ns=pl.min_horizontal(fused, pl.col("total_ns").cast(pl.Float64)))


def _causal_share(pieces: pl.DataFrame) -> float:
    """Return the share of query-key pairs that a fused causal kernel computes: half, and half of the diagonal."""
    products = pieces.filter(pl.col("class") == "GEMM").select("op", "shapes").unique()
    dims = [cost.product_dims(op or "", shapes) for op, shapes in products.iter_rows()]
    length = max((max(n, k) for _, _, n, k in filter(None, dims)), default=0)
    return 0.5 + 0.5 / max(1.0, length / _DIAGONAL)


def _pad(pieces: pl.DataFrame) -> pl.DataFrame:
    """Scale FLOPs to those of a fused kernel, which has tiles of 64 queries and keys."""
    distinct = pieces.select("op", "shapes").unique()
    rows = [(op, shapes, _padding(cost.product_dims(op or "", shapes))) for op, shapes in distinct.iter_rows()]
    padding = pl.DataFrame(rows, schema={"op": pl.String, "shapes": pl.String, "padding": pl.Float64}, orient="row")
    joined = pieces.join(padding, on=["op", "shapes"], how="left", nulls_equal=True, maintain_order="left")
    return joined.with_columns(flops=pl.col("flops") * pl.col("padding"))


def _padding(dims: tuple[int, int, int, int] | None) -> float:
    return math.prod(_TILE * math.ceil(size / _TILE) / size for size in dims[1:] if size) if dims else 1.0


def _fused_speeds(evidence: StepEvidence, pieces: pl.DataFrame) -> tuple[float, float] | None:
    """Return the FLOP/s of a fused forward and backward for these shapes."""
    products = pieces.filter((pl.col("class") == "GEMM") & pl.col("forward"))
    dtypes = products["op_dtype"].drop_nulls().to_list()
    dims = [cost.product_dims(op or "", shapes) for op, shapes in products.select("op", "shapes").unique().iter_rows()]
    known = [one for one in dims if one is not None]
    if not known or not dtypes or evidence.hardware is None:
        return None
    half = dtypes[0] in ("bf16", "fp16")
    peak = evidence.hardware.peak_flops.get(dtypes[0])
    if peak is None:
        return None
    queries = max(batch * m for batch, m, _, _ in known)
    head = min(min(n, k) for _, _, n, k in known)
    shares = _HALF["wide" if head >= _WIDE_HEAD else "narrow"] if half else _SINGLE
    filled = queries / (queries + _HALF_SPEED_QUERIES["half" if half else "single"])
    return peak * shares[0] * filled, peak * shares[1] * filled


def _fuse_attention(manifest: Manifest) -> dict[str, object]:
    """A model of the user's own chooses its attention itself: no setting changes it."""
    return {} if workload_of(manifest).attention in (None, "flash") else {"attention": "flash"}


RULES = (
    Rule(
        code="SS004",
        title="Unfused attention writes its scores to memory",
        action="Use a fused attention kernel",
        check=find_naive_attention,
        meaning="""Scores, softmax and values as separate operations move a matrix of queries × keys through memory many
            times. A fused kernel keeps it on the chip, and skips the masked half of a causal model. Its memory grows
            linearly with the context length, not quadratically.""",
        seen="""The parts of the built-in attention, or two batched GEMMs with a softmax between them. The fix has a
            mask if the scores are changed before the softmax, and is causal only if the mask is made from `tril` or
            `triu` between the GEMMs.""",
        saving="""The time of these kernels minus that of a fused one, from its FLOPs at the speed of PyTorch's own
            kernels on an H200 (a share of the peak that grows with the number of queries; fp32 kernels are slower than
            bf16). This is within 10% for cuDNN's kernels at lengths of 512 and 1024. The replay counts four launches
            per call. In one check the estimate was 48 ms and the measured saving 39 of 146 ms (53 in the fastest
            steps), because the step became CPU-bound. In that case, expect errors of 25% either way.""",
        builtin="--attention flash",
        own=(
            "out = F.scaled_dot_product_attention(q, k, v)  # with attn_mask=mask or is_causal=True if there is a mask",
            "out = stepscope.kernels.flash_attention(q, k, v, causal=True)  # for a causal model: docs/kernels.md",
            'model = AutoModel.from_config(config, attn_implementation="sdpa")  # transformers',
        ),
        paste="out = torch.nn.functional.scaled_dot_product_attention(q, k, v)",
        change=_fuse_attention,
    ),
)

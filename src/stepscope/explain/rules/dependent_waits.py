"""Waits of the CPU for values that it needs: a fix cannot skip them, or has to change what needs the value."""

import msgspec
import numpy as np
import polars as pl

from stepscope.explain.rules.evidence import StepEvidence
from stepscope.explain.rules.gemm import gemms

LARGE_COPY = 1 << 20  # bytes: weights or gradients, not a loss
TO_DEVICE, TO_HOST = r"(?i)HtoD|host to device", r"(?i)DtoH|device to host"
_SCALER = "_amp_foreach_non_finite_check"
_ATTENTION = r"scaled_dot_product\w*attention|flash_attention_forward|efficient_attention_forward"
_MOSTLY = 0.5


def large_copies(evidence: StepEvidence, pattern: str) -> pl.DataFrame:
    return evidence.kernels.filter(pl.col("name").str.contains(pattern) & (pl.col("moved_bytes") >= LARGE_COPY))


def is_large_copy(evidence: StepEvidence, waits: pl.DataFrame) -> pl.Series:
    """Return which waits are calls that copy much to the CPU, such as a checkpoint."""
    return waits["start_ns"].is_in(large_copies(evidence, TO_HOST)["launch_ns"].drop_nulls().implode())


def is_of_scaler(evidence: StepEvidence, waits: pl.DataFrame) -> pl.Series:
    """Return which waits are those of GradScaler: the first in a step after its gradients were unscaled."""
    checks = evidence.profile.ops.filter(pl.col("name").str.contains(_SCALER))["end_ns"].sort().to_numpy()
    begins = evidence.steps.select("step", begin_ns="start_ns").unique("step", keep="first")
    begin = waits.join(begins, on="step", how="left", maintain_order="left")["begin_ns"].fill_null(evidence.window[0])
    done = np.searchsorted(checks, waits["start_ns"].to_numpy(), side="right")
    is_first = done > np.concatenate(([0], done[:-1]))
    return pl.Series(is_first & (done > np.searchsorted(checks, begin.to_numpy())))


def find_host_updates(evidence: StepEvidence) -> pl.DataFrame:
    """Return when the CPU updates weights, as in an offloaded optimizer: start_ns and end_ns, the `wait` for the
    gradients before it, and the `row` of the copy after it. Much is copied to the CPU before the wait, and the GPU's
    next work is a large copy back."""
    given, back = (large_copies(evidence, one) for one in (TO_HOST, TO_DEVICE))
    waits = evidence.waits.filter((pl.col("kind") == "call") & pl.col("step").is_in(given["step"].unique().implode()))
    launched = evidence.kernels.filter(pl.col("launch_ns").is_not_null()).sort("launch_ns")
    place = pl.Series(np.searchsorted(launched["launch_ns"].to_numpy(), waits["end_ns"].to_numpy()), dtype=pl.UInt32)
    after = launched.select("row", "launch_ns")[place.clip(upper_bound=max(0, launched.height - 1)).to_list()]
    updates = waits.select("wait", start_ns="end_ns").with_columns(end_ns=after["launch_ns"], row=after["row"])
    is_update = pl.lit(evidence.has_backward) & pl.col("row").is_in(back["row"].implode())
    return updates.filter(is_update & (pl.col("end_ns") >= pl.col("start_ns")))


def is_decoding(evidence: StepEvidence) -> bool:
    """Whether a step computes the next token of each sequence, which depends on the token before it."""
    if evidence.has_backward:
        return False
    if _has_single_query(evidence):
        return True
    products = gemms(evidence).filter(~pl.col("batched") & pl.col("m").is_not_null())
    single = evidence.per_step(products.filter(pl.col("m") == 1))
    attends = bool(evidence.kernels["class"].is_in(["attention", "softmax"]).any())
    return attends and single > _MOSTLY * evidence.per_step(products)


def _has_single_query(evidence: StepEvidence) -> bool:
    """Whether attention has one query and many keys per sequence, in most calls."""
    ops = evidence.profile.ops
    calls = ops.filter(pl.col("name").str.contains(_ATTENTION) & pl.col("shapes").is_not_null())
    single = 0
    for shapes, count in calls["shapes"].value_counts().iter_rows():
        query, key = [*msgspec.json.decode(shapes)[:2], [], []][:2]
        single += count * any(one == 1 < other for one, other in zip(query, key, strict=False))
    return single > _MOSTLY * calls.height

"""The table and the figure that `report` mostly draws: a bench over sizes, contexts and precisions, some
out of memory."""

import math

from stepscope.findings import Axis, Cell, Column, Figure, Point, Table

SIZES = {"small": 1.0, "medium": 2.6, "large": 5.4, "xl": 10.1, "2.7B": 17.3}
CONTEXTS = (128, 256, 512, 1024)
PRECISIONS = ("fp32", "bf16")


def bench_table() -> Table:
    columns = (
        Column(key="size", label="size"),
        Column(key="context", label="context", kind="count"),
        Column(key="precision", label="precision"),
        Column(key="forward_ms", label="forward ms", kind="ms"),
        Column(key="backward_ms", label="backward ms", kind="ms"),
        Column(key="optimizer_ms", label="optimizer ms", kind="ms"),
        Column(key="step_ms", label="step ms", kind="ms"),
        Column(key="step_mean_ms", label="step mean ms", kind="ms", detail=True),
        Column(key="step_sd_ms", label="sd ms", kind="ms", detail=True),
        Column(key="step_p20_ms", label="p20 ms", kind="ms", detail=True),
        Column(key="step_p80_ms", label="p80 ms", kind="ms", detail=True),
        Column(key="tokens_per_s", label="tokens/s", kind="count"),
        Column(key="tflops", label="TFLOP/s", kind="number"),
        Column(key="mfu", label="MFU", kind="share"),
        Column(key="peak_bytes", label="peak memory", kind="bytes"),
        Column(key="speedup", label="vs fp32", kind="ratio"),
        Column(key="status", label="notes"),
    )
    rows = tuple(_bench_row(s, c, p) for s in SIZES for c in CONTEXTS for p in PRECISIONS)
    notes = (
        "GPU: NVIDIA H200, batch 4, AdamW; median of 10 steps after 5 of warm-up.",
        "MFU: model FLOPs per second over the dense peak of the precision.",
    )
    return Table(title="One training step of five models on one H200", columns=columns, rows=rows, notes=notes)


def _bench_row(size: str, context: int, precision: str) -> tuple[Cell, ...]:
    if size == "2.7B" and context == 1024 and precision == "fp32":
        return (size, context, precision, *(None,) * 13, "oom")
    step = _step_ms(size, context, precision)
    times = (
        step * 0.31,
        step * 0.6,
        step * 0.09,
        step,
        step * 1.004,
        step * 0.011,
        step * 0.993,
        step * 1.012,
    )
    tflops = 300 * SIZES[size] / step * context / 100
    speedup = _step_ms(size, context, "fp32") / step
    peak = int(SIZES[size] * 2**30 * (1.4 + context / 400))
    status = "spread 12 %" if context == 128 and size == "small" else ""
    return (
        size,
        context,
        precision,
        *times,
        4000 * context / step,
        tflops,
        tflops / 989,
        peak,
        speedup,
        status,
    )


def _step_ms(size: str, context: int, precision: str) -> float:
    slow = 1.0 if precision == "fp32" else 0.41
    return SIZES[size] * (9.7 + slow * math.pow(context / 128, 1.15) * 8.3)


def bench_figure() -> Figure:
    points = [
        Point(panel=p, series=s, x=c, y=y, low=y * 0.94, high=y * 1.08)
        for p in PRECISIONS
        for s in SIZES
        for c in CONTEXTS
        if (y := _step_ms(s, c, p)) and not (s == "2.7B" and c == 1024 and p == "fp32")
    ]
    return Figure(
        title="Step time grows faster than the context",
        subtitle="Median of 10 steps with p20 to p80; H200, batch 4, AdamW. 2.7B in fp32 is oom at 1024.",
        x=Axis(label="context", unit="tokens", log=True),
        y=Axis(label="step time", unit="ms", log=True),
        points=tuple(points),
        series_label="size",
        panel_label="precision",
    )

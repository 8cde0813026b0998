"""A made-up calibration: times follow from peaks, a bandwidth and a launch, so predictions can be checked by hand."""

import math
from collections.abc import Callable

from stepscope.hardware import find
from stepscope.planner.step_time.kernels_of import list_passes
from stepscope.planner.step_time.operator_kinds import (
    BYTES_PER_ELEMENT,
    ELEMENTWISE,
    INDEXING,
    LISTS,
    OWN,
    ROWS,
    TWO_PASSES,
)
from stepscope.recording.rows.calibration import Calibration, HostTrial, Series

BANDWIDTH = 4e12
PEAKS = {"bf16": 7e14, "fp16": 7e14, "tf32": 4e14, "fp32": 5e13}
LAUNCH_NS = 2000
L2_BYTES = 50 << 20
CALL_NS = 5000
_SHAPES = [(m, n, k) for m in (128, 1024, 8192) for n in (256, 1024, 4096, 50304) for k in (256, 1024, 4096)]
_SHAPES += [(16384, 2048, 2048)]
_ODD_SHAPES = [(m, n, k) for m in (1024, 8192) for n in (257, 50257) for k in (1001, 4095)]


def product_ns(dtype: str, *sizes: int) -> int:
    return round(LAUNCH_NS + 2 * math.prod(sizes) / PEAKS[dtype] * 1e9)


def bytes_ns(moved: float) -> int:
    return round(LAUNCH_NS + moved / BANDWIDTH * 1e9)


def _series(operation: str, dtype: str, variant: str, sizes: list[tuple[int, ...]], took: Callable[..., int]) -> Series:
    columns = tuple(f"size {number}" for number in range(len(sizes[0])))
    rows = tuple((*size, took(*size)) for size in sizes)
    return Series(operation=operation, dtype=dtype, variant=variant, columns=columns, rows=rows)


def make_calibration(*, host_factor: float = 1.0) -> Calibration:
    return Calibration(
        gpu="NVIDIA H200",
        hardware=find("NVIDIA H200"),  # type: ignore[arg-type]
        multiprocessors=132,
        l2_bytes=L2_BYTES,
        host="made up",
        python="3.12",
        torch="2.11.0",
        constants={
            "tiny_kernel_in_stream_ns": LAUNCH_NS,
            "tiny_kernel_in_graph_ns": LAUNCH_NS - 500,
            "launch_to_start_ns": 8000,
            "item_ns": 10000,
        },
        series=(*_products(), *_elementwise(), *_rows(), *_attention()),
        host_costs=(),
        trials=_trials(host_factor),
    )


def _products() -> list[Series]:
    series = []
    for dtype in PEAKS:
        for layout in ("nn", "nt", "tn"):
            series += [
                _series(name, dtype, layout, [*_SHAPES, *_ODD_SHAPES], lambda *s, d=dtype: product_ns(d, *s))
                for name in ("mm", "addmm")
            ]
            batched: list[tuple[int, ...]] = [(b, *s) for b in (16, 128) for s in _SHAPES[:9]]
            series.append(_series("bmm", dtype, layout, batched, lambda *s, d=dtype: product_ns(d, *s)))
    return series


def _elementwise() -> list[Series]:
    names = {*BYTES_PER_ELEMENT, *(name for pair in ELEMENTWISE.values() for name in pair)}
    names |= {
        "clone",
        "transpose_copy",
        "pow",
        "pow3",
        "gelu_tanh",
        "split_heads",
        "mul_heads",
        "cat_halves",
        "triu",
        "neg",
    }
    series = []
    for name in sorted(names):
        passes, extra = BYTES_PER_ELEMENT.get(name, TWO_PASSES)
        for dtype, itemsize in (("fp32", 4), ("bf16", 2)):
            per = passes * itemsize + extra
            sizes: list[tuple[int, ...]] = [(2**power,) for power in range(10, 29, 2)]
            series.append(_series(name, dtype, "cold", sizes, lambda n, per=per: bytes_ns(n * per)))
            series.append(_series(name, dtype, "warm", sizes[:8], lambda n, per=per: bytes_ns(n * per / 2)))
    return series


def _rows() -> list[Series]:
    series = []
    sizes: list[tuple[int, ...]] = [(rows, columns) for rows in (64, 4096, 65536) for columns in (64, 1024, 50257)]
    passes = dict(ROWS.values())
    passes |= {f"{kind}_{over}": 1 for kind in ("sum", "mean", "amax") for over in ("columns", "rows", "all")}
    for name, count in passes.items():
        for dtype, itemsize in (("fp32", 4), ("bf16", 2)):
            series.append(_series(name, dtype, "", sizes, lambda r, c, per=count * itemsize: bytes_ns(r * c * per)))
    for name in set(LISTS.values()):
        lists: list[tuple[int, ...]] = [(10, 1000), (100, 10**6), (10, 10**8)]
        per_element = 4 * list_passes(name)
        series.append(_series(name, "fp32", "", lists, lambda n, e, per=per_element: bytes_ns(n * e * per)))
    for name in set(INDEXING.values()):
        tables: list[tuple[int, ...]] = [(512, 10000, 768), (8192, 50257, 1024), (2048, 128256, 4096)]
        for dtype, itemsize in (("fp32", 4), ("bf16", 2)):
            series.append(_series(name, dtype, "", tables, lambda t, _v, w, i=itemsize: bytes_ns(2 * t * w * i)))
    for name, passing in set(OWN.values()):
        series.append(_series(name, "bf16", passing, sizes, lambda r, c: bytes_ns(r * c * 4)))
    return series


def _attention() -> list[Series]:
    shapes: list[tuple[int, ...]] = [(b, 16, 16, n, d) for b in (1, 8) for n in (128, 1024, 4096) for d in (64, 128)]
    series = []
    for name in ("sdpa-cudnn", "sdpa-efficient", "sdpa-flash", "stepscope-flash"):
        for dtype in ("bf16", "fp32"):
            for passing, factor in (("forward", 1.0), ("backward", 2.5)):
                series.append(
                    _series(
                        name,
                        dtype,
                        f"causal {passing}",
                        shapes,
                        lambda b, h, _g, n, d, f=factor, t=dtype: product_ns(t, round(f * b * h), n, n, d),
                    )
                )
    return series


def _trials(factor: float) -> tuple[HostTrial, ...]:
    """Steps in which every call but a view costs the same, and a view a third of it."""
    trials = []
    for number in range(6):
        calls = {"mm": 20 + number, "mul.Tensor": 50 * (number + 1), "view": 60, "sum.dim_IntList": 10 * number}
        ns = round(factor * CALL_NS * (sum(calls.values()) - 40))
        trials += [_trial(phase, "adamw-torch", ns, calls) for phase in ("forward", "backward")]
        update = {"_foreach_add_.List": 12}
        trials.append(_trial("optimizer", "adamw-torch", round(factor * (50_000 + 4000 * 50)), update))
        trials.append(_trial("optimizer", "adamw-fused", round(factor * (40_000 + 1000 * 50)), {"_fused_adamw_": 1}))
    return tuple(trials)


def _trial(phase: str, optimizer: str, ns: int, calls: dict[str, int]) -> HostTrial:
    return HostTrial(
        model="made up",
        precision="bf16",
        optimizer=optimizer,
        phase=phase,
        ns=ns,
        modules=0,
        parameters=50,
        operations=calls,
    )

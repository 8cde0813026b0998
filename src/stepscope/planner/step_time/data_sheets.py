"""Calibrations of GPUs that nobody has measured: the H200's, scaled by data sheets, and links between GPUs.

Kernels are scaled by the rate that bounds them, and their fixed part stays. Libraries choose other kernels on other
GPUs, so this is rough: predictions from it say so, and their interval is wide.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

import stepscope
from stepscope.cost.overlap import Compute, DdpStrategy, StepTime, predict_ddp, ready_in_order
from stepscope.errors import StepscopeError
from stepscope.hardware import Hardware, find, known
from stepscope.planner.step_time import PredictedStep
from stepscope.recording.rows.calibration import Calibration, Series, read_calibration
from stepscope.recording.rows.links import COLLECTIVES, Link, LinkPlace, Links, find_links

SHIPPED = Path(stepscope.__file__).parent / "calibrations" / "h200.json"
_PRODUCTS = ("mm", "addmm", "bmm")
# Bytes per second of collectives between GPUs of one machine, each way and in practice, and their latency.
_NVLINK = {"V100": 1.2e11, "A100": 2.3e11, "H100": 3.6e11, "H200": 3.6e11, "B200": 7.0e11}
_PCIE = 2.0e10
_LINK_LATENCY_NS = 20_000.0


def find_calibration(gpu: str, path: Path | None = None) -> Calibration:
    """The calibration in `path`, or that of a GPU by name: the one that comes with stepscope, scaled if necessary."""
    if path is not None:
        return read_calibration(path)
    shipped = read_calibration(SHIPPED)
    card = find(gpu)
    if card is None:
        names = ", ".join(one.name for one in known())
        raise StepscopeError(
            f"unknown GPU: `{gpu}`", detail=f"expected a calibration, or one of {names}", hint="--gpu H200"
        )
    return shipped if card.name == shipped.hardware.name else scale_calibration(shipped, card)


def scale_calibration(measured: Calibration, card: Hardware) -> Calibration:
    """The same table for another GPU, with the times that its data sheet suggests."""
    tiny_ns = measured.constants.get("tiny_kernel_in_stream_ns", 2000.0)
    series = []
    for one in measured.series:
        ratio = _slowdown(one, measured.hardware, card)
        if ratio is not None:
            rows = tuple((*row[:-1], _scale(row[-1], tiny_ns, ratio)) for row in one.rows)
            series.append(msgspec.structs.replace(one, rows=rows))
    return msgspec.structs.replace(
        measured, gpu=card.name, hardware=card, series=tuple(series), scaled_from=measured.gpu, skipped=()
    )


def _slowdown(series: Series, measured: Hardware, card: Hardware) -> float | None:
    """How much slower the other GPU is at these operations; None if it lacks the dtype."""
    if series.dtype == "bf16" and "bf16" not in card.peak_flops:
        return None
    if series.operation in _PRODUCTS or "sdpa" in series.operation or "flash" in series.operation:
        peak = card.peak_flops.get(series.dtype)
        return measured.peak_flops[series.dtype] / peak if peak else None
    assert measured.bandwidth is not None
    return measured.bandwidth / card.bandwidth if card.bandwidth else None


def _scale(took_ns: int, fixed_ns: float, ratio: float) -> int:
    fixed_ns = min(fixed_ns, float(took_ns))
    return max(1, round(fixed_ns + (took_ns - fixed_ns) * ratio))


# --- Several ranks ----------------------------------------------------------------------------------------------------


def assume_links(gpu: str, ranks: int) -> tuple[Links, bool]:
    """The links between the GPUs of one machine: those that `stepscope comm` fitted, or else what such machines usually
    have. The second value says whether they are assumed."""
    place = LinkPlace(backend="nccl", device_name=gpu, ranks=ranks)
    if fitted := find_links(place):
        return fitted, False
    bytes_per_s = next((rate for name, rate in _NVLINK.items() if name in gpu), _PCIE)
    ring = {"all-reduce": 2 * (ranks - 1) / ranks}
    links = {
        one: Link(latency_ns=_LINK_LATENCY_NS, bytes_per_s=bytes_per_s / ring.get(one, (ranks - 1) / ranks))
        for one in COLLECTIVES
        if ranks > 1
    }
    return Links(place=place, links=links), True


def predict_data_parallel(
    step: PredictedStep, gradient_bytes: Sequence[int], links: Links, strategy: DdpStrategy = "bucketed"
) -> StepTime:
    """The step on several ranks. `gradient_bytes` are in the order in which backward computes the gradients; each takes
    a share of backward that is proportional to its size."""
    times = {phase.name: phase.ns for phase in step.phases}
    compute = Compute(
        forward_ns=times.get("forward", 0.0),
        backward_ns=times.get("backward", 0.0),
        optimizer_ns=times.get("optimizer", 0.0),
    )
    return predict_ddp(strategy, ready_in_order(gradient_bytes, compute.backward_ns), compute, links)

"""Measures a `Calibration`: how long operations take on this GPU, and on this host to launch them.

The sections run in the order of what predictions need most. Each has a share of the time, and what does not fit is left
out and named, so that a slow GPU gives a smaller table and not a long wait.
"""

import platform
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial

import torch

from stepscope.measure.calibration.attention import attention_cases, own_attention_cases
from stepscope.measure.calibration.clock import CallClock, TimedCall, measure_cases
from stepscope.measure.calibration.constants import measure_constants
from stepscope.measure.calibration.host_costs import (
    COMPILE_S,
    describe_trial,
    has_transformers,
    measure_host_costs,
    trial_workloads,
    try_trial,
)
from stepscope.measure.calibration.memory_bound import index_cases, list_cases, memory_cases
from stepscope.measure.calibration.own_kernels import own_cases
from stepscope.measure.calibration.products import product_cases
from stepscope.measure.environment import cpu_name, describe_unmeasured
from stepscope.recording.rows.calibration import Calibration, HostTrial, Series
from stepscope.spec import HuggingFace

OnStage = Callable[[str], None]
_THIN = 40  # in a trial run on a CPU, one case in so many


def measure_calibration(device: torch.device, *, seconds: float, on_stage: OnStage) -> Calibration:
    """Measure in at most about `seconds`. A CPU gives a table of the same form with few entries, for trying it out."""
    started, start = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    environment = describe_unmeasured(device)
    clock = CallClock(device)
    on_stage("host: operators")
    host_costs = tuple(measure_host_costs(device))
    on_stage("launches, graphs and continuous load")
    constants = measure_constants(clock)
    series, skipped = _measure_sections(clock, start, seconds, on_stage)
    trials, untried = _measure_trials(device, start + seconds, on_stage)
    is_cuda = device.type == "cuda"
    return Calibration(
        gpu=environment.driver_name or environment.hardware.name,
        hardware=environment.hardware,
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 1,
        l2_bytes=clock.l2_bytes,
        host=cpu_name(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=environment.cuda,
        driver=environment.driver,
        commit=environment.commit,
        measured=started,
        wall_s=round(time.monotonic() - start, 1),
        constants={name: round(value, 1) for name, value in constants.items()},
        series=tuple(series),
        host_costs=host_costs,
        trials=tuple(trials),
        skipped=(*skipped, *untried),
    )


def _measure_sections(
    clock: CallClock, start: float, seconds: float, on_stage: OnStage
) -> tuple[list[Series], list[str]]:
    """Measure the GPU's sections. Each ends at its share of the time at the latest; the rest is for host trials."""
    device, series, skipped = clock.device, [], []
    thin = _THIN if device.type == "cpu" else 1
    most_flops, most_elements = (1e9, 2**17) if device.type == "cpu" else (float("inf"), 2**28)
    sections: tuple[tuple[str, float, Iterable[TimedCall]], ...] = (
        ("products", 0.36, product_cases(device, every=min(5, thin), most_flops=most_flops)),
        ("attention", 0.48, [] if device.type == "cpu" else attention_cases(device)),
        ("lists", 0.5, list_cases(device, most_elements=most_elements, every=1 if thin == 1 else 4)),
        ("indexing", 0.53, index_cases(device, every=thin)),
        ("memory", 0.69, memory_cases(device, most_elements=most_elements, every=1 if thin == 1 else 4)),
        ("own kernels", 0.75, [] if device.type == "cpu" else _own_cases(device)),
    )
    for name, share, cases in sections:
        began = time.monotonic()
        on_case = partial(_say_case, on_stage, name)
        measured, left_out = measure_cases(clock, cases, deadline=start + share * seconds, on_case=on_case)
        series += measured
        skipped += left_out
        count = sum(len(one.rows) for one in measured)
        on_stage(f"{name}: {count} times in {time.monotonic() - began:.0f} s")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return series, skipped


def _say_case(on_stage: OnStage, section: str, case: str) -> None:
    on_stage(f"{section}: {case}")


def _own_cases(device: torch.device) -> Iterable[TimedCall]:
    yield from own_cases(device)
    yield from own_attention_cases(device)


def _measure_trials(device: torch.device, deadline: float, on_stage: OnStage) -> tuple[list[HostTrial], list[str]]:
    """Time small models, those of `transformers` only if it is installed."""
    trials: list[HostTrial] = []
    skipped: list[str] = []
    is_complete = has_transformers()
    for number, workload in enumerate(trial_workloads(device)):
        if device.type == "cpu" and number % 9:
            continue
        if isinstance(workload.model, HuggingFace) and not is_complete:
            skipped.append("transformers is not installed")
            break
        if time.monotonic() + (COMPILE_S if workload.compile else 0) > deadline:
            skipped.append(f"out of time at the trial of {describe_trial(workload)}")
            break
        on_stage(f"host: {describe_trial(workload)}")
        measured, problem = try_trial(workload, device)
        trials += measured
        skipped += [problem] if problem else []
    return trials, skipped

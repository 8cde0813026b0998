"""Predictions of measured steps, and the table of both, for `prediction.py`."""

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from prediction_cases import GROUPS, Truth
from worker_process import ROOT

if TYPE_CHECKING:
    from stepscope.planner.operation import Operation
    from stepscope.recording.rows.calibration import HostTrial
    from stepscope.spec import Workload

Row = dict[str, Any]
_WAITING = 1.15  # times as long as the GPU's work, at least, takes a phase that waits for the host
_EARLY = 0.8  # of a step: if the CPU has launched everything by then, the step waits for the GPU


def check_cases(cases: list[Truth], *, gpu: str, calibration: Path | None) -> int:
    """Print whether workloads are predicted to fit into their limits, or into the GPU. 1 if one is not as expected."""
    _use_sources()
    from stepscope.jobs.plan import Planner
    from stepscope.jobs.plan_target import open_target
    from stepscope.spec import build_case

    wrong = 0
    for truth in cases:
        case = build_case(truth.settings)
        with Planner(open_target(gpu, case.timing.memory_limit, calibration)) as planner:
            (found,) = planner.predict_all([case.workload])
        said = _describe(found)
        verdict = said.get("refused") or said["verdict"]
        wrong += (verdict == "fits") != truth.fits
        peak = gib(said.get("peak_allocated_bytes", 0))
        print(f"{truth.name}: {verdict}, {peak}, {ms(said.get('step_ns'))}; expected to fit: {truth.fits}", flush=True)
    return 1 if wrong else 0


def predict(rows: list[Row], *, gpu: str, calibration: Path | None) -> list[Row]:
    """The rows with what `stepscope plan` says about the same settings, or why it refuses them."""
    _use_sources()
    from stepscope.jobs.plan import Planner
    from stepscope.jobs.plan_target import open_target
    from stepscope.spec import build_case

    total = next((row["total_bytes"] for row in rows if row.get("total_bytes")), None)
    found = []
    with Planner(open_target(gpu, total, calibration)) as planner:
        for row in rows:
            started = time.monotonic()
            (one,) = planner.predict_all([build_case(row["settings"]).workload])
            said = _describe(one) | {"predict_s": round(time.monotonic() - started, 1)}
            print(f"{said['predict_s']:6.1f} s  {row['name']} {said.get('refused', '')}", file=sys.stderr, flush=True)
            found.append(row | {"predicted": said})
    return found


def add_trials(rows: list[Row], *, gpu: str, path: Path) -> None:
    """Give a calibration the measured phases of `tuned-on` that waited for the host, as trials of full size in place of
    those it has. Phases with checkpoints have other costs."""
    _use_sources()
    from stepscope.jobs.plan_target import open_target
    from stepscope.planner.simulation import simulate_workload
    from stepscope.planner.step_time import predict_step
    from stepscope.planner.step_time.timeline import find_repeated
    from stepscope.recording.rows.calibration import read_calibration, write_calibration
    from stepscope.spec import build_case

    table = read_calibration(path)
    small = msgspec.structs.replace(table, trials=tuple(one for one in table.trials if not one.is_full_size))
    accelerator = open_target(gpu, None, path).accelerator
    found = []
    for row in rows:
        workload = build_case(row["settings"]).workload
        if row["group"] != "tuned-on" or row["compiled"] or workload.mode != "train":
            continue
        operations = simulate_workload(workload, accelerator).operations
        if any(find_repeated(operations)):
            continue
        for phase in predict_step(operations, small, tf32=workload.precision == "tf32").phases:
            least_ns = _WAITING * phase.gpu_ns
            if phase.name != "optimizer" and phase.host_ns > least_ns < 1e6 * row["phases_ms"][phase.name]:
                found.append(_make_trial(row, workload, phase.name, operations))
                print(f"{row['name']}, {phase.name}: {found[-1].ns / 1e6:.1f} ms, {ms(round(phase.host_ns))} expected")
    write_calibration(msgspec.structs.replace(small, trials=(*small.trials, *found)), path)


def _make_trial(row: Row, workload: "Workload", phase: str, operations: "list[Operation]") -> "HostTrial":
    from stepscope.planner.step_time.host_time import share_modules
    from stepscope.recording.rows.calibration import HostTrial

    inside = [number for number, one in enumerate(operations) if one.phase == phase]
    names = [operations[number].name.removeprefix("aten.").removesuffix(".default") for number in inside]
    entered = share_modules(operations)
    return HostTrial(
        model=row["name"],
        precision=workload.precision,
        optimizer=row["optimizer"],
        phase=phase,
        ns=round(1e6 * row["phases_ms"][phase]),
        modules=sum(entered.get(number, 0) for number in inside),
        parameters=0,
        operations=dict(sorted(Counter(names).items())),
        is_full_size=True,
    )


def _use_sources() -> None:
    sys.path.insert(0, str(ROOT / "src"))
    os.environ["PYTHONPATH"] = str(ROOT / "src")  # for the processes that simulate
    os.chdir(ROOT)  # for the path of the factory


def _describe(found: Any) -> Row:
    from stepscope.recording.rows.plan_result import PlanResult

    if not isinstance(found, PlanResult):
        return {"refused": f"{found.message} {found.detail}".strip()}
    return {
        "verdict": found.verdict,
        "peak_allocated_bytes": found.peak_allocated_bytes,
        "peak_requested_bytes": found.peak_requested_bytes,
        "reserved_bytes": list(found.reserved_bytes),
        "step_ns": found.step_ns,
        "step_ns_interval": found.step_ns_interval and list(found.step_ns_interval),
        "phases": [[one.phase, one.peak_bytes, one.step_ns] for one in found.phases],
        "assumptions": list(found.assumptions),
    }


def table(rows: list[Row]) -> str:
    lines = [
        "| workload | parameters | peak | predicted | error | reserved | predicted | step | predicted | error |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for group in GROUPS:
        chosen = [row for row in rows if row["group"] == group and not row["failure"]]
        for is_compiled in (False, True):
            alike = [row for row in chosen if row["compiled"] == is_compiled]
            if alike:
                lines += [f"| **{group}{', compiled' * is_compiled}** | | | | | | | | | |", *map(_line, alike)]
    return "\n".join([*lines, "", *_summaries(rows)])


def _line(row: Row) -> str:
    said = row["predicted"]
    measured = f"| {row['name']} | {row['parameters'] / 1e6:,.0f}M | {gib(peak_of(row))}"
    if "refused" in said:
        return f"{measured} | refused: {said['refused']} | | | | {row['step_ms']:.1f} | | |"
    low, high = said["reserved_bytes"]
    wrong, late = memory_error(row), time_error(row)
    return (
        f"{measured} | {gib(said['peak_allocated_bytes'])} | {percent(wrong, 2)} | {gib(row['peak_reserved_bytes'])} |"
        f" {gib(low)} to {gib(high)} | {row['step_ms']:.1f} ms | {ms(said['step_ns'])} | {percent(late, 1)} |"
    )


def _summaries(rows: list[Row]) -> Iterator[str]:
    """The mean and the worst error of each group."""
    for group in GROUPS:
        for is_compiled in (False, True):
            alike = [
                row for row in rows if (row["group"], row["compiled"]) == (group, is_compiled) and not row["failure"]
            ]
            for what, read in (
                ("allocated peak", memory_error),
                ("reserved memory", reserved_error),
                ("step time", time_error),
            ):
                errors = {row["name"]: error for row in alike if (error := read(row)) is not None}
                if errors:
                    worst = max(errors, key=lambda name: abs(errors[name]))
                    mean = statistics.mean(map(abs, errors.values()))
                    yield (
                        f"{group}{', compiled' * is_compiled}, {what}: mean {100 * mean:.2f}%, worst "
                        f"{100 * errors[worst]:+.2f}% ({worst}), {len(errors)} workloads"
                    )
    yield from _by_bound(rows)
    yield from _surprises(rows)


def _by_bound(rows: list[Row]) -> Iterator[str]:
    """The error of eager steps that wait for the GPU, and of those that wait for the CPU at least in part."""
    eager = [row for row in rows if not row["compiled"] and not row["failure"] and time_error(row) is not None]
    for what, is_early in (("launched in under 80% of the step", True), ("launched later", False)):
        alike = [row for row in eager if (row["enqueue_ms"] < _EARLY * row["step_ms"]) == is_early]
        errors = [abs(time_error(row) or 0.0) for row in alike]
        if errors:
            said = f"mean {100 * statistics.mean(errors):.2f}%, worst {100 * max(errors):.2f}%"
            yield f"eager, {what}, step time: {said}, {len(errors)} workloads"


def _surprises(rows: list[Row]) -> Iterator[str]:
    """Workloads that reserved more memory than predicted, or took longer or shorter than their interval."""
    known = [row for row in rows if not row["failure"] and "refused" not in row["predicted"]]
    more = [row["name"] for row in known if row["peak_reserved_bytes"] > row["predicted"]["reserved_bytes"][1]]
    timed = [row for row in known if row["predicted"]["step_ns_interval"]]
    outside = [
        row["name"]
        for row in timed
        if not row["predicted"]["step_ns_interval"][0]
        <= row["step_ms"] * 1e6
        <= row["predicted"]["step_ns_interval"][1]
    ]
    yield f"reserved more than predicted: {', '.join(more) or 'none'}"
    if timed:
        yield f"step time not in its interval: {', '.join(outside) or 'none'}"


def peak_of(row: Row) -> int:
    """Compiling needs memory of its own, so the peak of a compiled step is that of warm steps. Replays of CUDA graphs
    request nothing, so the peak of a captured step is that of its capture."""
    is_warm = row["compiled"] and not is_captured(row)
    return int(row["warm_allocated_bytes" if is_warm else "peak_allocated_bytes"])


def is_captured(row: Row) -> bool:
    settings = row["settings"]
    return bool(settings.get("graph")) or settings.get("preset") == "fast"


def reserved_error(row: Row) -> float | None:
    """How far reserved memory is outside the predicted range."""
    said = row["predicted"].get("reserved_bytes")
    if said is None:
        return None
    low, high = map(int, said)
    measured = int(row["peak_reserved_bytes"])
    return min(max(measured, low), high) / measured - 1


def memory_error(row: Row) -> float | None:
    said = row["predicted"].get("peak_allocated_bytes")
    return None if said is None else said / peak_of(row) - 1


def time_error(row: Row) -> float | None:
    said = row["predicted"].get("step_ns")
    return None if said is None else said / 1e6 / row["step_ms"] - 1


def gib(size: int) -> str:
    return f"{size / 2**30:.3f} GiB"


def ms(ns: int | None) -> str:
    return "" if ns is None else f"{ns / 1e6:.1f} ms"


def percent(share: float | None, digits: int) -> str:
    return "" if share is None else f"{100 * share:+.{digits}f}%"

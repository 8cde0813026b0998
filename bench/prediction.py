"""Predicted memory and time of a step next to measured ones.

    python bench/prediction.py --measure --out truth.jsonl          # on a GPU; about five minutes on an H200
    python bench/prediction.py --measure --group frozen --out truth.jsonl
    python bench/prediction.py --measure --device cpu --tiny        # only to see that everything runs
    python bench/prediction.py --check --group proposals            # anywhere: are the cases what they should be?
    python bench/prediction.py --predict --from truth.jsonl --group tuned-on      # anywhere; adds predictions
    python bench/prediction.py --from bench/results/prediction_h200.jsonl         # prints the table of such a file
    python bench/prediction.py --from truth.jsonl --add-trials calibration.json   # the host's time in large steps

Every workload of `prediction_cases.py` has a process of its own, so that its peak is that of a fresh process. Processes
import in parallel, and compiled workloads also compile in parallel. Then the machine is quiet, and one process after
another uses the GPU: warm-up steps, timed steps on the CPU's clock around a step and one wait for the GPU, and one step
with the peak of each phase. A row is written as soon as it is measured. Rows of workloads in `tuned-on` also have the
time of each kernel.
"""

import argparse
import faulthandler
import itertools
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prediction_cases import GROUPS, TRUTHS, Truth, shrink
from prediction_table import add_trials, check_cases, predict, table
from result_rows import fail, read_rows
from worker_process import ROOT, WorkerProcess, open_answers

if TYPE_CHECKING:
    import torch

    from stepscope.step import Step

WARMUP = 3
LEAST_STEPS, MOST_STEPS, TIMED_S = 8, 40, 1.2
KERNELS = 60  # of the longest, per row
OUT_OF_MEMORY = "out of memory"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure steps on a GPU, to compare predictions with.")
    parser.add_argument("--measure", action="store_true", help="measure on this machine")
    parser.add_argument("--check", action="store_true", help="predict whether the workloads fit as they should")
    parser.add_argument("--predict", action="store_true", help="predict what --from has measured")
    parser.add_argument("--from", dest="source", type=Path, help="rows that were measured before")
    parser.add_argument("--add-trials", metavar="CALIBRATION", type=Path, help="add the steps of --from to this table")
    parser.add_argument("--gpu", default="H200", help="that the rows were measured on")
    parser.add_argument("--calibration", type=Path, help="table of times, instead of the one of the package")
    parser.add_argument("--group", default="tuned-on,held-out", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--only", metavar="TEXT", default="", help="workloads whose name contains this")
    parser.add_argument("--out", type=Path, help="append one JSON line per workload")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try it on a CPU")
    parser.add_argument("--at-once", type=int, metavar="N", default=20, help="processes that import at the same time")
    parser.add_argument(
        "--prepare", type=float, metavar="S", default=200, help="how long importing or compiling may take"
    )
    parser.add_argument("--limit", type=float, metavar="S", default=40, help="how long one may use the GPU")
    parser.add_argument("--budget", type=float, metavar="S", default=350, help="nothing starts later than this")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(json.loads(arguments.worker))
    if unknown := set(arguments.group.split(",")) - set(GROUPS):
        fail(f"unknown group: {', '.join(sorted(unknown))}; expected {', '.join(GROUPS)}")
    if arguments.source is not None:
        return show(arguments)
    if arguments.check:
        return check_cases(choose(arguments), gpu=arguments.gpu, calibration=arguments.calibration)
    if not arguments.measure:
        fail("nothing to do; try --measure, or --from FILE")
    if arguments.out is not None and not arguments.out.parent.is_dir():
        fail(f"not a directory: `{arguments.out.parent}`")
    rows = list(measure(arguments))
    print(measured_table(rows))
    wrong = [row["name"] for row in rows if not is_expected(row, is_tiny=arguments.tiny)]
    print(f"\nnot as expected: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


def is_expected(row: dict[str, Any], *, is_tiny: bool) -> bool:
    """Whether a workload ran, or ran out of memory if it is too large. Nothing tiny is."""
    fits = is_tiny or TRUTHS[row["name"]].fits
    return bool(row["failure"] == (None if fits else OUT_OF_MEMORY))


def show(arguments: argparse.Namespace) -> int:
    """Print what a file has, with predictions if they are asked for or in the file."""
    groups = arguments.group.split(",")
    rows = [row for row in read_rows(arguments.source, "prediction") if row["group"] in groups]
    rows = [row for row in rows if arguments.only in row["name"] and not row["failure"]]
    if arguments.add_trials is not None:
        add_trials(rows, gpu=arguments.gpu, path=arguments.add_trials)
        return 0
    if arguments.predict:
        rows = predict(rows, gpu=arguments.gpu, calibration=arguments.calibration)
        if arguments.out is not None:
            arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows) if all("predicted" in row for row in rows) else measured_table(rows))
    return 0


def measured_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "\n| workload | group | parameters | allocated | reserved | step |",
        "| --- | --- | --: | --: | --: | --: |",
    ]
    for row in rows:
        peaks = " | ".join(
            f"{row.get(key, 0) / 2**30:.3f} GiB" for key in ("peak_allocated_bytes", "peak_reserved_bytes")
        )
        said = row["failure"] or f"{row['parameters'] / 1e6:,.0f}M | {peaks} | {row['step_ms']:.2f} ms"
        lines.append(f"| {row['name']} | {row['group']} | {said} |")
    return "\n".join(lines)


# --- The process that measures ---


def choose(arguments: argparse.Namespace) -> list[Truth]:
    groups = arguments.group.split(",")
    chosen = [one for one in TRUTHS.values() if one.group in groups and arguments.only in one.name]
    if not chosen:
        fail(f"no workload of {arguments.group} has `{arguments.only}` in its name")
    return chosen


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    started = time.monotonic()
    for wave in make_waves(choose(arguments), arguments.at_once):
        if time.monotonic() - started > arguments.budget:
            print(f"no time left for {', '.join(one.name for one in wave)}", flush=True)
            continue
        yield from measure_wave(wave, arguments, started)


def make_waves(chosen: list[Truth], at_once: int) -> Iterator[list[Truth]]:
    """Workloads to prepare together. Compiled ones come last: they hold memory on the GPU while others run."""
    for compiled in (False, True):
        alike = [one for one in chosen if one.is_compiled == compiled]
        for first in range(0, len(alike), at_once):
            yield alike[first : first + at_once]


def measure_wave(wave: list[Truth], arguments: argparse.Namespace, started: float) -> Iterator[dict[str, Any]]:
    common = {"device": arguments.device, "tiny": arguments.tiny}
    common |= {"limit_s": arguments.limit, "prepare_s": arguments.prepare}
    workers = [WorkerProcess(__file__, common | {"case": one.name}) for one in wave]
    try:
        begun = time.monotonic()
        ready = [worker.answer(arguments.prepare - (time.monotonic() - begun)) for worker in workers]
        print(f"{len(wave)} processes are ready after {time.monotonic() - started:.0f} s", flush=True)
        for worker, is_ready in zip(workers, ready, strict=True):
            late = time.monotonic() - started > arguments.budget
            answer = worker.ask("go", arguments.limit) if is_ready and not late else None
            worker.close()
            row = describe(TRUTHS[worker.case], answer, arguments, late=late)
            keep(row, arguments.out, time.monotonic() - started)
            yield row
    finally:
        for worker in workers:
            worker.close()


def describe(truth: Truth, answer: Any, arguments: argparse.Namespace, *, late: bool) -> dict[str, Any]:
    failure = "no time left" if late else "ended early; its messages are above"
    return {
        "benchmark": "prediction",
        "name": truth.name,
        "group": truth.group,
        "settings": shrink(truth.settings) if arguments.tiny else truth.settings,
        "compiled": truth.is_compiled,
        "failure": None if answer else failure,
        "command": shlex.join(["python", *sys.argv]),
        **(answer or {}),  # which has another failure if memory ran out
    }


def keep(row: dict[str, Any], out: Path | None, elapsed_s: float) -> None:
    said = row["failure"] or f"{row['step_ms']:.2f} ms, {row.get('peak_allocated_bytes', 0) / 2**30:.3f} GiB"
    print(f"{elapsed_s:4.0f} s  {row['name']}: {said}", flush=True)
    if out is not None:
        with out.open("a") as lines:
            lines.write(json.dumps(row) + "\n")


# --- The process that is measured ---


def work(what: dict[str, Any]) -> int:
    """Import, and compile if there is something to compile; measure when standard input has a line."""
    answers = open_answers()
    os.chdir(ROOT)  # for the path of the factory
    faulthandler.dump_traceback_later(0.9 * what["prepare_s"], exit=False)  # where it hangs, if it does
    truth = TRUTHS[what["case"]]
    settings = shrink(truth.settings) if what["tiny"] else truth.settings
    import_all(settings)
    import torch

    from stepscope.measure.environment import resolve_device
    from stepscope.measure.memory.limits import limit_memory
    from stepscope.planner.assumptions import CONTEXT_BYTES
    from stepscope.spec import build_case
    from stepscope.step import build

    device = resolve_device(what["device"])
    case = build_case(settings | {"device": what["device"]})
    workload = case.workload
    if case.timing.memory_limit is not None:
        limit_memory(device, case.timing.memory_limit - CONTEXT_BYTES)
    step = build(workload, device) if truth.is_compiled else None
    warmup_ms = [] if step is None else warm_up(step)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    if not sys.stdin.readline():
        return 0
    faulthandler.cancel_dump_traceback_later()
    faulthandler.dump_traceback_later(0.9 * what["limit_s"], exit=False)
    try:
        if step is None:
            step = build(workload, device)
            warmup_ms = warm_up(step)
        row = measure_step(step, is_alone=not truth.is_compiled, with_kernels=truth.group == "tuned-on")
        row |= {"warmup_ms": warmup_ms}
    except torch.OutOfMemoryError as error:
        row = {"failure": OUT_OF_MEMORY, "detail": str(error)}
    row |= {"environment": describe_environment(device)}
    print(json.dumps(row), file=answers, flush=True)
    return 0


def import_all(settings: dict[str, Any]) -> None:
    """Import what building and running will need, so that measuring starts at once."""
    import importlib

    import torch._dynamo  # noqa: F401  # the optimizers import it when one is made

    import stepscope.step  # noqa: F401

    family = settings.get("hf") or settings.get("set", {}).get("family")
    if family is not None:
        import transformers.modeling_utils  # noqa: F401
        from transformers import AutoModelForCausalLM  # noqa: F401

        importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def warm_up(step: "Step") -> list[float]:
    from stepscope.measure.timing import settle_heap, time_steps

    settle_heap()
    return [round(ns / 1e6, 3) for ns in time_steps(step, WARMUP).host_step_ns]


def measure_step(step: "Step", *, is_alone: bool, with_kernels: bool) -> dict[str, Any]:
    """The times and the memory of a warm step. `is_alone`: no other process has memory on the GPU."""
    import torch

    from stepscope.measure.timing import time_steps

    on_gpu = step.device.type == "cuda"
    before = read_peaks() if on_gpu else {}
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    guess_s = time_steps(step, 1).host_step_ns[0] / 1e9
    count = int(min(max(TIMED_S / max(guess_s, 1e-6), LEAST_STEPS), MOST_STEPS))
    samples = time_steps(step, count)
    row: dict[str, Any] = {"parameters": step.parameters, "optimizer": step.optimizer_name}
    if on_gpu:
        row |= describe_memory(before, is_alone=is_alone)
        row["phase_peaks"] = measure_phases(step)
    ordered = sorted(samples.host_step_ns)
    row |= {
        "step_ms": statistics.median(ordered) / 1e6,
        "step_p20_ms": ordered[len(ordered) // 5] / 1e6,
        "step_p80_ms": ordered[4 * len(ordered) // 5] / 1e6,
        "enqueue_ms": statistics.median(samples.enqueue_ns) / 1e6,
        "gpu_step_ms": statistics.median(samples.step_ns) / 1e6,
        "phases_ms": {name: statistics.median(times) / 1e6 for name, times in samples.phases_ns.items()},
        "steps_ms": [round(ns / 1e6, 4) for ns in samples.host_step_ns],
        "remarks": [remark.text for remark in step.remarks],
    }
    if on_gpu and with_kernels:
        row["kernels"] = list_kernels(step)
    return row


def read_peaks() -> dict[str, int]:
    import torch

    stats = torch.cuda.memory_stats()
    names = {"allocated": "allocated_bytes", "requested": "requested_bytes", "reserved": "reserved_bytes"}
    return {name: stats[f"{key}.all.peak"] for name, key in names.items()}


def describe_memory(before: dict[str, int], *, is_alone: bool) -> dict[str, Any]:
    """Peaks since the process began, and those of warm steps alone, which leave out what only building or compiling
    needed."""
    import torch

    warm = read_peaks()
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    return {
        **{f"peak_{name}_bytes": max(before[name], warm[name]) for name in warm},
        **{f"warm_{name}_bytes": value for name, value in warm.items()},
        "rest_allocated_bytes": stats["allocated_bytes.all.current"],
        "reserved_at_end_bytes": stats["reserved_bytes.all.current"],
        "segments": stats["segment.all.current"],
        "allocation_retries": stats["num_alloc_retries"],
        "context_bytes": total - free - stats["reserved_bytes.all.current"] if is_alone else None,
        "total_bytes": total,
    }


def measure_phases(step: "Step") -> list[dict[str, Any]]:
    """The peak during each phase of one more step, and what is left after it."""
    import torch

    phases = []
    for name, phase in step.phases:
        torch.cuda.reset_peak_memory_stats()
        phase()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        phases.append({"phase": name, "peak_bytes": peak, "end_bytes": torch.cuda.memory_allocated()})
    return phases


def list_kernels(step: "Step") -> list[tuple[str, int, float]]:
    """Name, launches and microseconds of the longest kernels of one step."""
    import torch
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorder:
        step.run()
        torch.cuda.synchronize()
    assert recorder.profiler is not None
    results = recorder.profiler.kineto_results
    assert results is not None
    events = [one for one in results.events() if one.device_type() == DeviceType.CUDA]
    by_name = itertools.groupby(sorted(events, key=lambda one: one.name()), key=lambda one: one.name())
    totals = [(name[:200], [one.duration_ns() / 1e3 for one in found]) for name, found in by_name]
    longest = sorted(totals, key=lambda one: -sum(one[1]))[:KERNELS]
    return [(name, len(times), round(sum(times), 2)) for name, times in longest]


def describe_environment(device: "torch.device") -> dict[str, Any]:
    import msgspec

    from stepscope.measure.environment import cpu_name, describe_unmeasured, installed_version

    known: dict[str, Any] = msgspec.to_builtins(describe_unmeasured(device))
    return known | {
        "transformers": installed_version("transformers"),
        "host_cpu": cpu_name(),
        "host_cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


if __name__ == "__main__":
    sys.exit(main())

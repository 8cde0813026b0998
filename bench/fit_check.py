"""What `stepscope plan` says about runs that were measured under a memory limit: whether they fit, and their peak.

    stepscope bench --size small,medium,large,xl,2.7B --context 128,256,512,1024 --memory-limit 24GB --out runs/24gb
    python bench/fit_check.py bench/results/bench_h200_24gb.jsonl      # anywhere; about eight minutes

A limit of `bench` is one of PyTorch's allocator, so the GPU to plan for has as much memory and the CUDA context.
Exits with 1 if a run that is said to fit ran out of memory.
"""

import argparse
from pathlib import Path

from result_rows import fail
from stepscope.jobs.plan import Planner
from stepscope.jobs.plan_target import open_target
from stepscope.planner.assumptions import CONTEXT_BYTES
from stepscope.recording.rows.bench import BenchRow
from stepscope.recording.rows.plan_result import PlanResult
from stepscope.recording.rows.results_file import read_rows
from stepscope.units import say_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare predicted and measured fits.")
    parser.add_argument("results", type=Path, help="results of `stepscope bench --memory-limit`")
    parser.add_argument("--gpu", default="H200", help="that they were measured on")
    arguments = parser.parse_args()
    rows, _ = read_rows(arguments.results, BenchRow)
    limits = {row.case.timing.memory_limit for row in rows}
    limit = limits.pop() if len(limits) == 1 else None
    if limit is None:
        fail(f"expected runs with one memory limit: `{arguments.results}`")
    print(f"| workload, in {say_bytes(limit)} | measured | predicted | peak | predicted | error |")
    print("| --- | --- | --- | --: | --: | --: |")
    with Planner(open_target(arguments.gpu, limit + CONTEXT_BYTES)) as planner:
        pairs = [(row, planner.predict(row.case.workload)) for row in rows]
    for row, found in pairs:
        print(line(row, found))
    wrong = [row for row, found in pairs if found.fits and row.status != "ok"]
    cautious = [row for row, found in pairs if not found.fits and row.status == "ok"]
    print(f"\n{len(rows)} runs; {len(wrong)} were said to fit and did not, {len(cautious)} fit and were said not to")
    return 1 if wrong else 0


def line(row: BenchRow, found: PlanResult) -> str:
    workload, said = row.case.workload, say_bytes(found.peak_allocated_bytes)
    name = f"{workload.model.name} context {workload.context} {workload.precision}"
    measured = row.measurement.peak_bytes if row.measurement is not None else None
    error = f"{100 * (found.peak_allocated_bytes / measured - 1):+.2f}%" if measured else ""
    peak = say_bytes(measured) if measured else ""
    return f"| {name} | {row.status} | {found.verdict} | {peak} | {said} | {error} |"


if __name__ == "__main__":
    raise SystemExit(main())

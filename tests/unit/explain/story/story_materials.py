"""Small inputs of a report: runs on a made-up GPU, and committed recordings of a real one."""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from stepscope.explain.memory import MemoryProfile, make_memory_profile
from stepscope.explain.story import Materials
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.findings import Missing, Report, Section
from stepscope.recording.readers.formats import open_recording
from stepscope.recording.rows.precision_report import PrecisionReport, read_report
from stepscope.recording.store import Overhead
from stepscope.spec import build_case
from tests.unit.attention_rows import attend
from tests.unit.plans import fit_of
from tests.unit.recordings import ADD, ALL_REDUCE, BF16, FP32, GEMM_BF16, Timeline
from tests.unit.rows import ENVIRONMENT, row

FIXTURES = Path(__file__).parents[3] / "fixtures"
RESULTS = Path(__file__).parents[4] / "bench" / "results"
CASE = build_case({"size": "small", "context": 256, "precision": "bf16", "device": "cuda:0"})
HERE = msgspec.structs.replace(ENVIRONMENT, hardware=msgspec.structs.replace(ENVIRONMENT.hardware, bandwidth=4.8e12))


def product(timeline: Timeline, us: float = 250) -> None:
    """137 GFLOP, at least 139 µs on an H200."""
    timeline.launch(GEMM_BF16, us, op="aten::mm", shapes=[[4096, 4096]] * 2, dtypes=[BF16] * 2)


def addition(timeline: Timeline, us: float = 250) -> None:
    """805 MB, at least 168 µs on an H200."""
    timeline.launch(ADD, us, op="aten::add", shapes=[[8192, 8192]] * 2, dtypes=[FP32] * 2)


def record(*work: Any, steps: int = 2, host_us: float = 5, **manifest: Any) -> Profile:
    """A training run: every step does all of `work` in backward."""
    timeline = Timeline(host_us=host_us)
    for _ in range(steps):
        with timeline.step(), timeline.phase("backward"), timeline.module("blocks.0.ffn"):
            for one in work:
                one(timeline)
            timeline.wait()
    return timeline.profile(**manifest)


def record_ours(*work: Any, **manifest: Any) -> Profile:
    """The same as a recording of stepscope."""
    ours = {"case": CASE, "environment": HERE, "command": "stepscope profile --size small", "started": "now"}
    return record(*work, **{**ours, **manifest})


def small_row(**settings: Any) -> Any:
    return row(**{"size": "small", "context": 256, "precision": "bf16", **settings})


@cache
def memory() -> MemoryProfile:
    """A tiny model trained on an H200."""
    return make_memory_profile(open_recording(FIXTURES / "h200_tiny_train.pickle.gz"))


@cache
def counted() -> Profile:
    """Counters of Nsight Compute on an H200."""
    return make_profile(open_recording(FIXTURES / "h200_gpt2_counters.csv.gz"))


@cache
def traced() -> Profile:
    """A foreign PyTorch profiler trace: no steps, no modules, no launches."""
    return make_profile(open_recording(FIXTURES.parents[1] / "docs" / "examples" / "trace.json.gz"))


@cache
def precisions() -> PrecisionReport:
    return read_report(RESULTS / "precision_h200_small.json")


@cache
def all_there() -> Materials:
    """Every stage of one run of stepscope."""
    profile = record_ours(product, addition, overhead=Overhead(plain_ns=1_000_000, recorded_ns=1_100_000))
    return Materials(
        name="small",
        command="stepscope report --size small",
        profile=profile,
        memory=memory(),
        bench=(small_row(), small_row(precision="fp32")),
        precision=precisions(),
        attention=(attend("naive"), attend("triton", length=2048), attend("naive", length=2048)),
        plan=fit_of(CASE.workload, batch=64),
    )


def not_measured(report: Report) -> tuple[Missing, ...]:
    """The lines of the section *Not measured*; empty without one."""
    return next((one.missing for one in report.sections if one.key == "not-measured"), ())


def lacks(report: Report, what: str) -> Missing:
    """The line that contains `what`."""
    return next(one for one in not_measured(report) if what in one.what)


def section(report: Report, key: str) -> Section:
    return next(one for one in report.sections if one.key == key)


def communicate(timeline: Timeline) -> None:
    timeline.launch(ALL_REDUCE, 900, op="c10d::allreduce_")

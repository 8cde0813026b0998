"""stepscope shows where a Transformer training step spends its time and memory, and why.

    run = stepscope.load("trace.json.gz")
    run.step_ms, run.classes, run.findings
    stepscope.report(run, "report.html")

Names are imported on first use, so `import stepscope` takes milliseconds and never imports torch. This makes
`stepscope.annotate` cheap to use in training code. `stepscope.optimise` and what records a training loop run in the
process that uses them, with torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepscope.annotate import annotate

if TYPE_CHECKING:
    from stepscope.api.display import DataTable, Picture
    from stepscope.api.loop import Recorder, record, steps, trace_handler
    from stepscope.api.measure import (
        BenchResults,
        MemoryResults,
        PrecisionResult,
        bench,
        grid,
        memory,
        precision,
        profile,
        workload,
    )
    from stepscope.api.optimise import OptimiseResult, optimise_workload
    from stepscope.api.plan import Fit, StepPlan, plan, plan_fit
    from stepscope.api.report import ReportPage, report
    from stepscope.api.run import Answers, Run, RunComparison, load
    from stepscope.errors import StepscopeError
    from stepscope.fast.optimised_step import OptimisedStep, optimise
    from stepscope.loop.oom import explain_oom
    from stepscope.spec import ModelShape, Workload

__all__ = [
    "Answers",
    "BenchResults",
    "DataTable",
    "Fit",
    "MemoryResults",
    "ModelShape",
    "OptimiseResult",
    "OptimisedStep",
    "Picture",
    "PrecisionResult",
    "Recorder",
    "ReportPage",
    "Run",
    "RunComparison",
    "StepPlan",
    "StepscopeError",
    "Workload",
    "__version__",
    "annotate",
    "bench",
    "explain_oom",
    "grid",
    "load",
    "memory",
    "optimise",
    "optimise_workload",
    "plan",
    "plan_fit",
    "precision",
    "profile",
    "record",
    "report",
    "steps",
    "trace_handler",
    "workload",
]

__version__ = "0.1.0"

_MODULES = {
    "stepscope.api.display": ("DataTable", "Picture"),
    "stepscope.api.loop": ("Recorder", "record", "steps", "trace_handler"),
    "stepscope.api.measure": (
        "BenchResults",
        "MemoryResults",
        "PrecisionResult",
        "bench",
        "grid",
        "memory",
        "precision",
        "profile",
        "workload",
    ),
    "stepscope.api.optimise": ("OptimiseResult", "optimise_workload"),
    "stepscope.api.plan": ("Fit", "StepPlan", "plan", "plan_fit"),
    "stepscope.api.report": ("ReportPage", "report"),
    "stepscope.api.run": ("Answers", "Run", "RunComparison", "load"),
    "stepscope.errors": ("StepscopeError",),
    "stepscope.fast.optimised_step": ("OptimisedStep", "optimise"),
    "stepscope.loop.oom": ("explain_oom",),
    "stepscope.spec": ("ModelShape", "Workload"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

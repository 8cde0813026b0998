"""A user's script, which is never run: `make check` type-checks it strictly. It uses every name of the API.

At its end are mistakes that a type checker must find: an ignored error that does not exist is an error.
"""

import polars as pl
import torch

import stepscope


def summarise(run: stepscope.Run) -> list[str]:
    frame: pl.DataFrame = run.classes
    answers: stepscope.Answers = run.questions()
    table: stepscope.DataTable = run.table("roofline", top=3)
    change: stepscope.RunComparison = run.compare(run, by="module")
    picture: stepscope.Picture = run.figure(step=1)
    picture.save("memory.svg")
    saved: list[float | None] = [finding.saving_ms for finding in run.findings]
    document: dict[str, object] = run.to_dict()
    page: stepscope.ReportPage = stepscope.report([run, "other.json"], "report.html")
    assert not change.is_slower(0.03)
    sentences = [one.sentence for one in answers]
    return [*frame.columns, *sentences, table.render("md"), page.html, str(saved), str(document)]


def train(batches: list[float]) -> tuple[float, object]:
    watch = stepscope.explain_oom("runs/oom")
    recorder: stepscope.Recorder
    with watch, stepscope.record("runs/today", steps=2) as recorder:
        recorder.step()
    total: float = sum(stepscope.steps(batches, out="runs/steps"))
    handler = stepscope.trace_handler("runs/trace")
    return total, handler


def train_faster(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]
) -> tuple[str, list[torch.Tensor]]:
    step: stepscope.OptimisedStep = stepscope.optimise(model, optimizer, example=batches[0], measure=False)
    losses: list[torch.Tensor] = [step(batch) for batch in batches]
    return step.summary(), losses


def predict(chosen: stepscope.Workload) -> tuple[bool, int, str]:
    planned: stepscope.StepPlan = stepscope.plan(chosen, gpu="H200")
    found: stepscope.Fit = stepscope.plan_fit(chosen, fit="24GB")
    return planned.fits, planned.peak_allocated_bytes, found.proposals.render("md")


@stepscope.annotate("forward")
def measure(path: str) -> stepscope.Workload:
    shape = stepscope.ModelShape(d_model=64, d_ff=128, num_layers=2, num_heads=2, num_kv_heads=2)
    chosen = stepscope.Workload(model=shape, precision="bf16")
    timed: stepscope.BenchResults = stepscope.bench([chosen, *stepscope.grid(size=["nano"])], steps=3, progress=print)
    weighed: stepscope.MemoryResults = stepscope.memory(chosen, out=path)
    errors: stepscope.PrecisionResult = stepscope.precision(chosen, precisions=["fp32", "bf16"], bench=timed.rows)
    recorded: stepscope.Run = stepscope.profile(chosen)
    step_ms: float = recorded.step_ms + stepscope.load(path).step_ms
    peak: int = weighed.run().peak_bytes
    faster: stepscope.OptimiseResult = stepscope.optimise_workload(chosen, out=path)
    assert faster.changes[0].title
    try:
        return stepscope.workload(size="small", context=1024)
    except stepscope.StepscopeError as error:
        raise SystemExit(error.hint or f"{step_ms} {peak} {errors.to_json()} {stepscope.__version__}") from error


def misuse() -> None:
    stepscope.load("a").step_ns  # type: ignore[attr-defined]  # noqa: B018
    stepscope.lode("a")  # type: ignore[attr-defined]

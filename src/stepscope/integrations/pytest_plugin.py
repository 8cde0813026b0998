"""A pytest plugin: the fixture `stepscope_step` times a training step and compares it with a baseline.

    def test_step(stepscope_step):
        result = stepscope_step(train_step)
        result.check("train_step", fail_on="3%")

pytest imports this module in every project of an environment that has stepscope, so it imports nothing but pytest;
torch and the rest of stepscope are imported when a test uses the fixture.
"""

import hashlib
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from stepscope.measure.callable_step import CallableTimes
    from stepscope.recording.baseline import BaselineRun, RunConditions

_STORE = Path(".stepscope/baselines")  # below pytest's root directory


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("stepscope", "stepscope: step times compared with a baseline")
    group.addoption(
        "--stepscope-save", action="store_true", help="Save every checked step as the baseline of its name."
    )
    group.addoption(
        "--stepscope-add", action="store_true", help="Add every checked step to its baseline, as another run."
    )
    group.addoption(
        "--stepscope-baselines",
        metavar="DIR",
        default=None,
        help=f"The directory of the baselines.  [default: {_STORE} in the root directory]",
    )


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The times of a step. `samples_ms` has one entry per timed step, and `step_ms` is their median. `peak_bytes` is
    None on a CPU, and `kernels` is None without `kernels=True`."""

    step_ms: float
    samples_ms: tuple[float, ...]
    peak_bytes: int | None
    kernels: int | None
    run: "BaselineRun"
    conditions: "RunConditions"
    store: Path
    is_saved: bool
    is_added: bool

    def check(
        self,
        name: str,
        *,
        fail_on: str = "3%",
        metric: str | Sequence[str] = "step",
        allow_different: bool = False,
    ) -> None:
        """Fail the test if the step is slower than the baseline `name` by more than `fail_on` and by more than noise,
        or if that cannot be decided. With `--stepscope-save` or `--stepscope-add`, save the step instead."""
        from stepscope.errors import StepscopeError

        try:
            problem = self._find_problem(
                name, fail_on, (metric,) if isinstance(metric, str) else metric, allow_different
            )
        except StepscopeError as error:
            problem = str(error)
        if problem:
            pytest.fail(problem, pytrace=False)

    def _find_problem(
        self,
        name: str,
        fail_on: str,
        metrics: Sequence[str],
        allow_different: bool,
    ) -> str:
        from stepscope.api.baselines import save_runs
        from stepscope.explain.gate.verdict import judge_runs
        from stepscope.explain.trace.compare import parse_percent
        from stepscope.recording.baseline import baseline_path, parse_metric, read_baseline

        limit = parse_percent(fail_on)
        if self.is_saved or self.is_added:
            save_runs(name, (self.run,), self.conditions, store=self.store, add=self.is_added, force=True)
            return ""
        if not baseline_path(self.store, name).exists():
            return f"baseline `{name}` not found in `{self.store}`\nhint: pytest --stepscope-save"
        result = judge_runs(
            read_baseline(self.store, name),
            (self.run,),
            self.conditions,
            name=name,
            limit=limit,
            metrics=[parse_metric(one) for one in metrics],
            allow_different=allow_different,
        )
        if result.outcome == "pass":
            return ""
        more = (
            "pytest --stepscope-save" if result.refusals else "pytest --stepscope-add   # on the code of the baseline"
        )
        return "\n".join([*result.sentences, *result.notes, f"hint: {more}"])


class StepTimer:
    """What the fixture `stepscope_step` returns: call it with a function that runs one step."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request

    def __call__(
        self, step: Callable[[], object], *, warmup: int = 5, steps: int = 20, kernels: bool = False
    ) -> StepResult:
        """Run `warmup` steps, then time `steps`. `kernels` also counts the kernels of a step, under the profiler."""
        import statistics

        from stepscope.measure.callable_step import time_callable

        if warmup < 0 or steps < 1:
            raise ValueError(f"expected `warmup` of at least 0 and `steps` of at least 1, got {warmup} and {steps}")
        times = time_callable(step, warmup=warmup, steps=steps, count_kernels=kernels)
        config = self._request.config
        step_ms = statistics.median(times.step_ns) / 1e6
        self._request.node.user_properties.append(("stepscope_step_ms", step_ms))
        named = config.getoption("--stepscope-baselines")
        return StepResult(
            step_ms=step_ms,
            samples_ms=tuple(one / 1e6 for one in times.step_ns),
            peak_bytes=times.peak_bytes,
            kernels=times.kernels,
            run=_make_run(self._request.node.name, times),
            conditions=_describe(times),
            store=Path(named) if named else config.rootpath / _STORE,
            is_saved=bool(config.getoption("--stepscope-save")),
            is_added=bool(config.getoption("--stepscope-add")),
        )


@pytest.fixture
def stepscope_step(request: pytest.FixtureRequest) -> StepTimer:
    """Times a training step: `result = stepscope_step(train_step)`, then `result.check("name", fail_on="3%")`."""
    return StepTimer(request)


def _make_run(name: str, times: "CallableTimes") -> "BaselineRun":
    from stepscope.recording.baseline import BaselineRun, thin_out

    started = datetime.now(UTC).isoformat()
    return BaselineRun(
        file=name,
        identity=hashlib.sha256(repr((started, times.step_ns)).encode()).hexdigest()[:16],
        started=started,
        step_ns=thin_out(times.step_ns),
        kernels=times.kernels,
        peak_bytes=times.peak_bytes,
    )


def _describe(times: "CallableTimes") -> "RunConditions":
    import torch

    from stepscope.measure.environment import cpu_name, installed_version
    from stepscope.recording.baseline import RunConditions

    on_cpu = times.device.type == "cpu"
    versions = {"cuda": torch.version.cuda, "triton": installed_version("triton"), "python": platform.python_version()}
    return RunConditions(
        device=cpu_name() if on_cpu else torch.cuda.get_device_name(times.device),
        torch=str(torch.__version__),
        settings={"threads": str(torch.get_num_threads())} if on_cpu else {},
        versions={name: version for name, version in versions.items() if version},
    )

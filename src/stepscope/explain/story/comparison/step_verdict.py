"""Whether the step times of two runs differ, and by how much in words."""

from stepscope.explain.story.sources import StepTimes
from stepscope.explain.trace.compare import Verdict, judge
from stepscope.units import say_factor, say_percent

_FEW_TIMES = 1.1  # smaller factors are written in percent


def judge_steps(a: StepTimes | None, b: StepTimes | None) -> Verdict:
    """Whether two steps differ. A profiler slows the CPU, so profiled and unprofiled steps differ even if nothing
    changed: two step times are compared only if that cannot be the difference, and by their samples."""
    if a is None or b is None:
        return "cannot tell"
    difference = round(b.step_ns) - round(a.step_ns)
    if not are_comparable(a, b):
        return "same" if not difference and "bench" not in (a.timed_by, b.timed_by) else "cannot tell"
    return judge(a.samples, b.samples, difference)


def say_doubt(a: StepTimes | None, b: StepTimes | None) -> str:
    """The reason why `judge_steps` cannot tell."""
    if a is None or b is None:
        return "no step time"
    if are_comparable(a, b):
        return "too few steps to rule out noise"
    is_profiled = a.has_overhead or b.has_overhead
    return "one timed under the profiler" if is_profiled else "one timed by bench, one by profile"


def are_comparable(a: StepTimes | None, b: StepTimes | None) -> bool:
    """Whether both were timed in the same way, or in two ways of which none makes a step longer. `bench` times another
    process."""
    if a is None or b is None:
        return False
    if a.timed_by == b.timed_by:
        return True
    return "bench" not in (a.timed_by, b.timed_by) and not a.has_overhead and not b.has_overhead


def say_change_of(a_ns: float, b_ns: float) -> str:
    factor = max(a_ns, b_ns) / min(a_ns, b_ns)
    if factor < _FEW_TIMES:
        return f"{say_percent(abs(b_ns / a_ns - 1))} {'less' if b_ns < a_ns else 'more'} time"
    return f"{say_factor(factor)} {'faster' if b_ns < a_ns else 'slower'}"

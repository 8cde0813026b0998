"""What a rule is: a check for something that costs time. What it means is in `pages.py`, under the same code."""

from collections.abc import Callable
from dataclasses import dataclass

from stepscope.explain.rules.evidence import WORTH_SAYING, Evidence, Gain, ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """What a check found. `gpu_ns` is the GPU time a step that the fix would save, `saving_ns` what the step would gain
    of it: less, where the GPU waits for the host anyway."""

    evidence: str
    saving_ns: float | None = None
    gpu_ns: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    code: str
    check: Callable[[Evidence], Hit | None]
    on_cpu: bool = False  # whether it says anything about a recording of a CPU


IDLE_ENOUGH = 0.1  # of a step, to blame the host


def settle(evidence: Evidence, gain: Gain, text: str) -> Hit | None:
    """A hit where the gain is worth saying, with a word on what the host's pace leaves of it."""
    least = WORTH_SAYING * evidence.step_ns
    if gain.gpu_ns < least and gain.step_ns < least:
        return None
    if gain.step_ns < 0.7 * gain.gpu_ns:
        waiting = f"the GPU waits for the host {evidence.idle_share:.0%} of the step"
        if evidence.idle_share > IDLE_ENOUGH:
            why = waiting
        elif evidence.per_step(evidence.kernels) > (1 + IDLE_ENOUGH) * evidence.busy_ns:
            why = "other streams run meanwhile"
        else:
            why = "then the GPU would wait for the host"
        text += f"; {ms(gain.gpu_ns)} of GPU time could go, but {why}: a step would gain {ms(gain.step_ns)}"
    elif gain.gpu_ns and gain.step_ns > 1.5 * gain.gpu_ns:
        text += "; most of the gain is the host's, which has fewer kernels to launch"
    return Hit(evidence=text, saving_ns=gain.step_ns, gpu_ns=gain.gpu_ns)

"""What a rule is: a check for something that costs time, what it means and what to do about it, in one object.

`stepscope rule CODE`, docs/rule.md (`tools/rule_docs.py`), findings and the fixes on a report's page are all read from
it. Codes are stable: one that was given out never means something else.
"""

from collections.abc import Callable
from dataclasses import dataclass

from stepscope.explain.rules.evidence import WORTH_SAYING, Gain, StepEvidence, ms
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Copyable
from stepscope.recording.store import Manifest
from stepscope.spec import Workload

# The settings that fix a finding in a run of ours, whose manifest has a case; none where they are set already.
SettingsChange = Callable[[Manifest], dict[str, object]]


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
    title: str
    check: Callable[[StepEvidence], Hit | None]
    meaning: str
    seen: str  # in which data, by which threshold
    saving: str  # how it is estimated, and how far off that may be
    builtin: str  # the flag of the built-in model that fixes it
    own: tuple[str, ...]  # lines for one's own code
    paste: str = ""  # valid Python for a report's page to offer; the first line of `own` unless it is a remark
    change: SettingsChange | None = None
    look_up: Callable[[Profile], Copyable] | None = None  # for what is not a fault: the command that tells more
    on_cpu: bool = False  # whether it says anything about a recording of a CPU

    def __post_init__(self) -> None:
        """Paragraphs are written over several lines, as the code has room for them, and are one line each."""
        for name in ("meaning", "seen", "saving", "builtin"):
            object.__setattr__(self, name, " ".join(getattr(self, name).split()))
        if not self.paste and not self.own[0].startswith("#"):
            object.__setattr__(self, "paste", self.own[0])


IDLE_ENOUGH = 0.1  # of a step, to blame the host


def settle(evidence: StepEvidence, gain: Gain, text: str) -> Hit | None:
    """A hit where the gain is worth saying, with a word on what the host's pace leaves of it."""
    least = WORTH_SAYING * evidence.step_ns
    if gain.gpu_ns < least and gain.step_ns < least:
        return None
    if gain.step_ns < 0.7 * gain.gpu_ns:
        waiting = f"the GPU waits for the host {evidence.idle_share:.0%} of the step"
        if evidence.idle_share > IDLE_ENOUGH:
            why = waiting
        elif evidence.per_step(evidence.kernels) > (1 + IDLE_ENOUGH) * evidence.clock.busy_step_ns:
            why = "other streams run meanwhile"
        else:
            why = "then the GPU would wait for the host"
        text += f"; {ms(gain.gpu_ns)} of GPU time could go, but {why}: a step would gain {ms(gain.step_ns)}"
    elif gain.gpu_ns and gain.step_ns > 1.5 * gain.gpu_ns:
        text += "; most of the gain is the host's, which has fewer kernels to launch"
    return Hit(evidence=text, saving_ns=gain.step_ns, gpu_ns=gain.gpu_ns)


# --- Changes that several rules share ---------------------------------------------------------------------------------


def workload_of(manifest: Manifest) -> Workload:
    assert manifest.case is not None, "only settings of a run of ours can be changed"
    return manifest.case.workload


def compile_model(manifest: Manifest) -> dict[str, object]:
    return {} if workload_of(manifest).compile else {"compile": True}


def grow_batch(manifest: Manifest) -> dict[str, object]:
    return {"batch": 2 * workload_of(manifest).batch}

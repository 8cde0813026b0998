"""A rule: a check for something that costs time or memory, what it means and how to fix it.

`stepscope rule CODE`, docs/rule.md (`tools/rule_docs.py`), findings and the cards of a report all read this one object.
Codes are stable: a code never changes its meaning.
"""

from collections.abc import Callable
from dataclasses import dataclass

import polars as pl

from stepscope.explain.memory.out_of_memory import MemoryFailure
from stepscope.explain.rules.evidence import WORTH_EXPLAINING, WORTH_SAYING, Gain, StepEvidence, ms
from stepscope.explain.trace.loop.source_lines import launch_sources, name_lines
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Copyable
from stepscope.recording.store import Manifest
from stepscope.spec import Workload
from stepscope.units import count_noun, say_percent

# The settings that fix a finding in a run of stepscope's, whose manifest has a case. Empty if they are already set.
SettingsChange = Callable[[Manifest], dict[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """What a check found in one recording. `title` is the rule's with the numbers of this recording; empty if it has
    none. `saving_ns` is how much shorter a step would be with the fix, None if that is unknown, and `gain` what a
    replay with the fix gives. `about_ns` is the time per step that the finding is about, for findings whose saving says
    little about how much they matter. `action` and `paste` replace the rule's if they depend on the recording; a
    finding with an empty `paste` is a remark."""

    title: str = ""
    evidence: str
    saving_ns: float | None = None
    gain: Gain | None = None
    about_ns: float | None = None
    action: str | None = None
    paste: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHit:
    """What a check found when memory ran out. `saving_bytes` is how much less the step would need with the fix, None if
    that is unknown. `title` and `paste` replace the rule's."""

    title: str = ""
    evidence: str
    saving_bytes: float | None = None
    paste: str = ""


def _find_nothing(_evidence: StepEvidence) -> None:
    """The check of a rule that is not about time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    code: str
    title: str  # what is wrong, without numbers
    action: str  # what to do in one's own code, as an imperative
    check: Callable[[StepEvidence], Hit | None] = _find_nothing
    check_memory: Callable[[MemoryFailure], MemoryHit | None] | None = None  # if memory ran out
    meaning: str
    seen: str  # the data and threshold that the check uses
    saving: str  # how the saving is estimated, and how accurate the estimate is
    builtin: str  # what fixes it in the built-in model
    own: tuple[str, ...]  # lines for one's own code
    # Python that applies the fix; defaults to the first line of `own`. Without code to paste, a finding is a remark.
    paste: str = ""
    change: SettingsChange | None = None
    # For a remark: what to run to learn more, if there is something. The page names the rule itself.
    look_up: Callable[[Profile], Copyable | None] | None = None
    on_cpu: bool = False  # whether the rule applies to a recording of a CPU

    def __post_init__(self) -> None:
        """Join paragraphs, which the source spreads over several lines, into one line each."""
        for name in ("meaning", "seen", "saving", "builtin"):
            object.__setattr__(self, name, " ".join(getattr(self, name).split()))
        if not self.paste and not self.own[0].startswith("#"):
            object.__setattr__(self, "paste", self.own[0])


IDLE_ENOUGH = 0.1  # idle share of a step from which the CPU is blamed


def settle(evidence: StepEvidence, gain: Gain, text: str, *, title: str) -> Hit | None:
    """Return a hit if the gain is worth reporting, with the reason why the step gains less or more than the GPU."""
    least = WORTH_SAYING * evidence.step_ns
    if gain.gpu_ns < least and gain.step_ns < least:
        return None
    if gain.step_ns < 0.7 * gain.gpu_ns:
        if evidence.idle_share > IDLE_ENOUGH:
            why = (
                f"the GPU is idle {say_percent(evidence.idle_share)} {evidence.clock.say_of_step}, waiting for the CPU"
            )
        elif evidence.per_step(evidence.kernels) > (1 + IDLE_ENOUGH) * evidence.clock.busy_ns:
            why = "other streams run at the same time"
        else:
            why = "the step would then be CPU-bound"
        gains = f"only {ms(gain.step_ns)} of step time" if gain.step_ns > 0 else "no step time"
        text += f"; a fix saves {ms(gain.gpu_ns)} of GPU time but {gains}, because {why}"
    elif gain.gpu_ns and gain.step_ns > 1.5 * gain.gpu_ns:
        text += "; most of the saving is CPU time, because there are fewer kernels to launch"
    elif gain.gpu_ns and gain.step_ns - gain.gpu_ns >= WORTH_EXPLAINING * gain.step_ns:
        text += f"; the saving includes {ms(gain.step_ns - gain.gpu_ns)} of idle time"
    return Hit(title=title, evidence=text, saving_ns=gain.step_ns, gain=gain)


def say_lines(lines: pl.Series, weights: pl.Series) -> str:
    """Return `, at train.py:42`, or nothing if the recording has no lines of code."""
    named = name_lines(lines, weights)
    return f", at {named}" if named else ""


def say_launching_lines(evidence: StepEvidence, kernels: pl.DataFrame) -> str:
    return say_lines(launch_sources(evidence.profile, kernels), kernels["time_ns"])


def count_per_step(evidence: StepEvidence, count: int, noun: str, plural: str = "") -> str:
    """Return a count over all steps as one per step: `888 kernels per step`."""
    return f"{count_noun(_round(count / evidence.num_steps), noun, plural)} {evidence.clock.say_per_step}"


def _round(count: float) -> float:
    """Whole from 10 on; a smaller count may be an average over steps."""
    return round(count) if count >= 10 else round(count, 1)


# --- Fixes that several rules share -----------------------------------------------------------------------------------

COMPILE = "model = torch.compile(model)"
USE_GRAPHS = 'model = torch.compile(model, mode="reduce-overhead")'
GROW_BATCH = "loader = torch.utils.data.DataLoader(data, batch_size=2 * batch)"
THROUGHPUT = "which raises throughput and does not shorten the step"


def workload_of(manifest: Manifest) -> Workload:
    assert manifest.case is not None, "only stepscope's own runs have settings to change"
    return manifest.case.workload


def compile_model(manifest: Manifest) -> dict[str, object]:
    return {} if workload_of(manifest).compile else {"compile": True}


def capture_step(manifest: Manifest) -> dict[str, object]:
    """CUDA graphs of a whole training step, unless the loss is scaled: the CPU decides on the scale."""
    workload = workload_of(manifest)
    is_possible = workload.mode == "train" and workload.precision != "fp16"
    return {"graph": True} if is_possible and not workload.graph else {}


def grow_batch(manifest: Manifest) -> dict[str, object]:
    return {"batch": 2 * workload_of(manifest).batch}

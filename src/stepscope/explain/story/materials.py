"""What there is to tell of one run. Whatever is missing is None or empty, and `absent` may say why."""

from dataclasses import dataclass, field
from functools import cached_property

from stepscope.explain.memory import MemoryProfile
from stepscope.explain.profile import Profile
from stepscope.explain.story.bounds import Shares
from stepscope.findings import Missing
from stepscope.recording.attention import AttentionRow
from stepscope.recording.bench import BenchRow
from stepscope.recording.precision import PrecisionReport


@dataclass(frozen=True, kw_only=True)
class Materials:
    """`bench` begins with the row of the run itself; others stand beside it, such as other precisions. `ranks` are all
    of several ranks, `profile` among them. `absent` is keyed by stage: bench, profile, memory, precision, attention."""

    name: str  # in a few words: the case, or the file
    command: str = ""  # makes this run again
    profile: Profile | None = None
    ranks: tuple[Profile, ...] = ()
    memory: MemoryProfile | None = None
    bench: tuple[BenchRow, ...] = ()
    precision: PrecisionReport | None = None
    attention: tuple[AttentionRow, ...] = ()
    absent: dict[str, Missing] = field(default_factory=dict)
    is_partial: bool = False

    @cached_property
    def shares(self) -> Shares | None:
        """Where the profile's time goes, found out once: of a million kernels it takes seconds."""
        return Shares(self.profile) if self.profile is not None else None

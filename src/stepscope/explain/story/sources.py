"""What there is to tell of one run. Whatever is missing is None or empty, and `absent` may say why."""

from dataclasses import dataclass, field
from functools import cached_property

from stepscope.explain.memory import MemoryProfile
from stepscope.explain.story.bounds import Shares
from stepscope.explain.story.clock import find_timed, has_steps, is_of_row, is_too_short, median_ns
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Missing
from stepscope.recording.rows.attention import AttentionRow
from stepscope.recording.rows.bench import BenchRow
from stepscope.recording.rows.precision import PrecisionReport


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
    def row(self) -> BenchRow | None:
        """The timed row that the page's step is taken from."""
        row = find_timed(self.bench)
        return None if row is None or is_too_short(row, self.profile) else row

    @cached_property
    def step_ns(self) -> float | None:
        """THE step of the page: by the bench's clock where there is one, else by the profile's; None where no step is
        marked."""
        if self.row is not None:
            return median_ns(self.row)
        return self.profile.step_ns if self.profile is not None and has_steps(self.profile) else None

    @cached_property
    def is_profile_of_step(self) -> bool:
        """Whether the profile tells where the page's step goes: not one of another run, nor one without steps."""
        if self.profile is None or self.step_ns is None:
            return False
        return is_of_row(self.profile, self.row) if self.row is not None else True

    @cached_property
    def profile_step_ns(self) -> float | None:
        """What shares of the profile's step are of: the page's step, where the profile tells of it."""
        if self.profile is None:
            return None
        return self.step_ns if self.is_profile_of_step else self.profile.step_ns

    @cached_property
    def shares(self) -> Shares | None:
        """Where the profile's time goes, found out once: of a million kernels it takes seconds."""
        if self.profile is None or self.profile_step_ns is None:
            return None
        return Shares(self.profile, self.profile_step_ns)

"""The summary of a memory recording, a document with a versioned schema that `--format json` prints, and the row of a
memory sweep, which contains one."""

import msgspec

from stepscope.recording.memory.labels import MemoryRun
from stepscope.recording.rows.bench import CaseRow

SCHEMA = "stepscope.memory-summary/1"
ROW_SCHEMA = "stepscope.memory/1"


class CategoryBytes(msgspec.Struct, frozen=True, kw_only=True):
    category: str
    bytes: int


class ModuleBytes(msgspec.Struct, frozen=True, kw_only=True):
    module: str
    bytes: int


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """An allocation: where it was made and for what, if known."""

    bytes: int
    category: str
    module: str | None
    op: str | None
    name: str | None
    shape: str | None
    dtype: str | None
    step: int | None
    phase: str | None
    stack: str
    is_from_before: bool = False  # allocated before the recording


class PhaseBytes(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of one step: allocated bytes at its start, at its peak and at its end."""

    step: int | None
    phase: str
    start_bytes: int | None
    peak_bytes: int
    end_bytes: int | None


class StepBytes(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    peak_bytes: int
    end_bytes: int
    end_reserved_bytes: int | None


class MemorySummary(msgspec.Struct, frozen=True, kw_only=True):
    """`categories` add up to `peak_bytes`. `reserved_bytes` is the reserved memory at the peak; the difference is the
    allocator's cache, fragmented or not."""

    schema: str = SCHEMA
    file: str
    source: str
    device: str
    peak_bytes: int
    peak_step: int | None
    peak_phase: str | None
    peak_module: str | None
    before_bytes: int
    categories: tuple[CategoryBytes, ...]
    modules: tuple[ModuleBytes, ...]
    largest: tuple[Allocation, ...]
    phases: tuple[PhaseBytes, ...]
    steps: tuple[StepBytes, ...]
    reserved_bytes: int | None
    peak_reserved_bytes: int | None
    saved_bytes: int | None
    allocator_peak_bytes: int | None
    estimated_bytes: int
    num_allocations: int
    notes: tuple[str, ...]


class MemoryRow(CaseRow, frozen=True, kw_only=True):
    """One case of a sweep. `summary` is None if it ran out of memory or failed."""

    schema: str = ROW_SCHEMA
    summary: MemorySummary | None = None
    run: MemoryRun | None = None

    @property
    def optimizer(self) -> str | None:
        return self.case.workload.optimizer or (self.run.optimizer if self.run else None)

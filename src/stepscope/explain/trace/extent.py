"""Which steps of a recording count, and when each begins and ends on the device.

All figures are about these steps and nothing else, so that a step is what its name says. A recording has more: kernels
launched before the first step was marked, a validation pass after the last one, a step that the profiler began and the
loop did not, steps whose kernels were lost. What is left out is said.

On a CPU, the operating system may interrupt the thread of an operator. One preempted `aten::add` was 82% of three
steps, while the picture of the median step showed none of it. Such a step does not count either: it would be most of
every mean. What is compared is the same work, so a step with longer sequences, a checkpoint or a validation pass
counts. Kernels of a GPU are not interrupted, and there a long step is what the rules look for.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import polars as pl

from stepscope.recording.store import Recording
from stepscope.recording.tables import KERNEL_LAUNCHES
from stepscope.units import count_noun, say_percent

Window = tuple[int, int]
_STREAM = ("process", "device", "stream")
_COMPLETE = 0.9  # of the kernels that a step launched
_WORTH_SAYING = 0.01
_FAR_LONGER, _FEWEST_TO_COMPARE = 2.0, 3  # times the median over so many steps
# Of a step: if the device runs earlier kernels from its start on, for so long, the CPU is ahead.
_AT_ONCE, _RUNS_AHEAD = 0.02, 0.05


@dataclass(frozen=True, kw_only=True)
class StepExtent:
    """`windows` has one entry per step; each ends where the next begins. Without steps, it is the whole recording."""

    steps: pl.DataFrame  # step, start_ns, end_ns: as marked
    windows: tuple[Window, ...]
    notes: tuple[str, ...] = ()
    interruption: str = ""  # the note on steps that were interrupted, if there are any

    @property
    def window(self) -> Window:
        return self.windows[0][0], self.windows[-1][1]

    def keep(self, kernels: pl.DataFrame) -> pl.DataFrame:
        """Return the kernels that ran inside."""
        start, end = self.window
        return kernels.filter((pl.col("start_ns") >= start) & (pl.col("end_ns") <= end))

    def without(self, outside_ns: int, total_ns: int) -> "StepExtent":
        """Return the same with a note, if much of the recorded kernel time is outside."""
        share = outside_ns / max(1, total_ns)
        if share < _WORTH_SAYING:
            return self
        note = f"{say_percent(share)} of the recorded kernel time is outside these steps and does not count"
        return replace(self, notes=(*self.notes, note))


def find_extent(
    marked: pl.DataFrame, runs: pl.DataFrame, incomplete: Sequence[int] = (), interrupted: Sequence[int] = ()
) -> StepExtent:
    """Return the steps that count: the longest sequence without `incomplete` and `interrupted` steps, without empty
    steps at its ends. `runs` is the total of the `StepRuns` of all kernels."""
    if marked.height and not runs["num_known"].max():
        return _divide_evenly(marked, runs)
    steps = marked.unique("step", keep="first", maintain_order=True).sort("start_ns")
    known = steps.join(runs.drop_nulls("step"), on="step", how="left", maintain_order="left")
    chosen = _choose(known, {*incomplete, *interrupted})
    left_out = steps.filter(~pl.col("step").is_in(chosen["step"].implode()))["step"].to_list()
    if any(step in interrupted for step in left_out) and not incomplete:
        interruption = _say_interrupted(left_out, interrupted, steps.height)
        notes: tuple[str, ...] = (interruption,)
    else:
        interruption, notes = "", tuple(_say_left_out(len(left_out), num_incomplete=len(incomplete)))
    counted = chosen.select("step", "start_ns", "end_ns")
    ((early_start_ns, early_end_ns),) = runs.select("early_start_ns", "early_end_ns").head(1).iter_rows()
    windows = _find_windows(chosen, (early_start_ns, early_end_ns)) if chosen.height else (_whole(runs),)
    return StepExtent(steps=counted, windows=windows, notes=notes, interruption=interruption)


def without_steps(runs: pl.DataFrame) -> StepExtent:
    """Return the whole recording, for marks that no kernel fits into."""
    steps = pl.DataFrame(schema={"step": pl.Int32, "start_ns": pl.Int64, "end_ns": pl.Int64})
    return StepExtent(steps=steps, windows=(_whole(runs),), notes=("no kernel ran between the marks of a step",))


def _whole(runs: pl.DataFrame) -> Window:
    ((start, end),) = runs.select(pl.col("first_ns").min(), pl.col("last_ns").max()).iter_rows()
    return start, end


class StepRuns:
    """When the kernels of each step ran. Kernels may be added in windows, in order of their launches."""

    def __init__(self, marked: pl.DataFrame) -> None:
        self._first_mark = pl.lit(marked["start_ns"].min(), pl.Int64)
        self._parts: list[pl.DataFrame] = []
        self._first_known: list[pl.DataFrame] = []  # per stream, the first start of a kernel whose launch is known

    def add(self, kernels: pl.DataFrame) -> None:
        """Add kernels with `step`, `launch_ns` and the columns of a recording's kernels."""
        moment = pl.when(pl.col("kind") == "cpu").then("start_ns").otherwise("launch_ns")
        known = kernels.filter(moment.is_not_null()).group_by(_STREAM).agg(known_ns=pl.col("start_ns").min())
        self._first_known.append(known)
        outside = kernels.filter(pl.col("step").is_null()).with_columns(moment=moment)
        early = pl.concat([outside.filter(pl.col("moment") < self._first_mark), self._launched_before(outside)])
        steps = kernels.group_by("step").agg(first_ns=pl.col("start_ns").min(), last_ns=pl.col("end_ns").max())
        of_window = early.select(early_start_ns=pl.col("start_ns").min(), early_end_ns=pl.col("end_ns").max())
        num_known = pl.lit(kernels.select(moment.count()).item(), pl.Int64)
        self._parts.append(steps.join(of_window, how="cross").with_columns(num_known=num_known))

    def _launched_before(self, outside: pl.DataFrame) -> pl.DataFrame:
        """Return the kernels that were launched before the recording began. A stream runs kernels in order, so one
        without a launch that follows one with a launch has lost it for another reason."""
        first = pl.concat(self._first_known).group_by(_STREAM).agg(pl.col("known_ns").min())
        unknown = outside.filter(pl.col("moment").is_null())
        joined = unknown.join(first, on=_STREAM, how="left", nulls_equal=True)
        is_first = pl.col("known_ns").is_null() | (pl.col("start_ns") < pl.col("known_ns"))
        return joined.filter(is_first).drop("known_ns")

    def total(self) -> pl.DataFrame:
        """Return first_ns and last_ns of each step. In every row: `early_start_ns` and `early_end_ns`, when the kernels
        that were launched before the first step ran, and `num_known`, the number of kernels with a known launch."""
        together = pl.concat(self._parts)
        by_step = together.group_by("step").agg(pl.col("first_ns").min(), pl.col("last_ns").max())
        once = together.select(pl.col("early_start_ns").min(), pl.col("early_end_ns", "num_known").max())
        return by_step.join(once, how="cross")


def find_incomplete(recording: Recording, marked: pl.DataFrame) -> list[int]:
    """Return the steps that launched kernels which the recording does not have."""
    names = recording.launches["name"].unique()
    launching = names.filter(names.str.contains(KERNEL_LAUNCHES))
    launches = recording.launches.filter(pl.col("name").is_in(launching.implode())).sort("start_ns")
    known = launches["correlation"].is_in(recording.kernels["correlation"].implode()).fill_null(value=True)
    found_before = np.concatenate(([0], np.cumsum(known.to_numpy())))
    first, last = (launches["start_ns"].search_sorted(marked[column]).to_numpy() for column in ("start_ns", "end_ns"))
    found, launched = found_before[last] - found_before[first], last - first
    incomplete: list[int] = marked["step"].filter(pl.Series(found < _COMPLETE * launched)).to_list()
    return incomplete


def find_interrupted(recording: Recording, kernels: pl.DataFrame, marked: pl.DataFrame) -> list[int]:
    """Return the steps on a CPU that took far longer than the same work takes in the others. `kernels` are attributed.
    Ranks of one run must count the same steps, so theirs all count."""
    manifest = recording.manifest
    if not (kernels["kind"] == "cpu").all() or (manifest.world_size or 1) > 1:
        return []
    slow = _find_slow_operators(recording, kernels) if manifest.shapes_recorded else set()
    if manifest.case is not None:  # all steps do the same, so time outside operators can be compared as well
        took = marked.group_by("step").agg(ratio=(pl.col("end_ns") - pl.col("start_ns")).sum().cast(pl.Float64))
        slow |= _far_longer(took)
    return sorted(slow)


def _find_slow_operators(recording: Recording, kernels: pl.DataFrame) -> set[int]:
    """Return the steps whose operators took far longer than calls with the same name and shapes usually do."""
    ran = kernels.filter(pl.col("step").is_not_null())
    lasted = (pl.col("end_ns") - pl.col("start_ns")).cast(pl.Float64)
    calls = ran.select("step", "name", shapes=recording.ops["shapes"].gather(ran["op_row"]), lasted=lasted)
    usual = calls.with_columns(usual=pl.col("lasted").median().over("name", "shapes"))
    return _far_longer(usual.group_by("step").agg(ratio=pl.col("lasted").sum() / pl.col("usual").sum().clip(1)))


def _far_longer(steps: pl.DataFrame) -> set[int]:
    """Return the steps whose `ratio` is far above the median."""
    if steps.height < _FEWEST_TO_COMPARE:
        return set()
    limit = _FAR_LONGER * pl.col("ratio").median()
    return set(steps.filter(pl.col("ratio") > limit)["step"].to_list())


def _choose(known: pl.DataFrame, left_out: Set[int]) -> pl.DataFrame:
    good = [step not in left_out for step in known["step"].to_list()]
    if not any(good):
        good = [True] * known.height
    begin, end = max(_sequences(good), key=lambda one: (one[1] - one[0], -one[0]), default=(0, 0))
    ran = known.slice(begin, end - begin)["first_ns"].is_not_null().to_list()
    if not any(ran):
        return known.clear()
    first, last = ran.index(True), len(ran) - ran[::-1].index(True)
    return known.slice(begin + first, last - first)


def _sequences(good: Sequence[bool]) -> Iterator[tuple[int, int]]:
    begin = 0
    for place, is_good in enumerate((*good, False)):
        if not is_good:
            yield begin, place
            begin = place + 1


def _say_left_out(count: int, *, num_incomplete: int) -> Iterator[str]:
    if count:
        steps = count_noun(count, "marked step")
        yield f"not counted: {steps} {'whose kernels are missing' if num_incomplete else 'without kernels'}"


def _say_interrupted(left_out: Sequence[int], interrupted: Sequence[int], count: int) -> str:
    slow = sum(step in interrupted for step in left_out)
    steps = f"{slow} of {count_noun(count, 'marked step')}"
    said = f"not counted: {steps}, over {_FAR_LONGER:g}× as long as others with the same work"
    rest = len(left_out) - slow
    return f"{said}, and {rest} more, because counted steps are consecutive" if rest else said


def _find_windows(steps: pl.DataFrame, early: tuple[int | None, int | None]) -> tuple[Window, ...]:
    """If the CPU waits for the device between steps, a step runs from its start to that of the next. If the CPU runs
    ahead, its clock says nothing about the device, and a step runs from the end of the last kernel of the step before
    to the end of its own last kernel. `early` is when the kernels that were launched before the first step ran."""
    starts = steps["start_ns"].to_list()
    ends = steps["last_ns"].fill_null(steps["end_ns"])
    runs_ahead = bool((ends.head(-1) > steps["start_ns"].tail(-1)).any())
    begin = starts[0]
    soon, later = (begin + share * (int(steps["end_ns"][0]) - begin) for share in (_AT_ONCE, _RUNS_AHEAD))
    if early[0] is not None and early[1] is not None and early[0] <= soon and early[1] > later:
        # Not at the first kernel: a step may begin early on a side stream, as with the copies of its batch.
        begin, runs_ahead = (early[1] if early[1] < int(ends[0]) else int(steps["first_ns"][0])), True
    if runs_ahead and not steps["last_ns"].has_nulls() and (ends.diff().drop_nulls() > 0).all():
        return tuple(zip([begin, *ends.head(-1)], ends, strict=True))
    end = max(int(steps["end_ns"][-1]), int(steps.select(pl.col("last_ns").max()).item()))
    return tuple(zip(starts, [*starts[1:], end], strict=True))


def _divide_evenly(marked: pl.DataFrame, runs: pl.DataFrame) -> StepExtent:
    """Return the whole recording as steps of equal length. For recordings without launches whose CPU runs ahead: they
    say how many steps ran, and not when."""
    steps = (
        marked.unique("step", keep="first", maintain_order=True).sort("start_ns").select("step", "start_ns", "end_ns")
    )
    start, end = _whole(runs)
    borders = [start + (end - start) * place // steps.height for place in range(steps.height + 1)]
    note = "launches are not recorded, so all steps are assumed to be equally long"
    return StepExtent(steps=steps, windows=tuple(pairwise(borders)), notes=(note,))

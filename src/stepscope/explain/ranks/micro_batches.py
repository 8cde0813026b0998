"""The micro-batches of an update, and which of them reduce gradients.

Gradients of micro-batches add up on each rank, so only the last backward pass of an update has to reduce them across
ranks. Passes are found by the order in which the CPU launches forward, backward and optimizer: a collective runs
on its own stream, maybe long after its pass.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

# A shorter run of kernels of one phase, compared with the longest of that phase, is not a pass of its own.
_SHORTEST_PASS = 0.1
_MOST = 0.5


@dataclass(frozen=True)
class MicroBatches:
    kernels: pl.DataFrame  # only those with a phase and a launch count
    reduces: pl.DataFrame  # the collectives that reduce gradients

    @cached_property
    def _passes(self) -> pl.DataFrame:
        """The backward passes in order: `launch_ns` of the first kernel, `time_ns` of all, `is_last` of its update, and
        of the collectives launched in it, `reduced_ns` in all and `final_ns` for the last."""
        phase = pl.col("phase").replace("loss", "forward")
        ours = phase.is_in(["forward", "backward", "optimizer"]) & pl.col("launch_ns").is_not_null()
        known = self.kernels.filter((pl.col("class") != "communication") & ours)
        runs = _join_runs(known.select("launch_ns", "time_ns", phase=phase).sort("launch_ns"))
        runs = _join_runs(runs.filter(pl.col("time_ns") >= _SHORTEST_PASS * pl.col("time_ns").max().over("phase")))
        update = (pl.col("phase") == "optimizer").cum_sum()
        passes = runs.with_columns(update=update).filter(pl.col("phase") == "backward").with_row_index("place")
        last = pl.col("place") == pl.col("place").max().over("update")
        return passes.with_columns(is_last=last).join(self._reduced(passes), on="place", how="left").sort("place")

    def _reduced(self, passes: pl.DataFrame) -> pl.DataFrame:
        reduces = self.reduces.filter(pl.col("launch_ns").is_not_null()).sort("launch_ns")
        place = np.searchsorted(passes["launch_ns"].to_numpy(), reduces["launch_ns"].to_numpy(), side="right") - 1
        placed = reduces.with_columns(place=pl.Series(place)).filter(pl.col("place") >= 0)
        time = pl.col("time_ns")
        sums = placed.group_by(pl.col("place").cast(pl.UInt32)).agg(reduced_ns=time.sum(), final_ns=time.last())
        return sums.cast({"reduced_ns": pl.Int64, "final_ns": pl.Int64})

    @cached_property
    def count(self) -> int:
        """The number of backward passes of most updates."""
        counts = self._passes.group_by("update").len()["len"].mode()
        return max(counts.to_list(), default=0)

    @property
    def reduces_in_each(self) -> bool:
        """Whether gradients are reduced in all micro-batches, where the last one would do. A sum of the loss, which
        takes little time, does not count."""
        early, last = (self._passes.filter(test) for test in (~pl.col("is_last"), pl.col("is_last")))
        per_pass = [float(part["reduced_ns"].sum()) / max(1, part.height) for part in (early, last)]
        return self.count > 1 and per_pass[0] > _MOST * per_pass[1] > 0

    @property
    def left_ns(self) -> float:
        """How much of the collectives of the last passes nothing would hide: what is longer than the pass itself, and
        the final one, which nothing follows."""
        last = self._passes.filter("is_last").fill_null(0)
        left = pl.max_horizontal(pl.col("reduced_ns") - pl.col("time_ns"), "final_ns")
        return float(last.select(left.sum()).item())


def _join_runs(ordered: pl.DataFrame) -> pl.DataFrame:
    """Neighbours of the same phase as one."""
    runs = ordered.group_by(pl.col("phase").rle_id().alias("run"), maintain_order=True)
    return runs.agg(pl.col("phase", "launch_ns").first(), pl.col("time_ns").sum()).drop("run")

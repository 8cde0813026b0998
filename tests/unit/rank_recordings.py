"""Recordings of several simulated ranks, whose collectives end together and whose clocks differ.

Each rank computes, then joins a collective, which ends on all ranks `transfer_us` after the last one has arrived.
"""

from collections.abc import Sequence
from typing import Any

import polars as pl

from stepscope.explain.ranks.activity import RankActivity, reduce_rank
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.recording import tables
from stepscope.recording.rows.loop_run import LoopFacts
from stepscope.recording.store import Manifest, Recording
from tests.unit.recordings import ALL_REDUCE, GEMM_BF16

PROCESS, THREAD, STREAM, COMM_STREAM = 100, 1, 7, 20
EPOCH_NS = 1_700_000_000_000_000_000


def reduce_ranks(profiles: Sequence[Profile]) -> tuple[RankActivity, ...]:
    return tuple(map(reduce_rank, profiles))


class Rank:
    """What one rank does before each collective: `idle_us` in which its CPU launches nothing, then a GEMM."""

    def __init__(
        self,
        *,
        compute_us: Sequence[float],
        idle_us: Sequence[float] | None = None,
        skew_us: float = 0.0,
        missing: int = 0,  # collectives before its recording begins
        is_loading: bool = False,  # whether it is idle in a DataLoader
        kernel: str = GEMM_BF16,  # what it computes
        clock_mhz: int | None = None,
        host: str = "",  # the range in which it is idle
    ) -> None:
        self.compute_us = compute_us
        self.idle_us = idle_us or [2.0] * len(compute_us)
        self.skew_ns = round(skew_us * 1000)
        self.missing = missing
        self.is_loading = is_loading
        self.kernel, self.clock_mhz, self.host = kernel, clock_mhz, host


def record_ranks(
    ranks: Sequence[Rank],
    *,
    transfer_us: float = 50.0,
    per_step: int = 4,
    kernels: Sequence[str] = (ALL_REDUCE,),
    collective: str | None = "allreduce",
    message_bytes: Sequence[int | None] = (1 << 24,),
    group: str | None = "0",
    marked: bool = True,
    overlap: bool = False,
) -> list[Profile]:
    """`kernels` and `message_bytes` repeat over the collectives, of which `per_step` make a step. With `overlap`, a
    GEMM as long as the one before runs during each collective."""
    count = len(ranks[0].compute_us)
    rows: list[dict[str, list[dict[str, Any]]]] = [{name: [] for name in tables.SCHEMAS} for _ in ranks]
    now = [0] * len(ranks)
    for place in range(count):
        arrived = []
        for number, rank in enumerate(ranks):
            idle, work = round(rank.idle_us[place] * 1000), round(rank.compute_us[place] * 1000)
            begin = now[number] + idle
            add = _Adder(rows[number], rank.skew_ns + EPOCH_NS, is_kept=place >= rank.missing)
            if marked and place % per_step == 0:
                add.range(f"ProfilerStep#{place // per_step}", now[number], now[number] + 1)
            if rank.is_loading:
                add.range("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", now[number] + 1, begin - 1)
            if rank.host:
                add.range(rank.host, now[number] + 1, begin - 1)
            add.kernel(rank.kernel, begin, begin + work, STREAM, 2 * place, launch=begin - 1500)
            arrived.append(begin + work)
        end = max(arrived) + round(transfer_us * 1000)
        for number, rank in enumerate(ranks):
            add = _Adder(rows[number], rank.skew_ns + EPOCH_NS, is_kept=place >= rank.missing)
            told = {
                "collective": collective,
                "process_group": group,
                "group_size": len(ranks),
                "bytes": message_bytes[place % len(message_bytes)],
            }
            name = kernels[place % len(kernels)]
            begin = arrived[number]
            add.kernel(name, begin, end, COMM_STREAM, 2 * place + 1, launch=begin - 1200, **told)
            if overlap:
                during = round(rank.compute_us[place] * 1000)
                add.kernel(GEMM_BF16, begin, begin + during, STREAM, 2 * count + place, launch=begin - 900)
            now[number] = end
    return [make_profile(_record(tables_of, number, ranks, marked=marked)) for number, tables_of in enumerate(rows)]


class _Adder:
    def __init__(self, rows: dict[str, list[dict[str, Any]]], shift_ns: int, *, is_kept: bool) -> None:
        self._rows, self._shift, self._is_kept = rows, shift_ns, is_kept

    def kernel(
        self, name: str, start: int, end: int, stream: int, correlation: int, *, launch: int, **told: Any
    ) -> None:
        shared = {"process": PROCESS, "correlation": correlation}
        on_device = {"kind": "kernel", "device": 0, "stream": stream, "graph": False, **told}
        self._add("kernels", name, start, end, **shared, **on_device)
        self._add("launches", "cudaLaunchKernel", launch, launch + 500, thread=THREAD, **shared)

    def range(self, name: str, start: int, end: int) -> None:
        self._add("ranges", name, start, end, process=PROCESS, thread=THREAD, source="user")

    def _add(self, table: str, name: str, start: int, end: int, **more: Any) -> None:
        if self._is_kept:
            self._rows[table].append(
                {"name": name, "start_ns": start + self._shift, "end_ns": end + self._shift, **more}
            )


def _record(rows: dict[str, list[dict[str, Any]]], rank: int, ranks: Sequence[Rank], *, marked: bool) -> Recording:
    if marked:  # each step lasts until the next begins
        steps = [row for row in rows["ranges"] if row["name"].startswith("ProfilerStep#")]
        last = max(row["end_ns"] for row in rows["kernels"])
        for row, after in zip(steps, [*(one["start_ns"] for one in steps[1:]), last], strict=True):
            row["end_ns"] = after
    frames = {name: tables.conform(name, pl.DataFrame(some, infer_schema_length=None)) for name, some in rows.items()}
    manifest = Manifest(
        source="pytorch profiler",
        file=f"trace_rank{rank}.json.gz",
        device="NVIDIA H200",
        device_sms=132,
        rank=rank,
        world_size=len(ranks),
        loop=LoopFacts(script="train.py", found_by="optimizer steps", clock_mhz=ranks[rank].clock_mhz),
    )
    return Recording(manifest=manifest, **frames)

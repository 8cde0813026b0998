"""Where a device's time goes, in parts that add up.

A sum of durations counts overlapping kernels twice. Here time is swept once: between any two moments at which something
starts or ends, either nothing runs (idle), or one kernel (its class), or several (overlap, a separate row). The rows
add up to the wall time to the nanosecond, for a device and for each of its streams.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """`classes` (alone on the device) + `overlap_ns` + `idle_ns` = `wall_ns`, exactly."""

    wall_ns: int
    classes: dict[str, int]
    overlap_ns: int
    idle_ns: int
    # Communication that overlaps with other kernels, and communication that the device waits for.
    communication_hidden_ns: int = 0
    communication_exposed_ns: int = 0

    @property
    def busy_ns(self) -> int:
        return self.wall_ns - self.idle_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAccount:
    process: int | None
    device: int
    whole: Account
    streams: dict[int, Account]


def account_devices(kernels: pl.DataFrame, window: tuple[int, int]) -> tuple[DeviceAccount, ...]:
    """Return one account per device and process, over one window that contains every kernel."""
    sweep = DeviceSweep()
    sweep.add(kernels, None)
    return sweep.accounts(window[1] - window[0])


class DeviceSweep:
    """The time of devices, swept in batches: the kernels of a batch start before its `border`. A kernel that crosses
    the border counts up to it in this batch, and from it on in the next."""

    def __init__(self) -> None:
        self._carried: list[pl.DataFrame] = []
        self._devices: dict[tuple[int | None, int], list[Account]] = defaultdict(list)
        self._streams: dict[tuple[int | None, int, int], list[Account]] = defaultdict(list)

    def add(self, kernels: pl.DataFrame, border: int | None) -> None:
        """Add kernels with `process`, `device`, `stream`, `class` and their times. The last batch has no border."""
        columns = ("process", "device", "stream", "class", "start_ns", "end_ns")
        running = pl.concat([*self._carried, kernels.select(columns)])
        if border is not None:
            later = running.filter(pl.col("end_ns") > border)
            self._carried = [later.with_columns(start_ns=pl.lit(border, pl.Int64))]
            running = running.with_columns(end_ns=pl.min_horizontal("end_ns", pl.lit(border, pl.Int64)))
        for (process, device), group in running.partition_by("process", "device", as_dict=True).items():
            _add_up(self._devices[process, device], group)
            for (stream,), part in group.partition_by("stream", as_dict=True).items():
                _add_up(self._streams[process, device, stream], part)

    def accounts(self, wall_ns: int) -> tuple[DeviceAccount, ...]:
        return tuple(
            DeviceAccount(
                process=process,
                device=device,
                whole=_total(parts, wall_ns),
                streams={
                    key[2]: _total(some, wall_ns)
                    for key, some in sorted(self._streams.items(), key=lambda item: item[0][2])
                    if key[:2] == (process, device)
                },
            )
            for (process, device), parts in sorted(self._devices.items(), key=lambda item: str(item[0]))
        )


def _add_up(accounts: list[Account], kernels: pl.DataFrame) -> None:
    start, end = kernels["start_ns"].min(), kernels["end_ns"].max()
    assert isinstance(start, int)
    assert isinstance(end, int)
    accounts[:] = [_total([*accounts, account(kernels, (start, end))], 0)]


def _total(accounts: Sequence[Account], wall_ns: int) -> Account:
    """Return the sum of consecutive accounts, over a wall time that contains them all."""
    classes: Counter[str] = Counter()
    for one in accounts:
        classes.update(one.classes)  # keeps zeros
    overlap = sum(one.overlap_ns for one in accounts)
    return Account(
        wall_ns=wall_ns,
        classes={name: classes[name] for name in sorted(classes)},
        overlap_ns=overlap,
        idle_ns=wall_ns - classes.total() - overlap,
        communication_hidden_ns=sum(one.communication_hidden_ns for one in accounts),
        communication_exposed_ns=sum(one.communication_exposed_ns for one in accounts),
    )


def account(kernels: pl.DataFrame, window: tuple[int, int]) -> Account:
    wall = window[1] - window[0]
    names = kernels["class"].unique().sort().to_list()
    number = kernels["class"].replace_strict(names, list(range(len(names))), return_dtype=pl.Int64).to_numpy()
    starts, ends = kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy()
    assert not len(starts) or (starts.min() >= window[0] and ends.max() <= window[1]), (
        "the window contains every kernel"
    )
    moments = np.concatenate((starts, ends))
    order = np.argsort(moments, kind="stable")
    length = np.diff(moments[order], append=moments[order][-1:])
    running = np.cumsum(np.concatenate((np.ones_like(starts), -np.ones_like(ends)))[order])
    # While a single kernel runs, the sum over running kernels is its class number.
    which = np.cumsum(np.concatenate((number, -number))[order])
    alone, several = running == 1, running > 1
    times = np.bincount(which[alone], weights=length[alone], minlength=len(names)) if len(names) else np.empty(0)
    overlap = int(length[several].sum())
    classes = {name: int(time) for name, time in zip(names, times, strict=True)}
    hidden, exposed = _split_communication(kernels, order, length, running)
    return Account(
        wall_ns=wall,
        classes=classes,
        overlap_ns=overlap,
        idle_ns=wall - sum(classes.values()) - overlap,
        communication_hidden_ns=hidden,
        communication_exposed_ns=exposed,
    )


def _split_communication(kernels: pl.DataFrame, order: Ints, length: Ints, running: Ints) -> tuple[int, int]:
    ours = (kernels["class"] == "communication").to_numpy().astype(np.int64)
    if not ours.any():
        return 0, 0
    communicating = np.cumsum(np.concatenate((ours, -ours))[order])
    hidden = (communicating > 0) & (running > communicating)
    return int(length[hidden].sum()), int(length[(communicating > 0) & ~hidden].sum())

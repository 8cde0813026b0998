"""Give kernels that were launched before a recording began what later steps show.

The device is still running them when the recording starts, but the operator that launched them was not recorded. Steps
repeat: if the same kernels are launched again later, in the same order, to the same streams and with the same kernels
after them, each belongs to what its counterpart belongs to. Only exact repetitions count. If several places match, they
must agree; where they do not (the same kernels run in forward and again in a recomputation), the value stays unknown.

The order is that of the correlation numbers, over all streams of a device. On its own, a stream of collectives looks
the same from any place on.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import polars as pl
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_COMPARED = 100_000  # kernels at the beginning of a recording; a few steps have fewer
_FOLLOWING = 64  # kernels after the unknown ones that must match too
_PROBES = 16
_MOST_TRIED = 512
_MOST_PLACES = 16
_TAKEN = ("module", "part", "phase", "recomputed", "user_range", "forward_range")


def fill_from_repeats(windows: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """Yield the windows of kernels, with `_TAKEN` filled in for kernels launched before the recording began."""
    remaining = iter(windows)
    first: list[pl.DataFrame] = []
    while sum(window.height for window in first) <= _COMPARED and (window := next(remaining, None)) is not None:
        first.append(window)
    heights = [window.height for window in first]
    kernels = _fill(pl.concat(first)) if any((one["launched"] == "before").any() for one in first) else None
    for place, window in enumerate(first):
        yield window if kernels is None else kernels.slice(sum(heights[:place]), heights[place])
    yield from remaining


def _fill(kernels: pl.DataFrame) -> pl.DataFrame:
    # By time, not by row: windows may have rows with equal times in another order.
    key = kernels.select(pl.coalesce("ns", "start_ns")).to_series()
    last = key.sort()[min(_COMPARED, key.len()) - 1]
    compared = kernels.select(
        pl.int_range(pl.len()).alias("row"),
        "process",
        "device",
        "correlation",
        "start_ns",
        before=pl.col("launched") == "before",
        name=pl.col("name").cast(pl.Categorical).to_physical().cast(pl.Int64),
        stream=pl.col("stream").rank("dense").cast(pl.Int64),
    ).filter((key <= last) & pl.col("correlation").is_not_null())
    ordered = compared.sort("process", "device", "correlation", "start_ns", "stream", "row")
    rows: list[Ints] = []
    donors: list[Ints] = []
    for device in ordered.partition_by("process", "device", maintain_order=True):
        before = device["before"].to_numpy()
        num_unknown = int(before.argmin()) if not before.all() else 0
        launched_to = device.select(pl.col("name") * (pl.col("stream").max() + 1) + pl.col("stream"))
        shifts = find_repeats(launched_to.to_series().to_numpy(), num_unknown)
        if len(shifts):
            of_device = device["row"].to_numpy()
            rows.append(of_device[:num_unknown])
            donors.append(of_device[shifts[:, None] + np.arange(num_unknown)])  # a row per place
    for column in _TAKEN:
        for unknown, places in zip(rows, donors, strict=True):
            first, *others = (kernels[column].gather(place) for place in places)
            agree = pl.repeat(value=True, n=len(unknown), eager=True)
            for other in others:
                agree &= first.eq_missing(other)
            taken = kernels[column].scatter(unknown[agree.to_numpy()], first.filter(agree))
            kernels = kernels.with_columns(taken)
    return kernels


def find_repeats(names: Ints, num_unknown: int) -> Ints:
    """Return how much later the first `num_unknown` names occur again, together with those that follow them: a whole
    period, or `_FOLLOWING` names of it. Of many distances, returns `_MOST_PLACES` from the first to the last."""
    shifts = np.arange(num_unknown, len(names))
    lengths = num_unknown + np.minimum(shifts, _FOLLOWING)
    shifts = shifts[shifts + lengths <= len(names)]
    if not num_unknown or not len(shifts):
        return np.empty(0, np.int64)
    for probe in np.linspace(0, num_unknown - 1, _PROBES, dtype=np.int64):
        shifts = shifts[names[shifts + probe] == names[probe]]
    found = [
        shift
        for shift in _spread(shifts, _MOST_TRIED)
        if np.array_equal(
            names[: num_unknown + min(shift, _FOLLOWING)],
            names[shift : shift + num_unknown + min(shift, _FOLLOWING)],
        )
    ]
    return _spread(np.array(found, dtype=np.int64), _MOST_PLACES)


def _spread(values: Ints, most: int) -> Ints:
    """Return at most that many of the values, evenly spread."""
    return values if len(values) <= most else values[np.linspace(0, len(values) - 1, most, dtype=np.int64)]

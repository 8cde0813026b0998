"""Optimizers over lists of tensors: chunks of 65536 elements, one block each.

A launch has room for a limited number of chunks and tensors, and a longer list takes several launches. So the launches
of one call show how many chunks its tensors have.
"""

import re
from collections.abc import Iterable, Sequence

import msgspec

from stepscope.recover.facts import Sighting, Update, Window
from stepscope.recover.families.grids import is_flat, take_apart

CHUNK_ELEMENTS = 65536
_THREADS = 512
_METADATA = re.compile(
    r"(?P<fused>FusedOptimizer)?TensorList(?P<scalars>ScalarList)?Metadata<(?:[\w:]+, )?(?P<depth>\d)>"
)


class LaunchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity of one launch. Kernels built for CUDA 13 may take more arguments than earlier ones."""

    blocks: int
    tensors: tuple[int, ...]  # for one list of tensors, two, and so on up to five
    tensors_with_scalars: tuple[int, ...]


SMALL = LaunchLimits(blocks=320, tensors=(110, 64, 48, 36, 30), tensors_with_scalars=(96, 64, 48, 36, 30))
LARGE = LaunchLimits(blocks=2240, tensors=(770, 448, 336, 252, 210), tensors_with_scalars=(672, 448, 336, 252, 210))


def read_update(sighting: Sighting) -> Update | None:
    """Return what one launch updates."""
    return join_launches((sighting,))


def join_launches(launches: Sequence[Sighting]) -> Update | None:
    """Return what a call with these consecutive launches updates."""
    if not launches or not all(map(_is_understood, launches)):
        return None
    limits = find_limits(launches)
    blocks = sum(launch.grid[0] for launch in launches)
    tensors = min(blocks, sum(room_for_tensors(launch, limits) or 0 for launch in launches))
    # The last chunk of each tensor may have a single element.
    fewest = (blocks - tensors) * CHUNK_ELEMENTS + tensors
    return Update(elements=Window(fewest, blocks * CHUNK_ELEMENTS), tensors=Window(1, tensors))


def find_limits(launches: Sequence[Sighting]) -> LaunchLimits:
    """Return the limits that the launches of one call show, or the larger ones if they do not show any. Every launch
    but the last was full, and a launch that is full of tensors has at least one block per tensor."""
    followed = launches[:-1]
    if any(launch.grid[0] < (room_for_tensors(launch, LARGE) or 0) for launch in followed):
        return SMALL
    return LARGE


def split_calls(launches: Iterable[Sighting]) -> list[tuple[Sighting, ...]]:
    """Group consecutive launches into calls: a call continues with the same kernel as long as a launch was full.

    Only the number of blocks shows that for certain. A launch with the maximum number of tensors looks like a last one,
    so a call with many small tensors is split into several.
    """
    calls: list[tuple[Sighting, ...]] = []
    for launch in launches:
        previous = calls[-1][-1] if calls else None
        if previous and previous.name.name == launch.name.name and previous.grid[0] in (SMALL.blocks, LARGE.blocks):
            calls[-1] = (*calls[-1], launch)
        else:
            calls.append((launch,))
    return calls


def room_for_tensors(sighting: Sighting, limits: LaunchLimits) -> int | None:
    """Return the maximum number of tensors in one launch of this kernel."""
    anatomy, _ = take_apart(sighting.name.name)
    match = _METADATA.search(anatomy.template)
    if anatomy.base != "multi_tensor_apply_kernel" or not match or not 1 <= int(match["depth"]) <= len(limits.tensors):
        return None
    table = limits.tensors_with_scalars if match["scalars"] else limits.tensors
    return table[int(match["depth"]) - 1]


def _is_understood(sighting: Sighting) -> bool:
    if not is_flat(sighting) or sighting.block[0] != _THREADS or sighting.grid[0] > LARGE.blocks:
        return False
    return room_for_tensors(sighting, LARGE) is not None

"""From blocks to windows: helpers that all families share.

A launch rounds its problem up to whole blocks, so a number of blocks corresponds to a window of sizes. If a name leaves
open which of several rules chose the grid, a reader returns every possibility (`choices`), of which exactly one holds.
`join_choices` turns them into one weaker fact for callers that need a single one.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import gcd

import msgspec

from stepscope.explain.kernel_names.anatomy import Anatomy, dissect
from stepscope.recover.facts import Elements, Fact, Gather, Rows, Sighting, Update, Window, exactly

WARP = 32  # threads
# The SMs of an H100 SXM, an H200 and a GH200.
PROCESSORS = 132
# Used if the number of SMs is unknown: then any grid may have filled the GPU and only gives a lower bound.
UNKNOWN = 1
LARGEST = 2**31 - 1  # kernels use 32-bit indices; larger problems are split into several launches
_BYTES = {
    "double": 8,
    "long": 8,
    "int64_t": 8,
    "complex<float>": 8,
    "float": 4,
    "int": 4,
    "BFloat16": 2,
    "Half": 2,
    "short": 2,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "Float8_e4m3fn": 1,
    "Float8_e5m2": 1,
}


@lru_cache(maxsize=4096)
def take_apart(name: str) -> tuple[Anatomy, tuple[str, ...]]:
    """Return a kernel's name and its template arguments; no arguments if the name is mangled."""
    anatomy = dissect(name)
    return anatomy, () if anatomy.mangled else split_arguments(anatomy.template)


def split_arguments(template: str) -> tuple[str, ...]:
    ends = [position for position, depth in _commas_and_ends(template) if depth == 0]
    cuts = [-1, *ends, len(template)]
    return tuple(template[start + 1 : end].strip() for start, end in itertools.pairwise(cuts)) if template else ()


def first_enclosed(text: str) -> str:
    """Return the first argument of a list whose opening bracket is missing."""
    return text[: next((position for position, depth in _commas_and_ends(text) if depth <= 0), len(text))]


def _commas_and_ends(text: str) -> Iterator[tuple[int, int]]:
    """Yield the position of each comma and closing bracket with the number of open brackets: 0 at a comma between
    arguments, negative after the end of the list. The arrow of a lambda is not a bracket."""
    depth = 0
    for position, letter in enumerate(text):
        if letter in "<([{":
            depth += 1
        elif letter in ">)]}" and text[position - 1 : position] != "-":
            depth -= 1
            if depth < 0:
                yield position, depth
        elif letter == ",":
            yield position, depth


def is_true(argument: str) -> bool:
    """Whether a template argument is true, as spelled by PyTorch's profiler or Nsight Compute."""
    return argument in ("true", "1")


def whole_number(argument: str) -> int | None:
    return int(argument) if argument.isascii() and argument.isdigit() and len(argument) < 10 else None


def type_bytes(argument: str) -> int | None:
    """Return the bytes of one element of a C++ type, with or without its namespace."""
    return _BYTES.get(argument.removeprefix("c10::").removeprefix("at::").strip())


def covered(blocks: int, per_block: int, step: int = 1) -> Window:
    """Return the sizes that need this many blocks. The last block may have a single element."""
    return Window((blocks - 1) * per_block + step, blocks * per_block, step)


def is_flat(sighting: Sighting) -> bool:
    """Whether the grid is one-dimensional."""
    return sighting.grid[1] == 1 and sighting.grid[2] == 1


def keep_stored(windows: Iterable[Window], store_bytes: int | None, sizes: Iterable[int]) -> tuple[Window, ...]:
    """Return the windows, made exact if the stored bytes determine the count.

    Each element is stored once, in one of the given sizes. The windows decide which: sizes differ by a factor of two,
    and windows of more than a few blocks are narrower than that. If no size fits, the kernel stored something else too,
    and the windows stay as they are.
    """
    kept = tuple(windows)
    if store_bytes is None:
        return kept
    counts = {store_bytes // size for size in sizes if store_bytes % size == 0}
    exact = sorted(count for count in counts if any(count in window for window in kept))
    return tuple(exactly(count) for count in exact) or kept


def factor(elements: int, rows: Window, widths: Window) -> tuple[Rows, ...]:
    """Return all rows and widths whose product is this number of elements."""
    return tuple(
        Rows(rows=exactly(number), width=exactly(elements // number))
        for number in rows
        if elements % number == 0 and elements // number in widths
    )


def meet(first: Window, second: Window) -> Window | None:
    """Return the intersection. One of the windows must have a step of 1."""
    if first.step > second.step:
        first, second = second, first
    assert first.step == 1 or first == second, (first, second)
    below = max(0, first.low - second.low)
    low = second.low + -(-below // second.step) * second.step
    high = min(first.high, second.high)
    return Window(low, high - (high - low) % second.step, second.step) if low <= high else None


def join_windows(windows: Sequence[Window]) -> Window:
    """Return the narrowest window that contains all the given ones."""
    low = min(window.low for window in windows)
    step = 0
    for window in windows:
        step = gcd(step, window.low - low, window.step if window.size > 1 else 0)
    return Window(low, max(window.high for window in windows), step or 1)


def join_choices(choices: Sequence[Fact]) -> Fact | None:
    """Return one fact that holds whichever of the choices does."""
    if len(choices) < 2:
        return choices[0] if choices else None
    first = choices[0]
    assert isinstance(first, Elements | Rows | Gather | Update), "GEMM and attention facts cannot be joined"
    names = first.__struct_fields__
    return msgspec.structs.replace(
        first, **{name: _join_known([getattr(one, name) for one in choices]) for name in names}
    )


def _join_known(windows: Sequence[Window | None]) -> Window | None:
    known = [window for window in windows if window is not None]
    return join_windows(known) if len(known) == len(windows) else None

"""The order in which `auto` tries backends, where their speed was measured (`rankings.json`).

A call takes the order of the nearest measured shape with the same head dims and mask, and also with grouped heads or
without: nearest in the logarithms of the length, of batch × heads, and of the query heads per key/value head. A call
with far less work than that shape is bound by the CPU instead, and takes the default order.

    python bench/attention_speed.py --from bench/results/attention_speed_h200.jsonl --table \\
        src/stepscope/kernels/attention/rankings.json
"""

import math
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

import msgspec

Direction = Literal["forward", "backward"]
LEAST_WORK = 0.25  # relative to the measured shape
FILE = Path(__file__).with_name("rankings.json")


class MeasuredShape(msgspec.Struct, frozen=True, kw_only=True):
    """`programs` is batch × query heads; `group` is the number of query heads per key/value head."""

    direction: Direction
    causal: bool
    head_dim: int
    value_dim: int
    length: int
    programs: int
    group: int

    def resembles(self, other: "MeasuredShape") -> bool:
        """Whether the two differ only in what has a distance."""
        return self._kind() == other._kind()

    def _kind(self) -> tuple[object, ...]:
        return self.direction, self.causal, self.head_dim, self.value_dim, self.group > 1

    @property
    def work(self) -> int:
        return self.programs * self.length**2

    def distance(self, other: "MeasuredShape") -> float:
        pairs = ((self.length, other.length), (self.programs, other.programs), (self.group, other.group))
        return math.hypot(*(math.log2(one / another) for one, another in pairs))


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """The backends for a shape, best first."""

    shape: MeasuredShape
    backends: tuple[str, ...]


@cache
def read(path: Path = FILE) -> dict[str, tuple[Ranking, ...]]:
    """Return the rankings by GPU architecture, such as `sm_90`."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, tuple[Ranking, ...]])


@lru_cache(maxsize=1024)
def rank(architecture: str, shape: MeasuredShape) -> tuple[str, ...]:
    """Return the backends for such a call, best first; none where nothing like it was measured."""
    alike = [ranking for ranking in read().get(architecture, ()) if shape.resembles(ranking.shape)]
    nearest = min(alike, key=lambda ranking: shape.distance(ranking.shape), default=None)
    return () if nearest is None or LEAST_WORK * nearest.shape.work > shape.work else nearest.backends

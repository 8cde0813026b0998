"""The integers that are sought, and what follows from them: of one candidate, and of many at once."""

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
CORE_FIELDS = ("d_model", "num_heads", "num_kv_heads", "d_head", "batch", "context")


class Core(msgspec.Struct, frozen=True, kw_only=True):
    """What the attention half of a layer depends on. `tokens` = batch · context."""

    batch: int
    context: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    d_head: int

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    @property
    def query_width(self) -> int:
        return self.num_heads * self.d_head

    @property
    def key_width(self) -> int:
        return self.num_kv_heads * self.d_head

    @property
    def joint_width(self) -> int:
        """Of queries, keys and values in one matrix."""
        return self.query_width + 2 * self.key_width


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Many candidates: an array a field. Where little is known there are hundreds of thousands."""

    batch: Ints
    context: Ints
    d_model: Ints
    num_heads: Ints
    num_kv_heads: Ints
    d_head: Ints

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, index: int) -> Core:
        return Core(**{name: int(getattr(self, name)[index]) for name in CORE_FIELDS})

    def rows(self) -> list[tuple[int, ...]]:
        return list(zip(*(getattr(self, name).tolist() for name in CORE_FIELDS), strict=True))

    def take(self, chosen: Flags | Ints) -> "Cores":
        return Cores(**{name: getattr(self, name)[chosen] for name in CORE_FIELDS})

    def with_width(self, d_model: int) -> "Cores":
        fields = {name: getattr(self, name) for name in CORE_FIELDS}
        return Cores(**{**fields, "d_model": np.full(len(self), d_model, np.int64)})

    @property
    def tokens(self) -> Ints:
        return self.batch * self.context

    @property
    def query_width(self) -> Ints:
        return self.num_heads * self.d_head

    @property
    def key_width(self) -> Ints:
        return self.num_kv_heads * self.d_head

    @property
    def joint_width(self) -> Ints:
        return self.query_width + 2 * self.key_width


def join_cores(parts: list[Cores]) -> Cores:
    return Cores(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in CORE_FIELDS})


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})

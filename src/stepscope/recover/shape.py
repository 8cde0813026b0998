"""The integers that are sought, and what follows from them: of one candidate, and of many at once."""

from collections.abc import Iterator, Sequence
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

    def take(self, chosen: Flags | Ints | slice) -> "Cores":
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


def join_cores(parts: Sequence[Cores]) -> Cores:
    none = np.zeros(0, np.int64)
    return Cores(**{name: np.concatenate([none, *(getattr(part, name) for part in parts)]) for name in CORE_FIELDS})


def divisors(*factors: int) -> list[int]:
    """Of the product, in ascending order. Large products are quick where their factors are given."""
    found = {1}
    for prime in (prime for factor in factors for prime in _primes(factor)):
        found |= {number * prime for number in found}
    return sorted(found)


def _primes(number: int) -> Iterator[int]:
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            yield divisor
            number //= divisor
        divisor += 1
    if number > 1:
        yield number

"""An operator call as PyTorch's profiler records it: its tensors by position, and the other arguments as text."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

# Sizes by the profiler's names.
BYTES = {
    "double": 8,
    "float": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "long int": 8,
    "long": 8,
    "int": 4,
    "short int": 2,
    "short": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
}
PRECISION = {
    "double": "fp64",
    "float": "fp32",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}
Dims = tuple[int, ...]


class OperatorCost(msgspec.Struct, frozen=True, kw_only=True):
    flops: int
    read_bytes: int
    written_bytes: int
    dtype: str | None  # of the first floating input: fp32, bf16, ...

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.written_bytes


class Tensor(msgspec.Struct, frozen=True):
    dims: Dims
    kind: str  # the profiler's name of the dtype

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return self.elements * BYTES[self.kind]


class Call(msgspec.Struct, frozen=True):
    """An operator's arguments by position; None for a position without a tensor."""

    name: str  # without namespace and overload
    tensors: tuple[Tensor | None, ...]
    lists: tuple[tuple[Dims, ...], ...]  # for each position: the shapes of a list of tensors, otherwise empty
    arguments: tuple[str, ...]

    def tensor(self, place: int) -> Tensor:
        found = self.tensors[place] if place < len(self.tensors) else None
        if found is None:
            raise UnknownCost
        return found

    def argument(self, place: int) -> str:
        return self.arguments[place] if place < len(self.arguments) else ""

    @property
    def given(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors if tensor is not None]


class UnknownCost(Exception):  # noqa: N818 - it is an answer, not a fault
    """The recorded arguments are not sufficient."""


def parse_call(name: str, shapes: str, dtypes: str, arguments: str | None) -> Call:
    dims = msgspec.json.decode(shapes, type=list[list[Any]])
    kinds = msgspec.json.decode(dtypes, type=list[str])
    texts = msgspec.json.decode(arguments, type=list[Any]) if arguments else []
    tensors: list[Tensor | None] = []
    lists: list[tuple[Dims, ...]] = []
    for sizes, kind in zip(dims, kinds, strict=False):
        nested = any(isinstance(size, list) for size in sizes)
        lists.append(tuple(_dims(one) for one in sizes) if nested else ())
        tensors.append(None if nested or kind not in BYTES else Tensor(_dims(sizes), kind))
    return Call(name, tuple(tensors), tuple(lists), tuple(str(text) for text in texts))


def _dims(sizes: object) -> Dims:
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise UnknownCost
    return tuple(sizes)


def make_cost(flops: float, read: Sequence[Tensor | int], written: Sequence[Tensor | int]) -> OperatorCost:
    def total(parts: Sequence[Tensor | int]) -> int:
        return sum(part if isinstance(part, int) else part.bytes for part in parts)

    known = (PRECISION.get(part.kind) for part in read if isinstance(part, Tensor))
    return OperatorCost(
        flops=round(flops),
        read_bytes=total(read),
        written_bytes=total(written),
        dtype=next((precision for precision in known if precision), None),
    )


def broadcast(*shapes: Dims) -> Dims:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    result = []
    for sizes in zip(*padded, strict=True):
        wide = {size for size in sizes if size != 1}
        if len(wide) > 1:
            raise UnknownCost
        result.append(wide.pop() if wide else 1)
    return tuple(result)


def numbers(text: str) -> list[int]:
    return msgspec.json.decode(text, type=list[int])

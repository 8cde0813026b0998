"""Which cases `stepscope attention` runs: what was asked for, and the device's defaults for what was not."""

import itertools
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import msgspec

from stepscope.errors import StepscopeError
from stepscope.jobs.flag_values import number, several, word
from stepscope.recording.rows.attention import AttentionCase
from stepscope.spec import Precision, parse_bytes
from stepscope.spec.backends import BACKENDS, Implementation, compared_on
from stepscope.spec.settings import flag_of

T = TypeVar("T")


class _Defaults(msgspec.Struct, frozen=True, kw_only=True):
    implementation: tuple[Implementation, ...]
    head_dim: tuple[int, ...]
    length: tuple[int, ...]
    precision: tuple[Precision, ...]
    seconds: float


_ON_CUDA = _Defaults(
    implementation=compared_on("cuda"),
    head_dim=(16, 32, 64, 128),
    length=tuple(2**power for power in range(8, 17)),
    precision=("bf16",),
    seconds=1.0,
)
# Seconds on a laptop.
_ON_CPU = _Defaults(
    implementation=compared_on("cpu"),
    head_dim=(16, 64),
    length=(64, 128, 256, 512),
    precision=("fp32",),
    seconds=0.1,
)


class AttentionGrid(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for. None, and an empty axis, leave it to the device."""

    implementation: tuple[str, ...] = ()
    head_dim: tuple[int, ...] = ()
    length: tuple[int, ...] = ()
    precision: tuple[str, ...] = ()
    batch: int = 8
    heads: int = 1
    causal: bool = True
    device: str = "auto"
    seed: int = 0
    repetitions: int = 100
    seconds: float | None = None
    memory_limit: int | None = None

    def cases(self, device: str) -> tuple[AttentionCase, ...]:
        """All cases on `device`, each once: those of one implementation together, in the order they were named."""
        defaults = _ON_CPU if device == "cpu" else _ON_CUDA
        product = itertools.product(
            cast(tuple[Implementation, ...], self.implementation) or defaults.implementation,
            self.precision or defaults.precision,
            self.head_dim or defaults.head_dim,
            self.length or defaults.length,
        )
        cases = (
            AttentionCase(
                implementation=implementation,
                precision=cast(Precision, precision),
                head_dim=head_dim,
                length=length,
                batch=self.batch,
                heads=self.heads,
                causal=self.causal,
                device=device,
                seed=self.seed,
                repetitions=self.repetitions,
                seconds=defaults.seconds if self.seconds is None else self.seconds,
                memory_limit=self.memory_limit,
            )
            for implementation, precision, head_dim, length in product
            # Whoever asks for one by name gets it at any length.
            if self.implementation or length <= (BACKENDS[implementation].longest_compared or length)
        )
        return tuple(dict.fromkeys(cases))


def grid_from_texts(texts: Mapping[str, str]) -> AttentionGrid:
    """A grid from the texts of flags, by name."""
    parsed = {name: _PARSERS[name](name, text) for name, text in texts.items()}
    grid = msgspec.convert(parsed, AttentionGrid)
    grid.cases("cpu" if grid.device == "cpu" else "cuda")  # what cannot be is refused before a device is looked at
    return grid


_PARSERS: dict[str, Callable[[str, str], object]] = {
    "implementation": several(word),
    "head_dim": several(number(int)),
    "length": several(number(int)),
    "precision": several(word),
    "batch": number(int),
    "heads": number(int),
    "causal": lambda _, text: text == "yes",
    "device": word,
    "seed": number(int),
    "repetitions": number(int),
    "seconds": number(float),
    "memory_limit": lambda _, text: parse_bytes(text),
}


def refuse_texts(texts: Mapping[str, str], why: str) -> None:
    """A setting that would be ignored is an error: its user would read another figure than they asked for."""
    for name in texts:
        raise StepscopeError(f"`{flag_of(name)}` does nothing here", detail=why, hint="leave it out")

"""Which cases `stepscope comm` runs: what was asked for, and the machine's defaults for what was not."""

import itertools
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import msgspec

from stepscope.errors import StepscopeError
from stepscope.jobs.flag_values import number, several, word
from stepscope.recording.rows.comm import CommCase
from stepscope.recording.rows.links import COLLECTIVES, Backend, Collective, Dtype, named_interface
from stepscope.spec import SpecError, parse_bytes
from stepscope.spec.settings import flag_of

T = TypeVar("T")
MB = 10**6
DEVICES = ("auto", "cpu", "cuda")
# Seconds on a laptop; minutes over a network, where the largest show what the wire can do.
_CPU_SIZES, _CUDA_SIZES = (1 * MB, 4 * MB, 16 * MB, 64 * MB), (1 * MB, 10 * MB, 100 * MB, 1000 * MB)
_CPU_RANKS, _CUDA_RANKS = (2, 4), (2, 4, 6, 8)
_CPU_SECONDS, _CUDA_SECONDS = 0.2, 1.0


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks run on. `world` and `hosts` are those of ranks that somebody else started, if they were."""

    device: str  # `cpu` or `cuda`
    gpus: int = 0
    world: int | None = None
    hosts: int = 1


class CommGrid(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for. None, and an empty axis, leave it to the machine."""

    collective: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    backend: str | None = None
    device: str = "auto"
    dtype: tuple[str, ...] = ()
    repetitions: int = 20
    seconds: float | None = None

    def cases(self, machine: Machine) -> tuple[CommCase, ...]:
        """All cases, each once: those of one number of ranks together, because these are the same processes."""
        on_cpu = machine.device == "cpu"
        backend = cast(Backend, self.backend or ("gloo" if on_cpu else "nccl"))
        ranks = self._choose_ranks(machine, backend)
        seconds = (_CPU_SECONDS if on_cpu else _CUDA_SECONDS) if self.seconds is None else self.seconds
        product = itertools.product(
            ranks,
            self.dtype or ("fp32",),
            self.collective or COLLECTIVES,
            self.sizes or (_CPU_SIZES if on_cpu else _CUDA_SIZES),
        )
        cases = (
            CommCase(
                collective=cast(Collective, collective),
                message_bytes=size,
                ranks=count,
                backend=backend,
                device=machine.device,
                dtype=cast(Dtype, dtype),
                hosts=machine.hosts,
                interface=named_interface(backend) if backend in ("gloo", "nccl") else None,
                repetitions=self.repetitions,
                seconds=seconds,
            )
            for count, dtype, collective, size in product
        )
        return tuple(dict.fromkeys(cases))

    def refuse_other_ranks(self, world: int) -> None:
        """Ranks that somebody else started are as many as they are."""
        if self.ranks and self.ranks != (world,):
            raise StepscopeError(
                f"`--ranks {','.join(map(str, self.ranks))}` among {world} ranks that are started already",
                detail="under torchrun and srun there are as many as they start",
                hint="leave --ranks out",
            )

    def _choose_ranks(self, machine: Machine, backend: str) -> tuple[int, ...]:
        if machine.world is not None:
            return (machine.world,)
        if backend == "nccl" and (too_many := [count for count in self.ranks if count > machine.gpus]):
            plural = "s" * (machine.gpus != 1)
            raise StepscopeError(
                f"`{too_many[0]}` ranks over nccl on {machine.gpus} GPU{plural}",
                detail="nccl refuses two ranks on one GPU; gloo goes by way of the host's memory",
                hint=f"stepscope comm --ranks {max(1, machine.gpus)}, or --backend gloo",
            )
        if self.ranks or machine.device == "cpu":
            return self.ranks or _CPU_RANKS
        return tuple(count for count in _CUDA_RANKS if count <= machine.gpus) or (1,)


def grid_from_texts(texts: Mapping[str, str]) -> CommGrid:
    """A grid from the texts of flags, by name."""
    parsed = {name: _PARSERS[name](name, text) for name, text in texts.items()}
    grid = msgspec.convert(parsed, CommGrid)
    if grid.device not in DEVICES:
        detail = "expected cpu, cuda or auto; on CUDA rank r takes GPU r"
        raise SpecError(f"unknown device: `{grid.device}`", detail=detail, hint="--device cuda")
    # What cannot be on any machine is refused before this one is looked at.
    most = max((*grid.ranks, 1))
    grid.cases(Machine(device="cpu" if grid.device == "cpu" else "cuda", gpus=most))
    return grid


def refuse_texts(texts: Mapping[str, str], why: str) -> None:
    """A setting that would be ignored is an error: its user would read another figure than they asked for."""
    for name in texts:
        raise StepscopeError(f"`{flag_of(name)}` does nothing here", detail=why, hint="leave it out")


_PARSERS: dict[str, Callable[[str, str], object]] = {
    "collective": several(word),
    "sizes": several(lambda _, text: parse_bytes(text)),
    "ranks": several(number(int)),
    "backend": word,
    "device": word,
    "dtype": several(word),
    "repetitions": number(int),
    "seconds": number(float),
}

"""Which cases `stepscope attention` and `stepscope comm` run: what was asked for, and otherwise the machine's defaults.

These grids are not made of a workload's settings, but theirs are declared in the same way: next to the fields, from
which flags, parsers and help follow. A tuple takes several values. Nothing heavy is imported here, as every `--help`
needs the flags.
"""

import itertools
from collections.abc import Mapping
from typing import Annotated, Protocol, TypeVar, cast

import msgspec

from stepscope.errors import StepscopeError
from stepscope.recording.rows.attention_case import IMPLEMENTATIONS, AttentionCase
from stepscope.recording.rows.collective_case import CommCase
from stepscope.recording.rows.links import COLLECTIVES, Backend, Collective, Dtype, named_interface
from stepscope.spec import Precision, SpecError, parse_bytes
from stepscope.spec.backends import BACKENDS, Implementation, compared_on
from stepscope.spec.grid import parse_flag, split_values
from stepscope.spec.settings import Setting, declared, flag_of, parse_integer

MB = 10**6
DEVICES = ("auto", "cpu", "cuda")
# Seconds on a laptop; minutes over a network, where the largest show what the wire can do.
_CPU_SIZES, _CUDA_SIZES = (1 * MB, 4 * MB, 16 * MB, 64 * MB), (1 * MB, 10 * MB, 100 * MB, 1000 * MB)
_CPU_RANKS, _CUDA_RANKS = (2, 4), (2, 4, 6, 8)
_CPU_SECONDS, _CUDA_SECONDS = 0.2, 1.0


class FlagGrid(Protocol):
    def check(self) -> None:
        """Refuses what no device can do."""
        ...


G = TypeVar("G", bound=FlagGrid)


def grid_from_texts(kind: type[G], texts: Mapping[str, str]) -> G:
    """A grid from the texts of flags, by name. What cannot be anywhere is refused before a device is looked at."""
    settings = declared(kind)  # type: ignore[arg-type]  # a struct and a protocol
    fields: dict[str, object] = {}
    for name, text in texts.items():
        setting = settings[name]
        default: object = setting.default
        if isinstance(default, tuple):
            fields[name] = tuple(parse_flag(setting, part) for part in split_values(name, text))
        else:
            fields[name] = parse_flag(setting, text)
    grid = kind(**fields)
    grid.check()
    return grid


def refuse_texts(texts: Mapping[str, str], why: str) -> None:
    """A setting that would be ignored is an error: its user would read another figure than they asked for."""
    for name in texts:
        raise StepscopeError(f"`{flag_of(name)}` does nothing here", detail=why, hint="leave it out")


def _parse_seconds(text: str) -> float:
    try:
        return float(text.replace("_", ""))
    except ValueError:
        raise SpecError(f"not a number: `{text}`", hint="digits only, such as 1024") from None


# --- Attention --------------------------------------------------------------------------------------------------------


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

    implementation: Annotated[tuple[str, ...], Setting(metavar="NAME,…", help=f"Of {', '.join(IMPLEMENTATIONS)}.")] = ()
    head_dim: Annotated[tuple[int, ...], Setting(metavar="N,…", help="Width of a head.", parse=parse_integer)] = ()
    length: Annotated[
        tuple[int, ...], Setting(metavar="N,…", help="Length of the sequences.", parse=parse_integer)
    ] = ()
    precision: Annotated[
        tuple[str, ...], Setting(metavar="fp32|tf32|bf16|fp16,…", help="bf16 on a GPU, fp32 on a CPU.")
    ] = ()
    batch: Annotated[int, Setting(metavar="N", help="Sequences.  [default: 8]")] = 8
    heads: Annotated[int, Setting(metavar="N", help="Heads.  [default: 1]")] = 1
    causal: Annotated[bool, Setting(help="Causal unless told otherwise.")] = True
    device: Annotated[str, Setting(metavar="auto|cpu|cuda|cuda:N", help="Where to run.")] = "auto"
    seed: Annotated[int, Setting(metavar="N", help="Seed of the inputs.")] = 0
    repetitions: Annotated[int, Setting(metavar="N", help="At most so many.  [default: 100]")] = 100
    seconds: Annotated[
        float | None,
        Setting(metavar="S", help="At most so long, each timing: 1 on a GPU, 0.1 on a CPU.", parse=_parse_seconds),
    ] = None
    memory_limit: Annotated[
        int | None, Setting(metavar="SIZE", help="Cap on memory, such as 24GB.", parse=parse_bytes)
    ] = None

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

    def check(self) -> None:
        self.cases("cpu" if self.device == "cpu" else "cuda")


# --- Collectives ------------------------------------------------------------------------------------------------------


class RankHost(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks run on. `world` and `hosts` are those of ranks that somebody else started, if they were."""

    device: str  # `cpu` or `cuda`
    gpus: int = 0
    world: int | None = None
    hosts: int = 1


class CommGrid(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for. None, and an empty axis, leave it to the machine."""

    collective: Annotated[
        tuple[str, ...], Setting(metavar="NAME,…", help=f"Of {', '.join(COLLECTIVES)}.  [default: all]")
    ] = ()
    sizes: Annotated[
        tuple[int, ...], Setting(metavar="SIZE,…", help="Whole messages, such as 1MB,1GB (decimal).", parse=parse_bytes)
    ] = ()
    ranks: Annotated[
        tuple[int, ...],
        Setting(metavar="N,…", help="How many processes.  [default: 2,4 on a CPU]", parse=parse_integer),
    ] = ()
    backend: Annotated[str | None, Setting(metavar="gloo|nccl", help="gloo on a CPU, nccl on GPUs.")] = None
    device: Annotated[
        str, Setting(metavar="auto|cpu|cuda", help="Where the tensors are; on CUDA rank r takes GPU r.")
    ] = "auto"
    dtype: Annotated[
        tuple[str, ...], Setting(metavar="fp32|bf16|fp16,…", help="Of the elements.  [default: fp32]")
    ] = ()
    repetitions: Annotated[int, Setting(metavar="N", help="At most so many.  [default: 20]")] = 20
    seconds: Annotated[
        float | None,
        Setting(metavar="S", help="At most so long, each case: 1 on GPUs, 0.2 on a CPU.", parse=_parse_seconds),
    ] = None

    def cases(self, host: RankHost) -> tuple[CommCase, ...]:
        """All cases, each once: those of one number of ranks together, because these are the same processes."""
        on_cpu = host.device == "cpu"
        backend = self.backend_on(host.device)
        seconds = (_CPU_SECONDS if on_cpu else _CUDA_SECONDS) if self.seconds is None else self.seconds
        product = itertools.product(
            self._choose_ranks(host, backend),
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
                device=host.device,
                dtype=cast(Dtype, dtype),
                hosts=host.hosts,
                interface=named_interface(backend) if backend in ("gloo", "nccl") else None,
                repetitions=self.repetitions,
                seconds=seconds,
            )
            for count, dtype, collective, size in product
        )
        return tuple(dict.fromkeys(cases))

    def check(self) -> None:
        if self.device not in DEVICES:
            detail = "expected cpu, cuda or auto; on CUDA rank r takes GPU r"
            raise SpecError(f"unknown device: `{self.device}`", detail=detail, hint="--device cuda")
        self.cases(RankHost(device="cpu" if self.device == "cpu" else "cuda", gpus=max((*self.ranks, 1))))

    def backend_on(self, device: str) -> Backend:
        return cast(Backend, self.backend or ("gloo" if device == "cpu" else "nccl"))

    def refuse_other_ranks(self, world: int) -> None:
        """Ranks that somebody else started are as many as they are."""
        if self.ranks and self.ranks != (world,):
            raise StepscopeError(
                f"`--ranks {','.join(map(str, self.ranks))}` among {world} ranks that are started already",
                detail="under torchrun and srun there are as many as they start",
                hint="leave --ranks out",
            )

    def _choose_ranks(self, host: RankHost, backend: str) -> tuple[int, ...]:
        if host.world is not None:
            return (host.world,)
        if backend == "nccl" and (too_many := [count for count in self.ranks if count > host.gpus]):
            plural = "s" * (host.gpus != 1)
            raise StepscopeError(
                f"`{too_many[0]}` ranks over nccl on {host.gpus} GPU{plural}",
                detail="nccl refuses two ranks on one GPU; gloo goes by way of the host's memory",
                hint=f"stepscope comm --ranks {max(1, host.gpus)}, or --backend gloo",
            )
        if self.ranks or host.device == "cpu":
            return self.ranks or _CPU_RANKS
        return tuple(count for count in _CUDA_RANKS if count <= host.gpus) or (1,)

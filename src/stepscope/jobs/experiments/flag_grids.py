"""The cases that `stepscope attention` and `stepscope comm` run: those requested, or the machine's defaults.

These grids are not workload settings, but they are declared the same way: next to the fields, which the flags, parsers
and help are derived from. A tuple field takes several values. Nothing heavy is imported here, because every `--help`
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
from stepscope.units import count_noun

MB = 10**6
DEVICES = ("auto", "cpu", "cuda")
# Seconds on a laptop; minutes over a network, where the largest messages show what the link can do.
_CPU_SIZES, _CUDA_SIZES = (1 * MB, 4 * MB, 16 * MB, 64 * MB), (1 * MB, 10 * MB, 100 * MB, 1000 * MB)
_CPU_RANKS, _CUDA_RANKS = (2, 4), (2, 4, 6, 8)
_CPU_SECONDS, _CUDA_SECONDS = 0.2, 1.0


class FlagGrid(Protocol):
    def check(self) -> None:
        """Reject what no device supports."""
        ...


G = TypeVar("G", bound=FlagGrid)


def grid_from_texts(kind: type[G], texts: Mapping[str, str]) -> G:
    """Build a grid from flag values, by name. Values that no device supports are rejected before a device is probed."""
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
    """Reject a setting that would be ignored: the user would read a different number than they asked for."""
    for name in texts:
        raise StepscopeError(f"`{flag_of(name)}` has no effect here", detail=why, hint=f"remove {flag_of(name)}")


def _parse_seconds(text: str) -> float:
    try:
        return float(text.replace("_", ""))
    except ValueError:
        raise SpecError(f"not a number: `{text}`", hint="expected digits, such as 1024") from None


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
    """The requested cases. None or an empty axis means the device's default."""

    implementation: Annotated[
        tuple[str, ...], Setting(metavar="NAME,…", help=f"Implementations: {', '.join(IMPLEMENTATIONS)}.")
    ] = ()
    head_dim: Annotated[tuple[int, ...], Setting(metavar="N,…", help="Head dimension.", parse=parse_integer)] = ()
    length: Annotated[tuple[int, ...], Setting(metavar="N,…", help="Sequence length.", parse=parse_integer)] = ()
    precision: Annotated[
        tuple[str, ...],
        Setting(metavar="fp32|tf32|bf16|fp16,…", help="Precision.  [default: bf16 on a GPU, fp32 on a CPU]"),
    ] = ()
    batch: Annotated[int, Setting(metavar="N", help="Batch size.  [default: 8]")] = 8
    heads: Annotated[int, Setting(metavar="N", help="Number of heads.  [default: 1]")] = 1
    causal: Annotated[bool, Setting(help="Use a causal mask.  [default: causal]")] = True
    device: Annotated[str, Setting(metavar="auto|cpu|cuda|cuda:N", help="Where to run.")] = "auto"
    seed: Annotated[int, Setting(metavar="N", help="Seed for the inputs.")] = 0
    repetitions: Annotated[int, Setting(metavar="N", help="Maximum repetitions.  [default: 100]")] = 100
    seconds: Annotated[
        float | None,
        Setting(metavar="S", help="Time limit per timing.  [default: 1 on a GPU, 0.1 on a CPU]", parse=_parse_seconds),
    ] = None
    memory_limit: Annotated[
        int | None, Setting(metavar="SIZE", help="Memory limit, such as 24GB.", parse=parse_bytes)
    ] = None

    def cases(self, device: str) -> tuple[AttentionCase, ...]:
        """Return all cases on `device` without duplicates, grouped by implementation in the order given."""
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
            # A length given by name runs with any implementation.
            if self.implementation or length <= (BACKENDS[implementation].longest_compared or length)
        )
        return tuple(dict.fromkeys(cases))

    def check(self) -> None:
        self.cases("cpu" if self.device == "cpu" else "cuda")


# --- Collectives ------------------------------------------------------------------------------------------------------


class RankHost(msgspec.Struct, frozen=True, kw_only=True):
    """The machine the ranks run on. `world` and `hosts` describe ranks started by an external launcher."""

    device: str  # `cpu` or `cuda`
    gpus: int = 0
    world: int | None = None
    hosts: int = 1


class CommGrid(msgspec.Struct, frozen=True, kw_only=True):
    """The requested cases. None or an empty axis means the machine's default."""

    collective: Annotated[
        tuple[str, ...], Setting(metavar="NAME,…", help=f"Collectives: {', '.join(COLLECTIVES)}.  [default: all]")
    ] = ()
    sizes: Annotated[
        tuple[int, ...], Setting(metavar="SIZE,…", help="Message sizes, such as 1MB,1GB (decimal).", parse=parse_bytes)
    ] = ()
    ranks: Annotated[
        tuple[int, ...],
        Setting(metavar="N,…", help="Number of processes.  [default: 2,4 on a CPU]", parse=parse_integer),
    ] = ()
    backend: Annotated[
        str | None, Setting(metavar="gloo|nccl", help="Backend.  [default: gloo on a CPU, nccl on GPUs]")
    ] = None
    device: Annotated[
        str, Setting(metavar="auto|cpu|cuda", help="Device for the tensors; on CUDA, rank r uses GPU r.")
    ] = "auto"
    dtype: Annotated[tuple[str, ...], Setting(metavar="fp32|bf16|fp16,…", help="Element type.  [default: fp32]")] = ()
    repetitions: Annotated[int, Setting(metavar="N", help="Maximum repetitions.  [default: 20]")] = 20
    seconds: Annotated[
        float | None,
        Setting(metavar="S", help="Time limit per case.  [default: 1 on GPUs, 0.2 on a CPU]", parse=_parse_seconds),
    ] = None

    def cases(self, host: RankHost) -> tuple[CommCase, ...]:
        """Return all cases without duplicates, grouped by number of ranks, because each group shares processes."""
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
            detail = "expected cpu, cuda or auto; on CUDA, rank r uses GPU r"
            raise SpecError(f"unknown device: `{self.device}`", detail=detail, hint="--device cuda")
        self.cases(RankHost(device="cpu" if self.device == "cpu" else "cuda", gpus=max((*self.ranks, 1))))

    def backend_on(self, device: str) -> Backend:
        return cast(Backend, self.backend or ("gloo" if device == "cpu" else "nccl"))

    def refuse_other_ranks(self, world: int) -> None:
        """An external launcher fixes the number of ranks."""
        if self.ranks and self.ranks != (world,):
            raise StepscopeError(
                f"`--ranks {','.join(map(str, self.ranks))}` does not match the {world} ranks already started",
                detail="under torchrun and srun, the launcher sets the number of ranks",
                hint="remove --ranks",
            )

    def _choose_ranks(self, host: RankHost, backend: str) -> tuple[int, ...]:
        if host.world is not None:
            return (host.world,)
        if backend == "nccl" and (too_many := [count for count in self.ranks if count > host.gpus]):
            raise StepscopeError(
                f"cannot run `{too_many[0]}` ranks with NCCL on {count_noun(host.gpus, 'GPU')}",
                detail="NCCL requires one GPU per rank; gloo copies through CPU memory",
                hint=f"stepscope comm --ranks {max(1, host.gpus)}, or --backend gloo",
            )
        if self.ranks or host.device == "cpu":
            return self.ranks or _CPU_RANKS
        return tuple(count for count in _CUDA_RANKS if count <= host.gpus) or (1,)

"""Which cases `stepscope attention` and `stepscope comm` run: what was asked for, and otherwise the machine's defaults.

These grids are not made of a workload's settings. Their flags are declared once, as the fields of a struct: a field's
type says how its flag is read, and a tuple takes several values, separated by commas. Nothing heavy is imported here,
as every `--help` needs the flags.
"""

import itertools
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from stepscope.errors import StepscopeError
from stepscope.recording.rows.attention import IMPLEMENTATIONS, AttentionCase, Implementation
from stepscope.recording.rows.comm import CommCase
from stepscope.recording.rows.links import COLLECTIVES, Backend, Collective, Dtype, named_interface
from stepscope.spec import Precision, SpecError, parse_bytes
from stepscope.spec.choices import flag_of

# Python's loop over tiles takes minutes beyond; whoever asks for it by name gets it.
LONGEST_TILED = 8192
MB = 10**6
DEVICES = ("auto", "cpu", "cuda")
# Seconds on a laptop; minutes over a network, where the largest show what the wire can do.
_CPU_SIZES, _CUDA_SIZES = (1 * MB, 4 * MB, 16 * MB, 64 * MB), (1 * MB, 10 * MB, 100 * MB, 1000 * MB)
_CPU_RANKS, _CUDA_RANKS = (2, 4), (2, 4, 6, 8)
_CPU_SECONDS, _CUDA_SECONDS = 0.2, 1.0


class Flag(NamedTuple):
    """What `--help` says of a field. `parse` reads one value where the field's type does not say how."""

    metavar: str
    help: str
    parse: Callable[[str], object] | None = None


class FlagGrid(Protocol):
    def check(self) -> None:
        """Refuses what no device can do."""
        ...


G = TypeVar("G", bound=FlagGrid)


def fields_of(grid: type) -> dict[str, tuple[Any, Flag]]:
    """The type and the flag of each field of a grid, in their order."""
    fields = {}
    for name, hint in get_type_hints(grid, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, flag = get_args(hint)
            fields[name] = (kind, flag)
    return fields


def grid_from_texts(kind: type[G], texts: Mapping[str, str]) -> G:
    """A grid from the texts of flags, by name. What cannot be anywhere is refused before a device is looked at."""
    fields = fields_of(kind)
    grid = kind(**{name: _parse(name, text, *fields[name]) for name, text in texts.items()})
    grid.check()
    return grid


def refuse_texts(texts: Mapping[str, str], why: str) -> None:
    """A setting that would be ignored is an error: its user would read another figure than they asked for."""
    for name in texts:
        raise StepscopeError(f"`{flag_of(name)}` does nothing here", detail=why, hint="leave it out")


def _parse(name: str, text: str, kind: Any, flag: Flag) -> object:
    if get_origin(kind) is not tuple:
        return _parse_one(name, text, kind, flag)
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise SpecError(f"an empty value in `{flag_of(name)} {text}`", detail="expected values separated by commas")
    return tuple(_parse_one(name, part, get_args(kind)[0], flag) for part in parts)


def _parse_one(name: str, text: str, kind: Any, flag: Flag) -> object:
    if flag.parse is not None:
        return flag.parse(text)
    (plain,) = [one for one in get_args(kind) or (kind,) if one is not NoneType]
    if plain is bool:
        return text == "yes"
    if plain is str:
        return text
    try:
        return plain(text.replace("_", ""))
    except ValueError:
        raise SpecError(f"`{flag_of(name)}`: not a number: `{text}`", hint="digits only, such as 1024") from None


# --- Attention --------------------------------------------------------------------------------------------------------


class _Defaults(msgspec.Struct, frozen=True, kw_only=True):
    implementation: tuple[Implementation, ...]
    head_dim: tuple[int, ...]
    length: tuple[int, ...]
    precision: tuple[Precision, ...]
    seconds: float


_ON_CUDA = _Defaults(
    implementation=("naive", "compiled", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "tiled", "triton", "hopper"),
    head_dim=(16, 32, 64, 128),
    length=tuple(2**power for power in range(8, 17)),
    precision=("bf16",),
    seconds=1.0,
)
# Seconds on a laptop.
_ON_CPU = _Defaults(
    implementation=("naive", "sdpa", "tiled"),
    head_dim=(16, 64),
    length=(64, 128, 256, 512),
    precision=("fp32",),
    seconds=0.1,
)


class AttentionGrid(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for. None, and an empty axis, leave it to the device."""

    implementation: Annotated[tuple[str, ...], Flag("NAME,…", f"Of {', '.join(IMPLEMENTATIONS)}.")] = ()
    head_dim: Annotated[tuple[int, ...], Flag("N,…", "Width of a head.")] = ()
    length: Annotated[tuple[int, ...], Flag("N,…", "Length of the sequences.")] = ()
    precision: Annotated[tuple[str, ...], Flag("fp32|tf32|bf16|fp16,…", "bf16 on a GPU, fp32 on a CPU.")] = ()
    batch: Annotated[int, Flag("N", "Sequences.  [default: 8]")] = 8
    heads: Annotated[int, Flag("N", "Heads.  [default: 1]")] = 1
    causal: Annotated[bool, Flag("", "Causal unless told otherwise.")] = True
    device: Annotated[str, Flag("auto|cpu|cuda|cuda:N", "Where to run.")] = "auto"
    seed: Annotated[int, Flag("N", "Seed of the inputs.")] = 0
    repetitions: Annotated[int, Flag("N", "At most so many.  [default: 100]")] = 100
    seconds: Annotated[float | None, Flag("S", "At most so long, each timing: 1 on a GPU, 0.1 on a CPU.")] = None
    memory_limit: Annotated[int | None, Flag("SIZE", "Cap on memory, such as 24GB.", parse_bytes)] = None

    def cases(self, device: str) -> tuple[AttentionCase, ...]:
        """All cases on `device`, each once: those of one implementation together, in the order they were named."""
        defaults = _ON_CPU if device == "cpu" else _ON_CUDA
        product = itertools.product(
            self.implementation or defaults.implementation,
            self.precision or defaults.precision,
            self.head_dim or defaults.head_dim,
            self.length or defaults.length,
        )
        cases = (
            AttentionCase(
                implementation=cast(Implementation, implementation),
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
            if self.implementation or implementation != "tiled" or length <= LONGEST_TILED
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

    collective: Annotated[tuple[str, ...], Flag("NAME,…", f"Of {', '.join(COLLECTIVES)}.  [default: all]")] = ()
    sizes: Annotated[tuple[int, ...], Flag("SIZE,…", "Whole messages, such as 1MB,1GB (decimal).", parse_bytes)] = ()
    ranks: Annotated[tuple[int, ...], Flag("N,…", "How many processes.  [default: 2,4 on a CPU]")] = ()
    backend: Annotated[str | None, Flag("gloo|nccl", "gloo on a CPU, nccl on GPUs.")] = None
    device: Annotated[str, Flag("auto|cpu|cuda", "Where the tensors are; on CUDA rank r takes GPU r.")] = "auto"
    dtype: Annotated[tuple[str, ...], Flag("fp32|bf16|fp16,…", "Of the elements.  [default: fp32]")] = ()
    repetitions: Annotated[int, Flag("N", "At most so many.  [default: 20]")] = 20
    seconds: Annotated[float | None, Flag("S", "At most so long, each case: 1 on GPUs, 0.2 on a CPU.")] = None

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

"""What a collective costs between ranks, as a line: a latency and a bandwidth, kept so that others can predict with it.

`stepscope comm` fits them and writes them twice: into the user's cache, where a prediction on this machine finds them,
and beside its results, in a file that can be carried to where there is no such network.
"""

import os
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Literal, get_args

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import cache_folder, decode, read_plain, write_atomically, writing

# In the order of tables.
Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "broadcast"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
Backend = Literal["gloo", "nccl"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

LINKS_NAME = "links.json"
_INTERFACE_VARIABLE: Mapping[Backend, str] = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of one collective: `latency_ns` and the message at `bytes_per_s`.

    Where it was fitted, `residual` is the root mean square of the relative error over the `sizes` it was fitted to, and
    the smallest and largest message say how far it can be trusted.
    """

    latency_ns: float
    bytes_per_s: float
    residual: float | None = None
    sizes: int = 0
    smallest_bytes: int | None = None
    largest_bytes: int | None = None

    def __post_init__(self) -> None:
        if not (self.latency_ns >= 0 and self.bytes_per_s > 0):
            raise ValueError(f"no link: `latency_ns` {self.latency_ns}, `bytes_per_s` {self.bytes_per_s}")

    def time_ns(self, message_bytes: float) -> float:
        """Nothing to send takes no time: the collective is not called."""
        return self.latency_ns + message_bytes / self.bytes_per_s * 1e9 if message_bytes else 0.0


class LinkPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Between whom: what a link is found by. `interface` is the network interface that was asked for, if one was."""

    backend: Backend
    device_name: str
    ranks: int
    hosts: int = 1
    interface: str | None = None
    dtype: Dtype = "fp32"


class Links(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that is known of one place."""

    place: LinkPlace
    links: dict[Collective, Link]
    measured: str = ""  # when

    def __post_init__(self) -> None:
        if self.measured:
            datetime.fromisoformat(self.measured)

    def time_ns(self, collective: Collective, message_bytes: float) -> float:
        """One rank has nobody to talk to. Raises a ValueError where this collective was not measured: another's figure
        would be a guess."""
        if self.place.ranks == 1:
            return 0.0
        if collective not in self.links:
            raise ValueError(f"no `{collective}` among the links, which hold {', '.join(self.links) or 'nothing'}")
        return self.links[collective].time_ns(message_bytes)


def named_interface(backend: Backend) -> str | None:
    """The interface that the environment asks the backend to use."""
    return os.environ.get(_INTERFACE_VARIABLE[backend]) or None


def links_path() -> Path:
    return cache_folder() / LINKS_NAME


def find_links(place: LinkPlace, path: Path | None = None) -> Links | None:
    """What is known of a place: from a file that was carried here, or from this machine's cache."""
    return next((one for one in read_links(path or links_path(), missing_ok=path is None) if one.place == place), None)


def read_links(path: Path, *, missing_ok: bool = False) -> tuple[Links, ...]:
    """All places of a file. One that cannot be read is an error: to pass over it would predict from something else."""
    try:
        return decode(read_plain(path), tuple[Links, ...])
    except (FileNotFoundError, NotADirectoryError):
        if missing_ok:
            return ()
        raise StepscopeError(f"no file of links: `{path}`", hint="stepscope comm") from None
    except (OSError, msgspec.DecodeError) as problem:
        raise StepscopeError(
            f"cannot read the links: `{path}`", detail=str(problem), hint=f"rm {path} && stepscope comm"
        ) from None


def keep_links(found: Iterable[Links], path: Path | None = None) -> Path:
    """Writes over what was known of the same collectives between the same ranks, and keeps the rest; returns the file.
    It is there whole or as it was before."""
    path = path or links_path()
    known = {one.place: one for one in read_links(path, missing_ok=True)}
    for one in found:
        before = known[one.place].links if one.place in known else {}
        known[one.place] = msgspec.structs.replace(one, links={**before, **one.links})
    content = msgspec.json.format(msgspec.json.encode(list(known.values())), indent=1)
    with writing(path, if_full="what was known before is still there"):
        write_atomically(path, content)
    return path

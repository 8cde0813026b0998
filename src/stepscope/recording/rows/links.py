"""Links: the latency and bandwidth of collectives between ranks, saved for predictions.

`stepscope comm` fits them and writes them twice: to the user's cache, where predictions on this machine find them, and
next to its results, in a file that can be copied to another machine.
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
    """The time of one collective: `latency_ns` plus the message at `bytes_per_s`.

    For a fitted link, `residual` is the root mean square of the relative error over the `sizes` of the fit, and the
    smallest and largest message are the range in which it is valid.
    """

    latency_ns: float
    bytes_per_s: float
    residual: float | None = None
    sizes: int = 0
    smallest_bytes: int | None = None
    largest_bytes: int | None = None

    def __post_init__(self) -> None:
        if not (self.latency_ns >= 0 and self.bytes_per_s > 0):
            raise ValueError(f"invalid link: `latency_ns` {self.latency_ns}, `bytes_per_s` {self.bytes_per_s}")

    def time_ns(self, message_bytes: float) -> float:
        """Predicted time; 0 for an empty message, since the collective is not called."""
        return self.latency_ns + message_bytes / self.bytes_per_s * 1e9 if message_bytes else 0.0


class LinkPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The setup that a link was measured in, used to look it up. `interface` is the requested network interface."""

    backend: Backend
    device_name: str
    ranks: int
    hosts: int = 1
    interface: str | None = None
    dtype: Dtype = "fp32"


class Links(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The links of one place."""

    place: LinkPlace
    links: dict[Collective, Link]
    measured: str = ""  # timestamp

    def __post_init__(self) -> None:
        if self.measured:
            datetime.fromisoformat(self.measured)

    def time_ns(self, collective: Collective, message_bytes: float) -> float:
        """Predicted time; 0 for one rank. Raise ValueError if this collective was not measured."""
        if self.place.ranks == 1:
            return 0.0
        if collective not in self.links:
            raise ValueError(f"no link for `{collective}`; measured: {', '.join(self.links) or 'none'}")
        return self.links[collective].time_ns(message_bytes)


def named_interface(backend: Backend) -> str | None:
    """The network interface that the environment sets for the backend."""
    return os.environ.get(_INTERFACE_VARIABLE[backend]) or None


def links_path() -> Path:
    return cache_folder() / LINKS_NAME


def find_links(place: LinkPlace, path: Path | None = None) -> Links | None:
    """Return the links of a place, from `path` or from the cache of this machine."""
    return next((one for one in read_links(path or links_path(), missing_ok=path is None) if one.place == place), None)


def read_links(path: Path, *, missing_ok: bool = False) -> tuple[Links, ...]:
    """Return the links of all places in a file. An unreadable file is an error, not an empty result."""
    try:
        return decode(read_plain(path), tuple[Links, ...])
    except (FileNotFoundError, NotADirectoryError):
        if missing_ok:
            return ()
        raise StepscopeError(f"links file not found: `{path}`", hint="stepscope comm") from None
    except (OSError, msgspec.DecodeError) as problem:
        raise StepscopeError(
            f"cannot read the links file: `{path}`", detail=str(problem), hint=f"rm {path} && stepscope comm"
        ) from None


def keep_links(found: Iterable[Links], path: Path | None = None) -> Path:
    """Save links, replacing those of the same place and collective and keeping the rest. The file is written
    atomically; return its path."""
    path = path or links_path()
    known = {one.place: one for one in read_links(path, missing_ok=True)}
    for one in found:
        before = known[one.place].links if one.place in known else {}
        known[one.place] = msgspec.structs.replace(one, links={**before, **one.links})
    content = msgspec.json.format(msgspec.json.encode(list(known.values())), indent=1)
    with writing(path, if_full="the old links are unchanged"):
        write_atomically(path, content)
    return path

"""Two network namespaces joined by a link of a chosen speed, for ranks on one machine. Requires root, `ip` and `tc`.

Loopback hides what a network does to training: it is as fast as memory and has no queue. Here each rank has its own
namespace with one end of a virtual cable, and a token bucket limits the rate of each end, such as `1gbit`.

    with shaped_link("1gbit") as sides: ...        # in a separate process for each: `enter(side)`, then join the group
    sudo python bench/shaped_link.py remove        # removes what a killed run left behind; so does the next run

Namespaces are removed at the end, unless the process gets SIGKILL; those are removed by the next run. A run in progress
is not disturbed: its namespaces have processes in them, which is an error here.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNET = 0x40000000
# What fits into the burst passes at once, so it is as small as the fastest rate allows.
BURST, QUEUE = "1mb", "50ms"


class LinkError(Exception):
    """The link cannot be created here. The text says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One end: a namespace and the interface in it."""

    namespace: str
    interface: str
    address: str


SIDES = (
    Side(namespace="stepscope-0", interface="scope0", address="10.77.0.1"),
    Side(namespace="stepscope-1", interface="scope1", address="10.77.0.2"),
)


@contextmanager
def shaped_link(rate: str) -> Iterator[tuple[Side, Side]]:
    """Both ends of a link that carries `rate` in each direction."""
    require_root()
    remove_leftovers()
    try:
        _make(rate)
        yield SIDES
    finally:
        _remove()


def enter(side: Side) -> None:
    """Move this thread, and those it starts from now on, into a side's namespace, and make gloo use its interface."""
    with (Path("/run/netns") / side.namespace).open() as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns into {side.namespace}")
    os.environ["GLOO_SOCKET_IFNAME"] = side.interface


def require_root() -> None:
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise LinkError(f"`{missing[0]}` is not installed; hint: apt-get install iproute2")
    if os.geteuid() != 0:
        raise LinkError("network namespaces require root; hint: sudo, or --networks loopback")


def remove_leftovers() -> None:
    """Remove what a killed run left behind, but never what one is using."""
    for side in SIDES:
        if _exists(side):
            if processes := _ip("netns", "pids", side.namespace).split():
                raise LinkError(
                    f"the namespace {side.namespace} is in use by process {processes[0]}: another run is in progress"
                )
            _ip("netns", "delete", side.namespace)


def _exists(side: Side) -> bool:
    return (Path("/run/netns") / side.namespace).exists()


def _make(rate: str) -> None:
    first, second = SIDES
    for side in SIDES:
        _ip("netns", "add", side.namespace)
        _ip("-n", side.namespace, "link", "set", "lo", "up")
    ends = ["netns", first.namespace, "type", "veth", "peer", "name", second.interface, "netns", second.namespace]
    _ip("link", "add", first.interface, *ends)
    for side in SIDES:
        _ip("-n", side.namespace, "address", "add", f"{side.address}/24", "dev", side.interface)
        _ip("-n", side.namespace, "link", "set", side.interface, "up")
        shape = ["root", "tbf", "rate", rate, "burst", BURST, "latency", QUEUE]
        _ip("netns", "exec", side.namespace, "tc", "qdisc", "add", "dev", side.interface, *shape)


def _remove() -> None:
    """The cable is removed with the namespaces that hold its ends."""
    for side in SIDES:
        if _exists(side):
            _ip("netns", "delete", side.namespace)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    if sys.argv[1:] != ["remove"]:
        sys.exit("usage: python bench/shaped_link.py remove")
    try:
        require_root()
        remove_leftovers()
    except LinkError as error:
        sys.exit(f"error: {error}")

"""Training on several devices: DDP in four ways, a sharded optimizer, FSDP, and the collectives under them.

This package imports torch on first use: processes that start and watch ranks do not need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.parallel.communicator import Communicator
    from stepscope.parallel.ddp import DDP
    from stepscope.parallel.fsdp import FSDP
    from stepscope.parallel.sharded_optimizer import ShardedOptimizer

__all__ = ["DDP", "FSDP", "Communicator", "ShardedOptimizer"]

_HOMES = {"DDP": "ddp", "FSDP": "fsdp", "Communicator": "communicator", "ShardedOptimizer": "sharded_optimizer"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

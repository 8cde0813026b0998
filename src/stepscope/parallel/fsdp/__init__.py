"""Fully sharded data parallelism: `wrapper.py` says what is where."""

from stepscope.parallel.fsdp.wrapper import FSDP

__all__ = ["FSDP"]

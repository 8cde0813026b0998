"""Fully sharded data parallelism: see `wrapper.py` for an overview."""

from stepscope.parallel.fsdp.wrapper import FSDP

__all__ = ["FSDP"]

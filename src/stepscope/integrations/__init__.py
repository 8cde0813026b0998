"""Callbacks for training libraries. Each library is imported only if its callback is used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.integrations.lightning import LightningCallback
    from stepscope.integrations.transformers import TransformersCallback

__all__ = ["LightningCallback", "TransformersCallback"]

_HOMES = {"LightningCallback": "lightning", "TransformersCallback": "transformers"}

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

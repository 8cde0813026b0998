"""What is whose: a module has one wrapper at a time, and a piece of a sharded parameter is no whole one.

Two wrappers around one module would take its gradients from each other, without an error. So a wrapper leaves its mark
on every module in it, for as long as it lives.
"""

import weakref

from torch import Tensor, nn

_MARK = "_stepscope_wrapper"
_PIECE = "_stepscope_piece"


def claim(module: nn.Module, wrapper: nn.Module) -> None:
    """Marks `module` and all inside as the wrapper's, unless another has any of it."""
    parts = list(module.modules())
    for part in parts:
        reference = part.__dict__.get(_MARK)
        other = part if hasattr(part, "finish_gradient_synchronization") else reference and reference()
        if other is not None:
            raise ValueError(f"`module` is wrapped in {type(other).__name__} already, or a part of it is")
    for part in parts:
        part.__dict__[_MARK] = weakref.ref(wrapper)


def mark_piece(param: nn.Parameter) -> None:
    setattr(param, _PIECE, True)


def is_piece(param: Tensor) -> bool:
    """A part of a parameter, of which other ranks have the others."""
    return getattr(param, _PIECE, False)

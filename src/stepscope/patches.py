"""Replaces attributes of other people's code while a recorder runs, and restores them.

Every change is registered in an `ExitStack`, whose closing undoes it: an attribute that was there is put back, one that
was inherited is uncovered.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stepscope.annotate import wrap

if TYPE_CHECKING:
    from torch import nn


def replace_attribute(holder: Any, attribute: str, value: object, undo: ExitStack) -> None:
    """Set an attribute, and restore it on `undo`."""
    if attribute in vars(holder):
        undo.callback(setattr, holder, attribute, vars(holder)[attribute])
    else:
        undo.callback(delattr, holder, attribute)
    setattr(holder, attribute, value)


def replace_function(holder: Any, attribute: str, function: Callable[..., Any], undo: ExitStack) -> None:
    """Replace a function where it is defined, and in every loaded module that imported it under the same name. Other
    references (an alias, a table entry, a default argument) are not replaced."""
    found = vars(holder)[attribute]
    replacement = type(found)(function) if isinstance(found, staticmethod | classmethod) else function
    replace_attribute(holder, attribute, replacement, undo)
    if isinstance(holder, ModuleType):
        for module in list(sys.modules.values()):
            if (getattr(module, "__dict__", None) or {}).get(attribute) is found:
                replace_attribute(module, attribute, replacement, undo)


def annotate_module(module: "nn.Module", name: str, undo: ExitStack) -> None:
    """Put a range around every call of a module."""
    import torch

    if isinstance(module, torch.jit.ScriptModule):
        return
    if module._compiled_call_impl is not None:  # after `module.compile()`, the range goes around the compiled call
        replace_attribute(module, "_compiled_call_impl", wrap(module._compiled_call_impl, name), undo)
    else:
        replace_attribute(module, "forward", wrap(module.forward, name), undo)


def is_compiled(module: "nn.Module") -> bool:
    """Whether `torch.compile` or `module.compile()` was applied to a module. Nothing is compiled before the compiler is
    loaded, so it is not loaded here."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return (dynamo is not None and isinstance(module, dynamo.OptimizedModule)) or (
        module._compiled_call_impl is not None
    )


def is_inside_compiled(root: "nn.Module", name: str) -> bool:
    """Whether a parent module is compiled. Users may compile part of a model."""
    parents = name.split(".")[:-1]
    return any(is_compiled(root.get_submodule(".".join(parents[:depth]))) for depth in range(len(parents) + 1))

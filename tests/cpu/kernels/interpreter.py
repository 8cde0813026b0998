"""bf16 in Triton's interpreter, fixed for the tests that run kernels in it.

The interpreter of triton 3.7.1 keeps bf16 as bit patterns in 16-bit integers. A matmul of two bf16 tiles silently
multiplies the patterns as if they were integers, and a cast from fp32 truncates instead of rounding. Kernels that
compute in fp32 and use bf16 only for loads, stores and the operands of `tl.dot` need no more than this.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime import interpreter

_Array = npt.NDArray[Any]
_Handle = interpreter.TensorHandle  # an array and its type
_Builder = interpreter.InterpreterBuilder


def prepare() -> None:
    """Call once, with TRITON_INTERPRET set since before triton was imported."""
    _repair_bf16()
    _hasten_calls()


def _hasten_calls() -> None:
    """A launch replaces Triton's language with one that computes, and a call within it does so again: half of the run
    time.

    It is needed once for Triton's own functions, which know the language under another name than kernels do.
    """
    slow_call = interpreter.InterpretedFunction.__call__
    ready: set[str] = set()

    def call(function: Any, *args: Any, **options: Any) -> Any:
        module = function.fn.__module__
        if module.startswith("triton.") and module not in ready:
            ready.add(module)
            return slow_call(function, *args, **options)
        return function.rewrite()(*args, **options)

    interpreter.InterpretedFunction.__call__ = call


def _repair_bf16() -> None:
    unrepaired_cast, unrepaired_dot = _Builder.cast_impl, _Builder.create_dot

    def cast(builder: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.bfloat16:
            source = _Handle(_widen(source.data), tl.float32)
        if target.scalar == tl.bfloat16:
            return _Handle(_narrow(unrepaired_cast(builder, source, tl.float32).data), tl.bfloat16)
        return unrepaired_cast(builder, source, target)

    def dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (_Handle(_widen(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return unrepaired_dot(builder, a, b, *others)

    _Builder.cast_impl, _Builder.create_dot = cast, dot


def _widen(bits: _Array) -> _Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _narrow(values: _Array) -> _Array:
    rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16)

"""bf16 in Triton's interpreter, fixed for the tests that run kernels in it.

The interpreter of triton 3.7.1 keeps bf16 as bit patterns in 16-bit integers. A matmul of two bf16 tiles silently
multiplies the patterns as if they were integers, and a cast from fp32 truncates instead of rounding. Kernels that
compute in fp32 and use bf16 only for loads, stores and the operands of `tl.dot` need no more than this.
"""

from dataclasses import replace
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
    _hasten_values()


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


def _hasten_values() -> None:
    """Triton derives the NumPy type, shape and size of every value anew: a fifth of the run time. It also looks for
    overflow after every operation on integers, and ignores what it finds unless kernels are debugged: a third."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)

    numpy_type, numpy_types = interpreter._get_np_dtype, dict[str, Any]()
    slow_block, blocks = tl.block_type.__init__, dict[Any, dict[str, Any]]()
    slow_tensor, sizes = tl.tensor.__init__, dict[Any, tuple[Any, Any]]()

    def numpy_type_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(kind)
        return numpy_types[name]

    def block(self: Any, element: Any, shape: Any) -> None:
        key = (element.name, *shape)
        if key in blocks:
            self.__dict__.update(blocks[key])
        else:
            slow_block(self, element, shape)
            blocks[key] = dict(self.__dict__)

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        key = tuple(kind.shape.values) if kind.is_block() else ()
        if key in sizes:
            self.handle, self.type, self.dtype = handle, kind, kind.scalar
            self.numel, self.shape = sizes[key]
        else:
            slow_tensor(self, handle, kind)
            sizes[key] = self.numel, self.shape

    interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__ = numpy_type_of, block, tensor


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

"""What a simulation cannot run, said to the user: which operation needs values, and on which line."""

import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

import stepscope
from stepscope.errors import StepscopeError

_LIBRARIES = (
    *(str(Path(module.__file__ or "").parent) for module in (torch, stepscope)),
    str(Path(linecache.__file__ or "").parent / "contextlib.py"),
    "<",
)
# What Python code calls the operators that need values.
_NAMES = {
    "aten._local_scalar_dense.default": "the value of a tensor (`.item()`, `.tolist()`, or a tensor as a condition)",
    "aten.nonzero.default": "the positions of nonzero elements",
    "aten.masked_select.default": "the elements that a mask selects",
    "aten.equal.default": "whether two tensors are equal (`torch.equal`)",
}


@contextmanager
def refusing() -> Iterator[None]:
    """Turn what cannot be simulated into a StepscopeError that says what and where."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        name = str(error.func)
        needed = _NAMES.get(name, f"what `{name}` returns")
        raise _refusal(
            f"this model needs {needed}, which a simulation does not have",
            error,
            "measure it on a GPU: stepscope bench",
        ) from error
    except UnsupportedOperatorException as error:
        raise _refusal(
            f"the operator `{error.func}` has no fake implementation",
            error,
            "register one with torch.library.register_fake",
        ) from error
    except UnsupportedFakeTensorException as error:
        raise _refusal(f"a tensor cannot be simulated: {error}", error, "") from error


def _refusal(message: str, error: BaseException, hint: str) -> StepscopeError:
    return StepscopeError(message, detail=_find_line(error.__traceback__), hint=hint)


def _find_line(traceback: TracebackType | None) -> str:
    """The innermost line outside PyTorch and stepscope, or the innermost of all."""
    found = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not code.co_filename.startswith(_LIBRARIES):
            line = linecache.getline(code.co_filename, traceback.tb_lineno).strip()
            found = f"{code.co_filename}:{traceback.tb_lineno} in {code.co_name}: {line}"
        traceback = traceback.tb_next
    return found

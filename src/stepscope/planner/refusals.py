"""What a simulation cannot run, said to the user: which operation needs values, and on which line."""

import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import nn
from torch._library.utils import is_builtin
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
    "aten.allclose.default": "whether two tensors are close (`torch.allclose`)",
    "aten._unique2.default": "the distinct elements of a tensor (`torch.unique`)",
    "aten.unique_dim.default": "the distinct elements of a tensor (`torch.unique`)",
    "aten.unique_consecutive.default": "the distinct elements of a tensor (`torch.unique_consecutive`)",
    "aten.bincount.default": "how often a number occurs (`torch.bincount`)",
    "aten.repeat_interleave.Tensor": "how often an element is repeated (`torch.repeat_interleave`)",
}
_TOO_LARGE = "Storage size calculation overflowed"
_MEASURE = "measure it on a GPU: stepscope bench"
_GROUPED = 'compute the experts in groups: from_config(config, experts_implementation="grouped_mm")'


class NotSimulatedError(Exception):
    """A program does something that is not simulated. `refusing` adds the line."""

    def __init__(self, what: str, hint: str = _MEASURE) -> None:
        super().__init__(what)
        self.hint = hint


@contextmanager
def refusing() -> Iterator[None]:
    """Turn what cannot be simulated into a StepscopeError that says what and where."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        name = str(error.func)
        raise _refuse_value(_NAMES.get(name, f"what `{name}` returns"), error) from error
    except UnsupportedOperatorException as error:
        raise _refusal(
            f"the operator `{error.func}` has no fake implementation",
            error,
            _MEASURE if is_builtin(error.func) else "register one with torch.library.register_fake",
        ) from error
    except UnsupportedFakeTensorException as error:
        raise _refusal(f"a tensor cannot be simulated: {error}", error, _MEASURE) from error
    except NotSimulatedError as error:
        raise _refusal(str(error), error, error.hint) from error
    except RuntimeError as error:
        if str(error).startswith(_TOO_LARGE):
            raise StepscopeError(
                "a tensor is too large for PyTorch",
                detail=str(error),
                hint="use a smaller --batch or --context",
            ) from error
        if not str(error).startswith(".numpy() is not supported"):
            raise
        raise _refuse_value("the values of a tensor (`.numpy()`)", error) from error


def _refuse_value(needed: str, error: BaseException) -> StepscopeError:
    hint = _GROUPED if _loops_over_experts(error.__traceback__) else _MEASURE
    return _refusal(f"this model needs {needed}, which a simulation does not have", error, hint)


def _loops_over_experts(traceback: TracebackType | None) -> bool:
    """Whether `transformers` looks for the tokens of each expert, in a model that could compute them in groups. The
    sizes of groups are values, too, but no shape depends on them."""
    modules = [one for frame in _frames(traceback) if isinstance(one := frame.f_locals.get("self"), nn.Module)]
    choices = (getattr(one, "_can_set_experts_implementation", None) for one in modules)
    return bool(modules) and hasattr(modules[-1], "num_experts") and any(can and can() for can in choices)


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


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next

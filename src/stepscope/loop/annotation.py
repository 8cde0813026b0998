"""Names for the parts of a user's loop while its steps are recorded: modules, clipping, the scheduler, checkpoints,
logging and explicit synchronizations. Backward passes and batches have their names from `watch`, optimizer steps from
PyTorch.

The model is found among the live objects, by the parameters of the optimizers: nobody passes it to us.
"""

import builtins
import gc
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer

from stepscope.annotate import activate, open_range, wrap
from stepscope.loop.source_lines import classify_file, find_caller
from stepscope.patches import is_compiled, replace_attribute, replace_function

# Functions by the phase that their calls are; those of modules that are not loaded cannot be called.
_FUNCTIONS = {
    "clipping": ("torch.nn.utils.clip_grad:clip_grad_norm_", "torch.nn.utils.clip_grad:clip_grad_value_"),
    "checkpoint": ("torch.serialization:save", "torch.distributed.checkpoint.state_dict_saver:save"),
}
_SYNCHRONIZING = (
    ("torch.cuda:synchronize", "torch.cuda.synchronize"),
    ("torch.cuda.streams:Event.synchronize", "Event.synchronize"),
    ("torch.cuda.streams:Stream.synchronize", "Stream.synchronize"),
)
SYNC = "sync:"
BETWEEN = "@"  # between the name of a synchronization and its line
# Modules around the user's model, as they appear in the names of its parts.
_WRAPPED = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?:\.|$)")
_WRAPPERS = (
    "DistributedDataParallel",
    "DataParallel",
    "FullyShardedDataParallel",
    "OptimizedModule",
    "CheckpointWrapper",
)
_LOSS = re.compile(r"Loss|Criterion|CrossEntropy")
_LOADING = re.compile(r"(?:get|next|load|fetch|sample|prepare|make)_(?:\w+_)?(?:batch|batches)")
_PARALLEL = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


@contextmanager
def annotating(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Name the parts of the loop within this context. Enter it while the profiler runs."""
    with ExitStack() as undo:
        undo.enter_context(activate("profiler"))
        for phase, targets in _FUNCTIONS.items():
            for target in targets:
                _replace(target, partial(wrap, name=f"phase:{phase}"), undo)
        for scheduler in (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau):
            replace_attribute(scheduler, "step", wrap(scheduler.step, "phase:scheduler"), undo)
        replace_attribute(builtins, "print", wrap(print, "phase:logging"), undo)
        replace_attribute(logging.Logger, "handle", wrap(logging.Logger.handle, "phase:logging"), undo)
        for target, name in _SYNCHRONIZING:
            _replace(target, partial(_wrap_sync, name=name), undo)
        _annotate_loading(undo)
        _name_calls(roots, undo)
        yield


def _annotate_loading(undo: ExitStack) -> None:
    """Loops without a DataLoader have a function of their own for the next batch, by one of few names."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or classify_file(file) != "user":
            continue
        for name, found in list(vars(module).items()):
            if isinstance(found, FunctionType) and found.__module__ == module.__name__ and _LOADING.fullmatch(name):
                replace_function(module, name, wrap(found, "phase:input"), undo)


def _replace(target: str, make: Callable[[Any], Callable[..., Any]], undo: ExitStack) -> None:
    module_name, _, path = target.partition(":")
    holder: Any = sys.modules.get(module_name)
    *outer, attribute = path.split(".")
    for part in outer:
        holder = getattr(holder, part, None)
    if holder is not None and attribute in vars(holder):
        replace_function(holder, attribute, make(vars(holder)[attribute]), undo)


def _wrap_sync(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(function)
    def synchronize(*args: Any, **kwargs: Any) -> Any:
        close = open_range(f"{SYNC}{name}{BETWEEN}{find_caller()}")
        try:
            return function(*args, **kwargs)
        finally:
            close()

    return synchronize


def _name_calls(roots: Sequence[nn.Module], undo: ExitStack) -> None:
    """Put a range around every call of a module. The call is replaced in the class of all modules, and not in each of
    them: a model that is copied or saved in a recorded step must have no trace of this. Compiled code calls nothing."""
    names, original = name_modules(roots), nn.Module.__call__
    models = {id(root) for root in roots}

    def enter(module: nn.Module) -> ExitStack | None:
        if (name := names.get(id(module))) is None:
            return None
        closing = ExitStack()
        # A model in evaluation mode is not training, whatever calls it inside a step.
        if id(module) in models and not module.training:
            closing.callback(open_range("phase:validation"))
        if name:
            closing.callback(open_range(f"module:{name}"))
        return closing

    def leave(closing: ExitStack) -> None:
        closing.close()

    @wraps(original)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or (closing := enter(module)) is None:
            return original(module, *args, **kwargs)
        try:
            return original(module, *args, **kwargs)
        finally:
            leave(closing)

    if "torch._dynamo" in sys.modules:
        # Between two parts of a model with a graph break, modules are called with the compiler on: it may compile them,
        # and none of this.
        disable: Any = torch.compiler.disable
        enter, leave = disable(enter), disable(leave)
        call = disable(call, recursive=False)
    named = _NamedCall(original, call)
    # Code is traced with the original call, as it would be without a recorder.
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if handler is not None:
        start = handler.register_start_callback(lambda *_: setattr(nn.Module, "__call__", original))
        undo.callback(handler.remove_start_callback, start)
        end = handler.register_end_callback(lambda *_: setattr(nn.Module, "__call__", named))
        undo.callback(handler.remove_end_callback, end)
    replace_attribute(nn.Module, "__call__", named, undo)


class _NamedCall:
    """A method whose instances call another function. The class still has the original: compiled code looks for it
    there, and would be compiled again if it found another one."""

    def __init__(self, original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
        self._original, self._replacement = original, replacement

    def __get__(self, module: nn.Module | None, kind: type) -> Callable[..., Any]:
        return self._original if module is None else MethodType(self._replacement, module)


def name_modules(roots: Sequence[nn.Module]) -> dict[int, str]:
    """Return the names of all modules by their ids. A wrapper of PyTorch has no name, unless it is compiled: then
    it has that of the module inside, which compiled code does not call."""
    several = len([root for root in roots if any(True for _ in root.parameters())]) > 1
    names = {}
    for root in roots:
        model = type(unwrap(root)).__name__
        for path, module in root.named_modules():
            name = _WRAPPED.sub("", path).rstrip(".")
            is_wrapper = type(module).__name__ in _WRAPPERS and module is not unwrap(module)
            if is_wrapper and not is_compiled(module):
                names[id(module)] = ""
            elif not name:
                names[id(module)] = f"({model})"
            else:
                names[id(module)] = f"{model}.{name}" if several else name
    return names


def find_roots(optimizers: Sequence[Optimizer]) -> list[nn.Module]:
    """Return the outermost modules, the largest first: those with parameters of the optimizers, and losses."""
    trained = {id(parameter) for one in optimizers for group in one.param_groups for parameter in group["params"]}
    modules = [one for one in gc.get_objects() if _is_module(one)]
    inside = {id(child) for module in modules for child in module.modules() if child is not module}
    sizes = []
    for module in modules:
        if id(module) in inside:
            continue
        parameters = list(module.parameters())
        is_loss = not parameters and _LOSS.search(type(module).__name__) is not None
        if is_loss or any(id(parameter) in trained for parameter in parameters):
            sizes.append((sum(one.numel() for one in parameters), module))
    return [module for _, module in sorted(sizes, key=lambda one: -one[0])]


def _is_module(one: object) -> bool:
    # `isinstance` would ask proxies and lazy objects for their class, which may run code.
    kind = type(one)
    return issubclass(kind, nn.Module) and not issubclass(kind, torch.jit.ScriptModule) and "_modules" in vars(one)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's module inside wrappers of PyTorch."""
    while type(module).__name__ in _WRAPPERS:
        children = list(module.children())
        if len(children) != 1:
            break
        module = children[0]
    return module


def list_wrappers(roots: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> tuple[str, ...]:
    """The classes that make models and optimizers parallel."""
    names: dict[str, None] = {}
    for root in roots:
        for module in root.modules():
            names |= dict.fromkeys(one.__name__ for one in type(module).__mro__ if one.__name__ in _PARALLEL)
    names |= dict.fromkeys(
        one.__name__ for optimizer in optimizers for one in type(optimizer).__mro__ if "ZeroRedundancy" in one.__name__
    )
    return tuple(names)

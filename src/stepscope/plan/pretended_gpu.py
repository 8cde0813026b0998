"""What the process believes while a step is simulated: that the GPU is there, and that its tensors are ordinary.

PyTorch, Triton and `transformers` ask whether CUDA is available, or whether a tensor is fake, and do something else if
so. Each change here makes them do what they do on the GPU. All are undone on exit, except for kernels registered with
the dispatcher, which only fake CUDA tensors reach.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer as optimizer_module

from stepscope.patches import replace_attribute
from stepscope.plan import sdpa
from stepscope.plan.assumptions import Accelerator

# Operators with a CUDA kernel and a decomposition, which a build without CUDA would use instead. Any kernel under the
# CUDA key turns the decomposition off; fake tensors never call it. Of all operators in 2.11 to 2.13, these have both.
FUSED = ("silu_backward", "mish_backward", "_fused_rms_norm")
_library: torch.library.Library | None = None


class GpuFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors without real ones behind them. PyTorch asks whether CUDA is available, and if so moves constants
    there."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    @property
    def avoid_device_init(self) -> bool:
        return True


@contextmanager
def pretended_gpu(gpu: Accelerator) -> Iterator[None]:
    """Pretend within this context that `gpu` is device 0."""
    _keep_fused()
    sdpa.install(gpu)
    with ExitStack() as undo:
        _describe_device(gpu, undo)
        replace_attribute(fake_tensor, "init_gpu_context", lambda _device: None, undo)
        # Fake parameters have this type, and PyTorch would take one-by-one optimizers for types it does not know.
        kinds = [*optimizer_module._foreach_supported_types, FakeTensor]
        replace_attribute(optimizer_module, "_foreach_supported_types", kinds, undo)
        replace_attribute(torch.utils, "swap_tensors", _move_data, undo)
        _skip_initialization(undo)
        _skip_loss_scale_checks(undo)
        _skip_launches(undo)
        _trust_tensors(undo)
        yield


def _keep_fused() -> None:
    global _library
    if torch.version.cuda is None and _library is None:
        _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name in FUSED:
            _library.impl(name, _never, "CUDA")  # type: ignore[no-untyped-call]


def _never(*_: Any, **__: Any) -> None:
    raise AssertionError("a fake tensor reached a kernel")


def _describe_device(gpu: Accelerator, undo: ExitStack) -> None:
    """Replace the functions of `torch.cuda` that ask the driver."""
    properties = SimpleNamespace(
        name=f"NVIDIA {gpu.name}",
        major=gpu.capability[0],
        minor=gpu.capability[1],
        total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.multiprocessors,
        max_threads_per_multi_processor=gpu.threads_per_multiprocessor,
        warp_size=32,
        regs_per_multiprocessor=65536,
        shared_memory_per_multiprocessor=233472,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 << 20,
        is_integrated=False,
        gcnArchName="",
    )
    stream = SimpleNamespace(
        cuda_stream=0, wait_stream=_nothing, wait_event=_nothing, synchronize=_nothing, record_event=_nothing
    )
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_exchange_device": lambda *_: 0,
        "_maybe_exchange_device": lambda *_: 0,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_properties": lambda *_, **__: properties,
        "get_device_capability": lambda *_, **__: gpu.capability,
        "get_device_name": lambda *_, **__: properties.name,
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda *_, **__: stream,
        "mem_get_info": lambda *_, **__: (gpu.memory_bytes, gpu.memory_bytes),
    }
    for name in ("_lazy_init", "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        answers[name] = _nothing
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        answers[name] = lambda *_, **__: 0
    for name, answer in answers.items():
        replace_attribute(torch.cuda, name, answer, undo)
    replace_attribute(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False, undo)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _move_data(parameter: Tensor, moved: Tensor) -> None:
    """Give a parameter the data of another, as `Module.to` does. For fake tensors, PyTorch would swap the objects,
    which is impossible if anything refers to them."""
    with torch.no_grad():
        parameter.data = moved
    if isinstance(parameter, FakeTensor):
        parameter.fake_device = moved.device


def _skip_initialization(undo: ExitStack) -> None:
    """Initial values are never read, and drawing truncated normal numbers repeats until all are in bounds. A library
    may have kept the functions in a table of its own."""
    originals: dict[Any, Callable[..., Any]] = {}
    for name, function in vars(nn.init).copy().items():
        if name.endswith("_") and not name.startswith("_") and callable(function):
            originals[function] = _keep_values
            replace_attribute(nn.init, name, _keep_values, undo)
    table = getattr(sys.modules.get("transformers.initialization"), "TORCH_INIT_FUNCTIONS", {})
    for name, function in list(table.items()):
        undo.callback(table.__setitem__, name, function)
        table[name] = _keep_values


def _keep_values(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor


def _skip_loss_scale_checks(undo: ExitStack) -> None:
    """A step with a loss scale asks the GPU whether a gradient is infinite. In a normal step none is."""

    def step(_scaler: object, optimizer: torch.optim.Optimizer, _state: object, *args: Any, **kwargs: Any) -> object:
        return optimizer.step(*args, **kwargs)

    replace_attribute(torch.amp.GradScaler, "_maybe_opt_step", step, undo)


def _skip_launches(undo: ExitStack) -> None:
    """Triton kernels are not compiled and not launched."""
    try:
        from triton.runtime import autotuner, jit
    except ImportError:
        return
    for kind in (jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics):
        replace_attribute(kind, "run", _nothing, undo)


def _trust_tensors(undo: ExitStack) -> None:
    """`transformers` takes fake tensors for a trace, and makes a mask that it skips in a real step."""
    if "transformers" in sys.modules or _has_transformers():
        from transformers.utils import import_utils

        replace_attribute(import_utils, "is_fake_tensor", lambda _tensor: False, undo)


def _has_transformers() -> bool:
    from importlib.util import find_spec

    return find_spec("transformers") is not None

"""What the process believes while a step is simulated: that the GPU is there, and that its tensors are ordinary.

PyTorch, Triton and `transformers` ask whether CUDA is available, or whether a tensor is fake, and do something else if
so. Each change here makes them do what they do on the GPU. All are undone on exit, except for kernels registered with
the dispatcher, which only fake CUDA tensors reach.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer as optimizer_module
from torch.utils import _foreach_utils

from stepscope.kernels.adamw import AdamWUpdates
from stepscope.patches import replace_attribute
from stepscope.planner import sdpa
from stepscope.planner.assumptions import Accelerator
from stepscope.planner.refusals import NotSimulatedError

# Operators with a CUDA kernel and a decomposition, which a build without CUDA would use instead. Any kernel under the
# CUDA key turns the decomposition off; fake tensors never call it. Of all operators in 2.11 to 2.13, these have both.
FUSED = ("silu_backward", "mish_backward", "_fused_rms_norm")
_library: torch.library.Library | None = None


class GpuFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors without real ones behind them. An operator without a fake is not run on zeros instead, which would
    need a GPU. PyTorch asks whether CUDA is available, and if so moves constants there."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)

    @property
    def avoid_device_init(self) -> bool:
        return True


@dataclass(slots=True)
class Noticed:
    """What a program did that is not simulated as it would run: code that `torch.compile` compiles ran as it is, and
    kernels of Triton, by name, did not run."""

    compiles: bool = False
    launched: set[str] = field(default_factory=set)


@contextmanager
def pretended_gpu(gpu: Accelerator) -> Iterator[Noticed]:
    """Pretend within this context that `gpu` is device 0."""
    noticed = Noticed()
    _keep_fused()
    sdpa.install(gpu)
    with ExitStack() as undo:
        _describe_device(gpu, undo)
        _refuse_calls(undo)
        replace_attribute(fake_tensor, "init_gpu_context", lambda _device: None, undo)
        # Fake parameters and gradients have this type. PyTorch would update and clip types it does not know one by one.
        for module in (optimizer_module, _foreach_utils):
            kinds = [*module._foreach_supported_types, FakeTensor]
            replace_attribute(module, "_foreach_supported_types", kinds, undo)
        replace_attribute(torch.utils, "swap_tensors", _move_data, undo)
        _skip_initialization(undo)
        _skip_loss_scale_checks(undo)
        _skip_launches(noticed, undo)
        _watch_compiler(noticed, undo)
        yield noticed


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
        "memory_summary": lambda *_, **__: "",
        "get_rng_state": lambda *_, **__: torch.zeros(16, dtype=torch.uint8, device="cpu"),
        "Event": _PretendedEvent,
    }
    for name in ("_lazy_init", "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "set_rng_state"):
        answers[name] = _nothing
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        answers[name] = lambda *_, **__: 0
    for name, answer in answers.items():
        replace_attribute(torch.cuda, name, answer, undo)
    # Recurrent layers ask for the version of cuDNN, which a build with CUDA looks for on the GPU.
    replace_attribute(torch.backends.cudnn, "is_acceptable", lambda _: False, undo)
    replace_attribute(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False, undo)


class _PretendedEvent:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.record = self.wait = self.synchronize = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: object) -> float:
        return 1.0


def _refuse_calls(undo: ExitStack) -> None:
    """Refuse what takes memory that is not modelled."""
    layers = "recurrent layers (`nn.LSTM`, `nn.GRU`, `nn.RNN`) take memory of cuDNN, which is not simulated"
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        replace_attribute(torch._VF, name, _refusing(layers), undo)
    streams = "a second stream (`torch.cuda.Stream`) has memory of its own, which is not simulated"
    replace_attribute(torch.cuda, "Stream", type("Stream", (), {"__init__": _refusing(streams)}), undo)
    # What one GPU does: it has the whole batch.
    replace_attribute(nn.DataParallel, "forward", lambda self, *args, **kwargs: self.module(*args, **kwargs), undo)


def _refusing(what: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotSimulatedError(what)

    return refuse


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


def _skip_launches(noticed: Noticed, undo: ExitStack) -> None:
    """Triton kernels are not compiled and not launched."""
    try:
        from triton.runtime import autotuner, jit
    except ImportError:
        return

    def run(kernel: Any, *_: Any, **__: Any) -> None:
        while not isinstance(kernel, jit.JITFunction):
            kernel = kernel.fn
        noticed.launched.add(kernel.__name__)

    for kind in (jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics):
        replace_attribute(kind, "run", run, undo)
    replace_attribute(AdamWUpdates, "launch_kernels", _update_at_once, undo)


def _update_at_once(updates: AdamWUpdates) -> None:
    """PyTorch's fused AdamW in place of our own, which is not an operator. It reads and writes the same tensors."""
    lists = [[getattr(one, name) for one in updates._updates] for name in ("master", "exp_avg", "exp_avg_sq")]
    steps = [updates.steps] * len(lists[0])
    torch.ops.aten._fused_adamw_.default(
        *(lists[0], updates._list.gradients, *lists[1:], [], steps),
        **dict.fromkeys(("lr", "beta1", "beta2", "weight_decay", "eps"), 0.0),
        amsgrad=False,
        maximize=False,
    )


def _watch_compiler(noticed: Noticed, undo: ExitStack) -> None:
    """The compiler leaves code alone while tensors are watched, so it would go unnoticed."""
    from torch._dynamo import convert_frame

    look = convert_frame.CatchErrorsWrapper.__call__

    def look_and_note(*args: Any, **kwargs: Any) -> Any:
        noticed.compiles = True
        return look(*args, **kwargs)

    replace_attribute(convert_frame.CatchErrorsWrapper, "__call__", look_and_note, undo)


@contextmanager
def trusted_tensors() -> Iterator[None]:
    """`transformers` takes fake tensors for a trace, and makes a mask that it skips in a real step. A model that needs
    it has imported it by the time that it exists."""
    with ExitStack() as undo:
        if "transformers" in sys.modules:
            from transformers.utils import import_utils

            replace_attribute(import_utils, "is_fake_tensor", lambda _tensor: False, undo)
        yield

"""`torch.compile` without a GPU: Inductor generates its code for the pretended one, and the code runs on fake tensors.

What is saved for backward, computed again, fused and freed early is then what Inductor decides. Its code requests every
buffer and frees it after the last use; kernels are never compiled, and calls of them do nothing. Nothing is measured
either: where Inductor would try a product with padded sizes, the times of a calibration decide, and without one it is
padded.

The compiler leaves code alone while tensors are watched. So nothing is watched while it works, and what it made is
watched while it runs.
"""

import functools
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from stepscope import hardware
from stepscope.fast import tracing
from stepscope.fast.program import without_logging
from stepscope.patches import replace_attribute, replace_function
from stepscope.planner.assumptions import Accelerator
from stepscope.planner.operation import Operation, facts_of
from stepscope.planner.refusals import NotSimulatedError
from stepscope.planner.step_time import NotCalibratedError
from stepscope.planner.step_time.kernels_of import KernelModel
from stepscope.planner.step_time.padding import is_worth_padding, pad_product

OLDEST, NEWEST = (2, 11), (2, 13)  # whose Inductor is known
_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_PADDED = "padded"
_QUERIES = {
    "get_device_properties": "get_device_properties",
    "current_device": "current_device",
    "set_device": "set_device",
    "device_count": "device_count",
    "synchronize": "synchronize",
    "current_stream": "current_stream",
    "is_bf16_supported": "is_bf16_supported",
    "exchange_device": "_exchange_device",
    "maybe_exchange_device": "_maybe_exchange_device",
}
Watching = Callable[[], AbstractContextManager[object]]


class CannotCompile(RuntimeError):  # noqa: N818 - what happened, not what is wrong with the program
    """The compiler cannot be simulated for a step: the reason."""


def why_not() -> str:
    """Why the compiler cannot be simulated here; empty if it can."""
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not OLDEST <= release <= NEWEST:
        known = " to ".join("{}.{}".format(*one) for one in (OLDEST, NEWEST))
        return f"the compiler of PyTorch {torch.__version__} cannot be simulated, only that of {known}"
    if importlib.util.find_spec("triton") is None:
        return "the compiler needs Triton, which is not installed"
    return ""


@contextmanager
def pretended_compiler(gpu: Accelerator, watching: Watching, times: KernelModel | None) -> Iterator[None]:
    """Compile for `gpu`, which is pretended and takes `times`, within this context. What was compiled runs inside
    `watching()`. CannotCompile if the compiler refuses."""
    if reason := why_not():
        raise CannotCompile(reason)
    with ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # that fake tensors have no addresses, which nobody reads
        _forget_compiled(undo)
        _answer_queries(gpu, undo)
        _fold_on_cpu(undo)
        _decide_padding(times, undo)
        _skip_kernels(undo)
        _make_fake_buffers(undo)
        _replace_compiler(watching, undo)
        try:
            yield
        except (RuntimeError, NotSimulatedError) as error:  # also those of the compiler, and of fake tensors
            raise CannotCompile(f"compilation stops at `{_summarize(error)}`") from error


def _summarize(error: Exception) -> str:
    """The line that says what is wrong. A failed backend is named before that."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[1 if lines[0].endswith("raised:") and len(lines) > 1 else 0].rstrip(".")[:200]


def _replace(holder: Any, name: str, value: object, undo: ExitStack) -> None:
    """Replace what this version of PyTorch has. Where it has nothing of this name, it works in another way."""
    if not hasattr(holder, name):
        raise CannotCompile(f"the compiler of PyTorch {torch.__version__} has no `{name}`")
    replace_attribute(holder, name, value, undo)


def _forget_compiled(undo: ExitStack) -> None:
    """Code of another simulation must not be found, in memory or on disk."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="stepscope-inductor-"))
    before = os.environ.get(_CACHE)
    os.environ[_CACHE] = folder
    undo.callback(_restore_variable, before)
    undo.enter_context(inductor.patch(compile_threads=1, fx_graph_cache=False, fx_graph_remote_cache=False))
    undo.enter_context(functorch.patch(enable_autograd_cache=False))
    undo.enter_context(dynamo.patch(automatic_dynamic_local_pgo=False))
    torch._dynamo.reset()
    undo.callback(torch._dynamo.reset)


def _restore_variable(before: str | None) -> None:
    if before is None:
        del os.environ[_CACHE]
    else:
        os.environ[_CACHE] = before


def _answer_queries(gpu: Accelerator, undo: ExitStack) -> None:
    """Answer what the compiler asks about the GPU and its driver."""
    from torch._dynamo import device_interface
    from torch._inductor import utils as inductor
    from torch.utils import _triton

    for name, source in _QUERIES.items():
        answer = functools.partial(_ask, source)
        _replace(device_interface.CudaInterface, name, staticmethod(answer), undo)
    _replace(device_interface.CudaInterface, "get_raw_stream", staticmethod(_no_stream), undo)
    _replace(device_interface, "caching_worker_device_properties", {}, undo)
    replace_attribute(torch._C, "_cuda_getCurrentRawStream", _no_stream, undo)
    _replace(FakeTensorMode, "avoid_device_init", property(lambda _mode: True), undo)
    _replace(_triton, "triton_hash_with_backend", lambda: "", undo)
    card = next((one for one in hardware.known() if one.name == gpu.name), None)
    peaks = card.peak_flops if card else {}
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    # Without an answer, a product counts as bound by arithmetic, as when the driver does not know its clock.
    replace_function(inductor, "get_device_tflops", lambda dtype: peaks[names[dtype]] / 1e12, undo)
    replace_function(
        inductor, "get_gpu_dram_gbps", lambda: card.bandwidth / 1e9 if card and card.bandwidth else 0, undo
    )


def _ask(name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(torch.cuda, name)(*args, **kwargs)


def _no_stream(_device: object) -> int:
    return 0


class _FoldingOnCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes on the CPU what would be made on a GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def move(value: Any) -> Any:
            return torch.device("cpu") if isinstance(value, torch.device) else value

        return func(*map(move, args), **{name: move(value) for name, value in (kwargs or {}).items()})


def _fold_on_cpu(undo: ExitStack) -> None:
    """Tensors of one value are found by computing with a single element on the GPU."""
    from torch._inductor.fx_passes import joint_graph

    folder = joint_graph.UniformValueConstantFolder
    run = folder.run

    def run_on_cpu(self: Any) -> Any:
        with _FoldingOnCpu():  # type: ignore[no-untyped-call]
            return run(self)

    _replace(folder, "run", run_on_cpu, undo)


def _decide_padding(times: KernelModel | None, undo: ExitStack) -> None:
    """Inductor looks up what it has measured under a key. The key is the answer."""
    from torch._inductor.fx_passes import pad_mm

    def decide(match: Any, left: Tensor, right: Tensor, operator: object, *_: object, **__: object) -> str:
        inputs = tuple(facts_of(one, storage) for storage, one in enumerate((left, right)))
        operation = Operation(f"{operator}.default", "", "", inputs, (), {})
        are_free = [pad_mm.should_exclude_padding_time(match, name) for name in ("mat1", "mat2")]
        padded = pad_product(operation)
        if times is None or padded is None:
            return _PADDED
        try:
            return _PADDED if is_worth_padding(times, operation, padded, are_free) else ""
        except NotCalibratedError:
            return _PADDED

    _replace(pad_mm, "should_pad_bench_key", decide, undo)
    _replace(pad_mm, "get_cached_should_pad", lambda key: key == _PADDED, undo)


class _NoKernel:
    """A kernel that is never compiled."""

    def run(self, *_: Any, **__: Any) -> None:
        pass

    __call__ = run


def _skip_kernels(undo: ExitStack) -> None:
    from torch._inductor.async_compile import AsyncCompile

    for name in ("triton", "cpp", "cpp_pybinding"):
        _replace(AsyncCompile, name, lambda *_, **__: _NoKernel(), undo)


def _make_fake_buffers(undo: ExitStack) -> None:
    """Generated code makes buffers and views of them below the dispatcher, where nobody could watch."""
    guards = torch._C._dynamo.guards
    _replace(guards, "_empty_strided_cuda", _make_buffer, undo)
    _replace(guards, "_reinterpret_tensor", _view_buffer, undo)
    for name in ("assert_size_stride", "assert_alignment"):
        _replace(guards, name, lambda *_, **__: None, undo)


def _make_buffer(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _view_buffer(buffer: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    return torch.as_strided(buffer, size, stride, int(buffer.storage_offset()) + offset)


def _replace_compiler(watching: Watching, undo: ExitStack) -> None:
    from torch._dynamo import lookup_backend
    from torch._inductor import compile_fx as inductor

    compile_fx = inductor.compile_fx

    def compile_unwatched(*args: Any, **kwargs: Any) -> Any:  # a rewritten graph is compiled when it first runs
        with _disable_current_modes():
            return compile_fx(*args, **kwargs)

    def compile_code(function: Callable[..., Any], backend: Any = "inductor") -> Callable[..., Any]:
        chosen = lookup_backend(backend) if isinstance(backend, str) else backend

        def compile_graph(graph: Any, examples: Any) -> Callable[..., Any]:
            run = chosen(graph, examples)

            def run_watched(*arguments: Any) -> Any:
                with watching():
                    return run(*arguments)

            return run_watched

        compiled = torch.compile(function, backend=compile_graph, dynamic=False, fullgraph=True)

        def run_compiled(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return compiled(*args, **kwargs)

        return without_logging(run_compiled)  # each call of a logger would split the graph

    _replace(inductor, "compile_fx", compile_unwatched, undo)
    replace_function(tracing, "compile_code", compile_code, undo)

"""Watches a simulated program: every storage on the fake GPU as an allocation, every operator as an operation.

A storage is requested when the operator that makes it returns, and freed when the last tensor that uses it is gone,
which Python's reference counts say exactly. What differs from a real run is corrected here:

- Autograd adds gradients in place if nobody else holds the first one, but never where tensors are watched. An addition
  by the engine whose first operand dies right after it is one in place.
- Kernels take temporary memory that their results do not show (`kernel_memory`).
- cuBLAS and cuBLASLt keep a workspace for every thread that multiplies: the main thread, and the one of autograd.

Small tensors on the CPU are real, so that a program can read them: the step count of an optimizer, a schedule.
"""

import math
import sys
import weakref
from types import FrameType
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from stepscope.planner.assumptions import Accelerator
from stepscope.planner.fake_results import FakeResults
from stepscope.planner.grouped_gemm import multiply_groups
from stepscope.planner.kernel_memory import on_cpu, temporary_bytes, workspaces
from stepscope.planner.known_values import KnownValues
from stepscope.planner.operation import Operation, facts_of, find_tensors, scalars_of
from stepscope.planner.places import ProgramPlaces
from stepscope.planner.refusals import NotSimulatedError
from stepscope.recording.memory.allocator_model import MAIN, RELEASE, MemoryEvent

aten = torch.ops.aten
REAL_ELEMENTS = 1 << 20  # larger tensors on the CPU are fake
WORKSPACE = "workspace"
CPU = -1
_DEVICE = torch.ops.prim.device.default  # `tensor.device`, which asks the dispatcher; more often than anything else
# Operators that autograd runs in place on ordinary tensors, if nobody else holds the first operand, or if it made that
# itself.
_IN_PLACE = frozenset(
    {
        aten.add.Tensor,
        aten.scatter_add.default,
        aten.scatter.src,
        aten.scatter.value,
        aten.index_put.default,
        aten.index_add.default,
    }
)
# The frames between autograd's engine and `__torch_dispatch__`, and the one that calls the engine.
_OF_DISPATCH = (__file__, "torch/_compile.py", "torch/_dynamo/eval_frame.py", "torch/_ops.py", "threading.py")
_CALLS_ENGINE = "_engine_run_backward"


class SimulatedAllocation:
    """A request for memory: who made it, where, and when (positions in `Tracker.events`)."""

    __slots__ = (
        "born",
        "bytes",
        "is_recomputed",
        "is_temporary",
        "module",
        "operator",
        "phase",
        "pool",
        "source",
        "step",
    )

    def __init__(self, size: int, operator: str, pool: str, places: ProgramPlaces, born: int) -> None:
        self.bytes = size
        self.operator = operator
        self.pool = pool
        self.step, self.phase, self.module = places.step, places.current_phase(), places.current_module()
        self.born = born
        self.is_recomputed = places.recomputes
        self.is_temporary = False  # whether the operator frees it before it returns
        self.source = CPU  # what it is a copy of


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`events` are requests and frees in order; the number of a request is its position in `allocations`."""

    supports_higher_order_operators = True  # to refuse them by name

    def __init__(self, gpu: Accelerator, places: ProgramPlaces, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[MemoryEvent] = []
        self.allocations: list[SimulatedAllocation] = []
        self.operations: list[Operation] = []
        self.pool = MAIN  # that requests are from
        self.keeps_operations = False
        self.reads_values = False  # whether an optimizer asked for a norm or the like, and got 1
        self._gpu, self._places, self._mode = gpu, places, mode
        self._values = KnownValues()
        self._results = FakeResults(mode)
        self._numbers: dict[int, int] = {}  # address of a live storage to its number
        # Workspaces that exist: of which library, whether of autograd's thread, and whether of another stream.
        self._workspaces: set[tuple[str, bool, bool]] = set()
        self._sum: tuple[int, int, int] | None = None  # of autograd's engine: first operand, result and its address

    def release_cached(self) -> None:
        """Note that the program empties the allocator's cache."""
        self.events.append(MemoryEvent(RELEASE, 0))

    def number_of(self, tensor: Tensor) -> int:
        """The number of a tensor's memory on the GPU; -1 if it is elsewhere."""
        return self._numbers.get(tensor.untyped_storage()._cdata, CPU)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:
            return _device_of(args[0])
        # PyTorch keeps this per thread and sets it in the one that enters a mode. Autograd has another, in which a list
        # as an index would be copied to the GPU without asking the mode.
        torch._C._set_only_lift_cpu_tensors(True)  # noqa: FBT003  # it takes no keyword
        if func is aten._pin_memory.default:  # memory of the CPU, which the GPU can read
            return args[0]
        kwargs = kwargs or {}
        self._sum = None
        inputs = find_tensors(args) + find_tensors(kwargs)
        # `torch.tensor` moves what it gets to its device without asking the mode again, so that must be fake.
        if func is not aten.lift_fresh.default and _is_small_on_cpu(inputs, args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is not aten.lift_fresh.default and inputs and not any(isinstance(one, FakeTensor) for one in inputs):
            args, kwargs = tree_map_only(Tensor, self._mode.from_tensor, (args, kwargs))
        numbers = [self.number_of(one) for one in inputs] if self.keeps_operations else []
        result = self._run(func, args, kwargs, inputs)
        outputs = find_tensors(result)
        self._values.follow(func, args, kwargs, inputs, outputs)
        if all(_device_of(one).type != "cuda" for one in (*inputs, *outputs)):
            return result
        made = self._add_outputs(func, inputs, outputs)
        self._add_temporaries(func, args, kwargs, outputs)
        if made and func in _IN_PLACE and _is_engine():
            self._watch_sum(inputs, made[0], outputs[0])
        if self.keeps_operations:
            self._keep(func, args, kwargs, inputs, numbers, outputs)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor]) -> Any:
        if func is aten._grouped_mm.default:
            return multiply_groups(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            raise NotSimulatedError(f"the operator `{func._name}` runs other functions, which is not simulated")
        try:
            return self._results.run(func, args, kwargs)
        except UnsupportedOperatorException:
            if func._schema.returns:
                raise
            return None  # an operator in place, such as a fused optimizer: it makes nothing
        except (DataDependentOutputException, DynamicOutputShapeException):
            is_known, result = self._values.answer(func, args, kwargs, inputs)
            if is_known:
                return result
            # A norm is a number. What a condition depends on is not known, and an integer may be a size.
            is_number = func is aten._local_scalar_dense.default and args[0].dtype.is_floating_point
            if not is_number or not self._places.updates:
                raise
            self.reads_values = True
            return 1.0

    def _add_outputs(self, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> list[int]:
        made = []
        skipped = on_cpu(func)
        for place, tensor in enumerate(outputs):
            device = _device_of(tensor)
            if device.type != "cuda" or place in skipped:
                continue
            if device.index:
                raise NotSimulatedError(f"this model uses `{device}`, and one GPU is simulated", "use one device")
            if tensor.layout != torch.strided:
                raise NotSimulatedError(f"tensors with the layout `{tensor.layout}` are not simulated")
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._numbers or not storage.nbytes():
                continue
            number = self._request(storage.nbytes(), func.__name__)
            if func is aten._to_copy.default:
                self.allocations[number].source = self.number_of(inputs[0])
            self._numbers[key] = number
            weakref.finalize(storage, self._forget, key).atexit = False
            made.append(number)
        return made

    def _add_temporaries(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Request what the kernel takes, all at once, and free it. A workspace stays."""
        for library, size in workspaces(func, args, self._gpu):
            workspace = (library, torch._C._current_graph_task_id() != -1, self.pool != MAIN)
            if workspace not in self._workspaces:
                self._workspaces.add(workspace)
                self._request(size, WORKSPACE)
        sizes = temporary_bytes(func, args, kwargs, outputs, self._gpu)
        for number in [self._request(size, func.__name__) for size in sizes][::-1]:
            self.allocations[number].is_temporary = True
            self.events.append(MemoryEvent(number, 0))

    def _request(self, size: int, operator: str) -> int:
        self.allocations.append(SimulatedAllocation(size, operator, self.pool, self._places, len(self.events)))
        number = len(self.allocations) - 1
        self.events.append(MemoryEvent(number, size))
        return number

    def _forget(self, key: int) -> None:
        """A storage is gone."""
        self._values.forget(key)
        number = self._numbers.pop(key, None)
        if number is None:
            return
        if self._sum is not None and self._sum[0] == number and self._replace_sum(*self._sum):
            return
        self.events.append(MemoryEvent(number, 0))

    def _watch_sum(self, inputs: list[Tensor], made: int, result: Tensor) -> None:
        first = self.number_of(inputs[0])
        if inputs[0]._is_view():  # it holds its base, so the memory has two owners
            return
        if first != CPU and len(inputs) > 1 and self.allocations[first].bytes == self.allocations[made].bytes:
            self._sum = (first, made, result.untyped_storage()._cdata)

    def _replace_sum(self, first: int, made: int, address: int) -> bool:
        """Let the result of an addition have the memory of its first operand, which nobody else holds."""
        self._sum = None
        born = self.allocations[made].born
        after = self.events[born + 1 :]
        if self._numbers.get(address) != made or not all(
            later.number != RELEASE and self.allocations[later.number].is_temporary for later in after
        ):
            return False
        del self.events[born]
        for later in self.allocations[made + 1 :]:
            later.born -= 1
        self._numbers[address] = first
        if self.keeps_operations:
            self.operations[-1] = _write_to(self.operations[-1], made, first)
        return True

    def _keep(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        numbers: list[int],
        outputs: list[Tensor],
    ) -> None:
        self.operations.append(
            Operation(
                str(func),
                self._places.current_phase(),
                self._places.current_module(),
                tuple(facts_of(one, number) for one, number in zip(inputs, numbers, strict=True)),
                tuple(facts_of(one, self.number_of(one)) for one in outputs),
                scalars_of(func, args, kwargs),
            )
        )


def _write_to(operation: Operation, made: int, storage: int) -> Operation:
    """The same operation with `storage` in place of the one that it made."""
    outputs = tuple(
        msgspec.structs.replace(one, storage=storage) if one.storage == made else one for one in operation.outputs
    )
    return msgspec.structs.replace(operation, outputs=outputs)


def _device_of(tensor: Tensor) -> torch.device:
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def _is_engine() -> bool:
    """Whether autograd's engine called the operator, not a function in Python. Its thread has no other frames, unless a
    function in a backward pass runs another one, as a reentrant checkpoint does."""
    if torch._C._current_graph_task_id() == -1:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.endswith(_OF_DISPATCH):
            return frame.f_code.co_name == _CALLS_ENGINE
        frame = frame.f_back
    return True


def _is_small_on_cpu(inputs: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator makes, reads or changes real tensors on the CPU only."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    if any(isinstance(one, FakeTensor) or one.device.type != "cpu" for one in inputs):
        return False
    sizes = args[0] if not inputs and args and isinstance(args[0], list | tuple) else ()
    count = math.prod(one for one in sizes if isinstance(one, int))
    return count <= REAL_ELEMENTS

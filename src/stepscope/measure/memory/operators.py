"""Which operator allocated which memory, read from the event tree of PyTorch's profiler.

The profiler sees every operator and every allocation, on any device, and does not change what runs. A
`TorchDispatchMode`, the usual way to watch operators, does: while one is active, autograd treats every tensor as a
subclass and accumulates gradients out of place instead of in place, so that the watched step uses memory that the
unwatched step does not (`docs/log.md` has the figures).
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._C._profiler import RecordScope, _EventType

from stepscope.measure.memory.marks import MARK, MODULE, Places
from stepscope.recording.memory.labels import NOBODY, Operator, TensorFact

_EVALUATE = "autograd::engine::evaluate_function"
# Operators that only allocate memory, on behalf of the enclosing one.
_TAKERS = ("aten::empty", "aten::new_empty", "aten::resize_", "aten::set_")
_CAST = "aten::_to_copy"
_UNKNOWN_NODE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """An allocation (`size` above zero) or a free, with its operator call and the mark before it."""

    address: int
    size: int
    time_ns: int
    mark: int
    operator: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    happenings: list[Happening]
    operators: list[Operator]
    facts: list[TensorFact]


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """The enclosing ranges of an event."""

    call: Any = None  # the innermost operator that is not a pure allocator
    module: str | None = None
    module_end_ns: int = 0  # the outermost module
    node: int | None = None  # the sequence number of the running autograd node


def read_tree(results: Any, device: torch.device, places: Places, parameters: Mapping[int, tuple[str, int]]) -> Watched:
    """`parameters` maps addresses to names and sizes. Operators are numbered from zero; only those that allocated
    count.
    """
    found, marks = _collect(results.experimental_event_tree(), device)
    found.sort(key=lambda pair: pair[0].start_time_ns)
    mark_times = [time_ns for time_ns, _ in marks]
    numbers: dict[int, int] = {}
    watched = Watched(happenings=[], operators=[], facts=[])
    taken: dict[int, tuple[_Surroundings, int, int, int]] = {}
    for event, place in found:
        fields, time_ns = event.extra_fields, event.start_time_ns
        index = bisect_right(mark_times, time_ns) - 1
        mark = marks[index][1] if index >= 0 else NOBODY
        operator = NOBODY
        if fields.alloc_size > 0:
            operator = _number(place, numbers, watched, places)
            if fields.ptr in taken:  # freed on autograd's thread, which the profiler does not see
                _judge(watched, fields.ptr, taken.pop(fields.ptr), parameters, ended_ns=time_ns)
            taken[fields.ptr] = (place, operator, fields.alloc_size, mark)
        elif fields.ptr in taken:
            _judge(watched, fields.ptr, taken.pop(fields.ptr), parameters, ended_ns=time_ns)
        watched.happenings.append(
            Happening(address=fields.ptr, size=fields.alloc_size, time_ns=time_ns, mark=mark, operator=operator)
        )
    for address, one in taken.items():
        _judge(watched, address, one, parameters, ended_ns=None)
    return watched


def _collect(roots: list[Any], device: torch.device) -> tuple[list[tuple[Any, _Surroundings]], list[tuple[int, int]]]:
    found, marks = [], []
    waiting = [(root, _Surroundings()) for root in roots]
    while waiting:
        event, place = waiting.pop()
        if event.tag == _EventType.Allocation:
            if _is_on(event.extra_fields.device, device):
                found.append((event, place))
            continue
        if event.tag == _EventType.TorchOp:
            name = event.name
            if name.startswith(MARK):
                marks.append((event.start_time_ns, int(name.removeprefix(MARK))))
                continue
            place = _enter(place, event, name)
        waiting.extend((child, place) for child in event.children)
    return found, sorted(marks)


def _is_on(place: torch.device, device: torch.device) -> bool:
    """A CPU has an index in events, but not elsewhere."""
    return place.type == device.type and (device.type == "cpu" or place.index == device.index)


def _enter(place: _Surroundings, event: Any, name: str) -> _Surroundings:
    if name.startswith(MODULE):
        end_ns = place.module_end_ns or event.end_time_ns
        return replace(place, module=name.removeprefix(MODULE), module_end_ns=end_ns)
    if name.startswith(_EVALUATE):
        # A node inside a node belongs to a recomputed graph, with the numbers of another thread.
        return replace(place, node=_UNKNOWN_NODE if place.node is not None else event.extra_fields.sequence_number)
    # A range is not an operator, whether the user, DDP or torch's own optimizers opened it.
    is_range = event.extra_fields.scope == RecordScope.USER_SCOPE
    if is_range or (place.call is not None and name.startswith(_TAKERS)):
        return place
    return replace(place, call=event)


def _number(place: _Surroundings, numbers: dict[int, int], watched: Watched, places: Places) -> int:
    """Return the call's number, assigned when it first allocates."""
    if place.call is None:
        return NOBODY
    number = numbers.setdefault(place.call.id, len(watched.operators))
    if number == len(watched.operators):
        module = place.module
        if module is None and place.node is not None and place.node >= 0:
            module = places.find(place.node)
        watched.operators.append(Operator(name=place.call.name, module=module or ""))
    return number


def _judge(
    watched: Watched,
    address: int,
    taken: tuple[_Surroundings, int, int, int],
    parameters: Mapping[int, tuple[str, int]],
    *,
    ended_ns: int | None,
) -> None:
    """Infer the category from how memory was allocated and how long it lived."""
    place, operator, size, mark = taken
    if operator == NOBODY:
        return
    category, name = None, ""
    cast = _cast_parameter(place.call, size, parameters)
    if cast is not None:
        category, name = "autocast copies", cast
    elif ended_ns is not None and ended_ns <= place.call.end_time_ns:
        category, name = "workspaces", place.call.name
    elif place.node is not None and place.module_end_ns and (ended_ns is None or ended_ns > place.module_end_ns):
        category, name = "activations", "recomputed"
    if category is not None:
        watched.facts.append(TensorFact(mark=mark, operator=operator, address=address, category=category, name=name))


def _cast_parameter(call: Any, size: int, parameters: Mapping[int, tuple[str, int]]) -> str | None:
    """Return the parameter that this call copies to a smaller dtype, as autocast does with weights."""
    if call.name != _CAST:
        return None
    for one in call.extra_fields.inputs[:1]:
        known = parameters.get(getattr(one, "storage_data_ptr", None) or -1)
        if known is not None and size < known[1]:
            return known[0]
    return None


def read_stacks(results: Any, device: torch.device) -> list[tuple[int, list[dict[str, object]]]]:
    """From a profile with Python stacks: the size of each allocation, in order, with its frames, innermost first, as in
    snapshots.
    """
    found: list[tuple[Any, _CallChain | None]] = []
    waiting: list[tuple[Any, _CallChain | None]] = [(root, None) for root in results.experimental_event_tree()]
    while waiting:
        event, chain = waiting.pop()
        if event.tag == _EventType.Allocation:
            if _is_on(event.extra_fields.device, device) and event.extra_fields.alloc_size > 0:
                found.append((event, chain))
            continue
        if event.tag in (_EventType.PyCall, _EventType.PyCCall):
            chain = _CallChain(event, chain)
        waiting.extend((child, chain) for child in event.children)
    found.sort(key=lambda pair: pair[0].start_time_ns)
    return [(event.extra_fields.alloc_size, chain.frames() if chain else []) for event, chain in found]


class _CallChain:
    """A call and its callers. For a call into C the Python line is known; for arithmetic, which is not a call, only the
    enclosing function.
    """

    __slots__ = ("_callers", "_event", "_outer")

    def __init__(self, event: Any, outer: "_CallChain | None") -> None:
        self._event = event
        self._outer = outer
        self._callers: list[dict[str, object]] | None = None

    def frames(self) -> list[dict[str, object]]:
        if self._event.tag == _EventType.PyCCall:
            return self._from_caller()
        return [_frame(self._event.extra_fields.callsite), *self._from_caller()]

    def _from_caller(self) -> list[dict[str, object]]:
        if self._callers is None:
            outer = self._outer._from_caller() if self._outer else []
            self._callers = [_frame(self._event.extra_fields.caller), *outer]
        return self._callers


def _frame(state: Any) -> dict[str, object]:
    return {"filename": state.file_name, "line": state.line_number, "name": state.function_name}

"""Records the memory history of one case: a snapshot, with our labels in it.

On CUDA the allocator records its own history, which costs next to nothing. Attributing memory to operators requires
PyTorch's profiler, which costs far more, and stacks cost ten per cent; but steps repeat each other. So the profiler
watches the first and the last recorded step, and the steps between them, which only the allocator records, copy from
the last whatever is identical. Recording starts with the very first step, in which the optimizer creates its state.

A CPU has no such allocator. The profiler watches all steps, and its events are the history. Python stacks would
break its ranges, so they are recorded in one extra step, and copied the same way.

Tensors saved for backward are read from the graph between forward and backward, not caught by hooks while they are
saved: hooks hold references and so change the measurement.
"""

import gc
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile

from stepscope.errors import StepscopeError
from stepscope.measure.memory.limits import limit_memory
from stepscope.measure.memory.marks import Places
from stepscope.measure.memory.operators import Happening, Watched, read_stacks, read_tree
from stepscope.measure.memory.saved_tensors import audit, held_tensors
from stepscope.measure.profiler import keeping_events
from stepscope.measure.timing import settle_heap, time_in_turns, time_steps, wait_for
from stepscope.recording.memory.labels import (
    KEY,
    NOBODY,
    SNAPSHOT_NAME,
    MemoryLabels,
    MemoryRun,
    Operator,
    SavedRow,
    TensorFact,
    without_frames,
)
from stepscope.spec import Case
from stepscope.step import Step, build
from stepscope.step.annotation import annotated

Stage = Literal["building", "recording", "writing the snapshot", "measuring the overhead"]
OnStage = Callable[[Stage], None]


def record_memory(case: Case, device: torch.device, *, folder: Path, on_stage: OnStage) -> MemoryRun:
    """Write the snapshot to `folder`. The process cannot be reused: one case, one process."""
    if case.timing.memory_limit is not None:
        limit_memory(device, case.timing.memory_limit)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    on_stage("building")
    step = build(case.workload, device, captures=False)
    recorder = _OnCuda(step) if device.type == "cuda" else _OnCpu(step)
    settle_heap()
    on_stage("recording")
    watched_ns = recorder.run(case.timing.steps)
    on_stage("writing the snapshot")
    recorder.write(folder / SNAPSHOT_NAME)
    on_stage("measuring the overhead")
    plain_ns, recorded_ns = time_in_turns(step, recorder.recording, least=2, most=10)
    return MemoryRun(
        step_ns=tuple(plain_ns),
        recorded_step_ns=tuple(recorded_ns),
        watched_step_ns=tuple(watched_ns),
        parameters=step.parameters,
        optimizer=step.optimizer_name,
        notes=tuple(dict.fromkeys((*recorder.notes, *_describe_changes(step)))),
    )


def _describe_changes(step: Step) -> Iterator[str]:
    yield from (remark.text for remark in step.remarks)
    if step.workload.graph:
        yield "recorded without CUDA graphs, whose replays allocate nothing: a graph holds the memory of this step"


class _Recorder:
    """What both devices share: the known tensors are noted before the first step and after each phase."""

    def __init__(self, step: Step, on_mark: Callable[[str], None]) -> None:
        self.step = step
        self.places = Places(on_mark)
        self.operators: list[Operator] = []
        self.facts: list[TensorFact] = []
        self.watched: list[int] = []
        self.notes: list[str] = []
        self._saved: list[SavedRow] = []
        self._parameters = {
            parameter.untyped_storage().data_ptr(): (name, parameter.untyped_storage().nbytes())
            for name, parameter in step.module.named_parameters()
        }

    def watch(self, number: int) -> int:
        """Run one step, noting the known tensors after each phase; return its duration. A profiler is active."""
        self.watched.append(number)
        self.places.watches_modules = True
        start = time.perf_counter_ns()
        for name, phase in self.step.phases:
            phase()
            self._note_after(name)
        wait_for(self.step)
        self.places.watches_modules = False
        return time.perf_counter_ns() - start

    def note_what_is_there(self) -> None:
        for name, parameter in self.step.module.named_parameters():
            self._note(parameter, "parameters", name)
        for name, buffer in self.step.module.named_buffers():
            self._note(buffer, "other", f"buffer {name}")

    def add(self, watched: Watched) -> list[Happening]:
        """Add what the profiler saw; operator numbers continue from the previous ones."""
        first = len(self.operators)
        self.operators += watched.operators
        self.facts += [msgspec.structs.replace(fact, operator=fact.operator + first) for fact in watched.facts]
        return [
            one if one.operator == NOBODY else Happening(**{**asdict(one), "operator": one.operator + first})
            for one in watched.happenings
        ]

    def read(self, results: Any) -> Watched:
        return read_tree(results, self.step.device, self.places, self._parameters)

    def labels(self, **more: Any) -> dict[str, object]:
        content = MemoryLabels(
            device=str(self.step.device),
            marks=tuple(self.places.marks),
            operators=tuple(self.operators),
            facts=tuple(self.facts),
            watched_steps=tuple(self.watched),
            saved=tuple(self._saved),
            **more,
        )
        plain: dict[str, object] = msgspec.to_builtins(content)
        return plain

    def _note_after(self, phase: str) -> None:
        step = self.step
        if phase == "forward" and step.loss is not None and step.loss.grad_fn is not None:
            for holder, argument, tensor in held_tensors(step.loss.grad_fn):
                self._note(tensor, "activations", f"{holder.op}.{argument}")
            self._saved = [SavedRow(**asdict(row)) for row in audit(step, self.places)]
            # Made in the first forward pass; merged ones share a storage, which has one name.
            copies = {copy.untyped_storage().data_ptr(): (name, copy) for name, copy in step.working_weights()}
            for name, copy in copies.values():
                self._note(copy, "parameters", f"{name} (working weight)")
        elif phase == "backward":
            for name, gradient in step.gradients():
                self._note(gradient, "gradients", name)
        elif phase == "optimizer":
            for name, tensor in step.optimizer_state():
                self._note(tensor, "optimizer state", name)

    def _note(self, tensor: Tensor, category: str, name: str) -> None:
        storage = tensor.untyped_storage()
        if tensor.device == self.step.device and storage.nbytes():
            self.facts.append(
                TensorFact(
                    mark=self.places.mark,
                    operator=NOBODY,
                    address=storage.data_ptr(),
                    category=category,
                    name=name,
                    shape=tuple(tensor.shape),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                )
            )


class _OnCpu(_Recorder):
    def __init__(self, step: Step) -> None:
        super().__init__(step, on_mark=lambda _: None)
        self._start = _living_storages()

    def run(self, steps: int) -> list[int]:
        self.note_what_is_there()
        with profiling() as profiler, annotated(self.step, backend=self.places.open):
            watched_ns = [self.watch(number) for number in range(steps)]
        self._happenings = self.add(self.read(results_of(profiler)))
        if not self._happenings:
            raise StepscopeError(
                "PyTorch's profiler reported no memory events",
                detail="a profiler that runs inside the model stops stepscope's profiler",
                hint="remove the profiler from the model",
            )
        with profiling(with_stack=True) as profiler:
            self.step.run()
        self._stacks = read_stacks(results_of(profiler), self.step.device)
        return watched_ns

    @contextmanager
    def recording(self) -> Iterator[None]:
        self.places.watches_modules = True
        with profiling(), annotated(self.step, backend=self.places.open):
            yield

    def write(self, path: Path) -> None:
        trace = [
            {
                "action": "alloc" if one.size > 0 else "free_requested",
                "addr": one.address,
                "size": abs(one.size),
                "stream": 0,
                "time_us": one.time_ns // 1000,
                "frames": frames,
                "user_metadata": str(one.mark) if one.operator == NOBODY else f"{one.mark}:{one.operator}",
            }
            for one, frames in zip(self._happenings, self._frames(), strict=True)
        ]
        labels = self.labels(segments_at_start=[_block(address, size) for address, size in self._start])
        _write({"segments": [], "device_traces": [trace], KEY: labels}, path)

    def _frames(self) -> Iterator[list[dict[str, object]]]:
        """Return the stacks of the step that was recorded with them, as long as a step allocates the same memory in the
        same order; nothing after the first difference gets one.
        """
        steps = self.places.steps()
        current: int | None = None
        place = 0
        for one in self._happenings:
            step = steps[one.mark] if one.mark >= 0 else None
            if step != current:
                current, place = step, 0
            if one.size < 0 or place >= len(self._stacks):
                yield []
                continue
            size, frames = self._stacks[place]
            place = place + 1 if size == one.size else len(self._stacks)
            yield frames if size == one.size else []


class _OnCuda(_Recorder):
    def __init__(self, step: Step) -> None:
        super().__init__(step, on_mark=torch.cuda.memory._set_memory_metadata)

    def run(self, steps: int) -> list[int]:
        device = self.step.device
        torch.cuda.synchronize(device)
        self.note_what_is_there()
        self._start = torch.cuda.memory._snapshot(device)["segments"]
        torch.cuda.reset_peak_memory_stats(device)
        seen: list[tuple[int, Any]] = []
        with self._history(stacks=True):
            watched_ns = [self._watch_alone(0, seen)]
            self._set_history(stacks=False)
            with annotated(self.step, backend=self.places.open, modules=False) as annotation:
                annotation.next_step = 1
                time_steps(self.step, max(0, steps - 2))
            self._set_history(stacks=True)
            if steps > 1:
                watched_ns.append(self._watch_alone(steps - 1, seen))
            torch.cuda.synchronize(device)
            self._peaks = (torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
            self._snapshot = torch.cuda.memory._snapshot(device)
        trace: list[dict[str, Any]] = next((one for one in self._snapshot["device_traces"] if one), [])
        for first_mark, results in seen:
            self._join(trace, first_mark, self.add(self.read(results)))
        return watched_ns

    @contextmanager
    def recording(self) -> Iterator[None]:
        with self._history(stacks=False), annotated(self.step, backend=self.places.open, modules=False):
            yield

    def write(self, path: Path) -> None:
        allocated, reserved = self._peaks
        self._snapshot[KEY] = self.labels(
            segments_at_start=[without_frames(segment) for segment in self._start],
            allocator_peak_bytes=allocated,
            allocator_peak_reserved_bytes=reserved,
        )
        _write(self._snapshot, path)
        del self._snapshot, self._start

    def _watch_alone(self, number: int, seen: list[tuple[int, Any]]) -> int:
        """Add to `seen` what the profiler saw, and its first mark."""
        first_mark = self.places.mark + 1
        with profiling() as profiler, annotated(self.step, backend=self.places.open) as annotation:
            annotation.next_step = number
            watched_ns = self.watch(number)
        seen.append((first_mark, results_of(profiler)))
        return watched_ns

    @contextmanager
    def _history(self, *, stacks: bool) -> Iterator[None]:
        self._set_history(stacks=stacks, clear=True)
        try:
            yield
        finally:
            torch.cuda.memory._record_memory_history(None, device=self.step.device)
            torch.cuda.memory._set_memory_metadata("")

    def _set_history(self, *, stacks: bool, clear: bool = False) -> None:
        """Stacks are most of the cost of the allocator's history, and those of one watched step serve all identical
        steps.
        """
        torch.cuda.memory._record_memory_history(
            "all",
            context="alloc" if stacks else None,
            stacks="python",
            max_entries=sys.maxsize,
            device=self.step.device,
            clear_history=clear,
        )

    def _join(self, trace: list[dict[str, Any]], first_mark: int, happenings: Sequence[Happening]) -> None:
        """Attach operators to the allocator's entries. Both see all allocations in the same order; the profiler starts
        at `first_mark`, and misses some frees on autograd's thread.
        """
        taken = deque(one for one in happenings if one.size > 0)
        began = False
        for entry in trace:
            began = began or _mark_of(entry) >= first_mark
            if began and taken and entry["action"] == "alloc" and entry["addr"] == taken[0].address:
                one = taken.popleft()
                if one.operator != NOBODY:
                    entry["user_metadata"] = f"{one.mark}:{one.operator}"
        if taken:  # threads of the model itself may allocate at the same time, in two orders
            self.notes.append("the profiler and the allocator disagree: some memory has no operator")


def _mark_of(entry: dict[str, Any]) -> int:
    text = entry.get("user_metadata", "").partition(":")[0]
    return int(text) if text else NOBODY


@contextmanager
def profiling(*, with_stack: bool = False) -> Iterator[_KinetoProfile]:
    """CPU activities suffice: the allocators of both devices report to them."""
    profiler = _KinetoProfile(
        activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True, with_stack=with_stack
    )
    with keeping_events(profiler):
        yield profiler


def results_of(profiler: _KinetoProfile) -> Any:
    """Return the events of a profiler that has stopped."""
    assert profiler.profiler is not None, "the profiler must have been started"
    return profiler.profiler.kineto_results


def _living_storages() -> list[tuple[int, int]]:
    """Return address and size of everything that Python tensors hold on the CPU: inputs and targets are in closures,
    unreachable by name.
    """
    gc.collect()
    storages = {}
    for one in gc.get_objects():
        # Other kinds of tensors, such as those that a compiler traces with, have no memory of their own.
        is_plain = type(one) in (Tensor, nn.Parameter) and not torch._is_functional_tensor(one)
        if is_plain and one.device.type == "cpu" and one.layout is torch.strided:
            storage = one.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage.nbytes()
    return sorted(storages.items())


def _block(address: int, size: int) -> dict[str, object]:
    block = {"address": address, "size": size, "requested_size": size, "state": "active_allocated"}
    return {"address": address, "total_size": size, "stream": 0, "segment_type": "large", "blocks": [block]}


def _write(content: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        pickle.dump(content, file, protocol=4)

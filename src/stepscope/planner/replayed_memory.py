"""The memory of simulated steps: their requests, replayed through the model of the allocator."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from stepscope.planner.owners import Owner
from stepscope.planner.tracking import WORKSPACE
from stepscope.recording.memory.allocator_model import PLACEMENTS, RELEASE, AllocatorModel, MemoryEvent, OutOfSpaceError
from stepscope.recording.memory.labels import CATEGORIES
from stepscope.recording.rows.memory_summary import CategoryBytes, ModuleBytes

POINTS = 1000  # of a timeline


class PhasePeak(msgspec.Struct, frozen=True, kw_only=True):
    """The most allocated bytes while a phase runs."""

    phase: str
    bytes: int


class TimelinePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The allocated bytes after a request of the last step: in total, and in the order of `CATEGORIES`."""

    phase: str
    module: str
    operator: str
    bytes: int
    categories: tuple[int, ...]


class Request(NamedTuple):
    """One request of a simulation: how much, by whom, where."""

    bytes: int
    operator: str
    phase: str
    module: str
    step: int
    owner: Owner


class StepEvents(NamedTuple):
    """All events of a simulation: those before the first step, and those of each step. `origins` are the requests that
    repeated ones copy. `pools` are the requests that are not from memory of the default stream. `drawn` is the step
    that the timeline shows, and `phases` are those of it, each with the events of the step before it."""

    before: list[MemoryEvent]
    steps: list[list[MemoryEvent]]
    origins: dict[int, int]
    pools: dict[int, str] = {}  # noqa: RUF012  # never changed
    drawn: int = -1
    phases: tuple[tuple[int, str], ...] = ()

    @property
    def all(self) -> list[MemoryEvent]:
        return [*self.before, *(event for step in self.steps for event in step)]


class ReplayedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The peak over all steps, and where it is. `reserved_bytes` and `allocated_range` are the least and the most over
    all orders in which CUDA may return addresses. Categories and modules are at the peak and add up to it."""

    peak_allocated_bytes: int
    peak_requested_bytes: int
    allocated_range: tuple[int, int]
    reserved_bytes: tuple[int, int]
    workspace_bytes: int
    peak_phase: str
    peak_module: str
    categories: tuple[CategoryBytes, ...]
    modules: tuple[ModuleBytes, ...]
    phases: tuple[PhasePeak, ...]
    timeline: tuple[TimelinePoint, ...]


def repeat_steps(events: StepEvents, count: int, requests: Sequence[Request]) -> StepEvents:
    """The events of `count` steps, of which the last simulated one is repeated. What a step frees of the one before it
    is found by its name: who requested it where, and the how manyth such request it is. If a step lacks one, or frees
    anything older, nothing is repeated."""
    more = count - len(events.steps)
    if more <= 0 or len(events.steps) < 2:
        return events
    names_before, names = (_name_requests(step, requests) for step in events.steps[-2:])
    numbers = {name: number for number, name in names.items()}
    inherited = {}  # what the last step frees of the one before it: its counterpart in the last step
    for number, size in events.steps[-1]:
        if not size and number not in names:
            name = names_before.get(number)
            if name not in numbers:
                return events
            inherited[number] = numbers[name]
    if {number for number, size in events.steps[-1] if not size} & set(inherited.values()):
        return events
    steps, origins = list(events.steps), dict(events.origins)
    copies, following = {number: number for number in names}, 1 + max(number for number, _ in events.all)
    for _ in range(more):
        renamed = {number: copies[counterpart] for number, counterpart in inherited.items()}
        copies = dict(zip(names, range(following, following + len(names)), strict=True))
        following += len(names)
        origins.update((copy, number) for number, copy in copies.items())
        renamed |= copies
        steps.append([MemoryEvent(renamed[number], size) for number, size in events.steps[-1]])
    return events._replace(steps=steps, origins=origins)


def _name_requests(step: Sequence[MemoryEvent], requests: Sequence[Request]) -> dict[int, tuple[object, ...]]:
    """A name for each request of a step, which is the same in another step that does the same."""
    seen: Counter[tuple[object, ...]] = Counter()
    names: dict[int, tuple[object, ...]] = {}
    for number, size in step:
        if size:
            request = requests[number]
            name = (size, request.operator, request.phase, request.module)
            names[number] = (*name, seen[name])
            seen[name] += 1
    return names


def replay_memory(events: StepEvents, requests: Sequence[Request]) -> ReplayedMemory:
    everything = events.all
    models = [AllocatorModel(placement, pools=events.pools) for placement in PLACEMENTS[1:]]
    for model in models:
        model.follow(everything)
    main = _PeakReplay(events, requests)
    models.append(main.model)
    allocated, reserved = (
        [getattr(model, f"peak_{kind}_bytes") for model in models] for kind in ("allocated", "reserved")
    )
    peak = main.peak_request
    categories, modules = main.at_peak()
    return ReplayedMemory(
        peak_allocated_bytes=main.model.peak_allocated_bytes,
        peak_requested_bytes=main.model.peak_requested_bytes,
        allocated_range=(min(allocated), max(allocated)),
        reserved_bytes=(min(reserved), max(reserved)),
        workspace_bytes=sum(one.bytes for one in requests if one.operator == WORKSPACE),
        peak_phase=peak.phase,
        peak_module=peak.module,
        categories=tuple(CategoryBytes(category=name, bytes=categories[name]) for name in CATEGORIES),
        modules=tuple(ModuleBytes(module=name, bytes=size) for name, size in modules.most_common()),
        phases=tuple(PhasePeak(phase=name, bytes=size) for name, size in main.phases.items()),
        timeline=tuple(main.timeline()),
    )


def fits(events: StepEvents, memory: ReplayedMemory, capacity: int) -> bool:
    """Whether all steps fit into `capacity` bytes of the allocator, in whatever order CUDA returns addresses. `memory`
    is what they take if there is enough."""
    if memory.reserved_bytes[1] <= capacity:
        return True
    everything = events.all
    for placement in PLACEMENTS:
        try:
            AllocatorModel(placement, capacity=capacity, pools=events.pools).follow(everything)
        except OutOfSpaceError:
            return False
    return True


class _PeakReplay:
    """One replay that keeps the peak of each phase, the time of the peak, and the timeline of a step."""

    def __init__(self, events: StepEvents, requests: Sequence[Request]) -> None:
        self.model = AllocatorModel(PLACEMENTS[0], pools=events.pools)
        self.phases: dict[str, int] = {}
        self._events, self._requests = events, requests
        self._peak = 0  # position of the event
        self._taken: dict[int, int] = {}  # bytes of the block of each request
        self._points: list[TimelinePoint] = []
        self._position = 0
        for event in events.before:
            self._apply(event)
        for number, step in enumerate(events.steps):
            if number == events.drawn % len(events.steps):
                self._draw(step)
            else:
                for event in step:
                    self._apply(event)
        self.peak_request = self._request(events.all[self._peak].number)

    def at_peak(self) -> tuple[Counter[str], Counter[str]]:
        """Bytes by category and by module at the peak."""
        held: dict[int, int] = {}
        for number, requested in self._events.all[: self._peak + 1]:
            if requested:
                held[number] = self._taken[number]
            elif number != RELEASE:
                del held[number]
        categories: Counter[str] = Counter()
        modules: Counter[str] = Counter()
        for number, size in held.items():
            request = self._request(number)
            categories[request.owner.category] += size
            modules[request.owner.module or request.module] += size
        return categories, modules

    def timeline(self) -> list[TimelinePoint]:
        """The timeline of the step, with the highest of neighboring points if there are too many."""
        width = -(-len(self._points) // POINTS) or 1
        groups = (self._points[first : first + width] for first in range(0, len(self._points), width))
        return [max(group, key=lambda point: point.bytes) for group in groups]

    def _request(self, number: int) -> Request:
        return self._requests[self._events.origins.get(number, number)]

    def _apply(self, event: MemoryEvent) -> None:
        model = self.model
        if event.bytes:
            before = model.peak_allocated_bytes
            model.request(*event)
            self._taken[event.number] = model.blocks[event.number][1]
            if model.peak_allocated_bytes > before:
                self._peak = self._position
            self._note_phase(self._request(event.number).phase)
        else:
            model.free(event.number)
        self._position += 1

    def _note_phase(self, phase: str) -> None:
        self.phases[phase] = max(self.phases.get(phase, 0), self.model.allocated_bytes)

    def _draw(self, step: Sequence[MemoryEvent]) -> None:
        places = {category: place for place, category in enumerate(CATEGORIES)}
        totals = [0] * len(CATEGORIES)
        for number, (_, size, _) in self.model.blocks.items():
            totals[places[self._request(number).owner.category]] += size
        phases = [*self._events.phases]
        for position, event in enumerate(step):
            while phases and phases[0][0] <= position:
                self._note_phase(phases.pop(0)[1])
            if event.number == RELEASE:
                self._apply(event)
                continue
            request = self._request(event.number)
            place = places[request.owner.category]
            if not event.bytes:
                totals[place] -= self.model.blocks[event.number][1]
            self._apply(event)
            if event.bytes:
                totals[place] += self.model.blocks[event.number][1]
                self._points.append(
                    TimelinePoint(
                        phase=request.phase,
                        module=request.module,
                        operator=request.operator,
                        bytes=self.model.allocated_bytes,
                        categories=tuple(totals),
                    )
                )
        for _, phase in phases:
            self._note_phase(phase)

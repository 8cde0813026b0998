"""The memory of one rank of several, from the simulation of one with its share of the batch.

The requests of the simulation are scaled to what a rank holds, buffers for communication are added, and the result is
replayed as before. Shares are those of `cost.sharding`, over the parameters that the model really has.
"""

import re
from collections import defaultdict
from collections.abc import Sequence

from stepscope.cost.sharding import LayerSize, Sharding, TrainingBytes, training_bytes
from stepscope.planner.owners import Owner
from stepscope.planner.places import OPTIMIZER
from stepscope.planner.replayed_memory import ReplayedMemory, Request, StepEvents, fits, replay_memory
from stepscope.planner.simulation import ParameterSize, Simulation
from stepscope.recording.memory.allocator_model import MemoryEvent

_BLOCK = re.compile(r"^(.*?\.\d+)\.")
ASSUMPTIONS: dict[Sharding, str] = {
    "none": "Data parallel: every rank holds buckets of the size of its gradients.",
    "optimizer": "Sharded optimizer: the rank with the largest share of whole parameters, with buckets of the size of "
    "its gradients.",
    "fsdp": "FSDP: matrices are sharded evenly; two whole layers and their gradients are gathered at a time.",
}


class RankMemory:
    """The memory of a rank: `memory` as of a single GPU, and whether it fits."""

    def __init__(self, simulation: Simulation, *, ranks: int, sharding: Sharding) -> None:
        self.assumption = ASSUMPTIONS[sharding]
        self._simulation = simulation
        layers = find_layers(simulation.parameter_sizes)
        whole = training_bytes(layers, ranks=1, sharding="none")
        part = training_bytes(layers, ranks=ranks, sharding=sharding)
        buffers = whole.gradients if sharding != "fsdp" else 2 * part.gathered
        self._events, requests = _scale(simulation, _shares(whole, part), buffers if ranks > 1 else 0)
        self.memory: ReplayedMemory = replay_memory(self._events, requests)

    def fits(self, memory_bytes: int | None = None) -> bool:
        gpu = self._simulation.gpu
        total = gpu.memory_bytes if memory_bytes is None else memory_bytes
        return fits(self._events, self.memory, total - gpu.context_bytes)


def find_layers(parameters: Sequence[ParameterSize]) -> list[LayerSize]:
    """The layers of a model in order: its numbered modules, and what is between them by outermost name."""
    groups: dict[str, list[ParameterSize]] = defaultdict(list)
    for one in parameters:
        block = _BLOCK.match(one.name)
        groups[block[1] if block else one.name.partition(".")[0]].append(one)
    return [
        LayerSize(
            matrices=tuple(one.elements for one in members if one.is_matrix),
            vectors=tuple(one.elements for one in members if not one.is_matrix),
        )
        for members in groups.values()
    ]


def _shares(whole: TrainingBytes, part: TrainingBytes) -> dict[str, float]:
    """The part of each category that a rank holds."""
    return {
        "parameters": part.parameters / whole.parameters,
        "gradients": part.gradients / whole.gradients,
        "optimizer state": part.optimizer / whole.optimizer,
    }


def _scale(simulation: Simulation, shares: dict[str, float], buffers: int) -> tuple[StepEvents, list[Request]]:
    """The events and requests of a rank. What the optimizer takes for a moment is for what it updates. Buffers are
    there from the start."""
    requests = []
    for one in simulation.requests:
        updates = one.phase == OPTIMIZER and one.owner.category == "temporaries"
        share = shares.get("optimizer state" if updates else one.owner.category, 1.0)
        requests.append(one._replace(bytes=max(1, round(one.bytes * share))))
    events, origins = simulation.events, simulation.events.origins
    number = 1 + max(number for number, _ in events.all)

    def scale(part: list[MemoryEvent]) -> list[MemoryEvent]:
        return [
            MemoryEvent(number, requests[origins.get(number, number)].bytes if size else 0) for number, size in part
        ]

    before = scale(events.before)
    if buffers:
        before.append(MemoryEvent(number, buffers))
        origins = {**origins, number: len(requests)}
        requests.append(Request(buffers, "buffers", "build", "", -1, Owner("communication")))
    steps = [scale(step) for step in events.steps]
    return events._replace(before=before, steps=steps, origins=origins), requests

"""Passes cut into sections that a model with fewer layers has too.

A replay runs a few layers of the claimed model, and the evidence shows all of them. Attention marks where to cut: what
runs from one attention call to the next is the same in every layer of a decoder, whatever their number. So is what
precedes the first layer and follows the last one. In training, the backward pass is cut in the same way. Only the
optimizer depends on the number of layers.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from stepscope.recover.evidence.order import NoTransformerError, is_product, read_order
from stepscope.recover.evidence.structure import find_structure
from stepscope.recover.facts import Sighting
from stepscope.units import count_noun

# In the order of a pass. `layer` and `backward` are from one attention call to the next. `end` is what follows the last
# one in a forward pass; in training, it is `loss` and `update`, or `step` if the backward pass cannot be cut.
SectionKind = Literal["start", "layer", "end", "loss", "backward", "update", "step"]
Kernels = tuple[Sighting, ...]
PLACES: dict[SectionKind, str] = {
    "start": "before the first attention",
    "layer": "between attention calls",
    "end": "after the last attention",
    "loss": "from the last attention to its backward",
    "backward": "between the backwards of attention calls",
    "update": "after the last backward of attention",
    "step": "from the last attention to the end of the step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSection:
    """Consecutive kernels of a pass. `number` counts the sections of a kind from 1, in launch order."""

    kind: SectionKind
    pass_number: int
    number: int
    kernels: Kernels

    @property
    def where(self) -> str:
        if self.kind == "layer":
            return f"pass {self.pass_number}, layers {self.number} to {self.number + 1}"
        if self.kind == "backward":
            return f"pass {self.pass_number}, backward of layers, {self.number} to {self.number + 1}"
        return f"pass {self.pass_number}, {PLACES[self.kind]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRun:
    """The sections of all passes of a file. `calls` is the number of attention calls per pass: one for each layer, and
    for unfused attention one for the softmax of a loss."""

    num_layers: int
    calls: int
    sections: tuple[PassSection, ...]

    @property
    def start(self) -> Kernels:
        """What runs before the first attention of a pass."""
        return self.sections[0].kernels


def cut_replay(sightings: Sequence[Sighting]) -> CutRun:
    """Return the sections of a file that has only whole passes. Raises NoTransformerError if the kernels do not show
    equal layers."""
    structure = find_structure(sightings)
    passes = structure.layer_indices
    return CutRun(
        num_layers=structure.num_layers,
        calls=max(structure.num_layers, len(read_order(sightings).anchors) // len(passes)),
        sections=_cut(sightings, passes, passes[0][0], is_training=structure.is_training),
    )


def cut_evidence(
    sightings: Sequence[Sighting], replay: CutRun, num_layers: int, identify: Callable[[Sighting], object]
) -> CutRun:
    """Return the sections of the whole passes with the claimed number of layers. Raises NoTransformerError if there are
    none. A pass begins with the same kernels as the replay. If none does, the attention calls are counted, so that the
    comparison can show what differs."""
    order = read_order(sightings)
    anchors = [anchor[0].index for anchor in order.anchors]
    calls = num_layers + replay.calls - replay.num_layers
    start = [identify(one) for one in replay.start]
    looks = [identify(one) for one in sightings]
    first = [number for number, index in enumerate(anchors) if looks[max(0, index - len(start)) : index] == start]
    firsts = first or range(0, len(anchors), calls)
    passes = []
    for number, following in itertools.pairwise([*firsts, len(anchors)]):
        found = following - number
        if found != calls and (following < len(anchors) or found > calls):
            raise NoTransformerError(f"a pass with {count_noun(found, 'attention call')}, expected {calls}")
        if found == calls:
            passes.append(anchors[number : number + num_layers])
    if not passes:
        raise NoTransformerError(f"no whole pass of {num_layers} layers")
    sections = _cut(sightings, passes, len(start), is_training=order.is_training)
    return CutRun(num_layers=num_layers, calls=calls, sections=sections)


def _cut(
    sightings: Sequence[Sighting], passes: Sequence[Sequence[int]], start: int, *, is_training: bool
) -> tuple[PassSection, ...]:
    begins = [max(0, calls[0] - start) for calls in passes]
    ends = [*begins[1:], len(sightings)]
    sections: list[PassSection] = []
    for number, (calls, begin, end) in enumerate(zip(passes, begins, ends, strict=True), start=1):
        backward = _find_backward(sightings, calls[-1], end, len(calls))
        kinds: list[tuple[SectionKind, Sequence[int]]] = [("start", (begin, calls[0])), ("layer", calls)]
        if backward:
            kinds += [("loss", (calls[-1], backward[0])), ("backward", backward), ("update", (backward[-1], end))]
        else:
            kinds.append(("step" if is_training else "end", (calls[-1], end)))
        for kind, cuts in kinds:
            sections += _slice(sightings, kind, number, cuts)
    return tuple(sections)


def _slice(
    sightings: Sequence[Sighting], kind: SectionKind, pass_number: int, cuts: Sequence[int]
) -> Iterator[PassSection]:
    for number, (first, last) in enumerate(itertools.pairwise(cuts), start=1):
        yield PassSection(kind=kind, pass_number=pass_number, number=number, kernels=tuple(sightings[first:last]))


def _find_backward(sightings: Sequence[Sighting], after: int, before: int, num_layers: int) -> list[int]:
    """Return where the backward of each attention call begins, empty if there is not one for each layer. A loss has a
    softmax too, whose backward comes first."""
    calls: list[int] = []
    last = after
    for one in sightings[after:before]:
        if one.name.direction != "backward" or one.name.kernel_class not in ("attention", "softmax"):
            continue
        if not calls or any(is_product(other) for other in sightings[last : one.index]):
            calls.append(one.index)
        last = one.index
    return calls[-num_layers:] if len(calls) >= num_layers else []

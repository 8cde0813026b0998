"""How many parameters an optimizer went over, from its launches."""

import re
from collections.abc import Iterator, Sequence

from stepscope.recover.evidence.structure import is_product
from stepscope.recover.facts import Sighting
from stepscope.recover.families import optimizers as update

# A fused step, and the running mean of gradients in a step of many kernels.
_ONCE = re.compile(r"Fused\w*(?:Adam|Sgd|Adagrad)\w*Functor|LerpFunctor")


def find_updated(sightings: Sequence[Sighting]) -> tuple[Sighting, int, int] | None:
    """The first launch of an optimizer, and how many elements it went over in a step: at least, at most.

    A kernel may be called for several lists of tensors, or several times for the same one. So a single call is the
    least, and all calls of a kernel in a step are the most; where one is there that goes over each parameter once, its
    calls are."""
    launches = [one for one in sightings if one.name.kernel_class == "optimizer"]
    known = [one for one in launches if update.read(one) is not None]
    if not known or len(known) < len(launches):
        return None
    low, high = 0, 0
    for step in _split_steps(sightings):
        calls = [(call[0].name.name, found) for call in update.split_calls(step) if (found := update.join(call))]
        low = max([low, *(found.elements.low for _, found in calls)])
        totals: dict[str, int] = {}
        for name, found in calls:
            totals[name] = totals.get(name, 0) + found.elements.high
        once = [total for name, total in totals.items() if _ONCE.search(name)]
        high = max([high, *(once or totals.values())])
    return known[0], low, high


def _split_steps(sightings: Sequence[Sighting]) -> Iterator[list[Sighting]]:
    """The optimizer's launches between one forward pass and the next."""
    step: list[Sighting] = []
    for one in sightings:
        if one.name.kernel_class == "optimizer":
            step.append(one)
        elif is_product(one) and step:
            yield step
            step = []
    if step:
        yield step

"""What a forgery is: a pure function from a recorded run to forged evidence and a false claim, and what we promise."""

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from attack.documents import VARYING, Kind, Launch
from attack.subject import Forged, Subject

Promise = Literal["detected", "undetectable"]
# None: this forgery cannot be made from this file.
Forge = Callable[[Subject], Forged | None]
Made = TypeVar("Made", bound=Forge)
FORWARD: tuple[Kind, ...] = ("counters", "forward trace")
TRACES: tuple[Kind, ...] = ("forward trace", "training trace")
ALL: tuple[Kind, ...] = ("counters", "forward trace", "training trace")
COUNTERS: tuple[Kind, ...] = ("counters",)
TRAINING: tuple[Kind, ...] = ("training trace",)
_START_NS = 2_000  # how much later a kernel may start when it runs again


@dataclass(frozen=True, kw_only=True)
class Forgery:
    """`argument`: why nothing in the evidence can show the forgery; empty if it must be detected."""

    name: str
    family: str
    sentence: str
    kinds: tuple[Kind, ...]
    argument: str
    forge: Forge
    exhausts: bool = False  # `recover` runs on the evidence as well, and time and memory are what matters

    @property
    def promise(self) -> Promise:
        return "undetectable" if self.argument else "detected"


class Family:
    """Collects the forgeries of one class."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.forgeries: list[Forgery] = []

    def add(
        self, sentence: str, *, kinds: tuple[Kind, ...] = ALL, undetectable: str = "", exhausts: bool = False
    ) -> Callable[[Made], Made]:
        """Return a decorator. The function's name is that of the forgery."""

        def keep(forge: Made) -> Made:
            name = forge.__name__.replace("_", "-")
            self.forgeries.append(
                Forgery(
                    name=name,
                    family=self.name,
                    sentence=sentence,
                    kinds=kinds,
                    argument=undetectable,
                    forge=forge,
                    exhausts=exhausts,
                )
            )
            return forge

        return keep


# --- What several forgeries do


def renumber(launches: Iterable[Launch], recorded_rows: Iterable[Launch] = ()) -> list[Launch]:
    """Give kernels that were copied, moved or removed consecutive numbers and times: each keeps its distance to the
    kernel that was before it when it was recorded. `recorded_rows` has those that were removed."""
    rows = list(launches)
    recorded = {one.number: one for one in (*recorded_rows, *rows)}
    numbers = sorted(recorded)
    before = {number: recorded[previous] for previous, number in itertools.pairwise(numbers)}
    done: list[Launch] = []
    for one in rows:
        last, previous = (done[-1] if done else None), before.get(one.number)
        if last is None:
            done.append(one)
            continue
        step = one.number - previous.number if previous else 1
        gap = one.start_ns - previous.start_ns - previous.duration_ns if previous and one.start_ns else 0.0
        start = last.start_ns + last.duration_ns + max(gap, 0.0) if one.start_ns else 0.0
        done.append(replace(one, number=last.number + step, start_ns=start))
    return done


def redraw(launches: Iterable[Launch], seed: str) -> list[Launch]:
    """Change what differs between two launches of the same kernel by as much as it differs on a GPU."""
    chance = random.Random(seed)
    changed = []
    for one in launches:
        again = one.slow_down(1 + chance.uniform(0.01, 0.04) * chance.choice((-1, 1)))
        counters = {
            name: _redraw_counter(value, 1 + chance.uniform(-0.02, 0.02), unit=VARYING[name])
            if name in VARYING
            else value
            for name, value in one.counters.items()
        }
        start = one.start_ns + round(chance.uniform(0, _START_NS)) if one.start_ns else 0.0
        changed.append(replace(again, counters=counters, start_ns=start))
    return changed


def _redraw_counter(value: float, share: float, *, unit: int) -> float:
    return round(value * share / unit) * unit


def replace_at(launches: Sequence[Launch], index: int, *others: Launch) -> list[Launch]:
    return [*launches[:index], *others, *launches[index + 1 :]]

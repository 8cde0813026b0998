"""Checks what the readers of kernel families conclude against recorded shapes: no fact may exclude the truth.

    python bench/check_families.py EVIDENCE [NAME ...]    a directory of NAME.MODE.json.gz (with shapes) and NAME.csv.gz

A trace's kernels are joined to the operators that launched them, whose shapes are the truth. Kernels of an Nsight
Compute CSV have no operators: they take the truth of kernels with the same name and grid in the run's forward trace.
Prints one line per family (kernels, facts, facts compared with a truth, exact ones, most choices, the median of a
window's size over its center), then every wrong fact.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import polars as pl

from stepscope.explain.kernel_names import decode
from stepscope.explain.trace.attribution import attribute_kernels
from stepscope.recording.readers import kineto, ncu
from stepscope.recording.readers.counter_metrics import METRICS, CounterKey
from stepscope.recording.store import Recording
from stepscope.recover.facts import Elements, Gather, Rows, Sighting, Update, Window
from stepscope.recover.families import Platform, optimizers, read_fact, read_facts
from stepscope.recover.families.elementwise import is_recent
from stepscope.recover.families.grids import take_apart

COUNTERS = {metric.name: metric.key for metric in METRICS if metric.key}
TYPE_BYTES = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "double": 8, "long int": 8, "bool": 1}
NOT_HERE = ("GEMM", "attention", "convolution", "communication")
Key = tuple[str, tuple[int, int, int], tuple[int, int, int]]


def launch_blocks(sizes: Iterable[int], most_tensors: int, most_blocks: int) -> tuple[int, ...]:
    """The grids of the launches for a list of tensors of these sizes, in order."""
    grids = []
    blocks = tensors = 0
    for size in sizes:
        left = -(-size // optimizers.CHUNK_ELEMENTS)
        tensors += left > 0
        while left:
            taken = min(left, most_blocks - blocks)
            blocks, left = blocks + taken, left - taken
            if blocks == most_blocks or (tensors == most_tensors and not left):
                grids.append(blocks)
                # A tensor that was split is the first of the next launch.
                blocks, tensors = 0, int(left > 0)
    return (*grids, blocks) if blocks else tuple(grids)


@dataclass(frozen=True)
class Truth:
    """What an operator's shapes say about a kernel that it launched; a field is None if they do not say."""

    elements: int | None = None
    rows: int | None = None
    width: int | None = None
    width_bytes: int | None = None


@dataclass
class Operator:
    name: str
    shapes: list[Any]
    dtypes: list[str]
    arguments: list[str]

    def tensor(self, index: int) -> list[Any]:
        return self.shapes[index] if index < len(self.shapes) else []


def size(shape: list[int]) -> int:
    return math.prod(shape)


def broadcast(op: Operator) -> Truth:
    shapes = [shape for shape in op.shapes if shape and isinstance(shape[0], int)]
    rank = max(map(len, shapes), default=0)
    padded = [[1] * (rank - len(shape)) + shape for shape in shapes]
    return Truth(elements=math.prod(max(sizes) for sizes in zip(*padded, strict=True)))


def first(op: Operator) -> Truth:
    return Truth(elements=size(op.tensor(0)))


def concatenated(op: Operator) -> Truth:
    return Truth(elements=sum(map(size, op.shapes[0])))


def counted(op: Operator) -> Truth:
    start, end, step = (int(float(argument)) for argument in op.arguments[:3])
    return Truth(elements=(end - start) // step)


def normed(op: Operator) -> Truth:
    width = size(json.loads(op.arguments[1] or op.arguments[2]))
    return Truth(rows=size(op.tensor(0)) // width, width=width, elements=size(op.tensor(0)))


def last_dimension(op: Operator) -> Truth:
    width = op.tensor(0)[-1]
    return Truth(rows=size(op.tensor(0)) // width, width=width)


def reduced(op: Operator) -> Truth:
    shape = op.tensor(0)
    said = op.arguments[1] if len(op.arguments) > 1 else ""
    dimensions = json.loads(said) if said.startswith("[") else [int(said)] if said else list(range(len(shape)))
    width = math.prod(shape[dimension] for dimension in dimensions)
    return Truth(rows=size(shape) // width, width=width, elements=size(shape))


def gathered(op: Operator) -> Truth:
    lookups, columns = op.tensor(2)
    return Truth(rows=lookups, width_bytes=columns * TYPE_BYTES[op.dtypes[0]])


def embedded_backward(op: Operator) -> Truth:
    columns = op.tensor(0)[-1]
    return Truth(rows=size(op.tensor(1)), width_bytes=columns * TYPE_BYTES[op.dtypes[0]])


def generated(op: Operator) -> Truth:
    """Inductor's own calls end with the sizes of the problem; these precede the sizes of a call with unknown sizes."""
    numbers = [int(argument) for argument in op.arguments if argument.isdigit()]
    if op.name.startswith("triton_poi"):
        return Truth(elements=numbers[-1])
    return Truth(rows=numbers[-2], width=numbers[-1])


ELEMENTWISE = """add add_ sub mul mul_ div div_ rsub neg pow tanh sigmoid silu gelu exp rsqrt cos sin where eq ne le lt
    gt ge masked_fill masked_fill_ bitwise_and bitwise_and_ bitwise_or logical_not isneginf tanh_backward
    sigmoid_backward silu_backward gelu_backward sqrt reciprocal clamp clamp_min clamp_min_ threshold_backward
    sub_ addcmul_ lerp_"""
TRUTHS: dict[str, Callable[[Operator], Truth]] = {
    **{f"aten::{name}": broadcast for name in ELEMENTWISE.split()},
    **{f"aten::{name}": first for name in ("copy_", "fill_", "zero_", "triu", "tril")},
    **{f"aten::{name}": reduced for name in ("mean", "sum", "amax", "all", "any", "cumsum")},
    "aten::cat": concatenated,
    "aten::arange": counted,
    "aten::native_layer_norm": normed,
    "aten::native_layer_norm_backward": normed,
    "aten::_softmax": last_dimension,
    "aten::_log_softmax": last_dimension,
    "aten::_softmax_backward_data": last_dimension,
    "aten::_log_softmax_backward_data": last_dimension,
    "aten::gather": gathered,
    "aten::embedding_dense_backward": embedded_backward,
}


def find_truth(op: Operator, base: str) -> Truth | None:
    if not any(op.shapes):
        return None
    if op.name == "aten::cat" and not base.startswith("CatArray"):  # of many dimensions: a copy for each tensor
        return Truth(elements=size(op.shapes[0][0])) if len(set(map(size, op.shapes[0]))) == 1 else None
    if op.name.startswith("triton_"):
        return generated(op)
    return TRUTHS[op.name](op) if op.name in TRUTHS else None


def admits(fact: object, truth: Truth) -> bool | None:
    """None if the shapes do not say."""
    match fact:
        case Elements():
            pairs: list[tuple[Window | None, int | None]] = [(fact.count, truth.elements)]
        case Rows():
            pairs = [(fact.rows, truth.rows), (fact.width, truth.width)]
        case Gather():
            pairs = [(fact.rows, truth.rows), (fact.width_bytes, truth.width_bytes)]
        case _:
            return None
    known = [(window, number) for window, number in pairs if window is not None and number is not None]
    return all(number in window for window, number in known) if known else None


@dataclass
class Tally:
    kernels: int = 0
    facts: int = 0
    checked: int = 0
    exact: int = 0
    spread: list[float] = field(default_factory=list)  # the widest window's size over its center, in each fact
    num_choices: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def windows_of(fact: object) -> list[Window]:
    match fact:
        case Elements():
            return [fact.count]
        case Rows():
            return [fact.rows]
        case Gather():
            return [fact.rows, *([fact.width_bytes] if fact.width_bytes else [])]
        case Update():
            return [fact.elements]
    return []


def sightings(recording: Recording) -> Iterator[Sighting]:
    counters: dict[int, dict[CounterKey, int]] = defaultdict(dict)
    known = recording.counters.filter(pl.col("metric").is_in(list(COUNTERS)), pl.col("value").is_not_null())
    for kernel, metric, value in known.select("kernel", "metric", "value").iter_rows():
        counters[kernel][COUNTERS[metric]] = int(value)
    for index, row in enumerate(recording.kernels.iter_rows(named=True)):
        grid, block = ((row[f"{what}_x"], row[f"{what}_y"], row[f"{what}_z"]) for what in ("grid", "block"))
        if row["kind"] == "kernel" and grid[0]:
            yield Sighting(
                index=index, name=decode(row["name"]), grid=grid, block=block, registers=row["registers"],
                shared_bytes=row["shared_bytes"], counters=counters.get(index, {}),
            )  # fmt: skip


def operators(recording: Recording) -> dict[int, tuple[int, Operator]]:
    """The operator's row and the operator, by the row of the kernel."""
    found = {}
    for index, row in enumerate(attribute_kernels(recording)["op_row"].to_list()):
        if row is not None:
            op = recording.ops.row(row, named=True)
            fields = (json.loads(op[name] or "[]") for name in ("shapes", "dtypes", "arguments"))
            found[index] = (row, Operator(op["name"], *fields))
    return found


class Check:
    def __init__(self) -> None:
        self.tallies: dict[str, Tally] = defaultdict(Tally)

    def see(self, source: str, sighting: Sighting, truths: set[Truth], *, recent: bool) -> None:
        if sighting.name.kernel_class in NOT_HERE:
            return
        family = f"{sighting.name.library} {sighting.name.kernel_class}"
        base = take_apart(sighting.name.name)[0].base
        kind = base[:10] if base.startswith("triton_") else base[:36]
        tally = self.tallies[f"{family}, {kind}{', counted' * bool(sighting.counters)}"]
        tally.kernels += 1
        choices = read_facts(sighting, Platform(recent=recent))
        whole = read_fact(sighting)
        if not windows_of(whole):  # none, or a fact about attention
            return
        tally.facts += 1
        tally.num_choices.append(len(choices))
        best = [windows_of(choice) for choice in choices]
        tally.exact += all(window.is_exact for windows in best for window in windows) and len(choices) == 1
        if len(choices) == 1:
            tally.spread.append(max(window.size / (window.low + window.high) * 2 for window in best[0]))
        said = [admits(whole, truth) for truth in truths]
        tally.checked += any(verdict is not None for verdict in said)
        # A kernel of a CSV has one of several truths.
        held = any(
            admits(whole, truth) is not False and any(admits(choice, truth) is not False for choice in choices)
            for truth in truths
        )
        if truths and not held:
            tally.wrong.append(f"{source} {sighting.name.short} {sighting.grid} {sighting.block} {whole} {truths}")

    def see_trace(self, path: Path) -> dict[Key, set[Truth]]:
        recording = kineto.read(path)
        ops = operators(recording)
        seen = list(sightings(recording))
        recent = is_recent(sighting.name for sighting in seen)
        truths: dict[Key, set[Truth]] = defaultdict(set)
        updates: dict[int, list[Sighting]] = defaultdict(list)
        for sighting in seen:
            row, op = ops.get(sighting.index, (-1, None))
            truth = find_truth(op, take_apart(sighting.name.name)[0].base) if op else None
            if truth:
                truths[sighting.name.short, sighting.grid, sighting.block].add(truth)
            self.see(path.name, sighting, {truth} if truth else set(), recent=recent)
            if op and op.name.startswith("aten::_f") and sighting.name.kernel_class == "optimizer":
                updates[row].append(sighting)
        for launches in updates.values():
            self.see_update(path.name, ops[launches[0].index][1], launches)
        return truths

    def see_update(self, source: str, op: Operator, launches: list[Sighting]) -> None:
        tally = self.tallies["ATen optimizer, whole calls"]
        sizes = [size(shape) for shape in op.tensor(0)]
        grids = tuple(launch.grid[0] for launch in launches)
        room = optimizers.room_for_tensors(launches[0], optimizers.SMALL)
        joined = optimizers.join_launches(launches)
        tally.kernels += 1
        if not room or not joined or not sizes or not all(sizes):
            return
        tally.facts += 1
        tally.checked += 1
        modelled = launch_blocks(sizes, room, optimizers.SMALL.blocks)
        if sum(sizes) not in joined.elements or modelled != grids:
            tally.wrong.append(f"{source} {op.name} {len(sizes)} tensors {sum(sizes)} {joined} {modelled} {grids}")

    def see_csv(self, path: Path, truths: dict[Key, set[Truth]]) -> None:
        seen = list(sightings(ncu.read(path)))
        recent = is_recent(sighting.name for sighting in seen)
        for sighting in seen:
            key = (sighting.name.short, sighting.grid, sighting.block)
            self.see(path.name, sighting, truths.get(key, set()), recent=recent)

    def write(self) -> int:
        print(f"{'kernel':64} {'seen':>6} {'facts':>6} {'held':>6} {'exact':>6} {'choices':>8} {'spread':>8}")
        for name, tally in sorted(self.tallies.items()):
            choices = max(tally.num_choices, default=0)
            spread = f"{median(tally.spread):9.3f}" if tally.spread else ""
            numbers = (tally.kernels, tally.facts, tally.checked, tally.exact)
            print(f"{name[:64]:64} {' '.join(f'{number:6}' for number in numbers)} {choices:8}{spread}")
        wrong = [line for tally in self.tallies.values() for line in tally.wrong]
        print(f"\n{len(wrong)} facts exclude the truth")
        print("\n".join(wrong))
        return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    check = Check()
    truths: dict[str, dict[Key, set[Truth]]] = {}
    for path in sorted(asked.folder.glob("*.json.gz")):
        name = path.name.removesuffix(".json.gz")
        if not asked.names or name.partition(".")[0] in asked.names:
            truths[name] = check.see_trace(path)
    for path in sorted(asked.folder.glob("*.csv.gz")):
        if (forward := f"{path.name.removesuffix('.csv.gz')}.forward") in truths:
            check.see_csv(path, truths[forward])
    return check.write()


if __name__ == "__main__":
    sys.exit(main())

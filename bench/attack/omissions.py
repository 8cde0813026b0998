"""Forgeries that leave kernels out, cut the file, or change the order."""

import csv
import io
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace

from attack.documents import Launch
from attack.forgery import COUNTERS, FORWARD, TRAINING, Family, renumber
from attack.subject import Forged, Region, Subject, is_gemm
from stepscope.explain.kernel_names import decode

DROPPED = Family("dropped kernels")
CUT = Family("cut files")
REORDERED = Family("reordered kernels")


def _without_layer(subject: Subject) -> list[Launch]:
    """Return the kernels without the last layer of every pass."""
    gone: set[int] = set()
    for region in subject.regions:
        block = region.slice(region.layers - 1)
        gone |= set(range(block.start, block.stop))
    return [one for index, one in enumerate(subject.launches) if index not in gone]


def _without(subject: Subject, index: int) -> list[Launch]:
    return [*subject.launches[:index], *subject.launches[index + 1 :]]


def _close(subject: Subject, kept: Iterable[Launch]) -> list[Launch]:
    """Close the gaps in numbers and times that kernels leave."""
    return renumber(kept, subject.launches)


@DROPPED.add("A layer is left out, and all layers are claimed.")
def dropped_layer(subject: Subject) -> Forged:
    return subject.forge(_close(subject, _without_layer(subject)))


@DROPPED.add("One GEMM of a layer is left out.")
def dropped_gemm(subject: Subject) -> Forged:
    return subject.forge(_close(subject, _without(subject, subject.longest_product)))


@DROPPED.add("The attention of one layer is left out.")
def dropped_attention(subject: Subject) -> Forged | None:
    found = [index for index, one in enumerate(subject.launches) if _is_attention(one)]
    return subject.forge(_close(subject, _without(subject, found[-1]))) if found else None


def _is_attention(launch: Launch) -> bool:
    name = decode(launch.name)
    return name.kernel_class == "attention" and name.operation == "attention forward"


@DROPPED.add("One elementwise kernel of a layer is left out.")
def dropped_elementwise(subject: Subject) -> Forged | None:
    if subject.forward.layers < 2:
        return None  # of two compiled layers, only one can be compared: the same as `thinner_layers`
    block = subject.forward.slice(subject.forward.layers - 1)
    found = [index for index in range(block.start, block.stop) if _is_elementwise(subject.launches[index])]
    return subject.forge(_close(subject, _without(subject, found[len(found) // 2]))) if found else None


def _is_elementwise(launch: Launch) -> bool:
    return decode(launch.name).kernel_class == "elementwise"


@DROPPED.add("Every seventh kernel is left out.")
def dropped_every_seventh(subject: Subject) -> Forged | None:
    if subject.forward.period % 7 == 0:
        return None  # every layer would lose the same kernels: see the next forgery
    return subject.forge(_close(subject, (one for index, one in enumerate(subject.launches) if index % 7 != 3)))


@DROPPED.add(
    "The same elementwise kernel of every layer is left out.",
    undetectable="programs and compilers fuse such kernels differently; a file without one may be of another program",
)
def thinner_layers(subject: Subject) -> Forged | None:
    gone: set[int] = set()
    for region in subject.regions:
        first = range(region.start, region.start + region.period)
        found = [index for index in first if _is_elementwise(subject.launches[index])]
        if not found:
            return None
        gone |= set(range(found[len(found) // 2], region.end, region.period))
    return subject.forge(_close(subject, (one for index, one in enumerate(subject.launches) if index not in gone)))


def _without_places(subject: Subject, choose: Callable[[Region], Iterable[int]]) -> list[Launch]:
    """Return the kernels without those at these positions of the first layer, in every layer."""
    gone = {
        index
        for region in subject.regions
        for first in choose(region)
        for index in range(first, region.end, region.period)
    }
    return _close(subject, (one for index, one in enumerate(subject.launches) if index not in gone))


@DROPPED.add("The norms of all layers are left out.", kinds=FORWARD)
def dropped_norms(subject: Subject) -> Forged | None:
    def choose(region: Region) -> Iterable[int]:
        first = range(region.start, region.start + region.period)
        return [index for index in first if decode(subject.launches[index].name).kernel_class in ("norm", "reduction")]

    is_compiled = any(decode(one.name).library == "Inductor" for one in subject.launches)
    return None if is_compiled or not list(choose(subject.forward)) else subject.forge(_without_places(subject, choose))


@DROPPED.add("The key projection of every layer is left out, and half of the key-value heads are claimed.")
def dropped_key_projections(subject: Subject) -> Forged | None:
    """Keys and values are the shortest two equal GEMMs in a row."""
    heads = subject.truth["num_kv_heads"]

    def look(index: int) -> tuple[object, ...]:
        return subject.launches[index].name, subject.launches[index].grid

    def choose(region: Region) -> Iterable[int]:
        first = [
            index for index in range(region.start, region.start + region.period) if is_gemm(subject.launches[index])
        ]
        pairs = [one for one, following in itertools.pairwise(first) if look(one) == look(following)]
        return sorted(pairs, key=lambda index: subject.launches[index].duration_ns)[:1]

    if heads % 2 or not list(choose(subject.forward)) or "num_kv_heads" not in subject.claim:
        return None
    sizes = {name: subject.truth[name] for name in ("num_heads", "d_head")}
    return subject.forge(_without_places(subject, choose), **sizes, num_kv_heads=heads // 2)


@DROPPED.add("Every second GEMM is left out.")
def dropped_every_second_gemm(subject: Subject) -> Forged:
    products = [index for index, one in enumerate(subject.launches) if is_gemm(one)]
    gone = set(products[1::2])
    return subject.forge(_close(subject, (one for index, one in enumerate(subject.launches) if index not in gone)))


@DROPPED.add("The LM head is left out, and vocab_size is claimed.")
def dropped_head(subject: Subject) -> Forged:
    head = subject.launches[subject.head]
    kept = [one for one in subject.launches if (one.name, one.grid) != (head.name, head.grid)]
    return subject.forge(_close(subject, kept), vocab_size=subject.truth["vocab_size"])


@DROPPED.add("A layer is left out and not claimed; the numbers and times have a gap.", kinds=FORWARD)
def hidden_layer_with_gap(subject: Subject) -> Forged:
    return subject.forge(_without_layer(subject), num_layers=subject.truth["num_layers"] - 1)


@DROPPED.add("The last layer is on another stream, behind the others and without durations, and is not claimed.")
def layer_on_another_stream(subject: Subject) -> Forged:
    kept = _without_layer(subject)
    numbers = {one.number for one in kept}
    shown = _close(subject, kept)
    last = shown[-1]
    start = last.start_ns + last.duration_ns + 1_000 if last.start_ns else 0.0
    hidden = [
        replace(one, stream=one.stream + 1, duration_ns=0, start_ns=start, number=last.number + 1 + index)
        for index, one in enumerate(one for one in subject.launches if one.number not in numbers)
    ]
    return subject.forge([*shown, *hidden], num_layers=subject.truth["num_layers"] - 1)


@DROPPED.add("The rows of the last layer have no ID, like the row of units, and it is not claimed.", kinds=COUNTERS)
def layer_without_ids(subject: Subject) -> Forged:
    kept = {one.number for one in _without_layer(subject)}
    hidden = {index for index, one in enumerate(subject.launches, start=2) if one.number not in kept}
    forged = subject.forge(subject.launches, num_layers=subject.truth["num_layers"] - 1)
    (file, content), *_ = forged.files
    rows = list(csv.reader(io.StringIO(content.decode())))
    column, number = rows[0].index("ID"), subject.launches[0].number
    for index, row in enumerate(rows[2:], start=2):
        row[column] = "" if index in hidden else str(number)
        number += index not in hidden
    written = io.StringIO()
    csv.writer(written, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    return replace(forged, files=((file, written.getvalue().encode()),))


@DROPPED.add(
    "A layer is left out and not claimed; the numbers and times were closed up.",
    kinds=FORWARD,
    undetectable="the file is that of a shallower model; only the person who recorded it knows what is missing",
)
def hidden_layer_renumbered(subject: Subject) -> Forged:
    return subject.forge(_close(subject, _without_layer(subject)), num_layers=subject.truth["num_layers"] - 1)


@DROPPED.add("A layer of a training step is left out and not claimed; the optimizer updates it.", kinds=TRAINING)
def hidden_layer_in_training(subject: Subject) -> Forged:
    return subject.forge(_close(subject, _without_layer(subject)), num_layers=subject.truth["num_layers"] - 1)


# --- Cut files


@CUT.add("The file starts at the second layer, and one layer fewer is claimed.")
def cut_before_second_layer(subject: Subject) -> Forged:
    last = subject.regions[-2] if len(subject.regions) == 4 else subject.forward
    start = last.start + last.period
    return subject.forge(subject.launches[start:], num_layers=subject.truth["num_layers"] - 1)


@CUT.add("The file starts in the middle of the first layer, and one layer fewer is claimed.")
def cut_in_first_layer(subject: Subject) -> Forged:
    last = subject.regions[-2] if len(subject.regions) == 4 else subject.forward
    start = last.start + last.period // 2
    return subject.forge(subject.launches[start:], num_layers=subject.truth["num_layers"] - 1)


@CUT.add("The file ends before the last layer, and one layer fewer is claimed, without the LM head.")
def cut_before_last_layer(subject: Subject) -> Forged:
    end = subject.forward.slice(subject.forward.layers - 1).start
    layers = subject.truth["num_layers"] - 1
    return subject.forge(subject.launches[:end], num_layers=layers, vocab_size=None)


@CUT.add("The bytes of the file end in the middle of a layer, and one layer fewer is claimed.")
def cut_bytes(subject: Subject) -> Forged:
    forged = subject.forge(subject.launches, num_layers=subject.truth["num_layers"] - 1)
    (name, content), *_ = forged.files
    share = subject.forward.slice(subject.forward.layers - 1).start / len(subject.launches)
    return Forged(files=((name, content[: int(share * len(content))]),), claim=forged.claim)


# --- Order


@REORDERED.add("All kernels are in random order.")
def shuffled(subject: Subject) -> Forged:
    kernels = list(subject.launches)
    random.Random(subject.name).shuffle(kernels)
    return subject.forge(renumber(kernels))


@REORDERED.add("All kernels are in reverse order.")
def reversed_order(subject: Subject) -> Forged:
    return subject.forge(renumber(reversed(subject.launches)))


@REORDERED.add("The optimizer's kernels come first.", kinds=TRAINING)
def optimizer_first(subject: Subject) -> Forged:
    return subject.forge(renumber(sorted(subject.launches, key=lambda one: not _is_of_optimizer(one))))


def _is_of_optimizer(launch: Launch) -> bool:
    return decode(launch.name).kernel_class == "optimizer"


@REORDERED.add("The layers run backward before they run forward.", kinds=TRAINING)
def backward_first(subject: Subject) -> Forged | None:
    if len(subject.regions) != 4:
        return None
    forward, backward = subject.regions[:2]
    rows = subject.launches
    kernels = [
        *rows[: forward.start],
        *rows[backward.start : backward.end],
        *rows[forward.end : backward.start],
        *rows[forward.start : forward.end],
        *rows[backward.end :],
    ]
    return subject.forge(renumber(kernels))


@REORDERED.add("Two different GEMMs of one layer are swapped.")
def swapped_gemms(subject: Subject) -> Forged | None:
    products = subject.products(subject.forward.layers - 1)
    first = products[-1]
    others = [index for index in products if subject.launches[index].name != subject.launches[first].name]
    if not others:
        return None
    kernels = list(subject.launches)
    kernels[first], kernels[others[0]] = kernels[others[0]], kernels[first]
    return subject.forge(renumber(kernels))

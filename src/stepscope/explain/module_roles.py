"""Which modules of a model are layers: numbered siblings that are alike.

A model has many similar layers, and a table is readable if the same module of all layers is one row: `blocks.*.ffn.up`.
But numbers alone do not make a layer. An `nn.Sequential` numbers an embedding, a block and a head as well, and merging
those would mix three different things.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

_ALIKE = 0.5  # of the submodules of two layers: the first or the last one may lack some
_MOST_COMPARED = 50  # kinds of siblings that each one is compared with: a model has a few
Submodules = frozenset[str]


def find_roles(kinds: Mapping[str, str]) -> dict[str, str]:
    """Return each path with `*` for the numbers of layers; `kinds` is as for `find_layers`."""
    layers = find_layers(kinds)
    roles = {}
    for path in kinds:
        parts = path.split(".")
        names = ("*" if ".".join(parts[: at + 1]) in layers else part for at, part in enumerate(parts))
        roles[path] = ".".join(names)
    return roles


def find_layers(kinds: Mapping[str, str]) -> set[str]:
    """Return the paths that are layers, among the given ones and those above them. `kinds` maps a path to what tells
    modules without submodules apart: their class or their operators; empty if unknown."""
    inside = _list_submodules(kinds)
    siblings: dict[str, list[str]] = {}
    for path in inside:
        parent, _, name = path.rpartition(".")
        if name.isdecimal():
            siblings.setdefault(parent, []).append(path)
    return {path for numbered in siblings.values() for path in _find_alike(numbered, inside, kinds)}


def _find_alike(siblings: Sequence[str], inside: Mapping[str, Submodules], kinds: Mapping[str, str]) -> Iterator[str]:
    """Yield the siblings that have about the same submodules as another one or, without submodules, all of them if they
    have one kind and no number is missing: two linear layers with an activation between them have different roles.
    One without siblings is the layer of a model with a single one."""
    have_submodules = [path for path in siblings if inside[path]]
    if not have_submodules:
        numbers = [int(path.rpartition(".")[2]) for path in siblings]
        is_complete = max(numbers) - min(numbers) < len(numbers)
        yield from siblings if is_complete and len({kinds.get(path, "") for path in siblings}) == 1 else ()
        return
    known = Counter(inside[path] for path in siblings)
    common = [one for one, _ in known.most_common(_MOST_COMPARED)]
    for path in have_submodules:
        mine = inside[path]
        others = (other for other in common if other != mine)
        if len(siblings) == 1 or known[mine] > 1 or any(_overlap(mine, other) >= _ALIKE for other in others):
            yield path


def _overlap(one: Submodules, other: Submodules) -> float:
    return len(one & other) / len(one | other)


def _list_submodules(paths: Mapping[str, str]) -> dict[str, Submodules]:
    """Return the names below each path, for the given paths and those above them. Numbers in them do not count: layers
    are alike whichever of their experts run."""
    found: dict[str, set[str]] = {}
    for path in paths:
        parts = path.split(".")
        names = ["*" if part.isdecimal() else part for part in parts]
        for depth in range(1, len(parts) + 1):
            below = found.setdefault(".".join(parts[:depth]), set())
            if depth < len(parts):
                below.add(".".join(names[depth:]))
    return {path: frozenset(below) for path, below in found.items()}

"""The modules of a recording as a tree in which alike layers are folded: twelve times `blocks.*`, with the same module
of all twelve in one node.

`module_roles` decides which numbered modules are layers. Paths of classes, from the profiler's stacks, are brought into
its form: their numbers count all modules of a class in the model, so the tenth `Linear` of one layer is the fourth of
the next, and a module is named by its place among its siblings instead. Modules of one class are layers only if they
contain others, because the four `Linear` of an attention have different roles; the same goes for two to four of one
class inside a layer, which are self-attention and cross-attention. A level that only contains another is joined with
it.

Every module is in exactly one node, whatever is folded: children and what a module runs itself add up to the module,
and the nodes at the top to the kernel time.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import polars as pl

from stepscope.explain.module_roles import find_layers
from stepscope.explain.trace.attribution.names import cut_name
from stepscope.explain.trace.profile import UNKNOWN
from stepscope.findings import ModuleTree

SELF, SMALLER = "(self)", "(smaller)"
_NUMBERED = re.compile(r"(.+)_(\d{1,9})")  # a class with its number, or a name such as `encoder_layer_3`
_NUMBER = re.compile(r"(?:\d+|\*)(?:\.|$)")
_LAST_NAME = re.compile(r"[^.]*(?:\.(?:\d+|\*))*$")
_FEW = 4
_MOST_LEVELS = 24  # more are not the modules of a model

Path = tuple[str, ...]
Levels = Mapping[str, "tuple[Level, ...]"]


class Level(NamedTuple):
    """One level of a module's path: as recorded, `blocks.3`, and what is the same in all copies, `blocks.*`. Levels
    joined by dots are the path."""

    label: str
    role: str


# --- Which modules are alike ------------------------------------------------------------------------------------------


def fold_modules(kinds: Mapping[str, str]) -> dict[str, tuple[Level, ...]]:
    """Return the levels of each module from the top. `kinds` is as for `find_layers`: it tells modules without
    submodules apart."""
    split = {module: split_path(module) for module in kinds}
    spelling = _Spelling(split.values())
    leaves = {split[module]: kind for module, kind in kinds.items()}
    layers = find_layers({spelling.spell(path): kind for path, kind in spelling.tell_apart(leaves).items()})
    if not layers:
        # Without blocks, as in a model of nothing but linear layers, modules of one class are the layers.
        layers = find_layers({spelling.spell(path): kind for path, kind in leaves.items()})
    levels = {module: spelling.level(path, layers) for module, path in split.items()}
    return _join_chains(levels)


def split_path(module: str) -> Path:
    """Return the names of a path. Work outside all modules has a name in parentheses, which is not split."""
    return (module,) if module.startswith("(") else tuple(module.split("."))


class _Spelling:
    """Paths as `find_layers` reads them, with a number of its own for each of several siblings of one class."""

    def __init__(self, paths: Iterable[Path]) -> None:
        siblings: dict[tuple[Path, str], dict[Path, None]] = {}
        self._of_classes: set[Path] = set()
        for path in paths:
            is_of_classes = all(map(_NUMBERED.fullmatch, path))
            for depth, name in enumerate(path):
                if found := _NUMBERED.fullmatch(name):
                    here = path[: depth + 1]
                    siblings.setdefault((path[:depth], found[1]), {})[here] = None
                    if is_of_classes:
                        self._of_classes.add(here)
        # The stem of each numbered name, its place among its siblings, and how many there are.
        self._places: dict[Path, tuple[str, int, int]] = {}
        for (_, stem), members in siblings.items():
            ordered = sorted(members, key=lambda path: int(path[-1].rpartition("_")[2]))
            for at, path in enumerate(ordered):
                self._places[path] = stem, at, len(ordered)

    def tell_apart(self, leaves: Mapping[Path, str]) -> dict[Path, str]:
        """Return kinds that are different for siblings of one class."""
        return {path: kind if path[-1].isdecimal() else ".".join(path) for path, kind in leaves.items()}

    def spell(self, path: Path) -> str:
        return ".".join(self._spell_name(path[: depth + 1]) for depth in range(len(path)))

    def _spell_name(self, path: Path) -> str:
        stem, at, several = self._places.get(path, ("", 0, 0))
        if several > 1:
            return f"{stem}_.{at}"
        return f"{stem}_" if path in self._of_classes else path[-1]

    def level(self, path: Path, layers: set[str]) -> tuple[Level, ...]:
        levels: list[Level] = []
        is_inside = False  # of a layer
        spelled = ""
        for depth, name in enumerate(path):
            here = path[: depth + 1]
            spelled = f"{spelled}.{self._spell_name(here)}" if depth else self._spell_name(here)
            stem, at, several = self._places.get(here, ("", 0, 0))
            is_class = here in self._of_classes
            is_layer = spelled in layers and not (is_class and is_inside and several <= _FEW)
            role = name
            if is_layer:
                role = stem if is_class else f"{stem}_*" if stem else "*"
            elif is_class and is_inside:
                role = stem if several == 1 else f"{stem} #{at + 1}"
            levels.append(Level(name, role))
            is_inside |= is_layer
        return tuple(levels)


def _join_chains(levels: Mapping[str, tuple[Level, ...]]) -> dict[str, tuple[Level, ...]]:
    """Join each level that runs nothing itself and contains a single one with the one below it."""
    roles = [tuple(level.role for level in one) for one in levels.values()]
    inside: dict[Path, set[str]] = {}
    for path in roles:
        for depth, role in enumerate(path):
            inside.setdefault(path[:depth], set()).add(role)
    running = set(roles)
    joined = {}
    for module, path in zip(levels, roles, strict=True):
        own, begun = [], 0
        for depth in range(1, len(path) + 1):
            if path[:depth] in running or len(inside[path[:depth]]) > 1:
                own.append(_join(levels[module][begun:depth]))
                begun = depth
        rest = own[_MOST_LEVELS - 1 :]
        joined[module] = (*own[: _MOST_LEVELS - 1], _join(rest)) if rest else tuple(own)
    return joined


def _join(levels: Sequence[Level]) -> Level:
    label, role = (".".join(names) for names in zip(*levels, strict=True))
    return Level(label, role)


def label_module(above: str, name: str) -> str:
    """Return the name of a level below a path. A number alone says nothing, and has the name above it: `blocks.3`."""
    return f"{_LAST_NAME.findall(above)[0]}.{name}" if above and _NUMBER.match(name) else name


# --- The tree of a breakdown ------------------------------------------------------------------------------------------


def join_roles(levels: Sequence[Level]) -> str:
    """Return a module as the same one of all alike layers: `blocks.*.attention`."""
    return _join(levels).role


def plant_tree(modules: Sequence[str], levels: Levels) -> ModuleTree:
    """Return the tree of `modules`, with the nodes in the order of `levels`. A name from `join_roles` is a node without
    a single module, and one that is not in `levels` a node of its own."""
    folded = {join_roles(own): tuple(Level(level.role, level.role) for level in own) for own in levels.values()}
    others = {module: (Level(module, module),) for module in modules if module not in levels and module not in folded}
    names: dict[str, int] = {}
    copies: dict[Path, set[Path]] = {}  # of the nodes, each of which has a path of roles
    for own in (*levels.values(), *others.values()):
        single, role = (tuple(texts) for texts in zip(*own, strict=True))
        for depth in range(1, len(own) + 1):
            copies.setdefault(role[:depth], set()).add(single[:depth])
    places = {path: at for at, path in enumerate(copies)}
    known = {**folded, **others, **levels}

    def name(text: str) -> int:
        return names.setdefault(cut_name(text), len(names))

    tree = ModuleTree(
        names=(),
        parents=tuple(places.get(path[:-1], -1) for path in places),
        labels=tuple(name(path[-1]) for path in places),
        copies=tuple(map(len, copies.values())),
        nodes=tuple(places[tuple(level.role for level in known[module])] for module in modules),
        singles=tuple(tuple(name(level.label) for level in known[module]) for module in modules),
    )
    return msgspec.structs.replace(tree, names=tuple(names))


def name_nodes(tree: ModuleTree) -> tuple[str, ...]:
    """Return the path of each node, with the number of modules that it is: `12 × blocks.*.attention`."""
    paths: list[str] = []
    for parent, label in zip(tree.parents, tree.labels, strict=True):
        paths.append(f"{paths[parent]}.{tree.names[label]}" if parent >= 0 else tree.names[label])
    return tuple(f"{copies} × {path}" if copies > 1 else path for path, copies in zip(paths, tree.copies, strict=True))


# --- Their time -------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class ModuleNode:
    """A module, or the same one of several alike layers, with everything inside it; what it runs itself is a child
    `(self)` next to others. Times are whole nanoseconds over the recording. `copies` has the time of each module that
    this is."""

    label: str
    path: str
    depth: int
    time_ns: int = 0
    count: int = 0
    phases: dict[str, int] = field(default_factory=dict)
    copies: dict[str, int] = field(default_factory=dict)
    inside: "dict[str, ModuleNode]" = field(default_factory=dict)

    @property
    def children(self) -> "list[ModuleNode]":
        """The longest first."""
        nodes = self.inside.values()
        alone = len(nodes) == 1 and SELF in self.inside
        return [] if alone else sorted(nodes, key=lambda node: (-node.time_ns, node.path))

    def child(self, role: str) -> "ModuleNode":
        if role not in self.inside:
            path = f"{self.path}.{role}" if self.depth >= 0 else role
            label = label_module(self.path, role)
            self.inside[role] = ModuleNode(label=label, path=path, depth=self.depth + 1)
        return self.inside[role]

    def add(self, single: str, phase: str, time_ns: int, count: int) -> None:
        self.time_ns += time_ns
        self.count += count
        self.phases[phase] = self.phases.get(phase, 0) + time_ns
        self.copies[single] = self.copies.get(single, 0) + time_ns


def add_up_modules(kernels: pl.DataFrame) -> ModuleNode:
    """Return the root of a profile's kernels: its children are the modules at the top, and its time is all kernel
    time."""
    module, phase = pl.col("module").fill_null(UNKNOWN), pl.col("phase").fill_null(UNKNOWN)
    times = kernels.group_by(module, phase, maintain_order=True).agg(pl.col("time_ns", "count").sum())
    levels = fold_modules(list_kinds(kernels))
    root = ModuleNode(label="", path="", depth=-1)
    for name, *figures in times.iter_rows():
        node = root
        root.add("", *figures)
        for depth, level in enumerate(levels[name], start=1):
            node = node.child(level.role)
            node.add(_join(levels[name][:depth]).label, *figures)
        node.child(SELF).add(name, *figures)
    return root


def list_kinds(kernels: pl.DataFrame) -> dict[str, str]:
    """Return all modules with their operators, in the order in which they first appear."""
    named = kernels.select(pl.col("module").fill_null(UNKNOWN), "op")
    operators = pl.col("op").unique().sort().str.join(" ")
    return dict(named.group_by("module", maintain_order=True).agg(operators).iter_rows())


def choose_nodes(root: ModuleNode, top: int | None = None) -> list[ModuleNode]:
    """Return the `top` longest nodes, each after the one around it. What else is inside that one is summed up in a node
    `(smaller)`, so that the nodes still add up."""
    ranked = sorted(_walk(root), key=lambda node: (-node.time_ns, node.depth, node.path))
    chosen = {id(node) for node in ranked[:top]}
    shown: list[ModuleNode] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        shown.append(node)
        inside = [child for child in node.children if id(child) in chosen]
        hidden = [child for child in node.children if id(child) not in chosen]
        if inside:  # a module without any of its parts needs no node that says so
            rest = [_merge(node, hidden)] if len(hidden) > 1 else hidden
            waiting += reversed((*inside, *rest))
    return shown[1:]


def _walk(root: ModuleNode) -> Iterator[ModuleNode]:
    waiting = root.children
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children


def _merge(parent: ModuleNode, nodes: Sequence[ModuleNode]) -> ModuleNode:
    path = f"{parent.path}.{SMALLER}" if parent.depth >= 0 else SMALLER
    merged = ModuleNode(label=SMALLER, path=path, depth=parent.depth + 1)
    for node in nodes:
        merged.time_ns += node.time_ns
        merged.count += node.count
        for phase, time_ns in node.phases.items():
            merged.phases[phase] = merged.phases.get(phase, 0) + time_ns
    return merged

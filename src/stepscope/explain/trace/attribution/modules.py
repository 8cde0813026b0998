"""The modules of a recording: from stepscope's annotation with their qualified names, or from the profiler's stacks
with class and number, which are joined to a path."""

import re
from collections.abc import Sequence

import polars as pl

from stepscope.explain.trace.attribution.graphs import REPEAT
from stepscope.explain.trace.attribution.names import cut_name

_OURS = "module:"
_FRAME = "nn.Module: "
_NUMBER = re.compile(r"\d{1,9}")
_NUMBERED = re.compile(r"^(?:.*?\.)??(\d+)(?=\.|$)")
_REPEATED = re.compile(rf"^(?:.*\.)?{REPEAT} \d+ kernels[_.]\d+")
_LONGEST_PATH = 4096  # characters; deeper calls get the path of the last one that fits
_CLASS_NUMBER = re.compile(r"^(.*)_(\d+)$")
# Modules around another one: they may wrap embeddings and blocks alike.
_WRAPPER = re.compile(
    r"FullyShardedDataParallel|FSDP|CheckpointWrapper|OptimizedModule|OffloadWrapper|ActivationWrapper"
)
_EMBEDDING = re.compile(r"(?i)embed|^wte$|^wpe$")
# Not layers on their own, even if a model consists of nothing else.
_SMALL = re.compile(r"(?i)norm|dropout|relu|gelu|silu|sigmoid|tanh|activation|pool|softmax|identity|flatten")


def is_own_call() -> pl.Expr:
    """Whether a range is a module call from stepscope's annotation."""
    return pl.col("name").str.starts_with(_OURS)


def is_module_call() -> pl.Expr:
    return is_own_call() | (pl.col("source") == "module")


def module_paths(ranges: pl.DataFrame) -> pl.DataFrame:
    """Return the module calls, with `path`. stepscope's annotation takes precedence if a recording has both."""
    ours = ranges.filter(is_own_call())
    if ours.height:
        return ours.with_columns(path=pl.col("name").str.strip_prefix(_OURS))
    frames = ranges.filter(pl.col("source") == "module")
    return frames.with_columns(path=join_ancestors(frames, pl.col("name").str.strip_prefix(_FRAME)))


def join_ancestors(calls: pl.DataFrame, label: pl.Expr, between: str = ".") -> pl.Series:
    """Return each call's label, prefixed with those of the calls around it."""
    ordered = calls.with_columns(label=label).with_row_index("row")
    ordered = ordered.sort("process", "thread", "start_ns", -pl.col("end_ns"))
    paths: list[str] = []
    open_calls: list[tuple[int, str]] = []
    key: tuple[int, int] | None = None
    columns = ("process", "thread", "start_ns", "end_ns", "label")
    for process, thread, start, end, own in ordered.select(columns).iter_rows():
        if key != (process, thread):
            key, open_calls = (process, thread), []
        while open_calls and open_calls[-1][0] <= start:
            open_calls.pop()
        path = f"{open_calls[-1][1]}{between}{own}" if open_calls else own
        path = path if len(path) <= _LONGEST_PATH or not open_calls else open_calls[-1][1]
        open_calls.append((end, path))
        paths.append(path)
    return ordered.with_columns(path=pl.Series(paths, dtype=pl.String)).sort("row")["path"]


def number_layers(frame: pl.DataFrame, modules: pl.DataFrame) -> pl.DataFrame:
    """Add `layer` to rows with a module: the number of the outermost repeated block around it. Blocks that belong
    together have numbers as names (`blocks.3.attention`) or, in paths of classes, the same class. A block has modules
    of its own; only in a model without such blocks, repeated modules of one kind (`Linear`) are the layers. Embeddings
    never are."""
    distinct = frame["module"].drop_nulls().unique(maintain_order=True).to_list()
    called = modules.sort("start_ns", maintain_order=True)["path"].to_list() if modules.height else []
    siblings = _Siblings([*called, *distinct], by_class=_has_classes(modules))
    numbers = {path: siblings.layer_of(path) for path in distinct}
    return frame.with_columns(layer=frame["module"].replace_strict(numbers, default=None, return_dtype=pl.Int32))


def _has_classes(modules: pl.DataFrame) -> bool:
    return bool(modules.height and modules["name"].str.starts_with(_FRAME).any())


class _Siblings:
    """The modules of a model by parent and kind, in the order of their first calls."""

    def __init__(self, paths: Sequence[str], *, by_class: bool) -> None:
        self._by_class = by_class
        self._parts: dict[str, dict[str, None]] = {}
        for path in paths:
            labels = path.split(".")
            for depth, label in enumerate(labels):
                self._parts.setdefault(".".join(labels[:depth]), {})[label] = None
        self._members: dict[tuple[str, str], list[str]] = {}
        for parent, labels_of in self._parts.items():
            for label in labels_of:
                if kind := self._kind(parent, label):
                    self._members.setdefault((parent, kind), []).append(label)
        groups = {key for key, members in self._members.items() if len(members) > 1 or not by_class}
        blocks = {key for key in groups if any(self._has_parts(key[0], label) for label in self._members[key])}
        self._layers = blocks or {key for key in groups if not _SMALL.search(key[1])}

    def layer_of(self, path: str) -> int | None:
        labels = path.split(".")
        for depth, label in enumerate(labels):
            key = (".".join(labels[:depth]), self._kind(".".join(labels[:depth]), label) or "")
            if key in self._layers and label.startswith(REPEAT):
                return int(label.rpartition("_")[2])  # not in the order of calls: it is not a module
            if key in self._layers:
                return self._members[key].index(label) if self._by_class else int(label)
        return None

    def _kind(self, parent: str, label: str) -> str | None:
        """Return what makes siblings alike: the class, or that of the module inside a wrapper; for numbers, the name of
        their list. None for embeddings and for names without a number."""
        if not self._by_class:
            name = parent.rpartition(".")[2]
            return name if _NUMBER.fullmatch(label) and not _EMBEDDING.search(name) else None
        _, wrapped = self._unwrap(parent, label)
        found = _CLASS_NUMBER.match(wrapped)
        kind = found[1] if found else wrapped
        return None if _EMBEDDING.search(kind) else kind

    def _has_parts(self, parent: str, label: str) -> bool:
        path, _ = self._unwrap(parent, label)
        return path in self._parts

    def _unwrap(self, parent: str, label: str) -> tuple[str, str]:
        """Return path and label of the module inside wrappers."""
        path = f"{parent}.{label}" if parent else label
        while _WRAPPER.match(label) and len(self._parts.get(path, ())) == 1:
            (label,) = self._parts[path]
            path = f"{path}.{label}"
        return path, label


def label_layers(kernels: pl.DataFrame) -> pl.Series:
    """The layer name of each kernel, null if it has none or it is unknown. The name is the path up to the layer's
    number, so that layer 3 of the encoder and of the decoder stay distinct."""
    known = kernels.select("module", "layer").unique()
    labels = [_label_layer(module, layer) for module, layer in known.iter_rows()]
    table = known.with_columns(label=pl.Series(labels, dtype=pl.String))
    joined = kernels.select("module", "layer").join(
        table, on=["module", "layer"], how="left", nulls_equal=True, maintain_order="left"
    )
    return joined["label"]


def _label_layer(module: str | None, layer: int | None) -> str | None:
    if layer is None:
        return None
    if module is not None and (repeat := _REPEATED.match(module)):
        return cut_name(repeat[0])  # not a layer by name: it has the number of the repeat
    found = _NUMBERED.match(module or "")
    # Paths made of class names count layers differently and have no path up to the number.
    return cut_name(found[0]) if found and int(found[1]) == layer else f"layer {layer}"

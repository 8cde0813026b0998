"""The modules of a recording: from stepscope's annotation with their qualified names, or from the profiler's stacks
with class and number, which are joined to a path."""

import re

import polars as pl

_OURS = "module:"
_FRAME = "nn.Module: "
_INDEX = re.compile(r"(?:^|\.)(\d{1,9})(?:\.|$)")
_LONGEST_PATH = 4096  # characters; deeper calls get the path of the last one that fits
_CLASS_NUMBER = re.compile(r"^(.*)_(\d+)$")


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
    frames = ranges.filter(pl.col("source") == "module").with_columns(label=pl.col("name").str.strip_prefix(_FRAME))
    if not frames.height:
        return frames.rename({"label": "path"})
    return frames.with_columns(path=_join_ancestors(frames)).drop("label")


def _join_ancestors(frames: pl.DataFrame) -> pl.Series:
    """Return each call's label, prefixed with those of the calls around it."""
    ordered = frames.with_row_index("row").sort("process", "thread", "start_ns", -pl.col("end_ns"))
    paths: list[str] = []
    open_calls: list[tuple[int, str]] = []
    key: tuple[int, int] | None = None
    columns = ("process", "thread", "start_ns", "end_ns", "label")
    for process, thread, start, end, label in ordered.select(columns).iter_rows():
        if key != (process, thread):
            key, open_calls = (process, thread), []
        while open_calls and open_calls[-1][0] <= start:
            open_calls.pop()
        path = f"{open_calls[-1][1]}.{label}" if open_calls else label
        path = path if len(path) <= _LONGEST_PATH or not open_calls else open_calls[-1][1]
        open_calls.append((end, path))
        paths.append(path)
    return ordered.with_columns(path=pl.Series(paths, dtype=pl.String)).sort("row")["path"]


def number_layers(frame: pl.DataFrame, modules: pl.DataFrame) -> pl.DataFrame:
    """Add `layer` to rows with a module: the first number in a qualified name (`blocks.3.attention`) or, in paths of
    classes, the index of the outermost class that occurs several times among its siblings."""
    distinct = frame["module"].drop_nulls().unique().to_list()
    numbers = _layers_of_classes(modules, distinct) if _has_classes(modules) else _layers_of_names(distinct)
    layers = frame["module"].replace_strict(numbers, default=None, return_dtype=pl.Int32)
    return frame.with_columns(layer=layers)


def _has_classes(modules: pl.DataFrame) -> bool:
    return bool(modules.height and modules["name"].str.starts_with(_FRAME).any())


def _layers_of_names(paths: list[str]) -> dict[str, int | None]:
    return {path: int(found[1]) if (found := _INDEX.search(path)) else None for path in paths}


def _layers_of_classes(modules: pl.DataFrame, paths: list[str]) -> dict[str, int | None]:
    first_seen = modules.sort("start_ns").unique("path", keep="first", maintain_order=True)["path"].to_list()
    likes: dict[tuple[str, str], list[str]] = {}
    for path in first_seen:
        parent, _, label = path.rpartition(".")
        members = likes.setdefault((parent, _class_of(label)), [])
        members.append(label)
    return {path: _outermost_repeated(path, likes) for path in paths}


def _outermost_repeated(path: str, likes: dict[tuple[str, str], list[str]]) -> int | None:
    labels = path.split(".")
    for depth, label in enumerate(labels):
        members = likes.get((".".join(labels[:depth]), _class_of(label)), [])
        if len(members) > 1 and label in members:
            return members.index(label)
    return None


def _class_of(label: str) -> str:
    found = _CLASS_NUMBER.match(label)
    return found[1] if found else label

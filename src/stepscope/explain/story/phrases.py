"""Names for use in sentences, and small changes to tables that a page shows."""

import msgspec

from stepscope.findings import Table
from stepscope.recording.store import Manifest
from stepscope.spec import Workload
from stepscope.units import count_noun

MOST_ROWS = 50

_CLASSES = {
    "GEMM": "GEMMs",
    "attention": "attention",
    "softmax": "softmax",
    "norm": "normalization",
    "elementwise": "elementwise operations",
    "reduction": "reductions",
    "copy": "copies",
    "index": "indexing",
    "embedding": "embeddings",
    "loss": "the loss",
    "optimizer": "the optimizer",
    "random": "random numbers",
    "sort": "sorting",
    "convolution": "convolutions",
    "communication": "communication",
    "memcpy": "memory transfers",
    "memset": "memsets",
    "other": "unclassified operations",
}
_STEPS = {
    "train": "training step",
    "forward-backward": "forward and backward pass",
    "forward": "forward pass",
    "inference": "inference pass",
}


def name_class(kernel_class: str) -> str:
    return _CLASSES[kernel_class]


def say_class_takes(kernel_class: str) -> str:
    """Return `GEMMs take` or `attention takes`."""
    name = name_class(kernel_class)
    return f"{name} {'take' if name.endswith('s') and name != 'the loss' else 'takes'}"


def name_step(workload: Workload) -> str:
    return _STEPS[workload.mode]


def say_started(started: str) -> str:
    """Return `2026-11-15T05:24:12+00:00` without its seconds, and any other text unchanged."""
    date, separator, time = started.partition("T")
    if not separator:
        return started
    zone = " UTC" if time.endswith(("+00:00", "Z")) else ""
    return f"{date} {time[:5]}{zone}"


def name_source(manifest: Manifest) -> str:
    return {
        "pytorch profiler": "PyTorch profiler",
        "nsight systems": "Nsight Systems",
        "nsight compute": "Nsight Compute",
        "memory snapshot": "PyTorch memory snapshot",
        "stepscope": "stepscope",
    }[manifest.source]


def shorten(table: Table, command: str, most: int = MOST_ROWS) -> Table:
    """The first rows of a long table, with a note on how many were left out and the command that shows them."""
    rest = len(table.rows) - most
    if rest <= 0:
        return table
    note = count_noun(rest, "more row") + (f": {command}" if command else "")
    return msgspec.structs.replace(table, rows=table.rows[:most], notes=(*table.notes, note))


def retitle(table: Table, title: str) -> Table:
    """The table under a title for the page. Its own title, which lists what all rows share, becomes the first note."""
    return msgspec.structs.replace(table, title=title, notes=(table.title, *table.notes))

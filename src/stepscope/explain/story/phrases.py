"""Numbers and names as they stand inside of a sentence: three digits at most, where tables keep them all."""

import msgspec

from stepscope.explain.experiments.cases import say_extras, say_sizes
from stepscope.findings import Table
from stepscope.recording.store import Manifest
from stepscope.spec import Case, Workload

MOST_ROWS = 50

_CLASSES = {
    "GEMM": "GEMMs",
    "attention": "attention",
    "softmax": "softmax",
    "norm": "normalisation",
    "elementwise": "elementwise operations",
    "reduction": "sums and other reductions",
    "copy": "copies",
    "index": "indexing",
    "embedding": "embeddings",
    "loss": "the loss",
    "optimizer": "the optimizer",
    "random": "random numbers",
    "sort": "sorting",
    "convolution": "convolutions",
    "communication": "communication",
    "memcpy": "transfers",
    "memset": "filling memory",
    "other": "unclassified work",
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
    """`GEMMs take`, `attention takes`."""
    name = name_class(kernel_class)
    return f"{name} {'take' if name.endswith('s') and name != 'the loss' else 'takes'}"


def name_step(workload: Workload) -> str:
    return _STEPS[workload.mode]


def with_article(words: str) -> str:
    return f"{'An' if words[0] in 'aeiou' else 'A'} {words}"


def name_model(case: Case) -> str:
    """The model, and the settings that decide most about its step."""
    workload = case.workload
    settings = [*say_sizes(workload), workload.precision, *say_extras(workload)]
    return f"{workload.model.name} ({', '.join(settings)})"


def say_started(started: str) -> str:
    """`2026-11-15T05:24:12+00:00` without its seconds. What is no such time is left as it is."""
    date, separator, time = started.partition("T")
    if not separator:
        return started
    zone = " UTC" if time.endswith(("+00:00", "Z")) else ""
    return f"{date} {time[:5]}{zone}"


def name_source(manifest: Manifest) -> str:
    return {
        "pytorch profiler": "PyTorch's profiler",
        "nsight systems": "Nsight Systems",
        "nsight compute": "Nsight Compute",
        "memory snapshot": "PyTorch's memory snapshot",
        "stepscope": "stepscope",
    }[manifest.source]


def find_torch(manifest: Manifest) -> str:
    """The version of PyTorch, empty where a recording does not tell."""
    return manifest.environment.torch if manifest.environment else manifest.versions.get("torch", "")


def shorten(table: Table, command: str, most: int = MOST_ROWS) -> Table:
    """The first rows of a long table, with a note on how many are left out and the command that shows them."""
    rest = len(table.rows) - most
    if rest <= 0:
        return table
    note = f"{rest:,} more rows" + (f": {command}" if command else "")
    return msgspec.structs.replace(table, rows=table.rows[:most], notes=(*table.notes, note))


def retitle(table: Table, title: str) -> Table:
    """On a page a table's own title, which says what all its rows share, is its first note."""
    return msgspec.structs.replace(table, title=title, notes=(table.title, *table.notes))

"""What to change about a DataLoader that a step waits for, by how it is configured."""

import math
from dataclasses import dataclass

from stepscope.recording.rows.loop_run import LoaderFacts

_FEWEST, _MOST_WORKERS = 2, 16
_SPARE = 1.25  # workers are not equally fast, and share their cores
_PREFETCH = 2  # what PyTorch prefetches per worker


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedInput:
    """A loader, and per step: its time, the time that the step waits for it, and the step's."""

    loader: LoaderFacts
    step_ns: float
    loading_ns: float
    stalled_ns: float

    @property
    def num_workers(self) -> int:
        """Return how many workers keep up with the rest of the step. Without workers, one process loads for
        `loading_ns`. With workers that do not keep up, all of them load all the time."""
        has = self.loader.num_workers
        busy_ns = self.step_ns * has if has else self.loading_ns
        needed = math.ceil(_SPARE * busy_ns / max(1.0, self.step_ns - self.stalled_ns))
        return min(max(_FEWEST, has + 1, needed), max(_MOST_WORKERS, has + 1))


def list_arguments(loader: LoaderFacts) -> dict[str, object]:
    """Return the arguments that a loader was made with, without those at their defaults; the number of workers
    always."""
    settings: dict[str, object] = {
        "batch_size": loader.batch_size,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory or None,
        "persistent_workers": loader.persistent_workers or None,
        "prefetch_factor": loader.prefetch_factor,
    }
    return {name: value for name, value in settings.items() if value is not None}


def say_loader(loader: LoaderFacts) -> str:
    """Return `TokenDataset with batch_size=8, num_workers=0`."""
    return f"{loader.dataset} with {', '.join(f'{name}={value}' for name, value in list_arguments(loader).items())}"


def configure_loader(loaded: LoadedInput, *, on_cpu: bool, uses_trainer: bool) -> tuple[str, str]:
    """Return what to do, and the code for it with the arguments of the loader."""
    loader = loaded.loader
    wanted: dict[str, object] = {
        "num_workers": loaded.num_workers,
        "pin_memory": loader.pin_memory or not on_cpu or None,
        "persistent_workers": True,
        "prefetch_factor": 2 * (loader.prefetch_factor or _PREFETCH) if loader.num_workers else None,
    }
    wanted = {name: value for name, value in wanted.items() if value is not None}
    if loader.num_workers:
        action = f"Use {loaded.num_workers} workers instead of {loader.num_workers}, or do less per sample"
    else:
        action = f"Load batches in {loaded.num_workers} worker processes"
    if loader.is_iterable and not loader.num_workers:
        share = f"each with its share of `{loader.dataset}` (`torch.utils.data.get_worker_info()`)"
        action += f", {share}: otherwise every worker loads all of it"
    if uses_trainer:
        return action, _configure_trainer(wanted)
    code = _write_loader(loader, list_arguments(loader) | wanted)
    return action, code if on_cpu else f'{code}\nx = x.to("cuda", non_blocking=True)'


def pin_batches(loader: LoaderFacts, *, uses_trainer: bool) -> str:
    """Return the loader's own arguments with pinned memory, and a copy that does not wait."""
    if uses_trainer:
        return _configure_trainer({"pin_memory": True})
    return (
        f'{_write_loader(loader, list_arguments(loader) | {"pin_memory": True})}\nx = x.to("cuda", non_blocking=True)'
    )


def _configure_trainer(wanted: dict[str, object]) -> str:
    lines = [f"    dataloader_{name}={value}," for name, value in wanted.items()]
    return "\n".join(("args = transformers.TrainingArguments(", "    ...,  # your other arguments", *lines, ")"))


def _write_loader(loader: LoaderFacts, arguments: dict[str, object]) -> str:
    before = list_arguments(loader)
    lines = [f"    {name}={value},{_say_before(name, value, before)}" for name, value in arguments.items()]
    return "\n".join(("loader = torch.utils.data.DataLoader(", f"    dataset,  # {loader.dataset}", *lines, ")"))


def _say_before(name: str, value: object, before: dict[str, object]) -> str:
    was = before.get(name, False if isinstance(value, bool) else None)
    return "" if was in (value, None) else f"  # was {was}"

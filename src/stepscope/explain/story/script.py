"""A training script that `stepscope run` recorded: how the page names it, and the facts of its loop."""

from collections.abc import Iterator

from stepscope.explain.rules.loop.loader_advice import say_loader
from stepscope.explain.story.sources import Materials
from stepscope.findings import Column, Table
from stepscope.recording.rows.loop_run import LoopFacts
from stepscope.units import count_noun

_ROOT = r"^module:\((\w+)\)$"


def find_loop(materials: Materials) -> LoopFacts | None:
    """The facts of the recorded loop; None if the run is not a script."""
    known = (one.recording.manifest.loop for one in (materials.profile, materials.memory) if one is not None)
    return next((loop for loop in known if loop is not None), None)


def find_model_class(materials: Materials) -> str:
    """The class of the model, which is the root of its modules; empty if unknown. Wrappers around it do not count."""
    profile, loop = materials.profile, find_loop(materials)
    if profile is None:
        return ""
    names = profile.recording.ranges["name"].str.extract(_ROOT).drop_nulls()
    inner = names.filter(~names.is_in(list(loop.wrappers) if loop else []))
    counts = inner.value_counts(sort=False).sort("count", "name", descending=[True, False])
    return str(counts["name"][0]) if counts.height else ""


def name_script(materials: Materials) -> tuple[str, ...]:
    """Names for a recorded script, the longest first; none if the run is not a script."""
    loop, model = find_loop(materials), find_model_class(materials)
    if loop is None:
        return ()
    return (f"{model} in {loop.script}", loop.script) if model else (loop.script,)


def say_passes(loop: LoopFacts) -> str:
    """Return `4 micro-batches`. With several optimizers, backward passes need not be those of micro-batches."""
    count = round(loop.backwards_per_step, 1)
    if len(loop.optimizers) > 1:
        return count_noun(count, "backward pass", "backward passes")
    return count_noun(count, "micro-batch", "micro-batches")


def tabulate_loop(materials: Materials) -> Table | None:
    loop = find_loop(materials)
    if loop is None:
        return None
    return Table(
        title="Training loop",
        columns=(Column(key="what", label=""), Column(key="value", label="value")),
        rows=tuple(_list_facts(loop, find_model_class(materials))),
        notes=loop.notes,
    )


def _list_facts(loop: LoopFacts, model: str) -> Iterator[tuple[str, str]]:
    yield "script", loop.script
    if model:
        yield "model", model
    if loop.wrappers:
        yield "wrapped in", ", ".join(loop.wrappers)
    yield "steps found by", loop.found_by
    if loop.steps_seen:
        yield "steps before the recording", f"{loop.steps_seen:,}"
    yield "backward passes per step", f"{loop.backwards_per_step:.3g}"
    if loop.optimizers:
        yield "optimizer", ", ".join(loop.optimizers)
    if loop.uses_scaler:
        skipped = f", skipped {count_noun(loop.skipped_steps, 'step')}" if loop.skipped_steps else ""
        yield "gradient scaling", f"GradScaler{skipped}"
    for loader in loop.loaders:
        batches = count_noun(round(loader.batches_per_step, 2), "batch", "batches")
        yield "DataLoader", f"{say_loader(loader)}; {batches} per step"
    if loop.clock_mhz:
        yield "clock while recording", f"{loop.clock_mhz:,} MHz"

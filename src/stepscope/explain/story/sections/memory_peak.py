"""Memory over time, what the peak is made of, and what autograd keeps for backward."""

import msgspec
import polars as pl

from stepscope.cost.activations import activations_of
from stepscope.explain.memory import MemoryProfile
from stepscope.explain.memory.memory_tables import categories_table, largest_table, leaks_table, phases_table
from stepscope.explain.memory.saved import (
    OUTSIDE,
    held_storages,
    saved_beside_closed_form,
    saved_by_block,
    saved_by_role,
    saved_in_block,
)
from stepscope.explain.memory.timeline import memory_timeline
from stepscope.explain.story.commands import find_case
from stepscope.explain.story.missing import command_for, explain_absence
from stepscope.explain.story.opening import say_peak
from stepscope.explain.story.phrases import shorten
from stepscope.explain.story.sources import Materials
from stepscope.findings import Bars, Exhibit, Missing, Section, Table
from stepscope.spec import ModelShape
from stepscope.units import say_percent, say_size

_LARGEST = 15
_MODULES = 25
_PARTS = 6  # told apart in a block
_REST = "the rest"
_WHAT_IS_SAVED = "what autograd keeps for backward"
_NO_HISTORY = Missing(
    what="memory over time",
    why="the snapshot has what was there at one moment and no history",
    command="torch.cuda.memory._record_memory_history()",
)
_OWN = "stepscope memory --model my_model:build"


def show_memory(materials: Materials) -> Section:
    key, title = "memory", "Memory"
    profile = materials.memory
    if profile is None:
        return Section(key=key, title=title, missing=(explain_absence(materials, "memory"),))
    step = profile.last_plain_step if profile.steps else None
    drawn = [Exhibit(key="memory-timeline", part=memory_timeline(profile, step=step))] if profile.num_events else []
    exhibits = [
        *drawn,
        Exhibit(key="memory-categories", part=categories_table(profile)),
        Exhibit(key="memory-phases", part=phases_table(profile)),
        Exhibit(key="memory-largest", part=largest_table(profile, top=_LARGEST)),
    ]
    leaks = leaks_table(profile)
    if leaks.rows:
        exhibits.append(Exhibit(key="memory-leaks", part=shorten(leaks, "")))
    missing = () if drawn else (_NO_HISTORY,)
    return Section(key=key, title=title, lead=_say_peak(profile), exhibits=tuple(_with_rows(exhibits)), missing=missing)


def _with_rows(exhibits: list[Exhibit]) -> list[Exhibit]:
    """An empty table says nothing that the others do not."""
    return [one for one in exhibits if not isinstance(one.part, Table) or one.part.rows]


def _say_peak(profile: MemoryProfile) -> str:
    """When, where, of what; and what stays after a step."""
    summary = profile.summary
    module = f" The last piece was taken in {summary.peak_module}." if summary.peak_module else ""
    reserved = summary.reserved_bytes
    held = f" The allocator holds {say_size(reserved)} then." if reserved is not None else ""
    stays = f" After a step {say_size(summary.steps[-1].end_bytes)} stay." if summary.steps else ""
    return f"The run holds {say_peak(profile)}.{module}{held}{stays}"


# --- What autograd keeps ----------------------------------------------------------------------------------------------


def show_saved(materials: Materials) -> Section:
    key, title = "autograd", "What autograd keeps"
    profile = materials.memory
    if profile is None:
        return Section(key=key, title=title, missing=(_explain_no_memory(materials),))
    saved = profile.recording.saved
    total = profile.summary.saved_bytes
    if not total:
        return Section(key=key, title=title, missing=(_explain_nothing_saved(materials, profile),))
    blocks = saved_by_block(saved)
    exhibits = [Exhibit(key="autograd-blocks", part=_draw_blocks(saved))]
    closed = _beside_closed_form(profile)
    if closed is not None:
        exhibits.append(Exhibit(key="autograd-closed-form", part=closed))
    exhibits.append(Exhibit(key="autograd-modules", part=shorten(saved_by_role(saved), "", _MODULES)))
    in_block = saved_in_block(saved)
    exhibits.append(Exhibit(key="autograd-block", part=shorten(in_block, "", _MODULES)))
    lead = _say_saved(total, blocks, profile.peak_bytes)
    return Section(key=key, title=title, lead=lead, exhibits=tuple(_with_rows(exhibits)))


def _explain_no_memory(materials: Materials) -> Missing:
    """A snapshot of PyTorch's would not bring it: only a recording of ours looks at autograd's graph."""
    missing = explain_absence(materials, "memory", _WHAT_IS_SAVED)
    is_foreign = materials.profile is not None and find_case(materials) is None
    return msgspec.structs.replace(missing, command=_OWN) if is_foreign else missing


def _explain_nothing_saved(materials: Materials, profile: MemoryProfile) -> Missing:
    case = profile.recording.manifest.case
    if profile.recording.saved.height:
        return Missing(what=_WHAT_IS_SAVED, why="the graph holds parameters and inputs, and no activations")
    if case is None:
        why = "a memory snapshot does not say which tensors autograd holds"
        return Missing(what=_WHAT_IS_SAVED, why=why, command=_OWN)
    if case.workload.mode == "inference":
        return Missing(what=_WHAT_IS_SAVED, why="inference builds no graph: nothing is kept")
    return Missing(
        what=_WHAT_IS_SAVED,
        why="the recording has no forward pass with a graph",
        command=command_for(materials, "memory"),
    )


def _draw_blocks(saved: pl.DataFrame) -> Bars:
    """In the order of the forward pass, each block by its parts: `attention` of `blocks.0.attention.q_proj`."""
    held = held_storages(saved)
    inside = [_part_in(module, block) for module, block in held.select("module", "block").iter_rows()]
    named = held.with_columns(pl.col("block").fill_null(OUTSIDE), pl.Series("part", inside, dtype=pl.String))
    sizes = named.group_by("part").agg(pl.col("storage_bytes").sum()).sort("storage_bytes", "part", descending=True)
    most = sizes["part"].to_list()[:_PARTS]
    shown = pl.when(pl.col("part").is_in(most)).then(pl.col("part")).otherwise(pl.lit(_REST))
    sums = {
        (block, part): float(size)
        for block, part, size in named.group_by("block", shown).agg(pl.col("storage_bytes").sum()).iter_rows()
    }
    labels = named["block"].unique(maintain_order=True).to_list()
    series = [*most, *([_REST] if sizes.height > len(most) else [])]
    return Bars(
        title="Kept for backward, block by block",
        kind="bytes",
        labels=tuple(labels),
        series=tuple(series),
        values=tuple(tuple(sums.get((block, part), 0.0) for block in labels) for part in series),
        is_stacked=True,
        notes=("activations only; memory that several nodes share counts once, for the first of them",),
    )


def _part_in(module: str | None, block: str | None) -> str:
    """The first name of a path inside of its block, or of the whole path where it is in none."""
    path = (module or "").removeprefix(block or "").lstrip(".")
    return path.partition(".")[0] or ("the block itself" if block else "no module")


def _beside_closed_form(profile: MemoryProfile) -> Table | None:
    """Of the built-in model as it is written, uncompiled: formulas know no other."""
    case = profile.recording.manifest.case
    if case is None or not isinstance(case.workload.model, ModelShape):
        return None
    workload = case.workload
    if workload.compile or workload.checkpoint != "none":
        return None
    return saved_beside_closed_form(profile.recording.saved, activations_of(workload))


def _say_saved(total: int, blocks: Table, peak: int) -> str:
    of_peak = f", {say_percent(total / peak)} of the peak" if peak and total <= peak else ""
    return f"From forward to backward {say_size(total)} of activations are kept{of_peak}; {_say_blocks(blocks)}."


def _say_blocks(blocks: Table) -> str:
    """The largest part; where it is a block and all blocks are alike, none of them stands out."""
    shares = {str(row[0]): row[2] for row in blocks.rows if isinstance(row[2], float)}
    inside = {say_percent(share) for name, share in shares.items() if name != OUTSIDE}
    largest = max(shares, key=lambda name: shares[name])
    count = len(shares) - (OUTSIDE in shares)
    if largest != OUTSIDE and count > 1 and len(inside) == 1:
        return f"each of {count} blocks keeps {inside.pop()}"
    return f"the largest part, {say_percent(shares[largest])}, in {largest}"

"""Memory over time, what the peak consists of, and activations saved for backward."""

import msgspec
import polars as pl

from stepscope.cost.activations import activations_of
from stepscope.explain.memory import MemoryProfile
from stepscope.explain.memory.memory_tables import categories_table, largest_table, leaks_table, phases_table
from stepscope.explain.memory.saved import (
    OUTSIDE,
    held_storages,
    saved_and_predicted,
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
_PARTS = 6  # distinct parts of a block
_REST = "the rest"
_WHAT_IS_SAVED = "saved activations"
_NO_HISTORY = Missing(
    what="memory over time",
    why="the snapshot captures a single moment and has no history",
    command="torch.cuda.memory._record_memory_history()",
)
_OWN = "stepscope memory --model my_model:build"


def show_memory(materials: Materials) -> Section:
    key, title = "memory", "Memory"
    profile = materials.memory
    advice = () if materials.plan is not None else (explain_absence(materials, "plan"),)
    if profile is None:
        return Section(key=key, title=title, missing=(explain_absence(materials, "memory"), *advice))
    if materials.out_of_memory is not None and not profile.num_events:
        return Section(key=key, title=title, missing=(_NO_HISTORY,))  # the moment is that of the failure
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
    missing = (*(() if drawn else (_NO_HISTORY,)), *advice)
    return Section(key=key, title=title, lead=_say_peak(profile), exhibits=tuple(_with_rows(exhibits)), missing=missing)


def _with_rows(exhibits: list[Exhibit]) -> list[Exhibit]:
    """The exhibits without empty tables."""
    return [one for one in exhibits if not isinstance(one.part, Table) or one.part.rows]


def _say_peak(profile: MemoryProfile) -> str:
    """The peak: when, where and what; and what remains after a step."""
    summary = profile.summary
    module = f" The last allocation before it is in {summary.peak_module}." if summary.peak_module else ""
    reserved = summary.reserved_bytes
    held = f" Reserved at that point: {say_size(reserved)}." if reserved is not None else ""
    stays = f" Still allocated after a step: {say_size(summary.steps[-1].end_bytes)}." if summary.steps else ""
    return f"Peak memory is {say_peak(profile)}.{module}{held}{stays}"


# --- Saved for backward -----------------------------------------------------------------------------------------------


def show_saved(materials: Materials) -> Section:
    key, title = "autograd", "Saved for backward"
    profile = materials.memory
    if profile is None:
        return Section(key=key, title=title, missing=(_explain_no_memory(materials),))
    saved = profile.recording.saved
    total = profile.summary.saved_bytes
    if not total:
        return Section(key=key, title=title, missing=(_explain_nothing_saved(materials, profile),))
    blocks = saved_by_block(saved)
    exhibits = [Exhibit(key="autograd-blocks", part=_draw_blocks(saved))]
    closed = _saved_and_predicted(profile)
    if closed is not None:
        exhibits.append(Exhibit(key="autograd-closed-form", part=closed))
    exhibits.append(Exhibit(key="autograd-modules", part=shorten(saved_by_role(saved), "", _MODULES)))
    in_block = saved_in_block(saved)
    exhibits.append(Exhibit(key="autograd-block", part=shorten(in_block, "", _MODULES)))
    lead = _say_saved(total, blocks, dict(profile.categories_at(profile.peak_event))["activations"])
    return Section(key=key, title=title, lead=lead, exhibits=tuple(_with_rows(exhibits)))


def _explain_no_memory(materials: Materials) -> Missing:
    """The command is ours for foreign files too: a PyTorch snapshot has no saved tensors."""
    missing = explain_absence(materials, "memory", _WHAT_IS_SAVED)
    is_foreign = materials.profile is not None and find_case(materials) is None
    return msgspec.structs.replace(missing, command=_OWN) if is_foreign else missing


def _explain_nothing_saved(materials: Materials, profile: MemoryProfile) -> Missing:
    case = profile.recording.manifest.case
    if profile.recording.saved.height:
        return Missing(what=_WHAT_IS_SAVED, why="the graph saves parameters and inputs but no activations")
    if case is None:
        why = "a memory snapshot does not record which tensors autograd saved"
        return Missing(what=_WHAT_IS_SAVED, why=why, command=_OWN)
    if case.workload.mode == "inference":
        return Missing(what=_WHAT_IS_SAVED, why="inference saves nothing for backward")
    return Missing(
        what=_WHAT_IS_SAVED,
        why="the recording has no forward pass with autograd",
        command=command_for(materials, "memory"),
    )


def _draw_blocks(saved: pl.DataFrame) -> Bars:
    """Blocks in the order of the forward pass, each by its parts: `attention` for `blocks.0.attention.q_proj`."""
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
        title="Saved for backward by block",
        kind="bytes",
        labels=tuple(labels),
        series=tuple(series),
        values=tuple(tuple(sums.get((block, part), 0.0) for block in labels) for part in series),
        is_stacked=True,
        notes=("activations only; memory that several autograd nodes share counts once, for the first",),
    )


def _part_in(module: str | None, block: str | None) -> str:
    """The first name of a path inside its block, or of the whole path outside blocks."""
    path = (module or "").removeprefix(block or "").lstrip(".")
    return path.partition(".")[0] or ("the block itself" if block else "no module")


def _saved_and_predicted(profile: MemoryProfile) -> Table | None:
    """The comparison with the formulas, which cover only the built-in model as it is written."""
    case = profile.recording.manifest.case
    if case is None or not isinstance(case.workload.model, ModelShape):
        return None
    workload = case.workload
    if workload.hides_modules or workload.checkpoint != "none":
        return None
    return saved_and_predicted(profile.recording.saved, activations_of(workload))


def _say_saved(total: int, blocks: Table, at_peak: int) -> str:
    """`at_peak` is the size of all activations at the peak: backward may have freed some of those that were saved."""
    sizes = say_size(total), say_size(at_peak)
    freed = f"; {sizes[1]} is still allocated at the peak" if at_peak < total and sizes[0] != sizes[1] else ""
    return f"{sizes[0]} of activations saved for backward after forward{freed}. {_say_blocks(blocks)}."


def _say_blocks(blocks: Table) -> str:
    """The largest part, or the share of every block if all blocks are alike."""
    shares = {str(row[0]): row[2] for row in blocks.rows if isinstance(row[2], float)}
    inside = {say_percent(share) for name, share in shares.items() if name != OUTSIDE}
    largest = max(shares, key=lambda name: shares[name])
    count = len(shares) - (OUTSIDE in shares)
    if largest != OUTSIDE and count > 1 and len(inside) == 1:
        return f"Each of {count} blocks saves {inside.pop()}"
    share = say_percent(shares[largest])
    return f"{share} of it is saved outside blocks" if largest == OUTSIDE else f"{largest} saves the most, {share}"

"""What `stepscope plan` predicts: sentences, tables, the timeline of memory, and the front of memory against time."""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from stepscope.explain.experiments.cases import describe_case
from stepscope.explain.memory.categories import STACKED
from stepscope.findings import Area, Axis, Cell, Column, Figure, Page, Point, Stretch, Table, Timeline
from stepscope.recording.rows.plan_result import NO_TIME, FitResult, Limit, PlannedPhase, PlanResult, Proposal, Range
from stepscope.spec import Case, Timing
from stepscope.units import GIB, say_bytes, say_parameters, say_percent, say_size, say_time

_ON_A_PAGE = 10
_SIZE = Column(key="bytes", label="size", kind="bytes")
_SHARE = Column(key="share", label="share", kind="share")
_PEAK = Column(key="peak_allocated_bytes", label="peak allocated", kind="bytes")
_RESERVED = (
    Column(key="reserved_low_bytes", label="reserved, low", kind="bytes"),
    Column(key="reserved_high_bytes", label="reserved, high", kind="bytes"),
)
_STEP = Column(key="step_ms", label="step (ms)", kind="ms")
_TOKENS = Column(key="tokens_per_s", label="tokens/s", kind="count")
_FITS = Column(key="verdict", label="fits")


# --- Sentences --------------------------------------------------------------------------------------------------------


def say_workload(result: PlanResult) -> str:
    case = Case(workload=result.workload, timing=Timing())
    shared = ""
    if result.ranks.count > 1:
        shared = f"{result.ranks.strategy}{' with a sharded optimizer' * result.ranks.shard_optimizer} over "
        shared += f"{result.ranks.count} × "
    return f"{describe_case(case)}, {say_parameters(result.parameters)} parameters, on {shared}{say_gpu(result)}"


def say_gpu(result: PlanResult | FitResult) -> str:
    return f"{result.gpu.name} with {result.gpu.memory_bytes / 1e9:.4g} GB"


def say_verdict(result: PlanResult) -> str:
    """Whether it fits, and by how much."""
    parts = f"{_say_range(result.reserved_bytes)} reserved and {say_size(result.context_bytes)} of CUDA context"
    if result.verdict == "fits" and result.margin_bytes >= 0:
        return f"It fits: {parts}, {say_bytes(result.margin_bytes)} to spare."
    if result.verdict == "fits":
        return f"It just fits: {parts}; PyTorch has to return {say_bytes(-result.margin_bytes)} of cached memory."
    if result.verdict == "may fit":
        return f"It may fit: {parts}; up to {say_bytes(-result.margin_bytes)} too much if memory is fragmented."
    return f"It does not fit: {parts}, {say_bytes(-result.margin_bytes)} too much."


def say_peak(result: PlanResult) -> str:
    when = f" in {result.peak_phase}" if result.peak_phase else ""
    return f"Peak memory: {say_bytes(result.peak_allocated_bytes)} allocated{when}."


def say_step_time(result: PlanResult) -> str:
    if result.step_ns is None or result.step_ns_interval is None or result.time is None:
        missing = next((one for one in result.assumptions if one.startswith(NO_TIME)), "")
        if missing:
            return f"Step time: not predicted; {missing.removeprefix(NO_TIME)}"
        return "Step time: not predicted; no table of this GPU. Measure one with `stepscope calibrate` on it."
    low, high = result.step_ns_interval
    words = f"Step time: {say_time(result.step_ns)} ({say_time(low)} to {say_time(high)}), bound by {result.bound}"
    if result.tokens_per_s is not None:
        words += f", {result.tokens_per_s:,.0f} tokens/s"
    if result.mfu is not None:
        words += f", MFU {say_percent(result.mfu)}"
    if result.time.communication_ns:
        words += (
            f", {say_time(result.time.exposed_ns)} of {say_time(result.time.communication_ns)} communication exposed"
        )
    return words + (", rough: from the data sheet." if result.time.is_rough else ".")


def say_result(result: PlanResult) -> str:
    return " ".join([say_verdict(result), say_peak(result), say_step_time(result)])


def _say_range(sizes: Range) -> str:
    low, high = (say_size(size) for size in sizes)
    return low if low == high else f"{low} to {high}"


# --- One workload -----------------------------------------------------------------------------------------------------


def plan_page(result: PlanResult) -> Page:
    lines = (say_workload(result), say_verdict(result), say_peak(result), say_step_time(result))
    shown = [categories_table(result), phases_table(result), modules_table(result, top=_ON_A_PAGE)]
    shown = [table for table in [*shown, assumptions_table(result)] if table.rows]
    return Page(headline="\n".join(lines), tables=tuple(shown), findings=None)


def make_plan_table(result: PlanResult, name: str) -> Table:
    return TABLES[name](result)


def categories_table(result: PlanResult) -> Table:
    total = result.peak_allocated_bytes
    rows: list[tuple[Cell, ...]] = [
        (one.category, one.bytes, one.bytes / total if total else None) for one in result.categories if one.bytes
    ]
    if rows:
        rows.append(("total", total, 1.0))
    return Table(
        title="Memory at the peak, by category",
        columns=(Column(key="category", label="category"), _SIZE, _SHARE),
        rows=tuple(rows),
        notes=(f"CUDA context, which PyTorch does not count: {say_bytes(result.context_bytes)}.",),
    )


def modules_table(result: PlanResult, top: int | None = None) -> Table:
    total = result.peak_allocated_bytes
    rows = [(one.module, one.bytes, one.bytes / total if total else None) for one in result.modules[:top]]
    left = result.modules[len(rows) :]
    notes = [f"{len(left)} more modules: {say_bytes(sum(one.bytes for one in left))}."] if left else []
    return Table(
        title="Memory at the peak, by module",
        columns=(Column(key="module", label="module"), _SIZE, _SHARE),
        rows=tuple(rows),
        notes=tuple(notes),
    )


def phases_table(result: PlanResult) -> Table:
    return Table(
        title="Phases of a step",
        columns=(
            Column(key="phase", label="phase"),
            Column(key="peak_bytes", label="peak allocated", kind="bytes"),
            Column(key="step_ms", label="time (ms)", kind="ms"),
            Column(key="bound", label="bound by"),
            Column(key="kernels", label="kernels", kind="count"),
        ),
        rows=tuple(_phase_row(one) for one in result.phases),
    )


def _phase_row(phase: PlannedPhase) -> tuple[Cell, ...]:
    return phase.phase, phase.peak_bytes, _ms(phase.step_ns), phase.bound, phase.kernels


def assumptions_table(result: PlanResult) -> Table:
    return Table(
        title="Assumptions",
        columns=(Column(key="assumption", label="assumption"),),
        rows=tuple((one,) for one in result.assumptions),
    )


TABLES: dict[str, Callable[[PlanResult], Table]] = {
    "categories": categories_table,
    "phases": phases_table,
    "modules": modules_table,
    "assumptions": assumptions_table,
}


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e6


def plan_timeline(result: PlanResult) -> Timeline:
    """Memory of a step over its allocations. A simulation has no clock."""
    timeline = result.timeline
    assert timeline is not None, "only a result with a timeline is drawn"
    return Timeline(
        title="Predicted memory of a step",
        subtitle=say_workload(result),
        x=Axis(label="slices of allocations"),
        y=Axis(label="allocated memory", unit="bytes"),
        times=tuple(float(number) for number in range(timeline.slices)),
        areas=tuple(Area(name=name, values=timeline.areas[name]) for name in _stacked(timeline.areas)),
        stretches=tuple(Stretch(label=one.phase, start=one.start, end=one.end) for one in timeline.stretches),
        notes=(say_verdict(result),),
    )


def _stacked(areas: Iterable[str]) -> list[str]:
    """Long-lived memory at the bottom, as in recordings."""
    order = {name: place for place, name in enumerate(STACKED)}
    return sorted(areas, key=lambda name: order.get(name, len(order)))


# --- Several workloads ------------------------------------------------------------------------------------------------


def plans_table(results: Sequence[PlanResult]) -> Table:
    return Table(
        title=f"Predictions for {say_gpu(results[0])}",
        columns=(
            Column(key="workload", label="workload"),
            _FITS,
            _PEAK,
            *_RESERVED,
            Column(key="margin_bytes", label="to spare", kind="bytes"),
            _STEP,
            Column(key="step_low_ms", label="low (ms)", kind="ms", detail=True),
            Column(key="step_high_ms", label="high (ms)", kind="ms", detail=True),
            _TOKENS,
            Column(key="mfu", label="MFU", kind="share"),
        ),
        rows=tuple(_plan_row(one) for one in results),
        notes=tuple(dict.fromkeys(note for one in results for note in one.assumptions)),
        compared=("peak_allocated_bytes", "reserved_low_bytes", "reserved_high_bytes"),
    )


def _plan_row(result: PlanResult) -> tuple[Cell, ...]:
    low, high = result.step_ns_interval or (None, None)
    return (
        describe_case(Case(workload=result.workload, timing=Timing())),
        result.verdict,
        result.peak_allocated_bytes,
        *result.reserved_bytes,
        result.margin_bytes,
        _ms(result.step_ns),
        _ms(low),
        _ms(high),
        result.tokens_per_s,
        result.mfu,
    )


# --- `--fit` ----------------------------------------------------------------------------------------------------------


def fit_page(found: FitResult) -> Page:
    lines = (say_workload(found.start), say_verdict(found.start), say_fit(found))
    return Page(headline="\n".join(lines), tables=(limits_table(found), proposals_table(found)), findings=None)


def say_fit(found: FitResult) -> str:
    """The proposal to take, or that there is none."""
    if found.start.fits:
        limits = [f"{one.setting} {one.value}" for one in found.limits if one.value]
        return f"Largest that fits: {', '.join(limits)}." if limits else "It fits as it is."
    best = next((one for one in found.proposals if one.fits), None)
    memory = f"{found.gpu.memory_bytes / 1e9:.4g} GB"
    words = f"Nothing that was tried fits into {memory}."
    if best is not None:
        time = f", {say_time(best.step_ns)} per step" if best.step_ns else ""
        words = f"Fits with {best.title}: {say_bytes(best.peak_allocated_bytes or 0)} allocated{time}."
    if found.start.can_fit:
        return words
    kept = say_bytes(found.start.kept_bytes)
    return f"One GPU is not enough: at the peak, parameters, gradients and optimizer state alone take {kept}. {words}"


def limits_table(found: FitResult) -> Table:
    return Table(
        title=f"The largest that fits into {found.gpu.memory_bytes / 1e9:.4g} GB, all else unchanged",
        columns=(
            Column(key="setting", label="setting"),
            Column(key="value", label="largest", kind="count"),
            Column(key="beyond", label="does not fit", kind="count"),
            _PEAK,
            *_RESERVED,
            _STEP,
            _TOKENS,
            Column(key="command", label="command"),
        ),
        rows=tuple(_limit_row(one) for one in found.limits),
        notes=tuple(
            f"The model refuses a {one.setting} of {one.beyond}." for one in found.limits if one.is_cap and one.value
        ),
    )


def _limit_row(limit: Limit) -> tuple[Cell, ...]:
    return (
        limit.setting,
        limit.value,
        limit.beyond,
        limit.peak_allocated_bytes,
        *(limit.reserved_bytes or (None, None)),
        _ms(limit.step_ns),
        limit.tokens_per_s,
        limit.command if limit.value is not None else None,
    )


def proposals_table(found: FitResult) -> Table:
    start = found.start
    return Table(
        title="Changes, those that fit first: the fewest GPUs, then the fastest",
        columns=(
            Column(key="change", label="change"),
            _FITS,
            _PEAK,
            Column(key="memory_saving_bytes", label="saves", kind="bytes"),
            *_RESERVED,
            _STEP,
            Column(key="time_cost_ms", label="costs (ms)", kind="ms"),
            _TOKENS,
            Column(key="front", label="front"),
            Column(key="command", label="command"),
        ),
        rows=tuple(_proposal_row(one, start) for one in found.proposals),
        notes=(
            f"Every line follows from a simulation; lines for several GPUs share some: {found.simulations} in all.",
            "front: nothing else for one GPU needs both less memory and less time.",
            *(f"Not simulated: {one.title}: {one.refused}." for one in found.proposals if one.refused),
            *found.notes,
        ),
    )


def _proposal_row(proposal: Proposal, start: PlanResult) -> tuple[Cell, ...]:
    if proposal.refused:
        return (proposal.title, "not simulated", *[None] * 7, None, None)
    peak, step = proposal.peak_allocated_bytes, proposal.step_ns
    return (
        proposal.title,
        proposal.verdict,
        peak,
        None if peak is None else start.peak_allocated_bytes - peak,
        *(proposal.reserved_bytes or (None, None)),
        _ms(step),
        None if step is None or start.step_ns is None else (step - start.step_ns) / 1e6,
        proposal.tokens_per_s,
        "yes" if proposal.on_front else None,
        proposal.command,
    )


def fit_figure(found: FitResult) -> Figure:
    """Memory against time: a mark for everything that was simulated, a line along the front, and one where the memory
    of the GPU ends."""
    context = found.start.context_bytes
    drawn = [
        (one, Point(panel="", series=_name_mark(one), x=(high + context) / GIB, y=one.step_ns / 1e6))
        for one in found.proposals
        if (high := (one.reserved_bytes or (0, 0))[1]) and one.step_ns
    ]
    front = [msgspec.structs.replace(point, series="front") for one, point in drawn if one.on_front]
    memory = found.gpu.memory_bytes
    highest = max((point.y for _, point in drawn), default=0.0)
    limit = [
        Point(panel="", series=f"memory: {memory / 1e9:.4g} GB", x=memory / GIB, y=height) for height in (0.0, highest)
    ]
    return Figure(
        title="Predicted memory and time",
        subtitle=f"{say_workload(found.start)}; {found.simulations} simulations",
        x=Axis(label="memory with the CUDA context, high end", unit="GiB"),
        y=Axis(label="step time", unit="ms"),
        points=(*limit, *front, *(point for _, point in drawn)),
    )


def _name_mark(proposal: Proposal) -> str:
    """What changes, short enough for a legend."""
    changes = proposal.changes
    words = [str(changes[name]) for name in ("precision", "attention") if name in changes]
    words += ["fused"] if "optimizer" in changes else []
    words += [f"checkpoint {changes['checkpoint']}"] if "checkpoint" in changes else []
    words += [f"{changes['grad_accumulation']} passes"] if "grad_accumulation" in changes else []
    if "ranks" in changes:
        words.append(f"{changes['ranks']} × {'FSDP' if changes['strategy'] == 'fsdp' else 'sharded optimizer'}")
    return " + ".join(words) or proposal.title

"""`stepscope plan --fit`: the largest batch and context that fit, and the changes that make a workload fit.

Memory is nearly affine in the batch, and in the context if attention keeps no scores, so a line through two simulations
points close to the limit. The line only says where to look: whatever is called fitting was simulated exactly so, and
so was the next value, which is not.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, Protocol

import msgspec

from stepscope.errors import StepscopeError
from stepscope.explain.commands import write_command
from stepscope.recording.rows.plan_result import FitResult, Limit, PlannedRanks, PlanResult, Proposal
from stepscope.spec import ModelShape, Scalar, Workload

Changes = dict[str, Scalar]
_MOST_SIMULATED = 12  # per limit; values that the model refuses cost nothing
FAR = 8  # times as much is tried next if memory does not grow: the allocator reserves whole segments
_COARSE = 128  # a limit above this is found to within this fraction of it
_MOST = {"batch": 2**20, "context": 2**24}
_ENOUGH = 3  # combinations that fit
SHARDED = (
    PlannedRanks(count=8, strategy="bucketed", shard_optimizer=True),
    *(PlannedRanks(count=count, strategy="fsdp") for count in (2, 4, 8)),
)
_ADAMW = ("adamw", "adamw-torch")


class OutOfTimeError(StepscopeError):
    """A workload was not simulated, because the search had taken long enough."""


class PlanSource(Protocol):
    """What a search asks. `jobs.plan.Planner` is one."""

    @property
    def simulations(self) -> int: ...

    def predict_all(self, workloads: Sequence[Workload]) -> list[PlanResult | StepscopeError]: ...

    def predict_shares(
        self, workload: Workload, choices: Sequence[PlannedRanks]
    ) -> list[PlanResult | StepscopeError]: ...


def find_fit(workload: Workload, planner: PlanSource, command: str) -> FitResult:
    """Search for what fits. Raise StepscopeError if the workload itself cannot be simulated."""
    (start,) = planner.predict_all([workload])
    if isinstance(start, StepscopeError):
        raise start
    workload = start.workload
    singles = list(list_changes(workload))
    proposals = [propose("as it is", {}, workload, start)]
    if start.can_fit:
        proposals += try_changes(singles, workload, planner)
        proposals += [] if start.fits else _try_combined(singles, workload, planner)
        limits = find_limits(_settings_of(workload), start, planner)
    else:  # one GPU is not enough, whatever changes
        limits = tuple(Limit(setting=one, value=None, beyond=None, command="") for one in _settings_of(workload))
    if not start.fits:
        proposals += _try_several_gpus(singles, workload, planner, is_urgent=not any(one.fits for one in proposals))
    return FitResult(
        gpu=start.gpu,
        command=command,
        start=start,
        limits=limits,
        proposals=tuple(rank(mark_front(proposals))),
        simulations=planner.simulations,
    )


# --- Changes ----------------------------------------------------------------------------------------------------------


def list_changes(workload: Workload) -> Iterator[tuple[str, Changes]]:
    """The changes to try, each alone, with its title. Those that cost little time come first."""
    model = workload.model
    if workload.precision in ("fp32", "tf32"):
        yield "bf16", {"precision": "bf16"}
    if workload.attention == "naive":
        chosen = "flash" if isinstance(model, ModelShape) else "sdpa"
        yield f"{chosen} attention", {"attention": chosen}
    if workload.mode == "train" and workload.optimizer in _ADAMW:
        yield "fused AdamW", {"optimizer": "adamw-fused"}
    if workload.checkpoint == "none" and workload.mode in ("forward-backward", "train"):
        for count in _groups(model):
            yield (
                f"checkpoint every {count} blocks" if count > 1 else "checkpoint every block",
                {"checkpoint": str(count)},
            )
    if workload.mode == "train" and workload.batch > workload.passes:
        for count in _splits(workload):
            yield f"{count} micro-batches", {"grad_accumulation": count}


def _groups(model: object) -> tuple[int, ...]:
    """Numbers of blocks to recompute together, the fewest checkpoints first."""
    if not isinstance(model, ModelShape):
        return (1,)
    root = max(1, round(math.sqrt(model.num_layers)))
    return tuple(sorted({root, max(1, root // 2), 1}, reverse=True))


def _splits(workload: Workload) -> list[int]:
    """Numbers of micro-batches: twice as many as now, and as many as there are sequences."""
    factors = [n for n in range(workload.passes + 1, workload.batch + 1) if workload.batch % n == 0]
    return sorted({factors[0], factors[-1]})


def combine(singles: Sequence[tuple[str, Changes]]) -> Iterator[tuple[str, Changes]]:
    """Combinations to try if no single change is enough, from those that cost little time to the smallest step."""
    free = [one for one in singles if not {"checkpoint", "grad_accumulation"} & one[1].keys()]
    checkpoints = [one for one in singles if "checkpoint" in one[1]]
    splits = [one for one in singles if "grad_accumulation" in one[1]]
    if len(free) > 1:
        yield _join(free)
    if free:
        for pair in itertools.zip_longest(checkpoints, splits):
            yield from (_join([*free, one]) for one in pair if one is not None)
    for checkpoint in checkpoints if splits else ():
        yield _join([*free, checkpoint, splits[-1]])


def _join(parts: Iterable[tuple[str, Changes]]) -> tuple[str, Changes]:
    titles, changes = zip(*parts, strict=True)
    return " + ".join(titles), {name: value for one in changes for name, value in one.items()}


def _try_combined(singles: Sequence[tuple[str, Changes]], workload: Workload, planner: PlanSource) -> list[Proposal]:
    found: list[Proposal] = []
    for pair in take_pairs(combine(singles)):
        found += try_changes(pair, workload, planner)
        if sum(one.fits for one in found) >= _ENOUGH:
            break
    return found


def take_pairs(items: Iterator[tuple[str, Changes]]) -> Iterator[list[tuple[str, Changes]]]:
    while pair := list(itertools.islice(items, 2)):
        yield pair


def try_changes(tried: Sequence[tuple[str, Changes]], workload: Workload, planner: PlanSource) -> list[Proposal]:
    changed = [msgspec.structs.replace(workload, **changes) for _, changes in tried]
    results = planner.predict_all(changed)
    return [
        propose(title, changes, one, result)
        for (title, changes), one, result in zip(tried, changed, results, strict=True)
    ]


def _try_several_gpus(
    singles: Sequence[tuple[str, Changes]], workload: Workload, planner: PlanSource, *, is_urgent: bool
) -> list[Proposal]:
    """The step on several GPUs, as it is. If nothing else fits, also with the changes that cost little time, and with a
    checkpoint for every block."""
    if workload.mode != "train":
        return []
    free = [one for one in singles if not {"checkpoint", "grad_accumulation"} & one[1].keys()]
    checkpoints = [one for one in singles if "checkpoint" in one[1]]
    more = [parts for parts in (free, [*free, *checkpoints[-1:]]) if parts] if is_urgent else []
    found: list[Proposal] = []
    for parts in ([], *more):
        found += _try_sharded(parts, workload, planner)
        if any(one.fits for one in found):
            break
    return found


def _try_sharded(parts: Sequence[tuple[str, Changes]], workload: Workload, planner: PlanSource) -> Iterator[Proposal]:
    """The step on several GPUs, each with the batch that the one has now, up to the fewest that FSDP needs."""
    title, changes = _join(parts) if parts else ("", {})
    share = msgspec.structs.replace(workload, **changes)
    for ranks, found in zip(SHARDED, planner.predict_shares(share, SHARDED), strict=True):
        whole = msgspec.structs.replace(share, batch=share.batch * ranks.count)
        name = "FSDP" if ranks.strategy == "fsdp" else "optimizer state sharded"
        name = f"{title} + {name}" if title else name
        asked: Changes = {**changes, "ranks": ranks.count, "strategy": ranks.strategy, "batch": whole.batch}
        verb = "train" if isinstance(workload.model, ModelShape) else "plan"  # what others have wrappers for, in a loop
        command = f"{write_command(verb, whole)}{ranks.flags}"
        yield propose(f"{name} over {ranks.count} GPUs", asked, whole, found, command)
        if ranks.strategy == "fsdp" and isinstance(found, PlanResult) and found.fits:
            return


def propose(
    title: str, changes: Changes, workload: Workload, found: PlanResult | StepscopeError, command: str = ""
) -> Proposal:
    command = command or write_command("bench", workload)
    if isinstance(found, StepscopeError):
        return Proposal(title=title, changes=changes, command=command, refused=found.message)
    return Proposal(
        title=title,
        changes=changes,
        command=command,
        fits=found.fits,
        verdict=found.verdict,
        peak_allocated_bytes=found.peak_allocated_bytes,
        reserved_bytes=found.reserved_bytes,
        margin_bytes=found.margin_bytes,
        step_ns=found.step_ns,
        step_ns_interval=found.step_ns_interval,
        tokens_per_s=found.tokens_per_s,
    )


def rank(proposals: Sequence[Proposal]) -> list[Proposal]:
    """What fits first, the fewest GPUs and then the fastest first; then what comes closest to fitting; what cannot be
    simulated last."""

    def place(proposal: Proposal) -> tuple[int, int, float, int]:
        if proposal.refused:
            return 2, 0, 0.0, 0
        left = -(proposal.margin_bytes or 0)
        if not proposal.fits:
            return 1, 0, float(left), 0
        return 0, proposal.num_gpus, float(proposal.step_ns or 0), left

    return sorted(proposals, key=place)


def mark_front(proposals: Sequence[Proposal]) -> list[Proposal]:
    """The proposals, with those marked that no other for one GPU beats in memory and in time."""
    known = [one for one in proposals if one.step_ns and one.reserved_bytes and one.num_gpus == 1]
    costs = {id(one): (one.reserved_bytes or (0, 0))[1] for one in known}

    def is_beaten(one: Proposal) -> bool:
        mine = (costs[id(one)], one.step_ns or 0)
        theirs = [(costs[id(other)], other.step_ns or 0) for other in known]
        return any(other[0] <= mine[0] and other[1] <= mine[1] and other != mine for other in theirs)

    return [msgspec.structs.replace(one, on_front=one in known and not is_beaten(one)) for one in proposals]


# --- Limits -----------------------------------------------------------------------------------------------------------

Setting = Literal["batch", "context"]


def _settings_of(workload: Workload) -> tuple[Setting, ...]:
    return ("batch", "context") if workload.context else ("batch",)


def find_limits(settings: Sequence[Setting], start: PlanResult, planner: PlanSource) -> tuple[Limit, ...]:
    """The largest values that fit, each by simulating it and the next one, all settings at the same time. Raise
    OutOfTimeError if there is no time to."""
    searches = [_LimitSearch(setting, start) for setting in settings]
    while chosen := [(one, value) for one in searches if (value := one.choose()) is not None]:
        results = planner.predict_all([one.change(value) for one, value in chosen])
        for (one, value), found in zip(chosen, results, strict=True):
            one.look_at(value, found)
    return tuple(one.describe() for one in searches)


class _LimitSearch:
    """Narrows the gap between the largest value that is known to fit and the smallest that is known not to. Values are
    multiples of `unit`."""

    def __init__(self, setting: Setting, start: PlanResult) -> None:
        self._setting, self._start = setting, start
        workload = start.workload
        here = workload.batch if setting == "batch" else workload.context
        self._unit = workload.passes if setting == "batch" else _unit_of(here)
        self._points: dict[int, PlanResult] = {here: start}
        self._refused: int | None = None
        self._creeps = False  # whether the last step was small
        self._width: int | None = None  # between what fits and what does not, before the last simulation

    def _low(self) -> int:
        return max((value for value, found in self._points.items() if found.fits), default=0)

    def _high(self) -> int | None:
        beyond = [value for value, found in self._points.items() if not found.fits]
        return min([*beyond, *([self._refused] if self._refused else [])], default=None)

    def choose(self) -> int | None:
        """The next value to simulate, None if there is nothing between what fits and what does not. Below the limit,
        everything reserved fits; above it, not even what is allocated. In between, PyTorch returns cached memory."""
        low, high = self._low(), self._high()
        is_found = high is not None and high - low <= max(self._unit, low // _COARSE)
        if is_found or len(self._points) > _MOST_SIMULATED:
            return None
        halves = high is None or self._width is None or high - low <= self._width / 2
        self._width = None if high is None else high - low
        if halves and (high is None or high != self._refused):
            for curve in (_needed, _allocated):
                guess = min(self._extrapolate(curve), _MOST[self._setting])
                following = max(int(guess) // self._unit, low // self._unit + 1) * self._unit
                if guess >= low and (high is None or following < high):
                    return self._hasten(following, low) if high is None else following
        return (low + (high or 4 * low)) // 2 // self._unit * self._unit or self._unit

    def _hasten(self, following: int, low: int) -> int:
        """The next value if nothing is known that does not fit: a small step is taken once, not again and again."""
        is_small = following <= low + low // 4
        crept, self._creeps = self._creeps, is_small
        return 2 * low if is_small and crept else following

    def _extrapolate(self, curve: Callable[[PlanResult], int]) -> float:
        """Where a curve through the simulations next to the limit reaches the memory of the GPU."""
        memory = self._start.gpu.memory_bytes
        left = sorted(((curve(found) - memory, value) for value, found in self._points.items()), key=_distance)[:3]
        if len(left) == 1:
            ((missing, value),) = left
            return value / 2 if missing > 0 else 4.0 * value
        return solve_curve([(value, missing) for missing, value in left])

    def change(self, value: int) -> Workload:
        return msgspec.structs.replace(self._start.workload, **{self._setting: value})

    def look_at(self, value: int, found: PlanResult | StepscopeError) -> None:
        if isinstance(found, OutOfTimeError):
            raise found
        if isinstance(found, StepscopeError):
            self._refused = value if self._refused is None else min(value, self._refused)
        else:
            self._points[value] = found

    def describe(self) -> Limit:
        low, high = self._low(), self._high()
        if low == 0:
            return Limit(setting=self._setting, value=None, beyond=high, command="")
        found = self._points[low]
        return Limit(
            setting=self._setting,
            value=low,
            beyond=high,
            command=write_command("bench", found.workload),
            peak_allocated_bytes=found.peak_allocated_bytes,
            reserved_bytes=found.reserved_bytes,
            step_ns=found.step_ns,
            tokens_per_s=found.tokens_per_s,
            is_cap=high is not None and high == self._refused,
        )


def _needed(found: PlanResult) -> int:
    return found.needed_bytes[1]


def _allocated(found: PlanResult) -> int:
    return found.peak_allocated_bytes + found.context_bytes


def _distance(point: tuple[int, int]) -> int:
    return abs(point[0])


def solve_curve(points: Sequence[tuple[float, float]]) -> float:
    """Where the polynomial through two or three points crosses zero upwards. The context may have a square, because of
    the scores of attention."""
    (x0, y0), (x1, y1), *more = sorted(points)
    slope = (y1 - y0) / (x1 - x0)
    bend = 0.0
    if more:
        ((x2, y2),) = more
        bend = ((y2 - y1) / (x2 - x1) - slope) / (x2 - x0)
    # y0 + slope (x - x0) + bend (x - x0) (x - x1), with z = x - x0
    linear = slope - bend * (x1 - x0)
    inside = linear * linear - 4 * bend * y0
    if abs(bend) * (x1 - x0) <= 1e-9 * abs(slope) or inside < 0:
        return x0 - y0 / slope if slope > 0 else FAR * x1
    return x0 + 2 * -y0 / (linear + math.sqrt(inside)) if linear + math.sqrt(inside) > 0 else FAR * x1


def _unit_of(context: int) -> int:
    """Contexts are tried in steps of an eighth of the present one, rounded to a power of two of at most 128."""
    return int(min(128, 2 ** max(0, int(math.log2(max(context, 8) / 8)))))

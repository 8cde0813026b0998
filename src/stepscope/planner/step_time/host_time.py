"""The time that the host takes to call the operators of a step, from trials.

Calls of one kind cost about the same, so a phase is a sum of calls. Their costs are fitted to trials of small models,
close to typical ratios: a dozen trials alone would not tell a view from a copy. Where a calibration has steps of usual
size, the costs are then fitted to those, close to what the small ones say: in a large step, forward takes the host
longer, and backward less.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stepscope.planner.step_time.kernels_of import list_operands
from stepscope.planner.step_time.operator_kinds import HostClass, count_calls, host_class, short_name
from stepscope.recording.rows.calibration import Calibration, HostTrial

if TYPE_CHECKING:
    from stepscope.planner.operation import Operation

_CLASSES: tuple[HostClass, ...] = (
    *("view", "free", "product", "attention", "norm", "reduction", "pointwise", "copy", "creation", "index", "own"),
)
_FEATURES = (*_CLASSES, "modules", "start")
# Nanoseconds on a fast host of 2024, before anything is known; only their ratios matter.
_KINDS = dict[str, float]
_TYPICAL: dict[str, _KINDS] = {
    "forward": {
        "view": 2200,
        "free": 300,
        "product": 9000,
        "attention": 25000,
        "norm": 9000,
        "reduction": 7500,
        "pointwise": 6000,
        "copy": 7000,
        "creation": 4500,
        "index": 9000,
        "own": 25000,
        "modules": 2500,
        "start": 60000,
    },
    "backward": {
        "view": 1500,
        "free": 300,
        "product": 7500,
        "attention": 25000,
        "norm": 8000,
        "reduction": 6500,
        "pointwise": 4500,
        "copy": 5000,
        "creation": 4000,
        "index": 10000,
        "own": 25000,
        "modules": 4000,
        "start": 60000,
    },
    "optimizer": dict.fromkeys(_FEATURES, 5000.0) | {"free": 300.0, "view": 2000.0, "start": 30000.0, "modules": 0.0},
}
_TRUST = 0.15  # how far a cost may be from its typical ratio to the others, next to the errors of trials
_SWEEPS = 400
_COMPILED_LAUNCHES = 110  # of the forward pass of the compiled trial, which has six layers
# What a call costs without autograd, under a checkpoint, and while a checkpoint repeats it, next to a plain one with
# autograd. A checkpoint calls Python for every tensor that is saved. These hold if no trial shows them.
_FREE_OF_GRAPH, _CHECKPOINTED, _AGAIN = 0.7, 1.5, 1.7
_CHECKPOINT = " checkpoint "  # in the name of a trial


class HostModel:
    """Costs of calls by phase, and of the optimizers that were tried."""

    def __init__(self, calibration: Calibration) -> None:
        self._costs = {phase: _fit_phase(calibration.trials, phase) for phase in _TYPICAL}
        self.errors = {phase: self._spread(calibration.trials, phase) for phase in _TYPICAL}
        self._updates = _fit_updates(calibration.trials)
        self.compiled_launch_ns, self.compiled_start_ns = _fit_compiled(calibration.trials, self._costs["forward"])
        self.checkpointed, self.again = self._fit_checkpoints(calibration.trials)
        self.free_of_graph = self._fit_inference(calibration.trials)

    def cost(self, operation: "Operation", phase: str) -> float:
        """Nanoseconds of one call. Lists cost by their length."""
        kind = host_class(operation.name)
        if kind == "list":
            return 3000.0 + 350.0 * len(operation.inputs) / list_operands(operation.name)
        return count_calls(operation) * self._costs[phase if phase in self._costs else "forward"][kind]

    def module_call(self, phase: str) -> float:
        return self._costs[phase if phase in self._costs else "forward"]["modules"]

    def start(self, phase: str) -> float:
        return self._costs[phase if phase in self._costs else "forward"]["start"]

    def update(self, operations: Sequence["Operation"]) -> float | None:
        """Nanoseconds of the whole update of an optimizer that works on lists or in one launch, or None for others."""
        kind, parameters, calls = _recognize_update(operations)
        if kind not in self._updates:
            return None
        start_ns, per_parameter_ns, usual_calls = self._updates[kind]
        share = 0.4 + 0.6 * calls / usual_calls if usual_calls else 1.0
        return (start_ns + per_parameter_ns * parameters) * min(1.5, share)

    def _fit_inference(self, trials: Iterable[HostTrial]) -> float:
        """What a call costs without autograd, as a share of one with it."""
        shares = [one.ns / self._sum("forward", _count(one)) for one in trials if one.model.endswith(" inference")]
        return float(np.mean(shares)) if shares else _FREE_OF_GRAPH

    def _fit_checkpoints(self, trials: Sequence[HostTrial]) -> tuple[float, float]:
        """How much more a call costs under a checkpoint, and when it is repeated. Backward has its own calls and those
        of forward again."""
        checkpointed, again = [], []
        for forward, backward in pairwise(trials):
            if _CHECKPOINT not in forward.model or (forward.phase, backward.phase) != ("forward", "backward"):
                continue
            usual_ns = self._sum("forward", _count(forward))
            repeated = _count(forward)
            own = {name: max(0.0, count - repeated[name]) for name, count in _count(backward).items()}
            checkpointed.append(forward.ns / usual_ns)
            again.append((backward.ns - self._sum("backward", own | {"start": 1.0})) / usual_ns)
        if not checkpointed:
            return _CHECKPOINTED, _AGAIN
        return max(1.0, float(np.mean(checkpointed))), max(1.0, float(np.mean(again)))

    def _sum(self, phase: str, counts: Mapping[str, float]) -> float:
        return max(1.0, sum(self._costs[phase][name] * count for name, count in counts.items()))

    def _spread(self, trials: Iterable[HostTrial], phase: str) -> float:
        """The error of the fit, as a share."""
        errors = [math.log(self._sum(phase, _count(one)) / one.ns) for one in trials if _is_usable(one, phase)]
        return float(np.sqrt(np.mean(np.square(errors)))) if errors else 0.3


def _fit_compiled(trials: Iterable[HostTrial], eager: Mapping[str, float]) -> tuple[float, float]:
    """The cost of a launch in compiled code, and of entering it. Without a trial, a share of an eager product's."""
    for one in trials:
        if "compiled" in one.model and one.phase == "forward":
            return 0.85 * one.ns / _COMPILED_LAUNCHES, 0.15 * one.ns
    return 0.8 * eager["product"], 10 * eager["product"]


def _is_usable(trial: HostTrial, phase: str) -> bool:
    if not trial.operations or trial.phase != phase or _CHECKPOINT in trial.model or "inference" in trial.model:
        return False
    return phase != "optimizer" or trial.optimizer == "adamw"


def _count(trial: HostTrial) -> dict[str, float]:
    counts: dict[str, float] = dict.fromkeys(_FEATURES, 0.0)
    for name, calls in trial.operations.items():
        kind = host_class(name)
        if kind in counts:
            counts[kind] += calls
    return {**counts, "modules": float(trial.modules), "start": 1.0}


def _fit_phase(trials: Sequence[HostTrial], phase: str) -> Mapping[str, float]:
    """Costs from small models, and then from steps of usual size."""
    costs: Mapping[str, float] = _TYPICAL[phase]
    for is_full_size in (False, True):
        used = [one for one in trials if _is_usable(one, phase) and one.is_full_size == is_full_size]
        costs = _fit(used, costs) if used else costs
    return costs


def _fit(used: Sequence[HostTrial], usual: Mapping[str, float]) -> dict[str, float]:
    """Least squares of relative errors, with costs that are positive and close to the ratios of usual ones."""
    typical = np.array([usual[name] for name in _FEATURES])
    counts = np.array([[_count(one)[name] for name in _FEATURES] for one in used])
    times = np.array([float(one.ns) for one in used])
    scale = float(np.median(times / (counts @ typical)))
    typical = typical * scale
    shares = counts * typical / times[:, None]  # of each kind in each trial, at typical costs
    factors = _solve(shares, np.ones(len(used)))
    return dict(zip(_FEATURES, (typical * factors).tolist(), strict=True))


def _solve(shares: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Factors of at least a fifth that bring `shares @ factors` close to `target`, and stay close to one."""
    factors = np.ones(shares.shape[1])
    penalty = (_TRUST**2) * len(target) / shares.shape[1]
    for _ in range(_SWEEPS):
        before = factors.copy()
        for index in range(len(factors)):
            column = shares[:, index]
            rest = target - shares @ factors + column * factors[index]
            best = (column @ rest + penalty) / (column @ column + penalty)
            factors[index] = max(0.2, best)
        if np.array_equal(factors, before):
            break
    return factors


def _fit_updates(trials: Sequence[HostTrial]) -> dict[str, tuple[float, float, float]]:
    """For each kind of optimizer: its start, its cost per parameter, and how many list operators it calls."""
    fitted = {}
    for kind in ("adamw-torch", "adamw-fused", "adamw-onelaunch"):
        used = [one for one in trials if one.phase == "optimizer" and one.optimizer == kind and one.operations]
        if not used:
            continue
        parameters = np.array([float(one.parameters) for one in used])
        times = np.array([float(one.ns) for one in used])
        slope = 0.0
        if np.ptp(parameters) > 0:
            slope = max(0.0, float(np.polyfit(parameters, times, 1)[0]))
        slope = slope or float(np.median(times / parameters)) * 0.8
        start = max(0.0, float(np.median(times - slope * parameters)))
        calls = float(
            np.median([sum(count for name, count in one.operations.items() if "foreach" in name) for one in used])
        )
        fitted[kind] = (start, slope, calls)
    return fitted


def _recognize_update(operations: Sequence["Operation"]) -> tuple[str, int, int]:
    """The kind of an optimizer, the number of its parameters and of its list operators."""
    names = Counter(short_name(one.name) for one in operations)
    lists = [one for one in operations if host_class(one.name) == "list"]
    parameters = max((len(one.inputs) // list_operands(one.name) for one in lists), default=0)
    calls = sum(count for name, count in names.items() if name.startswith("_foreach"))
    if any(name.startswith("_fused_") for name in names):
        return "adamw-fused", sum(len(one.inputs) // 5 for one in lists if "_fused_" in one.name), 0
    if calls:
        return "adamw-torch", parameters, calls
    if any(one.name.startswith("stepscope.adamw") for one in operations):
        return "adamw-onelaunch", max(len(one.inputs) // 4 for one in operations), 0
    return "", 0, 0


def _depth_below(before: str, path: str) -> int:
    old, new = [part for part in before.split(".") if part], [part for part in path.split(".") if part]
    common = 0
    for left, right in zip(old, new, strict=False):
        if left != right:
            break
        common += 1
    return len([part for part in new[common:] if not part.isdigit()])


def share_modules(operations: Sequence["Operation"]) -> Mapping[int, int]:
    """The number of modules that are entered before each operator, by its position; zeros are left out."""
    entered: dict[int, int] = {}
    before = ""
    for position, one in enumerate(operations):
        if one.phase != "backward" and one.module != before:
            if depth := _depth_below(before, one.module):
                entered[position] = depth
            before = one.module
    return entered

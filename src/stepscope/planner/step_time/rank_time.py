"""The time of a step that several GPUs share: what one of them computes, and the communication that is left exposed."""

from collections.abc import Sequence

from stepscope import cost
from stepscope.cost.overlap import Compute, Layer, StepTime
from stepscope.cost.sharding import LayerSize
from stepscope.planner.ranks import find_layers
from stepscope.planner.simulation import ParameterSize
from stepscope.planner.step_time import PredictedStep
from stepscope.planner.step_time.data_sheets import assume_links
from stepscope.recording.rows.links import Links
from stepscope.recording.rows.plan_result import PlannedRanks

_FULL_BYTES, _HALF_BYTES = 4, 2  # of an element that ranks exchange


def time_ranks(
    step: PredictedStep, parameters: Sequence[ParameterSize], ranks: PlannedRanks, gpu: str, *, is_half: bool
) -> tuple[StepTime, str]:
    """The step with its communication, and which links it assumes. `step` is what one rank computes with all
    parameters; `is_half` if FSDP gathers parameters in half precision."""
    links, are_assumed = assume_links(gpu, ranks.count)
    times = {phase.name: phase.ns for phase in step.phases}
    compute = Compute(
        forward_ns=times.get("forward", 0.0),
        backward_ns=times.get("backward", 0.0),
        optimizer_ns=times.get("optimizer", 0.0),
    )
    said = "what data sheets suggest" if are_assumed else "what `stepscope comm` measured"
    found = _communicate(compute, parameters, ranks, links, _HALF_BYTES if is_half else _FULL_BYTES)
    return found, f"Links between {ranks.count} GPUs of one machine: {said}."


def _communicate(
    compute: Compute, parameters: Sequence[ParameterSize], ranks: PlannedRanks, links: Links, gathered_bytes: int
) -> StepTime:
    match ranks.strategy:
        case "single":
            raise AssertionError("one rank does not communicate")
        case "fsdp":
            layers = find_layers(parameters)
            replicated = _FULL_BYTES * sum(sum(layer.vectors) for layer in layers)
            return cost.predict_fsdp(
                _share_time(layers, compute, gathered_bytes),
                links,
                optimizer_ns=compute.optimizer_ns,
                replicated_bytes=replicated,
            )
        case strategy:
            sizes = [_FULL_BYTES * one.elements for one in reversed(parameters)]
            gradients = cost.ready_in_order(sizes, compute.backward_ns)
            ddp = cost.predict_ddp(strategy, gradients, compute, links)
            return cost.predict_sharded_optimizer(ddp, compute, links, sum(sizes)) if ranks.shard_optimizer else ddp


def _share_time(layers: Sequence[LayerSize], compute: Compute, gathered_bytes: int) -> list[Layer]:
    """The layers that FSDP gathers, each with a share of the time that is proportional to its parameters."""
    sizes = [sum(layer.matrices) for layer in layers if layer.matrices]
    total = sum(sizes)
    return [
        Layer(
            parameter_bytes=gathered_bytes * size,
            gradient_bytes=gathered_bytes * size,
            forward_ns=compute.forward_ns * size / total,
            backward_ns=compute.backward_ns * size / total,
        )
        for size in sizes
    ]

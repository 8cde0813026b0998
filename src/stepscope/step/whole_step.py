"""A step as a `Program` of `stepscope.fast`, as the settings of a workload say."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.fast.program import Changes, Program
from stepscope.fast.rewrites import Rewrites
from stepscope.fast.update import why_not_one_launch
from stepscope.recording.rows.bench import Doubt
from stepscope.spec import Workload

LossFunction = Callable[[Any], Tensor]


def build_program(
    workload: Workload,
    module: nn.Module,
    loss_of: LossFunction,
    batches: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> tuple[Program, list[Doubt]]:
    """The program, and remarks about settings that it does not follow. An optimizer that our kernel cannot update
    leaves no working weights, and without them no GEMMs are merged."""
    changes, remarks = choose_changes(workload, optimizer)
    program = Program(
        module=module,
        loss_of=loss_of,
        batches=batches,
        optimizer=optimizer,
        autocast=torch.bfloat16 if workload.precision == "bf16" else None,
        device=device,
        changes=changes,
    )
    return program, remarks


def choose_changes(workload: Workload, optimizer: torch.optim.Optimizer) -> tuple[Changes, list[Doubt]]:
    """What the settings of a workload change about a step, and remarks about those that it does not follow."""
    wanted = workload.working_weights or workload.optimizer == "adamw-onelaunch"
    refusal = why_not_one_launch(optimizer) if wanted else None
    one_launch = wanted and refusal is None
    changes = Changes(
        compiler="inductor" if workload.compile else None,
        rewrites=Rewrites(
            attention=workload.fuse,
            norms=workload.fuse,
            loss=workload.fuse,
            working_weights=workload.working_weights and one_launch,
            merge=workload.merge and one_launch,
            packed=workload.fuse and workload.merge and one_launch,
        ),
        one_launch=one_launch,
        graph=workload.graph,
    )
    if refusal is None:
        return changes, []
    return changes, [Doubt(code="own-optimizer", text=f"no working weights: {refusal}")]

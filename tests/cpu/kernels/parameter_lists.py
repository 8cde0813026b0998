"""Lists of parameters for tests of AdamW: every combination of dtypes that has its own launch, and what torch's own
optimizers make of the same values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stepscope.kernels import AdamWUpdates, Hyper, ParameterUpdate
from tests.cpu.accuracy import assert_as_accurate, normal

MAX_NORM = 2.0
STEPS = 4
# The second group decays as Adam does, and both decay enough to matter in a few steps.
HYPERS = (
    Hyper(lr=0.02, beta1=0.8, beta2=0.95, eps=1e-8, weight_decay=0.3),
    Hyper(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.1, decoupled=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a list: its size, the dtypes of what belongs to it, and how its memory is aligned."""

    shape: tuple[int, ...]
    state: torch.dtype = torch.float32
    gradient: torch.dtype = torch.float32
    working: torch.dtype | None = None
    group: int = 0
    shift: int = 0  # elements between an aligned address and each tensor


MIXED = (
    Parameter(shape=(70, 130), gradient=torch.bfloat16, working=torch.bfloat16),  # more than two chunks
    Parameter(shape=(130,)),
    Parameter(shape=(4096,), gradient=torch.bfloat16, working=torch.bfloat16, group=1),  # exactly one chunk
    Parameter(shape=(1,), group=1),
    Parameter(shape=(0, 4)),
    Parameter(shape=(3, 700), gradient=torch.bfloat16, working=torch.bfloat16, shift=3),  # not aligned
    Parameter(shape=(2, 600), state=torch.bfloat16, gradient=torch.bfloat16),
    Parameter(shape=(40, 33), gradient=torch.float16, working=torch.float16),
)


@dataclass(slots=True)
class ParameterList:
    """The tensors of a list, and the larger ones that they are parts of."""

    parameters: Sequence[Parameter]
    updates: list[ParameterUpdate] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    margins: list[Tensor] = field(default_factory=list)


def make_list(parameters: Sequence[Parameter] = MIXED, device: str = "cpu") -> ParameterList:
    """Normal values, with averages of zero, each tensor in a larger one that is NaN elsewhere."""
    made = ParameterList(parameters)

    def place(values: Tensor, dtype: torch.dtype, shift: int) -> Tensor:
        around = torch.full((values.numel() + shift + 64,), torch.nan, dtype=dtype, device=device)
        part = around[shift : shift + values.numel()].view(values.shape)
        part.copy_(values)
        made.margins += [around[:shift], around[shift + values.numel() :]]
        return part

    for seed, parameter in enumerate(parameters):
        start, zeros = normal(*parameter.shape, seed=seed), torch.zeros(parameter.shape)
        states = [place(values, parameter.state, parameter.shift) for values in (start, zeros, zeros)]
        working = None if parameter.working is None else place(start, parameter.working, parameter.shift)
        made.updates.append(
            ParameterUpdate(
                master=states[0], exp_avg=states[1], exp_avg_sq=states[2], working=working, group=parameter.group
            )
        )
        made.gradients.append(place(start, parameter.gradient, parameter.shift))
    return made


def gradient_of(index: int, step: int, parameter: Parameter) -> Tensor:
    """A gradient in float64, rounded to its dtype: small in some steps, so that not all of them are clipped."""
    scale = 0.02 if step % 2 == 0 else 1e-5
    return normal(*parameter.shape, seed=1000 * step + index, std=scale).to(parameter.gradient).double()


def take_steps(made: ParameterList, launch: Callable[[AdamWUpdates], None], updates: AdamWUpdates) -> list[float]:
    """Take `STEPS` steps with new gradients at the same addresses, the later half at a tenth of the learning rate.
    Return the gradient norms.
    """
    norms = []
    updates.bind(made.gradients)
    for step in range(STEPS):
        for index, (gradient, parameter) in enumerate(zip(made.gradients, made.parameters, strict=True)):
            gradient.copy_(gradient_of(index, step, parameter))
        if step == STEPS // 2:
            updates.set_hypers([hyper._replace(lr=hyper.lr / 10) for hyper in HYPERS])
        launch(updates)
        norms.append(updates.grad_norm.item())
    return norms


def take_steps_in_torch(
    parameters: Sequence[Parameter], *, clip: bool, exact: bool
) -> tuple[list[list[Tensor]], list[float]]:
    """The same with torch's optimizers: master, exp_avg and exp_avg_sq of each, and the norms. With `exact`, all in
    float64.
    """
    masters = [normal(*parameter.shape, seed=seed).to(parameter.state) for seed, parameter in enumerate(parameters)]
    masters = [(master.double() if exact else master).requires_grad_() for master in masters]
    optimizers = []
    for group, hyper in enumerate(HYPERS):
        members = [master for master, parameter in zip(masters, parameters, strict=True) if parameter.group == group]
        kind = torch.optim.AdamW if hyper.decoupled else torch.optim.Adam
        betas = (hyper.beta1, hyper.beta2)
        optimizers.append(
            kind(members, lr=hyper.lr, betas=betas, eps=hyper.eps, weight_decay=hyper.weight_decay, foreach=False)
        )
    norms = []
    for step in range(STEPS):
        for index, (master, parameter) in enumerate(zip(masters, parameters, strict=True)):
            master.grad = gradient_of(index, step, parameter).to(master.dtype)
        norm = torch.nn.utils.clip_grad_norm_(masters, MAX_NORM if clip else torch.inf)
        norms.append(norm.item())
        for optimizer, hyper in zip(optimizers, HYPERS, strict=True):
            optimizer.param_groups[0]["lr"] = hyper.lr / (10 if step >= STEPS // 2 else 1)
            optimizer.step()
    states = {id(master): optimizer.state[master] for optimizer in optimizers for master in optimizer.state}
    results = [[master.detach(), states[id(master)]["exp_avg"], states[id(master)]["exp_avg_sq"]] for master in masters]
    return results, norms


def check_list(
    launch: Callable[[AdamWUpdates], None],
    *,
    clip: bool,
    parameters: Sequence[Parameter] = MIXED,
    device: str = "cpu",
) -> None:
    """Compare all results three ways, and check that nothing else was written."""
    made = make_list(parameters, device)
    updates = AdamWUpdates(made.updates, HYPERS, max_norm=MAX_NORM if clip else None)
    norms = take_steps(made, launch, updates)
    truths, true_norms = take_steps_in_torch(parameters, clip=clip, exact=True)
    plains, _ = take_steps_in_torch(parameters, clip=clip, exact=False)
    for index, update in enumerate(made.updates):
        if update.master.numel() == 0:
            continue
        ours = (update.master, update.exp_avg, update.exp_avg_sq)
        for name, a, b, c in zip(("master", "exp_avg", "exp_avg_sq"), ours, plains[index], truths[index], strict=True):
            assert_as_accurate(a.cpu(), b, c, name=f"{name} of {parameters[index]}")
        if update.working is not None:
            assert torch.equal(update.working, update.master.to(update.working.dtype).view(update.working.shape))
    if clip:
        torch.testing.assert_close(norms, true_norms, rtol=1e-6, atol=0)
        assert max(true_norms) > MAX_NORM > min(true_norms), "both kinds of steps are needed"
    assert all(margin.isnan().all() for margin in made.margins)
    for index, (gradient, parameter) in enumerate(zip(made.gradients, parameters, strict=True)):
        assert torch.equal(gradient.cpu().double(), gradient_of(index, STEPS - 1, parameter)), "a gradient was changed"
    assert updates.steps.tolist() == [STEPS] * len(HYPERS)

"""One case in several precisions: the dtype of everything, and how far losses and gradients are from float64.

The truth is the same code on the same weights and inputs in float64. Models that explicitly widen to fp32, as many do
in their norms and losses, would reduce it to fp32 there; so while the truth runs, code that asks for a narrower float
gets float64 (`_Truth`). What stays narrow anyway is reported, not hidden.

The origin of an output is tracked at the level of PyTorch functions (`TorchFunctionMode`), where the names are those of
autocast's lists. One level lower (`TorchDispatchMode`), autocast has already been applied, and `linear` has become a
transpose and a `mm`; the names of autograd nodes have the same drawback.

Modules run in evaluation mode: two different dropout masks would bury every other difference.
"""

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from stepscope.errors import StepscopeError
from stepscope.measure.precision.accumulation import add_up, find_norm_width, measure_norm_parts
from stepscope.recording.rows.precision_report import (
    GradientError,
    Output,
    PrecisionComparison,
    PrecisionRun,
    ScaledBackward,
    Truth,
    Underflow,
)
from stepscope.spec import Case, Precision
from stepscope.step import Step, build

# Loss scales for fp16; the third is the initial value of PyTorch's scaler.
SCALES = (2.0**0, 2.0**8, 2.0**16, 2.0**20, 2.0**24)
INITIAL_SCALE = 2.0**16
# Below this share of a gradient's largest element, float64 itself has only rounding error left, where the true value is
# zero: the first token's query has none, because it attends only to itself.
DUST = 2.0**-40
_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_NARROWING: dict[str, Callable[..., Any]] = dict.fromkeys(("float", "half", "bfloat16"), Tensor.double)
# They change the layout of a tensor, not its content: the function before them is its origin.
_LAYOUTS = {
    *("view", "view_as", "reshape", "flatten", "unflatten", "transpose", "permute", "t", "movedim", "swapaxes"),
    *("contiguous", "clone", "detach", "unsqueeze", "squeeze", "expand", "repeat", "dropout"),
    *("chunk", "split", "unbind", "narrow", "select", "__getitem__", "__get__"),
}


def compare_precisions(
    case: Case, precisions: Sequence[Precision], device: torch.device, *, on_stage: Callable[[str], None]
) -> PrecisionComparison:
    """The process cannot be reused, because PyTorch's tf32 switches are global."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    truth = _find_truth(_build(case, "fp32", device, on_stage), on_stage)
    runs = []
    for precision in precisions:
        step = _build(case, precision, device, on_stage)
        on_stage(f"running in {precision}")
        runs.append(_run(step, truth))
        del step
    on_stage("summing in low precision")
    return PrecisionComparison(
        truth=Truth(loss=truth.loss, parameters=truth.parameters, narrowed=truth.narrowed),
        runs=tuple(runs),
        sums=add_up(),
        norm_parts=measure_norm_parts(truth.norm_width),
    )


def _build(case: Case, precision: Precision, device: torch.device, on_stage: Callable[[str], None]) -> Step:
    on_stage("building")
    gc.collect()  # the previous step is in a reference cycle with its watch, and two large ones would not fit
    step = build(msgspec.structs.replace(case.workload, precision=precision, mode="forward-backward"), device)
    step.module.eval()
    for module in step.module.modules():
        if isinstance(module, nn.RNNBase):  # cuDNN has no backward pass for these in evaluation mode
            module.train()
            module.dropout = 0.0
    return step


# --- What is tracked during a pass ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """The function that created a tensor, and its floating-point inputs."""

    operation: str
    input_dtypes: tuple[str, ...]


class _Origins(TorchFunctionMode):
    """While this is active, every tensor's origin is tracked for as long as the tensor lives."""

    def __init__(self) -> None:
        super().__init__()
        self._origins = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = list(_floats((args, kwargs)))
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        for tensor in _floats(result):
            unchanged = not name.endswith("_") and any(tensor is one for one in inputs)
            if not unchanged:
                self._origins[tensor] = self._origin(name, inputs)
        return result

    def find(self, tensor: Tensor) -> _Origin | None:
        origin: _Origin | None = self._origins.get(tensor)  # type: ignore[no-untyped-call]
        return origin

    def _origin(self, name: str, inputs: Sequence[Tensor]) -> _Origin:
        before = self.find(inputs[0]) if name in _LAYOUTS and inputs else None
        return before or _Origin(
            operation=name, input_dtypes=tuple(dict.fromkeys(_name(tensor.dtype) for tensor in inputs))
        )


class _Truth(TorchFunctionMode):
    """While this is active, code that asks for a narrower float gets float64."""

    def __init__(self, watch: "_Watch") -> None:
        super().__init__()
        self._watch = watch
        self.narrowed: dict[str, None] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        wide = _NARROWING.get(getattr(func, "__name__", ""), func)
        result = wide(*map(_widen_dtype, args), **{key: _widen_dtype(value) for key, value in (kwargs or {}).items()})
        # A Python number or zero-dimensional tensor promotes nothing.
        if any(tensor.dtype in _NARROW and tensor.ndim for tensor in _floats(result)):
            self.narrowed[self._watch.inside[-1] if self._watch.inside else "(loss)"] = None
        return result


def _widen_dtype(argument: Any) -> Any:
    if not isinstance(argument, torch.dtype):
        return argument
    if argument in (torch.complex32, torch.complex64):
        return torch.complex128
    return torch.float64 if argument in _NARROW else argument


@dataclass(slots=True)
class _Watch:
    """Watches one forward pass through a step and any number of backward passes after it.

    `see_gradient` receives the gradient of each module's output, with the module's name and the number of its call.
    """

    step: Step
    see_gradient: Callable[[str, int, Tensor], None]
    origins: _Origins = field(default_factory=_Origins)
    outputs: dict[str, Output] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    inside: list[str] = field(default_factory=list)
    logits: Output | None = None
    inputs: tuple[float, ...] = ()

    def forward(self, mode: TorchFunctionMode, *, wide: bool = False) -> tuple[Tensor, Output]:
        """Return the loss with its graph. `wide` casts the module's floating-point inputs to float64."""
        handles = [
            handle
            for name, module in self.step.module.named_modules()
            if name
            for handle in (
                module.register_forward_pre_hook(partial(self._enter, name)),
                module.register_forward_hook(partial(self._leave, name)),
            )
        ]
        found: list[Tensor] = []
        kind = f"{self.step.measure_loss.__module__}.{self.step.measure_loss.__qualname__}"
        self.step.run_module = partial(self._call_module, self.step.run_module, wide=wide)
        self.step.measure_loss = partial(self._measure_loss, self.step.measure_loss, found)
        torch.manual_seed(self.step.workload.seed)
        with mode:
            self.step.phases[0][1]()
        for handle in handles:
            handle.remove()
        return found[0], self._describe("loss", kind, found[0])

    def finished_outputs(self) -> tuple[Output, ...]:
        return tuple(msgspec.structs.replace(output, calls=self.calls[name]) for name, output in self.outputs.items())

    def _call_module(self, run: Callable[..., object], *args: Any, wide: bool, **kwargs: Any) -> object:
        self.inputs = _fingerprint(_tensors((args, kwargs)))
        return run(*_widen(args), **_widen(kwargs)) if wide else run(*args, **kwargs)

    def _measure_loss(
        self, measure: Callable[[object, Any], Tensor], found: list[Tensor], output: object, batch: Any
    ) -> Tensor:
        logits = next(_floats(getattr(output, "logits", output)), None)
        if logits is not None and logits.ndim:
            kind = type(self.step.module)
            self.logits = self._describe("logits", f"{kind.__module__}.{kind.__qualname__}", logits)
        found.append(measure(output, batch))
        return found[0]

    def _enter(self, name: str, _module: nn.Module, _args: object) -> None:
        self.inside.append(name)

    def _leave(self, name: str, module: nn.Module, _args: object, result: object) -> None:
        self.inside.pop()
        output = next(_floats(result), None)
        if output is None:
            return
        call = self.calls[name]
        self.calls[name] += 1
        if name not in self.outputs:
            self.outputs[name] = self._describe(name, f"{type(module).__module__}.{type(module).__qualname__}", output)
        if output.requires_grad:
            output.register_hook(partial(self._see_gradient, name, call))  # type: ignore[no-untyped-call]

    def _see_gradient(self, name: str, call: int, gradient: Tensor) -> None:
        self.outputs[name] = msgspec.structs.replace(self.outputs[name], gradient_dtype=_name(gradient.dtype))
        self.see_gradient(name, call, gradient)

    def _describe(self, name: str, kind: str, tensor: Tensor) -> Output:
        origin = self.origins.find(tensor)
        return Output(
            name=name,
            kind=kind,
            dtype=_name(tensor.dtype),
            operation=origin.operation if origin else None,
            input_dtypes=origin.input_dtypes if origin else (),
        )


# --- The truth ------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _TrueStep:
    """The float64 results. Gradients of outputs are kept only where they are nonzero: they are as large as all
    activations together.
    """

    loss: float
    parameters: int
    gradients: dict[str, Tensor]
    nonzero: dict[tuple[str, int], Tensor]
    weights: tuple[float, ...]
    inputs: tuple[float, ...]
    narrowed: tuple[str, ...]
    norm_width: int


def _find_truth(step: Step, on_stage: Callable[[str], None]) -> _TrueStep:
    on_stage("running in float64")
    step.module.double()
    nonzero: dict[tuple[str, int], Tensor] = {}

    def see(name: str, call: int, gradient: Tensor) -> None:
        nonzero[name, call] = _is_there(gradient)

    watch = _Watch(step, see)
    mode = _Truth(watch)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        loss, _ = watch.forward(mode, wide=True)
        loss.backward()  # type: ignore[no-untyped-call]
    finally:
        torch.set_default_dtype(default)
    gradients = {name: p.grad.detach() for name, p in step.module.named_parameters() if p.grad is not None}
    if not gradients or not bool(loss.isfinite()):
        raise StepscopeError(
            "nothing to compare with: "
            + ("no parameter has a gradient" if not gradients else f"the loss in float64 is {loss.item()}"),
            hint="stepscope precision --model stepscope.step.toy:build",
        )
    return _TrueStep(
        loss=loss.item(),
        parameters=step.parameters,
        gradients=gradients,
        nonzero=nonzero,
        weights=_fingerprint(step.module.parameters()),
        inputs=watch.inputs,
        narrowed=tuple(mode.narrowed),
        norm_width=find_norm_width(step.module),
    )


# --- A precision ----------------------------------------------------------------------------------------------------


def _run(step: Step, truth: _TrueStep) -> PrecisionRun:
    precision = step.workload.precision
    counts: dict[str, Counter[str]] = {}
    watch = _Watch(step, partial(_count_output, counts, truth))
    loss, described = watch.forward(watch.origins)
    _check_same(step, watch, truth)
    scales = SCALES if precision == "fp16" else (1.0,)
    backwards, errors = [], {}
    for scale in scales:
        counts.clear()
        step.module.zero_grad(set_to_none=True)
        # As in PyTorch's scaler: the scale is fp32, and the gradient of an fp16 loss is not.
        (loss * torch.tensor(scale, device=loss.device)).backward(retain_graph=scale != scales[-1])  # type: ignore[no-untyped-call]
        errors[scale] = _measure_gradients(step, truth, scale, counts)
        backwards.append(_describe_backward(scale, errors[scale], counts))
    chosen = _choose_scale(backwards)
    whole, modules = errors[chosen]
    value = loss.item()
    return PrecisionRun(
        precision=precision,
        parameter_dtypes=_dtypes(step.module.parameters()),
        gradient_dtypes=_dtypes(p.grad for p in step.module.parameters() if p.grad is not None),
        outputs=watch.finished_outputs(),
        logits=watch.logits,
        loss=described,
        loss_value=_finite(value),
        loss_error=_finite(abs(value - truth.loss) / abs(truth.loss)) if truth.loss else None,
        loss_scale=chosen,
        gradient_error=whole.relative,
        gradient_one_minus_cosine=whole.one_minus_cosine,
        gradients=modules,
        backwards=tuple(backwards),
    )


def _choose_scale(backwards: Sequence[ScaledBackward]) -> float:
    """Return the scale at which PyTorch's scaler settles from its initial value: the largest without an infinite
    gradient.
    """
    fitting = [one.scale for one in backwards if one.scale <= INITIAL_SCALE and not one.total.parameters_not_finite]
    return max(fitting, default=backwards[0].scale)


def _describe_backward(
    scale: float, errors: tuple[GradientError, tuple[GradientError, ...]], counts: Mapping[str, Counter[str]]
) -> ScaledBackward:
    return ScaledBackward(
        scale=scale,
        gradient_error=errors[0].relative,
        modules=tuple(Underflow(module=name, **found) for name, found in sorted(counts.items())),
    )


def _count_output(counts: dict[str, Counter[str]], truth: _TrueStep, name: str, call: int, gradient: Tensor) -> None:
    """A gradient that float64 did not have, from a branch taken differently, has no counterpart and is not counted."""
    nonzero = truth.nonzero.get((name, call))
    if nonzero is not None and nonzero.shape == gradient.shape:
        counts.setdefault(name, Counter()).update(_count("outputs", gradient, nonzero))


def _count(what: str, gradient: Tensor, nonzero: Tensor) -> dict[str, int]:
    return {
        what: int(nonzero.sum()),
        f"{what}_zero": int(((gradient == 0) & nonzero).sum()),
        f"{what}_not_finite": int((~gradient.isfinite()).sum()),
    }


def _is_there(gradient: Tensor) -> Tensor:
    size = gradient.abs()
    return size > DUST * size.max() if size.numel() else size > 0


def _measure_gradients(
    step: Step, truth: _TrueStep, scale: float, counts: dict[str, Counter[str]]
) -> tuple[GradientError, tuple[GradientError, ...]]:
    """For all gradients together and for each module's own parameters. Underflows are counted on the way."""
    sums: dict[str, list[float]] = {}
    for name, parameter in step.module.named_parameters():
        if name not in truth.gradients or parameter.grad is None:
            continue
        true, found = truth.gradients[name], parameter.grad.detach().double() / scale
        module = name.rpartition(".")[0] or "(model)"
        counts.setdefault(module, Counter()).update(_count("parameters", found, _is_there(true)))
        new = [(found - true).square().sum(), true.square().sum(), found.square().sum(), (found * true).sum()]
        old = sums.setdefault(module, [0.0] * len(new))
        sums[module] = [before + more.item() for before, more in zip(old, new, strict=True)]
    whole = [sum(column) for column in zip(*sums.values(), strict=True)]
    # A module whose true gradient is zero has no relative error.
    return _judge("", whole), tuple(_judge(module, values) for module, values in sums.items() if values[1])


def _judge(module: str, sums: Sequence[float]) -> GradientError:
    difference, true, found, product = sums
    norms = math.sqrt(true) * math.sqrt(found) if math.isfinite(found) else math.nan
    return GradientError(
        module=module,
        relative=_finite(math.sqrt(difference / true)) if true and math.isfinite(difference) else None,
        one_minus_cosine=_finite(1 - product / norms) if norms else None,
    )


def _check_same(step: Step, watch: _Watch, truth: _TrueStep) -> None:
    """A factory may draw from a generator that the seed does not reach; its error would be the largest of all."""
    other = "weights" if _fingerprint(step.module.parameters()) != truth.weights else ""
    if other or watch.inputs != truth.inputs:
        raise StepscopeError(
            f"`{step.workload.model.name}` is not reproducible: building it again gave different {other or 'inputs'}",
            detail="all precisions must run on the same weights and inputs, created from torch's seed",
            hint="create them with torch, or seed your own generator in the factory (it may take `seed`)",
        )


# --- Tensors in containers ------------------------------------------------------------------------------------------


def _tensors(value: object) -> Iterator[Tensor]:
    match value:
        case Tensor():
            yield value
        case Mapping():
            for item in value.values():
                yield from _tensors(item)
        case tuple() | list():
            for item in value:
                yield from _tensors(item)


def _floats(value: object) -> Iterator[Tensor]:
    return (tensor for tensor in _tensors(value) if tensor.dtype.is_floating_point)


def _widen(value: Any) -> Any:
    match value:
        case Tensor():
            return value.double() if value.dtype.is_floating_point else value
        case dict():
            return {key: _widen(item) for key, item in value.items()}
        case tuple() | list():
            return type(value)(map(_widen, value))
        case _:
            return value


def _fingerprint(tensors: Iterator[Tensor]) -> tuple[float, ...]:
    with torch.no_grad():
        return tuple(
            number.item() for tensor in tensors for number in (tensor.double().sum(), tensor.double().square().sum())
        )


def _dtypes(tensors: Iterator[Tensor]) -> tuple[str, ...]:
    return tuple(sorted({_name(tensor.dtype) for tensor in tensors}))


def _name(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

"""`build(workload)` returns a runnable step of any model: the built-in one, the user's own, or one from `transformers`.

A step is a sequence of named phases. A plain loop, the timer and the profiler all run the same phases, so no
measurement has its own training loop.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.fast.capture import CannotCapture, Phase
from stepscope.fast.program import Program
from stepscope.fast.tracing import compile_code
from stepscope.kernels import OneLaunchAdamW
from stepscope.nn import AdamW
from stepscope.recording.rows.bench import ConfigSizes, Doubt
from stepscope.spec import OWN_OPTIMIZER, Factory, HuggingFace, ModelShape, Optimizer, Workload
from stepscope.step.builtin import build_builtin
from stepscope.step.checkpointing import checkpoint_blocks
from stepscope.step.hf import build_hf
from stepscope.step.own import Parts, build_own
from stepscope.step.whole_step import build_program

# Small enough that weights do not diverge on random tokens within a few hundred steps.
LEARNING_RATE = 1e-4


class Step:
    """One step of a workload, phase by phase.

    Between phases it holds the loss, and with it the graph until `backward` has run. Leftovers of a mode (the graph in
    `forward`, gradients in `forward-backward`) are dropped at the start of the next step, so that two never exist at
    once. With gradient accumulation, forward and backward run once per micro-batch. Each loss is divided by the number
    of micro-batches, so the gradients are those of the whole batch.

    Some settings need a `program` that has the phases in place of the step's own. `remarks` say which settings it could
    not follow, and why.
    """

    def __init__(self, workload: Workload, parts: Parts, device: torch.device) -> None:
        self.workload = workload
        self.device = device
        self.module = parts.module.train(workload.mode != "inference")
        self._call, self.inputs = parts.call, parts.inputs
        # These are attributes so that `step.annotation` can wrap them while a recorder runs.
        self.measure_loss = parts.loss
        self.run_module: Callable[..., object] = self.module
        if workload.compile and not workload.is_program:
            self.run_module = compile_code(self.module)
        self._loss: Tensor | None = None
        self._scaler = torch.amp.GradScaler(device.type, enabled=workload.precision == "fp16")
        self._optimizer: torch.optim.Optimizer | None = None
        self.optimizer_name: str | None = None  # the setting, or the class if a factory returned an optimizer
        if workload.mode == "train" and parts.optimizer is not None:
            self._optimizer, self.optimizer_name = parts.optimizer, type(parts.optimizer).__name__
        elif workload.mode == "train":
            self._optimizer = build_optimizer(workload, self.module)
            self.optimizer_name = workload.optimizer or OWN_OPTIMIZER
        self.has_samples, self.has_tokens = parts.has_samples, parts.has_tokens
        # Loss scaling checks the gradients on the CPU before the optimizer runs.
        self.waits_inside = workload.precision == "fp16" and workload.mode == "train"
        self.program: Program | None = None
        self.remarks: list[Doubt] = []
        self.is_captured = False
        if workload.is_program:
            self.program, self.remarks = self._build_program(parts)
        self.phases: tuple[Phase, ...] = self._choose_phases()

    def capture(self) -> None:
        """Replace the phases by CUDA graphs of them; if that is impossible, a remark says why."""
        assert self.program is not None, "only a program can be captured"
        if self.device.type != "cuda":
            self.remarks.append(Doubt(code="uncaptured", text="not captured: CUDA graphs need a GPU"))
            return
        try:
            self.program.capture()
            self.is_captured = True
        except CannotCapture as error:
            self.remarks.append(Doubt(code="uncaptured", text=f"not captured: {error}"))
        self.phases = self.program.phases

    def release(self) -> None:
        """Run without the CUDA graphs from now on."""
        assert self.program is not None, "only a program can be captured"
        self.phases = ()  # they hold the graphs
        self.program.release()
        self.phases, self.is_captured = self.program.phases, False

    def run(self) -> None:
        for _, phase in self.phases:
            phase()

    @property
    def hides_modules(self) -> bool:
        """Whether a recorder cannot see modules, because none is called."""
        return self.workload.is_traced or self.is_captured

    @property
    def parameters(self) -> int:
        """The number of parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def sizes(self) -> ConfigSizes:
        """What the config of the module says, which `transformers` models and many others carry."""
        config = getattr(self.module, "config", None)
        found = [getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size")]
        layers, width = (size if isinstance(size, int) and size > 0 else None for size in found)
        return ConfigSizes(num_layers=layers, d_model=width)

    @property
    def loss_scale(self) -> float:
        """The fp16 loss scale. It is halved whenever a gradient is infinite and the update is skipped."""
        return float(self._scaler.get_scale())

    @property
    def loss(self) -> Tensor | None:
        """The loss of the last forward pass, with its graph until `backward` has run."""
        if self.program is not None:
            return self.program.losses[-1] if self.program.losses else None
        return self._loss

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the optimizer state, each with the parameter's name and its own."""
        if self._optimizer is None:
            return
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.module.named_parameters()}
        for parameter, state in self._optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield f"{names.get(parameter, '(not in the module)')}.{key}", value

    def working_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The low-precision copies of parameters that forward reads instead, each with the parameter's name."""
        if self.program is None:
            return
        weights = self.program.weights
        for parameter, name in weights.names.items():
            copy = weights.copy_of(parameter)
            if copy is not None:
                yield name, copy

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients that backward left, each with the parameter's name."""
        for name, parameter in self.module.named_parameters():
            gradient = parameter.grad if self.program is None else self.program.weights.gradient_of(parameter)
            if gradient is not None:
                yield name, gradient

    def loss_is_finite(self) -> bool:
        """Whether the loss of the last forward pass is finite; True if there is none."""
        return self.loss is None or bool(self.loss.detach().isfinite().all())

    def forward_without_graph(self) -> object:
        """Run the forward passes of a step without compilation, to count operations. Returns the outputs of the last
        one."""
        with torch.no_grad(), self._autocast():
            return [self._call(self.module, batch) for batch in self.inputs][-1]

    def _build_program(self, parts: Parts) -> tuple[Program, list[Doubt]]:
        assert self._optimizer is not None, "a program trains"
        call, measure, module = parts.call, parts.loss, self.module

        def loss_of(batch: Any) -> Tensor:
            return measure(call(module, batch), batch)

        def annotated_loss_of(batch: Any) -> Tensor:
            return self.measure_loss(call(module, batch), batch)

        loss = loss_of if self.workload.is_traced else annotated_loss_of
        return build_program(self.workload, module, loss, parts.inputs, self._optimizer, self.device)

    def _choose_phases(self) -> tuple[Phase, ...]:
        if self.program is not None:
            return self.program.phases
        passes: list[tuple[Phase, ...]] = [
            (("forward", partial(self._forward, batch)), ("backward", self._backward)) for batch in self.inputs
        ]
        match self.workload.mode:
            case "inference":
                return (("forward", partial(self._infer, self.inputs[0])),)
            case "forward":
                return passes[0][:1]
            case "forward-backward":
                return passes[0]
            case "train":
                return (*itertools.chain.from_iterable(passes), ("optimizer", self._update))

    def _infer(self, batch: object) -> None:
        with torch.no_grad(), self._autocast():
            self._call(self.run_module, batch)

    def _forward(self, batch: object) -> None:
        self._loss = None
        if self.workload.mode == "forward-backward":
            self.module.zero_grad(set_to_none=True)
        with self._autocast():
            self._loss = self.measure_loss(self._call(self.run_module, batch), batch)

    def _backward(self) -> None:
        assert self._loss is not None, "backward runs after forward"
        loss = self._loss / self.workload.passes if self.workload.passes > 1 else self._loss
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def _update(self) -> None:
        assert self._optimizer is not None, "only mode `train` updates"
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)

    def _autocast(self) -> AbstractContextManager[object]:
        match self.workload.precision:
            case "fp32" | "tf32":
                return nullcontext()
            case "bf16":
                return torch.autocast(self.device.type, dtype=torch.bfloat16)
            case "fp16":
                return torch.autocast(self.device.type, dtype=torch.float16)


def build(workload: Workload, device: torch.device, *, captures: bool = True) -> Step:
    """Build a step. Weights and batch are created on `device`, so a 2.7B model never passes through CPU memory. Without
    `captures`, a step with CUDA graphs runs without them."""
    parts = build_parts(workload, device)
    if workload.checkpointing is not None:
        every, nested = workload.checkpointing
        checkpoint_blocks(parts.module, every=every, nested=nested)
    step = Step(workload, parts, device)
    if workload.graph and captures:
        step.capture()
    return step


def build_parts(workload: Workload, device: torch.device) -> Parts:
    """The parts of a step, on `device`. The same seed gives the same weights and inputs."""
    set_float32_arithmetic(tf32=workload.precision == "tf32")
    torch.manual_seed(workload.seed)
    with device:
        parts = _build_model(workload, device)
    parts.module.to(device)
    return parts


def _build_model(workload: Workload, device: torch.device) -> Parts:
    match workload.model:
        case ModelShape() as shape:
            return build_builtin(workload, shape)
        case Factory() as factory:
            return build_own(workload, factory, device)
        case HuggingFace() as config:
            return build_hf(workload, config)


def set_float32_arithmetic(*, tf32: bool) -> None:
    """Turn tf32 on or off everywhere. By default, PyTorch leaves it on for cuDNN convolutions."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


def build_optimizer(workload: Workload, module: nn.Module) -> torch.optim.Optimizer:
    make, options = optimizer_of(workload)
    return make(list(module.parameters()), **{"lr": LEARNING_RATE, **options})


def optimizer_of(workload: Workload) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The optimizer class of a workload, and its arguments except the learning rate. A program updates the state of
    PyTorch's AdamW in one launch."""
    choices: dict[Optimizer, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "adamw": (AdamW, {}),
        "adamw-torch": (torch.optim.AdamW, {}),
        "adamw-fused": (torch.optim.AdamW, {"fused": True}),
        "adamw-onelaunch": (torch.optim.AdamW if workload.is_program else OneLaunchAdamW, {}),
        "sgd": (torch.optim.SGD, {}),
    }
    return choices[workload.optimizer or OWN_OPTIMIZER]

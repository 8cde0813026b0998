"""`python -m tests.cpu.planner.simulated NAME...`: simulations in a process of their own, as one line of JSON each.

Fake CUDA stays enabled until a process ends, so no test enables it in its own.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch
import triton
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from stepscope import hardware
from stepscope.cost.sharding import SHARDINGS
from stepscope.errors import StepscopeError
from stepscope.fast import tracing
from stepscope.planner.assumptions import accelerator_of
from stepscope.planner.ranks import RankMemory
from stepscope.planner.replayed_memory import ReplayedMemory
from stepscope.planner.simulation import Operation, Simulation, _Run, _simulate, simulate_callable, simulate_workload
from stepscope.planner.stand_in import compiler
from stepscope.planner.stand_in.compiler import CannotCompile
from stepscope.planner.step_time.kernels_of import KernelModel
from stepscope.planner.step_time.measured_times import MeasuredTimes
from stepscope.spec import SIZES, HuggingFace, Workload
from tests.cpu.planner.calibrations import make_calibration

SMALL = SIZES["small"]
CARD = hardware.find("NVIDIA H200")
assert CARD is not None
H200 = accelerator_of(CARD)
LLAMA = HuggingFace(
    config="llama",
    arguments=(
        ("hidden_size", 64),
        ("intermediate_size", 96),
        ("num_hidden_layers", 2),
        ("num_attention_heads", 4),
        ("num_key_value_heads", 2),
        ("vocab_size", 500),
    ),
)


class Answer(msgspec.Struct):
    """What a simulation said, or the error that it raised."""

    memory: ReplayedMemory | None = None
    operations: list[Operation] = []
    assumptions: list[str] = []
    parameters: int = 0
    launched: tuple[str, ...] = ()
    steps: int = 0
    fitting: list[bool] = []  # into half of the least, and into a byte more than the most reserved bytes
    ranks: dict[str, int] = {}  # peaks of eight ranks by sharding
    error: str = ""


def _workload(steps: int = 15, **settings: object) -> Callable[[], Simulation]:
    workload = Workload(**{"model": SMALL, **settings})  # type: ignore[arg-type]
    return lambda: simulate_workload(workload, H200, steps=steps)


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * 2 if y.sum() > 0 else y


class _Masked(_Branching):
    """Asks about a mask, whose values follow from the program."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[0], device=x.device)
        y: Tensor = self.linear(x)
        return y if torch.all(mask == 1) else y[mask.bool()]


def _train(
    model: Callable[[], nn.Module],
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    release: tuple[int, int] = H200.torch,
) -> Callable[[], Simulation]:
    def build() -> Callable[[], None]:
        module, x = model(), torch.randn(8, 64)
        optimizer = make(module.parameters())

        def step() -> None:
            module(x).sum().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return lambda: simulate_callable(build, msgspec.structs.replace(H200, torch=release))


def _on_cpu() -> nn.Module:
    with torch.device("cpu"):
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    return model.to("cuda").to(torch.bfloat16).float()


class _Attention(nn.Module):
    """Grouped heads, which PyTorch's kernels take in half precision only."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x).to(self.dtype).view(1, 4, 8, 16)
        mask = torch.ones(8, 8, dtype=torch.bool, device=x.device).tril()
        attend = functional.scaled_dot_product_attention
        return attend(heads, heads[:, :2], heads[:, :2], mask, enable_gqa=True).float()


class _Experts(nn.Module):
    """Four experts, whose products are one call. Which rows are whose is unknown."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, 32, 64, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        last = torch.cumsum(torch.histc(x[:, 0].argsort().int(), bins=4, min=0, max=3), 0, dtype=torch.int32)
        groups: Tensor = torch._grouped_mm(x.to(self.weights.dtype), self.weights.transpose(-2, -1), offs=last)
        return 2.0 * groups.float()


class _Calls(nn.Module):
    """Calls a function in its forward pass."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


class _Recomputed(_Branching):
    """A product with a bias, before a checkpoint and in it."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.linear(y).exp(), self.linear(x), use_reentrant=False)  # type: ignore[no-any-return]


def _recompute(x: Tensor) -> Tensor:
    """A list as an index, which PyTorch copies to the GPU, in a forward pass that autograd's thread repeats."""
    return checkpoint(lambda y: (y * y)[..., [-1]], x, use_reentrant=False)  # type: ignore[no-any-return]


def _branch(x: Tensor) -> Tensor:
    """Three branches, whose gradients autograd adds up."""
    return x.neg().add_(x * 2).add_(x * 3)


def _checkpoint(x: Tensor) -> Tensor:
    return checkpoint(_branch, x, use_reentrant=True)  # type: ignore[no-any-return]


def _repeat_row(x: Tensor) -> Tensor:
    return x[torch.zeros(2, dtype=torch.int64, device=x.device)]


def _attend_unfused(x: Tensor) -> Tensor:
    heads = x[0, : 1 << 18].detach().view(1, 16, 1024, 16)
    with sdpa_kernel(SDPBackend.MATH):
        return x * functional.scaled_dot_product_attention(heads, heads, heads).sum()


class _OfParameter(nn.Module):
    """A function of a parameter."""

    def __init__(self, function: Callable[[Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(shape))
        self.function = function

    def forward(self) -> Tensor:
        return self.function(self.x)


def train_function(function: Callable[[Tensor], Tensor]) -> Callable[[], Callable[[], None]]:
    """A program for a CPU or a simulated GPU: it trains a function of a parameter of 16 MiB."""

    def build() -> Callable[[], None]:
        model = _OfParameter(function, 4, 1 << 20)

        def step() -> None:
            model().sum().backward()
            model.zero_grad()

        return step

    return build


@triton.jit  # type: ignore[untyped-decorator]
def double(x, y, count, BLOCK: triton.language.constexpr):  # type: ignore[no-untyped-def]
    place = triton.language.arange(0, BLOCK)
    value = triton.language.load(x + place, mask=place < count)
    triton.language.store(y + place, 2 * value, mask=place < count)


def _launch(x: Tensor) -> Tensor:
    double[(1,)](x, torch.empty_like(x), x.numel(), BLOCK=512)
    return x


def _use_stream(x: Tensor) -> Tensor:
    torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return x


class _ExitsOnInfinity(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        gradients = [one.grad for group in self.param_groups for one in group["params"]]
        assert not any(one.isinf().any() for one in gradients), "an unknown condition must not stop a step"
        return super().step(closure)


def _compile(function: Callable[[Tensor], Tensor], times: KernelModel | None = None) -> Callable[[], Simulation]:
    """A compiled function of parameters of a MiB, forward and backward."""

    def prepare(run: _Run) -> Callable[[], None]:
        with torch.device("cuda"):
            model = _OfParameter(function, 1 << 18)
        run.places.add_model(model)
        compiled = tracing.compile_code(model)
        return lambda: compiled().sum().backward()

    chosen = partial(compiler.pretended_compiler, times=times)
    return lambda: _simulate(prepare, H200, 2, is_traced=True, compiler=chosen)


def _chain(x: Tensor) -> Tensor:
    for _ in range(8):
        x = x.sin() * 2
    return x


def _multiply(rows: int, columns: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x[: 256 * rows].view(rows, 256) @ x[: 256 * columns].view(256, columns)


def _break_graph(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x.sin()


def _without_compiler() -> Simulation:
    newest, compiler.NEWEST = compiler.NEWEST, (2, 10)
    try:
        return _workload(model=LLAMA, precision="bf16", context=48, steps=2, compile=True)()
    finally:
        compiler.NEWEST = newest


REFUSED: dict[str, Callable[[], Simulation]] = {
    "recurrent": _train(lambda: _Calls(lambda x: nn.LSTM(64, 64).to(x.device)(x)[0])),
    "second stream": _train(lambda: _Calls(_use_stream)),
    "second device": _train(lambda: _Calls(lambda x: x.to("cuda:1"))),
    "sparse": _train(lambda: _Calls(lambda x: x.to_sparse().to_dense())),
    "numpy": _train(lambda: _Calls(lambda x: x * float(x.detach().cpu().numpy()[0, 0]))),
    "distinct elements": _train(lambda: _Calls(lambda x: x * torch.unique(x > 0).sum())),
    "higher order": _train(lambda: _Calls(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))),
    "no fake": _train(lambda: _Calls(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize())),
    "condition in an optimizer": _train(lambda: _Calls(torch.relu), _ExitsOnInfinity),
}
PROGRAMS = {
    "reentrant-checkpoint": train_function(_checkpoint),
    "repeated-row": train_function(_repeat_row),
    "unfused-attention": train_function(_attend_unfused),
}
RUNS: dict[str, Callable[[], Simulation]] = {
    **{name: partial(simulate_callable, build, H200) for name, build in PROGRAMS.items()},
    "fp32": _workload(steps=3),
    "bf16": _workload(precision="bf16", context=256, steps=5),
    "fused": _workload(precision="bf16", context=1024, attention="sdpa", optimizer="adamw-fused", steps=3),
    "inference": _workload(steps=2, mode="inference"),
    "checkpointed": _workload(steps=4, precision="bf16", context=512, checkpoint="block"),
    "nano": _workload(model=SIZES["nano"], optimizer="adamw-torch", steps=3),
    "micro-batches": _workload(model=SIZES["nano"], optimizer="adamw-torch", grad_accumulation=2, steps=3),
    "fp16": _workload(model=SIZES["nano"], precision="fp16", optimizer="adamw-onelaunch", steps=3),
    "sgd": _workload(model=SIZES["nano"], optimizer="sgd", steps=3),
    "graphed": _workload(model=SIZES["nano"], graph=True, optimizer="sgd", steps=3),
    "llama": _workload(model=LLAMA, precision="bf16", context=48, steps=2),
    "llama-compiled": _workload(model=LLAMA, precision="bf16", context=48, steps=2, compile=True),
    "llama-fast": _workload(
        model=LLAMA,
        precision="bf16",
        context=48,
        steps=3,
        optimizer="adamw-onelaunch",
        **dict.fromkeys(("compile", "fuse", "merge", "working_weights", "graph"), True),
    ),
    "chain-compiled": _compile(_chain),
    "odd-product": _compile(_multiply(1024, 1001)),
    "timed-odd-product": _compile(_multiply(1024, 1001), KernelModel(MeasuredTimes(make_calibration()))),
    "even-product": _compile(_multiply(1024, 1000)),
    "thin-odd-product": _compile(_multiply(4, 1001)),
    "thin-even-product": _compile(_multiply(4, 1000)),
    "graph-break": _compile(_break_graph),
    "unknown-compiler": _without_compiler,
    "branching": _train(_Branching),
    "masked": _train(_Masked),
    "on-cpu": _train(_on_cpu),
    "adafactor": _train(_on_cpu, torch.optim.Adafactor),
    "grouped-bf16": _train(lambda: _Attention(torch.bfloat16)),
    "grouped-fp32": _train(lambda: _Attention(torch.float32)),
    "biases-2.11": _train(_Recomputed, release=(2, 11)),
    "biases-2.12": _train(_Recomputed, release=(2, 12)),
    "experts-bf16": _train(lambda: _Experts(torch.bfloat16)),
    "experts-fp32": _train(lambda: _Experts(torch.float32)),
    "recomputed-index": _train(lambda: _Calls(_recompute)),
    "fused-sgd": _train(_on_cpu, partial(torch.optim.SGD, momentum=0.9, fused=True)),
    "compiled": _train(lambda: _Calls(torch.compile(torch.sin))),
    "convolution": _train(lambda: _Calls(lambda x: functional.conv1d(x, torch.ones(8, 8, 1, device=x.device)))),
    "triton": _train(lambda: _Calls(_launch)),
    **REFUSED,
}


def answer(run: Callable[[], Simulation]) -> Answer:
    try:
        simulation = run()
    except (StepscopeError, CannotCompile) as error:
        return Answer(error=str(error))
    low, high = simulation.memory.reserved_bytes
    return Answer(
        memory=simulation.memory,
        operations=simulation.operations,
        assumptions=simulation.assumptions,
        parameters=simulation.parameters,
        launched=simulation.launched,
        steps=simulation.steps,
        fitting=[simulation.fits(size + H200.context_bytes) for size in (low // 2, high + 1)],
        ranks={one: RankMemory(simulation, ranks=8, sharding=one).memory.peak_allocated_bytes for one in SHARDINGS},
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        sys.stdout.write(msgspec.json.encode(answer(RUNS[name])).decode() + "\n")

"""The time that the host needs: per call of an operator, and for whole steps of models so small that only it counts.

Calls on their own give the cost of each operator. They are faster than in a model, where Python runs other code between
them, so small models of several kinds are timed as well, with the number of calls of each operator.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.errors import StepscopeError
from stepscope.measure.timing import settle_heap, time_steps
from stepscope.recording.rows.calibration import HostCost, HostTrial, HostVariant
from stepscope.spec import HuggingFace, ModelShape, Optimizer, Precision, Workload
from stepscope.step import Step, build

_CALLS, _ROUNDS = 200, 5
_CHAIN = 60  # operations in a graph whose backward pass is timed
_STEPS = 15
_Unary = Callable[[Tensor], Tensor]


# --- Operators --------------------------------------------------------------------------------------------------------


def measure_host_costs(device: torch.device) -> Iterator[HostCost]:
    """Yield the CPU time of operators. Tensors are so small that their kernels are shorter than a launch."""
    for name, operator in _operators(device).items():
        x = torch.rand(4, 8, 64, device=device)
        yield _cost(name, "plain", _time_host(partial(operator, x), device))
        tracked = x.clone().requires_grad_()
        yield _cost(name, "grad", _time_host(partial(operator, tracked), device))
        yield _cost(name, "backward", _time_backward(operator, tracked, device))
    x = torch.rand(4, 8, 64, device=device)
    linear, empty = nn.Linear(64, 64, device=device), nn.Identity()
    yield _cost("module call", "plain", _time_host(lambda: empty(x), device))
    yield _cost("nn.Linear", "grad", _time_host(lambda: linear(x), device))
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        yield _cost("autocast nn.Linear", "grad", _time_host(lambda: linear(x), device))
    with torch.autocast(device.type, torch.bfloat16):
        yield _cost("autocast cached nn.Linear", "grad", _time_host(lambda: linear(x), device))
    yield _cost("empty", "plain", _time_host(lambda: torch.empty(64, device=device), device))


def _operators(device: torch.device) -> dict[str, _Unary]:
    weight, row = torch.rand(64, 64, device=device), torch.rand(64, device=device)
    ids = torch.randint(8, (4, 8), device=device)
    return {
        "add": lambda x: x + x,
        "mul_scalar": lambda x: x * 0.5,
        "mul_row": lambda x: x * row,
        "pow": lambda x: x.pow(2),
        "mean": lambda x: x - x.mean(-1, keepdim=True),
        "silu": functional.silu,
        "softmax": lambda x: torch.softmax(x, -1),
        "layer_norm": lambda x: functional.layer_norm(x, (64,), row, row),
        "linear": lambda x: functional.linear(x, weight),
        "linear_bias": lambda x: functional.linear(x, weight, row),
        "matmul": lambda x: x @ weight.T,
        "bmm": lambda x: torch.bmm(x, x.transpose(1, 2)) @ x,
        "view": lambda x: x.view(-1, 64).view(4, 8, 64),
        "transpose": lambda x: x.transpose(1, 2).transpose(1, 2),
        "contiguous": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "slice": lambda x: x[..., :64],
        "cat": lambda x: torch.cat((x[..., 32:], x[..., :32]), -1),
        "cast": lambda x: x.bfloat16().float(),
        "dropout": lambda x: functional.dropout(x, 0.1),
        "embedding": lambda x: functional.embedding(ids, x.view(-1, 64)),
        "sdpa": _attend,
    }


def _attend(x: Tensor) -> Tensor:
    q = x.view(4, 8, 1, 64).transpose(1, 2)
    return functional.scaled_dot_product_attention(q, q, q, is_causal=True).view(4, 8, 64)


def _cost(operation: str, variant: HostVariant, ns: float) -> HostCost:
    return HostCost(operation=operation, variant=variant, ns=round(ns, 1))


def _time_host(call: Callable[[], object], device: torch.device) -> float:
    """Return the fastest mean of several rounds: other processes only slow a round down."""
    call()
    rounds = []
    for _ in range(_ROUNDS):
        _wait(device)
        start_ns = time.perf_counter_ns()
        for _ in range(_CALLS):
            call()
        rounds.append((time.perf_counter_ns() - start_ns) / _CALLS)
    _wait(device)
    return min(rounds)


def _time_backward(operator: _Unary, x: Tensor, device: torch.device) -> float:
    rounds = []
    for _ in range(_ROUNDS):
        out = x
        for _ in range(_CHAIN):
            out = operator(out)
        gradient = torch.ones_like(out)
        _wait(device)
        start_ns = time.perf_counter_ns()
        torch.autograd.backward(out, gradient)
        rounds.append((time.perf_counter_ns() - start_ns) / _CHAIN)
        x.grad = None
    _wait(device)
    return min(rounds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- Whole steps ------------------------------------------------------------------------------------------------------

_WIDTH, _LAYERS, _HEADS, _VOCAB = 128, 6, 4, 1000
# The names that configs of `transformers` have for the same sizes; each model takes those it knows.
_CONFIG = {
    "hidden_size": _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": 2,
    "head_dim": _WIDTH // _HEADS,
    "intermediate_size": 4 * _WIDTH,
    "vocab_size": _VOCAB,
    "n_embd": _WIDTH,
    "n_layer": _LAYERS,
    "n_head": _HEADS,
    "ffn_dim": 4 * _WIDTH,
    "word_embed_proj_dim": _WIDTH,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
COMPILE_S = 45  # a trial that compiles takes less
_FAMILIES = ("gpt2", "llama", "gpt_neox", "qwen2", "opt", "bert", "mistral", "phi")


def trial_workloads(device: torch.device) -> Iterator[Workload]:
    """Yield steps whose GPU time is small next to the host's."""

    def builtin(layers: int = _LAYERS, **settings: Any) -> Workload:
        shape = ModelShape(
            d_model=_WIDTH, d_ff=4 * _WIDTH, num_layers=layers, num_heads=_HEADS, num_kv_heads=_HEADS, vocab=_VOCAB
        )
        return Workload(model=shape, batch=1, context=64, device=str(device), **settings)

    def hf(family: str, precision: Precision, optimizer: Optimizer = "adamw-torch", **settings: Any) -> Workload:
        model = HuggingFace(config=family, arguments=_known_fields(family))
        return Workload(
            model=model, batch=1, context=64, device=str(device), precision=precision, optimizer=optimizer, **settings
        )

    yield builtin()
    yield builtin(precision="bf16")
    yield builtin(layers=2, precision="bf16", optimizer="adamw-fused")
    yield builtin(precision="bf16", attention="sdpa", optimizer="adamw-torch")
    yield builtin(attention="sdpa", optimizer="adamw-onelaunch")
    yield builtin(precision="bf16", attention="flash", optimizer="adamw-fused")
    yield builtin(precision="bf16", attention="sdpa", checkpoint="block", optimizer="adamw-fused")
    yield builtin(precision="bf16", attention="sdpa", optimizer="adamw-fused", compile=True)
    for family in _FAMILIES:
        yield hf(family, "bf16")
        yield hf(family, "fp32", "adamw-fused" if family in ("gpt2", "llama") else "adamw-torch")
    yield hf("llama", "bf16", attention="naive")
    yield hf("gpt2", "fp32", attention="naive")
    yield builtin(checkpoint="block")
    yield hf("gpt2", "bf16", checkpoint="block")
    yield hf("llama", "bf16", "adamw-fused", checkpoint="block")
    yield hf("llama", "bf16", mode="inference")


def _known_fields(family: str) -> tuple[tuple[str, int], ...]:
    from stepscope.step.hf import load_config

    config = load_config(HuggingFace(config=family))
    return tuple((name, value) for name, value in _CONFIG.items() if hasattr(config, name))


def measure_trial(workload: Workload, device: torch.device) -> list[HostTrial]:
    """Return a trial per phase of the step, whose steps follow each other as in training: models that take turns are a
    fifth slower, because Python and the caches of the CPU adapt to each."""
    step = build(workload, device)
    time_steps(step, 3)
    settle_heap()
    samples = time_steps(step, _STEPS)
    counts = {name: Counter[str]() for name in samples.phases_ns} if workload.compile else _count_calls(step)
    parameters = sum(1 for _ in step.module.parameters())
    return [
        HostTrial(
            model=describe_trial(workload),
            precision=workload.precision,
            optimizer=step.optimizer_name or "",
            phase=phase,
            ns=round(statistics.median(took_ns)),
            modules=counts[phase].pop("modules", 0),
            parameters=parameters,
            operations=dict(sorted(counts[phase].items())),
        )
        for phase, took_ns in samples.phases_ns.items()
    ]


def describe_trial(workload: Workload) -> str:
    """The model and what is special about its step, without its sizes."""
    checkpoint = "" if workload.checkpoint == "none" else f" checkpoint {workload.checkpoint}"
    name = workload.model.name.partition("(")[0]
    mode = "" if workload.mode == "train" else f" {workload.mode}"
    return f"{name} {workload.attention or 'default'}{' compiled' if workload.compile else ''}{checkpoint}{mode}"


def _count_calls(step: Step) -> dict[str, Counter[str]]:
    """Return, per phase, how often each operator below autograd and any module is called."""
    counts: dict[str, Counter[str]] = {}
    for name, phase in step.phases:
        counter = counts.setdefault(name, Counter())

        def count_module(_module: nn.Module, _inputs: object, counter: Counter[str] = counter) -> None:
            counter["modules"] += 1

        handle = register_module_forward_pre_hook(count_module)
        try:
            with _Counting(counter):
                phase()
        finally:
            handle.remove()
    return counts


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, counter: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._counter[str(func).removeprefix("aten.").removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))


def has_transformers() -> bool:
    from importlib.util import find_spec

    return find_spec("transformers") is not None


def try_trial(workload: Workload, device: torch.device) -> tuple[list[HostTrial], str]:
    """Return the trials, or why there are none: a version of `transformers` may lack a model."""
    try:
        return measure_trial(workload, device), ""
    except (StepscopeError, RuntimeError, TypeError, AttributeError, ImportError, ValueError) as error:
        first = (str(error).splitlines() or [""])[0]
        return [], f"{workload.model.name.partition('(')[0]}: {type(error).__name__}: {first[:160]}"
